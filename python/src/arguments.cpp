#include "arguments.h"

#include <iterator>
#include <string>

namespace attn::python {
namespace {

constexpr struct {
  const char* text;
  Kind kind;
} known[] = {
    {"q", Kind::run},
    {"k", Kind::run},
    {"v", Kind::run},
    {"causal", Kind::problem},
    {"causal_top_left", Kind::problem},
    {"window", Kind::problem},
    {"scale", Kind::problem},
    {"softcap", Kind::problem},
    {"bias", Kind::run},
    {"attn_mask", Kind::internal},
    {"alibi_slopes", Kind::run},
    {"sinks", Kind::run},
    {"block_mask", Kind::run},
    {"tree", Kind::run},
    {"tree_keys", Kind::problem},
    {"seqlens_kv", Kind::run},
    {"kv_begin", Kind::run},
    {"causal_sequences", Kind::run},
    {"query_start", Kind::run},
    {"key_start", Kind::run},
    {"key_places", Kind::problem},
    {"ready", Kind::run},
    {"cu_seqlens_q", Kind::run},
    {"cu_seqlens_kv", Kind::run},
    {"max_seqlen_q", Kind::problem},
    {"max_seqlen_kv", Kind::problem},
    {"block_table", Kind::run},
    {"shared_segments", Kind::problem},
    {"q_descale", Kind::run},
    {"k_descale", Kind::run},
    {"v_descale", Kind::run},
    {"k_type", Kind::problem},
    {"v_type", Kind::problem},
    {"k_scale", Kind::run},
    {"v_scale", Kind::run},
    {"head_dim_v", Kind::problem},
    {"lists", Kind::run},
    {"list_lengths", Kind::run},
    {"list_block", Kind::problem},
    {"list_queries", Kind::problem},
    {"list_of_pool", Kind::problem},
    {"no_positions", Kind::problem},
    {"bias_slopes", Kind::run},
    {"out_scale", Kind::run},
    {"out_dtype", Kind::problem},
    {"return_lse", Kind::run},
    {"out", Kind::run},
    {"lse", Kind::run},
    {"accumulate", Kind::problem},
    {"backend", Kind::problem},
    {"kernel", Kind::execution},
    {"num_threads", Kind::execution},
    {"max_sms", Kind::execution},
    {"fixed_split", Kind::execution},
    {"split_invariant", Kind::execution},
    {"kv_prefix_stable", Kind::execution},
    {"fp8_precise", Kind::execution},
};
constexpr size_t count = size_t(Name::count), positional = 3;
static_assert(std::size(known) == count);

// Interned, so that Python's own names are these objects.
const std::array<PyObject*, count>& words() {
  static const auto made = [] {
    std::array<PyObject*, count> words;
    for (size_t i = 0; i < count; ++i) words[i] = PyUnicode_InternFromString(known[i].text);
    return words;
  }();
  return made;
}

// The place of a name, `count` if it is none. They mostly come in order, from `next` on.
size_t place_of(PyObject* name, size_t next) {
  const auto& interned = words();
  for (size_t tried = 0, i = next; tried < count; ++tried, i = i + 1 == count ? 0 : i + 1)
    if (interned[i] == name) return i;
  size_t i = 0;
  while (i < count &&
         !(PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, known[i].text) == 0))
    ++i;
  return i;
}

[[noreturn]] void refuse_call(const char* function, const std::string& what) {
  throw nb::type_error((std::string(function) + "() " + what).c_str());
}

void need_positional(const char* function, size_t given) {
  if (given > positional)
    refuse_call(function,
                "takes 3 positional arguments but " + std::to_string(given) + " were given");
}

}  // namespace

const char* text_of(Name name) {
  return known[size_t(name)].text;
}

Kind kind_of(Name name) {
  return known[size_t(name)].kind;
}

Arguments::Arguments(const char* function, Kind last, PyObject* const* values, size_t given,
                     PyObject* names) {
  need_positional(function, given);
  for (size_t i = 0; i < given; ++i) values_[i] = values[i];
  const size_t named = names ? size_t(PyTuple_Size(names)) : 0;
  size_t next = given;
  for (size_t i = 0; i < named; ++i)
    set(function, last, PyTuple_GetItem(names, Py_ssize_t(i)), values[given + i], &next);
  need_arrays(function);
}

Arguments::Arguments(const char* function, Kind last, PyObject* tuple, PyObject* dict) {
  const auto given = size_t(PyTuple_Size(tuple));
  need_positional(function, given);
  for (size_t i = 0; i < given; ++i) values_[i] = PyTuple_GetItem(tuple, Py_ssize_t(i));
  PyObject *name, *value;
  Py_ssize_t at = 0;
  size_t next = given;
  while (dict && PyDict_Next(dict, &at, &name, &value)) set(function, last, name, value, &next);
  need_arrays(function);
}

void Arguments::complete(const Arguments& defaults) {
  for (size_t i = 0; i < count; ++i)
    if (!values_[i].is_valid()) values_[i] = defaults.values_[i];
}

void Arguments::set(const char* function, Kind last, PyObject* name, PyObject* value,
                    size_t* next) {
  const size_t i = place_of(name, *next);
  if (i == count || known[i].kind > last) {
    const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, nullptr) : nullptr;
    PyErr_Clear();
    refuse_call(function,
                std::string("got an unexpected keyword argument '") + (text ? text : "?") + "'");
  }
  if (values_[i].is_valid())
    refuse_call(function, std::string("got multiple values for argument '") + known[i].text + "'");
  values_[i] = value;
  *next = i + 1 == count ? 0 : i + 1;
}

void Arguments::need_arrays(const char* function) const {
  std::string missing;
  for (size_t i = 0; i < positional; ++i)
    if (!values_[i].is_valid())
      missing += (missing.empty() ? "'" : ", '") + std::string(known[i].text) + "'";
  if (!missing.empty()) refuse_call(function, "missing a required positional argument: " + missing);
}

}  // namespace attn::python
