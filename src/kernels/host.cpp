// The forward and backward kernels of reference and cpu.
#include "cpu/kernels.h"
#include "kernels/families.h"
#include "kernels/limits.h"

namespace attn {
namespace {

constexpr Limits limits(uint32_t out_types) {
  return {.in_types = q_types,
          .kv_types = kv_types,
          .out_types = out_types,
          .flags = forward_flags | ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_OUT_SCALE |
                   ATTN_SPLIT_INVARIANT | ATTN_BIAS_SLOPES | ATTN_FP8_PRECISE |
                   ATTN_QUERY_POSITIONS | ATTN_ACCUMULATE,
          .features = feature_all & ~feature_slots};
}

constexpr Kernel cpu_row(const char* name, const HostKernel* kernel) {
  return {.name = name,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CPU,
          .limits = limits(q_types),
          .host = kernel};
}

constinit const Kernel rows[] = {
    {.name = "reference",
     .op = Op::forward,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = limits(q_types | type_bit(ATTN_F64)),
     .host = &reference_kernel},
#ifdef __x86_64__
    cpu_row("cpu_avx512", &cpu_avx512_kernel),
    cpu_row("cpu_avx2", &cpu_avx2_kernel),
#endif
    cpu_row("cpu_baseline", &cpu_baseline_kernel),
};

// Of backward, out is the widest type of the gradients and of forward's out.
constexpr Limits backward_limits(uint32_t out_types) {
  return {.in_types = float_types,
          .kv_types = float_types,
          .out_types = out_types,
          .flags = forward_flags | ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_BIAS_SLOPES,
          .features = forward_features | feature_softcap | feature_bias | feature_f16_bias |
                      feature_any_block_size | feature_any_stride | feature_negative_strides |
                      feature_kv_begin,
          .floats_as_q = true};
}

constexpr Kernel backward_cpu_row(const char* name, const HostKernel* kernel) {
  return {.name = name,
          .op = Op::backward,
          .backend = ATTN_BACKEND_CPU,
          .limits = backward_limits(float_types),
          .host = kernel};
}

constinit const Kernel backward_rows[] = {
    {.name = "bwd_reference",
     .op = Op::backward,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = backward_limits(float_types | type_bit(ATTN_F64)),
     .host = &backward_reference_kernel},
#ifdef __x86_64__
    backward_cpu_row("bwd_cpu_avx512", &backward_avx512_kernel),
    backward_cpu_row("bwd_cpu_avx2", &backward_avx2_kernel),
#endif
    backward_cpu_row("bwd_cpu_baseline", &backward_baseline_kernel),
};

}  // namespace

std::span<const Kernel> host_forward_rows() {
  return rows;
}
std::span<const Kernel> host_backward_rows() {
  return backward_rows;
}

}  // namespace attn
