// Rules that arguments of every operation obey, and the sentences that say so.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>

#include "core/status.h"

namespace attn {

constexpr int64_t max_extent = int64_t{1} << 31;  // of one dimension, exclusive
constexpr int64_t max_total = int64_t{1} << 40;   // tokens in a packed buffer, exclusive
constexpr int64_t max_offset = int64_t{1} << 60;  // elements from a tensor's base, exclusive

// low <= value < end.
Status in_range(const std::string& name, int64_t value, int64_t low, int64_t end);
// One side of a window: refuses values below -1. A side at least as long as any sequence can be
// hides no key, and becomes -1, unbounded.
Status window_side(const std::string& name, int64_t* side);
// Rows of `dim` elements are whole blocks of the type; of a latent cache's types one block.
Status whole_blocks(const std::string& dim_name, attn_dtype type, int64_t dim);
// `accepted`: bits of type_bit.
Status one_of(const std::string& name, attn_dtype type, uint32_t accepted);
// 1, or `all`, of which `of` says how many.
Status one_or(const std::string& name, int64_t value, int64_t all, const char* of);

struct Extent {
  const char* name;
  int64_t size;
  int64_t* stride;
};
// Resolves unset strides of a tensor whose outer dimensions are listed outermost first, and checks
// that no offset overflows. A tensor that is written must not overlap itself.
Status resolve_strides(const std::string& name, attn_dtype type, int64_t inner, bool written,
                       std::initializer_list<Extent> extents);

inline bool is_negative(const attn_strides& s) {
  return s.batch < 0 || s.seq < 0 || s.head < 0;
}

// An argument's name, put together only when an error needs it: runs must not allocate.
struct Name {
  const char* text;
  int32_t segment = -1;  // of several, else -1
  int32_t part = -1;     // the same
};
std::ostream& operator<<(std::ostream& out, const Name& name);

Status bad_pointer(Name name, const void* p, bool wanted, size_t alignment, const char* why);
// `alignment` is a power of two; `why` says when the pointer is wanted: "packed q", "ATTN_SINKS in
// flags".
[[gnu::always_inline]] inline Status pointer(Name name, const void* p, bool wanted,
                                             size_t alignment, const char* why) {
  if (wanted == (p != nullptr) && (reinterpret_cast<uintptr_t>(p) & (alignment - 1)) == 0)
    return {};
  return bad_pointer(name, p, wanted, alignment, why);
}

// Device kernels move 16 bytes at a time; host code needs an element's own alignment.
size_t data_alignment(attn_dtype type, bool host_memory);

}  // namespace attn
