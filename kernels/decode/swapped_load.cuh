// The warp of swapped.cuh that loads: it finds the block's work and asks the copy engine for K and
// V of one unit after the other. One lane does so, for what a unit takes it is what the block waits
// for. Pages too small for that are loaded row by row, by two whole warps.
#pragma once
#include <climits>

#include "../common/descale.cuh"
#include "../ptx/cp_async.h"
#include "../ptx/tma.h"
#include "load.cuh"

namespace attn::decode {

// What the warps that compute know of a unit.
struct SwappedUnit {
  unsigned long long valid;   // a bit per key: there is one that some query sees
  int first;                  // position of the first key
  unsigned char last, final;  // of its part, of the block
  float k_descale, v_descale;
};
// The same where each segment has types of its own.
struct OwnUnit {
  unsigned long long valid;
  int first;
  unsigned char last, final;
  unsigned types;  // of K and V, and 16 bits further how their rows or scales lie, see own_load.cuh
};

// And of a part, before its first unit is there; `placed` comes with that.
struct SwappedPart {
  Head at;
  PlacedPart placed;
  bool none;  // the block has no work
};

// What a warpgroup knows of its rows.
template <DecodeTile tile>
struct SwappedRows {
  static constexpr int rows = tile.rows(), all_rows = tile.slot_rows();  // these of all heads
  unsigned long long seen[decode_warps];  // with a tree: keys that some row sees
  alignas(
      16) float most[decode_warps][rows];  // of a unit's scores; when a part ends sums of weights
  float reference[rows];                   // when a part ends
  alignas(16) float q_scale[all_rows];     // what products of a row of Q are multiplied with
  float slope[all_rows];                   // of ALiBi
  alignas(16) int2 keys[rows];             // that a row sees: from, to
  ulonglong2 tree[rows];                   // its words of the tree
  int first_query;                         // with ALiBi: its place among the keys
};
struct NoRows {};
template <DecodeTile tile>
struct SwappedShared : SwappedRows<tile> {  // of the first warpgroup
  std::conditional_t<(tile.groups > 1), SwappedRows<tile>, NoRows> second;
  Barrier full[decode_max_stages], empty[decode_max_stages];
  Barrier part_full[2], part_empty[2];
  std::conditional_t<tile.own_types, OwnUnit, SwappedUnit> unit[decode_max_stages];
  SwappedPart part[2];
  Work<tile> work;  // for the second of two warps that load
};

template <DecodeTile tile>
__device__ __forceinline__ SwappedShared<tile>& swapped_shared() {
  // Next to it are find_work's cursor, which block was last, and OwnLoader's boxes.
  static_assert(sizeof(SwappedShared<tile>) + sizeof(Cursor<tile>) + (tile.own_types ? 128 : 64) <=
                tile.static_shared_bytes());
  __shared__ SwappedShared<tile> shared;
  return shared;
}

__device__ __forceinline__ unsigned long long low_bits(int count) {
  return count >= 64 ? ~0ull : (1ull << count) - 1;
}

// Whether two warps of this launch load rows one by one. Known before parameters are.
template <DecodeTile tile>
__device__ __forceinline__ bool row_by_row() {
  return tile.loaders() > 1 && blockDim.x > group_threads + 32;
}
// Arrivals that a unit waits for: with rows one by one of each lane's copies, and of each warp.
template <DecodeTile tile>
__device__ __forceinline__ int arrivals_of_unit() {
  return row_by_row<tile>() ? tile.loaders() * (32 + 1) : 1;
}

// rows: by two warps, each of which copies the rows of 32 of a unit's keys, lane by lane one; else
// by one lane.
// once: L2 evicts first what it reads. Chunks that run at the same time read theirs again and
// again.
template <class KV, DecodeTile tile, bool rows = false, bool once = false>
struct SwappedLoader {
  static_assert(!rows || unit_keys == 32 * tile.loaders());
  static constexpr int k_panels = tile.panels(tile.head_dim),
                       v_panels = tile.panels(tile.head_dim_v);
  static constexpr int max_boxes = unit_keys / warp_keys;  // of a unit

  const attn_decode_kernarg& a;
  const Maps& maps;
  SwappedShared<tile>& shared;
  const unsigned ring;
  Stage stage = {};
  Cursor<tile> at = {};
  // Of the next unit: asked for while the one before it is on its way.
  int page[rows ? 1 : max_boxes] = {};
  float k_descale = 1, v_descale = 1;
  // Of units that follow each other, for which it would take a dozen loads of parameters each time.
  // With rows of the lane's key.
  struct Walk {
    bool quick;       // rows: pages divide units, so that the key has the same slot in each; else
                      // units divide pages, of which a sequence without any has one, of no end
    int page, entry;  // behind `page` above, asked for early; the number of the one behind it
    int step;         // rows: entries of a unit
    int max_pages, num_pages;
    const int* table;
    unsigned long long k, v, k_page, v_page;  // rows: in page 0; bytes between pages
    int slot, page_size;                      // else: of the next unit in its page
  };
  // Kernels of more rows, or longer ones, have no registers for it.
  static constexpr bool walks = rows || (tile.loaders() > 1 && tile.head_dim <= 256);
  Walk walk = {};

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // rows: of the two warps, and the lane's key of a unit.
  static __device__ __forceinline__ int index() { return threadIdx.x / 32 - decode_warps; }
  static __device__ __forceinline__ int own_key() { return threadIdx.x - group_threads; }
  // The lane that writes what is to know of units and parts.
  static __device__ __forceinline__ bool leads() {
    return KV::own_types ? lane() == 0 : !rows || own_key() == 0;
  }

  // local: the unit's first key, in the segment.
  __device__ __forceinline__ void look_up(const attn_decode_segment& s, int local) {
    look_up_pages(s, local);
    look_up_descales(s, local);
  }
  __device__ __forceinline__ void look_up_pages(const attn_decode_segment& s, int local) {
    if (s.block_table) {
      const int* const table = s.block_table + at.b * (long long)s.max_pages;
      constexpr int n = rows ? 1 : max_boxes;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const int key = rows ? own_key() : i * s.box_keys, entry = page_of(s, local + key);
        page[i] = key < unit_keys && entry < s.max_pages ? table[entry] : -1;
      }
    }
  }
  __device__ __forceinline__ void look_up_descales(const attn_decode_segment& s, int local) {
    if constexpr (KV::scaled && !KV::own_types) {
      const auto descale = [&](const attn_descale& d) {
        return d.at && local < at.end - at.begin ? *descale_at(d, at.b, at.h, local) : 1.0f;
      };
      k_descale = descale(s.k_descale);
      v_descale = descale(s.v_descale);
    }
  }

  // Before the first of units that follow each other, and before each of the others.
  __device__ __forceinline__ int next_page() {
    const int page = walk.entry < walk.max_pages ? walk.table[walk.entry] : -1;
    walk.entry += rows ? walk.step : 1;
    return page;
  }
  __device__ __forceinline__ void look_up_first(const attn_decode_segment& s, int local) {
    look_up(s, local);
    if (!rows && !s.block_table) {
      walk.quick = true;
      walk.slot = at.row + local, walk.page_size = walk.num_pages = INT_MAX;
      page[0] = s.lengths.cu_seqlens ? 0 : at.b;
      return;
    }
    walk.quick = rows ? s.block_table && s.page_log2 >= 0 && s.page_size <= unit_keys
                      : s.box_keys == unit_keys;
    if (!walk.quick) return;
    if (rows) walk.step = unit_keys >> s.page_log2;
    walk.entry = page_of(s, local + (rows ? own_key() : 0)) + (rows ? walk.step : 1);
    walk.max_pages = s.max_pages, walk.num_pages = s.num_pages;
    walk.table = s.block_table + at.b * (long long)s.max_pages;
    walk.page = next_page();
    if constexpr (!rows) {
      walk.slot = slot_of(s, local), walk.page_size = s.page_size;
      return;
    }
    const int slot = slot_of(s, own_key());  // `local` is of whole units
    const auto in_page_0 = [&](const void* base, const long long(&stride)[3]) {
      return reinterpret_cast<unsigned long long>(base) +
             KV::bytes * (slot * stride[1] + at.h * stride[2]);
    };
    walk.k = in_page_0(s.k, s.k_stride), walk.v = in_page_0(s.v, s.v_stride);
    walk.k_page = KV::bytes * s.k_stride[0], walk.v_page = KV::bytes * s.v_stride[0];
  }
  // descales: they are of blocks of keys.
  __device__ __forceinline__ void look_up_next(const attn_decode_segment& s, int local,
                                               bool descales) {
    if (descales) look_up_descales(s, local);
    if (!walk.quick) return look_up_pages(s, local);
    if constexpr (!rows) {
      walk.slot += unit_keys;
      if (walk.slot < walk.page_size) return;
      walk.slot = 0;
    }
    page[0] = walk.page;
    walk.page = next_page();
  }

  // Keys of the unit that some query sees. limit: behind the segment's last one of those.
  __device__ __forceinline__ unsigned long long seen_keys(int first, int limit) const {
    const int low = at.sequence.low;
    if (first >= low && first + unit_keys <= limit) return ~0ull;
    const int from = min(max(low - first, 0), unit_keys),
              end = min(max(limit - first, from), unit_keys);
    return low_bits(end) & ~low_bits(from);
  }

  // A box of K and of V, panel by panel.
  __device__ __forceinline__ void copy(unsigned to, unsigned full, int row, int entry) const {
    constexpr int columns = panel_pitch / KV::bytes;
    const auto load = [&](unsigned to, const attn_tensor_map& map, int column) {
      if constexpr (once)
        ptx::tma_load_once(to, &map, full, column, row, at.h, entry);
      else
        ptx::tma_load(to, &map, full, column, row, at.h, entry);
    };
#pragma unroll
    for (int i = 0; i < k_panels; ++i) load(to + i * panel_bytes, maps[at.segment].k, i * columns);
#pragma unroll
    for (int i = 0; i < v_panels; ++i)
      load(to + tile.k_bytes() + i * panel_bytes, maps[at.segment].v, i * columns);
  }

  // The place of the lane's key in K or V. entry: of its page.
  __device__ __forceinline__ unsigned long long row_address(const attn_decode_segment& s,
                                                            const void* base,
                                                            const long long (&stride)[3],
                                                            int local) const {
    const bool paged = s.block_table;
    const long long entry = paged                  ? page[0]
                            : s.lengths.cu_seqlens ? 0
                                                   : at.b,
                    row = paged ? slot_of(s, local + own_key()) : at.row + local + own_key();
    return reinterpret_cast<unsigned long long>(base) +
           KV::bytes * (entry * stride[0] + row * stride[1] + at.h * stride[2]);
  }
  // The warp's 32 rows of this many columns, whose addresses the lanes have, 16 bytes a lane.
  // Columns from used_bytes on become 0.
  template <int columns>
  __device__ __forceinline__ void copy_rows(unsigned to, unsigned long long row,
                                            int used_bytes) const {
    constexpr int chunks = columns * KV::bytes / 16, at_once = 4;
    static_assert(chunks % at_once == 0);
#pragma unroll
    for (int i0 = 0; i0 < chunks; i0 += at_once) {
      unsigned long long from[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        from[i] = __shfl_sync(0xffffffff, row, (32 * (i0 + i) + lane()) / chunks);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int r = (32 * (i0 + i) + lane()) / chunks, chunk = (32 * (i0 + i) + lane()) % chunks;
        ptx::cp_async_16(to + chunk / 8 * panel_bytes + chunk_offset<panel_pitch>(r, chunk % 8),
                         reinterpret_cast<const char*>(from[i]) + 16 * chunk,
                         16 * chunk < used_bytes);
      }
    }
  }
  // load() by two warps.
  template <class Meanwhile, class AskAhead>
  __device__ __forceinline__ void load_rows(const attn_decode_segment& s, int first,
                                            unsigned long long seen, bool last, bool final,
                                            Meanwhile&& meanwhile, AskAhead&& ask_ahead) {
    wait(shared.empty[stage.number], stage.parity ^ 1);
    SwappedUnit& unit = shared.unit[stage.number];
    const int local = first - at.begin;
    const bool there = seen >> own_key() & 1 &&
                       (walk.quick ? unsigned(page[0]) < unsigned(walk.num_pages)
                                   : !s.block_table || unsigned(page[0]) < unsigned(s.num_pages));
    const unsigned valid = __ballot_sync(0xffffffff, there);
    if (lane() == 0) {
      reinterpret_cast<unsigned*>(&unit.valid)[index()] = valid;
      if (leads()) {
        unit.first = first, unit.last = last, unit.final = final;
        unit.k_descale = k_descale, unit.v_descale = v_descale;
        meanwhile();
      }
    }
    __syncwarp();
    const unsigned full = address(&shared.full[stage.number]);
    unsigned long long k_row, v_row;
    if (walk.quick) {
      k_row = walk.k + unsigned(page[0]) * walk.k_page;
      v_row = walk.v + unsigned(page[0]) * walk.v_page;
    } else {
      k_row = row_address(s, s.k, s.k_stride, local);
      v_row = row_address(s, s.v, s.v_stride, local);
    }
    // Rows of keys that are not valid may be anything: those of one that is.
    if (~valid != 0 && valid != 0) {
      const int other = __ffs(valid) - 1;
      const unsigned long long k_other = __shfl_sync(0xffffffff, k_row, other),
                               v_other = __shfl_sync(0xffffffff, v_row, other);
      if (!there) k_row = k_other, v_row = v_other;
    }
    ask_ahead();
    if (valid != 0) {
      const unsigned to = ring + stage.number * tile.stage_bytes() + 32 * index() * panel_pitch;
      copy_rows<tile.head_dim>(to, k_row, a.head_dim * KV::bytes);
      copy_rows<tile.head_dim_v>(to + tile.k_bytes(), v_row, a.head_dim_v * KV::bytes);
    }
    ptx::cp_async_arrive(full);
    if (lane() == 0) ptx::mbarrier_arrive(full);
    stage.next(a.stages);
  }

  // valid: keys that are seen. meanwhile(): what else to do before the unit counts as loaded.
  // ask_ahead(): looks up what the next unit needs.
  template <class Meanwhile, class AskAhead>
  __device__ __forceinline__ void load(const attn_decode_segment& s, int first,
                                       unsigned long long valid, bool last, bool final,
                                       Meanwhile&& meanwhile, AskAhead&& ask_ahead) {
    if constexpr (rows) return load_rows(s, first, valid, last, final, meanwhile, ask_ahead);
    wait(shared.empty[stage.number], stage.parity ^ 1);
    SwappedUnit& unit = shared.unit[stage.number];
    const unsigned to = ring + stage.number * tile.stage_bytes(),
                   full = address(&shared.full[stage.number]);
    const int local = first - at.begin;
    unsigned bytes = 0;
    if (walk.quick) {
      if (unsigned(page[0]) >= unsigned(walk.num_pages)) valid = 0;
      if (valid) {
        copy(to, full, walk.slot, page[0]);
        bytes = tile.stage_bytes();
      }
    } else if (s.block_table) {
#pragma unroll
      for (int i = 0; i < max_boxes; ++i) {
        const int key = i * s.box_keys;
        if (key >= unit_keys) continue;
        const unsigned long long keys = low_bits(s.box_keys) << key;
        if (unsigned(page[i]) >= unsigned(s.num_pages)) valid &= ~keys;
        if ((valid & keys) == 0) continue;
        copy(to + key * panel_pitch, full, slot_of(s, local + key), page[i]);
        bytes += (k_panels + v_panels) * s.box_keys * panel_pitch;
      }
    } else if (!walks && valid) {
      copy(to, full, at.row + local, s.lengths.cu_seqlens ? 0 : at.b);
      bytes = tile.stage_bytes();
    }
    unit = {valid, first, last, final, k_descale, v_descale};
    meanwhile();
    ptx::mbarrier_arrive_expect(full, bytes);
    stage.next(a.stages);
    ask_ahead();
  }

  // The part that begins with the unit at the cursor. number: of the block's parts.
  __device__ __forceinline__ SwappedPart* post(unsigned number) const {
    const unsigned slot = number % 2;
    SwappedPart& to = shared.part[slot];
    if (leads()) {
      wait(shared.part_empty[slot], number / 2 % 2 ^ 1);
      to.at = {at.b,
               at.h,
               at.sequence.first_row,
               at.sequence.seqlen_q,
               at.sequence.seqlen_kv,
               at.sequence.q_begin};
      to.none = false;
      ptx::mbarrier_arrive(address(&shared.part_full[slot]));
    }
    if (rows) __syncwarp();
    return &to;
  }

  // By one lane, or (rows) two warps; of own_types by all lanes, which go one way. loader: this, as
  // what it is.
  template <class Loader>
  __device__ __forceinline__ void run(Loader& loader, const Work<tile>& work) {
    if (work.begin == work.end) {
      if (!leads()) return;
      shared.part[0].none = true;
      return ptx::mbarrier_arrive(address(&shared.part_full[0]));
    }
    at = work.first;
    unsigned head_begin = work.begin - (at.sequence.units - at.left), share = work.begin, parts = 0;
    bool begins = true, final = false;
#pragma unroll 1
    while (!final) {
      // The units from the cursor on that lie in one segment and in one part.
      const attn_decode_segment& s = a.segment[at.segment];
      const int limit = min(at.sequence.high, at.end);
      int units = max(min(at.left, (limit - at.first + unit_keys - 1) / unit_keys), 1);
      if (a.split_keys)
        units =
            min(units, a.split_keys / unit_keys - (at.first - at.begin) % a.split_keys / unit_keys);
      else
        units = min(units, int(work.end - share));
      const bool head_ends = at.left == units;
      share += a.split_keys ? !a.whole_heads || head_ends : units;
      final = share == work.end;
      const bool part_ends = final || head_ends || a.split_keys;
      const bool by_block =
          KV::scaled && !KV::own_types && (s.k_descale.block_keys || s.v_descale.block_keys);
      const bool each = walks || s.block_table || by_block;
      SwappedPart* const posted = begins ? post(parts++) : nullptr;
      if constexpr (walks)
        look_up_first(s, at.first - at.begin);
      else
        loader.look_up(s, at.first - at.begin);
#pragma unroll 1
      for (int i = 0; i < units; ++i) {
        const int first = at.first + i * unit_keys;
        const bool last = i == units - 1;
        const auto place_part = [&] {
          if (i > 0 || !begins) return;
          const Part part = a.split_keys
                                ? Part{unsigned(at.split), unsigned(at.sequence.split_begin),
                                       unsigned(at.sequence.split_end)}
                                : Part{0, head_begin, head_begin + at.sequence.units};
          posted->placed = place_of<tile>(a, posted->at, work.share, part);
        };
        loader.load(s, first, seen_keys(first, limit), last && part_ends, last && final, place_part,
                    [&] {
                      if (!each || last) return;
                      const int next = first + unit_keys - at.begin;
                      if constexpr (walks)
                        look_up_next(s, next, by_block);
                      else
                        loader.look_up(s, next);
                    });
      }
      if (final) return;
      begins = part_ends;
      at.left -= units - 1;
      at.first += (units - 1) * unit_keys;
      if (head_ends) head_begin = share;
      at.next(a, a.split_keys ? true : head_ends);
    }
  }
};

}  // namespace attn::decode
