// Why a kernel does not take a problem.
#include <bit>

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
    {feature_shared_lengths, "seqlens of a shared segment"},
    {feature_shared_pages, "pages of a shared segment"},
    {feature_shared_descales, "descales of a shared segment per head or block"},
    {feature_kv_begin, "kv_begin"},
    {feature_slots, "slot_mapping"},
    {feature_v_in_k, "v in k"},
    {feature_lists, "lists of keys"},
    {feature_no_positions, "keys without positions"},
    {feature_packed_mask, "block mask with packed q"},
    {feature_causal_sequences, "causal_sequences"},
    {feature_key_positions, "positions of keys"},
    {feature_ready, "ready words"},
    {feature_key_parts, "parts of the keys"},
    {feature_lse_by_head, "lse in the order of heads"},
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
    {ATTN_QUERY_POSITIONS, "positions of queries"},
    {ATTN_ACCUMULATE, "accumulate"},
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

// Notes why, if anybody asks; false.
template <class... Parts>
bool no(std::string* why, const Parts&... parts) {
  if (why) *why = join(parts...);
  return false;
}

// Types of K and V that are taken under q of a type.
uint32_t kv_types_beside(const Limits& can, attn_dtype q) {
  return can.floats_as_q ? can.kv_types & (~float_types | type_bit(q)) : can.kv_types;
}

bool takes_type(const char* name, attn_dtype type, uint32_t taken, std::string* why) {
  return type == ATTN_DTYPE_NONE || type_bit(type) & taken ||
         no(why, name, " type ", dtype_name(type));
}
// Where no sentence of refusal.cpp adds it, the reason says what is accepted.
bool takes_type_alone(const char* name, attn_dtype type, uint32_t taken, std::string* why) {
  return takes_type(name, type, taken, nullptr) ||
         no(why, name, " type ", dtype_name(type), "; accepted: ", type_names(taken));
}
bool take_types(const char* name, uint32_t types, uint32_t taken, std::string* why,
                const char* next_to = "", const char* q = "") {
  const uint32_t missing = types & ~taken;
  return missing == 0 ||
         no(why, name, " type ", dtype_name(attn_dtype(std::countr_zero(missing))), next_to, q);
}

bool takes_types(const Kernel& kernel, const Needs& needs, std::string* why) {
  const Limits& can = kernel.limits;
  const bool forward = kernel.op == Op::forward;
  const uint32_t beside = kv_types_beside(can, needs.in_type);
  constexpr const char* next_to = " next to q of ";
  const char* q = dtype_name(needs.in_type);
  const auto takes = forward ? takes_type : takes_type_alone;
  return takes(forward ? "q" : "input", needs.in_type, can.in_types, why) &&
         takes(forward ? "out" : "output", needs.out_type, can.out_types, why) &&
         take_types("k", needs.k_types, can.kv_types, why) &&
         take_types("v", needs.v_types, can.kv_types, why) &&
         take_types("k", needs.k_types, beside, why, next_to, q) &&
         take_types("v", needs.v_types, beside, why, next_to, q);
}

bool takes_size(const SizeName& name, const Limits& can, const Needs& needs, std::string* why) {
  const int64_t size = needs.*name.size;
  const Sizes& taken = can.*name.taken;
  if (size % taken.multiple != 0)
    return no(why, name.name, " ", size, " is not a multiple of ", taken.multiple);
  return size <= taken.max || no(why, name.name, " ", size, " is above ", taken.max);
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
  return takes_types(kernel, needs, nullptr) &&
         !(kernel.limits.demanded_features & ~needs.features) &&
         !(needs.features & ~kernel.limits.features & feature_mixed_kv_types);
}

bool takes_head_dims(const Kernel& kernel, const Needs& needs) {
  for (const SizeName& s : size_names)
    if (s.size == &Needs::head_dim || s.size == &Needs::head_dim_v)
      if (!takes_size(s, kernel.limits, needs, nullptr)) return false;
  return true;
}

bool takes(const Kernel& kernel, const Needs& needs, std::string* why) {
  const Limits& can = kernel.limits;
  if (!takes_types(kernel, needs, why)) return false;
  for (const SizeName& s : size_names)
    if (!takes_size(s, can, needs, why)) return false;
  for (const FlagName& f : flag_names) {
    if (needs.flags & f.flag & ~can.flags) return no(why, f.name);
    if (~needs.flags & f.flag & can.demands) return no(why, "no ", f.name);
  }
  for (const FeatureName& f : feature_names) {
    if (needs.features & f.feature & ~can.features) return no(why, f.name);
    if (~needs.features & f.feature & can.demanded_features) return no(why, "no ", f.name);
  }
  return true;
}

std::string decline(const Kernel& kernel, const Needs& needs) {
  std::string why;
  takes(kernel, needs, &why);
  return why;
}

}  // namespace attn
