// What the host sides of the kernels that read or write K/V share, whatever the device.
#pragma once
#include <algorithm>

#include "kernels/kernarg.h"
#include "kernels/shared/forward_args.h"

namespace attn {

// That a run may use.
inline int64_t multiprocessors(const Problem& p, const DeviceInfo& device) {
  return p.max_sms > 0 ? std::min<int64_t>(p.max_sms, device.multiprocessors)
                       : device.multiprocessors;
}

// Of a segment, without the addresses that a run brings. Those are null unless the problem asks
// for them, which is checked before.
inline attn_kv_lengths kv_lengths(const attn_segment& segment) {
  return {.seqlens = nullptr,
          .cu_seqlens = nullptr,
          .total = segment.total,
          .capacity = int(segment.seqlen)};
}
inline void patch_lengths(const attn_segment_args& args, attn_kv_lengths* lengths) {
  lengths->seqlens = args.seqlens;
  lengths->cu_seqlens = args.cu_seqlens;
}

// What every kernel of attention has of its rows of queries.
template <class Kernarg>
void patch_rows(const Args& args, Kernarg* a) {
  a->out = args.out;
  a->lse = args.lse;
  a->cu_seqlens_q = args.cu_seqlens_q;
  a->sinks = args.sinks;
  if (args.total_q > 0) a->total_q = decltype(a->total_q)(args.total_q);
}

// Kernels that take a shared segment's pages or descales use these fields as strides alone.
inline attn_pages pages(const attn_segment& segment) {
  return {.block_table = nullptr,
          .num_pages = segment.layout == ATTN_PAGED ? int(segment.num_pages) : 1,
          .page_size = segment.page_size,
          .max_pages = segment.shared ? 0 : segment.max_pages};
}

inline attn_descale descale(attn_descale_kind kind, int64_t heads_kv, const attn_segment& s) {
  attn_descale d{};
  if (kind == ATTN_DESCALE_NONE || kind == ATTN_DESCALE_TENSOR) return d;
  const int blocks = kind == ATTN_DESCALE_BLOCK ? int(ceil_div(s.seqlen, s.descale_block_keys)) : 1;
  d.batch = s.shared ? 0 : int(heads_kv) * blocks;
  d.head = blocks;
  if (kind == ATTN_DESCALE_BLOCK) d.block_keys = s.descale_block_keys;
  return d;
}

}  // namespace attn
