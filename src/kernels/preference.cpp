#include "kernels/preference.h"

#include "kernels/decode.h"
#include "kernels/forward_sm90/tiles.h"
#include "kernels/limits.h"
#include "kernels/shared/merge_args.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

using sm90::Tile;

// Tiles of few queries pay off only while each multiprocessor has at most one of them.
std::string too_many_tiles(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  const int64_t count = sm90::items(p, tile), most = multiprocessors(p, device);
  if (count <= most) return "";
  return join("for ", count, " tiles of ", tile.item_rows(), " queries, more than ", most);
}

std::string too_few_keys(const Problem& p, int64_t least) {
  if (p.seqlen_kv >= least) return "";
  return join("for seqlen_kv ", p.seqlen_kv, ", below ", least);
}

// Clusters of two blocks that share K and V between two query heads.
std::string heads_share_little(const Problem& p, int64_t least_keys) {
  constexpr int64_t least_queries = 1024;
  if (p.seqlen_q < least_queries)
    return join("for seqlen_q ", p.seqlen_q, ", below ", least_queries);
  return too_few_keys(p, least_keys);
}

// Clusters of two blocks that share K and V between neighbouring tiles of queries. Both take as
// long as the one that has more to do, and sharing saves time only where nearly all reads hit the
// L2.
std::string pair_shares_little(const Problem& p, const Tile& tile, int64_t least_keys) {
  if (p.has(ATTN_WINDOW)) return "for windows";
  if (p.q_layout == ATTN_PACKED || p.seqlen_q % tile.item_rows() != 0)
    return join("for sequences that are not multiples of ", tile.item_rows(), " queries");
  return too_few_keys(p, least_keys);
}

std::string prefer_other_of_fp8(const Problem& p, const Tile& tile) {
  if (tile.heads) return heads_share_little(p, 2048);
  if (tile.blocks > 1) return pair_shares_little(p, tile, p.causal() ? 8192 : 2048);
  // Tiles of 192 keys waste more at the ends of short sequences than they save between them.
  if (tile.keys > 128) return too_few_keys(p, 2048);
  return "";
}

}  // namespace

std::string prefer_other(const Problem& p, const DeviceInfo& device, const sm90::Variant& variant) {
  const Tile& tile = variant.tile;
  if (tile.groups == 1) return too_many_tiles(p, device, tile);
  if (variant.with & sm90::with_fp8) return prefer_other_of_fp8(p, tile);
  // Of 512 columns sharing gains nothing (docs/log/2026-11-28_rows_again.md).
  if (tile.heads && tile.halves) return "as sharing heads of 512 saves no time";
  if (tile.heads) return p.has(ATTN_WINDOW) ? "for windows" : heads_share_little(p, 8192);
  if (tile.blocks > 1) {
    if (p.causal()) return "for causal masks";
    return pair_shares_little(p, tile, tile.head_dim > 128 ? 4096 : 8192);
  }
  // Its larger tile costs more at the ends of short sequences than it saves between them, and saves
  // nothing where all items are equally long.
  if (tile == sm90::tile_d128_long)
    return p.causal() ? too_few_keys(p, 8192) : "without a causal mask";
  return "";
}

// fwd_* read K and V again for each query head, but compute more at once: decode_* are better where
// what fwd_* read has to come from memory. Tiles of 16 rows read K and V again for each.
std::string prefer_other(const Problem& p, const DeviceInfo& device,
                         const decode::Variant& variant) {
  if (variant.tile.rows() <= decode::group_rows) {
    const int64_t rows = p.seqlen_q * p.group(), most = variant.tile.rows();
    if (rows <= most) return "";
    return join("for ", rows, " rows, seqlen_q * heads_q / heads_kv, more than ", most);
  }
  if (decode::alone(p, variant.tile)) return "";
  int64_t bytes = 0;
  for (const attn_segment& s : p.segment)
    bytes += p.batch * p.heads_kv * s.seqlen * (p.head_dim + p.head_dim_v) * 2;
  if (p.group() == 1) return "for heads_q equal to heads_kv";
  if (bytes > device.l2_bytes) return "";
  return join("for K and V of ", bytes, " bytes, which fit in L2");
}

// Work items are counted from capacities; too many of them would be empty. Beside a conversion
// tokens cost little, and without _mixed their keys would be converted too.
std::string prefer_other_to_mixed(const Problem& p, const sm90::Variant& paged, bool converts) {
  if (p.q_layout != ATTN_PACKED) return "for padded q";
  const int64_t rows = paged.tile.item_rows(), all = p.batch * ceil_div(p.seqlen_q, rows),
                most = p.total_q / rows + p.batch;
  if (all > (converts ? 1 : 2) * most) return "";
  return join("for ", p.total_q, " queries of ", p.batch, " sequences with up to ", p.seqlen_q,
              " each");
}

// For few rows decode_* read K and V once, as they are: fp8 alone, or types without fp8. In parts
// of the keys more rows are as fast converted (docs/log/2026-11-27_short_calls.md).
std::string prefer_other_to_dequantised(const Problem& p) {
  const bool fp8 = (p.needs.k_types | p.needs.v_types) & fp8_of_cuda;
  const int64_t rows = p.seqlen_q * p.group(), few = !fp8 || p.head_dim_v > 128 ? 16
                                                     : p.key_parts > 1          ? 64
                                                                                : 128;
  if (rows > few || (fp8 && p.needs.features & feature_mixed_kv_types)) return "";
  return join("for ", rows, " rows, seqlen_q * heads_q / heads_kv, up to ", few);
}

// With many rows it is their products that take the time, and with few shared keys two or three
// more launches cost as much as is saved. Measured on cpu; on devices reckoned from 4 us for a
// launch and 5 TB/s from L2.
std::string prefer_other_to_prefix(const Problem& p) {
  constexpr int64_t many_rows = 64, least = 32 << 20;
  const int64_t rows = p.seqlen_q * p.group();
  if (rows >= many_rows)
    return join("for ", rows, " rows, seqlen_q * heads_q / heads_kv, from ", many_rows, " on");
  int64_t bytes = 0;  // that the sequences after the first read again
  for (const attn_segment& s : p.segment)
    if (s.shared)
      bytes += (p.batch - 1) * p.heads_kv * s.seqlen *
               (dtype_bytes(s.k_type, p.head_dim) + dtype_bytes(s.v_type, p.head_dim_v));
  if (bytes >= least) return "";
  return join("for shared keys of which ", bytes, " bytes would be read again, below ", least);
}

namespace {
// Keys that a block of prefix_*'s part over shared keys should have, or more.
constexpr int64_t least_prefix_keys = 512;
}  // namespace

// fwd_* have a tile for each query head and 128 queries: too few for the device if there are few
// sequences.
int64_t prefix_parts(const Problem& rows, const DeviceInfo& device) {
  static_assert(most_prefix_parts < attn_merge_max_parts);  // own keys are one more
  constexpr int64_t tile_queries = 128;
  const int64_t tiles = rows.heads_q * std::max<int64_t>(1, ceil_div(rows.seqlen_q, tile_queries));
  return std::clamp(
      std::min(multiprocessors(rows, device) / tiles, rows.seqlen_kv / least_prefix_keys),
      int64_t{1}, int64_t{most_prefix_parts});
}

// Where fwd_* do not take the problem: decode_*_r64 have tiles of 64 rows, and with fixed_split
// several splits of the keys.
int64_t prefix_split(const Problem& rows, const DeviceInfo& device) {
  constexpr int64_t tile_rows = 64, unit = 64;
  const int64_t most = multiprocessors(rows, device),
                tiles = rows.heads_kv *
                        std::max<int64_t>(1, ceil_div(rows.seqlen_q * rows.group(), tile_rows)),
                splits = std::max<int64_t>(1, most / tiles);
  return std::max(least_prefix_keys, round_up(ceil_div(rows.seqlen_kv, splits), unit));
}

}  // namespace attn
