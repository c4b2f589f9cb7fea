// Decode of latent caches with many rows, 64 of them at a time: queries times query heads. Rows are
// the M of the products, in three warpgroups:
//
//   0     scores of a unit of 64 keys, S = Q K^T, with most of Q in registers; softmax; weights P
//   1, 2  sums of 256 latent columns each, O += P V, and loading of the half of K that these are
//
// Weights take the place of the unit's rope columns in shared memory, which its scores read last.
// The sums of a unit may begin when the scores of the next one are nearly done, so that they hide
// its softmax.
//
// A unit comes by the copy engine, asked for by one warp of each of 1 and 2; or row by row, of
// pages of any size, by all of their warps.
#pragma once
#include "../ptx/grid.h"
#include "../ptx/uniform.h"
#include "../ptx/wgmma.h"
#include "feed.cuh"
#include "wgmma_wide.h"

namespace attn::mla {

__device__ __forceinline__ unsigned long long descriptor(unsigned at, unsigned panel = 0) {
  return ptx::wgmma_descriptor(ptx::uniform(at / 16), panel);
}

template <int type, Rows rows>
struct Scores {
  using T = device::ElementOf<type>;
  using Shared = ManyShared;
  static constexpr bool bf16 = type == attn_element_bf16;
  const attn_decode_kernarg& a;
  Shared& shared;
  const unsigned base;
  unsigned q[q_steps][4];
  int end[2];   // of the keys that the lane's two rows see
  int all_end;  // of those that all rows see
  float reference[2], sum[2];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ void meet() { ptx::barrier_wait<128>(1); }

  // Rows that do not exist are computed as the last one that does.
  __device__ __forceinline__ void begin_part(const PartRecord& part) {
    const Head at = part.at;
    const int used = used_rows(a, at, tile_rows);
    const KeyBand seen = a.mask.band(at.seqlen_q, at.seqlen_kv);
    const auto end_of = [&](int r) {
      const Row row(a, at, min(r, used - 1));
      return device::clamp(row.query + seen.upper, 0, at.seqlen_kv);
    };
    all_end = end_of(0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * warp() + lane() / 4 + 8 * i;
      end[i] = end_of(r);
      reference[i] = -device::infinity(), sum[i] = 0;
      const char* const from = q_address(a, at, Row(a, at, min(r, used - 1))) + lane() % 4 * 4;
#pragma unroll
      for (int step = 0; step < q_steps; ++step)
#pragma unroll
        for (int high = 0; high < 2; ++high)
          q[step][2 * high + i] = *reinterpret_cast<const unsigned*>(from + 32 * step + 16 * high);
    }
    // The other two panels, 8 threads per row.
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 16 * i + threadIdx.x / 8;
      const char* const from = q_address(a, at, Row(a, at, min(r, used - 1))) + 16 * chunk;
#pragma unroll
      for (int panel = 0; panel < 2; ++panel) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + 128 * (q_register_panels + panel));
        const unsigned to =
            base + Shared::q_at + panel * panel_bytes + device::chunk_offset<128>(r, chunk);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y),
                     "r"(x.z), "r"(x.w)
                     : "memory");
      }
    }
    ptx::fence_async_shared();
    meet();
  }

  __device__ __forceinline__ void run() {
    Place half, rope_slot;
    unsigned due = 0;  // the barrier of the weights before, which nobody has been told of yet
    float s[32];
    const auto tell = [&] {
      if (due && lane() == 0) ptx::mbarrier_arrive(due);
      due = 0;
    };
    // Sums need not wait for what scores wait for.
    const auto wait_for = [&](Barrier& barrier, unsigned parity) {
      if (!ptx::mbarrier_test(address(&barrier), parity)) {
        tell();
        wait(barrier, parity);
      }
    };
    begin_part(shared.part[0]);
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      wait_for(shared.full_half[0][half.slot], half.parity);
      wait_for(shared.full_half[1][half.slot], half.parity);
      if constexpr (rows == Rows::one_by_one)
        ptx::fence_async_shared();  // the matrix unit reads what cp.async wrote
      const UnitRecord unit = shared.unit[n % records];
      if (n > 0 && unit.word & begins_part) begin_part(shared.part[(unit.word >> 8) % records]);
      const unsigned long long k0 = descriptor(Shared::half_place(base, 0, half.slot)),
                               k1 = descriptor(Shared::half_place(base, 1, half.slot)),
                               k_rope = descriptor(Shared::rope_place(base, rope_slot.slot)),
                               q_last = descriptor(base + Shared::q_at);
      const auto step_of = [](int step) {
        return (unsigned long long)((step / 4 * panel_bytes + step % 4 * 32) >> 4);
      };
#pragma unroll
      for (int step = 0; step < q_steps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(q[step][i])::"memory");
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < q_steps; ++step)
        ptx::wgmma<bf16, false>(s, q[step],
                                step < 16 ? k0 + step_of(step) : k1 + step_of(step - 16), step > 0);
#pragma unroll
      for (int step = q_steps; step < 32; ++step)
        ptx::wgmma<bf16>(s, q_last + step_of(step - q_steps), k1 + step_of(step - 16), true);
      wait_for(shared.full_rope[rope_slot.slot], rope_slot.parity);
      if constexpr (rows == Rows::one_by_one) ptx::fence_async_shared();
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<bf16>(s, q_last + step_of(4 + step), k_rope + step_of(step), true);
        if (step == 1) ptx::wgmma_commit();
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      tell();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      const bool last = unit.word & ends_part;
      weigh(s, unit, valid_keys(unit, n), rope_slot.slot);
      if (last) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float all = device::row_sum(sum[i]);
          if (lane() % 4 == 0)
            shared.stats[stat_place(unit.word)][16 * warp() + lane() / 4 + 8 * i] =
                make_float2(reference[i], all);
        }
      }
      ptx::fence_async_shared();
      __syncwarp();
      due = address(&shared.weighed[rope_slot.slot]);
      if (last) tell();
      if (unit.word & ends_block) return;
      half.next(Shared::half_slots);
      rope_slot.next(Shared::rope_slots);
    }
  }

  // A bit for each of the unit's keys that has a row in shared memory.
  __device__ __forceinline__ unsigned long long valid_keys(const UnitRecord& unit,
                                                           unsigned number) const {
    if constexpr (rows != Rows::boxes)
      return *reinterpret_cast<const unsigned long long*>(shared.valid[number % records]);
    else
      return unit.word & has_no_keys ? 0 : ~0ull;
  }

  // Scores become weights, which go to where the rope columns were.
  __device__ __forceinline__ void weigh(float (&s)[32], const UnitRecord& unit,
                                        unsigned long long valid, int slot) {
    const float scale = a.scale * device::log2_e;
#pragma unroll
    for (int j = 0; j < 32; ++j) s[j] *= scale;
    if (unit.first + unit_keys > all_end || valid != ~0ull) {
      const int own = lane() % 4 * 2, first = unit.first + own;
      const unsigned long long there = valid >> own;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int key = j / 4 * 8 + j % 2;
        if (first + key >= end[j / 2 % 2] || !(there >> key & 1)) s[j] = -device::infinity();
      }
    }
    float most[2] = {s[0], s[2]};
#pragma unroll
    for (int j = 0; j < 32; ++j) most[j / 2 % 2] = fmaxf(most[j / 2 % 2], s[j]);
    constexpr float slack = 8;
    const bool above = most[0] > reference[0] + slack || most[1] > reference[1] + slack;
    const bool moves = __any_sync(0xffffffff, above);
    if (moves) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = most[i];
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
        const float next = x > reference[i] + slack ? x : reference[i];
        const float shrink = next == -device::infinity() ? 1 : ptx::ex2(reference[i] - next);
        reference[i] = next;
        sum[i] *= shrink;
        if (lane() % 4 == 0) shared.factor[slot][16 * warp() + lane() / 4 + 8 * i] = shrink;
      }
    }
    const float used[2] = {reference[0] == -device::infinity() ? 0 : reference[0],
                           reference[1] == -device::infinity() ? 0 : reference[1]};
#pragma unroll
    for (int j = 0; j < 32; ++j) s[j] = ptx::ex2(s[j] - used[j / 2 % 2]);
#pragma unroll
    for (int j = 0; j < 32; ++j) sum[j / 2 % 2] += s[j];
    meet();  // all warps have done with the rope columns
    const unsigned to = Shared::rope_place(base, slot) + (16 * warp() + lane() % 16) * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned words[4] = {
          T::pack(s[8 * k], s[8 * k + 1]), T::pack(s[8 * k + 2], s[8 * k + 3]),
          T::pack(s[8 * k + 4], s[8 * k + 5]), T::pack(s[8 * k + 6], s[8 * k + 7])};
      ptx::stmatrix(to + ((2 * k + lane() / 16) ^ (lane() % 8)) * 16, words);
    }
    if (lane() == 0) shared.moved[slot][warp()] = moves;
  }
};

template <int type, Rows rows>
struct Sums {
  using Shared = ManyShared;
  static constexpr bool boxes = rows == Rows::boxes, one_by_one = rows == Rows::one_by_one;
  static constexpr bool bf16 = type == attn_element_bf16;
  const attn_decode_kernarg& a;
  Shared& shared;
  const unsigned base;
  const int which;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ int row(int i) { return 16 * warp() + lane() / 4 + 8 * i; }

  __device__ __forceinline__ void run(const decode::Maps* maps) {
    float o[128];
    Feed<rows> feed{{a}, maps, shared, base, which};
    const bool loads = !boxes || __shfl_sync(0xffffffff, threadIdx.x / 32, 0) % 4 == 0;
    if (loads) {
      feed.begin();
#pragma unroll 1
      for (int i = 0; i < (one_by_one ? Shared::half_slots - 1 : Shared::half_slots); ++i) {
        feed.load_half(i, {i, 1});
        if (which == 1 && i < Shared::rope_slots) feed.load_rope(i, {i, 1});
      }
    }
#pragma unroll 1
    for (unsigned n = 0;; ++n) {  // there are few registers for more than n
      const Place half{int(n % Shared::half_slots), n / Shared::half_slots % 2},
          rope_slot{int(n % Shared::rope_slots), n / Shared::rope_slots % 2};
      wait(shared.weighed[rope_slot.slot], rope_slot.parity);
      wait(shared.full_half[which][half.slot], half.parity);  // long since; for what came
      if constexpr (rows == Rows::one_by_one) ptx::fence_async_shared();
      const int first = shared.unit[n % records].first;
      const unsigned word = shared.unit[n % records].word;
      const PartRecord& part = shared.part[(word >> 8) % records];
      const unsigned v = Shared::half_place(base, which, half.slot);
      if (!(word & begins_part) && shared.moved[rope_slot.slot][warp()]) {
        const float factor[2] = {shared.factor[rope_slot.slot][row(0)],
                                 shared.factor[rope_slot.slot][row(1)]};
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
      }
      if (boxes && first + unit_keys > part.end) clear(v, part.end - first);
      const unsigned long long v_matrix = descriptor(v, panel_bytes),
                               p_matrix = descriptor(Shared::rope_place(base, rope_slot.slot));
      ptx::pin(o);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < unit_keys / 16; ++step) {
        wgmma_wide<bf16>(o, p_matrix + (step * 32 >> 4), v_matrix + (step * 16 * 128 >> 4),
                         step > 0 || !(word & begins_part));
      }
      ptx::wgmma_commit();
      if constexpr (one_by_one) {  // takes longer than the products
        const unsigned next = n + Shared::half_slots - 1;
        feed.load_half(next, {int(next % Shared::half_slots), next / Shared::half_slots % 2 ^ 1});
      }
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      if (lane() == 0) {
        ptx::mbarrier_arrive(address(&shared.empty_half[which][half.slot]));
        ptx::mbarrier_arrive(address(&shared.empty_rope[rope_slot.slot]));
      }
      __syncwarp();
      if (loads) {
        // These rope columns are needed first.
        if (which == 1) feed.load_rope(n + Shared::rope_slots, rope_slot);
        if (boxes) feed.load_half(n + Shared::half_slots, half);
      }
      if (word & ends_part) store(o, part, stat_place(word));
      if (word & ends_block) return;
    }
  }

  // Values of keys that no row sees may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear(unsigned v, int from) const {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < unit_keys * 8; i += 128) {
      if (i / 8 < from) continue;
#pragma unroll
      for (int panel = 0; panel < half_panels; ++panel)
        ptx::fill_shared(v + panel * panel_bytes + 16 * i, 0);
    }
    ptx::fence_async_shared();
    ptx::barrier_wait<128>(2 + which);
  }

  // A part ends: to the result, or to the workspace.
  __device__ __forceinline__ void store(const float (&o)[128], const PartRecord& part, int stat) {
    const Head at = part.at;
    const int used = used_rows(a, at, tile_rows);
    const Parts parts(a, shared.found.share, part.begin, part.units);
    const int column = 256 * which + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row(i);
      const float2 of = shared.stats[stat][r];
      if (r >= used) continue;
      if (parts.count > 1) {
        const unsigned slot = 2 * blockIdx.x + (blockIdx.x / a.columns == parts.first);
        float* const to = parts.sums(slot, r) + column;
#pragma unroll
        for (int n = 0; n < 32; ++n)
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(o[4 * n + 2 * i], o[4 * n + 2 * i + 1]);
        if (column == 0) *parts.stats(slot, r) = of;
        continue;
      }
      const OutRow out(a, at, r, of);
#pragma unroll
      for (int n = 0; n < 32; ++n)
        out.store_pair(column + 8 * n, o[4 * n + 2 * i], o[4 * n + 2 * i + 1]);
      if (column == 0) out.store_lse();
    }
  }
};

template <int type, Rows rows>
__device__ __forceinline__ void many(const attn_decode_kernarg& a, const decode::Maps* maps) {
  using Shared = ManyShared;
  static_assert(sizeof(Shared) <= Shared::q_at && Shared::bytes == many_shared_bytes);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const unsigned base = address(shared_memory);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int arrivals = rows == Rows::boxes ? 1 : 128 + 4;  // of what a warpgroup loads
    for (int which = 0; which < 2; ++which)
      for (int i = 0; i < Shared::half_slots; ++i) {
        ptx::mbarrier_init(address(&shared.full_half[which][i]), arrivals);
        ptx::mbarrier_init(address(&shared.empty_half[which][i]), 4);
      }
    for (int i = 0; i < Shared::rope_slots; ++i) {
      ptx::mbarrier_init(address(&shared.full_rope[i]), arrivals);
      ptx::mbarrier_init(address(&shared.empty_rope[i]), 8);
      ptx::mbarrier_init(address(&shared.weighed[i]), 4);
    }
    if (rows == Rows::boxes) {
      ptx::tma_prefetch_map(&maps[0][0].k);
      ptx::tma_prefetch_map(&maps[0][0].v);
    }
  }
  ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  ptx::grid_wait();
  if (!find_units(a, shared, warp)) return;
  if (warp < 4) {
    ptx::registers_grow<184>();
    Scores<type, rows>{a, shared, base}.run();
  } else {
    ptx::registers_shrink<160>();
    Sums<type, rows>{a, shared, base, warp / 4 - 1}.run(maps);
  }
}

}  // namespace attn::mla

#define ATTN_MLA_MANY(NAME)                                                             \
  constexpr attn::mla::Variant NAME##_variant =                                         \
      attn::mla::many_variants[attn::find_variant(attn::mla::many_variants, #NAME)];    \
  extern "C" __global__ void __launch_bounds__(attn::mla::many_threads, 1)              \
      NAME(const __grid_constant__ attn_decode_sm90_kernarg kernarg) {                  \
    attn::mla::many<NAME##_variant.type, NAME##_variant.rows>(kernarg.a, &kernarg.map); \
  }
