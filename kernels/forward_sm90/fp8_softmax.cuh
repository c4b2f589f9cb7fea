// fp8: scores, weights and sums of a tile of keys.
#pragma once
#include "../ptx/convert_fp8.h"
#include "../ptx/ex2.h"
#include "../ptx/f16x2.h"
#include "scores.cuh"
#include "softmax.cuh"

namespace attn::sm90 {

// Weights of a tile of keys as wgmma takes them, four to a word: the e4m3 values whose sum they
// are, the weight rounded first.
template <Tile tile>
using Fp8Weights = unsigned[tile.weight_parts][tile.keys / 32][4];
// A tile's contribution to out is computed in pieces of columns; with the last one, four copies of
// what it adds to the sums of two rows.
template <Tile tile>
constexpr int pieces_of_sums = tile.head_dim_v / tile.piece_columns();
template <Tile tile, int piece>
using TileSums = float[tile.piece_columns() / 2 + (piece == pieces_of_sums<tile> - 1 ? 4 : 0)];

// s = Q K^T of columns [from, to) of head_dim; to be waited for.
template <bool e5m2, Tile tile, int from = 0, int to = tile.head_dim, int scores>
__device__ __forceinline__ void start_fp8_scores(float (&s)[scores], unsigned q_at, unsigned k_at) {
  constexpr int panel = Warp<tile>::panel, q_panel = Warp<tile>::q_panel;
  const unsigned long long a_matrix = ptx::wgmma_descriptor(q_at, 0),
                           b_matrix = ptx::wgmma_descriptor(k_at, 0);
#pragma unroll
  for (int d = from / 32; d < to / 32; ++d)
    ptx::wgmma_fp8<e5m2>(s, a_matrix + ((d / 4 * q_panel + d % 4 * 32) >> 4),
                         b_matrix + ((d / 4 * panel + d % 4 * 32) >> 4), d > from / 32);
  ptx::wgmma_commit();
}
// Adds to s, of which columns before `from` are under way, those behind in float32: in parts of
// columns and of keys.
template <bool e5m2, Tile tile, int from = tile.score_columns()>
__device__ __forceinline__ void add_fp8_scores(Scores<tile>& s, unsigned q_at, unsigned k_at) {
  if constexpr (from < tile.head_dim) {
    constexpr int to = from + tile.score_columns(), keys = tile.score_keys();
#pragma unroll
    for (int n = 0; n < tile.keys / keys; ++n) {
      float part[keys / 2];
      ptx::forget(part);
      ptx::wgmma_fence();
      start_fp8_scores<e5m2, tile, from, to>(part, q_at, k_at + n * keys * (128 / 16));
      ptx::wgmma_wait<0>();
      if (n == 0) ptx::pin(s);
      ptx::pin(part);
#pragma unroll
      for (int i = 0; i < keys / 2; ++i) s[n * keys / 2 + i] += part[i];
    }
    add_fp8_scores<e5m2, tile, to>(s, q_at, k_at);
  } else if constexpr (from == tile.score_columns()) {
    ptx::wgmma_wait<0>();
    ptx::pin(s);
  }
}

// t = P V of keys [from, to) of a tile, a piece, and the sums of its weights; to be waited for.
// adds: t += P V.
template <bool e5m2, Tile tile, int piece, int from, int to>
__device__ __forceinline__ void start_fp8_sums(TileSums<tile, piece>& t, const Fp8Weights<tile>& p,
                                               unsigned vt_at, bool adds = false) {
  const unsigned long long b_matrix =
      ptx::wgmma_descriptor(vt_at + piece * tile.piece_columns() * (128 / 16), 0);
  // The small part is added first, before a large sum would truncate it.
#pragma unroll
  for (int part = tile.weight_parts - 1; part >= 0; --part)
#pragma unroll
    for (int step = from / 32; step < to / 32; ++step)
      ptx::wgmma_fp8<e5m2>(t, p[part][step],
                           b_matrix + step / 4 * (tile.vt_panel() / 16) + step % 4 * 2,
                           adds || step > from / 32 || part < tile.weight_parts - 1);
  ptx::wgmma_commit();
}

// The online softmax of a warp's rows with weights in e4m3 (docs/numerics.md, "FP8 weights"): they
// are 2^(score - reference + offset), the reference is the largest score so far. Sums are of the
// weights as rounded, by the rows of ones. halves: those of a tile's keys have factors of their
// own.
template <Tile tile, bool halves>
struct Fp8Softmax {
  static constexpr float offset = 8;
  static constexpr int factors = halves ? 2 : 1;
  static constexpr int scores = tile.keys / 2 / factors;  // of a lane that have one factor
  using Factors = float[factors];

  RowState row_state[2];
  bool negative;  // the reference of some row of the warp

  __device__ __forceinline__ void start() {
    row_state[0] = row_state[1] = {lowest, 0, 0};
    negative = true;
  }
  // Which score becomes weight i of word n of Fp8Weights: two words, of two rows, have 16 keys.
  __device__ __forceinline__ static constexpr int score_of(int n, int i) {
    return 8 * (n / 2) + 4 * (i / 2) + 2 * (n % 2) + i % 2;
  }
  // Hidden scores stay hidden.
  __device__ __forceinline__ static void multiply(Scores<tile>& s, Factors& factor) {
#pragma unroll
    for (int i = 0; i < tile.keys / 2; ++i)
      s[i] = s[i] == -infinity() ? s[i] : s[i] * factor[i / scores];
    for (float& x : factor) x = 1;
  }
  // Whether the largest score is found without looking at signs.
  __device__ __forceinline__ bool is_usual(const Factors& factor) const {
    return factor[0] > 0 && factor[factors - 1] > 0 && !negative;
  }
  // The largest of a tile's scores, which times their factor are in the log2 domain.
  template <bool usual>
  __device__ __forceinline__ void find_most(Scores<tile>& s, Factors& factor, float (&most)[2]) {
    // Which is the largest depends on a factor's sign.
    if (!usual && (!(factor[0] > 0) || !(factor[factors - 1] > 0))) [[unlikely]]
      multiply(s, factor);
    find_largest<tile, 0, scores>(s, row_state, !usual && negative, most);
    for (float& x : most) x *= factor[0];
    if constexpr (halves) {
      float others[2];
      find_largest<tile, scores, 2 * scores>(s, row_state, !usual && negative, others);
#pragma unroll
      for (int half = 0; half < 2; ++half) most[half] = fmaxf(most[half], others[half] * factor[1]);
    }
  }
  // Takes the largest scores of a tile into the references. shrink: what earlier sums are to be
  // multiplied with.
  __device__ __forceinline__ void move_references(const float (&most)[2], float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& reference = row_state[half].reference;
      const float next = most[half] > reference ? most[half] : reference;
      shrink[half] = ptx::ex2(reference - next);
      reference = next;
    }
    // Each time, for a branch here costs registers.
    negative = __any_sync(0xffffffff, (__float_as_int(row_state[0].reference) |
                                       __float_as_int(row_state[1].reference)) < 0);
  }
  // The weights of a tile. Packed is not the last word, for which it would wait, but one before.
  __device__ __forceinline__ void find_weights(Scores<tile>& s, const Factors& factor,
                                               Fp8Weights<tile>& p) {
    constexpr int words = tile.keys / 8, behind = 2;
    const float away[2] = {offset - row_state[0].reference, offset - row_state[1].reference};
#pragma unroll
    for (int word = 0; word < words + behind; ++word) {
      if (word < words) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = score_of(word, i);
          s[at] = ptx::ex2(fmaf(s[at], factor[at / scores], away[word % 2]));
        }
      }
      if (word >= behind) pack_word(s, p, word - behind);
    }
  }
  __device__ __forceinline__ static void pack_word(const Scores<tile>& s, Fp8Weights<tile>& p,
                                                   int word) {
    const unsigned large = packed(s, word);
    p[0][word / 4][word % 4] = large;
    if constexpr (tile.weight_parts == 2) {
      constexpr unsigned minus_one = 0xbc00bc00;
      unsigned rest[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const unsigned whole =
            F16::pack(s[score_of(word, 2 * pair)], s[score_of(word, 2 * pair + 1)]);
        const unsigned part = ptx::f16_of_e4m3((unsigned short)(large >> 16 * pair));
        rest[pair] = ptx::e4m3_of_f16(ptx::fma_f16x2(part, minus_one, whole));
      }
      p[1][word / 4][word % 4] = rest[0] | rest[1] << 16;
    }
  }
  __device__ __forceinline__ static unsigned packed(const Scores<tile>& s, int word) {
    return ptx::e4m3_of(s[score_of(word, 0)], s[score_of(word, 1)]) |
           unsigned(ptx::e4m3_of(s[score_of(word, 2)], s[score_of(word, 3)])) << 16;
  }
  // t: of the ones, which a row's lanes all have.
  __device__ __forceinline__ void add_sums(const float* t, const float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      row_state[half].sum = fmaf(row_state[half].sum, shrink[half], t[2 * half]);
  }
  // As finish_softmax takes it, which adds up four lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (RowState& row : row_state) {
      row.reference -= offset;
      row.sum *= 0.25f;
    }
  }
};

}  // namespace attn::sm90
