// The warps that do not compute: one lane takes items and loads, a warp clears rows that belong to
// nobody, and two lanes add dq to memory.
#pragma once
#include "../ptx/acquire.h"
#include "../ptx/arrive.h"
#include "../ptx/bulk.h"
#include "../ptx/cp_async.h"
#include "../ptx/cp_async_16_part.h"
#include "../ptx/load_shared.h"
#include "../ptx/prefetch.h"
#include "../ptx/tma.h"
#include "control.cuh"
#include "sequences.cuh"

namespace attn::bwd_sm90 {

// False: there is nothing to be done.
template <Tile tile>
__device__ __forceinline__ bool describe(const attn_sm90_backward_kernarg& a, unsigned index,
                                         Item& item) {
  const ItemList::At at = a.list.at(index);
  const int b = at.pair / a.heads_q, head = at.pair % a.heads_q;
  const device::Span q = query_span(a, b);
  const device::Span kv = device::segment_span(a.kv, b);
  const bool packed = a.kv.cu_seqlens;
  const int key = at.block * tile.keys();
  if (packed && key >= kv.length) return false;
  item.b = b;
  item.head = head;
  item.head_kv = head / a.group;
  item.block = at.block;
  item.sequence = sequence(a.mask, q.length, kv.length);
  item.tiles = item.sequence.tiles(key, tile.keys());
  item.first_tile = int(a.rows.first_tile(b, q.begin));
  item.key_block = int(first_key_block(packed, b, kv.begin, a.kv.capacity, tile.keys())) + at.block;
  item.q_row = int(q.begin);
  item.q_batch = a.cu_seqlens_q ? 0 : b;
  item.k_row = int(kv.begin);
  item.k_batch = packed ? 0 : b;
  const Range seeing = item.sequence.seeing(), seen = item.sequence.seen();
  const bool any = item.tiles.count() > 0;
  // Rows after the last one of a padded array arrive as zeros.
  item.clears_keys = any && (key < seen.first || (key + tile.keys() > seen.last + 1 &&
                                                  (packed || seen.last + 1 < a.kv.capacity)));
  item.clears_first = any && item.tiles.first * tile_queries < seeing.first;
  item.clears_last = any && (item.tiles.last + 1) * tile_queries > seeing.last + 1 &&
                     (a.cu_seqlens_q || seeing.last + 1 < q.length);
#pragma unroll
  for (int i = 0; i < tile.keys() / 64; ++i) {
    const int first = key + 64 * i, end = first + 64;
    item.whole[i].first = end <= kv.length ? end - item.sequence.upper : 1 << 30;
    item.whole[i].last = first - item.sequence.lower - (tile_queries - 1);
  }
  return true;
}

// The item that the first block of a cluster takes for both: the second one is sent it.
// taken: items that have been taken so before. By one lane of each block.
template <Tile tile>
__device__ __forceinline__ unsigned take_item(const attn_sm90_backward_kernarg& a, Control& c,
                                              unsigned taken) {
  if constexpr (tile.blocks == 1) return atomicAdd(a.taken, 1);
  if (block_of_cluster<tile>() == 0) {
    ptx::mbarrier_wait(address(&c.taken_read), taken & 1 ^ 1);
    const unsigned index = atomicAdd(a.taken, 1);
    ptx::store_async_at(address(&c.taken_item), address(&c.taken), 1, index);
    return index;
  }
  ptx::mbarrier_arrive_expect(address(&c.taken), sizeof(unsigned));
  ptx::mbarrier_wait(address(&c.taken), taken & 1);
  const unsigned index = *const_cast<volatile unsigned*>(&c.taken_item);
  ptx::mbarrier_arrive_at(address(&c.taken_read), 0);
  return index;
}

// By one lane. biased: a bias may hide any row, so all pass through clear_unused.
template <Tile tile, bool biased>
struct Loader {
  using Q = Ring<tile.stages>;
  static constexpr unsigned stats_bytes = tile_queries * 4;

  const attn_sm90_backward_kernarg& a;
  Control& c;
  const unsigned shared;
  unsigned n = 0;  // tiles of queries so far

  // Into keys_raw or queries_raw where rows are to be cleared first.
  __device__ __forceinline__ void load_keys(const Item& item, unsigned count) const {
    const int block = block_of_cluster<tile>();
    const auto load_panel = [&](int at, const attn_tensor_map& map, Barrier& full, int panel,
                                int from) {
      ptx::tma_load(shared + at, &map, address(&full), 64 * panel,
                    item.k_row + item.block * tile.keys() + from * tile.block_keys(), item.head_kv,
                    item.k_batch);
    };
    const auto load = [&](int offset, const attn_tensor_map& map, Barrier& full) {
#pragma unroll
      for (int p = 0; p < tile.panels(); ++p)
        load_panel(offset + p * tile.key_panel(), map, full, p, block);
    };
    const bool clears = biased || item.clears_keys;
    Barrier &v_full = clears ? c.keys_raw : c.v_full, &k_full = clears ? c.keys_raw : c.k_full;
    ptx::mbarrier_wait(address(&c.v_empty), count & 1 ^ 1);
    ptx::mbarrier_arrive_expect(address(&v_full), tile.key_bytes());
    load(tile.v_offset(), a.v, v_full);
    ptx::mbarrier_wait(address(&c.k_empty), count & 1 ^ 1);
    ptx::mbarrier_arrive_expect(address(&k_full), tile.key_bytes() + tile.peer_k_bytes());
    load(tile.k_offset(), a.k, k_full);
#pragma unroll
    for (int p = 0; p < tile.peer_k_bytes() / tile.key_panel(); ++p)
      load_panel(tile.peer_k_offset() + p * tile.key_panel(), a.k, k_full,
                 block * tile.panels() / 2 + p, block ^ 1);
  }
  __device__ __forceinline__ void load_queries(const Item& item, int m) {
    const int s = Q::stage(n);
    const bool clears = biased || item.clears(m);
    const long long at = ((long long)item.head * a.tiles + item.first_tile + m) * tile_queries;
    const auto load = [&](int offset, const attn_tensor_map& map, Barrier& empty, Barrier& full,
                          float* stats, const float* from) {
      ptx::mbarrier_wait(address(&empty), Q::parity(n) ^ 1);
      ptx::mbarrier_arrive_expect(address(&full), tile.query_bytes() + stats_bytes);
#pragma unroll
      for (int p = 0; p < tile.panels(); ++p)
        ptx::tma_load(shared + offset + s * tile.query_bytes() + p * tile.query_panel(), &map,
                      address(&full), 64 * p, item.q_row + m * tile_queries, item.head,
                      item.q_batch);
      ptx::bulk_load(address(stats), from + at, stats_bytes, address(&full));
    };
    load(tile.q_offset(), a.q, c.q_empty[s], clears ? c.queries_raw[s] : c.q_full[s], c.lse[s],
         a.lse2);
    load(tile.d_out_offset(), a.d_out, c.d_out_empty[s],
         clears ? c.queries_raw[s] : c.d_out_full[s], c.delta[s], a.delta);
    ++n;
  }

  __device__ __forceinline__ void run() {
    // The first one too, since blocks that are not running yet must not have any.
    unsigned taken = 0;
    unsigned index = take_item<tile>(a, c, taken++);
    for (unsigned count = 0;; ++count) {
      const int slot = ItemRing::stage(count);
      Item& item = c.item[slot];
      ptx::mbarrier_wait(address(&c.item_empty[slot]), ItemRing::parity(count) ^ 1);
      while (index < a.items && !describe<tile>(a, index, item))
        index = take_item<tile>(a, c, taken++);
      if (index >= a.items) item.b = -1;
      ptx::mbarrier_arrive(address(&c.item_full[slot]));
      if (index >= a.items) return;
      // The first tile of queries comes before K and V, whose place the item before has still.
      for (int m = item.tiles.first; m <= item.tiles.last; ++m) {
        load_queries(item, m);
        if (m == item.tiles.first) load_keys(item, count);
      }
      if (item.tiles.count() == 0) load_keys(item, count);
      index = take_item<tile>(a, c, taken++);
    }
  }
};

// Of a matrix in shared memory, `rows` rows of which the first is number `row`, those outside of
// `used` become 0. By all lanes of a warp.
__device__ __forceinline__ void clear_others(unsigned at, int panels, int rows, int row,
                                             Range used) {
  for (int i = threadIdx.x % 32; i < rows * 8; i += 32) {
    const int here = row + i / 8;
    if (here >= used.first && here <= used.last) continue;
    for (int p = 0; p < panels; ++p) ptx::fill_shared(at + p * rows * 128 + i * 16, 0);
  }
}

// Of the rows of K that `at` is the place of, those with an element that is not finite become 0,
// and have a bit in poisoned, or no bits are kept. So a key that a bias hides reaches nobody's dq;
// consumers make P of those who do see it NaN. By all lanes of a warp.
template <class T>
__device__ __forceinline__ void clear_poisoned(unsigned at, int panels, int rows,
                                               unsigned* poisoned) {
  constexpr unsigned exponent = T::type == attn_element_bf16 ? 0x7f807f80 : 0x7c007c00;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < rows; first += 32) {
    unsigned word = 0;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      unsigned found = 0;
      for (int p = 0; p < panels; ++p) {
        const float4 x =
            ptx::load_shared_floats(at + p * rows * 128 + first * 128 + (32 * step + lane) * 16);
        for (const float pair : {x.x, x.y, x.z, x.w}) {
          // Its halves are 0 where all bits of the exponent are set.
          const unsigned clear_bits = ~__float_as_uint(pair) & exponent;
          found |= clear_bits - 0x00010001 & ~clear_bits & 0x80008000;
        }
      }
      const unsigned lanes = __ballot_sync(0xffffffff, found != 0);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (lanes >> 8 * r & 0xff) word |= 1u << (4 * step + r);
    }
    if (poisoned && lane == 0) poisoned[first / 32] = word;
    for (; word != 0; word &= word - 1) {
      const unsigned row = at + (first + __ffs(word) - 1) * 128;
      for (int i = lane; i < panels * 8; i += 32)
        ptx::fill_shared(row + i / 8 * rows * 128 + i % 8 * 16, 0);
    }
  }
}

// Rows of a tile of Q and dO of which nothing is used, or whose gradients are NaN, become 0: a bias
// may hide them from this block's keys. Rows that see a key have NaN as lse then, if delta is not
// finite. By all lanes of a warp.
template <Tile tile>
__device__ __forceinline__ void clear_poisoned_queries(Control& c, unsigned shared, int stage) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& lse = c.lse[stage][32 * half + lane];
    const auto finite = [](float x) { return fabsf(x) < __int_as_float(0x7f800000); };
    const bool of_delta = !finite(c.delta[stage][32 * half + lane]);
    if (of_delta && finite(lse)) lse = __int_as_float(0x7fffffff);
    for (unsigned rows = __ballot_sync(0xffffffff, of_delta || !finite(lse)); rows != 0;
         rows &= rows - 1) {
      const unsigned row =
          shared + stage * tile.query_bytes() + (32 * half + __ffs(rows) - 1) * 128;
      for (int i = lane; i < tile.panels() * 8; i += 32)
        for (const int offset : {tile.q_offset(), tile.d_out_offset()})
          ptx::fill_shared(row + offset + i / 8 * tile.query_panel() + i % 8 * 16, 0);
    }
  }
}

// Whether the bias is copied to shared memory: 8 neighbouring keys are 16 bytes at a multiple
// of 16.
__device__ __forceinline__ bool copies_bias(const attn_sm90_backward_kernarg& a) {
  return a.bias_type != attn_element_f32 && a.bias_key == 1 &&
         reinterpret_cast<unsigned long long>(a.bias) % 16 == 0 &&
         (a.bias_stride[0] | a.bias_stride[1] | a.bias_query) % 8 == 0;
}
// Where 8 keys of a query are: each warp that computes has its 16 keys together, 32 bytes for each
// query. Halves change places, so that 8 queries are in different banks.
template <Tile tile>
__device__ __forceinline__ unsigned bias_place(unsigned shared, int warp, int query, int half) {
  return shared + tile.bias_offset() + warp * (tile_queries * 32) + query * 32 +
         ((half ^ (query / 4 & 1)) << 4);
}
// By all lanes of a warp; bias_full gets the arrival of each.
template <Tile tile>
__device__ __forceinline__ void copy_bias(const attn_sm90_backward_kernarg& a, Control& c,
                                          unsigned shared, const Item& item, int m) {
  const int lane = threadIdx.x % 32;
  const int key = item.block * tile.keys() + block_of_cluster<tile>() * tile.block_keys();
  const int last = item.sequence.queries - 1 - m * tile_queries;
  const unsigned short* const from = static_cast<const unsigned short*>(a.bias) +
                                     item.b * a.bias_stride[0] + item.head * a.bias_stride[1] +
                                     (long long)(m * tile_queries) * a.bias_query + key;
#pragma unroll 1
  for (int first = 0; first < tile.block_keys(); first += 64) {
    const int here = first + lane % 8 * 8;
    const int bytes = 2 * max(0, min(8, item.sequence.keys - key - here));
    const unsigned short* const column = from + (bytes ? here : 0);
#pragma unroll 4
    for (int row = lane / 8; row < tile_queries; row += 4)
      ptx::cp_async_16_part(bias_place<tile>(shared, here / 16, row, here / 8 % 2),
                            column + (long long)min(row, last) * a.bias_query, bytes);
  }
  ptx::cp_async_arrive(address(&c.bias_full));
}

// Asks for the bias of a tile of queries and the block's keys. By all lanes of a warp.
template <Tile tile>
__device__ __forceinline__ void prefetch_bias(const attn_sm90_backward_kernarg& a, const Item& item,
                                              int m) {
  const int bytes = a.bias_type == attn_element_f32 ? 4 : 2, line_keys = 128 / bytes;
  const int key = item.block * tile.keys() + block_of_cluster<tile>() * tile.block_keys();
  const int keys = min(tile.block_keys(), item.sequence.keys - key);
  if (a.bias_key != 1 || keys <= 0) return;
  const int rows =
      a.bias_query == 0 ? 1 : min(tile_queries, item.sequence.queries - m * tile_queries);
  const int lines = (keys + line_keys - 1) / line_keys;
  const char* const from = static_cast<const char*>(a.bias) +
                           bytes * (item.b * a.bias_stride[0] + item.head * a.bias_stride[1] + key);
  for (int i = threadIdx.x % 32; i < rows * lines; i += 32)
    ptx::prefetch_l2(from + i % lines * 128 +
                     (long long)(m * tile_queries + i / lines) * a.bias_query * bytes);
}

// Clears rows that are loaded and not to be used. By all lanes of a warp.
template <class T, Tile tile, bool biased>
__device__ __forceinline__ void clear_unused(const attn_sm90_backward_kernarg& a, Control& c,
                                             unsigned shared) {
  using Q = Ring<tile.stages>;
  unsigned n = 0;
  const bool copies = biased && copies_bias(a);
  unsigned keys_parity = 0, queries_parity = 0;  // of the next phase; a bit for each stage
  const auto arrive = [](Barrier& first, Barrier& second) {
    ptx::fence_async_shared();
    __syncwarp();
    const bool arrives = threadIdx.x % 32 == 0;
    ptx::mbarrier_arrive_if(address(&first), arrives);
    ptx::mbarrier_arrive_if(address(&second), arrives);
  };
  for (unsigned count = 0;; ++count) {
    const Item& item = wait_item(c, count);
    if (item.b < 0) return;
    const auto clear_queries = [&](int m) {
      const int s = Q::stage(n + m - item.tiles.first);
      if constexpr (biased) {
        if (!copies) prefetch_bias<tile>(a, item, m);
      }
      ptx::mbarrier_wait(address(&c.queries_raw[s]), queries_parity >> s & 1);
      queries_parity ^= 1u << s;
      for (int offset : {tile.q_offset(), tile.d_out_offset()})
        clear_others(shared + offset + s * tile.query_bytes(), tile.panels(), tile_queries,
                     m * tile_queries, item.sequence.seeing());
      if constexpr (biased) clear_poisoned_queries<tile>(c, shared, s);
      arrive(c.q_full[s], c.d_out_full[s]);
      if constexpr (biased) {
        if (copies) {
          ptx::mbarrier_wait(address(&c.bias_empty), n + m - item.tiles.first & 1 ^ 1);
          copy_bias<tile>(a, c, shared, item, m);
        }
      }
    };
    // In the order in which they are loaded.
    if (biased ? item.tiles.count() > 0 : item.clears(item.tiles.first))
      clear_queries(item.tiles.first);
    if (biased || item.clears_keys) {
      ptx::mbarrier_wait(address(&c.keys_raw), keys_parity);
      keys_parity ^= 1;
      const int block = block_of_cluster<tile>();
      const auto clear_keys = [&](int offset, int panels, int from) {
        clear_others(shared + offset, panels, tile.block_keys(),
                     item.block * tile.keys() + from * tile.block_keys(), item.sequence.seen());
      };
      clear_keys(tile.k_offset(), tile.panels(), block);
      clear_keys(tile.v_offset(), tile.panels(), block);
      if (tile.blocks > 1) clear_keys(tile.peer_k_offset(), tile.panels() / 2, block ^ 1);
      if constexpr (biased) {
        clear_poisoned<T>(shared + tile.k_offset(), tile.panels(), tile.block_keys(),
                          c.poisoned + block * (tile.block_keys() / 32));
        if (tile.blocks > 1)
          clear_poisoned<T>(shared + tile.peer_k_offset(), tile.panels() / 2, tile.block_keys(),
                            nullptr);
      }
      arrive(c.k_full, c.v_full);
    }
    if constexpr (biased) {
      for (int m = item.tiles.first + 1; m <= item.tiles.last; ++m) clear_queries(m);
    } else {
      if (item.tiles.count() > 1 && item.clears_last) clear_queries(item.tiles.last);
    }
    n += item.tiles.count();
    __syncwarp();
    ptx::mbarrier_arrive_if(address(&item_empty(c, count)), threadIdx.x % 32 == 0);
  }
}

// Adds dq of the tiles n with n % dq_places == which, or part `which` of dq of all tiles, to
// dq_sum, each when it is its turn. The last block that adds to a tile gets the sum instead, to
// store dq. By one lane.
template <Tile tile>
__device__ __forceinline__ void add_dq(const attn_sm90_backward_kernarg& a, Control& c,
                                       unsigned shared, unsigned which) {
  constexpr int parts = tile.dq_parts();
  const unsigned part = parts == 1 ? 0 : groups * block_of_cluster<tile>() + which;
  const unsigned place = shared + tile.dq_place(which);
  unsigned n = 0;
  // What the tile before is to be counted in, once it has been added.
  unsigned* adds = nullptr;
  const auto finish = [&] {
    if (!adds) return;
    ptx::bulk_wait();
    ptx::fence_async();
    ptx::add_release(adds);
    adds = nullptr;
  };
  for (unsigned count = 0;; ++count) {
    const Item& item = wait_item(c, count);
    if (item.b < 0) return;
    const long long first = (long long)item.head * a.tiles + item.first_tile;
    for (int m = item.tiles.first; m <= item.tiles.last; ++m, ++n) {
      if (parts > 1 || n % tile.dq_places == which) {
        const unsigned number = tile.dq_places == 1 ? n % 2 : which;
        const unsigned parity = parts > 1 ? n & 1 : n / 2 & 1;
        DqTile& to = c.dq[number];
        Barrier &empty = c.dq_empty[number], &full = c.dq_full[number];
        const long long index = (first + m) * parts + part;
        unsigned* const turn = a.turn + index;
        float* const sum = a.dq_sum + index * (tile.dq_bytes() / 4);
        const Order::Turn here = a.order.turn(item.sequence.blocks(m, tile.keys()), item.block);
        // More adds than before: of lengths that contradict each other.
        const auto wait_turn = [&] {
          while (ptx::load_acquire(turn) < unsigned(here.before)) {
          }
          ptx::fence_async();
        };
        const bool is_last = here.before + 1 == here.blocks;
        to.last = !is_last ? not_last : here.before == 0 ? only : last;
        to.rows = item.sequence.queries - m * tile_queries;
        to.at = item.q_batch * a.dq.stride[0] +
                ((long long)item.q_row + m * tile_queries) * a.dq.stride[1] +
                item.head * a.dq.stride[2];
        if (to.last == last) {
          finish();
          wait_turn();
          ptx::mbarrier_arrive_expect(address(&empty), tile.dq_bytes());
          ptx::bulk_load(place, sum, tile.dq_bytes(), address(&empty));
          ptx::mbarrier_wait(address(&full), parity);
        } else {
          ptx::mbarrier_arrive(address(&empty));
          finish();
          if (is_last) {
            ptx::mbarrier_wait(address(&full), parity);
          } else {
            wait_turn();
            ptx::mbarrier_wait(address(&full), parity);
            if (here.before == 0)
              ptx::bulk_store(sum, place, tile.dq_bytes());
            else
              ptx::bulk_add(sum, place, tile.dq_bytes());
            ptx::bulk_commit();
            ptx::bulk_wait_read();
            adds = turn;
          }
        }
      }
    }
    finish();  // nobody waits for the block's next item
    ptx::mbarrier_arrive(address(&item_empty(c, count)));
  }
}

// Rows of dq that see no key become 0. By all lanes of a warp.
template <Tile tile>
__device__ __forceinline__ void clear_dq(const attn_sm90_backward_kernarg& a) {
  if (!a.dq.at || a.dq.add) return;
  const int lane = threadIdx.x % 32, tiles = int(a.rows.tiles_of_sequence());
  const int row_words = a.head_dim * (a.dq.type == attn_element_f32 ? 4 : 2) / 16;
  const long long all = (long long)a.batch * tiles;
  for (long long begin = blockIdx.x * 32ll; begin < all; begin += gridDim.x * 32ll) {
    const int b = int((begin + lane) / tiles), m = int((begin + lane) % tiles);
    int rows = 0;
    long long first = 0;
    if (begin + lane < all) {
      const device::Span q = query_span(a, b);
      const Sequence s = sequence(a.mask, q.length, device::segment_span(a.kv, b).length);
      if (s.blocks(m, tile.keys()).count() == 0)
        rows = min(tile_queries, q.length - m * tile_queries);
      first =
          (a.cu_seqlens_q ? 0 : b * a.dq.stride[0]) + (q.begin + m * tile_queries) * a.dq.stride[1];
    }
    for (unsigned left = __ballot_sync(0xffffffff, rows > 0); left; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const long long at = __shfl_sync(0xffffffff, first, from);
      const int count = __shfl_sync(0xffffffff, rows, from);
      for (int h = 0; h < a.heads_q; ++h)
        for (int i = lane; i < count * row_words; i += 32) {
          const long long row = at + i / row_words * a.dq.stride[1] + h * a.dq.stride[2];
          const int bytes = a.dq.type == attn_element_f32 ? 4 : 2;
          *reinterpret_cast<uint4*>(static_cast<char*>(a.dq.at) + row * bytes +
                                    i % row_words * 16) = make_uint4(0, 0, 0, 0);
        }
    }
  }
}

}  // namespace attn::bwd_sm90
