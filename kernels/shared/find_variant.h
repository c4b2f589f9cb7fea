// How a kernel's variant is found by its name, in stubs and in rows of the catalog.
#ifndef ATTN_KERNELS_SHARED_FIND_VARIANT_H
#define ATTN_KERNELS_SHARED_FIND_VARIANT_H

namespace attn {

// The index of `name` among `variants`. Evaluated by the compiler, which stops where there is no
// such name.
template <class Variant, unsigned n>
consteval unsigned find_variant(const Variant (&variants)[n], const char* name) {
  for (unsigned i = 0; i < n; ++i) {
    const char *a = variants[i].name, *b = name;
    while (*a && *a == *b) ++a, ++b;
    if (*a == *b) return i;
  }
  throw "no variant has this name";
}

}  // namespace attn
#endif
