#include "arguments.h"

#include <iterator>

namespace attn::python {
namespace {

constexpr const char* texts[] = {
    "q",
    "k",
    "v",
    "causal",
    "causal_top_left",
    "window",
    "scale",
    "softcap",
    "bias",
    "attn_mask",
    "alibi_slopes",
    "sinks",
    "block_mask",
    "tree",
    "tree_keys",
    "seqlens_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "max_seqlen_q",
    "block_table",
    "q_descale",
    "k_descale",
    "v_descale",
    "k_type",
    "v_type",
    "k_scale",
    "v_scale",
    "bias_slopes",
    "out_scale",
    "out_dtype",
    "return_lse",
    "out",
    "backend",
    "kernel",
    "num_threads",
    "max_sms",
    "fixed_split",
    "split_invariant",
    "kv_prefix_stable",
    "fp8_precise",
};
constexpr size_t count = size_t(Name::count);
static_assert(std::size(texts) == count);

// Interned, so that Python's own names are these objects.
const std::array<PyObject*, count>& words() {
  static const auto made = [] {
    std::array<PyObject*, count> words;
    for (size_t i = 0; i < count; ++i) words[i] = PyUnicode_InternFromString(texts[i]);
    return words;
  }();
  return made;
}

}  // namespace

const char* text_of(Name name) {
  return texts[size_t(name)];
}

Arguments::Arguments(const nb::dict& dict) {
  const auto& known = words();
  PyObject *key, *value;
  Py_ssize_t at = 0;
  size_t next = 0;  // they mostly come in this order
  while (PyDict_Next(dict.ptr(), &at, &key, &value)) {
    size_t i = next, tried = 0;
    for (; tried < count && known[i] != key; ++tried) i = i + 1 == count ? 0 : i + 1;
    if (tried == count) {  // not interned, or another name
      for (i = 0; i < count &&
                  !(PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, texts[i]) == 0);)
        ++i;
      if (i == count) continue;
    }
    values_[i] = value;
    next = i + 1 == count ? 0 : i + 1;
  }
}

}  // namespace attn::python
