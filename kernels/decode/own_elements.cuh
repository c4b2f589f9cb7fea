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
// of their own, one for each key and head. f8_e4m3fn_token is like i8, with scales in float32;
// nvfp4 like i4, with one for each 16 columns.
#pragma once
#include "../common/element.cuh"
#include "../common/iq4_nl.cuh"
#include "../ptx/convert_fp8.h"
#include "../ptx/f16x2.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/load_shared.h"
#include "../ptx/lop3.h"
#include "../shared/swizzle.h"
#include "decode_tiles.h"
#include "elements.cuh"
#include "own_tiles.h"

namespace attn::decode {

// The order of K's columns in what a lane has of 32: word i of its four is columns t * lane +
// i % 2 * odd + i / 2 * upper + half * other, half 0 and 1.
struct KeyOrder {
  int lane, odd, upper, other;
};
constexpr unsigned long long key_orders = of_types([](int t) {
  return t == attn_element_i4 || t == attn_element_nvfp4 ? 1 : t == attn_element_iq4_nl ? 2 : 3;
});
__device__ __forceinline__ KeyOrder key_order(int type) {
  // A byte each of q's type, of i4 and nvfp4, of iq4_nl, and of all others.
  const int at = type < attn_element_q8_0 ? 0 : 8 * of_type(key_orders, type);
  return {0x04040802 >> at & 0xff, 0x01020208 >> at & 0xff, 0x10100110 >> at & 0xff,
          0x02010401 >> at & 0xff};
}

// V's codes become numbers in f16: pairs of bytes 0 and 2 of a word, or of these bytes' halves. The
// bits that a number of 1024 or more begins with are `high`: they have a fifth bit too, and turn
// two's complement into a code from 0 on.
constexpr unsigned high = 0x64006400;  // 1024
__device__ __forceinline__ unsigned pair_of_bytes(unsigned w) {
  return ptx::add_f16x2(ptx::and_xor(w, 0x00ff00ff, high ^ 0x00800080), 0xe480e480);
}
template <int offset>
__device__ __forceinline__ unsigned pair_of_lower(unsigned w, unsigned high) {
  return ptx::add_f16x2(ptx::and_xor(w, 0x000f000f, high),
                        0xe400e400 + offset * 0x00010001);  // 1024 + x - (1024 + offset)
}
template <int offset>
__device__ __forceinline__ unsigned pair_of_upper(unsigned w, unsigned high) {
  return ptx::fma_f16x2(ptx::and_xor(w, 0x00f000f0, high), 0x2c002c00,
                        0xd400d400 + offset * 0x00100010);  // (1024 + 16x) / 16 - (64 + offset)
}
// K's codes become numbers below f16's normal ones by one instruction each: 2^-24 times the code,
// or 2^-20 times in upper halves, for which Q's columns have factors (column_factor()). Codes are
// code_offset() too large, which is taken from the product.
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
// Of a key's fifth bits, from the lane's first column on: columns 0 to 3 have bits 0 to 3, columns
// 16 to 19 bits 16 to 19.
__device__ __forceinline__ void add_fifth_bits(unsigned (&a)[2][4], int key, unsigned bits) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    // All four twice, so that those of columns 0 and 2, or 1 and 3, are 16 bits apart.
    const int to = upper ? 8 : 4;
    const unsigned twice = (bits >> 16 * upper & 15) * (1u << to | 1u << (to + 14));
#pragma unroll
    for (int i = 0; i < 2; ++i) a[upper][2 * i + key] |= twice >> i & 0x00010001u << to;
  }
}
__device__ __forceinline__ constexpr bool below_normal(int type) {
  return type == attn_element_i4 || type == attn_element_nvfp4 ||
         (is_ggml(type) && type != attn_element_q8_0);
}
ATTN_HOST_DEVICE constexpr int code_offset(int type) {
  if (type == attn_element_i4) return 8;
  return type == attn_element_iq4_nl ? 128 : block_layout(type).offset;
}
// What a column of Q is multiplied with, in [1, 2) before: the smallest that 1 / 16 of it is as
// exact; of nvfp4, whose elements have 2^-14 of their value, with nothing. The scores then have
// 2^-14 of their value.
__device__ __forceinline__ constexpr float column_factor(int type, bool upper) {
  if (type == attn_element_nvfp4) return 1;
  return upper && type != attn_element_iq4_nl ? 64 : 1024;
}
constexpr float scores_factor = 1 << 14;
// What the sum of Q's columns is multiplied with: with the offset, or for K's minimum.
constexpr unsigned long long log2_offsets = of_types([](int t) {
  int log2 = 0;
  while (code_offset(t) >> log2 > 1) ++log2;
  return log2;
});
__device__ __forceinline__ float columns_factor(int type) {
  const int log2 = of_type(log2_offsets, type);
  return (log2 ? -float(1 << log2) : 1) / scores_factor;
}
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

// ggml's blocks. What a lane reads of one is at bytes counted from its first:
// word(key, at): four bytes of key g (key 0) or g + 8, of V of key v_key(key);
// two(i, at): two bytes of key v_key(i).
template <int of_type>
struct Block {
  static constexpr int type = of_type;
  static constexpr BlockLayout layout = block_layout(type);
  static constexpr int codes = layout.codes_at();
};
struct Q8_0 : Block<attn_element_q8_0> {
  template <class Word>
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], Word&& word, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = codes + 16 * i + 4 * t;
      bytes_of_keys(a[i], word(0, at), word(1, at));
    }
  }
  template <class Two, class Word>
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], Two&& two, Word&&, int g) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = codes + 16 * i + 2 * g;
        bytes_of_columns(a[i], step, join(two(2 * step, at), two(2 * step + 1, at)));
      }
  }
};

// q4_0, q4_1, q5_0, q5_1. Byte i has code i in its lower, and 16 + i in its upper half.
template <int type>
struct Halves : Block<type> {
  using Block<type>::layout, Block<type>::codes;
  static constexpr int offset = layout.offset;

  template <class Word>
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], Word&& word, int t) {
    halves_of_keys<false>(a, word(0, codes + 4 * t), word(1, codes + 4 * t));
    if constexpr (layout.has_bit) {
#pragma unroll
      for (int key = 0; key < 2; ++key)
        add_fifth_bits(a, key, word(key, layout.bits_at()) >> 4 * t);
    }
  }
  template <class Two, class Word>
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], Two&& two, Word&& word,
                                                int g) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const unsigned w = join(two(2 * step, codes + 2 * g), two(2 * step + 1, codes + 2 * g));
      unsigned bits[2] = {};  // of both keys: of columns 0 to 15, and of 16 to 31
      if constexpr (layout.has_bit) {
        const unsigned x = word(2 * step, layout.bits_at()),
                       y = word(2 * step + 1, layout.bits_at());
        bits[0] = join(x, y);
        bits[1] = __byte_perm(x, y, 0x7632);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // With the bit of column 2g + half at bit `to`.
        const auto with_bit = [&](unsigned bits, int to) {
          if (!layout.has_bit) return high;
          return ptx::and_or(__funnelshift_r(bits, bits, 2 * g + half - to), 0x00010001u << to,
                             high);
        };
        a[0][2 * step + half] = pair_of_lower<offset>(w >> 8 * half, with_bit(bits[0], 4));
        a[1][2 * step + half] = pair_of_upper<offset>(w >> 8 * half, with_bit(bits[1], 8));
      }
    }
  }
};
using Q4_0 = Halves<attn_element_q4_0>;
using Q4_1 = Halves<attn_element_q4_1>;
using Q5_0 = Halves<attn_element_q5_0>;
using Q5_1 = Halves<attn_element_q5_1>;

// The same with codes that are places in a table of bytes.
struct Iq4Nl : Block<attn_element_iq4_nl> {
  // Of bytes 0 and 1, then of 2 and 3: what the table has for the lower half, then for the upper.
  static __device__ __forceinline__ void look_up(unsigned (&to)[2], unsigned w) {
    constexpr unsigned table[] = {iq4_nl_word(0), iq4_nl_word(4), iq4_nl_word(8), iq4_nl_word(12)};
    const unsigned which = ptx::and_or(w >> 1, 0x44444444, 0x32103210);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned code = w >> 16 * i & 0x7777;
      to[i] = __byte_perm(__byte_perm(table[0], table[1], code),
                          __byte_perm(table[2], table[3], code), which >> 16 * i);
    }
  }
  template <class Word>
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], Word&& word, int t) {
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      unsigned x[2];
      look_up(x, word(key, codes + 4 * t));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          a[upper][2 * i + key] = ptx::and_xor(x[i] >> 8 * upper, 0x00ff00ff, 0x00800080);
    }
  }
  template <class Two, class Word>
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], Two&& two, Word&&, int g) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      // Byte 2g of both keys, then 2g + 1.
      unsigned x[2];
      look_up(x,
              __byte_perm(two(2 * step, codes + 2 * g), two(2 * step + 1, codes + 2 * g), 0x5140));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          a[upper][2 * step + half] = pair_of_bytes(x[half] >> 8 * upper);
    }
  }
};
// Calls body() with ggml's type; false if it is another.
template <class Body>
__device__ __forceinline__ bool with_block(int type, Body&& body) {
  if (type == attn_element_q8_0)
    body(Q8_0());
  else if (type == attn_element_q4_0)
    body(Q4_0());
  else if (type == attn_element_q4_1)
    body(Q4_1());
  else if (type == attn_element_q5_0)
    body(Q5_0());
  else if (type == attn_element_q5_1)
    body(Q5_1());
  else if (type == attn_element_iq4_nl)
    body(Iq4Nl());
  else
    return false;
  return true;
}

// Of keys g and g + 8.
struct KeyScales {
  float2 scale, min;
};
// A warp's rows of this many columns in blocks.
template <class Block, int columns>
struct BlockRows {
  static constexpr BlockLayout layout = Block::layout;
  static constexpr int blocks = columns / 32, bytes = blocks * layout.size();
  static __device__ constexpr int scale_at(int block) { return block * layout.size(); }

  // Four bytes of block n. Codes of even blocks may begin between words, as fifth bits then do.
  static __device__ __forceinline__ unsigned word(unsigned row, int n, int at) {
    const unsigned from = row + scale_at(n) + at;
    if ((scale_at(n) + layout.codes_at()) % 4 == 0) return ptx::load_shared(from);
    return __byte_perm(ptx::load_shared(from - 2), ptx::load_shared(from + 2), 0x5432);
  }
  static __device__ __forceinline__ unsigned two(unsigned row, int n, int at) {
    return ptx::load_shared_half(row + scale_at(n) + at);
  }
  // rows: of keys g and g + 8.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], const unsigned (&rows)[2],
                                                int n, int t) {
    Block::load_k(a, [&](int key, int at) { return word(rows[key], n, at); }, t);
  }
  static __device__ __forceinline__ KeyScales k_scales(const unsigned (&rows)[2], int n) {
    if (!layout.has_min)
      return {{F16::unpack(two(rows[0], n, 0)), F16::unpack(two(rows[1], n, 0))}, {0, 0}};
    const unsigned x = ptx::load_shared(rows[0] + scale_at(n)),
                   y = ptx::load_shared(rows[1] + scale_at(n));
    return {{F16::unpack(x & 0xffff), F16::unpack(y & 0xffff)},
            {F16::unpack(x >> 16), F16::unpack(y >> 16)}};
  }
  // rows: of keys v_key(i).
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], const unsigned (&rows)[4],
                                                int n, int g) {
    Block::load_v(
        a, [&](int i, int at) { return two(rows[i], n, at); },
        [&](int i, int at) { return word(rows[i], n, at); }, g);
  }
  // Of keys 2t and 2t + 1 (step 0), or of 2t + 8 and 2t + 9, the halves at byte `at` of the block:
  // scales at 0, minima at 2.
  static __device__ __forceinline__ unsigned v_scales(const unsigned (&rows)[4], int n, int step,
                                                      int at = 0) {
    return join(two(rows[2 * step], n, at), two(rows[2 * step + 1], n, at));
  }
};

// In OwnUnit::types, of codes: rows have several heads, and so have those of nvfp4's scales.
constexpr int own_joint_heads = 8, own_joint_scales = 16;

// Where a lane's address of ldmatrix is: of matrices keys 0 to 7 and 8 to 15 of a chunk, then of
// the next one. Rows of one panel are `pitch` apart, and a head's begin at byte `column` of them.
__device__ __forceinline__ unsigned lane_of_matrices(unsigned rows, int lane, int pitch,
                                                     int column) {
  const int key = lane % 16, swizzle = key * pitch / 128 * 16 & (pitch - 16);
  return rows + key * pitch + (swizzle ^ column ^ lane / 16 * 16);
}
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
  static __device__ __forceinline__ unsigned of_matrices(unsigned rows, int lane) {
    return lane_of_matrices(rows, lane, pitch, 0);
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
  // 32 columns from 32n on.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n, int) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, P::chunk(v, 2 * n));
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes_of_columns(a[i / 2], i % 2, w[i]);
  }
};

// The same of e4m3.
template <int columns>
struct E4m3Codes : I8<columns> {
  using typename I8<columns>::P;

  // Bytes 0 and 2, then 1 and 3.
  static __device__ __forceinline__ void two_pairs(unsigned w, unsigned* even, unsigned* odd) {
    ptx::f16_of_e4m3_word(__byte_perm(w, 0, 0x3120), even, odd);
  }
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][2][4], unsigned k, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned w[4];
      ptx::ldmatrix(w, P::chunk(k, 4 * n + 2 * i));
#pragma unroll
      for (int j = 0; j < 4; ++j) two_pairs(w[j], &a[i][j / 2][j % 2], &a[i][j / 2][2 + j % 2]);
    }
  }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n, int) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, P::chunk(v, 2 * n));
#pragma unroll
    for (int i = 0; i < 4; ++i) two_pairs(w[i], &a[i / 2][i % 2 * 2], &a[i / 2][i % 2 * 2 + 1]);
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
        a[i][2 * step] = pair_of_lower<8>(both, high ^ 0x00080008);
        a[i][2 * step + 1] = pair_of_upper<8>(both, high ^ 0x00800080);
      }
  }
  // The same where V of each segment is i4 or nvfp4: then rows g and g + 8 of tiles 2n and 2n + 1
  // are columns 32n + 4g to 32n + 4g + 3, so that a matrix has four codes of a key as one element.
  // 64 columns from 64n on, 32 each. v: as of K.
  static __device__ __forceinline__ void load_v_by_fours(unsigned (&a)[2][2][4], unsigned v,
                                                         int n) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, P::chunk(v, 2 * n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const unsigned codes = w[2 * i + step] >> 8 * two;
          a[i][two][2 * step] = pair_of_lower<8>(codes, high ^ 0x00080008);
          a[i][two][2 * step + 1] = pair_of_upper<8>(codes, high ^ 0x00800080);
        }
  }
};

// Codes as in I4, e2m1, and a scale in e4m3 for each 16 columns: byte n of a key's row of scales.
// A code in f16's bits with the exponent's low two is 2^-14 times its value, exactly, and so is its
// product with a scale: both have few digits, and none is below f16's last one, 2^-24.
template <int columns>
struct NvFp4 {
  using P = CodePanels<columns / 2>;
  static constexpr int scale_row = key_scale_bytes(attn_element_nvfp4, columns);

  // Of a key, a word of 64 columns each.
  using Scales = unsigned[columns / 64];
  static __device__ __forceinline__ void load_scales(Scales& to, unsigned from) {
    if constexpr (columns == 64) {
      to[0] = ptx::load_shared(from);
    } else {
#pragma unroll
      for (int i = 0; i < columns / 64; i += 2) {
        const uint2 two = ptx::load_shared_pair(from + 4 * i);
        to[i] = two.x, to[i + 1] = two.y;
      }
    }
  }
  // Bytes between keys. more: as in OwnUnit::types.
  static __device__ __forceinline__ int scale_pitch(unsigned more) {
    return more & own_joint_scales ? scale_row * heads_of_scales(columns) : scale_row;
  }

  // x[i]: of both halves of a word code i, 2^-14 of its value. A sign and the bits of its magnitude
  // are three further apart in f16 than in the code, so half of the codes are spread at once, to
  // where the other half was, and one shift then brings sign and magnitude to their places.
  static __device__ __forceinline__ void spread(unsigned (&x)[4], unsigned w) {
    constexpr unsigned even = 0x0f0f0f0f, in_place = 0x8e008e00;
    const unsigned moved = __funnelshift_r(w, w, 3), evens = ptx::bit_select(even, w, moved),
                   odds = ptx::bit_select(even, moved, w);
    x[0] = __funnelshift_r(evens, evens, 20) & in_place;
    x[1] = odds << 8 & in_place;
    x[2] = evens << 4 & in_place;
    x[3] = odds & in_place;
  }
  // Scales of a key that a lane needs, each twice: of its columns in two times 32, 8 of each.
  // of_key: of 64.
  static __device__ __forceinline__ void k_scales(unsigned (&scales)[2], unsigned of_key, int t) {
    ptx::f16_of_e4m3_word(__byte_perm(of_key, 0, t < 2 ? 0x2200 : 0x3311), &scales[0], &scales[1]);
  }
  // 32 columns. x, y: the lane's codes of keys g and g + 8; scales: of k_scales().
  static __device__ __forceinline__ void take_k(unsigned (&a)[2][4], unsigned x, unsigned y,
                                                unsigned x_scale, unsigned y_scale) {
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      unsigned codes[4];
      spread(codes, key == 0 ? x : y);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[j % 2][j / 2 * 2 + key] = ptx::mul_f16x2(codes[j], key == 0 ? x_scale : y_scale);
    }
  }
  // As of I4. scales: of keys v_key(i), of these columns.
  static __device__ __forceinline__ void load_v_by_fours(unsigned (&a)[2][2][4], unsigned v,
                                                         const unsigned (&scales)[4], int n,
                                                         int g) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, P::chunk(v, 2 * n));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      unsigned scale[2];
      ptx::f16_of_e4m3_word(
          __byte_perm(scales[2 * step], scales[2 * step + 1], g < 4 ? 0x6240 : 0x7351), &scale[0],
          &scale[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned codes[4];
        spread(codes, w[2 * i + step]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[i][j / 2][2 * step + j % 2] = ptx::mul_f16x2(codes[j], scale[i]);
      }
    }
  }
  // 32 columns from 32n on; v: as of I4. scales: of keys v_key(i), of columns 64 * (n / 2) on.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v,
                                                const unsigned (&scales)[4], int n, int g) {
    const unsigned own_bytes = g % 4 | (4 + g % 4) << 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned x_at = P::chunk(v, n) ^ 8 * i,
                     y_at = (P::pitch == panel_pitch ? x_at ^ 16 : x_at) + P::pitch;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = step * 8 * P::pitch;
        // Byte g of both, as bytes 0 and 2.
        const unsigned both = __byte_perm(ptx::load_shared(x_at + at), ptx::load_shared(y_at + at),
                                          own_bytes),
                       scale = ptx::f16_of_e4m3((unsigned short)__byte_perm(
                           scales[2 * step], scales[2 * step + 1], 0x40 + (n % 2 * 2 + i) * 0x11));
        unsigned codes[4];
        spread(codes, both);
        a[i][2 * step] = ptx::mul_f16x2(codes[0], scale);
        a[i][2 * step + 1] = ptx::mul_f16x2(codes[1], scale);
      }
    }
  }
};
constexpr float nvfp4_factor = 1 << 14;  // makes elements of such products

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
