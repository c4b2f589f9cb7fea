// Which bytes the arrays of a run reach, and whether two arrays share one. Nothing here allocates.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "core/status.h"
#include "plan/rules.h"

namespace attn {

// The bytes that an array reaches, relative to its address: `width` side by side, repeated `count`
// times at `step` bytes for each dimension.
struct Footprint {
  static constexpr int max_dims = 4;
  struct Dim {
    int64_t count, step;  // above 1, above 0
  };
  int64_t width = 0;  // 0: no bytes at all
  int64_t low = 0,
          high = 0;  // of the lowest byte, below 0 with negative strides; behind the highest
  int num_dims = 0;
  Dim dims[max_dims];

  Footprint() = default;
  // One piece of so many elements of `bytes` each: the product of `extents`.
  Footprint(int64_t bytes, std::initializer_list<int64_t> extents);
  // Rows of `inner` elements. Strides count elements; 0 comes back to the same row.
  Footprint(attn_dtype type, int64_t inner, std::initializer_list<Extent> extents);
};

// Resolves the strides of a tensor of rows of `inner` elements and finds the bytes that it reaches.
Status make_tensor(const std::string& stride_name, attn_dtype type, int64_t inner, bool written,
                   std::initializer_list<Extent> extents, Footprint* bytes);

// An array of a call; its name is for the error's sentence.
struct Placed {
  Name name;
  const void* address;  // NULL: not given
  const Footprint* bytes;
};

// Whether the ranges from the lowest to the highest byte meet.
inline bool ranges_meet(const Placed& a, const Placed& b) {
  if (!a.address || !b.address || a.bytes->width == 0 || b.bytes->width == 0) return false;
  const __int128 at_a = __int128(uintptr_t(a.address)), at_b = __int128(uintptr_t(b.address));
  return at_a + a.bytes->low < at_b + b.bytes->high && at_b + b.bytes->low < at_a + a.bytes->high;
}

// Whether two arrays whose ranges meet may share a byte. "No" is always right. "Yes" is right where
// the strides of both, in order of size, are multiples of each other and what a stride steps over
// fits into it, which slices of one tensor have.
bool share_bytes(const Placed& a, const Placed& b);

Status overlap_error(const Placed& written, const Placed& other);

// An error if `written` shares bytes with `other`.
inline Status keep_apart(const Placed& written, const Placed& other) {
  if (!ranges_meet(written, other) || !share_bytes(written, other)) return {};
  return overlap_error(written, other);
}

}  // namespace attn
