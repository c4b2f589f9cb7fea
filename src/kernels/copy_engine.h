// Tensors as CUDA's copy engine reads them.
#pragma once
#include <algorithm>

#include "kernels/kernel.h"
#include "kernels/shared/tensor_map.h"

namespace attn {

static_assert(sizeof(attn_tensor_map) == tensor_map_bytes);

// Rows that the copy engine can count.
constexpr int64_t max_rows = (int64_t{1} << 31) - 1;

// The copy engine takes no stride of 0 between entries, nor one of 2^40 bytes. size: seq, head,
// batch.
inline Status check_strides(const char* name, const attn_strides& s, const int64_t (&size)[3]) {
  const int64_t stride[] = {s.seq, s.head, s.batch};
  for (int i = 0; i < 3; ++i) {
    if (size[i] > 1 && (stride[i] <= 0 || stride[i] >= int64_t{1} << 39))
      return unsupported(name, ": stride ", stride[i], "; accepted: above 0, below 2^39");
  }
  return {};
}

inline Status check_copy_engine(const DeviceInfo& device) {
  if (device.tensor_maps) return {};
  return unsupported("the driver has no cuTensorMapEncodeTiled of CUDA 12.0");
}

// K and V as TMA (the copy engine) sees them: consecutive rows, repeated `batch` times.
struct Extents {
  int64_t rows, batch;
};
inline Extents extents(const Problem& p, const attn_segment& s) {
  if (s.layout == ATTN_PAGED) return {s.page_size, s.num_pages};
  if (s.layout == ATTN_PACKED) return {s.total, 1};
  return {s.seqlen, p.batch};
}
inline Status check_copied(const Problem& p, const attn_segment& s) {
  if (s.layout == ATTN_PACKED && s.total > max_rows)
    return unsupported("total is ", s.total, "; accepted: up to ", max_rows);
  if (s.shared && s.layout == ATTN_PADDED)
    return unsupported(
        "a shared segment with padded K/V, a stride of 0 between sequences; accepted "
        "from TMA: pages");
  const Extents size = extents(p, s);
  ATTN_TRY(check_strides("k", s.k_stride, {size.rows, p.heads_kv, size.batch}));
  return check_strides("v", s.v_stride, {size.rows, p.heads_kv, size.batch});
}

// Boxes of `columns` columns, at most 128 bytes, of box_rows rows. Maps of empty tensors are never
// used; the driver wants sizes above 0.
inline TensorMap tensor_map(int element_bytes, int64_t head_dim, int64_t rows, int64_t heads,
                            int64_t batch, const attn_strides& stride, int columns, int box_rows,
                            int l2_bytes = 256) {
  return {.rank = 4,
          .element_bytes = element_bytes,
          .size = {head_dim, std::max<int64_t>(1, rows), heads, std::max<int64_t>(1, batch)},
          .stride = {element_bytes * stride.seq, element_bytes * stride.head,
                     element_bytes * stride.batch},
          .box = {columns, box_rows, 1, 1},
          .l2_bytes = l2_bytes};
}

}  // namespace attn
