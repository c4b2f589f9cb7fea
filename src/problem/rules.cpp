#include "problem/rules.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "core/dtype.h"

namespace attn {

Status in_range(const std::string& name, int64_t value, int64_t low, int64_t end) {
  if (value >= low && value < end) return {};
  return invalid(name, " is ", value, "; accepted: ", low, " to ", end - 1);
}

Status window_side(const std::string& name, int64_t* side) {
  if (*side < -1) return invalid(name, " is ", *side, "; accepted: 0 and above, or -1 (unbounded)");
  if (*side >= max_extent) *side = -1;
  return {};
}

Status whole_blocks(const std::string& dim_name, attn_dtype type, int64_t dim) {
  const int64_t block = dtype_block(type);
  if (dim % block != 0)
    return invalid(dim_name, " ", dim, " is not a multiple of ", block, " (", dtype_name(type),
                   ")");
  const bool one_block = type == ATTN_MLA_656 || type == ATTN_MLA_584;
  if (one_block && dim != block)
    return invalid(dim_name, " is ", dim, "; accepted for ", dtype_name(type), ": ", block);
  return {};
}

Status one_of(const std::string& name, attn_dtype type, uint32_t accepted) {
  if (type_bit(type_info(type).type) & accepted) return {};
  return invalid(name, " is ", dtype_text(type), "; accepted: ", type_names(accepted));
}

Status one_or(const std::string& name, int64_t value, int64_t all, const char* of) {
  if (value == 1 || value == all) return {};
  if (all == 1) return invalid(name, " is ", value, "; accepted: 1 (", of, ")");
  return invalid(name, " is ", value, "; accepted: 1, ", all, " (", of, ")");
}

Status resolve_strides(const std::string& name, attn_dtype type, int64_t inner, bool written,
                       std::initializer_list<Extent> extents) {
  const bool unset =
      std::all_of(extents.begin(), extents.end(), [](const Extent& e) { return *e.stride == 0; });
  if (unset) {
    int64_t stride = inner;
    for (auto e = std::rbegin(extents); e != std::rend(extents); ++e) {
      *e->stride = stride;
      if (__builtin_mul_overflow(stride, std::max<int64_t>(e->size, 1), &stride) ||
          stride >= max_offset)
        return invalid(name, " has more than 2^60 elements");
    }
    return {};
  }
  int64_t reach = inner;  // from the lowest to the highest element
  for (const Extent& e : extents) {
    if (*e.stride % dtype_block(type) != 0)
      return invalid(name, ".", e.name, " is ", *e.stride, "; accepted for ", dtype_name(type),
                     ": multiples of ", dtype_block(type));
    // Even where the dimension has one element, so that arithmetic with strides cannot overflow.
    if (*e.stride >= max_offset || *e.stride <= -max_offset)
      return invalid(name, ".", e.name, " is ", *e.stride,
                     "; accepted: above -2^60, below 2^60 elements");
    int64_t span;
    if (__builtin_mul_overflow(std::abs(*e.stride), std::max<int64_t>(e.size - 1, 0), &span) ||
        __builtin_add_overflow(reach, span, &reach) || reach >= max_offset)
      return invalid(name, ".", e.name, " is ", *e.stride,
                     ": the tensor reaches past 2^60 elements");
    if (e.size <= 1) *e.stride = 0;  // there is no second element, so it means nothing
  }
  if (!written) return {};
  std::vector<Extent> sorted;
  std::copy_if(extents.begin(), extents.end(), std::back_inserter(sorted),
               [](const Extent& e) { return e.size > 1; });
  std::sort(sorted.begin(), sorted.end(), [](const Extent& a, const Extent& b) {
    return std::abs(*a.stride) < std::abs(*b.stride);
  });
  int64_t covered = inner;
  for (const Extent& e : sorted) {
    if (std::abs(*e.stride) < covered)
      return invalid(name, ".", e.name, " is ", *e.stride,
                     ", so that elements overlap; accepted: ", covered, " or more, or ", -covered,
                     " or less");
    covered = std::abs(*e.stride) * (e.size - 1) + covered;
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const Name& name) {
  if (name.segment >= 0) out << "segment " << name.segment << ": ";
  out << name.text;
  if (name.part >= 0) out << "[" << name.part << "]";
  return out;
}

Status bad_pointer(Name name, const void* p, bool wanted, size_t alignment, const char* why) {
  if (wanted && !p) return invalid(name, " is NULL; accepted: an address (", why, ")");
  if (!wanted && p)
    return invalid(name, " is given; accepted for this problem: NULL (without ", why, ")");
  return invalid(name, " is at ", p, "; accepted: ", alignment, "-byte aligned addresses");
}

size_t data_alignment(attn_dtype type, bool host_memory) {
  if (!host_memory) return 16;
  // What the rows of types that are no power of two begin with, or contain.
  if (type == ATTN_MLA_656) return 4;
  if (type == ATTN_NVFP4) return 1;
  return dtype_is_ggml(type) || type == ATTN_MLA_584 ? 2 : dtype_bytes(type);
}

}  // namespace attn
