// What a block computes, and the tiles that it walks over.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/lengths.cuh"
#include "../forward_sm80/load.cuh"
#include "../ptx/cp_async.h"
#include "backward_args.h"
#include "tiles.h"

namespace attn::bwd_sm80 {

using namespace device;

// What the rows that a block keeps are, and whose gradients it sums: dq of queries; of keys both
// dv and dk, or one of them.
enum class Of { queries, keys, keys_dv, keys_dk };
template <Of of>
inline constexpr bool is_keys = of != Of::queries;

// Rows of one sequence and head that stay in shared memory, and the range of rows that is walked
// over: keys for queries, queries of each head of the group for keys. Kept in shared memory.
struct Item {
  int b, head;         // head: of queries or of K/V, as the rows are
  int row;             // first row
  int length, walked;  // rows of the sequence, of its walked side
  int stored;          // rows that are written: of padded keys those after the length as well
  int low, high;       // walked rows that some of the block's rows see, or are seen by
  long long from, to;  // row r sees the walked rows [r + from, r + to) of those there are
  long long first_row, first_walked;  // packed: of the sequence in its tensor
  long long stats;                    // row of its first query in lse2 and delta

  // By one thread: number `index` of the items of its kind.
  template <Of of>
  __device__ __forceinline__ void find(const attn_bwd_sm80_kernarg& a, unsigned index, int rows) {
    const int capacity = is_keys<of> ? a.kv.capacity : a.rows.seqlen_q;
    const unsigned tiles = (capacity + rows - 1) / rows;
    const QueryTile item = is_keys<of>
                               ? query_tile(index, a.rows.batch, a.heads_kv, tiles, a.key_chunk)
                               : query_tile(index, a.rows.batch, a.heads_q, tiles, a.query_chunk);
    b = item.b;
    head = item.h;
    // The first keys and the last queries have most to do under a causal mask.
    row = (is_keys<of> ? int(tiles) - 1 - item.tile : item.tile) * rows;
    const Span queries = a.cu_seqlens_q
                             ? packed_span(a.cu_seqlens_q, b, a.rows.total_q, a.rows.seqlen_q)
                             : Span{0, a.rows.seqlen_q};
    const Span keys = segment_span(a.kv, b);
    const KeyBand band = a.mask.band(queries.length, keys.length);
    stats = attn_backward_tile * a.rows.first_tile(b, queries.begin);
    length = is_keys<of> ? keys.length : queries.length;
    walked = is_keys<of> ? queries.length : keys.length;
    stored = is_keys<of> && !a.kv.cu_seqlens ? a.kv.capacity : length;
    first_row = is_keys<of> ? keys.begin : queries.begin;
    first_walked = is_keys<of> ? queries.begin : keys.begin;
    from = is_keys<of> ? 1 - band.upper : band.lower;
    to = is_keys<of> ? 1 - band.lower : band.upper;
    const int last = min(row + rows, length) - 1;
    const bool any = last >= row && from < to;
    low = any ? clamp(row + from, 0, walked) : 0;
    high = any ? clamp(last + to, 0, walked) : 0;
  }
};

// What is copied next, or a tile of it.
struct Walked {
  int head;          // of queries
  int first, count;  // rows; count 0: after the last tile
  int mask;          // what mask_block says about it for the warp's rows
};

// The blocks of a mask, of `rows` rows that stay from `first` on and a tile of walked ones. One
// block of the mask has them all.
template <Of of>
__device__ __forceinline__ int mask_of(const attn_bwd_sm80_kernarg& a, const Item& item, int head,
                                       int first, int rows, int walked, int count) {
  const attn_mask_arrays& m = a.block_mask;
  const int query = is_keys<of> ? walked : first, key = is_keys<of> ? first : walked;
  const int queries = is_keys<of> ? count : rows;
  const int diagonal = is_keys<of> ? item.length - item.walked : item.walked - item.length;
  return mask_block(m, item.b * m.batch_stride + head * m.head_stride, query >> m.block_q_log2,
                    key >> m.block_k_log2, query, query + queries - 1, diagonal);
}

// Walks over the tiles of an item and copies them. Copies are by all threads.
template <class Shape, Of of>
struct Walker {
  static constexpr Tile tile = Shape::block;
  static constexpr int copied = tile.copied, bytes = walked_bytes(tile, Shape::head_dim);
  static_assert(!Shape::masked || (copied == tile.keys && tile.rows <= 64));

  const attn_bwd_sm80_kernarg& a;
  const Item& item;
  unsigned shared;
  Walked next;

  __device__ __forceinline__ Walker(const attn_bwd_sm80_kernarg& a, const Item& item,
                                    unsigned shared)
      : a(a), item(item), shared(shared) {
    next.head = is_keys<of> ? item.head * a.group : item.head;
    next.mask = mask_full;
    go_to(item.low);
  }

  __device__ __forceinline__ int last_head() const {
    return is_keys<of> ? item.head * a.group + a.group - 1 : item.head;
  }
  // Masked tiles begin at multiples of their size, so that one block of the mask has them.
  __device__ __forceinline__ int count_from(int first) const {
    return min(Shape::masked ? copied - first % copied : copied, item.high - first);
  }

  __device__ __forceinline__ void go_to(int first) {
    next.first = first;
    next.count = item.high > item.low ? count_from(first) : 0;
    if constexpr (Shape::masked) skip_empty();
  }
  __device__ __forceinline__ void go_on() {
    const int after = next.first + next.count;
    if (after < item.high) return go_to(after);
    if (next.head == last_head()) {
      next.count = 0;
      return;
    }
    ++next.head;
    go_to(item.low);
  }

  // Whether the block has something to do with the tile from `first` on.
  __device__ __forceinline__ bool is_live(int head, int first) const {
    return mask_of<of>(a, item, head, item.row, min(tile.rows, item.length - item.row), first,
                       count_from(first)) != mask_empty;
  }
  // 32 tiles at a time, one by each lane. All warps do the same.
  __device__ __forceinline__ void skip_empty() {
    const int lane = threadIdx.x % 32;
    while (next.count > 0) {
      const int first = lane == 0 ? next.first : (next.first / copied + lane) * copied;
      const unsigned live =
          __ballot_sync(0xffffffff, first < item.high && is_live(next.head, first));
      const int skip = live ? __ffs(int(live)) - 1 : 32;
      if (skip > 0) next.first = (next.first / copied + skip) * copied;
      if (live) break;
      if (next.first < item.high) continue;
      if (next.head == last_head()) {
        next.count = 0;
        return;
      }
      ++next.head;
      next.first = item.low;
    }
    if (next.count == 0) return;
    next.count = count_from(next.first);
    const int row = item.row + int(threadIdx.x) / 32 * Shape::warp_rows;
    next.mask = row < item.length
                    ? mask_of<of>(a, item, next.head, row, min(Shape::warp_rows, item.length - row),
                                  next.first, next.count)
                    : mask_empty;
  }

  // Rows of a tensor of queries or keys, one of those that stay or are walked over.
  __device__ __forceinline__ static const char* place(const void* base,
                                                      const long long (&stride)[3], bool packed,
                                                      int b, long long row, int head) {
    return static_cast<const char*>(base) +
           2 * ((packed ? 0 : b * stride[0]) + row * stride[1] + head * stride[2]);
  }

  // The rows that stay: queries and d_out, or keys and V.
  __device__ __forceinline__ void copy_rows() const {
    const int count = item.length - item.row;
    const long long row = item.first_row + item.row;
    constexpr int bytes = rows_bytes(tile, Shape::head_dim);
    const auto copy = [&](unsigned to, const void* base, const long long(&stride)[3], bool packed,
                          int dim) {
      sm80::copy_tile<Shape::threads, tile.rows, Shape::pitch>(
          to, place(base, stride, packed, item.b, row, item.head), 2 * stride[1], count, dim);
    };
    if constexpr (is_keys<of>) {
      copy(shared, a.k, a.k_stride, a.kv.cu_seqlens, a.head_dim);
      if constexpr (of != Of::keys_dv)
        copy(shared + bytes, a.v, a.v_stride, a.kv.cu_seqlens, a.head_dim_v);
    } else {
      copy(shared, a.q, a.q_stride, a.cu_seqlens_q, a.head_dim);
      copy(shared + bytes, a.d_out, a.d_out_stride, a.cu_seqlens_q, a.head_dim_v);
    }
  }

  __device__ __forceinline__ unsigned stage_at(int stage) const {
    return shared + walked_at(tile, Shape::head_dim) + stage * 2 * bytes;
  }
  __device__ __forceinline__ unsigned stats_of(int stage) const {
    return shared + stats_at(tile, Shape::head_dim) + stage * 2 * copied * 4;
  }

  // The tile `next`.
  __device__ __forceinline__ void copy_walked(int stage) const {
    const unsigned to = stage_at(stage);
    const long long row = item.first_walked + next.first;
    const auto copy = [&](unsigned to, const void* base, const long long(&stride)[3], bool packed,
                          int head, int dim) {
      sm80::copy_tile<Shape::threads, copied, Shape::pitch>(
          to, place(base, stride, packed, item.b, row, head), 2 * stride[1], next.count, dim);
    };
    if constexpr (is_keys<of>) {
      copy(to, a.q, a.q_stride, a.cu_seqlens_q, next.head, a.head_dim);
      copy(to + bytes, a.d_out, a.d_out_stride, a.cu_seqlens_q, next.head, a.head_dim_v);
      static_assert(Shape::threads >= 2 * copied);
      const int t = threadIdx.x % copied;
      const long long at = a.rows.first_row(next.head) + item.stats + next.first;
      if (threadIdx.x < 2 * copied)
        ptx::cp_async_if<4>(stats_of(stage) + 4 * threadIdx.x,
                            (threadIdx.x < copied ? a.lse2 : a.delta) + at + t, t < next.count);
    } else {
      const int head = item.head / a.group;
      copy(to, a.k, a.k_stride, a.kv.cu_seqlens, head, a.head_dim);
      copy(to + bytes, a.v, a.v_stride, a.kv.cu_seqlens, head, a.head_dim_v);
    }
  }
};

}  // namespace attn::bwd_sm80
