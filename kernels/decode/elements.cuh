// K and V as matrix instructions take them, from a warp's 16 keys in shared memory. The order of
// K's columns is free as long as Q's is the same, that of V's rows as long as what stores them
// knows.
#pragma once
#include "../common/element.cuh"
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

// A row of Q, which 8 lanes share, to f16 for fp8 K. f16 has fewer exponents than bf16: each row by
// a power of two, so that its largest value is in [1, 2). What is lost is below 2^-25 of that.
// Returns what undoes it. words(f): calls f with each of the lane's pairs.
template <class Words>
__device__ __forceinline__ float q_to_f16(int q_type, Words&& words) {
  const auto value = [&](unsigned pair, int half) {
    const unsigned short bits = pair >> 16 * half;
    return q_type == attn_element_f16 ? F16::unpack(bits) : BF16::unpack(bits);
  };
  float most = 0;
  words([&](unsigned pair) {
    most = fmaxf(most, fmaxf(fabsf(value(pair, 0)), fabsf(value(pair, 1))));
  });
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
    most = fmaxf(most, __shfl_xor_sync(__activemask(), most, step));
  const int exponent = __float_as_int(most) >> 23;
  const bool usual = exponent > 0 && exponent < 254;
  const float factor = usual ? __int_as_float((254 - exponent) << 23) : 1;
  words(
      [&](unsigned& pair) { pair = F16::pack(value(pair, 0) * factor, value(pair, 1) * factor); });
  return usual ? __int_as_float(exponent << 23) : 1;
}

// 8 bits, as f16, which has all their values.
template <unsigned (*convert)(unsigned short)>
struct Fp8 {
  using Product = F16;
  static constexpr int bytes = 1;
  static constexpr bool scaled = true;
  static __device__ __forceinline__ unsigned pair(unsigned short codes) { return convert(codes); }

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
      for (int half = 0; half < 2; ++half) {
        a[i][half] = convert(w[2 * i + half] & 0xffff);
        a[i][2 + half] = convert(w[2 * i + half] >> 16);
      }
  }
  // Words of ldmatrix hold columns 2g and 2g + 1 of two keys, g = lane / 4: row g of tile n is
  // column 16n + 2g, row g + 8 the one behind it.
  static __device__ __forceinline__ void load_v(unsigned (&a)[2][4], unsigned v, int n) {
    unsigned w[4];
    ptx::ldmatrix_transposed(w, advance(v, n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int keys = 0; keys < 2; ++keys) {
        const unsigned columns = __byte_perm(w[2 * i + keys], 0, 0x3120);
        a[i][2 * keys] = convert(columns & 0xffff);
        a[i][2 * keys + 1] = convert(columns >> 16);
      }
  }
  static __device__ __forceinline__ int v_column(int n, int half, int lane) {
    return 16 * n + 2 * (lane / 4) + half;
  }
};

}  // namespace attn::decode
