// The arguments of one call of forward(), Plan() or a plan, by name, found without hashing.
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
  kv_begin,
  causal_sequences,
  query_start,
  key_start,
  key_places,
  ready,
  cu_seqlens_q,
  cu_seqlens_kv,
  max_seqlen_q,
  max_seqlen_kv,
  block_table,
  shared_segments,
  q_descale,
  k_descale,
  v_descale,
  k_type,
  v_type,
  k_scale,
  v_scale,
  head_dim_v,
  lists,
  list_lengths,
  list_block,
  list_queries,
  list_of_pool,
  no_positions,
  bias_slopes,
  out_scale,
  out_dtype,
  return_lse,
  out,
  lse,
  accumulate,
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

// What may differ from run to run of a plan, what else is forward()'s, what is Plan()'s alone, and
// what no function of Python takes by name.
enum class Kind : uint8_t { run, problem, execution, internal };
Kind kind_of(Name name);

class Arguments {
 public:
  Arguments() = default;
  // Of a call as Python's vectorcall and tp_call have it: q, k, v by position or name, the others,
  // up to those of kind `last`, by name. Else a TypeError, which begins with `function`.
  Arguments(const char* function, Kind last, PyObject* const* values, size_t count,
            PyObject* names);
  Arguments(const char* function, Kind last, PyObject* tuple, PyObject* dict);
  void set(Name name, nb::handle value) { values_[size_t(name)] = value; }
  // Takes what is not there from `defaults`.
  void complete(const Arguments& defaults);
  // Null where there is none. Borrowed from the call.
  nb::handle find(Name name) const { return values_[size_t(name)]; }

 private:
  void set(const char* function, Kind last, PyObject* name, PyObject* value, size_t* next);
  void need_arrays(const char* function) const;

  std::array<nb::handle, size_t(Name::count)> values_{};
};

}  // namespace attn::python
