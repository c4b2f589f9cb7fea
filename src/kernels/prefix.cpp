// The kernels prefix_*: attention over segments that the batch shares, composed of other kernels
// (plan/prefix.h). What they take here is what the composition allows; their parts decide the
// rest.
#include "kernels/families.h"
#include "kernels/limits.h"

namespace attn {
namespace {

constexpr Kernel row(const char* name, attn_backend backend) {
  return {.name = name,
          .op = Op::forward,
          .backend = backend,
          .limits = {.in_types = q_types,
                     .kv_types = kv_types,
                     .out_types = float_types,  // of merge_*
                     .flags = ATTN_CAUSAL | ATTN_WINDOW | ATTN_SINKS | ATTN_SPLIT_INVARIANT |
                              ATTN_FP8_PRECISE,
                     // Not those by which a query's result depends on its sequence's length or on
                     // its place in the batch.
                     .features = feature_all &
                                 ~(feature_bias | feature_f16_bias | feature_packed_q |
                                   feature_fixed_split | feature_any_block_size | feature_kv_begin |
                                   feature_slots | feature_causal_sequences | feature_lists |
                                   feature_no_positions | feature_key_positions | feature_ready)},
          .composed = Composed::prefix};
}

constinit const Kernel rows[] = {
    row("prefix_cpu", ATTN_BACKEND_CPU),
    row("prefix_cuda", ATTN_BACKEND_CUDA),
    row("prefix_gfx942", ATTN_BACKEND_HIP),
};

}  // namespace

std::span<const Kernel> prefix_rows() {
  return rows;
}

}  // namespace attn
