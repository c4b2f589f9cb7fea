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
// A unit comes by the copy engine, asked for by one warp of each of 1 and 2; or (by_rows) row by
// row, of pages of any size, by all of their warps.
#pragma once
#include "../common/lengths.cuh"
#include "../decode/load.cuh"
#include "../decode/query.cuh"
#include "../ptx/grid.h"
#include "../ptx/load_shared.h"
#include "../ptx/prefetch.h"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "parts.cuh"
#include "variants.h"
#include "wgmma_wide.h"

namespace attn::mla {

constexpr int half_panels = 4, panel_bytes = unit_keys * 128;
constexpr int half_bytes = half_panels * panel_bytes;
constexpr int half_slots = 3, rope_slots = 2;
constexpr int q_register_panels = 7;  // eight do not fit next to the scores
constexpr int q_steps = 4 * q_register_panels;
constexpr int records = 8;      // units on their way, and those whose sums are not stored yet
constexpr int stat_places = 3;  // the same of parts that the first warpgroup can have ended
enum UnitFlags { begins_part = 1, ends_part = 2, ends_block = 4, has_no_keys = 8 };

struct UnitRecord {
  int first;      // position of its first key
  unsigned word;  // number of its part << 8 | UnitFlags
  int row, entry;
};
// Of UnitRecord::word.
__device__ __forceinline__ unsigned stat_place(unsigned word) {
  return (word >> 8) % stat_places;
}
struct PartRecord {
  Head at;
  int end;                // after the last key that some row sees
  unsigned begin, units;  // of the row tile, in the column's order
};

struct ManyShared {
  Barrier full_half[2][half_slots], empty_half[2][half_slots];
  Barrier full_rope[rope_slots], empty_rope[rope_slots], weighed[rope_slots];
  UnitRecord unit[records];
  PartRecord part[records];
  alignas(8) unsigned short valid[records][4];  // by_rows: a bit for each of the unit's keys that
                                                // is there and that some row sees
  unsigned moved[rope_slots][4];                // whether rows of a warp have factors
  float factor[rope_slots][64];                 // of sums so far
  float2 stats[stat_places][64];                // of a part: reference and sum of the weights
  Found found;
};
// Where panels are, from the beginning of shared memory.
constexpr int q_at = 3072;  // the last latent panel, the rope
constexpr int rope_at = q_at + 2 * panel_bytes;
constexpr int halves_at = rope_at + rope_slots * panel_bytes;
static_assert(sizeof(ManyShared) <= q_at);
static_assert(halves_at + 2 * half_slots * half_bytes == many_shared_bytes);

__device__ __forceinline__ unsigned half_place(unsigned base, int which, int slot) {
  return base + halves_at + (which * half_slots + slot) * half_bytes;
}
__device__ __forceinline__ unsigned rope_place(unsigned base, int slot) {
  return base + rope_at + slot * panel_bytes;
}
__device__ __forceinline__ unsigned long long descriptor(unsigned at, unsigned panel = 0) {
  return ptx::wgmma_descriptor(ptx::uniform(at / 16), panel);
}

struct Place {
  int slot = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    parity ^= 1;
  }
};

template <int type, bool by_rows>
struct Scores {
  using T = device::ElementOf<type>;
  static constexpr bool bf16 = type == attn_element_bf16;
  const attn_decode_kernarg& a;
  ManyShared& shared;
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
    const int used = min(at.seqlen_q * a.group - at.first_row, tile_rows);
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
        const unsigned to = base + q_at + panel * panel_bytes + device::chunk_offset<128>(r, chunk);
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
      if constexpr (by_rows)
        ptx::fence_async_shared();  // the matrix unit reads what cp.async wrote
      const UnitRecord unit = shared.unit[n % records];
      if (n > 0 && unit.word & begins_part) begin_part(shared.part[(unit.word >> 8) % records]);
      const unsigned long long k0 = descriptor(half_place(base, 0, half.slot)),
                               k1 = descriptor(half_place(base, 1, half.slot)),
                               k_rope = descriptor(rope_place(base, rope_slot.slot)),
                               q_last = descriptor(base + q_at);
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
      if constexpr (by_rows) ptx::fence_async_shared();
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
      half.next(half_slots);
      rope_slot.next(rope_slots);
    }
  }

  // A bit for each of the unit's keys that has a row in shared memory.
  __device__ __forceinline__ unsigned long long valid_keys(const UnitRecord& unit,
                                                           unsigned number) const {
    if constexpr (by_rows)
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
    const unsigned to = rope_place(base, slot) + (16 * warp() + lane() % 16) * 128;
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

__device__ __forceinline__ PartRecord part_of(const attn_decode_kernarg& a, int b, int tile,
                                              int length, unsigned begin, int units) {
  const int first_row = tile % a.row_tiles * tile_rows,
            rows = min(a.seqlen_q * a.group - first_row, tile_rows),
            last_query = (first_row + rows - 1) / a.group;
  const KeyBand seen = a.mask.band(a.seqlen_q, length);
  return {{b, tile / a.row_tiles, first_row, a.seqlen_q, length, 0},
          device::clamp(last_query + seen.upper, 0, length),
          begin,
          unsigned(units)};
}

// Walks over the block's units and loads one half of each. By all lanes of a warp, or (by_rows) of
// the warpgroup's four, each of which loads 16 keys of a unit.
template <bool by_rows>
struct Feed {
  const attn_decode_kernarg& a;
  const decode::Maps& maps;
  ManyShared& shared;
  const unsigned base;
  const int which;
  int b, tile;  // of the unit to be loaded
  int unit, length, row0, entry, h;
  unsigned part = 0;
  unsigned long long key_row = 0;  // by_rows: address of key lane() % 16 of the warp's; 0: no key

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ bool leads() {
    return (by_rows ? threadIdx.x % 128 : threadIdx.x % 32) == 0;
  }

  // Units of the block.
  __device__ __forceinline__ unsigned all() const { return shared.found.end - shared.found.begin; }
  __device__ __forceinline__ void begin() {
    const Found& found = shared.found;
    b = found.b, tile = found.tile, unit = found.unit;
    begin_sequence();
    look_up();
  }
  __device__ __forceinline__ void begin_sequence() {
    const Span keys = segment_span(a.segment[0].lengths, b);
    length = keys.length, row0 = int(keys.begin);
    h = tile / a.row_tiles;
  }
  __device__ __forceinline__ void look_up() {
    const attn_decode_segment& s = a.segment[0];
    entry = s.lengths.cu_seqlens ? 0 : b;
    if (!s.block_table) return;
    const int page = decode::page_of(s, unit * unit_keys + own_key());
    entry = page < s.max_pages ? s.block_table[b * (long long)s.max_pages + page] : -1;
    if (unsigned(entry) >= unsigned(s.num_pages)) entry = s.num_pages;  // zeros come from there
  }
  // by_rows: the lane's, in its unit.
  static __device__ __forceinline__ int own_key() {
    return by_rows ? 16 * warp() + lane() % 16 : 0;
  }
  __device__ __forceinline__ int row_of_unit() const {
    const attn_decode_segment& s = a.segment[0];
    const int key = unit * unit_keys + own_key();
    return s.block_table ? decode::slot_of(s, key) : row0 + key;
  }
  // The half of the next unit, which has this number in the block, if there is one.
  __device__ __forceinline__ void load_half(unsigned number, const Place& half) {
    const unsigned left = all() - min(number, all());
    if (left == 0) return;
    const attn_decode_segment& s = a.segment[0];
    wait(shared.empty_half[which][half.slot], half.parity);
    const int first = unit * unit_keys, row = row_of_unit(), units = units_of(length);
    const bool begins = number == 0 || unit == 0, ends = unit + 1 == units || left == 1;
    if (which == 1 && leads()) {
      const bool none = !by_rows && s.block_table && entry == s.num_pages;
      shared.unit[number % records] = {first,
                                       part << 8 | (begins ? begins_part : 0u) |
                                           (ends ? ends_part : 0u) | (left == 1 ? ends_block : 0u) |
                                           (none ? has_no_keys : 0u),
                                       row, entry};
      if (begins && number > 0)
        shared.part[part % records] =
            part_of(a, b, tile, length, shared.found.end - left - unit, units);
    }
    const unsigned full = address(&shared.full_half[which][half.slot]),
                   to = half_place(base, which, half.slot);
    if constexpr (by_rows) {
      find_key_row(number, first, row);
      copy_half(to, full);
    } else {
      __syncwarp();
      ptx::mbarrier_arrive_expect_if(full, half_bytes, leads());
#pragma unroll
      for (int i = 0; i < half_panels; ++i)
        ptx::tma_load_if(to + i * panel_bytes, &maps[0].v, full, 64 * (half_panels * which + i),
                         row, h, entry, leads());
      // The rope columns have little time once there is a place for them. Not the latent ones: the
      // copy engine takes as long to ask for what goes to L2 as for a load.
      if (which == 1 && leads()) ptx::tma_prefetch(&maps[0].k, 0, row, h, entry);
    }
    part += ends;
    if (left == 1) return;
    if (++unit == units) {
      unit = 0;
      if (++b == a.batch) b = 0, ++tile;
      begin_sequence();
    }
    look_up();
    __syncwarp();
  }
  // first: the unit's first key; row: of the lane's key in its page.
  __device__ __forceinline__ void find_key_row(unsigned number, int first, int row) {
    const attn_decode_segment& s = a.segment[0];
    // Values of keys that no row sees may be anything, and 0 * NaN is NaN. All rows see what is
    // before the last keys.
    const int end =
        first + unit_keys + a.seqlen_q > length ? part_of(a, b, tile, length, 0, 0).end : length;
    const bool there =
        first + own_key() < end && !(s.block_table && unsigned(entry) >= unsigned(s.num_pages));
    key_row = there ? reinterpret_cast<unsigned long long>(s.v) +
                          2 * (entry * s.v_stride[0] + row * s.v_stride[1] + h * s.v_stride[2])
                    : 0;
    if (which == 0) return;
    const unsigned valid = __ballot_sync(0xffffffff, there);
    if (lane() == 0) shared.valid[number % records][warp()] = (unsigned short)valid;
    // Its rope columns are asked for a unit later, and have less time then.
    if (there && lane() < 16)
      ptx::prefetch_l2(reinterpret_cast<const char*>(key_row) + 2 * latent_columns);
  }
  // The half of each of the warp's rows at once; a key that is not there becomes zeros.
  __device__ __forceinline__ void copy_half(unsigned to, unsigned full) const {
    constexpr int half_row = 2 * latent_columns / 2;  // bytes: 16 of each lane
    to += lane() / 8 * panel_bytes + 16 * warp() * 128;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const unsigned long long from = __shfl_sync(0xffffffff, key_row, r);
      ptx::cp_async_16(to + device::chunk_offset<128>(r, lane() % 8),
                       reinterpret_cast<const char*>(from) + which * half_row + 16 * lane(),
                       from != 0);
    }
    arrive(full);
  }
  __device__ __forceinline__ void copy_rope(unsigned to, unsigned full) const {
    to += 16 * warp() * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane() / 8;
      const unsigned long long from = __shfl_sync(0xffffffff, key_row, r);
      ptx::cp_async_16(to + device::chunk_offset<128>(r, lane() % 8),
                       reinterpret_cast<const char*>(from) + 2 * latent_columns + 16 * (lane() % 8),
                       from != 0);
    }
    arrive(full);
  }
  // Of each thread when its copies are there, and of each warp after its other stores.
  __device__ __forceinline__ void arrive(unsigned full) const {
    ptx::cp_async_arrive(full);
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full);
  }

  // The rope columns of a unit whose half is on its way; by_rows: of the last one.
  __device__ __forceinline__ void load_rope(unsigned number, const Place& rope_slot) {
    if (number >= all()) return;
    wait(shared.empty_rope[rope_slot.slot], rope_slot.parity);
    const unsigned full = address(&shared.full_rope[rope_slot.slot]),
                   to = rope_place(base, rope_slot.slot);
    if constexpr (by_rows) {
      copy_rope(to, full);
    } else {
      const UnitRecord of = shared.unit[number % records];
      const int h = shared.part[(of.word >> 8) % records].at.h;
      ptx::mbarrier_arrive_expect_if(full, panel_bytes, leads());
      ptx::tma_load_if(to, &maps[0].k, full, 0, of.row, h, of.entry, leads());
    }
  }
};

template <int type, bool by_rows>
struct Sums {
  static constexpr bool bf16 = type == attn_element_bf16;
  const attn_decode_kernarg& a;
  ManyShared& shared;
  const unsigned base;
  const int which;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ int row(int i) { return 16 * warp() + lane() / 4 + 8 * i; }

  __device__ __forceinline__ void run(const decode::Maps& maps) {
    float o[128];
    Feed<by_rows> feed{a, maps, shared, base, which};
    const bool loads = by_rows || __shfl_sync(0xffffffff, threadIdx.x / 32, 0) % 4 == 0;
    if (loads) {
      feed.begin();
#pragma unroll 1
      for (int i = 0; i < half_slots; ++i) {
        feed.load_half(i, {i, 1});
        if (which == 1 && i < rope_slots) feed.load_rope(i, {i, 1});
      }
    }
#pragma unroll 1
    for (unsigned n = 0;; ++n) {  // there are few registers for more than n
      const Place half{int(n % half_slots), n / half_slots % 2},
          rope_slot{int(n % rope_slots), n / rope_slots % 2};
      wait(shared.weighed[rope_slot.slot], rope_slot.parity);
      wait(shared.full_half[which][half.slot], half.parity);  // long since; for what came
      if constexpr (by_rows) ptx::fence_async_shared();
      const int first = shared.unit[n % records].first;
      const unsigned word = shared.unit[n % records].word;
      const PartRecord& part = shared.part[(word >> 8) % records];
      const unsigned v = half_place(base, which, half.slot);
      if (!(word & begins_part) && shared.moved[rope_slot.slot][warp()]) {
        const float factor[2] = {shared.factor[rope_slot.slot][row(0)],
                                 shared.factor[rope_slot.slot][row(1)]};
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
      }
      if (!by_rows && first + unit_keys > part.end) clear(v, part.end - first);
      const unsigned long long v_matrix = descriptor(v, panel_bytes),
                               p_matrix = descriptor(rope_place(base, rope_slot.slot));
      ptx::pin(o);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < unit_keys / 16; ++step)
        wgmma_wide<bf16>(o, p_matrix + (step * 32 >> 4), v_matrix + (step * 16 * 128 >> 4),
                         step > 0 || !(word & begins_part));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      if (lane() == 0) {
        ptx::mbarrier_arrive(address(&shared.empty_half[which][half.slot]));
        ptx::mbarrier_arrive(address(&shared.empty_rope[rope_slot.slot]));
      }
      __syncwarp();
      if (loads) {
        // These rope columns are needed first, and copies arrive in their order.
        if (which == 1) feed.load_rope(n + rope_slots, rope_slot);
        feed.load_half(n + half_slots, half);
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
    const int used = min(at.seqlen_q * a.group - at.first_row, tile_rows);
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

template <int type, bool by_rows>
__device__ __forceinline__ void many(const attn_decode_sm90_kernarg& kernarg) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  ManyShared& shared = *reinterpret_cast<ManyShared*>(shared_memory);
  const attn_decode_kernarg& a = kernarg.a;
  const unsigned base = address(shared_memory);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int arrivals = by_rows ? 128 + 4 : 1;  // of what a warpgroup loads
    for (int which = 0; which < 2; ++which)
      for (int i = 0; i < half_slots; ++i) {
        ptx::mbarrier_init(address(&shared.full_half[which][i]), arrivals);
        ptx::mbarrier_init(address(&shared.empty_half[which][i]), 4);
      }
    for (int i = 0; i < rope_slots; ++i) {
      ptx::mbarrier_init(address(&shared.full_rope[i]), arrivals);
      ptx::mbarrier_init(address(&shared.empty_rope[i]), 8);
      ptx::mbarrier_init(address(&shared.weighed[i]), 4);
    }
    if (!by_rows) {
      ptx::tma_prefetch_map(&kernarg.map[0].k);
      ptx::tma_prefetch_map(&kernarg.map[0].v);
    }
  }
  ptx::mbarrier_init_fence();
  ptx::grid_let_next_start();
  ptx::grid_wait();
  if (warp == 0) {
    const Found found = find_share(a, blockIdx.x % a.columns, blockIdx.x / a.columns);
    if (threadIdx.x == 0) {
      shared.found = found;
      if (found.begin < found.end) {
        const int length = segment_span(a.segment[0].lengths, found.b).length;
        shared.part[0] =
            part_of(a, found.b, found.tile, length, found.begin - found.unit, units_of(length));
      }
    }
  }
  __syncthreads();
  if (shared.found.begin == shared.found.end) return;
  if (warp < 4) {
    ptx::registers_grow<184>();
    Scores<type, by_rows>{a, shared, base}.run();
  } else {
    ptx::registers_shrink<160>();
    Sums<type, by_rows>{a, shared, base, warp / 4 - 1}.run(kernarg.map);
  }
}

}  // namespace attn::mla

#define ATTN_MLA_MANY(NAME)                                                          \
  constexpr attn::mla::Variant NAME##_variant =                                      \
      attn::mla::many_variants[attn::find_variant(attn::mla::many_variants, #NAME)]; \
  extern "C" __global__ void __launch_bounds__(attn::mla::many_threads, 1)           \
      NAME(const __grid_constant__ attn_decode_sm90_kernarg a) {                     \
    attn::mla::many<NAME##_variant.type, NAME##_variant.by_rows>(a);                 \
  }
