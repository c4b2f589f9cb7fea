// Units of 64 keys: how they are described to those who compute; and for many.cuh their places in
// shared memory and their loading.
#pragma once
#include "../common/lengths.cuh"
#include "../decode/load.cuh"
#include "../decode/query.cuh"
#include "../ptx/load_shared.h"
#include "../ptx/prefetch.h"
#include "../ptx/tma.h"
#include "../ptx/warpgroup.h"
#include "parts.cuh"
#include "variants.h"

namespace attn::mla {

constexpr int half_panels = 4, panel_bytes = unit_keys * 128;
constexpr int half_bytes = half_panels * panel_bytes;
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
  static constexpr int half_slots = 3, rope_slots = 2;
  Barrier full_half[2][half_slots], empty_half[2][half_slots];
  Barrier full_rope[rope_slots], empty_rope[rope_slots], weighed[rope_slots];
  UnitRecord unit[records];
  PartRecord part[records];
  alignas(8) unsigned char valid[records][8];  // not by boxes: a bit for each of the unit's keys
                                               // that is there and that some row sees
  unsigned moved[rope_slots][4];               // whether rows of a warp have factors
  float factor[rope_slots][64];                // of sums so far
  float2 stats[stat_places][64];               // of a part: reference and sum of the weights
  Found found;

  // Where panels are, from the beginning of shared memory.
  static constexpr int q_at = 3 << 10;  // the last latent panel, the rope
  static constexpr int rope_at = q_at + 2 * panel_bytes;
  static constexpr int halves_at = rope_at + rope_slots * panel_bytes;
  static constexpr int bytes = halves_at + 2 * half_slots * half_bytes;

  static __device__ __forceinline__ unsigned half_place(unsigned base, int which, int slot) {
    return base + halves_at + (which * half_slots + slot) * half_bytes;
  }
  static __device__ __forceinline__ unsigned rope_place(unsigned base, int slot) {
    return base + rope_at + slot * panel_bytes;
  }
};
struct Place {
  int slot = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    parity ^= 1;
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

// Where the block's units are. False: it has none. By all threads; shared has found, and part.
template <class Shared>
__device__ __forceinline__ bool find_units(const attn_decode_kernarg& a, Shared& shared, int warp) {
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
  return shared.found.begin < shared.found.end;
}

// Of one who walks over the block's units: the next one.
struct Walk {
  const attn_decode_kernarg& a;
  int b, tile;
  int unit, length, row0, h;
  int entry;  // of the block table, of one of its keys

  __device__ __forceinline__ void begin(const Found& found, int own_key) {
    b = found.b, tile = found.tile, unit = found.unit;
    begin_sequence();
    look_up(own_key);
  }
  __device__ __forceinline__ void next(int own_key) {
    if (++unit == units_of(length)) {
      unit = 0;
      if (++b == a.batch) b = 0, ++tile;
      begin_sequence();
    }
    look_up(own_key);
  }
  __device__ __forceinline__ void begin_sequence() {
    const Span keys = segment_span(a.segment[0].lengths, b);
    length = keys.length, row0 = int(keys.begin);
    h = tile / a.row_tiles;
  }
  __device__ __forceinline__ void look_up(int own_key) {
    const attn_decode_segment& s = a.segment[0];
    entry = s.lengths.cu_seqlens ? 0 : b;
    if (!s.block_table) return;
    const int page = decode::page_of(s, unit * unit_keys + own_key);
    entry = page < s.max_pages ? s.block_table[b * (long long)s.max_pages + page] : -1;
  }
  __device__ __forceinline__ bool page_is_there() const {
    const attn_decode_segment& s = a.segment[0];
    return !s.block_table || unsigned(entry) < unsigned(s.num_pages);
  }
  // Of a key in its page or sequence.
  __device__ __forceinline__ int row_of(int key) const {
    const attn_decode_segment& s = a.segment[0];
    return s.block_table ? decode::slot_of(s, key) : row0 + key;
  }
  // Of the unit, the end of the keys that some row sees. All rows see what is before the last keys.
  __device__ __forceinline__ int end() const {
    return (unit + 1) * unit_keys + a.seqlen_q > length ? part_of(a, b, tile, length, 0, 0).end
                                                        : length;
  }
  template <int element_bytes>
  __device__ __forceinline__ unsigned long long address_of(int row) const {
    const attn_decode_segment& s = a.segment[0];
    return reinterpret_cast<unsigned long long>(s.v) +
           element_bytes * (entry * s.v_stride[0] + row * s.v_stride[1] + h * s.v_stride[2]);
  }
};

// Loads one half of each unit. By all lanes of a warp, or (not by boxes) of the warpgroup's four,
// each of which loads 16 keys of a unit.
template <Rows rows>
struct Feed : Walk {
  using Shared = ManyShared;
  static constexpr bool boxes = rows == Rows::boxes;
  const decode::Maps* const maps;  // of boxes
  Shared& shared;
  const unsigned base;
  const int which;
  unsigned part = 0;
  unsigned long long key_row = 0;  // not by boxes: address of own_key(); 0: there is none

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ bool leads() {
    return (rows == Rows::one_by_one ? threadIdx.x % 128 : threadIdx.x % 32) == 0;
  }

  // Units of the block.
  __device__ __forceinline__ unsigned all() const { return shared.found.end - shared.found.begin; }
  __device__ __forceinline__ void begin() { Walk::begin(shared.found, own_key()); }
  // Row by row: the lane's, in its unit.
  static __device__ __forceinline__ int own_key() { return boxes ? 0 : 16 * warp() + lane() % 16; }
  // The half of the next unit, which has this number in the block, if there is one.
  __device__ __forceinline__ void load_half(unsigned number, const Place& half) {
    if (number >= all()) return;
    wait(shared.empty_half[which][half.slot], half.parity);
    const int row = row_of(unit * unit_keys + own_key());
    describe(number, row);
    const unsigned full = address(&shared.full_half[which][half.slot]),
                   to = Shared::half_place(base, which, half.slot);
    if constexpr (boxes) {
      __syncwarp();
      ptx::mbarrier_arrive_expect_if(full, half_bytes, leads());
      // Zeros come from behind the last page.
      const int box = page_is_there() ? entry : a.segment[0].num_pages;
#pragma unroll
      for (int i = 0; i < half_panels; ++i)
        ptx::tma_load_if(to + i * panel_bytes, &maps[0][0].v, full, 64 * (half_panels * which + i),
                         row, h, box, leads());
      // The rope columns have little time once there is a place for them. Not the latent ones: the
      // copy engine takes as long to ask for what goes to L2 as for a load.
      if (which == 1 && leads()) ptx::tma_prefetch(&maps[0][0].k, 0, row, h, box);
    } else {
      find_key_row(number, row);
      copy_half(to, full);
    }
    go_on(number);
  }
  // What others must know of the next unit.
  __device__ __forceinline__ void describe(unsigned number, int row) const {
    if (which == 0 || !leads()) return;
    const unsigned left = all() - number;
    const int units = units_of(length);
    const bool begins = number == 0 || unit == 0, ends = unit + 1 == units || left == 1,
               none = boxes && !page_is_there();
    shared.unit[number % records] = {unit * unit_keys,
                                     part << 8 | (begins ? begins_part : 0u) |
                                         (ends ? ends_part : 0u) | (left == 1 ? ends_block : 0u) |
                                         (none ? has_no_keys : 0u),
                                     row, page_is_there() ? entry : a.segment[0].num_pages};
    if (begins && number > 0)
      shared.part[part % records] =
          part_of(a, b, tile, length, shared.found.end - left - unit, units);
  }
  __device__ __forceinline__ void go_on(unsigned number) {
    part += unit + 1 == units_of(length) || number + 1 == all();
    if (number + 1 == all()) return;
    next(own_key());
    __syncwarp();
  }
  // row: of the lane's key in its page.
  __device__ __forceinline__ void find_key_row(unsigned number, int row) {
    // Values of keys that no row sees may be anything, and 0 * NaN is NaN.
    const bool there = unit * unit_keys + own_key() < end() && page_is_there();
    key_row = there ? address_of<2>(row) : 0;
    if (which == 0) return;
    const unsigned valid = __ballot_sync(0xffffffff, there);
    if (lane() == 0)
      reinterpret_cast<unsigned short*>(shared.valid[number % records])[warp()] =
          (unsigned short)valid;
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

  // The rope columns of a unit whose half is on its way; row by row: of the last one.
  __device__ __forceinline__ void load_rope(unsigned number, const Place& rope_slot) {
    if (number >= all()) return;
    wait(shared.empty_rope[rope_slot.slot], rope_slot.parity);
    const unsigned full = address(&shared.full_rope[rope_slot.slot]),
                   to = Shared::rope_place(base, rope_slot.slot);
    if constexpr (!boxes) {
      copy_rope(to, full);
    } else {
      const UnitRecord of = shared.unit[number % records];
      const int h = shared.part[(of.word >> 8) % records].at.h;
      ptx::mbarrier_arrive_expect_if(full, panel_bytes, leads());
      ptx::tma_load_if(to, &maps[0][0].k, full, 0, of.row, h, of.entry, leads());
    }
  }
};

}  // namespace attn::mla
