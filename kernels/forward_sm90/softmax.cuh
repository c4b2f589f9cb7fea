// The online softmax of a warp's rows: from scores to weights, tile by tile (arXiv 1805.02867).
#pragma once
#include "../common/element.cuh"
#include "../common/softmax.cuh"
#include "../ptx/ex2.h"
#include "sums.cuh"

namespace attn::sm90 {

constexpr float lowest = -3.402823466e38f;  // not -inf: differences of it are no NaN

// Of one row of the lane's two, in the log2 domain.
struct RowState {
  float reference;  // weights are 2^(score - reference); `lowest`: the row has seen nothing
  float sum;        // of the weights in the lane's columns
  float rounding;   // what the products have beyond that, see start_weights
};

// The largest of scores [from, to) of each of the lane's rows. As integers three are compared at
// once; the order is that of the numbers unless all are negative, which matters where the row has
// seen nothing above 0 before either. negative: the reference of some row of the warp.
template <Tile tile, int from = 0, int to = tile.keys / 2>
__device__ __forceinline__ void find_largest(const Scores<tile>& s, const RowState (&row_state)[2],
                                             bool negative, float (&largest)[2]) {
  constexpr int chains = 2;  // an instruction waits for the one before it in its chain
  int top[2][chains];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < (to - from) / 4; ++n) {
      const int x = __float_as_int(s[from + 4 * n + 2 * half]);
      const int y = __float_as_int(s[from + 4 * n + 2 * half + 1]);
      int& t = top[half][n % chains];
      t = n < chains ? max(x, y) : __vimax3_s32(t, x, y);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int most = max(top[half][0], top[half][1]);
    most = max(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffff, most, 2));
    largest[half] = __int_as_float(most);
  }
  if (!negative) [[likely]]
    return;
  const int both = (__float_as_int(largest[0]) & __float_as_int(row_state[0].reference)) |
                   (__float_as_int(largest[1]) & __float_as_int(row_state[1].reference));
  if (__any_sync(0xffffffff, both < 0)) [[unlikely]] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = -infinity();
#pragma unroll
      for (int n = from / 4; n < to / 4; ++n)
        most = fmaxf(most, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      largest[half] = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    }
  }
}

// changed: scores come in the log2 domain, else times 1 / a.log2_scale.
template <class T, Tile tile, bool changed>
struct Softmax {
  static constexpr int keys = tile.keys;

  RowState row_state[2];
  bool negative;  // the reference of some row of the warp

  __device__ __forceinline__ void start() {
    row_state[0] = row_state[1] = {lowest, 0, 0};
    negative = true;
  }
  __device__ __forceinline__ void look_at_references() {
    negative = __any_sync(0xffffffff, (__float_as_int(row_state[0].reference) |
                                       __float_as_int(row_state[1].reference)) < 0);
  }

  // A reference stays where it is until a score exceeds it by more than this: weights are up to
  // 2^slack then, and o is rarely multiplied, which would keep the tensor cores waiting
  // (docs/hopper.md). split_invariant: it is an integer and moves at once, so that sums taken
  // against different references differ by an exact power of two.
  __device__ __forceinline__ float slack(const attn_sm90_forward_kernarg& a) const {
    return sums_rounded(a) ? 0 : 8;
  }
  // split_invariant, which costs time: the sums have all weights as they are rounded for the
  // products.
  __device__ __forceinline__ bool sums_rounded(const attn_sm90_forward_kernarg& a) const {
    return changed && a.split_invariant;
  }

  // Weights are 2^s of the s that this leaves; what earlier weights must be multiplied with is left
  // in `shrink`, and the sums of the lane's earlier weights so multiplied in `sum`. True: `shrink`
  // is not 1 for some row of the warp. The products have the weights as they are rounded. What
  // rounding adds to each tile's largest one is added up, for in a row that one key dominates it is
  // the error; each of the row's four lanes takes its share.
  __device__ __forceinline__ bool start_weights(const attn_sm90_forward_kernarg& a, Scores<tile>& s,
                                                float (&shrink)[2], float (&sum)[4]) {
    const float log2_scale = changed ? 1 : a.log2_scale;
    float largest[2];
    bool moved = false;
    find_largest<tile>(s, row_state, negative, largest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = largest[half] * log2_scale, old = row_state[half].reference;
      const float next = most > old + slack(a) ? (sums_rounded(a) ? ceilf(most) : most) : old;
      moved = moved || next != old;
      shrink[half] = ptx::ex2(old - next);
      row_state[half].reference = next;
      sum[2 * half] = row_state[half].sum * shrink[half];
      sum[2 * half + 1] = 0;
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = fmaf(x, log2_scale, -next);
        }
      }
      if (!sums_rounded(a)) {
        const float weight = ptx::ex2(fmaf(largest[half], log2_scale, -next));
        const float error = T::unpack(T::pack(weight, weight) & 0xffff) - weight;
        row_state[half].rounding = fmaf(row_state[half].rounding, shrink[half], error * 0.25f);
      }
    }
    return __any_sync(0xffffffff, moved);
  }
  // What is to be done with the sums where references have moved.
  __device__ __forceinline__ void rescale(Sums<tile>& o, const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < tile.sum_columns() / 2; ++n) o[n] *= shrink[n / 2 % 2];
    look_at_references();
  }
  // The weights of s[0, first_weights), and the rest of them; with the latter p gets them all.
  static constexpr int first_weights = 8;
  __device__ __forceinline__ static void find_first_weights(Scores<tile>& s) {
#pragma unroll
    for (int i = 0; i < first_weights; ++i) s[i] = ptx::ex2(s[i]);
  }
  __device__ __forceinline__ void finish_weights(const attn_sm90_forward_kernarg& a,
                                                 Scores<tile>& s, float (&sum)[4],
                                                 Weights<tile>& p) {
    const bool rounded = sums_rounded(a);
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      if (i >= first_weights) s[i] = ptx::ex2(s[i]);
      if (!rounded) sum[i % 4] += s[i];
    }
#pragma unroll
    for (int n = 0; n < keys / 4; ++n) {
      const unsigned packed = p[n / 4][n % 4] = T::pack(s[2 * n], s[2 * n + 1]);
      if (rounded) {
        sum[n % 2 * 2] += T::unpack(packed & 0xffff);
        sum[n % 2 * 2 + 1] += T::unpack(packed >> 16);
      }
    }
    row_state[0].sum = sum[0] + sum[1];
    row_state[1].sum = sum[2] + sum[3];
  }
};

}  // namespace attn::sm90
