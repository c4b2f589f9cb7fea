// Block masks in host memory: the builders that attn_block_mask_from_* call, whose rules attn.h
// states.
#pragma once
#include <cstdint>
#include <vector>

#include "core/ceil_div.h"
#include "core/interrupt.h"

namespace attn {

// After make_mask_shape: batch and heads are at least 1, and the number of cells fits in 31 bits.
struct MaskShape : attn_block_mask_shape {
  MaskShape() : attn_block_mask_shape{} {}
  int64_t rows() const { return ceil_div(seqlen_q, block_q); }
  int64_t columns() const { return ceil_div(seqlen_kv, block_k); }
  // The products of rows and columns first: without one of them the others may be any number.
  int64_t cells() const { return batch * heads * (rows() * columns()); }
  int64_t row_words() const { return ceil_div(block_k, 32); }
  int64_t block_words() const { return block_q * row_words(); }
};
// `host_memory`: of reference and cpu, which take blocks of any size.
Status make_mask_shape(const attn_block_mask_shape* in, bool host_memory, MaskShape* out);

struct HostMask {
  MaskShape shape;
  std::vector<uint8_t> kinds;  // [batch, heads, rows, columns]
  std::vector<int32_t> index;  // the same grid, -1 where not PARTIAL
  std::vector<uint32_t> bits;  // [partials, block_q, row_words]; no two blocks are equal
  int64_t partials() const { return int64_t(bits.size()) / shape.block_words(); }
};

// Each ends early where the interrupt stops it.
Status mask_from_dense(const MaskShape& shape, const uint8_t* dense, Interrupt& interrupt,
                       HostMask* out);
Status mask_from_documents(const MaskShape& shape, const int64_t* lengths, int64_t num_documents,
                           int32_t causal, Interrupt& interrupt, HostMask* out);
Status mask_from_window(const MaskShape& shape, int64_t left, int64_t right, int64_t global_tokens,
                        int64_t prefix_tokens, Interrupt& interrupt, HostMask* out);
Status mask_from_intervals(const MaskShape& shape, const int32_t* intervals, int32_t num_intervals,
                           Interrupt& interrupt, HostMask* out);
Status mask_from_kinds(const MaskShape& shape, const uint8_t* kinds, const int32_t* index,
                       const uint32_t* bits, int64_t num_partials, Interrupt& interrupt,
                       HostMask* out);
Status mask_from_lists(const MaskShape& shape, const int32_t* lists, int64_t list_size,
                       Interrupt& interrupt, HostMask* out);
Status combine_masks(const HostMask& a, const HostMask& b, int32_t combine, Interrupt& interrupt,
                     HostMask* out);

// Whether num_intervals is 1 or 2.
Status check_num_intervals(int32_t num_intervals);
// Whether b has a's grid, its batch and heads aside.
Status check_same_grid(const MaskShape& a, const MaskShape& b);

}  // namespace attn
