#include "catalog/catalog.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/dtype.h"
#include "cpu/kernels.h"
#include "kernels/device_kernel.h"
#include "kernels/gfx942_forward.h"
#include "kernels/sm80_forward.h"
#include "kernels/sm90_forward.h"
#include "problem/rules.h"

namespace attn {
namespace {

constexpr uint32_t fp8_types =
    type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2) | type_bit(ATTN_F8_E4M3FNUZ);
constexpr uint32_t ggml_types = type_bit(ATTN_Q8_0) | type_bit(ATTN_Q4_0);
constexpr uint32_t float_types = type_bit(ATTN_F32) | type_bit(ATTN_F16) | type_bit(ATTN_BF16);
constexpr uint32_t all_flags = ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW | ATTN_BLOCK_MASK |
                               ATTN_ALIBI | ATTN_SINKS | ATTN_OUT_SCALE | ATTN_SPLIT_INVARIANT |
                               ATTN_KV_PREFIX_STABLE;

constexpr Limits host_forward(uint32_t more_out_types) {
  Limits limits;
  limits.q_types = float_types | fp8_types;
  limits.kv_types = float_types | fp8_types | ggml_types;
  limits.out_types = float_types | fp8_types | more_out_types;
  limits.flags = all_flags;
  limits.features = feature_all;
  return limits;
}
constexpr Limits from_to(uint32_t in, uint32_t out, uint32_t features = 0) {
  Limits limits;
  limits.q_types = in;
  limits.out_types = out;
  limits.features = features;
  return limits;
}
constexpr Limits reference_forward = host_forward(type_bit(ATTN_F64));
constexpr Limits cpu_forward = host_forward(0);
// kernels/sm80: q, k and v of one type.
constexpr Limits sm80_forward(attn_dtype type, int64_t head_dim_max, bool score) {
  Limits limits;
  limits.q_types = limits.kv_types = type_bit(type);
  limits.out_types = float_types;
  limits.head_dim_multiple = limits.head_dim_v_multiple = 8;
  limits.head_dim_max = limits.head_dim_v_max = head_dim_max;
  limits.flags =
      ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW | ATTN_SINKS | ATTN_SPLIT_INVARIANT;
  limits.features = feature_packed_q | feature_packed_kv | feature_seqlens | feature_segments;
  if (score) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap | feature_bias;
  }
  return limits;
}
constexpr Limits with_block_mask(Limits limits) {
  limits.flags |= ATTN_BLOCK_MASK;
  limits.demands |= ATTN_BLOCK_MASK;
  return limits;
}
// kernels/sm90. split_invariant costs time that only the kernels that change scores take.
constexpr Limits sm90_forward(attn_dtype type, int64_t head_dim_max, int64_t head_dim_v_max) {
  Limits limits = sm80_forward(type, head_dim_max, false);
  limits.head_dim_v_max = head_dim_v_max;
  limits.flags &= ~uint32_t{ATTN_SPLIT_INVARIANT};
  return limits;
}
constexpr Limits sm90_bias(attn_dtype type, int64_t head_dim_max) {
  return sm80_forward(type, head_dim_max, true);
}
constexpr Limits sm90_score(attn_dtype type, int64_t head_dim_max) {
  Limits limits = sm90_bias(type, head_dim_max);
  limits.features &= ~feature_bias;
  return limits;
}
// asm/gfx942: e4m3 in either form; q, k and v may differ in it.
constexpr Limits gfx942_forward(int64_t head_dim_max) {
  Limits limits;
  limits.q_types = limits.kv_types = type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E4M3FNUZ);
  limits.out_types = float_types;
  limits.head_dim_multiple = limits.head_dim_v_multiple = 16;
  limits.head_dim_max = limits.head_dim_v_max = head_dim_max;
  limits.flags = ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW | ATTN_SINKS;
  limits.features = feature_packed_q | feature_packed_kv | feature_seqlens |
                    feature_mixed_kv_types | feature_descale_tensor | feature_descale_head;
  return limits;
}
constexpr Limits host_merge = from_to(float_types, float_types, feature_negative_strides);
constexpr Limits host_quantize =
    from_to(float_types, fp8_types | ggml_types, feature_negative_strides);
constexpr Limits any_merge = from_to(float_types, float_types);
constexpr Limits any_quantize = from_to(float_types, fp8_types | ggml_types);
constexpr Limits fp8_quantize = from_to(float_types, fp8_types);

constexpr attn_backend reference = ATTN_BACKEND_REFERENCE, cpu = ATTN_BACKEND_CPU,
                       cuda = ATTN_BACKEND_CUDA, hip = ATTN_BACKEND_HIP;

// Within one operation and backend the first row that takes the problem runs it.
constexpr Kernel table[] = {
    // name, operation, backend, limits, host, device
    {"reference", Op::forward, reference, reference_forward, &reference_kernel, nullptr},
#ifdef __x86_64__
    {"cpu_avx512", Op::forward, cpu, cpu_forward, &cpu_avx512_kernel, nullptr},
    {"cpu_avx2", Op::forward, cpu, cpu_forward, &cpu_avx2_kernel, nullptr},
#endif
    {"cpu_baseline", Op::forward, cpu, cpu_forward, &cpu_baseline_kernel, nullptr},

    {"fwd_sm90_bf16_d64_short", Op::forward, cuda, sm90_forward(ATTN_BF16, 64, 64), nullptr,
     &fwd_sm90_d64_short_kernel},
    {"fwd_sm90_bf16_d64", Op::forward, cuda, sm90_forward(ATTN_BF16, 64, 64), nullptr,
     &fwd_sm90_d64_kernel},
    {"fwd_sm90_bf16_d96", Op::forward, cuda, sm90_forward(ATTN_BF16, 96, 96), nullptr,
     &fwd_sm90_d96_kernel},
    {"fwd_sm90_bf16_d128_pair", Op::forward, cuda, sm90_forward(ATTN_BF16, 128, 128), nullptr,
     &fwd_sm90_d128_pair_kernel},
    {"fwd_sm90_bf16_d128_long", Op::forward, cuda, sm90_forward(ATTN_BF16, 128, 128), nullptr,
     &fwd_sm90_d128_long_kernel},
    {"fwd_sm90_bf16_d128", Op::forward, cuda, sm90_forward(ATTN_BF16, 128, 128), nullptr,
     &fwd_sm90_d128_kernel},
    {"fwd_sm90_bf16_d192_dv128", Op::forward, cuda, sm90_forward(ATTN_BF16, 192, 128), nullptr,
     &fwd_sm90_d192_dv128_kernel},
    {"fwd_sm90_bf16_d192", Op::forward, cuda, sm90_forward(ATTN_BF16, 192, 192), nullptr,
     &fwd_sm90_d192_kernel},
    {"fwd_sm90_bf16_d256_pair", Op::forward, cuda, sm90_forward(ATTN_BF16, 256, 256), nullptr,
     &fwd_sm90_d256_pair_kernel},
    {"fwd_sm90_bf16_d256", Op::forward, cuda, sm90_forward(ATTN_BF16, 256, 256), nullptr,
     &fwd_sm90_d256_kernel},
    {"fwd_sm90_bf16_d64_mask", Op::forward, cuda, with_block_mask(sm90_forward(ATTN_BF16, 64, 64)),
     nullptr, &fwd_sm90_d64_mask_kernel},
    {"fwd_sm90_bf16_d128_mask", Op::forward, cuda,
     with_block_mask(sm90_forward(ATTN_BF16, 128, 128)), nullptr, &fwd_sm90_d128_mask_kernel},
    {"fwd_sm90_bf16_d256_mask", Op::forward, cuda,
     with_block_mask(sm90_forward(ATTN_BF16, 256, 256)), nullptr, &fwd_sm90_d256_mask_kernel},
    {"fwd_sm90_bf16_d64_score", Op::forward, cuda, sm90_score(ATTN_BF16, 64), nullptr,
     &fwd_sm90_d64_score_kernel},
    {"fwd_sm90_bf16_d128_score", Op::forward, cuda, sm90_score(ATTN_BF16, 128), nullptr,
     &fwd_sm90_d128_score_kernel},
    {"fwd_sm90_bf16_d256_score", Op::forward, cuda, sm90_score(ATTN_BF16, 256), nullptr,
     &fwd_sm90_d256_score_kernel},
    {"fwd_sm90_bf16_d64_bias", Op::forward, cuda, sm90_bias(ATTN_BF16, 64), nullptr,
     &fwd_sm90_d64_bias_kernel},
    {"fwd_sm90_bf16_d128_bias", Op::forward, cuda, sm90_bias(ATTN_BF16, 128), nullptr,
     &fwd_sm90_d128_bias_kernel},
    {"fwd_sm90_bf16_d256_bias", Op::forward, cuda, sm90_bias(ATTN_BF16, 256), nullptr,
     &fwd_sm90_d256_bias_kernel},
    {"fwd_sm90_f16_d64_short", Op::forward, cuda, sm90_forward(ATTN_F16, 64, 64), nullptr,
     &fwd_sm90_d64_short_kernel},
    {"fwd_sm90_f16_d64", Op::forward, cuda, sm90_forward(ATTN_F16, 64, 64), nullptr,
     &fwd_sm90_d64_kernel},
    {"fwd_sm90_f16_d96", Op::forward, cuda, sm90_forward(ATTN_F16, 96, 96), nullptr,
     &fwd_sm90_d96_kernel},
    {"fwd_sm90_f16_d128_pair", Op::forward, cuda, sm90_forward(ATTN_F16, 128, 128), nullptr,
     &fwd_sm90_d128_pair_kernel},
    {"fwd_sm90_f16_d128_long", Op::forward, cuda, sm90_forward(ATTN_F16, 128, 128), nullptr,
     &fwd_sm90_d128_long_kernel},
    {"fwd_sm90_f16_d128", Op::forward, cuda, sm90_forward(ATTN_F16, 128, 128), nullptr,
     &fwd_sm90_d128_kernel},
    {"fwd_sm90_f16_d192_dv128", Op::forward, cuda, sm90_forward(ATTN_F16, 192, 128), nullptr,
     &fwd_sm90_d192_dv128_kernel},
    {"fwd_sm90_f16_d192", Op::forward, cuda, sm90_forward(ATTN_F16, 192, 192), nullptr,
     &fwd_sm90_d192_kernel},
    {"fwd_sm90_f16_d256_pair", Op::forward, cuda, sm90_forward(ATTN_F16, 256, 256), nullptr,
     &fwd_sm90_d256_pair_kernel},
    {"fwd_sm90_f16_d256", Op::forward, cuda, sm90_forward(ATTN_F16, 256, 256), nullptr,
     &fwd_sm90_d256_kernel},
    {"fwd_sm90_f16_d64_mask", Op::forward, cuda, with_block_mask(sm90_forward(ATTN_F16, 64, 64)),
     nullptr, &fwd_sm90_d64_mask_kernel},
    {"fwd_sm90_f16_d128_mask", Op::forward, cuda, with_block_mask(sm90_forward(ATTN_F16, 128, 128)),
     nullptr, &fwd_sm90_d128_mask_kernel},
    {"fwd_sm90_f16_d256_mask", Op::forward, cuda, with_block_mask(sm90_forward(ATTN_F16, 256, 256)),
     nullptr, &fwd_sm90_d256_mask_kernel},
    {"fwd_sm90_f16_d64_score", Op::forward, cuda, sm90_score(ATTN_F16, 64), nullptr,
     &fwd_sm90_d64_score_kernel},
    {"fwd_sm90_f16_d128_score", Op::forward, cuda, sm90_score(ATTN_F16, 128), nullptr,
     &fwd_sm90_d128_score_kernel},
    {"fwd_sm90_f16_d256_score", Op::forward, cuda, sm90_score(ATTN_F16, 256), nullptr,
     &fwd_sm90_d256_score_kernel},
    {"fwd_sm90_f16_d64_bias", Op::forward, cuda, sm90_bias(ATTN_F16, 64), nullptr,
     &fwd_sm90_d64_bias_kernel},
    {"fwd_sm90_f16_d128_bias", Op::forward, cuda, sm90_bias(ATTN_F16, 128), nullptr,
     &fwd_sm90_d128_bias_kernel},
    {"fwd_sm90_f16_d256_bias", Op::forward, cuda, sm90_bias(ATTN_F16, 256), nullptr,
     &fwd_sm90_d256_bias_kernel},
    {"fwd_sm80_bf16_d64", Op::forward, cuda, sm80_forward(ATTN_BF16, 64, false), nullptr,
     &fwd_sm80_d64_kernel},
    {"fwd_sm80_bf16_d64_score", Op::forward, cuda, sm80_forward(ATTN_BF16, 64, true), nullptr,
     &fwd_sm80_d64_score_kernel},
    {"fwd_sm80_bf16_d64_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 64, false)), nullptr, &fwd_sm80_d64_mask_kernel},
    {"fwd_sm80_bf16_d64_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 64, true)), nullptr, &fwd_sm80_d64_score_mask_kernel},
    {"fwd_sm80_bf16_d128", Op::forward, cuda, sm80_forward(ATTN_BF16, 128, false), nullptr,
     &fwd_sm80_d128_kernel},
    {"fwd_sm80_bf16_d128_score", Op::forward, cuda, sm80_forward(ATTN_BF16, 128, true), nullptr,
     &fwd_sm80_d128_score_kernel},
    {"fwd_sm80_bf16_d128_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 128, false)), nullptr, &fwd_sm80_d128_mask_kernel},
    {"fwd_sm80_bf16_d128_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 128, true)), nullptr,
     &fwd_sm80_d128_score_mask_kernel},
    {"fwd_sm80_bf16_d256", Op::forward, cuda, sm80_forward(ATTN_BF16, 256, false), nullptr,
     &fwd_sm80_d256_kernel},
    {"fwd_sm80_bf16_d256_score", Op::forward, cuda, sm80_forward(ATTN_BF16, 256, true), nullptr,
     &fwd_sm80_d256_score_kernel},
    {"fwd_sm80_bf16_d256_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 256, false)), nullptr, &fwd_sm80_d256_mask_kernel},
    {"fwd_sm80_bf16_d256_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_BF16, 256, true)), nullptr,
     &fwd_sm80_d256_score_mask_kernel},
    {"fwd_sm80_f16_d64", Op::forward, cuda, sm80_forward(ATTN_F16, 64, false), nullptr,
     &fwd_sm80_d64_kernel},
    {"fwd_sm80_f16_d64_score", Op::forward, cuda, sm80_forward(ATTN_F16, 64, true), nullptr,
     &fwd_sm80_d64_score_kernel},
    {"fwd_sm80_f16_d64_mask", Op::forward, cuda, with_block_mask(sm80_forward(ATTN_F16, 64, false)),
     nullptr, &fwd_sm80_d64_mask_kernel},
    {"fwd_sm80_f16_d64_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_F16, 64, true)), nullptr, &fwd_sm80_d64_score_mask_kernel},
    {"fwd_sm80_f16_d128", Op::forward, cuda, sm80_forward(ATTN_F16, 128, false), nullptr,
     &fwd_sm80_d128_kernel},
    {"fwd_sm80_f16_d128_score", Op::forward, cuda, sm80_forward(ATTN_F16, 128, true), nullptr,
     &fwd_sm80_d128_score_kernel},
    {"fwd_sm80_f16_d128_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_F16, 128, false)), nullptr, &fwd_sm80_d128_mask_kernel},
    {"fwd_sm80_f16_d128_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_F16, 128, true)), nullptr, &fwd_sm80_d128_score_mask_kernel},
    {"fwd_sm80_f16_d256", Op::forward, cuda, sm80_forward(ATTN_F16, 256, false), nullptr,
     &fwd_sm80_d256_kernel},
    {"fwd_sm80_f16_d256_score", Op::forward, cuda, sm80_forward(ATTN_F16, 256, true), nullptr,
     &fwd_sm80_d256_score_kernel},
    {"fwd_sm80_f16_d256_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_F16, 256, false)), nullptr, &fwd_sm80_d256_mask_kernel},
    {"fwd_sm80_f16_d256_score_mask", Op::forward, cuda,
     with_block_mask(sm80_forward(ATTN_F16, 256, true)), nullptr, &fwd_sm80_d256_score_mask_kernel},

    {"fwd_gfx942_fp8_d64", Op::forward, hip, gfx942_forward(64), nullptr,
     &fwd_gfx942_fp8_d64_kernel},
    {"fwd_gfx942_fp8_d128", Op::forward, hip, gfx942_forward(128), nullptr,
     &fwd_gfx942_fp8_d128_kernel},
    {"fwd_gfx942_fp8_d64_mask", Op::forward, hip, with_block_mask(gfx942_forward(64)), nullptr,
     &fwd_gfx942_fp8_d64_mask_kernel},
    {"fwd_gfx942_fp8_d128_mask", Op::forward, hip, with_block_mask(gfx942_forward(128)), nullptr,
     &fwd_gfx942_fp8_d128_mask_kernel},

    {"merge_reference", Op::merge, reference, host_merge, &merge_reference_kernel, nullptr},
    {"merge_cpu", Op::merge, cpu, host_merge, &merge_cpu_kernel, nullptr},
    {"merge_sm80", Op::merge, cuda, any_merge, nullptr, &merge_sm80_kernel},
    {"merge_gfx942", Op::merge, hip, any_merge, nullptr, &merge_gfx942_kernel},

    {"quantize_reference", Op::quantize, reference, host_quantize, &quantize_reference_kernel,
     nullptr},
    {"quantize_cpu", Op::quantize, cpu, host_quantize, &quantize_cpu_kernel, nullptr},
    {"quantize_sm80", Op::quantize, cuda, any_quantize, nullptr, &quantize_sm80_kernel},
    {"convert_gfx942", Op::quantize, hip, fp8_quantize, nullptr, &convert_gfx942_kernel},

    {"mask_sm80", Op::block_mask, cuda, Limits{}, nullptr, &mask_sm80_kernel},
};
std::atomic<uint64_t> launches[std::size(table)];

struct FeatureName {
  Feature feature;
  const char* name;
};
constexpr FeatureName feature_names[] = {
    {feature_softcap, "softcap"},
    {feature_bias, "bias"},
    {feature_packed_q, "packed q"},
    {feature_packed_kv, "packed K/V"},
    {feature_paged_kv, "paged K/V"},
    {feature_seqlens, "seqlens"},
    {feature_segments, "several segments"},
    {feature_mixed_kv_types, "k and v of different types"},
    {feature_descale_tensor, "descale per tensor"},
    {feature_descale_head, "descale per head"},
    {feature_descale_block, "descale per block of keys"},
    {feature_any_block_size, "mask blocks other than 64 and 128"},
    {feature_any_stride, "strides that are not multiples of 16 bytes"},
    {feature_fixed_split, "fixed_split"},
    {feature_negative_strides, "negative strides"},
};
struct FlagName {
  attn_flag flag;
  const char* name;
};
constexpr FlagName flag_names[] = {
    {ATTN_CAUSAL, "causal"},       {ATTN_CAUSAL_TOP_LEFT, "causal_top_left"},
    {ATTN_WINDOW, "window"},       {ATTN_BLOCK_MASK, "block mask"},
    {ATTN_ALIBI, "ALiBi"},         {ATTN_SINKS, "sinks"},
    {ATTN_OUT_SCALE, "out_scale"}, {ATTN_SPLIT_INVARIANT, "split_invariant"},
    // ATTN_KV_PREFIX_STABLE is a promise, which a kernel need not use.
};

uint32_t descale_feature(attn_descale_kind kind) {
  switch (kind) {
    case ATTN_DESCALE_TENSOR:
      return feature_descale_tensor;
    case ATTN_DESCALE_HEAD:
      return feature_descale_head;
    case ATTN_DESCALE_BLOCK:
      return feature_descale_block;
    case ATTN_DESCALE_NONE:
      break;
  }
  return 0;
}

bool aligned_strides(attn_dtype type, const attn_strides& stride) {
  return dtype_bytes(type, stride.batch) % 16 == 0 && dtype_bytes(type, stride.seq) % 16 == 0 &&
         dtype_bytes(type, stride.head) % 16 == 0;
}

uint32_t needed_features(const Problem& p) {
  uint32_t needed = descale_feature(p.q_descale);
  if (p.softcap > 0) needed |= feature_softcap;
  if (p.bias_type != ATTN_DTYPE_NONE) needed |= feature_bias;
  if (p.q_layout == ATTN_PACKED) needed |= feature_packed_q;
  if (p.num_segments > 1) needed |= feature_segments;
  if (p.fixed_split > 0) needed |= feature_fixed_split;
  const auto standard = [](int32_t size) { return size == 64 || size == 128; };
  if (p.has(ATTN_BLOCK_MASK) && !(standard(p.block_q) && standard(p.block_k)))
    needed |= feature_any_block_size;
  bool negative = is_negative(p.q_stride) || is_negative(p.out_stride) ||
                  (p.bias_type != ATTN_DTYPE_NONE &&
                   std::any_of(p.bias_stride, p.bias_stride + 4, [](int64_t s) { return s < 0; }));
  bool aligned = aligned_strides(p.q_type, p.q_stride) && aligned_strides(p.out_type, p.out_stride);
  for (const attn_segment& s : p.segment) {
    if (s.layout == ATTN_PACKED) needed |= feature_packed_kv;
    if (s.layout == ATTN_PAGED) needed |= feature_paged_kv;
    if (s.has_seqlens) needed |= feature_seqlens;
    if (s.k_type != s.v_type || s.k_type != p.segment[0].k_type) needed |= feature_mixed_kv_types;
    needed |= descale_feature(s.k_descale) | descale_feature(s.v_descale);
    negative = negative || is_negative(s.k_stride) || is_negative(s.v_stride);
    aligned =
        aligned && aligned_strides(s.k_type, s.k_stride) && aligned_strides(s.v_type, s.v_stride);
  }
  if (!aligned) needed |= feature_any_stride;
  if (negative) needed |= feature_negative_strides;
  return needed;
}

std::string dim_reason(const char* name, int64_t dim, int64_t multiple, int64_t max) {
  if (dim % multiple != 0) return join(name, " ", dim, " is not a multiple of ", multiple);
  if (dim > max) return join(name, " ", dim, " is above ", max);
  return "";
}

}  // namespace

const char* op_name(Op op) {
  switch (op) {
    case Op::forward:
      return "forward";
    case Op::merge:
      return "merge";
    case Op::quantize:
      return "quantize";
    case Op::kv_append:
      return "kv_append";
    case Op::block_mask:
      return "block_mask";
  }
  return "";
}

std::span<const Kernel> catalog() {
  return table;
}

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : table)
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

void count_launch(const Kernel& kernel) {
  launches[&kernel - table].fetch_add(1, std::memory_order_relaxed);
}
uint64_t launch_count(const Kernel& kernel) {
  return launches[&kernel - table].load(std::memory_order_relaxed);
}

std::string decline(const Kernel& kernel, const Problem& p) {
  const Limits& can = kernel.limits;
  const auto takes = [](uint32_t types, attn_dtype type) { return (types & type_bit(type)) != 0; };
  if (!takes(can.q_types, p.q_type)) return join("q type ", dtype_name(p.q_type));
  if (!takes(can.out_types, p.out_type)) return join("out type ", dtype_name(p.out_type));
  for (const attn_segment& s : p.segment) {
    if (!takes(can.kv_types, s.k_type)) return join("k type ", dtype_name(s.k_type));
    if (!takes(can.kv_types, s.v_type)) return join("v type ", dtype_name(s.v_type));
  }
  std::string reason = dim_reason("head_dim", p.head_dim, can.head_dim_multiple, can.head_dim_max);
  if (reason.empty())
    reason = dim_reason("head_dim_v", p.head_dim_v, can.head_dim_v_multiple, can.head_dim_v_max);
  if (!reason.empty()) return reason;
  for (const FlagName& f : flag_names) {
    if (p.has(f.flag) && !(can.flags & f.flag)) return f.name;
    if (!p.has(f.flag) && (can.demands & f.flag)) return join("no ", f.name);
  }
  const uint32_t missing = needed_features(p) & ~can.features;
  for (const FeatureName& f : feature_names)
    if (missing & f.feature) return f.name;
  return "";
}

}  // namespace attn
