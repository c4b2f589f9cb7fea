// ggml's blocks as operands of matrix instructions: codes become integers in f16, exactly. K's
// scales are multiplied with the products of a block, V's with the weights.
//
// In shared memory a key has the bytes that it has in the cache. Two blocks, an even and an odd
// one, are whole words: a scale and the even block's codes, then a scale and the odd block's codes.
// Codes of the even block start in the middle of a word: for its columns 0 to 15 the words contain
// the pairs
// (-, 0), (1, 2) .. (5, 6), (7, -), and likewise for 16 to 31. So the lane with the first word puts
// pair 7 before pair 0. Lanes thus have the pairs of 16 columns in the order 7, 0 .. 6 in even
// blocks, and in their own order in odd ones. Q's columns are laid out like that, and V's stored
// from it.
#pragma once
#include "../common/element.cuh"
#include "../ptx/f16x2.h"
#include "../ptx/load_shared.h"
#include "../ptx/lop3.h"
#include "../shared/swizzle.h"
#include "decode_tiles.h"
#include "elements.cuh"

namespace attn::decode {

// The place in which lanes have pair `pair` of 8 of a block.
__device__ __forceinline__ constexpr int place_of_pair(int block, int pair) {
  return block % 2 == 0 ? (pair + 1) % 8 : pair;
}
// Column of V in row g = lane / 4 (+ 8 if half) of tile n of 16.
__device__ __forceinline__ int block_v_column(int n, int half, int lane) {
  const int g = lane / 4, of_lane = 4 * (g % 4) + 2 * (n % 2) + half;
  return n / 2 * 32 + g / 4 * 16 + (n / 2 % 2 == 0 ? (of_lane + 14) % 16 : of_lane);
}

// The word; in the lane with the first one, the lower half of `next` followed by the word's upper
// half.
__device__ __forceinline__ unsigned turned(unsigned word, unsigned next, bool first) {
  return __byte_perm(word, next, first ? 0x3254 : 0x3210);
}

struct Q8_0 {
  static constexpr int block_bytes = q8_0_bytes;

  // Pairs of codes, from which 128 was subtracted, in the low and the high half.
  static __device__ __forceinline__ unsigned low(unsigned codes) {
    return ptx::add_f16x2(__byte_perm(codes, 0x64646464, 0x4140),
                          0xe480e480);  // 1024 + code: -1152
  }
  static __device__ __forceinline__ unsigned high(unsigned codes) {
    return ptx::add_f16x2(__byte_perm(codes, 0x64646464, 0x4342), 0xe480e480);
  }

  // Codes 4t to 4t + 3 of each 16, of row g (half 0) or g + 8. from: the address of the lane's
  // word.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned from, int half,
                                                bool even) {
    const bool first = threadIdx.x % 4 == 0;
    unsigned w[2] = {ptx::load_shared(from), ptx::load_shared(from + 16)};
    if (even) {
      const unsigned behind = ptx::load_shared(from + 32);
      w[0] = turned(w[0], w[1], first);
      w[1] = turned(w[1], behind, first);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const unsigned codes = w[step] ^ 0x80808080;
      a[step][half] = low(codes);
      a[step][2 + half] = high(codes);
    }
  }
  static __device__ __forceinline__ unsigned v_word(int lane) { return lane / 4 * 4; }
  // w: of keys 2t, 2t + 1, 2t + 8, 2t + 9 codes 4g ..
  static __device__ __forceinline__ void convert_v(unsigned (&a)[2][4], const unsigned (&w)[4]) {
#pragma unroll
    for (int keys = 0; keys < 2; ++keys) {
      const unsigned x = w[2 * keys] ^ 0x80808080, y = w[2 * keys + 1] ^ 0x80808080;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned both = __byte_perm(x, y, i == 0 ? 0x5140 : 0x7362);
        a[i][2 * keys] = low(both);
        a[i][2 * keys + 1] = high(both);
      }
    }
  }
};

// Byte i has code i in its low, and 16 + i in its high half.
struct Q4_0 {
  static constexpr int block_bytes = q4_0_bytes;
  static constexpr unsigned magic = 0x64006400;  // 1024, and 1024 + code or + 16 * code

  static __device__ __forceinline__ unsigned low(unsigned bytes) {
    return ptx::add_f16x2(ptx::and_or(bytes, 0x000f000f, magic), 0xe408e408);  // -1032
  }
  static __device__ __forceinline__ unsigned high(unsigned bytes) {
    // / 16 - 72
    return ptx::fma_f16x2(ptx::and_or(bytes, 0x00f000f0, magic), 0x2c002c00, 0xd480d480);
  }

  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned from, int half,
                                                bool even) {
    unsigned w = ptx::load_shared(from);
    if (even) w = turned(w, ptx::load_shared(from + 16), threadIdx.x % 4 == 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned bytes = __byte_perm(w, 0, i == 0 ? 0x1100 : 0x3322);
      a[0][2 * i + half] = low(bytes);
      a[1][2 * i + half] = high(bytes);
    }
  }
  static __device__ __forceinline__ unsigned v_word(int lane) { return lane / 4 % 4 * 4; }
  // Lanes g >= 4 take the high halves.
  static __device__ __forceinline__ void convert_v(unsigned (&a)[2][4], const unsigned (&w)[4]) {
    const bool upper = threadIdx.x % 32 >= 16;
    const unsigned mask = upper ? 0x00f000f0 : 0x000f000f, factor = upper ? 0x2c002c00 : 0x3c003c00,
                   offset = upper ? 0xd480d480 : 0xe408e408;
#pragma unroll
    for (int keys = 0; keys < 2; ++keys)
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        const unsigned both = __byte_perm(w[2 * keys], w[2 * keys + 1], 0x0400 + column * 0x0101);
        a[column / 2][2 * keys + column % 2] =
            ptx::fma_f16x2(ptx::and_or(both, mask, magic), factor, offset);
      }
  }
};

// Keys of a warp, with rows of this many columns in shared memory.
template <class Block, int columns>
struct BlockRows {
  static constexpr int blocks = columns / 32, pitch = block_pitch(columns, Block::block_bytes);
  // Offsets in a row of a block's scale, and of its words; an even block's first word also has the
  // scale.
  static __device__ constexpr int scale_at(int block) { return block * Block::block_bytes; }
  static __device__ constexpr int words_at(int block) { return scale_at(block) + block % 2 * 2; }

  // Block n of keys g and g + 8, two times 16 columns.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned lane_rows, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      Block::load_k(a, lane_rows + words_at(n) + half * 8 * pitch, half, n % 2 == 0);
  }
  // The scales of keys g and g + 8.
  static __device__ __forceinline__ float2 k_scales(unsigned row, int n) {
    return {F16::unpack(ptx::load_shared_half(row + scale_at(n))),
            F16::unpack(ptx::load_shared_half(row + scale_at(n) + 8 * pitch))};
  }

  // Keys 2t, 2t + 1, 2t + 8, 2t + 9.
  static __device__ __forceinline__ constexpr int key_at(int i) {
    return (i / 2 * 8 + i % 2) * pitch;
  }
  static __device__ __forceinline__ unsigned lane_v(int lane) { return lane % 4 * 2 * pitch; }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned lane_rows, int n,
                                                int lane) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned from = lane_rows + Block::v_word(lane) + words_at(n) + key_at(i);
      w[i] = ptx::load_shared(from);
      if (n % 2 == 0) w[i] = turned(w[i], ptx::load_shared(from + 16), lane / 4 % 4 == 0);
    }
    Block::convert_v(a, w);
  }
  // The scales of keys 2t and 2t + 1 (i 0), or of 2t + 8 and 2t + 9 (i 1).
  static __device__ __forceinline__ unsigned v_scales(unsigned lane_rows, int n, int i) {
    const unsigned from = lane_rows + scale_at(n) + key_at(2 * i);
    return ptx::load_shared_half(from) | ptx::load_shared_half(from + pitch) << 16;
  }
};

// V of 16 bits in the order of blocks, from panels of 128 bytes of each row.
struct PlainRows {
  static __device__ __forceinline__ unsigned pair_of(unsigned rows, int key, int block, int pair) {
    const int chunk = block % 2 * 4 + pair / 4;
    return ptx::load_shared(rows + block / 2 * panel_bytes + chunk_offset<panel_pitch>(key, chunk) +
                            pair % 4 * 4);
  }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned rows, int n,
                                                int lane) {
    const int g = lane / 4, t = lane % 4, group = g / 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = g % 4 * 2 + i, pair = group + (n % 2 == 0 ? (at + 7) % 8 : at);
#pragma unroll
      for (int keys = 0; keys < 2; ++keys) {
        const unsigned x = pair_of(rows, 2 * t + 8 * keys, n, pair),
                       y = pair_of(rows, 2 * t + 8 * keys + 1, n, pair);
        a[i][2 * keys] = __byte_perm(x, y, 0x5410);
        a[i][2 * keys + 1] = __byte_perm(x, y, 0x7632);
      }
    }
  }
};

// K and V of each segment have types of their own: q's, or ggml's blocks.
struct OwnTypes {
  using Product = F16;
  static constexpr int bytes = 2;
  static constexpr bool scaled = true, own_types = true;
  static __device__ __forceinline__ int v_column(int n, int half, int lane) {
    return block_v_column(n, half, lane);
  }
};

}  // namespace attn::decode
