// How decode kernels of every device count their work: in units of unit_keys keys of a K/V head's
// row tile, shared evenly by the blocks of a column (kernels/decode/units.cuh).
#pragma once
#include <algorithm>

#include "kernels/decode/decode_tiles.h"
#include "kernels/kernel.h"

namespace attn::decode {

inline int64_t columns_of(const Problem& p, int64_t blocks) {
  return std::min(p.heads_kv, blocks);
}

// row_tiles: of a K/V head, each of up to `tile_rows` rows, queries times query heads.
inline Status check_units(const Problem& p, int64_t row_tiles, int tile_rows, int max_segments,
                          int64_t max_length) {
  if (p.num_segments > max_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ", max_segments);
  constexpr int64_t max_units = INT32_MAX;
  if (p.seqlen_kv > max_length)
    return unsupported("seqlen_kv is ", p.seqlen_kv, "; accepted: up to ", max_length);
  const int64_t units =
      p.batch * p.heads_kv * row_tiles * (ceil_div(p.seqlen_kv, unit_keys) + p.num_segments);
  const auto too_many = [&](const char* accepted, int64_t most) {
    const std::string of_tiles =
        row_tiles > 1 ? join("ceil(heads_q / heads_kv * seqlen_q / ", tile_rows, ") * ") : "";
    return unsupported("batch * heads_kv * ", of_tiles, "(ceil(seqlen_kv / ", unit_keys,
                       ") + num_segments) is ", units, "; ", accepted, ": up to ", most);
  };
  if (units > max_units) return too_many("accepted", max_units);
  for (const attn_segment& s : p.segment) {
    if (s.layout == ATTN_PAGED && s.num_pages > INT32_MAX)
      return unsupported("num_pages is ", s.num_pages, "; accepted: up to ", int64_t{INT32_MAX});
    for (const attn_descale_kind kind : {s.k_descale, s.v_descale})
      if (kind == ATTN_DESCALE_BLOCK && units > max_units / 2)
        return too_many("accepted with descales per block", max_units / 2);
  }
  return {};
}

}  // namespace attn::decode
