// Which bytes the arrays of a run reach, and whether two arrays share one. Nothing here allocates.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "core/status.h"
#include "problem/rules.h"

namespace attn {

// The bytes that an array reaches, relative to its address: `width` contiguous bytes, repeated
// `count` times every `step` bytes for each dimension.
struct Footprint {
  static constexpr int max_dims = 4;
  struct Dim {
    int64_t count, step;  // above 1, above 0
  };
  int64_t width = 0;  // 0: no bytes at all
  int64_t low = 0,
          high = 0;  // of the lowest byte, below 0 with negative strides; after the highest
  int num_dims = 0;
  Dim dims[max_dims];

  Footprint() = default;
  // One contiguous piece: the product of `extents` elements of `bytes` each.
  Footprint(int64_t bytes, std::initializer_list<int64_t> extents) {
    __int128 product =
        bytes;  // at most four extents, each of which has 31 bits, or 40 and fewer of them
    for (int64_t extent : extents) product *= extent;
    width = high = product > INT64_MAX ? INT64_MAX : int64_t(product);
  }
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
  int64_t page_step = 0;  // bytes from a page of a cache to the next; 0: no pages
};

// From the lowest byte of an array to the one after the highest.
struct Range {
  uint64_t begin, length;  // length 0: no byte, or no array
  Range(const void* address, const Footprint& bytes)
      : begin(reinterpret_cast<uintptr_t>(address) + uint64_t(bytes.low)),
        length(address ? uint64_t(bytes.high - bytes.low) : 0) {}
  bool meets(const Range& other) const {
    return length != 0 && other.length != 0 &&
           (other.begin - begin < length || begin - other.begin < other.length);
  }
};
std::ostream& operator<<(std::ostream& out, const Range& range);

// Whether two arrays whose ranges meet may share a byte. "No" is always right. "Yes" is right where
// the strides of both, in order of size, are multiples of each other and what a stride steps over
// fits into it, which slices of one tensor have.
bool share_bytes(const Placed& a, const Placed& b);

// Two views of one pool, whose pages are not interleaved: page n of `a` is page n + the result of
// `b`. 0: they are not.
int64_t pages_between(const Placed& a, const Placed& b);

// An error if `written` shares bytes with `other`, except as two views of one pool.
Status keep_apart(const Placed& written, const Placed& other);

// The same of each pair of `written`, and of each of them and each array that
// for_each_read(visit(name, address, bytes)) visits.
template <class ForEachRead>
Status keep_all_apart(const Placed* written, size_t n, const ForEachRead& for_each_read) {
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < i; ++j) ATTN_TRY(keep_apart(written[j], written[i]));
  Status status;
  for_each_read([&](Name name, const void* address, const Footprint& bytes) {
    for (size_t i = 0; i < n && status.ok(); ++i)
      status = keep_apart(written[i], {name, address, &bytes});
  });
  return status;
}
template <size_t n, class ForEachRead>
Status keep_all_apart(const Placed (&written)[n], const ForEachRead& for_each_read) {
  return keep_all_apart(written, n, for_each_read);
}

}  // namespace attn
