// Attention forward with mma.sync. A block has a tile of queries of one head and walks over the
// keys that they see; a warp has 16 or 32 of the queries, its scores, its sums and the state of its
// softmax in registers.
#pragma once
#include "../common/element.cuh"
#include "../common/keys.cuh"
#include "../common/lengths.cuh"
#include "../common/no_keys.cuh"
#include "../common/seen_keys.h"
#include "../common/softmax.cuh"
#include "../common/store.cuh"
#include "../common/tanh.cuh"
#include "../ptx/cp_async.h"
#include "../ptx/ex2.h"
#include "../ptx/ldmatrix.h"
#include "../shared/swizzle.h"
#include "forward_args.h"
#include "fragment.h"
#include "pages.cuh"
#include "tile_list.cuh"
#include "tiles.h"
#include "variants.h"

namespace attn::sm80 {

using namespace device;

// The block copies `rows` rows of 128-byte lines; thread t has chunk t % 8 of each line. Rows from
// `count` on and columns from head_dim on become zero.
template <int threads, int rows, int pitch>
__device__ __forceinline__ void copy_tile(unsigned to, const char* from, long long row_bytes,
                                          int count, int head_dim) {
  constexpr int rows_at_once = threads / 8;
  const int first = threadIdx.x / 8, column = threadIdx.x % 8;
  const unsigned at = to + chunk_offset<pitch>(first, column);
  from += first * row_bytes + column * 16;
#pragma unroll
  for (int row = 0; row < rows; row += rows_at_once) {
#pragma unroll
    for (int line = 0; line < pitch / 128; ++line) {
      ptx::cp_async_16(at + row * pitch + line * 128, from + line * 128,
                       first + row < count && 64 * line + 8 * column < head_dim);
    }
    from += rows_at_once * row_bytes;
  }
}

// What all warps of a block share: it is kept in shared memory, so that registers are free for the
// tiles.
struct Block {
  int b, h;
  int row;  // first query
  int seqlen_q, seqlen_kv;
  long long q_begin;  // packed q: row of the sequence's query 0
  int low, high;      // keys that some of the block's queries see
  struct Segment {
    const char *k, *v;  // where key 0 of the sequence would be, were all of it in this segment;
                        // paged: where page 0 is
    int end;            // position after the segment's last key
  } segment[attn_sm80_max_segments];

  template <class Kernarg>
  __device__ __forceinline__ void set_segments(const Kernarg& a) {
    const int kv_head = h / a.group;
    int begin = 0;
    for (int i = 0; i < a.num_segments; ++i) {
      const attn_sm80_segment& s = a.segment[i];
      const Span span = segment_span(s.lengths, b);
      const bool paged = is_paged(a, i);
      const long long batch = paged || s.lengths.cu_seqlens ? 0 : b,
                      row = paged ? 0 : span.begin - begin;
      begin += span.length;
      segment[i] = {static_cast<const char*>(s.k) +
                        2 * (batch * s.k_stride[0] + row * s.k_stride[1] + kv_head * s.k_stride[2]),
                    static_cast<const char*>(s.v) +
                        2 * (batch * s.v_stride[0] + row * s.v_stride[1] + kv_head * s.v_stride[2]),
                    begin};
    }
    seqlen_kv = begin;
  }
};

// The compiler computes what follows from x where it is used instead of keeping it in registers.
__device__ __forceinline__ unsigned recompute(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x, asked for where it is used.
__device__ __forceinline__ int thread_number() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

// The score of query `row` and key j.
template <class T, bool biased>
__device__ __forceinline__ float modified_score(const attn_sm80_forward_kernarg& a,
                                                const Block& block, float dot, int row, int j) {
  float x = dot * a.scale;
  if (a.softcap > 0) x = a.softcap * tanh_accurate(x / a.softcap);
  if (biased && a.bias) {
    const long long at = block.b * a.bias_stride[0] + block.h * a.bias_stride[1] +
                         row * a.bias_stride[2] + j * a.bias_stride[3];
    const float bias = a.bias_type == attn_element_f32
                           ? static_cast<const float*>(a.bias)[at]
                           : T::unpack(static_cast<const unsigned short*>(a.bias)[at]);
    if (bias == -infinity()) return bias;  // not seen, whatever the key holds
    x += bias;
  }
  if (a.alibi_slopes)
    x -= a.alibi_slopes[block.h] * fabsf(float(row + block.seqlen_kv - block.seqlen_q - j));
  return x;
}

// The scores of one warp's queries against a tile of keys, and what becomes of them.
template <class T, int row_tiles, int key_tiles, int v_tiles, bool score, bool biased, bool masked>
struct State {
  float s[row_tiles][key_tiles][4];         // scores, as mma leaves them
  unsigned p[row_tiles][key_tiles / 2][4];  // their weights, as mma takes them
  float o[row_tiles][v_tiles][4];           // sums of weight * v
  // Per row, in the log2 domain: weights are 2^(score - reference). -inf: the row has seen nothing.
  float reference[row_tiles][2];
  float sum[row_tiles][2];  // of the weights in the lane's columns

  // biased, masked: which of the keys that the lane has some of the warp's queries see. Values of
  // the others, which a bias of -inf or a mask can take away from all queries, may be anything:
  // they are taken as zero. 0xffff per key; masked: one bit, for there are few registers.
  unsigned seen[biased && !masked ? key_tiles : 1];
  static constexpr unsigned all_seen = (1u << 2 * key_tiles) - 1;

  // 0xffff for each of the two keys of tile n that are seen.
  __device__ __forceinline__ unsigned seen_words(int n) const {
    return (seen[0] >> 2 * n & 1) * 0xffffu | (seen[0] >> (2 * n + 1) & 1) * 0xffff0000u;
  }

  __device__ __forceinline__ void find_unseen() {
    const unsigned same_keys = 0x11111111u << threadIdx.x % 4;
    if (masked) seen[0] = 0;
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
      unsigned words = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool sees = false;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
          sees = sees || s[m][n][i] != -infinity() || s[m][n][2 + i] != -infinity();
        const unsigned ones = masked ? 1u << (2 * n + i) : 0xffffu << 16 * i;
        words |= (__ballot_sync(0xffffffff, sees) & same_keys) != 0 ? ones : 0;
      }
      if (masked)
        seen[0] |= words;
      else
        seen[biased ? n : 0] = words;
    }
  }

  // s -> p, with s * log2_scale in the log2 domain. split_invariant: the reference is an integer,
  // so that sums taken against different references differ by an exact power of two, and the sum
  // has the weights as rounded.
  template <bool split_invariant>
  __device__ __forceinline__ void softmax(float log2_scale) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      float used[2], shrink[2];
      bool moved = false, large = false;  // large: see ../common/softmax.cuh
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < key_tiles; ++n)
          top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)) * log2_scale;
        const float old = reference[m][half];
        const float next = fmaxf(old, split_invariant ? ceilf(top) : top);
        moved = moved || next != old;
        used[half] = next == -infinity() ? 0 : next;
        large = large || fabsf(used[half]) >= large_score;
        shrink[half] = ptx::ex2(old - used[half]);
        reference[m][half] = next;
      }
      if (__any_sync(0xffffffff, moved || (!score && large))) {
        if (!score && __any_sync(0xffffffff, large)) [[unlikely]] {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < key_tiles; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float& x = s[m][n][2 * half + i];
                x = round_large_score(x, log2_scale, used[half]) * ptx::rcp(log2_scale);
              }
            used[half] = 0;
          }
        }
        sum[m][0] *= shrink[0];
        sum[m][1] *= shrink[1];
#pragma unroll
        for (int n = 0; n < v_tiles; ++n) {
          o[m][n][0] *= shrink[0];
          o[m][n][1] *= shrink[0];
          o[m][n][2] *= shrink[1];
          o[m][n][3] *= shrink[1];
        }
      }
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = ptx::ex2(fmaf(s[m][n][2 * half], log2_scale, -used[half]));
          float y = ptx::ex2(fmaf(s[m][n][2 * half + 1], log2_scale, -used[half]));
          const unsigned packed = T::pack(x, y);
          if (split_invariant) {
            x = T::unpack(packed & 0xffff);
            y = T::unpack(packed >> 16);
          }
          sum[m][half] += x + y;
          p[m][n / 2][n % 2 * 2 + half] = packed;
        }
      }
    }
  }
};

template <bool is>
struct Constant {
  static constexpr bool value = is;
};

template <int keys>
__device__ __forceinline__ TileList<keys>& shared_list() {
  __shared__ TileList<keys> list;
  return list;
}

template <int keys>
__device__ __forceinline__ Places<keys>& shared_places() {
  __shared__ Places<keys> places;
  return places;
}

// head_dim: the columns of both products; a smaller one is padded with zeros.
template <class T, int head_dim, unsigned with, Tile tile = tile_of(head_dim, with& with_score)>
__device__ __forceinline__ void forward(const Kernarg<with>& a) {
  constexpr bool score = with & with_score, masked = with & with_mask, paged = with & with_pages;
  constexpr bool biased = score && !paged;
  constexpr int threads = tile.threads(), keys = tile.keys;
  constexpr int pitch = pitch_bytes(head_dim), kv_bytes = tile_bytes(tile, head_dim);
  constexpr int warp_rows = tile.rows / tile.warps, row_tiles = warp_rows / 16;
  constexpr int d_steps = head_dim / 16, key_tiles = keys / 8, v_tiles = head_dim / 8;

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = unsigned(__cvta_generic_to_shared(shared_memory));
  const unsigned q_at = shared + q_offset(tile, head_dim);
  __shared__ Block block;
  __shared__ SeenKeys warp_keys[tile.warps];
  static_assert(sizeof block + sizeof warp_keys + (masked ? sizeof(TileList<keys>) : 0) +
                    (paged ? sizeof(Places<keys>) : 0) <=
                static_shared_bytes(with));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row_keys = [&](int row) { return a.mask.keys(row, block.seqlen_q, block.seqlen_kv); };

  // Packed q, which block masks do not take. Meanwhile another warp waits for the lengths too.
  if (!masked && a.cu_seqlens_q) {
    if (warp == tile.warps - 1) store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
    if (a.seqlen_q == 0) return;
  }
  if (threadIdx.x == 0) {
    const unsigned tiles = (a.seqlen_q + tile.rows - 1) / tile.rows;
    const QueryTile item = query_tile(blockIdx.x, a.batch, a.heads_q, tiles, a.chunk);
    block.b = item.b;
    block.h = item.h;
    block.row = item.tile * tile.rows;
    const Span queries = a.cu_seqlens_q
                             ? packed_span(a.cu_seqlens_q, block.b, a.total_q, a.seqlen_q)
                             : Span{0, a.seqlen_q};
    block.q_begin = queries.begin;
    block.seqlen_q = queries.length;
    block.set_segments(a);
    const int last = min(block.row + tile.rows, queries.length) - 1;
    block.low = clamp(row_keys(block.row).begin, 0, block.seqlen_kv);
    block.high = clamp(row_keys(last).end, 0, block.seqlen_kv);
  }
  __syncthreads();
  if (block.row >= block.seqlen_q) return;
  const int warp_row = block.row + warp * warp_rows;
  if constexpr (masked) {
    TileList<keys>& list = shared_list<keys>();
    if (warp == 0) {
      if (lane == 0) list.start(a.block_mask, block, tile.rows);
      __syncwarp();
      list.fill(a.block_mask, block);
      if (lane == 0 && list.count > 1) block.low = list.tile[1].first;
    }
    __syncthreads();
  }
  if (lane == 0) {
    SeenKeys see = {0, 0, 0, 0};
    if (warp_row < block.seqlen_q) {
      const KeyRange first = row_keys(warp_row),
                     last = row_keys(min(warp_row + warp_rows, block.seqlen_q) - 1);
      const int length = block.seqlen_kv;
      see = {clamp(first.begin, 0, length), clamp(last.end, 0, length),
             clamp(last.begin, 0, length), clamp(first.end, 0, length)};
    }
    warp_keys[warp] = see;
  }
  __syncwarp();

  // The number in Places of the tile `next`: with two stages that of its stage.
  unsigned stage_at = shared;
  [[maybe_unused]] int toggle = 0;
  [[maybe_unused]] const auto number = [&] {
    return tile.stages == 2 ? int(stage_at != shared) : toggle;
  };
  const auto copy_k = [&](unsigned to, const auto& from) {
    if constexpr (paged) {
      Places<keys>& places = shared_places<keys>();
      const unsigned num_pages = a.pages[from.segment].num_pages;
      if (warp == 0) places.find_there(number(), num_pages);
      places.template copy<threads, pitch>(number(), to, block.segment[from.segment].k,
                                           a.segment[from.segment].k_stride, num_pages, from.left,
                                           a.head_dim);
    } else {
      const long long stride = 2 * a.segment[from.segment].k_stride[1];
      copy_tile<threads, keys, pitch>(to, block.segment[from.segment].k + from.first * stride,
                                      stride, from.left, a.head_dim);
    }
  };
  const auto copy_v = [&](unsigned to, const auto& from) {
    if constexpr (paged) {
      shared_places<keys>().template copy<threads, pitch>(
          number(), to, block.segment[from.segment].v, a.segment[from.segment].v_stride,
          a.pages[from.segment].num_pages, from.left, a.head_dim_v);
    } else {
      const long long stride = 2 * a.segment[from.segment].v_stride[1];
      copy_tile<threads, keys, pitch>(to, block.segment[from.segment].v + from.first * stride,
                                      stride, from.left, a.head_dim_v);
    }
  };

  // The query of a fragment's row.
  const auto row_at = [&](int m, int half) {
    if constexpr (!masked) return warp_row + 16 * m + fragment_row(half, lane);
    const int thread = thread_number();
    return block.row + thread / 32 * warp_rows + 16 * m + fragment_row(half, thread % 32);
  };
  auto next = [&] {
    if constexpr (masked)
      return ListedKeys(shared_list<keys>());
    else
      return Keys(block);
  }();
  const auto go_on = [&] {
    if constexpr (masked)
      next.next(shared_list<keys>(), a.block_mask, block);
    else
      next.next(block, keys);
    if (paged) toggle ^= 1;
  };
  // paged: requests the places of the tile after `next`, which arrive with the next group.
  const auto ask_behind = [&] {
    if constexpr (paged) {
      Keys behind = next;
      behind.next(block, keys);
      shared_places<keys>().ask(number() ^ 1, a, block, behind);
    }
  };
  const bool any = next.left > 0;
  if (any) {
    if constexpr (paged) {
      shared_places<keys>().ask(number(), a, block, next);
      if (tile.stages == 2) ask_behind();
      ptx::cp_async_commit();
    }
    const long long row = (a.cu_seqlens_q ? 0 : block.b * a.q_stride[0]) +
                          (block.q_begin + block.row) * a.q_stride[1] + block.h * a.q_stride[2];
    copy_tile<threads, tile.rows, pitch>(q_at, static_cast<const char*>(a.q) + 2 * row,
                                         2 * a.q_stride[1], block.seqlen_q - block.row, a.head_dim);
    ptx::cp_async_commit();
    if constexpr (paged) {
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    copy_k(shared, next);
    ptx::cp_async_commit();
    if (tile.stages == 2) {
      copy_v(shared + kv_bytes, next);
      ptx::cp_async_commit();
    }
  }

  State<T, row_tiles, key_tiles, v_tiles, score, biased, masked> state;
  if (biased && !masked) {
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) state.seen[biased ? n : 0] = 0xffffffff;
  }
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.reference[m][half] = -infinity();
      state.sum[m][half] = 0;
    }
#pragma unroll
    for (int n = 0; n < v_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[m][n][i] = 0;
  }

  // Each lane's place in the matrices that ldmatrix reads. The 16 columns of step d lie at ^
  // line_step(d) in line d / 4.
  const auto line_step = [](int d) { return d % 4 * 32; };
  const unsigned k_lane = chunk_offset<pitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const unsigned v_lane =
      chunk_offset<pitch>(lane % 16, lane / 16);  // of Q too, from the warp's first row

  if (!score && a.scale < 0 && any) {  // softmax takes a scale above 0
    ptx::cp_async_wait<0>();
    __syncthreads();
    unsigned* words = reinterpret_cast<unsigned*>(shared_memory + q_offset(tile, head_dim));
    for (int i = threadIdx.x; i < q_bytes(tile, head_dim) / 4; i += threads) words[i] ^= 0x80008000;
    __syncthreads();
  }
  unsigned q[row_tiles][tile.q_in_registers ? d_steps : 1][4];
  if (tile.q_in_registers && any) {
    ptx::cp_async_wait<tile.stages>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int d = 0; d < (tile.q_in_registers ? d_steps : 1); ++d)
        ptx::ldmatrix(q[m][d], ((v_lane + q_at + warp * (warp_rows * pitch)) ^ line_step(d)) +
                                   d / 4 * 128 + m * 16 * pitch);
  }
  const float log2_scale = score ? 1 : a.log2_scale;

  while (next.left > 0) {
    int tile_first = next.first, count = min(next.left, keys);
    int mask = mask_full;  // what mask_block says about the tile for the warp's queries
    // With a mask there are no registers to keep these in: they are read where they are used. `at`:
    // in the list.
    [[maybe_unused]] const auto read_tile = [&](int at) {
      const TileList<keys>& list = shared_list<keys>();
      const auto& t = list.tile[recompute(at)];
      tile_first = t.first;
      count = t.left;
      mask = t.mask[block.row + thread_number() / 32 * warp_rows >= list.first[1]];
    };
    const unsigned k_at = recompute(stage_at + k_lane);
    if (tile.stages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      copy_v(shared + kv_bytes, next);
      ask_behind();
      ptx::cp_async_commit();
    } else {
      if (tile_first == block.low)  // V of the first tile is a group of its own
        ptx::cp_async_wait<1>();
      else
        ptx::cp_async_wait<0>();
      __syncthreads();
      stage_at = 2 * shared + 2 * kv_bytes - stage_at;
      go_on();
      if (next.left > 0) {
        copy_k(stage_at, next);
        copy_v(stage_at + kv_bytes, next);
        ask_behind();
      }
      ptx::cp_async_commit();
    }

    const SeenKeys see = warp_keys[masked ? thread_number() / 32 : warp];
    if constexpr (masked) read_tile(tile.stages == 1 ? next.at : next.at - 1);
    const bool sees = tile_first < see.some_end && tile_first + count > see.some_begin &&
                      (!masked || mask != mask_empty);
    if (sees) {
      const unsigned q_here = v_lane + q_at + recompute(warp) * (warp_rows * pitch);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < key_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) state.s[m][n][i] = 0;
#pragma unroll
      for (int d = 0; d < d_steps; ++d) {
        if (!tile.q_in_registers)
#pragma unroll
          for (int m = 0; m < row_tiles; ++m)
            ptx::ldmatrix(q[m][0], (q_here ^ line_step(d)) + d / 4 * 128 + m * 16 * pitch);
#pragma unroll
        for (int n = 0; n < key_tiles; n += 2) {
          unsigned k[4];
          ptx::ldmatrix(k, (k_at ^ line_step(d)) + d / 4 * 128 + n * 8 * pitch);
#pragma unroll
          for (int m = 0; m < row_tiles; ++m) {
            T::mma(state.s[m][n], q[m][tile.q_in_registers ? d : 0], k[0], k[1]);
            T::mma(state.s[m][n + 1], q[m][tile.q_in_registers ? d : 0], k[2], k[3]);
          }
        }
      }
    }

    if (tile.stages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      go_on();
      if (next.left > 0) copy_k(shared, next);
      ptx::cp_async_commit();
    }

    if (sees) {
      const SeenKeys see = warp_keys[masked ? thread_number() / 32 : warp];
      if constexpr (masked) read_tile(next.at - 1);
      const auto all_there = [&] {
        unsigned all = ~0u;
        if constexpr (paged) {
#pragma unroll
          for (int n = 0; n < keys / 32; ++n) all &= shared_places<keys>().there[number() ^ 1][n];
        }
        return all == ~0u;
      };
      const bool full = tile_first >= see.all_begin && tile_first + keys <= see.all_end &&
                        count == keys && (!masked || mask == mask_full) && all_there();
      if (score || !full) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = row_at(m, half);
            const KeyRange r = row_keys(row);
            const int begin = clamp(r.begin - tile_first, 0, keys);
            int end = row < block.seqlen_q ? clamp(r.end - tile_first, 0, count) : 0;
            unsigned bits[keys / 32];  // of the lane's first column and those after it
            if constexpr (masked) {
              const int block_q = 1 << a.block_mask.block_q_log2,
                        block_k = 1 << a.block_mask.block_k_log2;
              if (mask == mask_causal)
                end = min(end, row + block.seqlen_kv - block.seqlen_q + 1 - tile_first);
#pragma unroll
              for (int n = 0; n < keys / 32; ++n) {
                bits[n] = ~0u;
                if (mask >= 0 && row < block.seqlen_q)
                  bits[n] = mask_word(a.block_mask, mask, row & (block_q - 1),
                                      (tile_first & (block_k - 1)) + 32 * n) >>
                            fragment_column(0, lane);
              }
            }
            if constexpr (paged) {
#pragma unroll
              for (int n = 0; n < keys / 32; ++n)
                bits[n] = shared_places<keys>().there[number() ^ 1][n] >> fragment_column(0, lane);
            }
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int column = 8 * n + fragment_column(i, lane);
                float& s = state.s[m][n][2 * half + i];
                if (column < begin || column >= end ||
                    ((masked || paged) && !(bits[n / 4] >> (8 * n % 32 + i) & 1)))
                  s = -infinity();
                else if (score)
                  s = log2_e * modified_score<T, biased>(a, block, s, row, tile_first + column);
              }
            }
          }
        }
      }
      if (masked) state.seen[0] = state.all_seen;
      if ((masked && !full) || (biased && a.bias)) state.find_unseen();
      if (a.split_invariant)
        state.template softmax<true>(log2_scale);
      else
        state.template softmax<false>(log2_scale);
    }
    if constexpr (masked && tile.stages == 2) read_tile(next.at - 1);
    if (tile.stages == 2 && tile_first == block.low) {
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    if (sees) {
      // With two stages stage_at has moved on to the other one.
      const unsigned here = tile.stages == 2 ? 2 * shared + 2 * kv_bytes - stage_at : stage_at;
      const unsigned v_at = recompute(here + kv_bytes + v_lane);
      const auto multiply = [&](auto zeroing) {
#pragma unroll
        for (int k = 0; k < key_tiles / 2; ++k) {
          unsigned seen[2];
          if (masked && zeroing.value)
            seen[0] = state.seen_words(2 * k), seen[1] = state.seen_words(2 * k + 1);
#pragma unroll
          for (int n = 0; n < v_tiles; n += 2) {
            unsigned v[4];
            ptx::ldmatrix_transposed(v, (v_at ^ line_step(n / 2)) + n / 8 * 128 + k * 16 * pitch);
            if (zeroing.value) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
                v[i] &= masked ? seen[i % 2] : state.seen[biased && !masked ? 2 * k + i % 2 : 0];
            }
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) {
              T::mma(state.o[m][n], state.p[m][k], v[0], v[1]);
              T::mma(state.o[m][n + 1], state.p[m][k], v[2], v[3]);
            }
          }
        }
      };
      if (masked &&
          __all_sync(0xffffffff, state.seen[0] == state.all_seen))  // lanes have other keys
        multiply(Constant<false>{});
      else
        multiply(Constant < biased || masked > {});
    }
    if constexpr (masked) next.read(shared_list<keys>());
  }
  ptx::cp_async_wait<0>();

  const float sink = a.sinks ? a.sinks[block.h] : -infinity();
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
    auto& o = reinterpret_cast<float(&)[4 * v_tiles]>(state.o[m]);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(state.sum[m][half]);
      factor[half] = row_factor(state.reference[m][half], sum, sink);
      const float lse = row_lse(state.reference[m][half], sum, sink);
      const int row = row_at(m, half);
      const bool valid = row < block.seqlen_q;
      if (a.lse && valid && lane % 4 == 0) {
        const long long at = a.cu_seqlens_q
                                 ? block.h * a.total_q + block.q_begin + row
                                 : (block.b * (long long)a.heads_q + block.h) * a.seqlen_q + row;
        a.lse[at] = lse;
      }
    }
    clear_rows(o, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(m, half);
      const long long at = (a.cu_seqlens_q ? 0 : block.b * a.out_stride[0]) +
                           (block.q_begin + row) * a.out_stride[1] + block.h * a.out_stride[2];
      store_row(a.out, a.out_type, at, row < block.seqlen_q, o, half, factor[half], a.head_dim_v);
    }
  }
}

}  // namespace attn::sm80

// The kernel of the variant NAME.
#define ATTN_SM80_FORWARD(NAME)                                                                \
  constexpr attn::sm80::Variant NAME##_variant =                                               \
      attn::sm80::variants[attn::find_variant(attn::sm80::variants, #NAME)];                   \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile().threads(),                \
                                               NAME##_variant.tile().blocks)                   \
      NAME(const __grid_constant__ attn::sm80::Kernarg<NAME##_variant.with> a) {               \
    attn::sm80::forward<attn::device::ElementOf<NAME##_variant.type>, NAME##_variant.head_dim, \
                        NAME##_variant.with>(a);                                               \
  }
