// The arguments of one call of forward() by name, found without hashing.
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

namespace attn::python {

namespace nb = nanobind;

#define ATTN_ARGUMENTS(X)                                                                        \
  X(q)                                                                                           \
  X(k)                                                                                           \
  X(v) X(causal) X(causal_top_left) X(window) X(scale) X(softcap) X(bias) X(attn_mask)           \
      X(alibi_slopes) X(sinks) X(block_mask) X(tree) X(tree_keys) X(seqlens_kv) X(cu_seqlens_q)  \
          X(cu_seqlens_kv) X(max_seqlen_q) X(block_table) X(q_descale) X(k_descale) X(v_descale) \
              X(out_scale) X(out_dtype) X(return_lse) X(out) X(backend) X(kernel) X(num_threads) \
                  X(max_sms) X(fixed_split) X(split_invariant) X(kv_prefix_stable)

enum class Name : uint8_t {
#define ATTN_ARGUMENT(name) name,
  ATTN_ARGUMENTS(ATTN_ARGUMENT)
#undef ATTN_ARGUMENT
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
