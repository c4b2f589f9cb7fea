// Gradients of attention with wgmma and the copy engine. A block stays on its multiprocessor and
// takes work items, blocks of keys, one after the other. Two warpgroups compute; each keeps dk and
// dv of its half of the keys in registers, and goes over the tiles of queries on its own. They
// exchange ds through shared memory only: dq of a tile takes ds of all keys of the block, and one
// warpgroup finds it for both, in turns, a tile later. It is added in float32 to memory, in an
// order that follows from the problem (order.h).
#pragma once
#include "../backward/store_gradient.cuh"
#include "../common/element.cuh"
#include "../common/tanh.cuh"
#include "../ptx/ex2.h"
#include "../ptx/grid.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "load.cuh"
#include "variants.h"

namespace attn::bwd_sm90 {

using device::infinity;

__device__ __forceinline__ unsigned low_bits(int n) {
  return n >= 32 ? ~0u : (1u << n) - 1;
}

// A warp that computes: 16 of the 64 keys of each of its warpgroup's subtiles.
template <class T, Tile tile, bool score>
struct Consumer {
  static constexpr bool bf16 = T::type == attn_element_bf16;
  static constexpr int dim = tile.head_dim, key_panel = tile.key_panel(),
                       query_panel = tile.query_panel();
  using Q = Ring<tile.stages>;

  const attn_sm90_backward_kernarg& a;
  Control& c;
  const unsigned shared;
  const int group, warp, lane;

  // What the warp's lanes have read or written before is ordered before the arrival of one.
  __device__ __forceinline__ void release(Barrier& barrier) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(address(&barrier), lane == 0);
  }
  // Offsets in shared memory of 16 columns, in units of 16 bytes.
  static __device__ constexpr int columns_at(int step, int panel) {
    return (step / 4 * panel + step % 4 * 32) / 16;
  }

  // dq of tile n, from ds of all keys of the block.
  __device__ __forceinline__ void find_dq(unsigned n) const {
    float dq[dim / 2];
    const int which = n % 2;
    ptx::mbarrier_wait(address(&c.ds_full[which]), n / 2 & 1);
    const unsigned long long ds = ptx::wgmma_descriptor(
        ptx::uniform((shared + tile.ds_offset() + which * tile.ds_bytes()) / 16), 0);
    const unsigned long long k =
        ptx::wgmma_descriptor(ptx::uniform((shared + tile.k_offset()) / 16), key_panel);
    ptx::forget(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < tile.keys() / 16; ++step)
      ptx::wgmma_transposed<bf16>(dq, ds + step * 128, k + step * 128, step > 0);
    ptx::wgmma_commit();
    ptx::mbarrier_wait(address(&c.dq_empty[which]), n / 2 & 1);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(c.ds_empty[which]);
    const unsigned place =
        shared + tile.dq_offset() + which * tile.dq_bytes() + threadIdx.x % 128 * 16;
    const DqTile& to = c.dq[which];
    if (to.last == not_last) {
#pragma unroll
      for (int i = 0; i < dim / 8; ++i) ptx::store_shared_floats(place + i * 2048, dq + 4 * i);
    } else {
      if (to.last == last) {
#pragma unroll
        for (int i = 0; i < dim / 8; ++i) {
          const float4 sum = ptx::load_shared_floats(place + i * 2048);
          dq[4 * i] += sum.x, dq[4 * i + 1] += sum.y, dq[4 * i + 2] += sum.z,
              dq[4 * i + 3] += sum.w;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + lane / 4 + 8 * half;
        if (a.dq.at)
          device::store_gradient<T>(a.dq, to.at + row * a.dq.stride[1], row < to.rows, dq, half,
                                    a.scale, a.head_dim);
      }
    }
    ptx::fence_async_shared();
    release(c.dq_full[which]);
  }

  // Scores with softcap and ALiBi: s becomes P times softcap's slope, and p is P. seen: of the
  // lane's queries, for its key of each half. away: from its key of half 0 to its first query, in
  // positions of which the last query and the last key have the same.
  __device__ __forceinline__ void weigh(float (&s)[32], unsigned (&p)[4][4], unsigned stats,
                                        const unsigned (&seen)[2], float away, int head) const {
    const bool capped = a.into_softcap != 0;
    const float alibi = a.alibi_slopes ? a.alibi_slopes[head] * device::log2_e : 0;
    if (capped) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = device::tanh_accurate(s[i] * a.into_softcap);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse = ptx::load_shared_two_floats(address(&c.lse) + stats + j * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          const bool hidden = !(seen[half] >> (2 * j + i) & 1);
          const float distance = fabsf(away + float(8 * j + i - 8 * half));
          const float power = fmaf(-alibi, distance, fmaf(x, a.log2_scale, i ? -lse.y : -lse.x));
          weight[i] = hidden ? 0 : ptx::ex2(power);
          x = hidden ? 0 : weight[i] * (capped ? 1 - x * x : 1);
        }
        p[j / 2][j % 2 * 2 + half] = T::pack(weight[0], weight[1]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const auto at_16 = [&](int offset) { return ptx::uniform((shared + offset) / 16); };
    const int own = group * tile.subtiles * 64 * 128;
    const unsigned long long k = ptx::wgmma_descriptor(at_16(tile.k_offset() + own), 0),
                             v = ptx::wgmma_descriptor(at_16(tile.v_offset() + own), 0);
    // Where the lane's rows of ds go. Rows are keys, of 64 queries, which are 128 bytes: stmatrix
    // stores 16 keys and 16 queries at a time.
    const int ds_row = 64 * tile.subtiles * group + 16 * warp + lane % 16;
    const unsigned ds_at = shared + tile.ds_offset() + ds_row * 128;
    float dk[tile.subtiles][dim / 2], dv[tile.subtiles][dim / 2];
    unsigned n = 0;
    for (unsigned count = 0;; ++count) {
      const Item& item = wait_item(c, count);
      if (item.b < 0) break;
      ptx::mbarrier_wait(address(&c.k_full), count & 1);
      ptx::mbarrier_wait(address(&c.v_full), count & 1);
#pragma unroll
      for (int u = 0; u < tile.subtiles; ++u)
#pragma unroll
        for (int i = 0; i < dim / 2; ++i) dk[u][i] = dv[u][i] = 0;
      int query = item.tiles.first * tile_queries;
      const unsigned first = n, end = n + item.tiles.count();
      for (;; ++n) {
        if (n == end) {
          release(c.v_empty);
        } else {
          const int stage = Q::stage(n);
          const unsigned q_at = at_16(tile.q_offset() + stage * tile.query_bytes()),
                         d_out_at = at_16(tile.d_out_offset() + stage * tile.query_bytes());
          const unsigned long long q = ptx::wgmma_descriptor(q_at, 0),
                                   d_out = ptx::wgmma_descriptor(d_out_at, 0),
                                   qt = ptx::wgmma_descriptor(q_at, query_panel),
                                   d_out_t = ptx::wgmma_descriptor(d_out_at, query_panel);
          const unsigned stats = stage * tile_queries * 4 + lane % 4 * 8;
          // As wgmma leaves the scores of 16 keys and 64 queries in a lane: s[4 j + 2 half + i] is
          // that of key lane / 4 + 8 half and query 8 j + lane % 4 * 2 + i.
          float s[32], dp[32];
          const auto start_scores = [&](int u) {
            ptx::forget(s);
            ptx::wgmma_fence();
#pragma unroll
            for (int d = 0; d < dim / 16; ++d)
              ptx::wgmma<bf16>(s, k + (u * 512 + columns_at(d, key_panel)),
                               q + columns_at(d, query_panel), d > 0);
            ptx::wgmma_commit();
          };
          const auto start_dp = [&](int u) {
            ptx::forget(dp);
            ptx::wgmma_fence();
#pragma unroll
            for (int d = 0; d < dim / 16; ++d)
              ptx::wgmma<bf16>(dp, v + (u * 512 + columns_at(d, key_panel)),
                               d_out + columns_at(d, query_panel), d > 0);
            ptx::wgmma_commit();
          };
          ptx::mbarrier_wait(address(&c.q_full[stage]), Q::parity(n));
          start_scores(0);
          ptx::mbarrier_wait(address(&c.d_out_full[stage]), Q::parity(n));
          start_dp(0);
#pragma unroll
          for (int u = 0; u < tile.subtiles; ++u) {
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            if constexpr (!score) {
#pragma unroll
              for (int j = 0; j < 8; ++j) {
                const float2 lse = ptx::load_shared_two_floats(address(&c.lse) + stats + j * 32);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                  s[4 * j + i] = fmaf(s[4 * j + i], a.log2_scale, i % 2 ? -lse.y : -lse.x);
              }
            }
            unsigned p[4][4], ds[4][4];
            const int subtile = tile.subtiles * group + u;
            // The lane's key of half 0, and its first query of the tile. Not in registers all
            // along.
            const auto first_key = [&] {
              return item.block * tile.keys() + 64 * subtile + 16 * warp + lane / 4;
            };
            const auto first_query = [&] { return query + lane % 4 * 2; };
            unsigned seen[2] = {~0u, ~0u};
            if (query < item.whole[subtile].first || query > item.whole[subtile].last) {
              const int key = first_key(), origin = first_query(), keys = item.sequence.keys;
              const int from = key - item.sequence.upper + 1 - origin,
                        to = key - item.sequence.lower + 1 - origin;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                // Queries that see the key, counted from the lane's first one of the tile.
                const int begin = min(max(from + 8 * half, 0), tile_queries),
                          end = min(max(to + 8 * half, 0), tile_queries);
                const auto count = [](int x) { return x / 8 * 2 + min(x % 8, 2); };
                seen[half] =
                    key + 8 * half < keys ? low_bits(count(end)) & ~low_bits(count(begin)) : 0;
                if constexpr (!score) {
#pragma unroll
                  for (int i = 0; i < 16; ++i)
                    if (!(seen[half] >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -infinity();
                }
              }
              ptx::pin(s);
            }
            if constexpr (score) {
              weigh(s, p, stats, seen,
                    float(first_query() - first_key() + item.sequence.keys - item.sequence.queries),
                    item.head);
            } else {
#pragma unroll
              for (int i = 0; i < 32; ++i) s[i] = ptx::ex2(s[i]);
#pragma unroll
              for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = T::pack(s[2 * i], s[2 * i + 1]);
            }
            ptx::pin(dv[u]);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
              ptx::wgmma<bf16, true>(dv[u], p[step], d_out_t + step * 128, true);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();  // dp is there, and dk of the subtile before
            ptx::pin(dp);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const float2 delta = ptx::load_shared_two_floats(address(&c.delta) + stats + j * 32);
#pragma unroll
              for (int i = 0; i < 4; ++i)
                dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) ds[i / 4][i % 4] = T::pack(dp[2 * i], dp[2 * i + 1]);
            const int which = n % 2;
            if (u == 0) ptx::mbarrier_wait(address(&c.ds_empty[which]), n / 2 & 1 ^ 1);
#pragma unroll
            for (int step = 0; step < 4; ++step)
              ptx::stmatrix(ds_at + which * tile.ds_bytes() + u * 8192 +
                                ((2 * step + lane / 16 ^ ds_row % 8) << 4),
                            ds[step]);
            if (u == tile.subtiles - 1) ptx::fence_async_shared();
            ptx::pin(dk[u]);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
              ptx::wgmma<bf16, true>(dk[u], ds[step], qt + step * 128, true);
            ptx::wgmma_commit();
            if (u + 1 < tile.subtiles) {
              // Waits that cost little, since ptxas makes all products synchronous if it finds more
              // registers in use: p is free with dv, ds with dk.
              ptx::wgmma_wait<1>();
              ptx::pin(dv[u]);
              start_scores(u + 1);
              ptx::wgmma_wait<1>();
              ptx::pin(dk[u]);
              start_dp(u + 1);
            } else {
              release(c.ds_full[which]);
            }
          }
          ptx::wgmma_wait<1>();
          release(c.d_out_empty[stage]);
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int u = 0; u < tile.subtiles; ++u) {
            ptx::pin(dv[u]);
            ptx::pin(dk[u]);
          }
          release(c.q_empty[stage]);
        }
        if (n != first && n % 2 == group) find_dq(n - 1);
        if (n == end) break;
        query += tile_queries;
      }
      release(c.k_empty);
      if (a.group == 1 || add_heads(dk, dv, item)) store(dk, dv, item);
      release(item_empty(c, count));
    }
  }

  // Adds what the heads before have in kv_sum. True: it is the last one; else the sum is there.
  // Heads come in their order, each warp for itself.
  __device__ __forceinline__ bool add_heads(float (&dk)[tile.subtiles][dim / 2],
                                            float (&dv)[tile.subtiles][dim / 2],
                                            const Item& item) const {
    const int number = item.head % a.group;
    const long long at = (long long)item.head_kv * a.key_blocks + item.key_block;
    unsigned* const turn = a.kv_turn + at * (4 * groups) + 4 * group + warp;
    float4* const sum = reinterpret_cast<float4*>(a.kv_sum) + at * (2 * tile.keys() * dim / 4) +
                        group * (tile.subtiles * dim / 4 * 128) + threadIdx.x % 128;
    if (number > 0) {
      while (ptx::load_acquire(turn) < unsigned(number)) {
      }
      __syncwarp();
    }
    const bool is_last = number == a.group - 1;
#pragma unroll
    for (int u = 0; u < tile.subtiles; ++u)
#pragma unroll
      for (int i = 0; i < dim / 4; ++i) {
        float* const x = i < dim / 8 ? &dk[u][4 * i] : &dv[u][4 * i - dim / 2];
        float4* const to = sum + (u * (dim / 4) + i) * 128;
        if (number > 0) {
          const float4 y = __ldcg(to);
          x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
        }
        if (!is_last) __stcg(to, make_float4(x[0], x[1], x[2], x[3]));
      }
    if (!is_last) {
      __syncwarp();
      if (lane == 0) ptx::add_release(turn);
    }
    return is_last;
  }

  __device__ __forceinline__ void store(float (&dk)[tile.subtiles][dim / 2],
                                        float (&dv)[tile.subtiles][dim / 2],
                                        const Item& item) const {
    const int keys = item.sequence.keys;
    const int key = item.block * tile.keys() + 64 * tile.subtiles * group + 16 * warp + lane / 4;
#pragma unroll
    for (int u = 0; u < tile.subtiles; ++u) {
      // Rows after the last key, which have no gradients: a packed array has others' there, and of
      // a padded one they become 0.
      const int row[2] = {key + 64 * u, key + 64 * u + 8};
      const float exists[2] = {row[0] < keys ? 1.f : 0.f, row[1] < keys ? 1.f : 0.f};
      const auto store_all = [&](const attn_gradient_array& g, float(&o)[dim / 2], float factor,
                                 int columns) {
        if (!g.at) return;
        device::clear_rows(o, exists);
        const int rows = a.kv.cu_seqlens || g.add ? keys : a.kv.capacity;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          device::store_gradient<T>(g,
                                    item.k_batch * g.stride[0] +
                                        (item.k_row + (long long)row[half]) * g.stride[1] +
                                        item.head_kv * g.stride[2],
                                    row[half] < rows, o, half, factor, columns);
      };
      store_all(a.dv, dv[u], 1, a.head_dim_v);
      store_all(a.dk, dk[u], a.scale, a.head_dim);
    }
  }
};

template <class T, const Variant& variant>
__device__ __forceinline__ void backward(const attn_sm90_backward_kernarg& a) {
  constexpr Tile tile = variant.tile;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Control& control = *reinterpret_cast<Control*>(shared_memory);
  const unsigned shared = address(shared_memory);
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) init_barriers(control);
  __syncthreads();
  ptx::grid_let_next_start();
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    ptx::registers_shrink<40>();
    if (warp == 2) {
      clear_dq<tile>(a);
      clear_unused<tile>(a, control, shared);
    } else if (threadIdx.x == 0) {
      Loader<tile>{a, control, shared}.run();
    } else if (threadIdx.x % 32 == 0) {
      add_dq<tile>(a, control, shared, warp / 2);
    }
  } else {
    ptx::registers_grow<232>();
    Consumer<T, tile, variant.score>{
        a, control, shared, warp / 4 - 1, warp % 4, int(threadIdx.x % 32)}
        .run();
  }
}

}  // namespace attn::bwd_sm90

#define ATTN_SM90_BACKWARD(NAME)                                                               \
  constexpr attn::bwd_sm90::Variant NAME##_variant =                                           \
      attn::bwd_sm90::variants[attn::find_variant(attn::bwd_sm90::variants, #NAME)];           \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile.threads(), 1)               \
      NAME(const __grid_constant__ attn_sm90_backward_kernarg a) {                             \
    attn::bwd_sm90::backward<attn::device::ElementOf<NAME##_variant.type>, NAME##_variant>(a); \
  }
