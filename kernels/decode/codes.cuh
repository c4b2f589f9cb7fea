// i8 and i4, with scales in a separate array, one for each key and head, as operands of matrix
// instructions: codes become integers in f16, exactly. K's scales are multiplied with the scores,
// V's with the weights.
//
// In shared memory a key's row consists of panels of 32, 64 or 128 bytes, whose chunks of 16 bytes
// are swizzled as TMA does it. V's columns are in the order of ggml's blocks (blocks.cuh), because
// one call may have segments of both.
#pragma once
#include "blocks.cuh"

namespace attn::decode {

// Rows of this many bytes.
template <int row_bytes>
struct CodePanels {
  static constexpr int pitch = panels_of(row_bytes).pitch, chunks = pitch / 16;

  static __device__ __forceinline__ int swizzle(int row) { return row * pitch / 128 % chunks * 16; }
  // A chunk's address from that of chunk 0, which a lane may have advanced within a chunk or to the
  // next one.
  static __device__ __forceinline__ unsigned chunk(unsigned row, int n) {
    return (row ^ n % chunks * 16) + n / chunks * unit_keys * pitch;
  }
  // A place within chunks 0 and 1 of keys 2t and 2t + 1.
  static __device__ __forceinline__ uint2 of_two_keys(unsigned rows, int lane, int within) {
    const int key = lane % 4 * 2;
    return make_uint2(rows + key * pitch + (swizzle(key) ^ within),
                      rows + (key + 1) * pitch + (swizzle(key + 1) ^ within));
  }
};

// Byte i is code i.
template <int columns>
struct I8 {
  static constexpr int image = 2;  // of Q
  using P = CodePanels<columns>;

  // The chunk, and the word in it, of each of the 8 pairs in 16 columns of Q, number `step`.
  static __device__ __forceinline__ int q_chunk(int step, int pair) { return 2 * step + pair % 2; }
  static __device__ __forceinline__ int q_word(int pair) { return pair / 2; }

  // A lane's address in a warp's rows of K, and the 32 columns from there: tiles n and n + 1 of 16.
  static __device__ __forceinline__ unsigned k_lane(int lane) {
    const int key = lane % 16;
    return key * P::pitch + (P::swizzle(key) ^ lane / 16 * 16);
  }
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned k, int n) {
    unsigned w[4];
    ptx::ldmatrix(w, P::chunk(k, n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned codes = w[2 * i + half] ^ 0x80808080;
        a[i][half] = Q8_0::low(codes);
        a[i][2 + half] = Q8_0::high(codes);
      }
  }

  // Block n of keys 2t, 2t + 1, 2t + 8 and 2t + 9; v: the rows of the first two.
  static __device__ __forceinline__ uint2 v_lane(unsigned rows, int lane) {
    return P::of_two_keys(rows, lane, lane / 16 * 16 ^ lane / 4 % 4 * 4);
  }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], uint2 v, int n, int lane) {
    const unsigned x_at = P::chunk(v.x, 2 * n), y_at = P::chunk(v.y, 2 * n);
    const int g = lane / 4 % 4;
    // In even blocks, the previous pair; before a chunk's first word, the chunk's last.
    const unsigned in_front = g * 4 ^ (g + 3) % 4 * 4;
#pragma unroll
    for (int keys = 0; keys < 2; ++keys) {
      const int at = keys * 8 * P::pitch;
      const unsigned x = ptx::load_shared(x_at + at), y = ptx::load_shared(y_at + at);
      unsigned both[2];
      if (n % 2 == 0) {
        both[0] = __byte_perm(ptx::load_shared((x_at ^ in_front) + at),
                              ptx::load_shared((y_at ^ in_front) + at), 0x7362);
        both[1] = __byte_perm(x, y, 0x5140);
      } else {
        both[0] = __byte_perm(x, y, 0x5140);
        both[1] = __byte_perm(x, y, 0x7362);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned codes = both[i] ^ 0x80808080;
        a[i][2 * keys] = Q8_0::low(codes);
        a[i][2 * keys + 1] = Q8_0::high(codes);
      }
    }
  }
};

// Byte i has code 2i in its low, and 2i + 1 in its high half.
template <int columns>
struct I4 {
  static constexpr int image = 3;
  using P = CodePanels<columns / 2>;

  // Codes of the low halves of bytes 0 and 2, of their high halves: 1024 + code + 8 - 1032.
  static __device__ __forceinline__ unsigned low(unsigned bytes) {
    return ptx::add_f16x2(ptx::and_xor(bytes, 0x000f000f, 0x64086408), 0xe408e408);
  }
  // (1024 + 16 * (code + 8)) / 16 - 72
  static __device__ __forceinline__ unsigned high(unsigned bytes) {
    return ptx::fma_f16x2(ptx::and_xor(bytes, 0x00f000f0, 0x64806480), 0x2c002c00, 0xd480d480);
  }

  // A lane's word has 8 codes; codes that are 4 apart become pairs. So element e of 32 columns of Q
  // is in chunk e % 4, word e / 8, half e % 8 / 4.
  static __device__ __forceinline__ int q_chunk(int e) { return e % 4; }
  static __device__ __forceinline__ int q_half(int e) { return e / 8 * 2 + e % 8 / 4; }

  // Keys g and g + 8.
  static __device__ __forceinline__ unsigned k_lane(int lane) {
    const int key = lane / 4;
    return key * P::pitch + (P::swizzle(key) ^ lane % 4 * 4);
  }
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned k, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned w = ptx::load_shared(P::chunk(k, n / 2) + half * 8 * P::pitch), x = w >> 8;
      a[0][half] = low(w);
      a[0][2 + half] = high(w);
      a[1][half] = low(x);
      a[1][2 + half] = high(x);
    }
  }

  static __device__ __forceinline__ uint2 v_lane(unsigned rows, int lane) {
    return P::of_two_keys(rows, lane, lane / 16 * 8 ^ lane / 8 % 2 * 4);
  }
  // Byte i of x and of y, in bytes 0 and 2.
  static __device__ __forceinline__ unsigned both_of(unsigned x, unsigned y, int i) {
    return __byte_perm(x, y, i | (4 + i) << 8);
  }
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], uint2 v, int n, int lane) {
    const unsigned x_at = P::chunk(v.x, n), y_at = P::chunk(v.y, n);
    // Of the 8 bytes of 16 columns this lane has byte 2g in even and 2g + 1 in odd blocks, and the
    // byte before it (before byte 0, the last), which is in the other word if g is even.
    const int g = lane / 4 % 4;
    const unsigned other = g % 2 == 0 ? 4 : 0;
#pragma unroll
    for (int keys = 0; keys < 2; ++keys) {
      const int at = keys * 8 * P::pitch;
      const unsigned x = ptx::load_shared(x_at + at), y = ptx::load_shared(y_at + at);
      unsigned both[2];
      if (n % 2 == 0) {
        both[0] = both_of(ptx::load_shared((x_at ^ other) + at),
                          ptx::load_shared((y_at ^ other) + at), (2 * g + 3) % 4);
        both[1] = both_of(x, y, 2 * g % 4);
      } else {
        both[0] = both_of(x, y, 2 * g % 4);
        both[1] = both_of(x, y, 2 * g % 4 + 1);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i][2 * keys] = low(both[i]);
        a[i][2 * keys + 1] = high(both[i]);
      }
    }
  }
};

// The words of a warp's scales. Which half of a word is a key's scale follows from the first key's
// half, and from whether the scales of keys are an odd number of scales apart.
struct KeyScales {
  unsigned words;  // address
  int halves;      // bit 0: of key 0; bit 1: odd

  __device__ __forceinline__ unsigned of(int key) const {
    return ptx::load_shared_half(words + 4 * key + ((halves ^ (halves >> 1 & key)) & 1) * 2);
  }
  // The scales of keys g and g + 8.
  __device__ __forceinline__ float2 k_scales(int lane) const {
    return {F16::unpack(of(lane / 4)), F16::unpack(of(lane / 4 + 8))};
  }
  // The scales of keys 2t and 2t + 1 (i 0), or of 2t + 8 and 2t + 9 (i 1).
  __device__ __forceinline__ unsigned v_scales(int lane, int i) const {
    const int key = lane % 4 * 2 + 8 * i;
    return of(key) | of(key + 1) << 16;
  }
};

}  // namespace attn::decode
