#include "problem/versioned.h"

#include <algorithm>
#include <cstring>

namespace attn {
namespace {

// A struct of `given` bytes whose bytes from `begin` on this library, whose struct has `size`, does
// not know.
Status check_unknown(const char* name, const void* in, size_t begin, size_t given, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(in);
  for (size_t i = begin; i < given; ++i)
    if (bytes[i] != 0)
      return invalid(name, ".struct_size is ", given, " and byte ", i,
                     " is set; this library knows ", size, " bytes");
  return {};
}

}  // namespace

Status copy_holding(const char* name, const void* in, void* out, size_t size, const Held& held) {
  size_t given = 0, inner = 0;
  if (in) std::memcpy(&given, in, sizeof given);
  if (given < held.at + sizeof inner || given > (size_t{1} << 16))
    return copy_versioned(name, in, out, size);
  const auto* from = static_cast<const char*>(in);
  std::memcpy(&inner, from + held.at, sizeof inner);
  if (inner == held.size) return copy_versioned(name, in, out, size);
  if (inner < held.least)
    return invalid(held.name, ".struct_size is ", inner, "; accepted: sizeof the struct (",
                   held.size, " here)");
  if (inner > given - held.at)
    return invalid(held.name, ".struct_size is ", inner, "; accepted: up to ", given - held.at,
                   ", for ", name, ".struct_size is ", given);
  auto* to = static_cast<char*>(out);
  ATTN_TRY(copy_versioned(held.name, from + held.at, to + held.at, held.size));
  std::memcpy(to, from, held.at);
  std::memcpy(to, &size, sizeof size);
  // The fields after it.
  const size_t at = held.at + held.size, room = size - at, begin = held.at + inner,
               rest = given - begin;
  std::memset(to + at, 0, room);
  std::memcpy(to + at, from + begin, std::min(rest, room));
  return check_unknown(name, in, begin + room, given, size);
}

Status copy_versioned(const char* name, const void* in, void* out, size_t size) {
  if (!in) return invalid(name, " is NULL; accepted: a pointer to its struct");
  size_t given;
  std::memcpy(&given, in, sizeof given);
  // A size that no struct can have would cut a pointer in two.
  if (given < sizeof(size_t) || given > (size_t{1} << 16) || given % alignof(size_t) != 0)
    return invalid(name, ".struct_size is ", given, "; accepted: sizeof the struct (", size,
                   " here)");
  std::memset(out, 0, size);
  std::memcpy(out, in, std::min(given, size));
  std::memcpy(out, &size, sizeof size);
  return check_unknown(name, in, size, given, size);
}

}  // namespace attn
