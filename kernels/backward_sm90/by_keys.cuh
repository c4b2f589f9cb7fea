// Warpgroups that divide a block's keys: each keeps dk and dv of its half in registers, and goes
// over the tiles of queries on its own. They exchange ds through shared memory only: dq of a tile
// takes ds of all keys of the block, and one warpgroup finds it for both, in turns, a tile later.
#pragma once
#include "consumer.cuh"

namespace attn::bwd_sm90 {

template <class T, Tile tile, With with>
__device__ __forceinline__ void Consumer<T, tile, with>::run_by_keys() const {
  const int own = group * tile.subtiles * 64 * 128;
  const unsigned long long k = ptx::wgmma_descriptor(at_16(tile.k_offset() + own), 0),
                           v = ptx::wgmma_descriptor(at_16(tile.v_offset() + own), 0);
  const unsigned ds_at = ds_row() + 64 * tile.subtiles * group * 128;
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
        float s[32], dp[32];
        ptx::mbarrier_wait(address(&c.q_full[stage]), Q::parity(n));
        multiply(s, k, q);
        Lse lse;
        load_lse(lse, stats);
#pragma unroll
        for (int u = 0; u < tile.subtiles; ++u) {
          ptx::wgmma_wait<0>();
          ptx::pin(s);
          if (u == 0)
            ptx::mbarrier_wait(address(&c.d_out_full[stage]), Q::parity(n));
          else
            ptx::pin(dk[u - 1]);
          // Products that a warpgroup has issued together are computed together. Those of dp begun
          // when the warpgroup has nothing else to multiply, the two take turns: one finds P or ds
          // while the other multiplies.
          if (!tile.dp_after_weights) multiply(dp, v + u * 512, d_out);
          unsigned p[4][4], ds[4][4];
          find_p(s, p, lse, stats, item, query, tile.subtiles * group + u, n);
          if (tile.dp_after_weights) multiply(dp, v + u * 512, d_out);
          add_products(dv[u], p, d_out_t);
          ptx::wgmma_wait<1>();
          ptx::pin(dp);
          find_ds(s, dp, ds, stats);
          const int which = n % 2;
          if (u == 0) ptx::mbarrier_wait(address(&c.ds_empty[which]), n / 2 & 1 ^ 1);
          store_ds(ds_at + which * tile.ds_bytes() + u * 8192, ds);
          if (u == tile.subtiles - 1) ptx::fence_async_shared();
          add_products(dk[u], ds, qt);
          if (u + 1 < tile.subtiles) {
            // A wait that costs little, since ptxas makes all products synchronous if it finds more
            // registers in use: p is free with dv.
            ptx::wgmma_wait<1>();
            ptx::pin(dv[u]);
            multiply(s, k + (u + 1) * 512, q);
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
    const bool stores = add_heads(item, [&](auto add) {
#pragma unroll
      for (int u = 0; u < tile.subtiles; ++u) add(2 * u, dk[u]), add(2 * u + 1, dv[u]);
    });
    if (stores) {
#pragma unroll
      for (int u = 0; u < tile.subtiles; ++u) {
        const int subtile = tile.subtiles * group + u;
        store(a.dv, dv[u], item, subtile, 1, a.head_dim_v);
        store(a.dk, dk[u], item, subtile, a.scale, a.head_dim);
      }
    }
    release(item_empty(c, count));
  }
}

}  // namespace attn::bwd_sm90
