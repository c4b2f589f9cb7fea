// Structs of callers that were built with another version of attn.h.
#pragma once
#include <cstddef>

#include "core/status.h"

namespace attn {

// Copies a caller's versioned struct: shorter ones are zero-extended, longer ones must be zero
// after the fields that this library knows. `name` is the argument's name for the error.
Status copy_versioned(const char* name, const void* in, void* out, size_t size);
template <class T>
Status copy_versioned(const char* name, const T* in, T* out) {
  return copy_versioned(name, static_cast<const void*>(in), static_cast<void*>(out), sizeof(T));
}
// The same for a struct that contains another one at offset `at`. The fields after the inner struct
// begin after as many bytes as its own struct_size says, which is `least` or more.
struct Held {
  const char* name;
  size_t at, size, least;
};
Status copy_holding(const char* name, const void* in, void* out, size_t size, const Held& held);
template <class T>
Status copy_holding(const char* name, const T* in, T* out, const Held& held) {
  return copy_holding(name, static_cast<const void*>(in), static_cast<void*>(out), sizeof(T), held);
}

}  // namespace attn
