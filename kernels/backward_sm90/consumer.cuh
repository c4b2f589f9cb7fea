// What the warps that compute do alike, whether they divide a block's keys (by_keys.cuh) or its
// products (by_roles.cuh).
#pragma once
#include "../backward/store_gradient.cuh"
#include "../common/element.cuh"
#include "../common/tanh.cuh"
#include "../ptx/ex2.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/max.h"
#include "../ptx/uniform.h"
#include "../ptx/wgmma.h"
#include "load.cuh"
#include "variants.h"

namespace attn::bwd_sm90 {

using device::infinity;

__device__ __forceinline__ unsigned low_bits(int n) {
  return n >= 32 ? ~0u : (1u << n) - 1;
}

// A warp that computes: 16 of the 64 keys of a subtile.
template <class T, Tile tile, With with>
struct Consumer {
  static constexpr bool bf16 = T::type == attn_element_bf16;
  static constexpr bool score = with != With::nothing, biased = with == With::bias;
  static constexpr int dim = tile.head_dim, key_panel = tile.key_panel(),
                       query_panel = tile.query_panel();
  using Q = Ring<tile.stages>;

  const attn_sm90_backward_kernarg& a;
  Control& c;
  const unsigned shared;
  const int group, warp, lane;

  __device__ __forceinline__ void run_by_keys() const;
  __device__ __forceinline__ void run_by_roles() const;
  __device__ __forceinline__ void send_ds() const;

  // Of dq's columns.
  __device__ __forceinline__ int part() const { return groups * block_of_cluster<tile>() + group; }

  // What the warp's lanes have read or written before is ordered before the arrival of one.
  __device__ __forceinline__ void release(Barrier& barrier) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(address(&barrier), lane == 0);
  }
  __device__ __forceinline__ unsigned at_16(int offset) const {
    // The descriptors of wgmma have no block of a cluster, which an address has above these bits.
    const unsigned at = shared + offset;
    return ptx::uniform((tile.blocks > 1 ? at & 0x3ffff : at) / 16);
  }
  // Offsets in shared memory of 16 columns, in units of 16 bytes.
  static __device__ constexpr int columns_at(int step, int panel) {
    return (step / 4 * panel + step % 4 * 32) / 16;
  }

  // Scores, or d_out v^T: x = rows of keys times rows of queries. As wgmma leaves those of 16 keys
  // and 64 queries in a lane, x[4 j + 2 half + i] is that of key lane / 4 + 8 half and query 8 j +
  // lane % 4 * 2 + i.
  __device__ __forceinline__ void multiply(float (&x)[32], unsigned long long keys,
                                           unsigned long long queries) const {
    ptx::forget(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < dim / 16; ++d)
      ptx::wgmma<bf16>(x, keys + columns_at(d, key_panel), queries + columns_at(d, query_panel),
                       d > 0);
    ptx::wgmma_commit();
  }
  // Of the lane's queries of a tile. Where scores have more to them there are no registers to keep
  // it in.
  struct Lse {
    float2 of[8];
  };
  __device__ __forceinline__ void load_lse(Lse& lse, unsigned stats) const {
    if constexpr (!score) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        lse.of[j] = ptx::load_shared_two_floats(address(&c.lse) + stats + j * 32);
    }
  }
  // dv += P^T d_out, or dk += ds^T q.
  __device__ __forceinline__ void add_products(float (&sum)[dim / 2], const unsigned (&x)[4][4],
                                               unsigned long long queries) const {
    ptx::pin(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::wgmma<bf16, true>(sum, x[step], queries + step * 128, true);
    ptx::wgmma_commit();
  }

  // dq of tile n, or the warpgroup's columns of it, from ds of all keys of the block.
  __device__ __forceinline__ void find_dq(unsigned n) const {
    constexpr int count = tile.dq_columns() / 2;
    float dq[count];
    const int which = tile.roles() ? group : n % 2, ds_place = tile.roles() ? 0 : n % 2;
    const unsigned parity = tile.roles() ? n & 1 : n / 2 & 1;
    ptx::mbarrier_wait(address(&c.ds_full[ds_place]), parity);
    const unsigned long long ds =
        ptx::wgmma_descriptor(at_16(tile.ds_offset() + ds_place * tile.ds_bytes()), 0);
    const int columns = tile.roles() ? part() * tile.dq_columns() : 0;
    const unsigned long long k =
        ptx::wgmma_descriptor(at_16(tile.k_offset() + columns / 64 * key_panel), key_panel);
    ptx::forget(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < tile.block_keys() / 16; ++step)
      ptx::wgmma_transposed<bf16>(dq, ds + step * 128, k + step * 128, step > 0);
    if constexpr (tile.blocks > 1) {
      const unsigned long long peer_k = ptx::wgmma_descriptor(
          at_16(tile.peer_k_offset() + group * tile.dq_columns() / 64 * key_panel), key_panel);
#pragma unroll
      for (int step = 0; step < tile.block_keys() / 16; ++step)
        ptx::wgmma_transposed<bf16>(dq, ds + 512 + step * 128, peer_k + step * 128, true);
    }
    ptx::wgmma_commit();
    ptx::mbarrier_wait(address(&c.dq_empty[which]), parity);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(c.ds_empty[ds_place]);
    if (tile.blocks > 1 && lane == 0)
      ptx::mbarrier_arrive_at(address(&c.ds_empty[ds_place]), block_of_cluster<tile>() ^ 1);
    const unsigned place = shared + tile.dq_place(which) + threadIdx.x % 128 * 16;
    const DqTile& to = c.dq[which];
    if (to.last == not_last) {
#pragma unroll
      for (int i = 0; i < count / 4; ++i) ptx::store_shared_floats(place + i * 2048, dq + 4 * i);
    } else {
      if (to.last == last) {
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
          const float4 sum = ptx::load_shared_floats(place + i * 2048);
          dq[4 * i] += sum.x, dq[4 * i + 1] += sum.y, dq[4 * i + 2] += sum.z,
              dq[4 * i + 3] += sum.w;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + lane / 4 + 8 * half;
        if (a.dq.at)
          device::store_gradient<T>(a.dq, to.at + row * a.dq.stride[1] + columns, row < to.rows, dq,
                                    half, a.scale, a.head_dim - columns);
      }
    }
    ptx::fence_async_shared();
    release(c.dq_full[which]);
  }

  // Columns of 8 queries whose bias a lane loads at once.
  static constexpr int bias_batch = tile.roles() ? 8 : 4;
  // Where the bias of a lane's scores is, and what is added to it: NaN for a key that is poisoned.
  struct Bias {
    long long at;                    // element of the lane's first key and query 0
    int next_key;                    // elements to the one of half 1
    int query;                       // the lane's first one of the tile
    int last;                        // of the sequence: no element of a later one is read
    unsigned raw[bias_batch][2][2];  // a batch of the lane's elements as they are in memory
  };
  // Loads a batch, which begins with queries 8 * first. All loads are under way together.
  __device__ __forceinline__ void load_bias(Bias& bias, int first) const {
    const auto load = [&](const auto* from) {
#pragma unroll
      for (int j = 0; j < bias_batch; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = min(bias.query + 8 * (first + j) + i, bias.last);
          const auto* const row = from + bias.at + (long long)query * a.bias_query;
          bias.raw[j][0][i] = row[0];
          bias.raw[j][1][i] = row[bias.next_key];
        }
    };
    if (a.bias_type == attn_element_f32)
      load(static_cast<const unsigned*>(a.bias));
    else
      load(static_cast<const unsigned short*>(a.bias));
  }
  __device__ __forceinline__ void begin_bias(Bias& bias, const Item& item, int query,
                                             int subtile) const {
    const int last = item.sequence.keys - 1, in_item = 64 * subtile + 16 * warp + lane / 4;
    const int key = item.block * tile.keys() + in_item;
    const int first = min(key, last), second = min(key + 8, last);
    bias.at =
        item.b * a.bias_stride[0] + item.head * a.bias_stride[1] + (long long)first * a.bias_key;
    bias.next_key = (second - first) * a.bias_key;
    bias.query = query + lane % 4 * 2;
    bias.last = item.sequence.queries - 1;
    load_bias(bias, 0);
  }
  // Adds it to scores in the log2 domain, [half][i]. A key whose bias is -inf is not seen; a finite
  // one hides nothing, so its product is kept finite.
  __device__ __forceinline__ void add_bias(const float (&more)[2], const float (&of)[2][2],
                                           float (&power)[2][2]) const {
    constexpr float lowest = -2.3e38f;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = of[half][i];
        float& to = power[half][i];
        to = b == -infinity() ? b : to + fmaf(ptx::max_nan(b, lowest), device::log2_e, more[half]);
      }
  }

  // Where a lane's row of a copied bias begins, as ldmatrix wants it: of two 8 queries and two 8
  // keys.
  __device__ __forceinline__ unsigned bias_row(int subtile) const {
    const int of_warp = tile.roles() ? warp : 4 * subtile + warp;
    return bias_place<tile>(shared, of_warp, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // Scores with softcap, bias and ALiBi: s becomes P times softcap's slope, and p is P. seen: of
  // the lane's queries, for its key of each half. away: from its key of half 0 to its first query,
  // in positions of which the last query and the last key have the same.
  // copied: bias.copied.
  template <bool copied>
  __device__ __forceinline__ void weigh(float (&s)[32], unsigned (&p)[4][4], unsigned stats,
                                        const unsigned (&seen)[2], float away, int head,
                                        int subtile, const Item& item, int query) const {
    Bias bias;
    unsigned pairs[4];  // copied: of two columns of 8 queries
    float more[2];      // for the key of each half
    if constexpr (biased) {
      const int in_item = 64 * subtile + 16 * warp + lane / 4;
      const unsigned poisoned = c.poisoned[in_item / 32] >> in_item % 32;
      more[0] = poisoned & 1 ? __int_as_float(0x7fffffff) : 0.f;
      more[1] = poisoned >> 8 & 1 ? __int_as_float(0x7fffffff) : 0.f;
      if (!copied) begin_bias(bias, item, query, subtile);
    }
    const bool capped = a.into_softcap != 0;
    const float alibi = a.alibi_slopes ? a.alibi_slopes[head] * device::log2_e : 0;
    if (capped) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = device::tanh_accurate(s[i] * a.into_softcap);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (biased && !copied && j > 0 && j % bias_batch == 0) load_bias(bias, j);
      if (copied && j % 2 == 0) ptx::ldmatrix_transposed(pairs, bias_row(subtile) + j * 256);
      const float2 lse = ptx::load_shared_two_floats(address(&c.lse) + stats + j * 32);
      float power[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float distance = fabsf(away + float(8 * j + i - 8 * half));
          power[half][i] = fmaf(-alibi, distance,
                                fmaf(s[4 * j + 2 * half + i], a.log2_scale, i ? -lse.y : -lse.x));
        }
      if constexpr (biased) {
        float of[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (copied) {
              of[half][i] = T::unpack((unsigned short)(pairs[j % 2 * 2 + half] >> 16 * i));
            } else {
              const unsigned bits = bias.raw[j % bias_batch][half][i];
              of[half][i] = a.bias_type == attn_element_f32 ? __uint_as_float(bits)
                                                            : T::unpack((unsigned short)bits);
            }
          }
        add_bias(more, of, power);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          const bool hidden = !(seen[half] >> (2 * j + i) & 1);
          weight[i] = hidden ? 0 : ptx::ex2(power[half][i]);
          x = hidden ? 0 : weight[i] * (capped ? 1 - x * x : 1);
        }
        p[j / 2][j % 2 * 2 + half] = T::pack(weight[0], weight[1]);
      }
    }
  }

  // From products of q and k: p, and s becomes what ds is a product of, P times softcap's slope.
  // query: the first one of the tile. bias: as begin_bias() leaves it.
  __device__ __forceinline__ void find_p(float (&s)[32], unsigned (&p)[4][4], const Lse& lse,
                                         unsigned stats, const Item& item, int query, int subtile,
                                         unsigned n) const {
    if constexpr (!score) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[4 * j + i] = fmaf(s[4 * j + i], a.log2_scale, i % 2 ? -lse.of[j].y : -lse.of[j].x);
    }
    // The lane's key of half 0, and its first query of the tile. Not in registers all along.
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
        seen[half] = key + 8 * half < keys ? low_bits(count(end)) & ~low_bits(count(begin)) : 0;
        if constexpr (!score) {
#pragma unroll
          for (int i = 0; i < 16; ++i)
            if (!(seen[half] >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -infinity();
        }
      }
      ptx::pin(s);
    }
    if constexpr (score) {
      const float away =
          float(first_query() - first_key() + item.sequence.keys - item.sequence.queries);
      if (biased && copies_bias(a)) {
        if (tile.roles() || subtile % tile.subtiles == 0)
          ptx::mbarrier_wait(address(&c.bias_full), n & 1);
        weigh<biased>(s, p, stats, seen, away, item.head, subtile, item, query);
        if (tile.roles() || subtile % tile.subtiles == tile.subtiles - 1) release(c.bias_empty);
      } else {
        weigh<false>(s, p, stats, seen, away, item.head, subtile, item, query);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = ptx::ex2(s[i]);
#pragma unroll
      for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = T::pack(s[2 * i], s[2 * i + 1]);
    }
  }
  // s: as find_p leaves it. dp: d_out v^T; it becomes ds, which is packed too.
  __device__ __forceinline__ void find_ds(const float (&s)[32], float (&dp)[32],
                                          unsigned (&ds)[4][4], unsigned stats) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = ptx::load_shared_two_floats(address(&c.delta) + stats + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        x = s[4 * j + i] * (x - (i % 2 ? delta.y : delta.x));
        // V of a key that a bias hides may be anything.
        if (biased && s[4 * j + i] == 0) x = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) ds[i / 4][i % 4] = T::pack(dp[2 * i], dp[2 * i + 1]);
  }
  // Where a lane's row of ds of subtile 0 goes. Rows are keys, of 64 queries, which are 128 bytes:
  // stmatrix stores 16 keys and 16 queries at a time.
  __device__ __forceinline__ unsigned ds_row() const {
    return shared + tile.ds_offset() + (16 * warp + lane % 16) * 128;
  }
  __device__ __forceinline__ void store_ds(unsigned row, const unsigned (&ds)[4][4]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::stmatrix(row + ((2 * step + lane / 16 ^ lane % 8) << 4), ds[step]);
  }

  // Adds what the heads before have in kv_sum to a warp's sums of dk and dv. True: this is the last
  // head; else the sum is there. Heads come in their order, each warp for itself.
  // each(f): calls f(0, x), f(1, x), ... with the warp's arrays of sums.
  template <class Each>
  __device__ __forceinline__ bool add_heads(const Item& item, Each each) const {
    if (a.group == 1) return true;
    const int number = item.head % a.group;
    const long long at = (long long)item.head_kv * a.key_blocks + item.key_block;
    constexpr int parts = groups * tile.blocks;
    unsigned* const turn = a.kv_turn + at * (4 * parts) + 4 * part() + warp;
    constexpr int all = 2 * tile.keys() * dim / 4;
    float4* const sum =
        reinterpret_cast<float4*>(a.kv_sum) + at * all + part() * (all / parts) + threadIdx.x % 128;
    if (number > 0) {
      while (ptx::load_acquire(turn) < unsigned(number)) {
      }
      __syncwarp();
    }
    const bool is_last = number == a.group - 1;
    each([&](int index, float(&x)[dim / 2]) {
#pragma unroll
      for (int i = 0; i < dim / 8; ++i) {
        float4* const to = sum + (index * (dim / 8) + i) * 128;
        if (number > 0) {
          const float4 y = __ldcg(to);
          x[4 * i] += y.x, x[4 * i + 1] += y.y, x[4 * i + 2] += y.z, x[4 * i + 3] += y.w;
        }
        if (!is_last) __stcg(to, make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]));
      }
    });
    if (!is_last) {
      __syncwarp();
      if (lane == 0) ptx::add_release(turn);
    }
    return is_last;
  }

  // Stores dk or dv of a subtile. columns: those of the array.
  __device__ __forceinline__ void store(const attn_gradient_array& g, float (&x)[dim / 2],
                                        const Item& item, int subtile, float factor,
                                        int columns) const {
    if (!g.at) return;
    const int keys = item.sequence.keys;
    const int key = item.block * tile.keys() + 64 * subtile + 16 * warp + lane / 4;
    // Rows after the last key, which have no gradients: a packed array has others' there, and of a
    // padded one they become 0.
    const int row[2] = {key, key + 8};
    const float exists[2] = {row[0] < keys ? 1.f : 0.f, row[1] < keys ? 1.f : 0.f};
    device::clear_rows(x, exists);
    const int rows = a.kv.cu_seqlens || g.add ? keys : a.kv.capacity;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      device::store_gradient<T>(g,
                                item.k_batch * g.stride[0] +
                                    (item.k_row + (long long)row[half]) * g.stride[1] +
                                    item.head_kv * g.stride[2],
                                row[half] < rows, x, half, factor, columns);
  }
};

}  // namespace attn::bwd_sm90
