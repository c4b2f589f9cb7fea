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

}  // namespace attn::ptx
#endif
