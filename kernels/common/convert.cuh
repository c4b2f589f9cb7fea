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

// Stores n bytes; `to` is even.
template <int n>
__device__ __forceinline__ void store_bytes(unsigned char* to, const unsigned (&byte)[n]) {
  if constexpr (n == 1) {
    *to = (unsigned char)byte[0];
  } else {
#pragma unroll
    for (int k = 0; k < n; k += 2)
      *reinterpret_cast<unsigned short*>(to + k) =
          (unsigned short)(byte[k] & 0xff | byte[k + 1] << 8);
  }
}

// The ggml block that begins with element `at`.
__device__ __forceinline__ unsigned char* ggml_block(void* base, int type, long long at) {
  return static_cast<unsigned char*>(base) + at / 32 * (type == attn_element_q8_0 ? 34 : 18);
}

// 32 / n neighbouring lanes, with n elements each, store one q8_0 or q4_0 block as encode_block of
// core/ggml.h does. Intrinsics are used where the compiler would fuse or approximate an operation.
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
    amax = fmaxf(amax, x[k] != x[k] ? 0 : fabsf(x[k]));
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

  if (lane == 0)
    *reinterpret_cast<unsigned short*>(block) =
        lost ? 0x7e00 : __half_as_ushort(__float2half_rn(d));
  unsigned code[n];
  if (q8) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float q = inverse == 0 ? 0 : roundf(__fmul_rn(x[k], inverse));
      code[k] = int(fminf(fmaxf(q, -127), 127));
    }
    store_bytes(block + 2 + n * lane, code);
  } else {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float q = inverse == 0 ? 8 : __fadd_rn(__fmul_rn(x[k], inverse), 8.5f);
      const int low = int(fminf(fmaxf(q, 0), 15));
      code[k] = low | __shfl_xor_sync(group, low, lanes / 2) << 4;
    }
    if (lane < lanes / 2) store_bytes(block + 2 + n * lane, code);
  }
}

}  // namespace attn::device
