#include "arguments.h"

namespace attn::python {
namespace {

constexpr const char* texts[] = {
#define ATTN_ARGUMENT(name) #name,
    ATTN_ARGUMENTS(ATTN_ARGUMENT)
#undef ATTN_ARGUMENT
};
constexpr size_t count = size_t(Name::count);

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
