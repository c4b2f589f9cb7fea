// Rows of out and lse that see no key.
#pragma once
#include "../shared/types.h"
#include "element.cuh"
#include "lengths.cuh"

namespace attn::device {

// A row of out that begins at element `at` becomes 0, and lse[lse_at] is what is given. By all
// lanes of a warp.
template <class Kernarg>
__device__ __forceinline__ void store_no_keys(const Kernarg& a, long long at, long long lse_at,
                                              float lse) {
  const int lane = threadIdx.x % 32;
  const int element_bytes = a.out_type == attn_element_f32    ? 4
                            : a.out_type <= attn_element_bf16 ? 2
                                                              : 1;
  uint4* chunks = reinterpret_cast<uint4*>(static_cast<char*>(a.out) + at * element_bytes);
  for (int i = lane; i < a.head_dim_v * element_bytes / 16; i += 32)
    chunks[i] = make_uint4(0, 0, 0, 0);
  if (a.lse && lane == 0) a.lse[lse_at] = lse;
}

// Packed q: rows that belong to no sequence become 0, their lse -inf. By all lanes of
// a warp, of `workers` that share them. Those behind the last sequence and in front of the first
// are everybody's, for there can be many; between two there are some only where lengths are wrong,
// and one warp has them.
template <class Row, class Kernarg>
__device__ __forceinline__ void store_rows_of_nobody(const Kernarg& a, Row worker, Row workers) {
  const auto span = [&](Row b) {
    return packed_span(a.cu_seqlens_q, int(b), a.total_q, a.seqlen_q);
  };
  // In front of sequence b, and for 0 behind the last one too.
#pragma unroll 1
  for (Row b = 0; b < a.batch; b += b == 0 ? worker + 1 : workers) {
    const Span before = span((b == 0 ? a.batch : b) - 1);
    const Row total = Row(a.total_q), begin = Row(before.begin) + before.length,
              end = Row(span(b).begin);
    const Row rows = b == 0 ? min(total - begin + end, total) : end > begin ? end - begin : 0;
#pragma unroll 1
    for (Row row = b == 0 ? worker : 0; row < rows; row += b == 0 ? workers : 1) {
      const Row at = begin + row < total ? begin + row : begin + row - total;
#pragma unroll 1
      for (int h = 0; h < a.heads_q; ++h)
        store_no_keys(a, at * a.out_stride[1] + h * a.out_stride[2], h * a.total_q + at,
                      -infinity());
    }
  }
}

}  // namespace attn::device
