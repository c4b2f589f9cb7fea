// What problems of all operations have in common, so that the same code chooses kernels for them,
// makes plans of them and runs these.
#pragma once
#include <cstdint>
#include <string>

#include "attn/attn.h"
#include "core/types.h"

namespace attn {

enum class Op { forward, backward, merge, quantize, kv_append, kv_roll, block_mask };
const char* op_name(Op op);

// What a problem asks for beyond types, sizes and attn_flag.
enum Feature : uint32_t {
  feature_softcap = 1 << 0,
  feature_bias = 1 << 1,
  feature_packed_q = 1 << 2,
  feature_packed_kv = 1 << 3,
  feature_paged_kv = 1 << 4,
  feature_seqlens = 1 << 5,
  feature_segments = 1 << 6,        // more than one
  feature_mixed_kv_types = 1 << 7,  // k and v, or segments, of different types
  feature_descale_tensor = 1 << 8,
  feature_descale_head = 1 << 9,
  feature_descale_block = 1 << 10,
  feature_any_block_size = 1 << 11,  // block masks beyond 64 and 128
  feature_any_stride = 1 << 12,      // else bases and outer strides are multiples of 16 bytes;
  feature_fixed_split = 1 << 13,
  feature_negative_strides = 1 << 14,
  feature_tree = 1 << 15,
  feature_any_ggml_stride = 1 << 16,  // of ggml's blocks: but for those of heads
  feature_f16_bias = 1 << 17,         // under q of another type
  // What a shared segment has as arrays, which are those of a batch of 1.
  feature_shared_lengths = 1 << 18,
  feature_shared_pages = 1 << 19,
  feature_shared_descales = 1 << 20,  // per head or block
  feature_kv_begin = 1 << 21,
  feature_slots = 1 << 22,
  feature_causal_sequences = 1 << 23,
  // Latent caches and lists of keys.
  feature_v_in_k = 1 << 24,
  feature_lists = 1 << 25,         // of keys
  feature_no_positions = 1 << 26,  // attn_segment.no_positions
  feature_packed_mask = 1 << 27,   // a block mask with packed q
  // Shards of a sequence.
  feature_key_positions = 1 << 28,  // has_key_start
  feature_ready = 1 << 29,
  feature_all = (1u << 30) - 1,
  // What only parts of composed kernels ask for.
  feature_key_parts = 1u << 30,    // Problem::key_parts
  feature_lse_by_head = 1u << 31,  // MergeProblem::by_head
};

// What a kernel must take to run a problem: the counterpart of Limits in kernels/kernel.h.
struct Needs {
  attn_dtype in_type = ATTN_DTYPE_NONE;   // of q, a merge's parts, what is quantized
  attn_dtype out_type = ATTN_DTYPE_NONE;  // NONE: there is none
  uint32_t k_types = 0, v_types = 0;      // type_bit, of the segments
  uint32_t flags = 0;                     // attn_flag
  uint32_t features = 0;                  // Feature
  int64_t head_dim = 0, head_dim_v = 0;   // these and the following are 0 where there is none
  int64_t seqlen_q = 0;                   // capacity
  int64_t group = 0;                      // query heads per K/V head
  int64_t page_size = 0;                  // tokens; the greatest that divides those of all segments
};

struct AnyProblem {
  explicit AnyProblem(Op op) : op(op) {}
  virtual ~AnyProblem() = default;
  AnyProblem(const AnyProblem&) = delete;
  AnyProblem& operator=(const AnyProblem&) = delete;

  const Op op;
  Needs needs;
  std::string kernel_name;  // "" = the plan chooses
  bool no_batch = false;    // no entries: there is nothing to do, whatever a kernel's limits are
};

}  // namespace attn
