// What the host sides of the gfx942 kernels share.
#pragma once
#include <algorithm>
#include <bit>
#include <utility>

#include "asm/gfx942/divisor_args.h"
#include "asm/gfx942/forward_args.h"
#include "asm/gfx942/kv_segment_args.h"
#include "core/dtype.h"
#include "kernels/kernarg.h"
#include "kernels/kv_args.h"

namespace attn {

constexpr int64_t gfx942_max_stride = 1 << 24;  // bytes: offsets of 256 rows are 32 bits
constexpr int64_t gfx942_max_page_stride = int64_t{1} << 32;  // bytes

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

inline Status check_segment(const attn_segment& s) {
  if (s.total > INT32_MAX) return unsupported("total ", s.total, "; accepted: up to ", INT32_MAX);
  ATTN_TRY(check_seq_stride("k_stride", s.k_type, s.k_stride.seq));
  ATTN_TRY(check_seq_stride("v_stride", s.v_type, s.v_stride.seq));
  if (s.layout != ATTN_PAGED) return {};
  if (s.num_pages > INT32_MAX)
    return unsupported("num_pages is ", s.num_pages, "; accepted: up to ", int64_t{INT32_MAX});
  for (const auto& [type, stride] : {std::pair{s.k_type, s.k_stride}, {s.v_type, s.v_stride}})
    if (dtype_bytes(type, stride.batch) >= gfx942_max_page_stride)
      return unsupported("the stride of pages is ", stride.batch, "; accepted: less than ",
                         gfx942_max_page_stride, " bytes");
  return {};
}

inline void set_segments(const Problem& p, attn_gfx942_kv_segment (&to)[attn_gfx942_kv_segments]) {
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    attn_gfx942_kv_segment& s = to[i];
    set_bytes(s.k_stride, from.k_type, from.k_stride);
    set_bytes(s.v_stride, from.v_type, from.v_stride);
    s.lengths = kv_lengths(from);
    s.k_descale = descale(from.k_descale, p.heads_kv, from);
    s.v_descale = descale(from.v_descale, p.heads_kv, from);
    if (from.k_type == ATTN_F8_E4M3FN) s.ocp |= attn_gfx942_ocp_k;
    if (from.v_type == ATTN_F8_E4M3FN) s.ocp |= attn_gfx942_ocp_v;
    if (from.layout != ATTN_PAGED) continue;
    s.pages = pages(from);
    s.by_page_size = divisor(from.page_size);
  }
}
inline void patch_segments(const Problem& p, const Args& args,
                           attn_gfx942_kv_segment (&to)[attn_gfx942_kv_segments]) {
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    attn_gfx942_kv_segment& s = to[i];
    s.k = of.k;
    s.v = of.v;
    patch_lengths(of, &s.lengths);
    s.k_descale.at = of.k_descale;
    s.v_descale.at = of.v_descale;
    s.pages.block_table = of.block_table;
  }
}

}  // namespace attn
