// Scores with a bias.
#pragma once
#include "../common/element.cuh"
#include "../ptx/cp_async.h"
#include "../ptx/load_shared.h"
#include "../ptx/max.h"
#include "scores_blocks.cuh"

namespace attn::sm90 {

template <class T, Tile tile>
struct Bias {
  static constexpr int keys = tile.keys, words = key_words<tile>;

  const attn_sm90_bias_kernarg& a;
  const Warp<tile>& warp;

  // The lane keeps the bias of its scores in shared memory, where no other lane reads it: pairs of
  // neighbours, those of one row behind those of the other. Here lies the first pair, the next one
  // bias_step further.
  template <int element_bytes>
  __device__ __forceinline__ unsigned bias_at() const {
    return warp.shared + tile.bias_offset() + (4 * warp.group + warp.warp) * (16 * keys * 4) +
           warp.lane * (2 * element_bytes);
  }
  template <int element_bytes>
  static constexpr int bias_step = 32 * 2 * element_bytes;

  // Brings the bias of tile n; to be waited for. The bias of keys past the item's last is not read;
  // rows past the sequence get that of its last.
  __device__ __forceinline__ void load(const Item& item, unsigned n) const {
    if (!a.bias) return;
    const KeyTile& at = warp.key_tile(n);
    const int column = warp.lane % 4 * 2, count = at.keys - column;
    const long long next = a.bias_stride[3];
    const long long begin =
        item.b * a.bias_stride[0] + item.h * a.bias_stride[1] + (at.first + column) * next;
    const bool pairs = a.bias_pairs && ((at.first | at.keys) & 1) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(warp.row(item, half), item.seqlen_q - 1);
      const long long offset = begin + row * a.bias_stride[2];
      if (a.bias_type == attn_element_f32) {
        const float* from = static_cast<const float*>(a.bias) + offset;
        unsigned to = bias_at<4>() + half * (keys / 8 * bias_step<4>);
        if (pairs) {
#pragma unroll
          for (int n = 0; n < keys / 8; ++n)
            ptx::cp_async_if<8>(to + n * bias_step<4>, from + 8 * n, 8 * n < count);
        } else {
#pragma unroll 1
          for (int n = 0; n < keys; n += 8) {
            ptx::cp_async_if<4>(to, from, n < count);
            ptx::cp_async_if<4>(to + 4, from + next, n + 1 < count);
            from += 8 * next;
            to += bias_step<4>;
          }
        }
      } else {
        const unsigned short* from = static_cast<const unsigned short*>(a.bias) + offset;
        unsigned to = bias_at<2>() + half * (keys / 8 * bias_step<2>);
        if (pairs) {
#pragma unroll
          for (int n = 0; n < keys / 8; ++n)
            ptx::cp_async_if<4>(to + n * bias_step<2>, from + 8 * n, 8 * n < count);
        } else {
#pragma unroll 1
          for (int n = 0; n < keys; n += 8) {
            const unsigned low = n < count ? from[0] : 0, high = n + 1 < count ? from[next] : 0;
            ptx::store_shared(to, low | high << 16);
            from += 8 * next;
            to += bias_step<2>;
          }
        }
      }
    }
  }
  // Adds it to scores in the log2 domain. A key whose bias is -inf is not seen, whatever it holds;
  // a finite one hides nothing, so its product is kept finite.
  __device__ __forceinline__ void add(Scores<tile>& s) const {
    if (!a.bias) return;
    ptx::cp_async_wait_all();
    const auto add_to = [&](float& x, float b) {
      x = b == -infinity() ? b : fmaf(ptx::max_nan(b, lowest_bias), log2_e, x);
    };
    if (a.bias_type == attn_element_f32) {
      const unsigned from = bias_at<4>();
#pragma unroll
      for (int i = 0; i < keys / 4; ++i) {
        const int n = i % (keys / 8), half = i / (keys / 8);
        const uint2 pair = ptx::load_shared_pair(from + i * bias_step<4>);
        add_to(s[4 * n + 2 * half], __uint_as_float(pair.x));
        add_to(s[4 * n + 2 * half + 1], __uint_as_float(pair.y));
      }
    } else {
      const unsigned from = bias_at<2>();
#pragma unroll
      for (int i = 0; i < keys / 4; ++i) {
        const int n = i % (keys / 8), half = i / (keys / 8);
        const unsigned pair = ptx::load_shared(from + i * bias_step<2>);
        add_to(s[4 * n + 2 * half], T::unpack(pair & 0xffff));
        add_to(s[4 * n + 2 * half + 1], T::unpack(pair >> 16));
      }
    }
  }
  static constexpr float lowest_bias = -2.3e38f;

  // Says which keys of tile n the warp's queries see. True: some they do not.
  __device__ __forceinline__ bool say_seen(const Scores<tile>& s, unsigned n) const {
    unsigned most = 0;  // as an integer, -inf is above all numbers, and only NaNs are above it
#pragma unroll
    for (int i = 0; i < keys / 2; i += 2)
      most = __vimax3_u32(most, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
    unsigned mine = low_bits(keys - 32 * warp.lane);  // lane n has word n
    bool unseen = __any_sync(0xffffffff, most >= 0xff800000u);
    if (unseen) [[unlikely]] {
      bool all = true;
#pragma unroll
      for (int word = 0; word < words; ++word) {
        unsigned seen = 0;
#pragma unroll
        for (int n = 4 * word; n < min(4 * word + 4, keys / 8); ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool sees = s[4 * n + i] != -infinity() || s[4 * n + 2 + i] != -infinity();
            seen |= unsigned(sees) << (8 * (n % 4) + i);
          }
        }
        seen = __reduce_or_sync(0xffffffff, seen << warp.lane % 4 * 2);
        all = all && seen == low_bits(keys - 32 * word);
        if (warp.lane == word) mine = seen;
      }
      unseen = !all;
    }
    if (warp.lane < words) atomicOr(&warp.control.blocks[n % tile_slots].seen[warp.lane], mine);
    __syncwarp();
    warp.release(warp.control.said[n % tile_slots]);
    return unseen;
  }
};

}  // namespace attn::sm90
