// K and V as matrix instructions take them, from a warp's 16 keys in shared memory. The order of
// K's columns is free as long as Q's is the same, that of V's rows as long as what stores them
// knows.
#pragma once
#include "../common/element.cuh"
#include "../ptx/convert_fp8.h"
#include "../ptx/ldmatrix.h"
#include "../shared/swizzle.h"
#include "decode_tiles.h"

namespace attn::decode {

using namespace device;

constexpr int panel_bytes = unit_keys * panel_pitch;

// Where rows go on, an even number of chunks of 16 bytes further. Computed where it is used, for
// there are few registers.
__device__ __forceinline__ unsigned advance(unsigned at, int chunks) {
  return (at ^ chunks % 8 * 16) + chunks / 8 * panel_bytes;
}

// 16 bits, of Q's type.
template <class T>
struct Same {
  using Product = T;
  static constexpr int bytes = 2;
  static constexpr bool scaled = false;  // with descales, and rows of Q that have factors
  static constexpr bool own_types = false;

  // What a lane adds to the address of a warp's rows of K and of V for what follows.
  static __device__ __forceinline__ unsigned k_lane(int lane) {
    return chunk_offset<panel_pitch>(lane % 16, lane / 16);
  }
  static __device__ __forceinline__ unsigned v_lane(int lane) {
    return chunk_offset<panel_pitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  // Tiles n and n + 1 of 16 columns: of Q those at 2t and 2t + 8, two each, t = lane % 4.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned k, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::ldmatrix(a[i], advance(k, 2 * (n + i)));
  }
  // Rows are columns of V: row r of tile n is column 16n + r.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::ldmatrix_transposed(a[i], advance(v, 2 * (n + i)));
  }
  static __device__ __forceinline__ int v_column(int n, int half, int lane) {
    return 16 * n + 8 * half + lane / 4;
  }
};

struct E4M3 {
  static __device__ __forceinline__ unsigned pair(unsigned short codes) {
    return ptx::f16_of_e4m3(codes);
  }
  static __device__ __forceinline__ void pairs(unsigned word, unsigned* low, unsigned* high) {
    ptx::f16_of_e4m3_word(word, low, high);
  }
};
struct E5M2 {
  static __device__ __forceinline__ unsigned pair(unsigned short codes) {
    return ptx::f16_of_e5m2(codes);
  }
  static __device__ __forceinline__ void pairs(unsigned word, unsigned* low, unsigned* high) {
    ptx::f16_of_e5m2_word(word, low, high);
  }
};

// 8 bits, which become f16, which has all their values.
struct Words {
  using Product = F16;
  static constexpr int bytes = 1;
  static constexpr bool scaled = true;
  static constexpr bool own_types = false;
  static __device__ __forceinline__ unsigned k_lane(int lane) {
    return chunk_offset<panel_pitch>(lane % 16, lane / 16);
  }
  // Of tiles n and n + 1, to be converted.
  static __device__ __forceinline__ void load_k(unsigned (&words)[4], unsigned k, int n) {
    ptx::ldmatrix(words, advance(k, n));
  }
};

// The same of one type, converted.
template <class Code>
struct Fp8 {
  using Product = F16;
  static constexpr int bytes = 1;
  static constexpr bool scaled = true;
  static constexpr bool own_types = false;
  static __device__ __forceinline__ unsigned pair(unsigned short codes) {
    return Code::pair(codes);
  }
  static __device__ __forceinline__ void pairs(unsigned word, unsigned* low, unsigned* high) {
    Code::pairs(word, low, high);
  }

  static __device__ __forceinline__ unsigned k_lane(int lane) {
    return chunk_offset<panel_pitch>(lane % 16, lane / 16);
  }
  static __device__ __forceinline__ unsigned v_lane(int lane) { return k_lane(lane); }
  // Tiles n and n + 1 of 16 columns: of Q those at 4t and 4t + 2, two each.
  static __device__ __forceinline__ void load_k(unsigned (&a)[2][4], unsigned k, int n) {
    unsigned w[4];
    ptx::ldmatrix(w, advance(k, n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Code::pairs(w[2 * i + half], &a[i][half], &a[i][2 + half]);
  }
  // Words of ldmatrix hold columns 2g and 2g + 1 of two keys, g = lane / 4: row g of tile n is
  // column 16n + 2g, row g + 8 the one behind it.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, advance(v, n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int keys = 0; keys < 2; ++keys)
        Code::pairs(__byte_perm(w[2 * i + keys], 0, 0x3120), &a[i][2 * keys], &a[i][2 * keys + 1]);
  }
  static __device__ __forceinline__ int v_column(int n, int half, int lane) {
    return 16 * n + 2 * (lane / 4) + half;
  }
};

}  // namespace attn::decode
