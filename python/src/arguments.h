// The arguments of one call of forward() by name, found without hashing.
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

namespace attn::python {

namespace nb = nanobind;

// In forward()'s order; arguments.cpp has their texts in this order.
enum class Name : uint8_t {
  q,
  k,
  v,
  causal,
  causal_top_left,
  window,
  scale,
  softcap,
  bias,
  attn_mask,
  alibi_slopes,
  sinks,
  block_mask,
  tree,
  tree_keys,
  seqlens_kv,
  cu_seqlens_q,
  cu_seqlens_kv,
  max_seqlen_q,
  block_table,
  q_descale,
  k_descale,
  v_descale,
  k_type,
  v_type,
  k_scale,
  v_scale,
  bias_slopes,
  out_scale,
  out_dtype,
  return_lse,
  out,
  backend,
  kernel,
  num_threads,
  max_sms,
  fixed_split,
  split_invariant,
  kv_prefix_stable,
  fp8_precise,
  count
};

const char* text_of(Name name);

// Borrowed: they outlive this.
class Arguments {
 public:
  Arguments() = default;
  explicit Arguments(const nb::dict& dict);  // other names are not looked at
  void set(Name name, nb::handle value) { values_[size_t(name)] = value; }
  // Null where there is none.
  nb::handle find(Name name) const { return values_[size_t(name)]; }

 private:
  std::array<nb::handle, size_t(Name::count)> values_{};
};

}  // namespace attn::python
