// Loading of rows of codes for many.cuh. mla_656: 512 codes of e4m3, a float32 scale for each 128
// of them, 64 rope columns of bf16. e4m3: 576 codes, and a factor for the row or none. Codes come
// to shared memory as they are, in octets of keys of one warp, which turns them to bf16 when the
// sums of the unit before the last do not need its place any more:
//
//   sums of unit n, keys 0 to 31    | octet 2n + 4 to bf16; octet 2n + 7 asked for
//   sums of unit n, keys 32 to 63   | octet 2n + 5 to bf16; rope columns of unit n + 3, octet 2n +
//   8
//
// while the matrix unit has the sums of keys 32 to 63, and the scores of unit n + 1.
#pragma once
#include "../common/element.cuh"
#include "../ptx/convert_fp8.h"
#include "feed.cuh"

namespace attn::mla {

template <Rows rows>
struct CodesFeed : Feed<rows> {
  using Base = Feed<rows>;
  using Base::a, Base::shared, Base::base, Base::which;
  using Base::b, Base::tile, Base::unit, Base::length, Base::h, Base::part;
  using Base::lane, Base::warp, Base::all;
  using typename Base::Shared;
  static constexpr bool scales = rows == Rows::mla_656;
  static constexpr int scales_at = 512, rope_columns_at = scales ? 528 : 512;  // in a row, bytes
  static __device__ __forceinline__ int loader() { return threadIdx.x / 32 - 4; }
  // Key n of the warp's 16 of a unit, which are two octets.
  static __device__ __forceinline__ int key_of(int n) { return n / 8 * 32 + 8 * warp() + n % 8; }
  __device__ __forceinline__ unsigned octet_place(unsigned number) const {
    return base + Shared::octets_at + ((loader())*octet_slots + number % octet_slots) * octet_bytes;
  }
  __device__ __forceinline__ auto& scales_of(unsigned octet) const {
    return shared.of_codes.scale[loader()][octet % scale_slots];
  }
  // Of the warps that load this half.
  __device__ __forceinline__ void meet() const { ptx::barrier_wait<128>(1 + threadIdx.x / 128); }

  __device__ __forceinline__ void begin_codes() {
    const Found& found = shared.found;
    b = found.b, tile = found.tile, unit = found.unit;
    Base::begin_sequence();
    go_on(0, warp());
    ptx::cp_async_wait_all();
    if (warp() < 3) find_unit(warp());
    meet();
    copy_octet(0);
    copy_octet(1);
    copy_rope(0);
    copy_octet(2);
#pragma unroll 1
    for (unsigned n = 0; n < 2; ++n) {
      meet();
      convert_first(n);
      meet();
      convert_second(n);
    }
  }
  // Of unit `number`, whose place nobody reads any more: keys 0 to 31.
  __device__ __forceinline__ void convert_first(unsigned number) {
    ptx::cp_async_wait<3>();  // groups: octet 2n + 1, rope columns of n + 1, octet 2n + 2
    convert<0>(number);
    copy_octet(2 * number + 3);
    find_unit(number + 3);
  }
  __device__ __forceinline__ void convert_second(unsigned number) {
    ptx::cp_async_wait<2>();  // octets 2n + 2 and 2n + 3
    convert<1>(number);
    if constexpr (!scales) convert_rope(number);
    ptx::fence_async_shared();
    __syncwarp();
    if (lane() == 0 && number < all()) {
      ptx::mbarrier_arrive(address(&shared.full_half[which][number % Shared::half_slots]));
      if (!scales && which == 1)
        ptx::mbarrier_arrive(address(&shared.full_rope[number % Shared::rope_slots]));
    }
    copy_rope(number + 1);
    copy_octet(2 * number + 4);
  }

  // Warps take turns to find out where the keys of a unit are. The others know when they have met.
  __device__ __forceinline__ void find_unit(unsigned number) {
    if (number % 4 != warp() || number >= all()) return;
    const attn_decode_segment& s = a.segment[0];
    const Walk& walk = shared.of_codes.walk[loader()];
    b = walk.b, tile = walk.tile, unit = walk.unit;
    length = walk.length, Base::row0 = walk.row0, part = walk.part;
    h = tile / a.row_tiles;
    Base::describe(number, 0);
    const int first = unit * unit_keys;
    // Values of keys that no row sees may be anything, and 0 * NaN is NaN. All rows see what is
    // before the last keys.
    const int end =
        first + unit_keys + a.seqlen_q > length ? part_of(a, b, tile, length, 0, 0).end : length;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_unit = 32 * i + lane(), key = first + in_unit;
      int entry = s.lengths.cu_seqlens ? 0 : b, row = Base::row0 + key;
      bool there = key < end;
      if (s.block_table) {
        entry = shared.of_codes.entry[loader()][in_unit];
        row = decode::slot_of(s, key);
        there = there && unsigned(entry) < unsigned(s.num_pages);
      }
      const char* const at = static_cast<const char*>(s.v) + entry * s.v_stride[0] +
                             row * s.v_stride[1] + h * s.v_stride[2];
      shared.of_codes.row[which][number % found_units][in_unit] = there ? at : nullptr;
      if constexpr (!scales)
        shared.of_codes.factor[which][number % found_units][in_unit] = factor_of(key, entry, row);
      const unsigned valid = __ballot_sync(0xffffffff, there);
      if (which == 1 && lane() == 0)
        reinterpret_cast<unsigned*>(shared.valid[number % records])[i] = valid;
    }
    __syncwarp();
    go_on(number, 4);
  }
  // By `units` from this one on, the entries of which it asks for.
  __device__ __forceinline__ void go_on(unsigned number, unsigned units) {
    if (number + units >= all()) return;
#pragma unroll 1
    while (units > 0) {
      const int of_sequence = units_of(length), step = min(int(units), of_sequence - unit);
      units -= step;
      if ((unit += step) < of_sequence) continue;
      ++part;
      unit = 0;
      if (++b == a.batch) b = 0, ++tile;
      Base::begin_sequence();
    }
    if (lane() == 0) shared.of_codes.walk[loader()] = {b, tile, unit, length, Base::row0, part};
    __syncwarp();
    const attn_decode_segment& s = a.segment[0];
    if (!s.block_table) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int page = decode::page_of(s, unit * unit_keys + 32 * i + lane());
      int& entry = shared.of_codes.entry[loader()][32 * i + lane()];
      const bool there = page < s.max_pages;
      if (!there) entry = -1;
      ptx::cp_async_if<4>(address(&entry), s.block_table + b * (long long)s.max_pages + page,
                          there);
    }
  }
  // Of a key, which is row `row` of its page or sequence.
  __device__ __forceinline__ int factor_of(int key, int entry, int row) const {
    const attn_decode_segment& s = a.segment[0];
    if (s.k_type == attn_element_f8_e4m3fn_token)
      return int(entry * s.k_scales.batch + row * (long long)s.k_scales.seq + h * s.k_scales.head);
    return int(device::descale_at(s.k_descale, b, h, key) - s.k_descale.at);
  }
  // A group of copies: this half's codes and scales of the warp's keys 8 (number % 2) on in unit
  // number / 2. Of a key that is not there they are zeros.
  __device__ __forceinline__ void copy_octet(unsigned number) const {
    if (number / 2 < all()) {
      const int found = number / 2 % found_units, first = key_of(number % 2 * 8);
      const char* const* const row = shared.of_codes.row[which][found] + first;
      const int odd = lane() / 16, chunk = lane() % 16;
      // Keys 2i and 2i + 1 in other banks.
      const unsigned to = octet_place(number) + odd * 256 + (chunk ^ odd * 4) * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* const from = row[2 * i + odd];
        ptx::cp_async_16(to + 512 * i, from + 256 * which + 16 * chunk, from != nullptr);
      }
      if (lane() < 8) {
        const char* const from = row[lane()];
        auto& scale = scales_of(number)[lane()];
        if constexpr (scales) {
          if (!from) scale = {0, 0};
          ptx::cp_async_if<8>(address(&scale), from + scales_at + 8 * which, from != nullptr);
        } else {
          const float* const factors = a.segment[0].k_descale.at;  // or scales of tokens
          if (!from || !factors) scale = from ? 1 : 0;
          ptx::cp_async_if<4>(address(&scale),
                              factors + shared.of_codes.factor[which][found][first + lane()],
                              from && factors);
        }
      }
    }
    ptx::cp_async_commit();
  }
  // A group: by the warps of one half for both. Codes come to the second half of their places.
  __device__ __forceinline__ void copy_rope(unsigned number) const {
    if (which == 1 && number < all()) {
      const unsigned slot = number % Shared::rope_slots;
      wait(shared.empty_rope[slot], number / Shared::rope_slots % 2 ^ 1);
      const unsigned full = address(&shared.full_rope[slot]), to = Shared::rope_place(base, slot);
      constexpr int chunks = scales ? 8 : 4;  // of a key
      const int chunk = lane() % chunks;
#pragma unroll
      for (int i = 0; i < chunks / 2; ++i) {
        const int key = key_of(32 / chunks * i + lane() / chunks);
        const char* const from = shared.of_codes.row[1][number % found_units][key];
        ptx::cp_async_16(to + device::chunk_offset<128>(key, 8 - chunks + chunk),
                         from + rope_columns_at + 16 * chunk, from != nullptr);
      }
      if (scales) Base::arrive(full);
    }
    ptx::cp_async_commit();
  }

  static __device__ __forceinline__ float scale_of(float2 of_groups, int panel) {
    return panel < 2 ? of_groups.x : of_groups.y;
  }
  static __device__ __forceinline__ float scale_of(float of_row, int) { return of_row; }
  // 16 codes times `by` to chunks 2 * part and the next one of a row that is key % 8 of its lines.
  static __device__ __forceinline__ void store_codes(unsigned to, int key, int part, float4 codes,
                                                     float by) {
    const unsigned word[4] = {__float_as_uint(codes.x), __float_as_uint(codes.y),
                              __float_as_uint(codes.z), __float_as_uint(codes.w)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned pair[4];
      ptx::f16_of_e4m3_word(word[2 * i], &pair[0], &pair[1]);
      ptx::f16_of_e4m3_word(word[2 * i + 1], &pair[2], &pair[3]);
#pragma unroll
      for (unsigned& x : pair)
        x = ptx::pack_bf16(ptx::unpack_f16((unsigned short)x) * by,
                           ptx::unpack_f16((unsigned short)(x >> 16)) * by);
      ptx::store_shared(to + device::chunk_offset<128>(key, 2 * part + i), pair);
    }
  }
  // Octet 2 * number + second: 4 lanes a key, 16 codes each of one panel after the other.
  template <int second>
  __device__ __forceinline__ void convert(unsigned number) const {
    __syncwarp();
    if (number < all()) {
      const unsigned octet = 2 * number + second;
      const int key = lane() / 4, part = lane() % 4;
      const unsigned from = octet_place(octet) + key * 256 + part * 16,
                     to = Shared::half_place(base, which, number % Shared::half_slots) +
                          key_of(8 * second) * 128;
      const auto scale = scales_of(octet)[key];
#pragma unroll
      for (int panel = 0; panel < half_panels; ++panel)
        store_codes(to + panel * panel_bytes, key, part,
                    ptx::load_shared_floats(from + (panel ^ key % 2) * 64), scale_of(scale, panel));
    }
    __syncwarp();
  }
  // e4m3: the unit's rope columns, in their places.
  __device__ __forceinline__ void convert_rope(unsigned number) const {
    if (which == 0 || number >= all()) return;
    const unsigned to = Shared::rope_place(base, number % Shared::rope_slots);
    const int key = lane() / 4, part = lane() % 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const unsigned row = to + key_of(8 * second) * 128;
      const float4 codes = ptx::load_shared_floats(row + device::chunk_offset<128>(key, 4 + part));
      __syncwarp();
      store_codes(row, key, part, codes, scales_of(2 * number + second)[key]);
    }
  }
};

}  // namespace attn::mla
