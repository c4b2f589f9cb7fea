// The 16-bit types that kernels are compiled for, and constants of the softmax.
#pragma once
#include <type_traits>

#include "../ptx/convert.h"
#include "../ptx/mma.h"
#include "../shared/types.h"

namespace attn::device {

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;
__device__ __forceinline__ float infinity() {
  return __int_as_float(0x7f800000);
}

struct F16 {
  static constexpr int type = attn_element_f16;
  static __device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    ptx::mma_f16(d, a, b0, b1);
  }
  static __device__ unsigned pack(float low, float high) { return ptx::pack_f16(low, high); }
  static __device__ float unpack(unsigned short x) { return ptx::unpack_f16(x); }
};
struct BF16 {
  static constexpr int type = attn_element_bf16;
  static __device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    ptx::mma_bf16(d, a, b0, b1);
  }
  static __device__ unsigned pack(float low, float high) { return ptx::pack_bf16(low, high); }
  static __device__ float unpack(unsigned short x) { return ptx::unpack_bf16(x); }
};

template <int type>  // attn_element_f16 or attn_element_bf16
using ElementOf = std::conditional_t<type == attn_element_f16, F16, BF16>;

}  // namespace attn::device
