// Loads of f32, f16 and bf16 elements, and stores of q8_0 and q4_0 blocks, bit for bit as
// core/dtype.h and core/ggml.h have them.
#pragma once
#include <cuda_fp16.h>

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
// approximate an operation.
template <int n>
__device__ __forceinline__ void store_ggml(unsigned char* block, int type, const float (&x)[n],
                                           bool saturate) {
  constexpr int lanes = 32 / n;
  const int lane = threadIdx.x % lanes;
  const unsigned group = 0xffffffffu >> (32 - lanes) << (threadIdx.x % 32 - lane);
  const bool q8 = type == attn_element_q8_0;
  bool has_nan = false;
  float amax = 0;
#pragma unroll
  for (int k = 0; k < n; ++k) {
    has_nan |= x[k] != x[k];
    amax = fmaxf(amax, fabsf(x[k]));  // of a NaN and another the other
  }
  has_nan = __any_sync(group, has_nan);
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(group, amax, step));
  float d;
  if (q8) {
    d = __fdiv_rn(amax, 127);
  } else {
    int first = 64;  // of the largest: twice its number, and its sign
#pragma unroll
    for (int k = n - 1; k >= 0; --k)
      if (fabsf(x[k]) == amax) first = 2 * (n * lane + k) + (signbit(x[k]) ? 1 : 0);
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
      first = min(first, __shfl_xor_sync(group, first, step));
    d = __fdiv_rn(amax == 0 || first % 2 == 0 ? amax : -amax, -8);
  }
  const bool lost = has_nan || (!saturate && fabsf(d) > 65504);
  d = fminf(fmaxf(d, -65504), 65504);
  const float quotient = __fdiv_rn(1, d);
  const float inverse = lost || isinf(quotient) ? 0 : quotient;
  const unsigned short scale = lost ? 0x7e00 : __half_as_ushort(__float2half_rn(d));

  int code[n];
  if (q8) {  // to nearest, halves away from zero
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float q = __fmul_rn(x[k], inverse), beyond = __fadd_rz(q, copysignf(0.5f, q));
      code[k] = __float2int_rz(fminf(fmaxf(beyond, -127), 127));
    }
  } else {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float q = __fadd_rn(__fmul_rn(x[k], inverse), 8.5f);
      code[k] = __float2int_rz(fminf(fmaxf(q, 0), 15));
    }
  }
  unsigned word[(n + 3) / 4];
#pragma unroll
  for (int i = 0; i < (n + 3) / 4; ++i) {
    word[i] = n < 4 ? unsigned(code[0]) : pack_bytes(code + 4 * i);
    if (inverse == 0) word[i] = q8 ? 0 : 0x08080808;
    if (!q8) word[i] |= __shfl_xor_sync(group, word[i], lanes / 2) << 4;
  }
  const int last = q8 ? lanes - 1 : lanes / 2 - 1;
  if constexpr (n < 4) {
    if (lane == 0) *reinterpret_cast<unsigned short*>(block) = scale;
    if (lane <= last) block[2 + lane] = (unsigned char)word[0];
  } else {
    store_block(block, lane, lanes, last, group, scale, word);
  }
}

}  // namespace attn::device
