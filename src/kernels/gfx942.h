// What the host sides of the gfx942 kernels share.
#pragma once
#include <algorithm>
#include <bit>

#include "asm/gfx942/divisor_args.h"
#include "asm/gfx942/forward_args.h"
#include "core/dtype.h"
#include "kernels/kernarg.h"

namespace attn {

constexpr int64_t gfx942_max_stride = 1 << 24;  // bytes: offsets of 256 rows are 32 bits

inline attn_gfx942_band band_of(const Problem& p) {
  constexpr int64_t none = attn_gfx942_unbounded;
  const RangeMask mask = p.range_mask();
  attn_gfx942_band band{int(none), int(none), int(none)};
  if (mask.window && mask.left >= 0) band.left = int(std::min<int64_t>(mask.left, none));
  if (mask.window && mask.right >= 0) band.right = int(std::min<int64_t>(mask.right + 1, none));
  if (mask.causal) band.right = std::min(band.right, 1);
  if (mask.top_left) band.top = 1;
  return band;
}

inline Status check_stride(const char* name, const char* dimension, attn_dtype type,
                           int64_t stride) {
  const int64_t bytes = dtype_bytes(type, stride);
  if (bytes >= 0 && bytes < gfx942_max_stride) return {};
  return unsupported(name, ".", dimension, " is ", stride, "; accepted: less than ",
                     gfx942_max_stride, " bytes");
}
inline Status check_seq_stride(const char* name, attn_dtype type, int64_t stride) {
  return check_stride(name, "seq", type, stride);
}
inline Status check_head_stride(const char* name, attn_dtype type, int64_t stride) {
  return check_stride(name, "head", type, stride);
}

// From 1 on.
inline attn_gfx942_divisor divisor(int64_t d) {
  const int shift = int(std::bit_width(uint64_t(d - 1)));
  return {unsigned(ceil_div(int64_t{1} << (31 + shift), d)), shift};
}

inline void set_bytes(long long (&to)[3], attn_dtype type, const attn_strides& from) {
  to[0] = dtype_bytes(type, from.batch);
  to[1] = dtype_bytes(type, from.seq);
  to[2] = dtype_bytes(type, from.head);
}

}  // namespace attn
