// The warp of decode_* that loads: K and V of one unit after the other, and what is to know of it.
#pragma once
#include <type_traits>

#include "../common/descale.cuh"
#include "../ptx/address.h"
#include "../ptx/cp_async.h"
#include "../ptx/mbarrier.h"
#if __CUDA_ARCH__ >= 900
#include "../ptx/tma.h"
#endif
#include "../shared/swizzle.h"
#include "elements.cuh"
#include "merge.cuh"

namespace attn::decode {

using ptx::Barrier, ptx::address;

// A unit, as described to the consumer warps.
struct Unit {
  int b, h;  // sequence and K/V head
  int seqlen_q, seqlen_kv;
  int q_begin;    // packed q: row of query 0
  int first_row;  // of the row tile
  int first;      // position of the first key
  Part part;      // that it belongs to
  bool last;      // of that
  bool final;     // of the block
  float k_descale, v_descale;
  unsigned valid[2];  // a bit per key: there is one that some query sees
};

// What the consumer warps share besides the ring buffer.
struct GroupShared {
  union {
    float2 stats[decode_warps][8];  // reference and sum of each warp's weights of 8 rows
    ulonglong2 tree[group_rows];    // before the part ends: its words of the tree
  };
  float q_scale[group_rows];  // what products of a row of Q are multiplied with
  int2 keys[group_rows];      // that a row sees: from, to
};

template <DecodeTile tile>
struct DecodeShared {
  Barrier full[decode_max_stages], empty[decode_max_stages];
  Unit unit[decode_max_stages];
  GroupShared group;
};

template <DecodeTile tile>
__device__ __forceinline__ DecodeShared<tile>& decode_shared() {
  // Next to it are find_work's cursor, sums of warps, and whether the block was last.
  static_assert(sizeof(DecodeShared<tile>) + sizeof(Cursor<tile>) + tile.threads() / 32 * 4 + 1 <=
                tile.static_shared_bytes());
  __shared__ DecodeShared<tile> shared;
  return shared;
}

__device__ __forceinline__ void wait(Barrier& barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  ptx::mbarrier_wait(address(&barrier), parity);
#else
  while (!ptx::mbarrier_test(address(&barrier), parity)) {
  }
#endif
}

template <int n>
struct Columns {
  static constexpr int value = n;
};

// A place in the ring.
struct Stage {
  int number = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++number < stages) return;
    number = 0;
    parity ^= 1;
  }
};

// Which of a sequence's pages has a key, and its place there.
__device__ __forceinline__ int page_of(const attn_decode_segment& s, int key) {
  return s.page_log2 >= 0 ? key >> s.page_log2 : key / s.page_size;
}
__device__ __forceinline__ int slot_of(const attn_decode_segment& s, int key) {
  return s.page_log2 >= 0 ? key & (s.page_size - 1) : key % s.page_size;
}

// Further parameters of kernels that load K and V by TMA.
using Maps = decltype(attn_decode_sm90_kernarg::map);
struct NoMaps {};

// Of a place in the ring.
template <DecodeTile tile>
__device__ __forceinline__ int stage_bytes(const attn_decode_kernarg& a) {
  return tile.own_types ? a.stage_bytes : tile.stage_bytes();
}

template <class KV, DecodeTile tile>
struct Loader {
  static constexpr int head_dim = tile.head_dim, head_dim_v = tile.head_dim_v;
  const attn_decode_kernarg& a;
  DecodeShared<tile>& shared;
  const unsigned ring;
  const int lane, index;  // of the thread, and of the warp among those that load
  Cursor<tile> at;
  int page[2];  // of keys `lane` and `lane` + 32 of the unit
  float k_descale, v_descale;

  // The unit's entries of small arrays are requested ahead, so that its rows need not wait for
  // them.
  __device__ __forceinline__ void look_up() {
    const attn_decode_segment& s = a.segment[at.segment];
    const int local = at.first - at.begin;
    if (s.block_table) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int entry = page_of(s, local + lane + 32 * i);
        page[i] = entry < s.max_pages ? s.block_table[at.b * (long long)s.max_pages + entry] : -1;
      }
    }
    if (KV::scaled) {
      const auto descale = [&](const attn_descale& d) {
        return d.at && at.first < at.end ? *descale_at(d, at.b, at.h, local) : 1.0f;
      };
      k_descale = descale(s.k_descale);
      v_descale = descale(s.v_descale);
    }
  }

  // 16 rows from `row` on, of which lane r % 32 has the address of row r if they are scattered.
  template <int columns>
  __device__ __forceinline__ void copy(unsigned to, int row, const char* base, long long row_bytes,
                                       bool scattered, int used_bytes, unsigned valid) const {
    constexpr int chunks = columns * KV::bytes / 16;
#pragma unroll
    for (int i = 0; i < 16 * chunks / 32; ++i) {
      const int r = (32 * i + lane) / chunks, chunk = (32 * i + lane) % chunks;
      const unsigned place = chunk / 8 * panel_bytes + chunk_offset<panel_pitch>(r, chunk % 8);
      const char* from = base + r * row_bytes;
      if (scattered)
        from = reinterpret_cast<const char*>(
            __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(base), (row + r) % 32));
      ptx::cp_async_16(to + row * panel_pitch + place, from + 16 * chunk,
                       (valid >> r & 1) && 16 * chunk < used_bytes);
    }
  }

  __device__ __forceinline__ void load(Stage stage, unsigned head_begin, bool last, bool final) {
    const attn_decode_segment& s = a.segment[at.segment];
    const int local = at.first - at.begin;  // in the segment
    const int from = clamp(at.sequence.low - at.first, 0, unit_keys),
              end = clamp(min(at.sequence.high, at.end) - at.first, from, unit_keys);
    unsigned valid[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = lane + 32 * i;
      const bool there = !s.block_table || unsigned(page[i]) < unsigned(s.num_pages);
      valid[i] = __ballot_sync(0xffffffff, key >= from && key < end && there);
    }
    if (lane == 0) {
      Unit& unit = shared.unit[stage.number];
      unit.b = at.b;
      unit.h = at.h;
      unit.seqlen_q = at.sequence.seqlen_q;
      unit.seqlen_kv = at.sequence.seqlen_kv;
      unit.q_begin = at.sequence.q_begin;
      unit.first_row = at.sequence.first_row;
      unit.first = at.first;
      const unsigned units = at.sequence.units;
      unit.part = {0, head_begin, head_begin + units};
      unit.last = last;
      unit.final = final;
      unit.valid[0] = valid[0];
      unit.valid[1] = valid[1];
      unit.k_descale = k_descale;
      unit.v_descale = v_descale;
    }
    const unsigned k_to = ring + stage.number * tile.stage_bytes(), v_to = k_to + tile.k_bytes(),
                   full = address(&shared.full[stage.number]);
    copy_rows(s, k_to, v_to, valid, local);
    ptx::cp_async_arrive(full);
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  // By this warp.
  __device__ __forceinline__ void copy_rows(const attn_decode_segment& s, unsigned k_to,
                                            unsigned v_to, const unsigned (&valid)[2],
                                            int local) const {
    // Lanes have the place of key lane + 32 i if there are pages, of the unit's first key else.
    const auto address_of = [&](const void* base, const long long(&stride)[3], int i) {
      long long entry = s.lengths.cu_seqlens ? 0 : at.b, row = at.row + local;
      if (s.block_table) {
        entry = unsigned(page[i]) < unsigned(s.num_pages) ? page[i] : 0;
        row = slot_of(s, local + lane + 32 * i);
      }
      return static_cast<const char*>(base) +
             KV::bytes * (entry * stride[0] + row * stride[1] + at.h * stride[2]);
    };
    const bool scattered = s.block_table && s.page_size % 16 != 0;
    const auto copy_tile = [&](auto columns, unsigned to, const void* base,
                               const long long(&stride)[3], int used) {
      const char* lane_base[2];
      lane_base[0] = lane_base[1] = address_of(base, stride, 0);
      if (s.block_table) lane_base[1] = address_of(base, stride, 1);
      const long long row_bytes = scattered ? 0 : KV::bytes * stride[1];
#pragma unroll
      for (int row = 0; row < unit_keys; row += 16) {
        const char* first = lane_base[row / 32];
        if (!s.block_table)
          first += row * row_bytes;
        else if (!scattered)
          first = reinterpret_cast<const char*>(
              __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(first), row % 32));
        copy<columns.value>(to, row, first, row_bytes, scattered, used * KV::bytes,
                            valid[row / 32] >> row % 32);
      }
    };
    copy_tile(Columns<head_dim>{}, k_to, s.k, s.k_stride, a.head_dim);
    copy_tile(Columns<head_dim_v>{}, v_to, s.v, s.v_stride, a.head_dim_v);
  }

  // Whether the warp loads the block's unit of this number.
  __device__ __forceinline__ bool own(int unit) const {
    return tile.loaders() == 1 || (a.loaders == 1 ? 0 : unit % 2) == index;
  }

  __device__ __forceinline__ void run(const Work<tile>& work) {
    if (index >= a.loaders) return;
    at = work.first;
    if (own(0)) look_up();
    unsigned head_begin = work.begin - (at.sequence.units - at.left);
    unsigned share = work.begin;
    Stage stage;
#pragma unroll 1
    for (int unit = 0;; ++unit) {
      if (own(unit) && unit >= a.stages) wait(shared.empty[stage.number], stage.parity ^ 1);
      const bool head_ends = at.left == 1, final = ++share == work.end;
      if (own(unit)) load(stage, head_begin, head_ends || final, final);
      if (final) break;
      stage.next(a.stages);
      if (head_ends) head_begin = share;
      at.next(a, head_ends);
      if (own(unit + 1)) look_up();
    }
  }
};

}  // namespace attn::decode
