#include "problem/overlap.h"

#include <cstdlib>
#include <numeric>

#include "core/dtype.h"

namespace attn {
namespace {

// The bytes from the lowest to the highest of one step of the dimensions from `least` on, whose
// common divisor with *period becomes *period.
uint64_t span_within(const Footprint& f, int64_t least, int64_t* period) {
  uint64_t span = uint64_t(f.width);
  for (int i = 0; i < f.num_dims; ++i) {
    const auto [count, step] = f.dims[i];
    if (step < least)
      span += uint64_t(count - 1) * uint64_t(step);
    else if (step != *period)
      *period = std::gcd(step, *period);
  }
  return span;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Range& range) {
  return out << reinterpret_cast<const void*>(range.begin) << " to "
             << reinterpret_cast<const void*>(range.begin + range.length);
}

// Offsets stay below 2^60 elements, which resolve_strides has checked.
Footprint::Footprint(attn_dtype type, int64_t inner, std::initializer_list<Extent> extents) {
  for (const Extent& e : extents)
    if (e.size == 0) return;
  const TypeInfo& info = type_info(type);
  const auto bytes = [&](int64_t elements) {
    return (info.block_elements == 1 ? elements : elements / info.block_elements) *
           info.block_bytes;
  };
  width = high = bytes(inner);
  for (const Extent& e : extents) {
    const int64_t step = bytes(*e.stride);
    if (e.size == 1 || step == 0) continue;
    (step < 0 ? low : high) += (e.size - 1) * step;
    dims[num_dims++] = {e.size, std::abs(step)};
  }
}

Status make_tensor(const std::string& stride_name, attn_dtype type, int64_t inner, bool written,
                   std::initializer_list<Extent> extents, Footprint* bytes) {
  ATTN_TRY(resolve_strides(stride_name, type, inner, written, extents));
  *bytes = Footprint(type, inner, extents);
  return {};
}

// Bytes at the same address have the same residue modulo any period. With a period that divides the
// larger steps of both arrays, each array is one span of residues.
bool share_bytes(const Placed& a, const Placed& b) {
  // As the ranges meet, no more than the longer one of them.
  const int64_t distance =
      int64_t(__int128(uintptr_t(a.address)) + a.bytes->low - uintptr_t(b.address) - b.bytes->low);
  for (const Footprint* f : {a.bytes, b.bytes}) {
    for (int i = 0; i < f->num_dims; ++i) {
      int64_t period = 0;
      const uint64_t span_a = span_within(*a.bytes, f->dims[i].step, &period);
      const uint64_t span_b = span_within(*b.bytes, f->dims[i].step, &period);
      if (span_a + span_b > uint64_t(period)) continue;
      const int64_t rest = distance % period;
      const uint64_t shift = uint64_t(rest < 0 ? rest + period : rest);
      if (shift >= span_b && shift + span_a <= uint64_t(period)) return false;
    }
  }
  return true;
}

int64_t pages_between(const Placed& a, const Placed& b) {
  const Footprint &f = *a.bytes, &g = *b.bytes;
  if (a.page_step == 0 || a.page_step != b.page_step || f.width != g.width || f.low != g.low ||
      f.num_dims != g.num_dims)
    return 0;
  int64_t page = f.width, pages = 0;  // bytes that it spans; dimensions of pages
  for (int i = 0; i < f.num_dims; ++i) {
    const auto [count, step] = f.dims[i];
    if (step != g.dims[i].step || count != g.dims[i].count) return 0;
    if (step == a.page_step)
      ++pages;
    else
      page += (count - 1) * step;
  }
  const int64_t distance = int64_t(uintptr_t(a.address) - uintptr_t(b.address));
  return pages == 1 && page <= a.page_step && distance % a.page_step == 0 ? distance / a.page_step
                                                                          : 0;
}

Status keep_apart(const Placed& written, const Placed& other) {
  const Range a(written.address, *written.bytes), b(other.address, *other.bytes);
  if (!a.meets(b) || pages_between(written, other) != 0 || !share_bytes(written, other)) return {};
  return invalid(written.name, " is at ", a, " and overlaps ", other.name, " at ", b,
                 "; accepted: memory of its own");
}

}  // namespace attn
