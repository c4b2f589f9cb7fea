// Loads of f32, f16 and bf16 elements, and stores of q8_0 and q4_0 blocks, bit for bit as
// core/dtype.h and core/ggml.h have them.
#pragma once
#include <cuda_fp16.h>

#include "../ptx/max.h"
#include "../shared/types.h"

namespace attn::device {

// Element `at`. A NaN of f16 loses its sign, as in core/dtype.h.
__device__ __forceinline__ float load_element(const void* base, int type, long long at) {
  if (type == attn_element_f32) return static_cast<const float*>(base)[at];
  const unsigned short bits = static_cast<const unsigned short*>(base)[at];
  if (type == attn_element_bf16) return __uint_as_float(unsigned(bits) << 16);
  return (bits & 0x7fff) > 0x7c00 ? __uint_as_float(0x7fc00000)
                                  : __half2float(__ushort_as_half(bits));
}

// Four neighbouring ones.
__device__ __forceinline__ void load_floats(const float* from, float* x) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// To nearest, by way of the divisor's inverse: Markstein's theorem.
__device__ __forceinline__ float divide(float x, float divisor, float inverse) {
  const float quotient = __fmul_rn(x, inverse);
  return fmaf(fmaf(-quotient, divisor, x), inverse, quotient);
}

// To float32: to nearest where that is what is stored, else to odd, after which rounding to fewer
// bits is as if it were the first.
__device__ __forceinline__ float narrow(double x, bool to_nearest) {
  if (to_nearest) return __double2float_rn(x);
  const float toward_zero = __double2float_rz(x);
  return toward_zero == x ? toward_zero : __uint_as_float(__float_as_uint(toward_zero) | 1);
}

// Four codes as the bytes of a word.
__device__ __forceinline__ unsigned pack_bytes(const int* code) {
  return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040),
                     0x5410);
}

// The ggml block that begins with element `at`.
__device__ __forceinline__ unsigned char* ggml_block(void* base, int type, long long at) {
  return static_cast<unsigned char*>(base) + at / 32 * (type == attn_element_q8_0 ? 34 : 18);
}

// The codes of a ggml block, of which each lane up to `last` has some. By all lanes of `group`. A
// block begins at an even address: where that of the codes is no multiple of 4, they move by half a
// word, and the first half word is the scale.
template <int words>
__device__ __forceinline__ void store_block(unsigned char* block, int lane, int lanes, int last,
                                            unsigned group, unsigned short scale,
                                            const unsigned (&word)[words]) {
  unsigned before = __shfl_up_sync(group, word[words - 1], 1, lanes);
  if (lane == 0) before = unsigned(scale) << 16;
  if (lane > last) return;
  unsigned char* const to = block + 2 + 4 * words * lane;
  const bool moves = reinterpret_cast<unsigned long long>(to) % 4 != 0;
  unsigned* const at = reinterpret_cast<unsigned*>(moves ? to - 2 : to);
#pragma unroll
  for (int i = 0; i < words; ++i)
    at[i] = moves ? __funnelshift_l(i == 0 ? before : word[i - 1], word[i], 16) : word[i];
  if (lane == (moves ? last : 0))
    *reinterpret_cast<unsigned short*>(moves ? to + 4 * words - 2 : block) =
        moves ? (unsigned short)(word[words - 1] >> 16) : scale;
}

// 32 / n neighbouring lanes, with n elements each, store one q8_0 or q4_0 block as encode_block of
// core/ggml.h does. n: 1, or a multiple of 4. Intrinsics are used where the compiler would fuse or
// approximate an operation. whole_warp: all lanes of a warp are here, and blocks that are not
// `there` are not stored; ptxas looks for the lanes of any other mask in each shuffle.
template <int n, bool whole_warp = false>
__device__ __forceinline__ void store_ggml(unsigned char* block, int type, const float (&x)[n],
                                           bool saturate, bool there = true) {
  constexpr int lanes = 32 / n;
  const int lane = threadIdx.x % lanes;
  const unsigned group =
      whole_warp ? 0xffffffffu : 0xffffffffu >> (32 - lanes) << (threadIdx.x % 32 - lane);
  const bool q8 = type == attn_element_q8_0;
  // NaN where there is one: the largest, of q8_0 of |x|, and the smallest.
  float high = q8 ? fabsf(x[0]) : x[0], low = x[0];
#pragma unroll
  for (int k = 1; k < n; ++k) {
    high = ptx::max_nan(high, q8 ? fabsf(x[k]) : x[k]);
    if (!q8) low = ptx::min_nan(low, x[k]);
  }
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) {
    high = ptx::max_nan(high, __shfl_xor_sync(group, high, step));
    if (!q8) low = ptx::min_nan(low, __shfl_xor_sync(group, low, step));
  }
  float d;
  if (q8) {
    d = divide(fminf(high, 1e30f), 127, 1.f / 127);
  } else {
    d = (high < -low ? low : high) * -0.125f;
    const bool tie = high == -low && high != 0;
    if (whole_warp ? __any_sync(group, tie) : tie) {
      int first = 64;  // of those: twice its number, and its sign
#pragma unroll
      for (int k = n - 1; k >= 0; --k)
        if (fabsf(x[k]) == high) first = 2 * (n * lane + k) + (signbit(x[k]) ? 1 : 0);
#pragma unroll
      for (int step = lanes / 2; step > 0; step /= 2)
        first = min(first, __shfl_xor_sync(group, first, step));
      d = tie && first % 2 != 0 ? -d : d;
    }
    if (high == 0 && low == 0) d = -0.f;
  }
  constexpr float largest = 65504;
  const bool beyond = fabsf(d) > largest, lost = high != high || (!saturate && beyond);
  d = fminf(fmaxf(d, -largest), largest);
  const float quotient = __frcp_rn(d), inverse = lost || isinf(quotient) ? 0 : quotient;
  const unsigned short scale = lost ? 0x7e00 : __half_as_ushort(__float2half_rn(d));

  const float limit = largest * (q8 ? 127 : 8);  // of what has a scale of less than it would need
  int code[n];                                   // in the low byte
#pragma unroll
  for (int k = 0; k < n; ++k) {
    float y = x[k];
    if (beyond) y = fminf(fmaxf(y, -limit), limit);
    const float q = __fmul_rn(y, inverse);
    // q8_0: to nearest, halves away from zero. q4_0: down; the last digit is 1 after 2^23.
    code[k] = q8 ? __float2int_rz(__fadd_rz(q, copysignf(0.5f, q)))
                 : __float_as_int(__fadd_rz(fminf(__fadd_rn(q, 8.5f), 15), 1 << 23));
  }
  unsigned word[(n + 3) / 4];
#pragma unroll
  for (int i = 0; i < (n + 3) / 4; ++i) {
    word[i] = n < 4 ? unsigned(code[0]) & 0xff : pack_bytes(code + 4 * i);
    if (inverse == 0) word[i] = q8 ? 0 : 0x08080808;
    if (!q8) word[i] |= __shfl_xor_sync(group, word[i], lanes / 2) << 4;
  }
  const int last = !there ? -1 : q8 ? lanes - 1 : lanes / 2 - 1;
  if constexpr (n < 4) {
    if (lane == 0) *reinterpret_cast<unsigned short*>(block) = scale;
    if (lane <= last) block[2 + lane] = (unsigned char)word[0];
  } else {
    store_block(block, lane, lanes, last, group, scale, word);
  }
}

}  // namespace attn::device
