// Any function of three words' bits in one instruction.
#ifndef ATTN_KERNELS_PTX_LOP3_H
#define ATTN_KERNELS_PTX_LOP3_H

namespace attn::ptx {

// a & b | c. The compiler makes two of it where b and c are both constants.
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (a & b) ^ c
__device__ __forceinline__ unsigned and_xor(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// a where `of_a` has bits, b elsewhere. Of the same with operators ptxas 13.0 makes two where both
// of_a and ~of_a are used.
__device__ __forceinline__ unsigned bit_select(unsigned of_a, unsigned a, unsigned b) {
  unsigned c;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(c) : "r"(of_a), "r"(a), "r"(b));
  return c;
}

}  // namespace attn::ptx
#endif
