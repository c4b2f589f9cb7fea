// The end of an item: its lse and its rows of out.
#pragma once
#include "../common/store.cuh"
#include "softmax.cuh"

namespace attn::sm90 {

// Of an item whose weights have all been found: writes lse and leaves in factor what o must be
// multiplied with.
template <Tile tile>
__device__ __forceinline__ void finish_softmax(const attn_sm90_forward_kernarg& a,
                                               const Warp<tile>& warp,
                                               const RowState (&row_state)[2], const Item& item,
                                               float (&factor)[2]) {
  const float sink = a.sinks ? a.sinks[item.h] : -infinity();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowState& state = row_state[half];
    factor[half] = row_factor(state.reference, row_sum(state.sum + state.rounding), sink);
  }
  if (!a.lse || (tile.halves && warp.group > 0)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float lse = row_lse(row_state[half].reference, row_sum(row_state[half].sum), sink);
    const int row = warp.row(item, half);
    if (row < item.seqlen_q && warp.lane % 4 == 0) {
      const long long at = a.cu_seqlens_q
                               ? item.h * a.total_q + item.q_begin + row
                               : (item.b * (long long)a.heads_q + item.h) * a.seqlen_q + row;
      a.lse[at] = lse;
    }
  }
}
template <Tile tile>
__device__ __forceinline__ void store(const attn_sm90_forward_kernarg& a, const Warp<tile>& warp,
                                      const Item& item, Sums<tile>& o, const float (&factor)[2]) {
  const int first = tile.halves ? warp.group * tile.sum_columns() : 0;  // column
  clear_rows(o, factor);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp.row(item, half);
    const long long at = (a.cu_seqlens_q ? 0 : item.b * a.out_stride[0]) +
                         ((long long)item.q_begin + row) * a.out_stride[1] +
                         item.h * a.out_stride[2] + first;
    store_row(a.out, a.out_type, at, row < item.seqlen_q, o, half, factor[half],
              a.head_dim_v - first);
  }
}

}  // namespace attn::sm90
