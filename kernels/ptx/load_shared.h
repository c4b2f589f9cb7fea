// Single words of shared memory by address.
#ifndef ATTN_KERNELS_PTX_LOAD_SHARED_H
#define ATTN_KERNELS_PTX_LOAD_SHARED_H

namespace attn::ptx {

__device__ __forceinline__ unsigned load_shared(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ unsigned load_shared_half(unsigned from) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}
// Of 8 bytes at a multiple of 8.
__device__ __forceinline__ uint2 load_shared_pair(unsigned from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}
// Of 16 bytes at a multiple of 16, as the following two.
__device__ __forceinline__ float4 load_shared_floats(unsigned from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_two_floats(unsigned from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_floats(unsigned to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ __forceinline__ void store_shared(unsigned to, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void fill_shared(unsigned to, unsigned word) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned to, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
// By those lanes for which `stores` is true; no branch, after which lanes would go on apart.
__device__ __forceinline__ void store_shared_if(unsigned to, unsigned x, bool stores) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.s32 stores, %2, 0;\n"
      "@stores st.shared.u32 [%0], %1;\n"
      "}" ::"r"(to),
      "r"(x), "r"(int(stores))
      : "memory");
}

}  // namespace attn::ptx
#endif
