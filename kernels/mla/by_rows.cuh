// Decode of latent caches whose rows are loaded each from where it is: pages of any size, and rows
// of codes. Rows of Q, up to 8, 16 or 64 of them, are the N of the products: S^T = K Q^T,
// O^T = V^T P^T. Rows of the cache come by the copy engine as they are, a unit's one behind the
// other, and go to the matrix unit through registers. Of rows of codes:
//
//   scores  codes as f16, which is exact, against Q in f16; of mla_656 of 128 columns each, which
//           are then multiplied by the key's scale
//   sums    codes as bf16 of their bits, which are 2^-120 of their values, against weights times
//           the key's scale and 2^60; of mla_656 four tiles of weights, one for each scale
//
// One warpgroup computes; of 64 rows two, each the scores of its half of the rows and the sums of
// its half of the latent columns. More warps load.
#pragma once
#include "../ptx/bulk.h"
#include "../ptx/convert_fp8.h"
#include "../ptx/grid.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/recompute.h"
#include "../ptx/stmatrix.h"
#include "../ptx/uniform.h"
#include "../ptx/wgmma.h"
#include "feed.cuh"

namespace attn::mla {

__device__ __forceinline__ const attn_decode_kernarg& common(const attn_decode_sm90_kernarg& a) {
  return a.a;
}
__device__ __forceinline__ const attn_decode_kernarg& common(const attn_decode_kernarg& a) {
  return a;
}

// Of a row of mla_656.
constexpr int row_scales_at = 512, row_rope_at = 528;

// Where weights are, when there are none.
template <int rows>
struct ByRowsStats {
  float most[4][rows];  // of each warp: a unit's scores; when a part ends sums
  float factor[rows];   // of sums
  float reference[rows];
};

template <int rows, Rows by>
struct ByRowsShared {
  static constexpr RowsOfCache cache = rows_of_cache(by);
  static constexpr int warpgroups = by_rows_warpgroups(rows);  // that compute
  static constexpr int loaders = by_rows_loaders(rows, by);    // warps
  static constexpr int stages = by_rows_stages;
  static constexpr int parts = 4;  // of units that are there, and one that ends
  Barrier full[stages], empty[stages];
  struct {
    int first;  // as in UnitRecord
    unsigned word;
    unsigned long long valid;  // a bit for each key that is there and that some row sees
  } unit[stages];
  PartRecord part[parts];
  alignas(16) float q_scale[rows];  // what products of a row of Q are multiplied with
  alignas(16) int end[rows];        // of the keys that a row sees
  float factor[by == Rows::e4m3 ? stages : 1][unit_keys];  // of the keys of codes
  Found found;

  // Where panels are, from the beginning of shared memory.
  static constexpr int q_at = by_rows_control(by), q_panel = rows * 128;
  static constexpr int weights_at = q_at + 9 * q_panel;
  static constexpr int ring_at = weights_at + cache.weights * q_panel;
  static constexpr int stage_bytes = unit_keys * cache.pitch;
  static_assert(ring_at + stages * stage_bytes == by_rows_shared_bytes(rows, by));
};

// By each of the warps that load, for its part of a unit's keys. A lane finds one, and asks for the
// rows that begin there and, if they have no gaps in shared memory, lie one behind the other.
template <int rows, Rows by>
struct ByRowsFeed : Walk {
  using Shared = ByRowsShared<rows, by>;
  static constexpr int row_bytes = Shared::cache.bytes, pitch = Shared::cache.pitch;
  static constexpr int element_bytes = has_codes(by) ? 1 : 2;  // of strides
  static constexpr int keys = unit_keys / Shared::loaders;
  using Valid = std::conditional_t<keys == 32, unsigned, unsigned short>;
  Shared& shared;
  const unsigned base;
  const int loader;  // of those

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int own_key() const { return keys * loader + lane() % keys; }

  // Of codes, of a key, which is row `row` of its page or sequence.
  __device__ __forceinline__ float factor_of(int key, int row) const {
    const attn_decode_segment& s = a.segment[0];
    if (s.k_type == attn_element_f8_e4m3fn_token)
      return static_cast<const float*>(
          s.k_scales.at)[entry * s.k_scales.batch + row * (long long)s.k_scales.seq +
                         h * s.k_scales.head];
    return s.k_descale.at ? *device::descale_at(s.k_descale, b, h, key) : 1;
  }

  __device__ __forceinline__ void run() {
    const Found& found = shared.found;
    const unsigned all = found.end - found.begin;
    unsigned part = 0;
    begin(found, own_key());
#pragma unroll 1
    for (unsigned number = 0; number < all; ++number) {
      const unsigned slot = number % Shared::stages, left = all - number;
      const int units = units_of(length), first = unit * unit_keys, key = first + own_key();
      const bool begins = number == 0 || unit == 0, ends = unit + 1 == units || left == 1;
      const int row = row_of(key);
      const bool there = lane() < keys && key < end() && page_is_there();
      const unsigned long long from = there ? address_of<element_bytes>(row) : 0;
      float factor = 0;
      if (by == Rows::e4m3 && there) factor = factor_of(key, row);
      const unsigned valid = __ballot_sync(0xffffffff, there);
      wait(shared.empty[slot], number / Shared::stages % 2 ^ 1);
      const unsigned full = address(&shared.full[slot]);
      if (by == Rows::e4m3 && lane() < keys) shared.factor[slot][own_key()] = factor;
      __syncwarp();
      if (lane() == 0) {
        auto& to = shared.unit[slot];
        reinterpret_cast<Valid*>(&to.valid)[loader] = Valid(valid);
        if (loader == 0) {
          to.first = first;
          to.word = part << 8 | (begins ? begins_part : 0u) | (ends ? ends_part : 0u) |
                    (left == 1 ? ends_block : 0u);
          if (begins && number > 0)
            shared.part[part % Shared::parts] =
                part_of(a, b, tile, length, found.end - left - unit, units);
        }
        ptx::mbarrier_arrive_expect(full, __popc(valid) * row_bytes);
      }
      __syncwarp();
      const unsigned long long before = __shfl_up_sync(0xffffffff, from, 1);
      const bool starts = from && (pitch != row_bytes || lane() == 0 || before + row_bytes != from);
      const unsigned breaks = (__ballot_sync(0xffffffff, starts) | ~valid) >> lane() >> 1;
      const int together = breaks ? __ffs(breaks) : 32 - lane();
      if (starts)
        ptx::bulk_load(base + Shared::ring_at + slot * Shared::stage_bytes + own_key() * pitch,
                       reinterpret_cast<const void*>(from), together * row_bytes, full);
      __syncwarp();
      part += ends;
      if (left == 1) return;
      next(own_key());
    }
  }
};

// Lane l of warp w has rows 8n + 2 (l % 4) + i, i = 0, 1, of keys 16w + l / 4 + 8 half, as element
// 4n + 2 half + i; of tile m of O^T in place of keys columns 64m + 16w + 2 (l / 4) + half of codes,
// else 64m + 16w + l / 4 + 8 half.
template <int type, int rows, Rows by>
struct ByRows {
  using Shared = ByRowsShared<rows, by>;
  using T = device::ElementOf<type>;
  static constexpr bool bf16 = type == attn_element_bf16, codes = has_codes(by),
                        groups_scaled = by == Rows::mla_656;
  static constexpr int warpgroups = Shared::warpgroups;
  static constexpr bool two = warpgroups > 1;
  static constexpr int row_tiles = rows / 8, elements = rows / 2;
  // Of a warpgroup: row tiles of the scores, columns of V.
  static constexpr int own_tiles = row_tiles / warpgroups, own_elements = elements / warpgroups;
  static constexpr int v_tiles = latent_columns / 64 / warpgroups;
  static constexpr int pitch = Shared::cache.pitch, groups = Shared::cache.weights;
  static constexpr float weights = codes ? 0x1p60f : 1, real = codes ? 0x1p60f : 1;  // see above
  using Scales = float[2][groups];  // of the lane's keys
  const attn_decode_kernarg& a;
  Shared& shared;
  const unsigned base;
  int all_end;  // of the keys that all rows see
  bool fresh;
  float o[v_tiles][elements];
  float reference[own_tiles][2], sum[own_tiles][2];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  // Of the warpgroups; not kept, for registers are few.
  static __device__ __forceinline__ int which() {
    return two ? int(ptx::recompute(threadIdx.x)) / 128 : 0;
  }
  static constexpr int threads = 128 * warpgroups;
  static __device__ __forceinline__ void meet() { ptx::barrier_wait<threads>(1); }
  static __device__ __forceinline__ unsigned long long descriptor(unsigned at) {
    return ptx::wgmma_descriptor(ptx::uniform(at / 16), 0);
  }
  // Of 16 columns from 16 * step on of Q.
  static __device__ __forceinline__ unsigned step_offset(int step) {
    return (step / 4 * Shared::q_panel + step % 4 * 32) >> 4;
  }
  static __device__ __forceinline__ int lane_row(int n) { return 8 * n + lane() % 4 * 2; }
  __device__ __forceinline__ ByRowsStats<rows>& stats() const {
    static_assert(sizeof(ByRowsStats<rows>) <= Shared::cache.weights * Shared::q_panel);
    return *reinterpret_cast<ByRowsStats<rows>*>(reinterpret_cast<unsigned char*>(&shared) +
                                                 Shared::weights_at);
  }
  static __device__ __forceinline__ int own_row(int n) { return lane_row(own_tiles * which() + n); }

  __device__ __forceinline__ void begin_part(const PartRecord& part) {
    const Head at = part.at;
    const int used = used_rows(a, at, rows);
    const KeyBand seen = a.mask.band(at.seqlen_q, at.seqlen_kv);
    const auto end_of = [&](int r) {
      const Row row(a, at, min(r, used - 1));
      return device::clamp(row.query + seen.upper, 0, at.seqlen_kv);
    };
    all_end = end_of(0);
    if (threadIdx.x < rows) shared.end[threadIdx.x] = end_of(threadIdx.x);
    load_q(at, used);
    fresh = true;
#pragma unroll
    for (int n = 0; n < own_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) reference[n][i] = -device::infinity(), sum[n][i] = 0;
#pragma unroll
    for (int m = 0; m < v_tiles; ++m)
#pragma unroll
      for (int i = 0; i < elements; ++i) o[m][i] = 0;
    ptx::fence_async_shared();
    meet();
  }
  // 8 threads per row.
  __device__ __forceinline__ void load_q(const Head& at, int used) {
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < rows; r += threads / 8) load_row(at, r, r < used);
  }
  __device__ __forceinline__ void load_row(const Head& at, int r, bool exists) {
    constexpr int panels = latent_columns / 64 + 1;
    const int chunk = threadIdx.x % 8;
    const char* const from = q_address(a, at, Row(a, at, exists ? r : 0)) + 16 * chunk;
    unsigned words[panels][4];
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      const uint4 x = exists ? *reinterpret_cast<const uint4*>(from + 128 * i) : uint4{0, 0, 0, 0};
      words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
    }
    if constexpr (!codes) {
      if (chunk == 0) shared.q_scale[r] = a.scale * device::log2_e;
#pragma unroll
      for (int i = 0; i < panels; ++i)
        ptx::store_shared(q_place(i) + device::chunk_offset<128>(r, chunk), words[i]);
    } else {
      store_q_for_codes(words, r, chunk);
    }
  }
  __device__ __forceinline__ unsigned q_place(int panel) const {
    return base + Shared::q_at + panel * Shared::q_panel;
  }
  template <int panels>
  __device__ __forceinline__ void store_q_for_codes(unsigned (&words)[panels][4], int r,
                                                    int chunk) const {
    const auto value = [](unsigned pair, int half) {
      return device::BF16::unpack((unsigned short)(pair >> 16 * half));
    };
    float most = 0;
#pragma unroll
    for (int i = 0; i < panels; ++i)
#pragma unroll
      for (const unsigned pair : words[i])
        // Rope columns in bf16 only need to stay finite.
        most = fmaxf(most, fmaxf(fabsf(value(pair, 0)), fabsf(value(pair, 1))) *
                               (groups_scaled && i == panels - 1 ? 0x1p-60f : 1));
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    const decode::QueryFactor factor(most);
    if (chunk == 0) shared.q_scale[r] = a.scale * factor.undo * device::log2_e;
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      unsigned(&x)[4] = words[i];
      if (groups_scaled && i == panels - 1) {
#pragma unroll
        for (unsigned& pair : x)
          pair = device::BF16::pack(value(pair, 0) * factor.value, value(pair, 1) * factor.value);
        ptx::store_shared(q_place(i) + device::chunk_offset<128>(r, chunk), x);
        continue;
      }
#pragma unroll
      for (unsigned& pair : x)
        pair = device::F16::pack(value(pair, 0) * factor.value, value(pair, 1) * factor.value);
      // The matrix unit takes pairs of 16 columns in the order 0 2 4 6, 1 3 5 7 of words of codes.
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        asm volatile(
            "st.shared.v2.u32 [%0], {%1, %2};" ::"r"(
                q_place(i) + device::chunk_offset<128>(r, chunk / 2 * 2 + odd) + chunk % 2 * 8),
            "r"(x[odd]), "r"(x[2 + odd])
            : "memory");
    }
  }

  __device__ __forceinline__ void run() {
    begin_part(shared.part[0]);
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const unsigned slot = n % Shared::stages;
      wait(shared.full[slot], n / Shared::stages % 2);
      const unsigned word = shared.unit[slot].word;
      const PartRecord& part = shared.part[(word >> 8) % Shared::parts];
      if (n > 0 && word & begins_part) begin_part(part);
      take(slot, shared.unit[slot].first, shared.unit[slot].valid);
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(address(&shared.empty[slot]));
      if (word & ends_part) end_part(part);
      if (word & ends_block) return;
    }
  }

  __device__ __forceinline__ void take(unsigned slot, int first, unsigned long long valid) {
    const unsigned stage = base + Shared::ring_at + slot * Shared::stage_bytes;
    float s[own_elements];
    const int own = 16 * warp() + lane() / 4;
    Scales scale;
    if constexpr (groups_scaled) {
      load_scales(scale, stage, valid);
      multiply_k_by_groups(s, stage, scale);
    } else {
      multiply_k(s, stage);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scale[half][0] = codes ? shared.factor[slot][own + 8 * half] : 1;
    }
    if constexpr (by == Rows::e4m3) {
#pragma unroll
      for (int i = 0; i < own_elements; ++i) s[i] *= scale[i / 2 % 2][0];
    }
#pragma unroll
    for (int n = 0; n < own_tiles; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(&shared.q_scale[own_row(n)]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        s[4 * n + 2 * half] *= factor.x, s[4 * n + 2 * half + 1] *= factor.y;
    }
    if (valid != ~0ull || first + unit_keys > all_end) {
#pragma unroll
      for (int n = 0; n < own_tiles; ++n) {
        const int2 end = *reinterpret_cast<const int2*>(&shared.end[own_row(n)]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = own + 8 * half;
          const bool there = valid >> key & 1;
          if (!there || first + key >= end.x) s[4 * n + 2 * half] = -device::infinity();
          if (!there || first + key >= end.y) s[4 * n + 2 * half + 1] = -device::infinity();
        }
      }
    }
    if (!codes && valid != ~0ull) clear(stage, valid);
    weigh(s, scale);
    fresh = false;
    multiply_v(stage);
  }
  // Those of keys that are not there are 0.
  static __device__ __forceinline__ void load_scales(Scales& scale, unsigned stage,
                                                     unsigned long long valid) {
    const int own = 16 * warp() + lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = ptx::load_shared_floats(stage + (own + 8 * half) * pitch + row_scales_at);
      const bool there = valid >> (own + 8 * half) & 1;
      scale[half][0] = there ? x.x : 0, scale[half][1] = there ? x.y : 0;
      scale[half][2] = there ? x.z : 0, scale[half][3] = there ? x.w : 0;
    }
  }

  // V of keys that nobody sees may be anything, and 0 * NaN is NaN. Each warp clears rows of its
  // own keys, which no other warp reads as K. weigh() waits for all warps, then they are read as V.
  static __device__ __forceinline__ void clear(unsigned stage, unsigned long long valid) {
    static_assert(!two || codes);  // two warps would read the same rows as K
    constexpr int chunks = latent_columns / 8;
    __syncwarp();
#pragma unroll 1
    for (int i = lane(); i < 16 * chunks; i += 32)
      if (const int key = 16 * warp() + i / chunks; !(valid >> key & 1))
        ptx::fill_shared(stage + key * pitch + i % chunks * 16, 0);
  }

  // Of a warp's keys, the place of a lane's part of a matrix of 16 rows and 32 bytes.
  static __device__ __forceinline__ unsigned k_lane(unsigned stage) {
    return stage + (16 * warp() + lane() % 16) * pitch + lane() / 16 * 16;
  }
  // Steps 4j and on of 16 columns of K.
  using Steps = unsigned[4][4];
  static __device__ __forceinline__ void load_k(Steps& f, unsigned from, int j) {
    if constexpr (codes) {
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        unsigned words[4];
        ptx::ldmatrix(words, from + 64 * j + 32 * two);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::f16_of_e4m3_word(words[i], &f[2 * two + i / 2][i % 2],
                                &f[2 * two + i / 2][2 + i % 2]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) ptx::ldmatrix(f[step], from + 128 * j + 32 * step);
    }
  }
  // Four steps at once, so that these are made while the matrix unit has the four before.
  __device__ __forceinline__ void multiply_k(float (&s)[own_elements], unsigned stage) const {
    const unsigned from = k_lane(stage);
    const unsigned long long q = own_q();
    Steps f[2];
#pragma unroll
    for (int j = 0; j < 9; ++j) {
      load_k(f[j % 2], from, j);
      multiply<bf16 && !codes>(s, f[j % 2], q + step_offset(4 * j), j > 0);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(s);
  }
  __device__ __forceinline__ void multiply_k_by_groups(float (&s)[own_elements], unsigned stage,
                                                       const Scales& scale) const {
    const unsigned from = k_lane(stage);
    const unsigned long long q = own_q();
    Steps f[2];
    constexpr int sums = two ? 1 : 2;  // on their way: there are no registers for more
    float t[sums][own_elements];
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::ldmatrix(f[1][step], from + row_rope_at + 32 * step);
    multiply<true>(s, f[1], q + step_offset(32), false);
#pragma unroll
    for (int j = 0; j < 2 * groups; ++j) {
      const int group = j / 2;
      load_k(f[j % 2], from, j);
      if (two && j > 0 && j % 2 == 0) {
        ptx::wgmma_wait<0>();
        add(s, t[0], scale, group - 1);
      }
      multiply<false>(t[group % sums], f[j % 2], q + step_offset(4 * j), j % 2 > 0);
      if (j == 0) ptx::pin(s);
      if (!two && j > 0 && j % 2 == 0) add(s, t[(group - 1) % sums], scale, group - 1);
    }
    ptx::wgmma_wait<0>();
    add(s, t[(groups - 1) % sums], scale, groups - 1);
  }
  __device__ __forceinline__ unsigned long long own_q() const {
    return descriptor(base + Shared::q_at + which() * own_tiles * 8 * 128);
  }
  // Of 64 columns. Returns when the matrix unit has done with what was asked of it before.
  template <bool product_bf16>
  static __device__ __forceinline__ void multiply(float (&to)[own_elements], const Steps& f,
                                                  unsigned long long q, bool adds) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::wgmma<product_bf16, false>(to, f[step], q + step_offset(step), adds || step > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
  static __device__ __forceinline__ void add(float (&s)[own_elements], float (&t)[own_elements],
                                             const Scales& scale, int group) {
    ptx::pin(t);
#pragma unroll
    for (int i = 0; i < own_elements; ++i) s[i] = fmaf(t[i], scale[i / 2 % 2][group], s[i]);
  }

  // Weights 2^(x - reference) to shared memory. A reference stays until a score exceeds it by more
  // than `slack`.
  __device__ __forceinline__ void weigh(const float (&s)[own_elements], const Scales& scale) {
    constexpr float slack = 8;
    meet();  // nobody reads the weights before
    if (!fresh) {
      bool above = false;
      float before[own_tiles][2];
#pragma unroll
      for (int n = 0; n < own_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          above = above || fmaxf(s[4 * n + i], s[4 * n + 2 + i]) > reference[n][i] + slack;
          before[n][i] = sum[n][i];
        }
      store_weights(s, scale);
      if (!ptx::barrier_or<threads>(1, above)) return;
#pragma unroll
      for (int n = 0; n < own_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[n][i] = before[n][i];
    }
    move_references(s, slack);
    meet();  // nobody reads what is there instead of weights
    store_weights(s, scale);
    meet();
  }
  __device__ __forceinline__ void move_references(const float (&s)[own_elements], float slack) {
#pragma unroll
    for (int n = 0; n < own_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(s[4 * n + i], s[4 * n + 2 + i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
        if (lane() < 4) stats().most[warp()][own_row(n) + i] = most;
      }
    meet();
#pragma unroll
    for (int n = 0; n < own_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = own_row(n) + i;
        float most = stats().most[0][r];
#pragma unroll
        for (int w = 1; w < 4; ++w) most = fmaxf(most, stats().most[w][r]);
        const float next = most > reference[n][i] + slack ? most : reference[n][i];
        const float shrink = next == -device::infinity() ? 1 : ptx::ex2(reference[n][i] - next);
        reference[n][i] = next;
        sum[n][i] *= shrink;
        if (two) {
          if (warp() == 0 && lane() < 4) stats().factor[r] = shrink;
        } else {
          multiply_sums(n, i, shrink);
        }
      }
    if (!two) return;
    meet();
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_sums(n, i, stats().factor[lane_row(n) + i]);
  }
  __device__ __forceinline__ void multiply_sums(int n, int i, float factor) {
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) o[m][4 * n + i] *= factor, o[m][4 * n + 2 + i] *= factor;
  }
  __device__ __forceinline__ void store_weights(const float (&s)[own_elements],
                                                const Scales& scale) {
    const unsigned to = base + Shared::weights_at + own_tiles * which() * 8 * 128 +
                        device::chunk_offset<128>(lane() % 8, 2 * warp() + lane() / 8 % 2);
#pragma unroll
    for (int n = 0; n < own_tiles; ++n) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float at = reference[n][j % 2];
        w[j] = ptx::ex2(s[4 * n + j] - (at == -device::infinity() ? 0 : at));
        sum[n][j % 2] += w[j];
        w[j] *= weights;
      }
#pragma unroll
      for (int group = 0; group < groups; ++group)
        ptx::stmatrix_transposed(to + group * Shared::q_panel + 8 * n * 128,
                                 T::pack(w[0] * scale[0][group], w[1] * scale[0][group]),
                                 T::pack(w[2] * scale[1][group], w[3] * scale[1][group]));
    }
    ptx::fence_async_shared();
  }

  // Of V^T the 64 columns from 64m on. Of codes: a word that a lane loads has columns 2g and 2g + 1
  // of two keys, g = lane / 4; row g of the matrix is column 2g, row g + 8 the one behind it.
  static __device__ __forceinline__ void load_v(Steps& f, unsigned stage, int m) {
    if constexpr (codes) {
      const unsigned from = stage + lane() * pitch + 16 * warp() + 64 * m;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned words[4];
        ptx::ldmatrix_transposed(words, from + half * 32 * pitch);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned x = words[j];
          unsigned(&to)[4] = f[2 * half + j / 2];
          constexpr unsigned signs = 0x80008000, others = 0x07f007f0;
          to[j % 2 * 2] = (x << 8 & signs) | (x << 4 & others);
          to[j % 2 * 2 + 1] = (x & signs) | (x >> 4 & others);
        }
      }
    } else {
      const unsigned from = stage + (lane() % 8 + lane() / 16 * 8) * pitch + 32 * warp() +
                            lane() / 8 % 2 * 16 + 128 * m;
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::ldmatrix_transposed(f[step], from + step * 16 * pitch);
    }
  }
  // o += V^T P^T.
  __device__ __forceinline__ void multiply_v(unsigned stage) {
    const unsigned long long p =
        descriptor(base + Shared::weights_at + which() * (groups / warpgroups) * Shared::q_panel);
    stage += which() * v_tiles * (codes ? 64 : 128);
    Steps f[2];
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) ptx::pin(o[m]);
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) {
      load_v(f[m % 2], stage, m);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma<bf16, false>(o[m], f[m % 2][step],
                                p + ((m * groups / 8 * Shared::q_panel + step * 32) >> 4), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < v_tiles; ++m) ptx::pin(o[m]);
  }
  // Of a row in tile m the lane's two columns, which are adjacent: if they are not, lanes of
  // neighbouring ones exchange one.
  __device__ __forceinline__ float2 pair_of(int m, int n, int i) const {
    const float first = o[m][4 * n + i], second = o[m][4 * n + 2 + i];
    if (codes) return make_float2(first * real, second * real);
    const bool odd = lane() / 4 % 2;
    const float got = __shfl_xor_sync(0xffffffff, odd ? first : second, 4);
    return odd ? make_float2(got, second) : make_float2(first, got);
  }
  // The first of them.
  static __device__ __forceinline__ int pair_column() {
    const int g = lane() / 4;
    return 64 * v_tiles * which() + 16 * warp() + (codes ? 2 * g : g % 2 ? 8 + g - 1 : g);
  }

  // A part ends: to the result, or to the workspace.
  __device__ __forceinline__ void end_part(const PartRecord& part) {
    const Head at = part.at;
    const int used = used_rows(a, at, rows);
    meet();  // nobody reads weights any more
#pragma unroll
    for (int n = 0; n < own_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          sum[n][i] += __shfl_xor_sync(0xffffffff, sum[n][i], step);
        if (lane() >= 4) continue;
        stats().most[warp()][own_row(n) + i] = sum[n][i];
        if (warp() == 0) stats().reference[own_row(n) + i] = reference[n][i];
      }
    meet();
    const Parts parts(a, shared.found.share, part.begin, part.units);
    const int column = pair_column();
#pragma unroll
    for (int n = 0; n < row_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = min(lane_row(n) + i, used - 1);
        const bool exists = lane_row(n) + i < used;
        float all = stats().most[0][r];
#pragma unroll
        for (int w = 1; w < 4; ++w) all += stats().most[w][r];
        const float2 of = make_float2(stats().reference[r], all);
        if (parts.count > 1) {
          const unsigned slot = 2 * blockIdx.x + (blockIdx.x / a.columns == parts.first);
          float* const to = parts.sums(slot, r) + column;
#pragma unroll
          for (int m = 0; m < v_tiles; ++m) {
            const float2 x = pair_of(m, n, i);
            if (exists) *reinterpret_cast<float2*>(to + 64 * m) = x;
          }
          if (column == 0 && exists) *parts.stats(slot, r) = of;
        } else {
          const OutRow out(a, at, r, of);
#pragma unroll
          for (int m = 0; m < v_tiles; ++m) {
            const float2 x = pair_of(m, n, i);
            if (exists) out.store_pair(column + 64 * m, x.x, x.y);
          }
          if (column == 0 && exists) out.store_lse();
        }
      }
    meet();  // before the next part's Q and sums
  }
};

template <int type, int rows, Rows by>
__device__ __forceinline__ void by_rows(const attn_decode_kernarg& a) {
  using Shared = ByRowsShared<rows, by>;
  static_assert(sizeof(Shared) <= Shared::q_at);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const unsigned base = address(shared_memory);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < Shared::stages) {
    ptx::mbarrier_init(address(&shared.full[threadIdx.x]), Shared::loaders);
    ptx::mbarrier_init(address(&shared.empty[threadIdx.x]), 4 * Shared::warpgroups);
  }
  ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  ptx::grid_wait();
  if (!find_units(a, shared, warp)) return;
  constexpr bool two = Shared::warpgroups > 1;
  if (warp >= 4 * Shared::warpgroups) {
    if constexpr (two) ptx::registers_shrink<by_rows_load_registers>();
    ByRowsFeed<rows, by>{{a}, shared, base, warp - 4 * Shared::warpgroups}.run();
  } else {
    if constexpr (two) ptx::registers_grow<by_rows_compute_registers>();
    ByRows<type, rows, by>{a, shared, base}.run();
  }
}

}  // namespace attn::mla

#define ATTN_MLA_BY_ROWS(NAME)                                                                \
  constexpr attn::mla::Variant NAME##_variant =                                               \
      attn::mla::by_rows_variants[attn::find_variant(attn::mla::by_rows_variants, #NAME)];    \
  extern "C" __global__ void __launch_bounds__(                                               \
      attn::mla::by_rows_threads(NAME##_variant.tile.rows(), NAME##_variant.rows),            \
      attn::mla::by_rows_blocks(NAME##_variant.tile.rows(), NAME##_variant.rows))             \
      NAME(const __grid_constant__                                                            \
               attn::decode::Kernarg<!attn::mla::has_codes(NAME##_variant.rows)>              \
                   kernarg) {                                                                 \
    attn::mla::by_rows<NAME##_variant.type, NAME##_variant.tile.rows(), NAME##_variant.rows>( \
        attn::mla::common(kernarg));                                                          \
  }
