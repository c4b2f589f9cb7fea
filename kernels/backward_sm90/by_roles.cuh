// Blocks of a cluster that divide an item's keys, and warpgroups that divide the products, for sums
// of 64 keys and 256 columns, which are 128 registers of a thread: the first warpgroup finds P and
// dv; the second takes P from shared memory, and finds ds and dk. Blocks send each other ds, and
// each of the four warpgroups finds a quarter of dq's columns from ds of all keys.
#pragma once
#include "consumer.cuh"

namespace attn::bwd_sm90 {

// A warp's rows of ds to the other block of the cluster, whose rows of as many bytes come here.
template <class T, Tile tile, With with>
__device__ __forceinline__ void Consumer<T, tile, with>::send_ds() const {
  constexpr unsigned bytes = 16 * 128;
  __syncwarp();
  if (lane == 0) {
    const unsigned full = address(&c.ds_full[0]), rows = shared + tile.ds_offset() + warp * bytes;
    ptx::mbarrier_arrive_expect(full, bytes);
    ptx::bulk_send(rows + 64 * 128, rows, bytes, full, block_of_cluster<tile>() ^ 1);
  }
}

template <class T, Tile tile, With with>
__device__ __forceinline__ void Consumer<T, tile, with>::run_by_roles() const {
  static_assert(tile.stages == 1 && tile.blocks == 2);
  const unsigned q_at = at_16(tile.q_offset()), d_out_at = at_16(tile.d_out_offset());
  const unsigned stats = lane % 4 * 8;
  const int subtile = block_of_cluster<tile>();
  // A thread of the second warpgroup reads what the same thread of the first has written.
  const unsigned p_at = shared + tile.p_offset() + threadIdx.x % 128 * 16;
  unsigned n = 0;
  float sum[dim / 2];  // dv of the first, dk of the second
  for (unsigned count = 0;; ++count) {
    const Item& item = wait_item(c, count);
    if (item.b < 0) break;
    ptx::mbarrier_wait(address(&c.k_full), count & 1);
    ptx::mbarrier_wait(address(&c.v_full), count & 1);
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) sum[i] = 0;
    const unsigned end = n + item.tiles.count();
    if (group == 0) {
      const unsigned long long k = ptx::wgmma_descriptor(at_16(tile.k_offset()), 0),
                               q = ptx::wgmma_descriptor(q_at, 0),
                               d_out_t = ptx::wgmma_descriptor(d_out_at, query_panel);
      for (int query = item.tiles.first * tile_queries; n != end; ++n, query += tile_queries) {
        float s[32];
        unsigned p[4][4];
        ptx::mbarrier_wait(address(&c.q_full[0]), n & 1);
        multiply(s, k, q);
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        Lse lse;
        load_lse(lse, stats);
        find_p(s, p, lse, stats, item, query, subtile, n);
        release(c.q_empty[0]);
        ptx::mbarrier_wait(address(&c.p_empty), n & 1 ^ 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) ptx::store_shared_floats(p_at + j * 2048, s + 4 * j);
        release(c.p_full);
        ptx::mbarrier_wait(address(&c.d_out_full[0]), n & 1);
        add_products(sum, p, d_out_t);
        ptx::wgmma_wait<0>();
        ptx::pin(sum);
        release(c.d_out_empty[0]);
        find_dq(n);
      }
    } else {
      const unsigned long long v = ptx::wgmma_descriptor(at_16(tile.v_offset()), 0),
                               d_out = ptx::wgmma_descriptor(d_out_at, 0),
                               qt = ptx::wgmma_descriptor(q_at, query_panel);
      for (; n != end; ++n) {
        float s[32], dp[32];
        unsigned ds[4][4];
        ptx::mbarrier_wait(address(&c.d_out_full[0]), n & 1);
        multiply(dp, v, d_out);
        ptx::mbarrier_wait(address(&c.p_full), n & 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float4 p = ptx::load_shared_floats(p_at + j * 2048);
          s[4 * j] = p.x, s[4 * j + 1] = p.y, s[4 * j + 2] = p.z, s[4 * j + 3] = p.w;
        }
        release(c.p_empty);
        ptx::wgmma_wait<0>();
        ptx::pin(dp);
        find_ds(s, dp, ds, stats);
        release(c.d_out_empty[0]);
        ptx::mbarrier_wait(address(&c.ds_empty[0]), n & 1 ^ 1);
        store_ds(ds_row(), ds);
        ptx::fence_async_shared();
        ptx::mbarrier_wait(address(&c.q_full[0]), n & 1);
        add_products(sum, ds, qt);
        send_ds();
        ptx::wgmma_wait<0>();
        ptx::pin(sum);
        release(c.q_empty[0]);
        find_dq(n);
      }
    }
    release(c.v_empty);
    release(c.k_empty);
    if (add_heads(item, [&](auto add) { add(0, sum); })) {
      if (group == 0)
        store(a.dv, sum, item, subtile, 1, a.head_dim_v);
      else
        store(a.dk, sum, item, subtile, a.scale, a.head_dim);
    }
    release(item_empty(c, count));
  }
}

}  // namespace attn::bwd_sm90
