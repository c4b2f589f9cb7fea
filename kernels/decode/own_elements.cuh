// K and V of each type that a segment can have, as operands of matrix instructions: codes become
// integers in f16, exactly. A warp has 16 keys; g = lane / 4, t = lane % 4.
//
// K: the order of the columns is free where Q's is the same (q_column()). Products are made of 32
// columns, two times 16, at a time.
// V: row g of tile n is column 16n + 2g, row g + 8 the one behind it, for every type, because one
// call may have segments of several.
//
// In shared memory a key has ggml's blocks as they are in the cache: a scale and 32 codes, of which
// those of even blocks begin in the middle of a word. i8 and i4 are panels of 32, 64 or 128 bytes
// of each row, whose chunks of 16 bytes are swizzled as TMA does it; their scales are in an array
// of their own, one for each key and head.
#pragma once
#include "../common/element.cuh"
#include "../ptx/f16x2.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/load_shared.h"
#include "../ptx/lop3.h"
#include "../shared/swizzle.h"
#include "decode_tiles.h"
#include "elements.cuh"

namespace attn::decode {

// The order of K's columns in what a lane has of 32: word i of its four is columns t * lane +
// i % 2 * odd + i / 2 * upper + half * other, half 0 and 1.
struct KeyOrder {
  int lane, odd, upper, other;
};
__device__ __forceinline__ KeyOrder key_order(int type) {
  if (type == attn_element_i4) return {8, 2, 1, 4};
  if (type == attn_element_f16 || type == attn_element_bf16) return {2, 8, 16, 1};
  return {4, 1, 16, 2};
}

// Pairs of codes: bytes 0 and 2 of a word, which are 128 more than what is said, and the halves of
// these bytes, 8 more. V's become these numbers in f16.
__device__ __forceinline__ unsigned pair_of_bytes(unsigned w) {
  return ptx::add_f16x2(ptx::and_xor(w, 0x00ff00ff, 0x64806480), 0xe480e480);  // 1024 + x - 1152
}
// flip: of two's complement.
template <bool flip>
__device__ __forceinline__ unsigned pair_of_lower(unsigned w) {
  return ptx::add_f16x2(ptx::and_xor(w, 0x000f000f, flip ? 0x64086408 : 0x64006400),
                        0xe408e408);  // 1024 + x - 1032
}
template <bool flip>
__device__ __forceinline__ unsigned pair_of_upper(unsigned w) {
  return ptx::fma_f16x2(ptx::and_xor(w, 0x00f000f0, flip ? 0x64806480 : 0x64006400), 0x2c002c00,
                        0xd480d480);  // (1024 + 16x) / 16 - 72
}
// K's halves become numbers below f16's normal ones by one instruction each: 2^-24 times what the
// half has, or 2^-20 times in the upper ones. What is 8 too much is taken from the product, and Q's
// columns have factors (half_factor()).
template <bool flip>
__device__ __forceinline__ unsigned pair_of_halves(unsigned w, unsigned mask) {
  return flip ? ptx::and_xor(w, mask, mask & 0x00880088) : w & mask;
}
// Of keys g and g + 8 a word each, to two operands of 16 columns: lower and upper halves.
template <bool flip>
__device__ __forceinline__ void halves_of_keys(unsigned (&a)[2][4], unsigned x, unsigned y) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const unsigned mask = upper ? 0x00f000f0 : 0x000f000f;
      a[upper][2 * i] = pair_of_halves<flip>(x >> 8 * i, mask);
      a[upper][2 * i + 1] = pair_of_halves<flip>(y >> 8 * i, mask);
    }
}
__device__ __forceinline__ constexpr bool has_halves(int type) {
  return type == attn_element_q4_0 || type == attn_element_i4;
}
// What a column of Q is multiplied with, in [1, 2) before: the smallest that 1 / 16 of it is as
// exact. The scores then have 2^-14 of their value.
__device__ __forceinline__ constexpr float half_factor(bool upper) {
  return upper ? 64 : 1024;
}
constexpr float half_undo = 1 << 14, half_offset = -8.0f / (1 << 24);
__device__ __forceinline__ void bytes_of_keys(unsigned (&a)[4], unsigned x, unsigned y) {
  a[0] = pair_of_bytes(x);
  a[1] = pair_of_bytes(y);
  a[2] = pair_of_bytes(x >> 8);
  a[3] = pair_of_bytes(y >> 8);
}
// A word of two neighbouring columns of two keys; step 0: keys 2t and 2t + 1, 1: 8 further.
__device__ __forceinline__ void bytes_of_columns(unsigned (&a)[4], int step, unsigned w) {
  a[2 * step] = pair_of_bytes(w);
  a[2 * step + 1] = pair_of_bytes(w >> 8);
}
// The lower halves of two words.
__device__ __forceinline__ unsigned join(unsigned x, unsigned y) {
  return __byte_perm(x, y, 0x5410);
}
// Keys 2t, 2t + 1, 2t + 8, 2t + 9 of a warp.
__device__ __forceinline__ constexpr int v_key(int i) {
  return i / 2 * 8 + i % 2;
}

struct Q8_0 {
  static constexpr int block_bytes = q8_0_bytes;

  // word(at): of the codes of keys g (key 0) or g + 8, from byte `at` on.
  template <class Word>
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], Word&& word, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bytes_of_keys(a[i], word(0, 16 * i + 4 * t), word(1, 16 * i + 4 * t));
  }
  // two(i, at): two codes of key v_key(i).
  template <class Two>
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], Two&& two, int g) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step)
        bytes_of_columns(a[i], step,
                         join(two(2 * step, 16 * i + 2 * g), two(2 * step + 1, 16 * i + 2 * g)));
  }
};

// Byte i has code i in its lower, and 16 + i in its upper half.
struct Q4_0 {
  static constexpr int block_bytes = q4_0_bytes;

  template <class Word>
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], Word&& word, int t) {
    halves_of_keys<false>(a, word(0, 4 * t), word(1, 4 * t));
  }
  template <class Two>
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], Two&& two, int g) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const unsigned w = join(two(2 * step, 2 * g), two(2 * step + 1, 2 * g));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[0][2 * step + half] = pair_of_lower<false>(w >> 8 * half);
        a[1][2 * step + half] = pair_of_upper<false>(w >> 8 * half);
      }
    }
  }
};

// A warp's rows of this many columns in blocks, which lie `pitch` bytes apart.
template <class Block, int columns>
struct BlockRows {
  static constexpr int blocks = columns / 32, bytes = blocks * Block::block_bytes;
  static __device__ constexpr int scale_at(int block) { return block * Block::block_bytes; }

  // Block n. rows: of keys g and g + 8.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], const unsigned (&rows)[2],
                                                int n, int t) {
    const auto word = [&](int key, int at) {
      const unsigned from = rows[key] + scale_at(n) + 2 + at;
      if (n % 2 == 1) return ptx::load_shared(from);
      return __byte_perm(ptx::load_shared(from - 2), ptx::load_shared(from + 2), 0x5432);
    };
    Block::load_k(a, word, t);
  }
  static __device__ __forceinline__ float2 k_scales(const unsigned (&rows)[2], int n) {
    return {F16::unpack(ptx::load_shared_half(rows[0] + scale_at(n))),
            F16::unpack(ptx::load_shared_half(rows[1] + scale_at(n)))};
  }
  // rows: of keys v_key(i).
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], const unsigned (&rows)[4],
                                                int n, int g) {
    const auto two = [&](int i, int at) {
      return ptx::load_shared_half(rows[i] + scale_at(n) + 2 + at);
    };
    Block::load_v(a, two, g);
  }
  // The scales of keys 2t and 2t + 1 (step 0), or of 2t + 8 and 2t + 9.
  static __device__ __forceinline__ unsigned v_scales(const unsigned (&rows)[4], int n, int step) {
    return join(ptx::load_shared_half(rows[2 * step] + scale_at(n)),
                ptx::load_shared_half(rows[2 * step + 1] + scale_at(n)));
  }
};

// Rows of this many bytes in panels.
template <int row_bytes>
struct CodePanels {
  static constexpr int pitch = panels_of(row_bytes).pitch, chunks = pitch / 16;

  static __device__ __forceinline__ int swizzle(int row) { return row * pitch / 128 % chunks * 16; }
  // A chunk's address from that of chunk 0, which a lane may have advanced within a chunk or to the
  // next one.
  static __device__ __forceinline__ unsigned chunk(unsigned row, int n) {
    return (row ^ n % chunks * 16) + n / chunks * unit_keys * pitch;
  }
  // Where a lane's address of ldmatrix is: of matrices keys 0 to 7 and 8 to 15 of a chunk, then of
  // the next one.
  static __device__ __forceinline__ unsigned of_matrices(unsigned rows, int lane) {
    const int key = lane % 16;
    return rows + key * pitch + (swizzle(key) ^ lane / 16 * 16);
  }
};

// Byte i is code i: a chunk is 16 columns.
template <int columns>
struct I8 {
  using P = CodePanels<columns>;

  // 64 columns from 64n on, of 32 each.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][2][4], unsigned k, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned w[4];
      ptx::ldmatrix(w, P::chunk(k, 4 * n + 2 * i));
      bytes_of_keys(a[i][0], w[0], w[1]);
      bytes_of_keys(a[i][1], w[2], w[3]);
    }
  }
  static __device__ __forceinline__ unsigned v_lane(unsigned rows, int lane) {
    return P::of_matrices(rows, lane);
  }
  // 32 columns from 32n on.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n, int) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, P::chunk(v, 2 * n));
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes_of_columns(a[i / 2], i % 2, w[i]);
  }
};

// Byte i has code 2i in its lower, and 2i + 1 in its upper half: a chunk is 32 columns.
template <int columns>
struct I4 {
  using P = CodePanels<columns / 2>;

  static __device__ __forceinline__ void load_k(unsigned (&a)[2][2][4], unsigned k, int n) {
    unsigned w[4];
    ptx::ldmatrix(w, P::chunk(k, 2 * n));
#pragma unroll
    for (int i = 0; i < 2; ++i) halves_of_keys<true>(a[i], w[2 * i], w[2 * i + 1]);
  }
  // Of keys 2t and 2t + 1: the words with byte g of a chunk, which are pitch apart but for the
  // swizzle that both have.
  static __device__ __forceinline__ unsigned v_lane(unsigned rows, int lane) {
    const int key = lane % 4 * 2;
    return rows + key * P::pitch + (P::swizzle(key) ^ lane / 16 * 4);
  }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n, int g) {
    // Where the keys' lines of 128 bytes differ, so do their swizzles.
    const unsigned x_at = P::chunk(v, n),
                   y_at = (P::pitch == panel_pitch ? x_at ^ 16 : x_at) + P::pitch;
    const unsigned own_bytes = g % 4 | (4 + g % 4) << 8;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = step * 8 * P::pitch;
        // Byte g of both, as bytes 0 and 2.
        const unsigned both = __byte_perm(ptx::load_shared((x_at ^ 8 * i) + at),
                                          ptx::load_shared((y_at ^ 8 * i) + at), own_bytes);
        a[i][2 * step] = pair_of_lower<true>(both);
        a[i][2 * step + 1] = pair_of_upper<true>(both);
      }
  }
};

// V of 16 bits, from panels of 128 bytes of each row. v: the warp's rows.
struct PlainRows {
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const auto two_columns = [&](int key) {
          const int tile = 2 * n + i;
          return ptx::load_shared(v + tile / 4 * panel_bytes +
                                  chunk_offset<panel_pitch>(key, tile % 4 * 2 + g / 4) + g % 4 * 4);
        };
        const unsigned x = two_columns(2 * t + 8 * step), y = two_columns(2 * t + 8 * step + 1);
        a[i][2 * step] = join(x, y);
        a[i][2 * step + 1] = __byte_perm(x, y, 0x7632);
      }
  }
};

// Scales of i8 and i4 are in a word for each key and head. Which half of it follows from the first
// one's half (bit 0 of `halves`), and from whether those of keys (bit 1) and of heads (bit 2) are
// an odd number of scales apart.
__device__ __forceinline__ int half_of_key(int halves, int key, int head) {
  return (halves ^ (halves >> 1 & key) ^ (halves >> 2 & head)) & 1;
}
// The scales of keys g and g + 8, the first one at `from`.
__device__ __forceinline__ float2 k_key_scales(unsigned from) {
  return {F16::unpack(ptx::load_shared_half(from)), F16::unpack(ptx::load_shared_half(from + 32))};
}
// The scales of keys 2t and 2t + 1 (step 0), whose words are at `from`, or of 2t + 8 and 2t + 9.
__device__ __forceinline__ unsigned v_key_scales(unsigned from, unsigned select, int step) {
  const uint2 words = ptx::load_shared_pair(from + 32 * step);
  return __byte_perm(words.x, words.y, select);
}
__device__ __forceinline__ unsigned select_of_halves(int halves, int head) {
  return (half_of_key(halves, 0, head) ? 0x32 : 0x10) |
         (half_of_key(halves, 1, head) ? 0x7600 : 0x5400);
}

// K and V of each segment have types of their own.
struct OwnTypes {
  using Product = F16;
  static constexpr int bytes = 2;
  static constexpr bool scaled = true, own_types = true;
};

}  // namespace attn::decode
