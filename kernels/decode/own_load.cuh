// The warp that loads where each segment's K and V have types of their own. Other than in
// swapped_load.cuh all its lanes go one way, because scales in an array are copied by all of
// them.
#pragma once
#include "../ptx/cp_async_part.h"
#include "own_elements.cuh"
#include "swapped_load.cuh"

namespace attn::decode {

static_assert(attn_decode_max_segments <= own_joint_heads);

// What boxes of K or of V have in common, of one segment, sequence and group of heads.
struct OwnBoxes {
  const attn_tensor_map* map;
  int pitch, panels, key_bytes;  // of a key's row, and of all that a key has
  int column, columns, head;     // of the first panel; of a panel; as the map counts heads
  // In OwnUnit::types: of blocks what is before a row in shared memory, in 4 bytes; of i8 and i4
  // halves, see own_elements.cuh; of nvfp4 the segment's number. Of these own_joint_heads too.
  int more;
  unsigned long long scales;  // address of those of the segment's first key, or of page 0
  long long scales_apart;     // bytes between the two keys' that a lane copies of a stage
};

template <DecodeTile tile>
struct OwnLoader : SwappedLoader<OwnTypes, tile> {
  using Base = SwappedLoader<OwnTypes, tile>;
  using Base::a, Base::maps, Base::shared, Base::ring, Base::stage, Base::at, Base::page,
      Base::leads, Base::lane;
  int segment = -1, b = -1, h = -1;  // that the boxes are of
  // Without pages: where the lane's first scale of the segment's first stage is.
  unsigned long long k_scale = 0, v_scale = 0;
  OwnBoxes& k;  // in shared memory: there are few registers
  OwnBoxes& v;

  __device__ __forceinline__ OwnLoader(const attn_decode_kernarg& a, const Maps& maps,
                                       SwappedShared<tile>& shared, unsigned ring)
      : Base{a, maps, shared, ring}, k(boxes()[0]), v(boxes()[1]) {}
  static __device__ __forceinline__ OwnBoxes* boxes() {
    __shared__ OwnBoxes both[2];
    return both;
  }

  __device__ __forceinline__ void look_up(const attn_decode_segment& s, int local) {
    Base::look_up(s, local);
    if (segment == at.segment && b == at.b && h == at.h) return;
    segment = at.segment, b = at.b, h = at.h;
    __syncwarp();
    // The first copy waits for this: K's and V's by a lane each, at the same time.
    if (lane() < 2) {
      const bool is_v = lane() == 1;
      boxes()[lane()] = begin(s, is_v ? maps[segment].v : maps[segment].k,
                              is_v ? s.v_type : s.k_type, is_v ? tile.head_dim_v : tile.head_dim,
                              is_v ? s.v_head : s.k_head, is_v ? s.v_scales : s.k_scales);
    }
    __syncwarp();
    const int keys = stage_keys(), head = lane() / keys, key = lane() % keys;
    const auto lane_scale = [&](const OwnBoxes& boxes, const attn_key_scales& scales) {
      return boxes.scales + head * (boxes.more & own_joint_scales ? 16 : (long long)scales.head) +
             key * (long long)scales.seq;
    };
    if (has_scale_array(s.k_type)) k_scale = lane_scale(k, s.k_scales);
    if (has_scale_array(s.v_type)) v_scale = lane_scale(v, s.v_scales);
  }
  __device__ __forceinline__ int stage_keys() const { return unit_keys >> a.heads_log2; }
  __device__ __forceinline__ OwnBoxes begin(const attn_decode_segment& s,
                                            const attn_tensor_map& map, int type, int columns,
                                            int head_pitch, const attn_key_scales& scales) const {
    OwnBoxes boxes = {};
    boxes.map = &map;
    const OwnPlace place = own_place(type, columns, 1 << a.heads_log2, 2 * head_pitch);
    boxes.pitch = place.pitch, boxes.panels = place.panels;
    boxes.key_bytes = place.key_bytes(1 << a.heads_log2);
    boxes.columns = panel_pitch / (has_scale_array(type) ? 1 : 2);
    const int first_head = at.h << a.heads_log2;
    boxes.head = first_head >> place.heads_log2();
    if (is_ggml(type) && a.heads_log2 == 0) {
      // Boxes begin at multiples of 16 bytes, heads (units of 2 bytes before them) at any of 4.
      boxes.head = 0;
      boxes.column = first_head * head_pitch / 8 * 8;
      boxes.more = first_head * head_pitch % 8 / 2;
    }
    if (!has_scale_array(type)) return boxes;
    // Units begin at even rows, in pages too.
    const long long first = s.block_table ? 0
                                          : (s.lengths.cu_seqlens ? 0 : at.b * scales.batch) +
                                                at.row * (long long)scales.seq;
    boxes.scales = reinterpret_cast<unsigned long long>(scales.at) +
                   first_head * (long long)scales.head + first;
    boxes.scales_apart = a.heads_log2 == 0 ? 32 * (long long)scales.seq
                                           : (long long)scales.head << (a.heads_log2 - 1);
    boxes.more = type == attn_element_nvfp4
                     ? at.segment
                     : int(boxes.scales & 2 | scales.seq << 1 & 4 | scales.head << 2 & 8) >> 1;
    if (place.heads > 1) boxes.more |= own_joint_heads;
    const int at_once = heads_of_scales(columns);
    if (type == attn_element_nvfp4 && at_once > 1 && at_once <= 1 << a.heads_log2 &&
        scales.head * at_once == 16 &&
        ((boxes.scales | scales.seq | (s.block_table ? scales.batch : 0)) & 15) == 0)
      boxes.more |= own_joint_scales;
    return boxes;
  }

  // to: of the box's first key.
  __device__ __forceinline__ void copy(const OwnBoxes& boxes, unsigned to, unsigned full, int row,
                                       int entry) const {
    ptx::tma_load(to, boxes.map, full, boxes.column, row, boxes.head, entry);
#pragma unroll 1
    for (int panel = 1; panel < boxes.panels; ++panel)
      ptx::tma_load(to + panel * panel_bytes, boxes.map, full, boxes.column + panel * boxes.columns,
                    row, boxes.head, entry);
  }
  // By one lane, from the stage's key on.
  __device__ __forceinline__ void copy_both(unsigned to, unsigned full, int key, int row,
                                            int entry) const {
    copy(k, to + key * k.pitch, full, row, entry);
    copy(v, to + a.k_bytes + key * v.pitch, full, row, entry);
  }
  // Scales of a stage's keys, from `local` on, of head after head: of i8 and i4 the words that have
  // them; if a scale is a word's first half, the other one is not read.
  template <int columns>
  __device__ __forceinline__ void copy_scales(const attn_decode_segment& s, int type,
                                              const OwnBoxes& boxes, const attn_key_scales& scales,
                                              unsigned long long lane_scale, unsigned to,
                                              unsigned long long valid, int before,
                                              int local) const {
    const int keys = stage_keys();
    const bool joint = type == attn_element_nvfp4 && (boxes.more & own_joint_scales);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = lane() + 32 * i, key = place & (keys - 1);
      if (joint && i > 0) break;
      unsigned long long scale = lane_scale + i * boxes.scales_apart;
      if (s.block_table) {
        int entry = page[0];
#pragma unroll
        for (int box = 1; box < Base::max_boxes; ++box)
          if (before + key >= box * s.box_keys) entry = page[box];
        // Instead of row `key`.
        scale += entry * scales.batch + (slot_of(s, local + key) - key) * (long long)scales.seq;
      } else {
        scale += local * (long long)scales.seq;
      }
      const bool there = valid == ~0ull || (valid >> key & 1);
      constexpr int row = key_scale_bytes(attn_element_nvfp4, columns);
      if (joint)
        ptx::cp_async_16_if(to + 16 * place, reinterpret_cast<const void*>(scale),
                            there && place < unit_keys / heads_of_scales(columns));
      else if (type == attn_element_nvfp4)
        ptx::cp_async_if<row>(to + row * place, reinterpret_cast<const void*>(scale), there);
      else
        ptx::cp_async_part_if(to + 4 * place, reinterpret_cast<const void*>(scale & ~3ull),
                              type == attn_element_f8_e4m3fn_token || scale % 4 ? 4 : 2, there);
    }
  }

  // A unit is as many stages as a block has heads at once.
  template <class Meanwhile, class AskAhead>
  __device__ __forceinline__ void load(const attn_decode_segment& s, int first,
                                       unsigned long long valid, bool last, bool final,
                                       Meanwhile&& meanwhile, AskAhead&& ask_ahead) {
    const int heads = 1 << a.heads_log2, keys = stage_keys();
#pragma unroll 1
    for (int part = 0; part < heads; ++part) {
      wait(shared.empty[stage.number], stage.parity ^ 1);
      const unsigned to = ring + stage.number * a.stage_bytes,
                     full = address(&shared.full[stage.number]);
      const int before = part * keys, local = first - at.begin + before;
      unsigned long long there = valid >> before & low_bits(keys);
      int copied = 0;
      if (s.block_table) {
#pragma unroll
        for (int i = 0; i < Base::max_boxes; ++i) {
          const int key = i * s.box_keys - before;
          if (key < 0 || key >= keys) continue;
          const unsigned long long of_box = low_bits(s.box_keys) << key;
          if (unsigned(page[i]) >= unsigned(s.num_pages)) there &= ~of_box;
          if ((there & of_box) == 0) continue;
          if (leads()) copy_both(to, full, key, slot_of(s, local + key), page[i]);
          copied += s.box_keys;
        }
      } else if (there) {
        copied = keys;
      }
      const bool ends = part == heads - 1;
      if (there == low_bits(keys)) there = ~0ull;
      if (leads()) {
        if (copied && !s.block_table)
          copy_both(to, full, 0, at.row + local, s.lengths.cu_seqlens ? 0 : at.b);
        if (part == 0) meanwhile();
        OwnUnit& unit = shared.unit[stage.number];
        unit.valid = there;
        unit.first = first + before;
        unit.last = last && ends, unit.final = final && ends;
        unit.types = s.k_type | s.v_type << 8 | k.more << 16 | v.more << 24;
        ptx::mbarrier_arrive_expect(full, copied * (k.key_bytes + v.key_bytes));
      }
      if (a.scales_at) {
        if (has_scale_array(s.k_type))
          copy_scales<tile.head_dim>(s, s.k_type, k, s.k_scales, k_scale, to + a.scales_at, there,
                                     before, local);
        if (has_scale_array(s.v_type))
          copy_scales<tile.head_dim_v>(s, s.v_type, v, s.v_scales, v_scale, to + a.v_scales_at,
                                       there, before, local);
        ptx::cp_async_arrive(full);
      }
      __syncwarp();
      stage.next(a.stages);
    }
    ask_ahead();
  }
};

}  // namespace attn::decode
