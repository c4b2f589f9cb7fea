// Bits of two words in one instruction.
#ifndef ATTN_KERNELS_PTX_BIT_SELECT_H
#define ATTN_KERNELS_PTX_BIT_SELECT_H

namespace attn::ptx {

// a where `of_a` has bits, b elsewhere. Of the same with operators ptxas 13.0 makes two where both
// of_a and ~of_a are used.
__device__ __forceinline__ unsigned bit_select(unsigned of_a, unsigned a, unsigned b) {
  unsigned c;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(c) : "r"(of_a), "r"(a), "r"(b));
  return c;
}

}  // namespace attn::ptx
#endif
