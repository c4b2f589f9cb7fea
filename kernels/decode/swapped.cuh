// Decode with swapped products, for devices with wgmma: S^T = K Q^T and O^T = V^T P^T, so that the
// rows, queries times query heads of a K/V head, are the N of the instructions, 8 to 64, and none
// of their 64 rows are padding. One warpgroup computes, its four warps with one state of the
// softmax, or two that take units in turns; a fifth warp loads, or a fifth and a sixth. K and V of
// 16 bits come to the matrix unit as they lie in shared memory, those of fp8 through registers,
// where they become f16.
#pragma once
#include "../common/tanh.cuh"
#include "../ptx/load_shared.h"
#include "../ptx/stmatrix.h"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "query.cuh"
#include "swapped_load.cuh"

namespace attn::decode {

// Lane l of warp w has rows 8n + 2 (l % 4) + i, i = 0, 1, of keys 16w + l / 4 + 8 half, as element
// 4n + 2 half + i; of O^T columns of V in place of keys.
template <class KV, DecodeTile tile>
struct Swapped {
  using Product = typename KV::Product;
  static constexpr bool bf16 = Product::type == attn_element_bf16;
  static constexpr int head_dim = tile.head_dim, head_dim_v = tile.head_dim_v;
  static constexpr int rows = tile.rows(), row_tiles = rows / 8, elements = rows / 2;
  static constexpr int v_tiles = head_dim_v / 64;
  // fp8: V becomes f16 while the matrix unit has K, as far as there are registers.
  static constexpr bool early_values = KV::scaled && rows <= 16 && v_tiles <= 2;
  const attn_decode_kernarg& a;
  SwappedShared<tile>& shared;
  const unsigned ring;
  unsigned char* const q_place;       // in shared memory: Q, and behind it P of two units; of the
                                      // warpgroup
  const unsigned q;                   // its address
  const unsigned long long q_matrix;  // its descriptor
  Head at;
  int all_begin, all_end;  // keys that all rows see
  int turn = 0;            // of P's two places
  bool fresh;              // nothing has been added yet
  // Of own_types: which 16 keys of a unit the warp has, and rows of the heads before its own.
  int key_warp = 0, rows_before = 0;
  // V is summed up without its descale while that stays the same, then with each unit's own.
  float v_unit;
  bool apart;
  float o[v_tiles][elements];
  float reference[row_tiles][2];  // log2 domain; -inf: nothing seen yet
  float sum[row_tiles][2];        // of the weights of the lane's keys

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int group() const {
    return tile.groups == 1 ? 0 : threadIdx.x / group_threads;
  }
  // Within the warpgroup, as the following.
  __device__ __forceinline__ int thread() const {
    return tile.groups == 1 ? threadIdx.x : threadIdx.x % group_threads;
  }
  __device__ __forceinline__ int warp() const { return thread() / 32; }
  __device__ __forceinline__ SwappedRows<tile>& mine() const {
    if constexpr (tile.groups == 1)
      return shared;
    else
      return group() == 0 ? shared : shared.second;
  }
  // The warpgroup's barrier.
  __device__ __forceinline__ void meet() const {
    if constexpr (tile.groups == 1)
      ptx::barrier_wait<group_threads>(1);
    else
      ptx::barrier_wait<group_threads>(1 + group());
  }
  // All warpgroups'.
  __device__ __forceinline__ void meet_groups() const {
    ptx::barrier_wait<tile.compute_threads()>(1 + tile.groups);
  }
  __device__ __forceinline__ int used_rows() const {
    return min(at.seqlen_q * a.group - at.first_row, rows);
  }
  // Own_types need rows and keys where scores are hidden or modified alone: what follows from them
  // has no registers elsewhere.
  __device__ __forceinline__ int lane_here() const {
    return tile.own_types ? int(ptx::recompute(lane())) : lane();
  }
  // The lane's first row of tile n; the other one is behind it.
  __device__ __forceinline__ int lane_row(int n) const { return 8 * n + lane_here() % 4 * 2; }
  __device__ __forceinline__ int lane_key(int half) const {
    return 16 * (tile.own_types ? key_warp : warp()) + lane_here() / 4 + 8 * half;
  }
  __device__ __forceinline__ bool plain() const { return a.softcap == 0 && !a.alibi_slopes; }

  __device__ __forceinline__ void begin_part() {
    load_q();
    if (a.sees_all && at.seqlen_q == 1) {
      if (thread() < rows) mine().keys[thread()] = make_int2(0, at.seqlen_kv);
    } else {
      note_seen_keys();
    }
    if (a.alibi_slopes && thread() < rows)
      mine().slope[thread()] =
          a.alibi_slopes[Row(a, at, min(int(thread()), used_rows() - 1)).head] * log2_e;
    if (a.alibi_slopes) note_first_query();
    fresh = true;
    apart = false;
    v_unit = 1;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) reference[n][i] = -infinity(), sum[n][i] = 0;
#pragma unroll
    for (int m = 0; m < v_tiles; ++m)
#pragma unroll
      for (int i = 0; i < elements; ++i) o[m][i] = 0;
    ptx::fence_async_shared();
    meet();
    all_begin = mine().keys[rows - 1].x;
    all_end = mine().keys[0].y;
    if (a.tree) all_end = min(all_end, at.seqlen_kv - int(a.tree_mask.keys));
  }

  __device__ __forceinline__ void note_first_query() {
    if (thread() == 0)
      mine().first_query = near_first_query(positions_of<tile>(a), at.b, at.seqlen_q, at.seqlen_kv);
  }
  // What rows see by the mask of ranges, and by the tree.
  __device__ __forceinline__ void note_seen_keys() {
    const SeenPlaces seen =
        seen_places(a.mask, positions_of<tile>(a), at.b, at.seqlen_q, at.seqlen_kv);
    const auto keys_of = [&](int query) {
      return make_int2(keys_before(positions_of<tile>(a), query + seen.lower, at.seqlen_kv),
                       keys_before(positions_of<tile>(a), query + seen.upper, at.seqlen_kv));
    };
    if (thread() >= rows) return;
    const int r = thread(), query = Row(a, at, min(r, used_rows() - 1)).query;
    mine().keys[r] = keys_of(query);
    if (!a.tree) return;
    mine().tree[r] = tree_words(a, at, query);
  }

  // Q to shared memory, 8 threads per row.
  __device__ __forceinline__ void load_q() {
    constexpr int panels = tile.columns_16bit(head_dim) / panel_pitch;
    const int chunk = thread() % 8;
#pragma unroll
    for (int r0 = 0; r0 < rows; r0 += group_threads / 8) {
      const int r = r0 + thread() / 8;
      if (r >= rows) return;
      const bool used = r < used_rows();
      const char* const from = q_address(a, at, Row(a, at, used ? r : 0));
      unsigned words[panels][4];
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        const int column = 64 * panel + 8 * chunk;
        const uint4 x = used && column < a.head_dim
                            ? *reinterpret_cast<const uint4*>(from + 2 * column)
                            : uint4{0, 0, 0, 0};
        words[panel][0] = x.x, words[panel][1] = x.y, words[panel][2] = x.z, words[panel][3] = x.w;
      }
      if constexpr (KV::scaled) {
        const float undo = q_to_f16(a.q_type, [&](auto&& each) {
#pragma unroll
          for (auto& panel : words)
#pragma unroll
            for (unsigned& pair : panel) each(pair);
        });
        if (chunk == 0) mine().q_scale[r] = a.scale * undo * log2_e;
      }
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        unsigned char* const to = q_place + panel * rows * panel_pitch;
        const unsigned(&x)[4] = words[panel];
        if constexpr (KV::scaled) {
          // The matrix unit takes pairs of 16 columns in the order 0 2 4 6, 1 3 5 7 of fp8 words.
          const auto place = [&](int odd) {
            return reinterpret_cast<uint2*>(to + chunk_offset<panel_pitch>(r, chunk / 2 * 2 + odd) +
                                            chunk % 2 * 8);
          };
          *place(0) = {x[0], x[2]};
          *place(1) = {x[1], x[3]};
        } else {
          *reinterpret_cast<uint4*>(to + chunk_offset<panel_pitch>(r, chunk)) = {x[0], x[1], x[2],
                                                                                 x[3]};
        }
      }
    }
  }

  // Computed where it is used, once for all lanes.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned at,
                                                                  unsigned panel_bytes) {
    return ptx::wgmma_descriptor(ptx::uniform(at / 16), panel_bytes);
  }
  // Of 16 columns from 16 * step on, in a matrix of so many rows.
  static __device__ __forceinline__ unsigned step_offset(int step, int rows) {
    return (step / 4 * rows * panel_pitch + step % 4 * 32) >> 4;
  }

  // f(code) for the type of fp8 that K and V have. Only this is there twice.
  template <class F>
  __device__ __forceinline__ void by_code(F&& f) const {
    if (a.kv_e5m2)
      f(E5M2{});
    else
      f(E4M3{});
  }

  // x = K Q^T, which is there after wgmma_wait().
  __device__ __forceinline__ void multiply_k(float (&x)[elements], unsigned k) const {
    constexpr int steps = head_dim / 16;
    if constexpr (!KV::scaled) {
      const unsigned long long k_matrix = descriptor(k, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < steps; ++step)
        ptx::wgmma<bf16>(x, k_matrix + step_offset(step, unit_keys),
                         q_matrix + step_offset(step, rows), step > 0);
    } else {
      // At most 256 columns at once, for which there are registers.
      constexpr int at_once = steps > 16 ? steps / 2 : steps;
      const unsigned from = k + warp() * warp_keys * panel_pitch + KV::k_lane(lane());
#pragma unroll
      for (int first = 0; first < steps; first += at_once) {
        unsigned words[at_once / 2][4], f[at_once][4];
#pragma unroll
        for (int step = 0; step < at_once; step += 2)
          KV::load_k(words[step / 2], from, first + step);
        if (first > 0) ptx::wgmma_wait<0>();  // it reads f
        by_code([&](auto code) {
#pragma unroll
          for (int step = 0; step < at_once; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              code.pairs(words[step / 2][step % 2 * 2 + half], &f[step][half], &f[step][2 + half]);
        });
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < at_once; ++step)
          ptx::wgmma<bf16, false>(x, f[step], q_matrix + step_offset(first + step, rows),
                                  first + step > 0);
        if (first + at_once < steps) ptx::wgmma_commit();
      }
    }
    ptx::wgmma_commit();
  }

  // V^T of the 64 columns from 64 * m on, of fp8 as the matrix unit takes it from registers.
  using Values = unsigned[unit_keys / 16][4];
  // Words of ldmatrix hold columns 2g and 2g + 1 of two keys, g = lane / 4: row g is column 2g, row
  // g + 8 the one behind it.
  __device__ __forceinline__ void load_values(Values& f, unsigned v, int m) const {
    const int chunk = 4 * m + warp();
    const unsigned from =
        v + chunk / 8 * panel_bytes + chunk_offset<panel_pitch>(lane(), chunk % 8);
    unsigned w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::ldmatrix_transposed(w[half], from + half * 32 * panel_pitch);
    by_code([&](auto code) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          code.pairs(__byte_perm(w[half][j], 0, 0x3120), &f[2 * half + j / 2][j % 2 * 2],
                     &f[2 * half + j / 2][j % 2 * 2 + 1]);
    });
  }
  // Values of keys that nobody sees may be anything.
  __device__ __forceinline__ void clear_values(Values& f, unsigned long long seen) const {
#pragma unroll
    for (int step = 0; step < unit_keys / 16; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned two = unsigned(seen >> (16 * step + 8 * half + lane() % 4 * 2));
        const unsigned mask = (two & 1) * 0xffff | (two >> 1 & 1) * 0xffff0000;
        f[step][2 * half] &= mask;
        f[step][2 * half + 1] &= mask;
      }
  }

  // sums (+)= V^T P^T of the 64 columns from 64 * m on. f: these, of fp8.
  __device__ __forceinline__ void multiply_v(float (&sums)[elements], const Values& f, unsigned v,
                                             int m, unsigned long long p, bool add) const {
    constexpr int steps = unit_keys / 16;
    ptx::wgmma_fence();
    if constexpr (!KV::scaled) {
      const unsigned long long v_matrix = descriptor(v, panel_bytes) + (m * panel_bytes >> 4);
#pragma unroll
      for (int step = 0; step < steps; ++step)
        ptx::wgmma_transposed_a<bf16>(sums, v_matrix + (step * 16 * panel_pitch >> 4),
                                      p + (step * 32 >> 4), step > 0 || add);
    } else {
#pragma unroll
      for (int step = 0; step < steps; ++step)
        ptx::wgmma<bf16, false>(sums, f[step], p + (step * 32 >> 4), step > 0 || add);
    }
    ptx::wgmma_commit();
  }
  static __device__ __forceinline__ int v_column(int m, int half, int lane, int warp) {
    return 64 * m + 16 * warp + (KV::scaled ? 2 * (lane / 4) + half : lane / 4 + 8 * half);
  }

  // Units in the middle of a part go a straight way, which has no step that others need.
  __device__ __forceinline__ void take(unsigned stage, const SwappedUnit& unit) {
    if (unit.valid == 0) return;
    const bool usual = !fresh && unit.valid == ~0ull && unit.first >= all_begin &&
                       unit.first + unit_keys <= all_end && plain() && !a.split_invariant &&
                       (!KV::scaled || (!apart && unit.v_descale == v_unit));
    if (usual) [[likely]]
      take_as<true>(stage, unit);
    else
      take_as<false>(stage, unit);
    fresh = false;
    turn ^= 1;
  }
  template <bool usual>
  __device__ __forceinline__ void take_as(unsigned stage, const SwappedUnit& unit) {
    const unsigned v = stage + tile.k_bytes();
    float x[elements];
    Values f[v_tiles];
    multiply_k(x, stage);
    if constexpr (early_values) {
#pragma unroll
      for (int m = 0; m < v_tiles; ++m) load_values(f[m], v, m);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(x);
    scale_scores(x, KV::scaled ? unit.k_descale : 1);
    unsigned long long seen = ~0ull;  // keys that some row sees
    if constexpr (!usual) {
      const int first = unit.first;
      if (!plain()) modify(x, first);
      seen = unit.valid;
      if (seen != ~0ull || first < all_begin || first + unit_keys > all_end) {
        hide(x, first, seen);
        if (a.tree) seen = hide_by_tree(x, first);
        if (!KV::scaled) clear(v, seen);
      }
    }
    weigh<usual>(x);
    if constexpr (KV::scaled) {
#pragma unroll
      for (int m = 0; m < v_tiles; ++m) {
        if (!early_values) load_values(f[m], v, m);
        if (!usual && seen != ~0ull) clear_values(f[m], seen);
      }
    }
    const unsigned long long p = descriptor(p_place(), 0);
    if constexpr (KV::scaled && !usual) {
      if (!together(unit.v_descale)) return add_values_apart(f, v, p, unit.v_descale, x);
    }
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) ptx::pin(o[m]);
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) multiply_v(o[m], f[m], v, m, p, true);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) ptx::pin(o[m]);
  }

  // Whether V of this descale is summed up without it.
  __device__ __forceinline__ bool together(float v_descale) {
    if (fresh) v_unit = v_descale;
    if (apart) return false;
    if (v_descale == v_unit || fresh) return true;
#pragma unroll
    for (int m = 0; m < v_tiles; ++m)
#pragma unroll
      for (int i = 0; i < elements; ++i) o[m][i] *= v_unit;
    apart = true;
    return false;
  }
  __device__ __forceinline__ void add_values_apart(Values (&f)[v_tiles], unsigned v,
                                                   unsigned long long p, float v_descale,
                                                   float (&free)[elements]) {
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) {
      multiply_v(free, f[m], v, m, p, false);
      ptx::wgmma_wait<0>();
      ptx::pin(free);
#pragma unroll
      for (int i = 0; i < elements; ++i) o[m][i] = fmaf(free[i], v_descale, o[m][i]);
    }
  }

  // Products become scores in the log2 domain.
  __device__ __forceinline__ void scale_scores(float (&x)[elements], float k_descale) const {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      float2 factor = make_float2(a.scale * log2_e, a.scale * log2_e);
      if constexpr (KV::scaled) {
        factor = *reinterpret_cast<const float2*>(&mine().q_scale[rows_before + lane_row(n)]);
        factor.x *= k_descale, factor.y *= k_descale;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[4 * n + 2 * half] *= factor.x;
        x[4 * n + 2 * half + 1] *= factor.y;
      }
    }
  }
  // Softcap and ALiBi.
  __device__ __forceinline__ void modify(float (&x)[elements], int first) const {
    const float limit = a.softcap * log2_e, into_limit = a.softcap > 0 ? 1 / limit : 0;
    int key[2];  // places of the lane's
#pragma unroll
    for (int half = 0; half < 2; ++half)
      key[half] = a.alibi_slopes ? key_place(positions_of<tile>(a), first + lane_key(half)) : 0;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = lane_row(n) + i;
        const float slope = a.alibi_slopes ? mine().slope[rows_before + r] : 0;
        const int query = a.alibi_slopes ? (at.first_row + r) / a.group + mine().first_query : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& s = x[4 * n + 2 * half + i];
          if (a.softcap > 0) s = limit * tanh_accurate(s * into_limit);
          if (a.alibi_slopes) s -= slope * fabsf(float(query - key[half]));
        }
      }
  }

  // Scores of keys that their queries do not see.
  __device__ __forceinline__ void hide(float (&x)[elements], int first,
                                       unsigned long long valid) const {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      const int4 keys = *reinterpret_cast<const int4*>(&mine().keys[lane_row(n)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = first + lane_key(half);
        const bool there = valid >> lane_key(half) & 1;
        if (!there || position < keys.x || position >= keys.y) x[4 * n + 2 * half] = -infinity();
        if (!there || position < keys.z || position >= keys.w)
          x[4 * n + 2 * half + 1] = -infinity();
      }
    }
  }
  // The same of the tree's keys, after hide(). Returns a bit for each key that some row sees.
  __device__ __forceinline__ unsigned long long hide_by_tree(float (&x)[elements],
                                                             int first) const {
    unsigned any = 0;  // of the warp's keys
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const ulonglong2 words = mine().tree[lane_row(n) + i];
        const unsigned long long seen = a.tree_mask.seen(words.x, words.y, first, at.seqlen_kv);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& s = x[4 * n + 2 * half + i];
          if (!(seen >> lane_key(half) & 1)) s = -infinity();
          if (s != -infinity()) any |= 1u << (lane() / 4 + 8 * half);
        }
      }
    any = __reduce_or_sync(0xffffffff, any);
    if (lane() == 0) mine().seen[warp()] = (unsigned long long)any << 16 * warp();
    meet();
    unsigned long long all = 0;
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) all |= mine().seen[w];
    return all;
  }
  // V of keys that nobody sees may be anything, and 0 * NaN is NaN. What weigh() does next makes it
  // known to the matrix unit.
  __device__ __forceinline__ void clear(unsigned v, unsigned long long seen) const {
    if (seen == ~0ull) return;
    constexpr int panels = tile.panels(head_dim_v);
#pragma unroll 1
    for (int i = thread(); i < unit_keys * 8; i += group_threads) {
      if (seen >> i / 8 & 1) continue;
#pragma unroll
      for (int panel = 0; panel < panels; ++panel)
        ptx::fill_shared(v + panel * panel_bytes + 16 * i, 0);
    }
  }

  __device__ __forceinline__ unsigned p_place() const {
    return q + tile.q_bytes() + turn * tile.p_bytes();
  }

  // Weights 2^(x - reference) to shared memory, as the matrix unit takes them. A reference stays
  // until a score exceeds it by more than `slack`: weights are up to 2^8 then, and o is rarely
  // multiplied. split_invariant: references are integers, so that sums against different ones
  // differ by an exact power of two.
  template <bool usual>
  __device__ __forceinline__ void weigh(const float (&x)[elements]) {
    const float slack = !usual && a.split_invariant ? 0 : 8;
    if (usual || !fresh) {
      bool above = false;
      float before[row_tiles][2];
#pragma unroll
      for (int n = 0; n < row_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          above = above || fmaxf(x[4 * n + i], x[4 * n + 2 + i]) > reference[n][i] + slack;
          before[n][i] = sum[n][i];
        }
      store_weights<usual>(x);
      if (!ptx::barrier_or<group_threads>(1 + group(), above)) return;
#pragma unroll
      for (int n = 0; n < row_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[n][i] = before[n][i];
    }
    move_references(x, slack);
    store_weights<usual>(x);
    meet();
  }
  // To the unit's largest scores, row by row.
  __device__ __forceinline__ void move_references(const float (&x)[elements], float slack) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(x[4 * n + i], x[4 * n + 2 + i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
        if (lane() < 4) mine().most[warp()][lane_row(n) + i] = most;
      }
    meet();
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = mine().most[0][lane_row(n) + i];
#pragma unroll
        for (int w = 1; w < decode_warps; ++w) most = fmaxf(most, mine().most[w][lane_row(n) + i]);
        const float top = a.split_invariant ? ceilf(most) : most;
        const float next = most > reference[n][i] + slack ? top : reference[n][i];
        const float shrink = next == -infinity() ? 1 : ptx::ex2(reference[n][i] - next);
        reference[n][i] = next;
        sum[n][i] *= shrink;
#pragma unroll
        for (int m = 0; m < v_tiles; ++m) o[m][4 * n + i] *= shrink, o[m][4 * n + 2 + i] *= shrink;
      }
  }
  template <bool usual>
  __device__ __forceinline__ void store_weights(const float (&x)[elements]) {
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      float used[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) used[i] = reference[n][i] == -infinity() ? 0 : reference[n][i];
      // split_invariant: how a weight is rounded depends on its score alone, for the reference is
      // whole.
      const auto weight = [&](float x, float used) {
        if (usual || !a.split_invariant) return ptx::ex2(x - used);
        const float whole = fmaxf(floorf(x), -1e30f);
        return ptx::ex2(x - whole) * ptx::ex2(whole - used);
      };
      unsigned pair[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float y0 = weight(x[4 * n + 2 * half], used[0]),
              y1 = weight(x[4 * n + 2 * half + 1], used[1]);
        pair[half] = Product::pack(y0, y1);
        if (!usual && a.split_invariant) {  // then sums have the weights as rounded
          y0 = Product::unpack(pair[half] & 0xffff);
          y1 = Product::unpack(pair[half] >> 16);
        }
        sum[n][0] += y0;
        sum[n][1] += y1;
      }
      // [row][64 keys]
      ptx::stmatrix_transposed(
          p_place() + 8 * n * panel_pitch +
              chunk_offset<panel_pitch>(lane() % 8, 2 * warp() + lane() / 8 % 2),
          pair[0], pair[1]);
    }
    ptx::fence_async_shared();
  }

  static __device__ __forceinline__ float sum_of_warps(const SwappedRows<tile>& of, int r) {
    float all = of.most[0][r];
#pragma unroll
    for (int w = 1; w < decode_warps; ++w) all += of.most[w][r];
    return all;
  }

  // When a part ends: the first warpgroup adds the sums of the second to its own, which come
  // through the second's place of Q and P. split: only the first has any.
  __device__ __forceinline__ void join_groups(bool split) {
    const bool first = group() == 0;
    float* const place = reinterpret_cast<float*>(q_place + (first ? tile.group_bytes() : 0));
    const SwappedRows<tile>& second = shared.second;
    if (!split) {
      if (!first) {
        note_sums();
        meet();
        const float factor = KV::scaled && !apart ? v_unit : 1;
#pragma unroll
        for (int m = 0; m < v_tiles; ++m)
#pragma unroll
          for (int i = 0; i < elements; ++i)
            place[(m * elements + i) * group_threads + thread()] = o[m][i] * factor;
      }
      meet_groups();
      if (first) {
        const float factor = KV::scaled && !apart ? v_unit : 1;
        apart = true;
#pragma unroll
        for (int n = 0; n < row_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int r = lane_row(n) + i;
            const float other = second.reference[r], next = fmaxf(reference[n][i], other),
                        shrink = next == -infinity() ? 1 : ptx::ex2(reference[n][i] - next),
                        grow = next == -infinity() ? 1 : ptx::ex2(other - next);
            reference[n][i] = next;
            sum[n][i] *= shrink;
            // Of the warpgroup's sum each of its threads has a part.
            if (thread() < 4) sum[n][i] = fmaf(sum_of_warps(second, r), grow, sum[n][i]);
#pragma unroll
            for (int m = 0; m < v_tiles; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                float& x = o[m][4 * n + 2 * half + i];
                x = fmaf(place[(m * elements + 4 * n + 2 * half + i) * group_threads + thread()],
                         grow, x * factor * shrink);
              }
          }
      }
    }
    meet_groups();  // before the second's place is written again
  }
  // Sums of weights, and references, to where all threads find them.
  __device__ __forceinline__ void note_sums() {
    const int here = int(ptx::recompute(lane()));
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          sum[n][i] += __shfl_xor_sync(0xffffffff, sum[n][i], step);
        const int r = 8 * n + here % 4 * 2 + i;
        if (here < 4) {
          mine().most[warp()][r] = sum[n][i];
          if (warp() == 0) mine().reference[r] = reference[n][i];
        }
      }
  }

  // A part ends: to the result, or to the workspace. All rows through the place of Q and P.
  __device__ __forceinline__ void end_part(const PlacedPart& placed) {
    // Row r's columns lie at ^ 8 (r / 2), so that a store of a warp meets each bank once.
    float* const place = reinterpret_cast<float*>(q_place);
    const auto place_at = [](int r, int column) {
      return r * head_dim_v + (column ^ (r / 2 % 4 * 8));
    };
    note_sums();
    const int here = int(ptx::recompute(lane()));
    const float factor = KV::scaled && !apart ? v_unit : 1;
    const Parts<tile> parts = {a, placed};
    const int used = used_rows();
    if (!placed.alone() && !a.whole_heads) {
      const unsigned slot = parts.slot(placed.number);
#pragma unroll
      for (int n = 0; n < row_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = 8 * n + here % 4 * 2 + i;
          if (r >= used) continue;
          float* const to = parts.sums(slot, r);
#pragma unroll
          for (int m = 0; m < v_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              to[v_column(m, half, here, warp())] = o[m][4 * n + 2 * half + i] * factor;
        }
      meet();
      if (threadIdx.x < used)
        *parts.stats(slot, threadIdx.x) =
            make_float2(mine().reference[threadIdx.x], sum_of_warps(mine(), threadIdx.x));
      parts.arrive_with_all_rows(at, used);
      meet();  // before the next part's Q comes
      return;
    }
    meet();  // all have done with Q and P
#pragma unroll
    for (int m = 0; m < v_tiles; ++m)
#pragma unroll
      for (int n = 0; n < row_tiles; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          place[place_at(8 * n + here % 4 * 2 + j % 2, v_column(m, j / 2, here, warp()))] =
              o[m][4 * n + j] * factor;
    meet();
    using Row = RowPart<head_dim_v>;
#pragma unroll 1
    for (int r = Row::row(); r < rows; r += Row::rows) {
      Row row;
      row.reference = mine().reference[r];
      row.sum = sum_of_warps(mine(), r);
      row.o = *reinterpret_cast<const float4*>(place + place_at(r, Row::column()));
      if (placed.alone())
        store_result(a, at, r, row);
      else
        parts.fold(at, r, row);
    }
    meet();  // before the next part's Q comes where the sums are
  }

  __device__ __forceinline__ void run() {
    Stage stage;
    const int own = tile.groups == 1 ? 0 : __shfl_sync(0xffffffff, group(), 0);
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
      const unsigned slot = number % 2;
      wait(shared.part_full[slot], number / 2 % 2);
      const SwappedPart& part = shared.part[slot];
      if (part.none) return;
      at = part.at;
      begin_part();
      bool last, final;
      int takes = 0;  // the warpgroup that takes the unit
#pragma unroll 1
      do {
        wait(shared.full[stage.number], stage.parity);
        // What cp.async wrote, the matrix unit reads.
        if (!KV::scaled && row_by_row<tile>()) ptx::fence_async_shared();
        const SwappedUnit& unit = shared.unit[stage.number];
        last = unit.last, final = unit.final;
        if (takes == own) take(ring + stage.number * tile.stage_bytes(), unit);
        // Splits are summed as a single warpgroup does it.
        if (tile.groups > 1 && !a.split_keys) takes ^= 1;
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[stage.number]));
        stage.next(a.stages);
      } while (!last);
      if constexpr (tile.groups > 1) {
        join_groups(a.split_keys > 0);
        if (own == 0) end_part(part.placed);
      } else {
        end_part(part.placed);
      }
      if (final) return;
      if (threadIdx.x == 0) ptx::mbarrier_arrive(address(&shared.part_empty[slot]));
    }
  }
};

// Parameters come from memory 64 bytes at a time, some hundred clocks each: they are asked for
// before they are needed, by one warp each.
__device__ __forceinline__ void fetch_parameters(const attn_decode_kernarg& a, const Maps& maps) {
  constexpr int line = 64, lines = offsetof(attn_decode_kernarg, segment) / line + 1;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const auto fetch = [](const void* from) {
    const int word = *static_cast<const int*>(from);
    asm volatile("" ::"r"(word));
  };
#pragma unroll 1
  for (int i = warp; i < lines; i += decode_warps + 1)
    fetch(reinterpret_cast<const char*>(&a) + i * line);
  const char* const segment = reinterpret_cast<const char*>(&a.segment[0]);
#pragma unroll 1
  for (int i = warp; i * line < int(sizeof a.segment[0]); i += decode_warps + 1)
    fetch(segment + i * line);
  if (warp == decode_warps && threadIdx.x % 32 < 2 * a.num_segments) {
    const int i = threadIdx.x % 32;
    ptx::tma_prefetch_map(i % 2 ? &maps[i / 2].v : &maps[i / 2].k);
  }
}

// load(work, ring): what the warps behind the first four do; compute(ring, place behind it): what
// those do.
template <DecodeTile tile, class Load, class Compute>
__device__ __forceinline__ void decode_with(const attn_decode_kernarg& a, const Maps& maps,
                                            Load&& load, Compute&& compute) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SwappedShared<tile>& shared = swapped_shared<tile>();
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < decode_max_stages) {
    ptx::mbarrier_init(address(&shared.full[threadIdx.x]),
                       tile.own_types && a.scales_at ? 32 + 1 : arrivals_of_unit<tile>());
    ptx::mbarrier_init(address(&shared.empty[threadIdx.x]), decode_warps * tile.groups);
  } else if (threadIdx.x < decode_max_stages + 2) {
    ptx::mbarrier_init(address(&shared.part_full[threadIdx.x - decode_max_stages]), 1);
    ptx::mbarrier_init(address(&shared.part_empty[threadIdx.x - decode_max_stages]), 1);
  }
  ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  fetch_parameters(a, maps);
  __syncthreads();
  const bool concurrent = tile.concurrent() && a.concurrent;
  // No access to other memory before this.
  const auto begin_access = [&] {
    if (concurrent)
      ptx::grid_begin_concurrent();
    else
      ptx::grid_wait();
  };
  constexpr int compute_warps = decode_warps * tile.groups;
  if (warp >= compute_warps) {
    const bool finds = warp == compute_warps;
    if constexpr (tile.groups > 1) {
      ptx::registers_shrink<tile.load_registers>();
      if (!finds) return;
    }
    Work<tile> work;
    if (finds && a.fixed_lengths) work = find_work<tile, 32>(a, threadIdx.x % 32);
    begin_access();
    if (a.seqlen_q == 0) return;
    if (finds && !a.fixed_lengths) work = find_work<tile, 32>(a, threadIdx.x % 32);
    load(work, address(shared_memory));
    // One block that waits is enough: a launch ends with its last one, and others leave room.
    if (concurrent && finds && blockIdx.x == gridDim.x - 1) {
      __syncwarp();
      ptx::grid_wait();
    }
    return;
  }
  if constexpr (tile.groups > 1) ptx::registers_grow<tile.compute_registers>();
  // The others wait for a part, which is told after the loading warp's begin_access().
  if (a.cu_seqlens_q && warp == 0) {
    begin_access();
    store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
  }
  if (a.seqlen_q == 0) return;
  compute(shared_memory, shared_memory + a.stages * stage_bytes<tile>(a));
}

template <class KV, DecodeTile tile>
__device__ __forceinline__ void decode_swapped(const attn_decode_kernarg& a, const Maps& maps) {
  SwappedShared<tile>& shared = swapped_shared<tile>();
  const auto load = [&](Work<tile>& work, unsigned ring) {
    if constexpr (tile.loaders() > 1) {
      if (row_by_row<tile>()) {
        if (threadIdx.x == group_threads) shared.work = work;
        ptx::barrier_wait<32 * tile.loaders()>(2);
        work = shared.work;
        SwappedLoader<KV, tile, true> loader{a, maps, shared, ring};
        return loader.run(loader, work);
      }
    }
    if constexpr (tile.concurrent()) {
      if (a.concurrent) {
        SwappedLoader<KV, tile, false, true> loader{a, maps, shared, ring};
        if (threadIdx.x % 32 == 0) loader.run(loader, work);
        return;
      }
    }
    SwappedLoader<KV, tile> loader{a, maps, shared, ring};
    if (threadIdx.x % 32 == 0) loader.run(loader, work);
  };
  decode_with<tile>(a, maps, load, [&](unsigned char* ring, unsigned char* q_place) {
    if (tile.groups > 1 && threadIdx.x >= group_threads) q_place += tile.group_bytes();
    const unsigned q = address(q_place);
    const auto matrix = [](unsigned at) {
      return ptx::wgmma_descriptor(__shfl_sync(0xffffffff, at / 16, 0), 0);
    };
    Swapped<KV, tile>{a, shared, address(ring), q_place, q, matrix(q)}.run();
  });
}

}  // namespace attn::decode
