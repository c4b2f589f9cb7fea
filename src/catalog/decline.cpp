// Why a kernel does not take a problem.
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "kernels/limits.h"

namespace attn {
namespace {

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
    {feature_any_ggml_stride, "strides of ggml's blocks that are not multiples of 16 bytes"},
    {feature_fixed_split, "fixed_split"},
    {feature_negative_strides, "negative strides"},
    {feature_tree, "tree mask"},
    {feature_f16_bias, "bias of f16 under q of another type"},
};
struct FlagName {
  attn_flag flag;
  const char* name;
};
constexpr FlagName flag_names[] = {
    {ATTN_CAUSAL, "causal"},
    {ATTN_CAUSAL_TOP_LEFT, "causal_top_left"},
    {ATTN_WINDOW, "window"},
    {ATTN_BLOCK_MASK, "block mask"},
    {ATTN_ALIBI, "ALiBi"},
    {ATTN_SINKS, "sinks"},
    {ATTN_OUT_SCALE, "out_scale"},
    {ATTN_SPLIT_INVARIANT, "split_invariant"},
    {ATTN_BIAS_SLOPES, "bias_slopes"},
    {ATTN_FP8_PRECISE, "fp8_precise"},
};

struct SizeName {
  const char* name;
  int64_t Needs::* size;
  Sizes Limits::* taken;
};
constexpr SizeName size_names[] = {
    {"head_dim", &Needs::head_dim, &Limits::head_dim},
    {"head_dim_v", &Needs::head_dim_v, &Limits::head_dim_v},
    {"seqlen_q", &Needs::seqlen_q, &Limits::seqlen_q},
    {"heads_q / heads_kv", &Needs::group, &Limits::group},
    {"page_size", &Needs::page_size, &Limits::page_size},
};

// The first of `types` that is not among those taken.
std::string missing_type(const char* name, uint32_t types, uint32_t taken) {
  for (int type = ATTN_F32; type < end_of_dtypes; ++type)
    if (types & ~taken & type_bit(attn_dtype(type)))
      return join(name, " type ", dtype_name(attn_dtype(type)));
  return "";
}

// Types of K and V that are taken under q of a type.
uint32_t kv_types_beside(const Limits& can, attn_dtype q) {
  return can.floats_as_q ? can.kv_types & (~float_types | type_bit(q)) : can.kv_types;
}

std::string decline_type(const Kernel& kernel, const Needs& needs) {
  const Limits& can = kernel.limits;
  const bool forward = kernel.op == Op::forward;
  if (needs.in_type != ATTN_DTYPE_NONE && !(can.in_types & type_bit(needs.in_type)))
    return join(forward ? "q" : "input", " type ", dtype_name(needs.in_type));
  if (needs.out_type != ATTN_DTYPE_NONE && !(can.out_types & type_bit(needs.out_type)))
    return join(forward ? "out" : "output", " type ", dtype_name(needs.out_type));
  if (needs.k_types & ~can.kv_types) return missing_type("k", needs.k_types, can.kv_types);
  if (needs.v_types & ~can.kv_types) return missing_type("v", needs.v_types, can.kv_types);
  const uint32_t taken = kv_types_beside(can, needs.in_type);
  std::string other = missing_type("k", needs.k_types, taken);
  if (other.empty()) other = missing_type("v", needs.v_types, taken);
  return other.empty() ? "" : join(other, " next to q of ", dtype_name(needs.in_type));
}

std::string decline_size(const SizeName& name, const Limits& can, const Needs& needs) {
  const int64_t size = needs.*name.size;
  const Sizes& taken = can.*name.taken;
  if (size % taken.multiple != 0)
    return join(name.name, " ", size, " is not a multiple of ", taken.multiple);
  return size > taken.max ? join(name.name, " ", size, " is above ", taken.max) : "";
}

}  // namespace

const char* feature_name(Feature feature) {
  for (const FeatureName& f : feature_names)
    if (f.feature == feature) return f.name;
  return "";
}
const char* flag_name(attn_flag flag) {
  for (const FlagName& f : flag_names)
    if (f.flag == flag) return f.name;
  return "";
}

bool takes_types(const Kernel& kernel, const Needs& needs) {
  const Limits& can = kernel.limits;
  const auto among = [](attn_dtype type, uint32_t taken) {
    return type == ATTN_DTYPE_NONE || (type_bit(type) & taken);
  };
  return among(needs.in_type, can.in_types) && among(needs.out_type, can.out_types) &&
         !((needs.k_types | needs.v_types) & ~kv_types_beside(can, needs.in_type)) &&
         !(needs.features & ~can.features & feature_mixed_kv_types);
}

bool takes_head_dims(const Kernel& kernel, const Needs& needs) {
  for (const SizeName& s : size_names)
    if (s.size == &Needs::head_dim || s.size == &Needs::head_dim_v)
      if (!decline_size(s, kernel.limits, needs).empty()) return false;
  return true;
}

std::string decline(const Kernel& kernel, const Needs& needs) {
  const Limits& can = kernel.limits;
  if (std::string reason = decline_type(kernel, needs); !reason.empty()) return reason;
  for (const SizeName& s : size_names)
    if (std::string reason = decline_size(s, can, needs); !reason.empty()) return reason;
  for (const FlagName& f : flag_names) {
    if (needs.flags & f.flag & ~can.flags) return f.name;
    if (~needs.flags & f.flag & can.demands) return join("no ", f.name);
  }
  const uint32_t missing = needs.features & ~can.features;
  for (const FeatureName& f : feature_names)
    if (missing & f.feature) return f.name;
  return "";
}

}  // namespace attn
