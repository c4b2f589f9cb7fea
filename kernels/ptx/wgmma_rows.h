// wgmma with few columns, which are rows of queries: m64nNk16, N = 8, 16, 32 or 64, d += A B, whose
// A is K or V^T: from shared memory, as it lies there or transposed, or from registers. See
// wgmma.h.
#ifndef ATTN_KERNELS_PTX_WGMMA_ROWS_H
#define ATTN_KERNELS_PTX_WGMMA_ROWS_H

namespace attn::ptx {

// d[N / 2]. transposed: A lies as [16][64]. B is [N][16] in shared memory.
template <bool bf16, bool transposed, int registers>
__device__ __forceinline__ void wgmma_rows(float (&d)[registers], unsigned long long a,
                                           unsigned long long b, bool add);
template <bool bf16, int registers>
__device__ __forceinline__ void wgmma_rows(float (&d)[registers], const unsigned (&a)[4],
                                           unsigned long long b, bool add);

#define ATTN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTN_D8(i) ATTN_D4(i), ATTN_D4(i + 4)
#define ATTN_REGS_4 "%0, %1, %2, %3"
#define ATTN_REGS_8 ATTN_REGS_4 ", %4, %5, %6, %7"
#define ATTN_REGS_16 ATTN_REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_REGS_32 \
  ATTN_REGS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_D_4 ATTN_D4(0)
#define ATTN_D_8 ATTN_D8(0)
#define ATTN_D_16 ATTN_D8(0), ATTN_D8(8)
#define ATTN_D_32 ATTN_D_16, ATTN_D8(16), ATTN_D8(24)

// N: columns, R: registers of d, C0..C5: numbers of the operands behind d.
#define ATTN_ROWS_SHARED(N, R, TYPE, BF16, TRANSPOSED, T, C0, C1, C2)                              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_rows<BF16, TRANSPOSED, R>(                                 \
      float(&d)[R], unsigned long long a, unsigned long long b, bool add) {                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" ATTN_REGS_##R "}, %" #C0 ", %" #C1 ", p, 1, 1, " #T \
                                                             ", 0;}"                               \
                 : ATTN_D_##R                                                                      \
                 : "l"(a), "l"(b), "r"(int(add)));                                                 \
  }
#define ATTN_ROWS_REGISTERS(N, R, TYPE, BF16, C0, C1, C2, C3, C4, C5)                              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_rows<BF16, R>(float(&d)[R], const unsigned(&a)[4],         \
                                                      unsigned long long b, bool add) {            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" ATTN_REGS_##R "}, {%" #C0 ", %" #C1 ", %" #C2       \
                                                             ", %" #C3 "}, %" #C4 ", p, 1, 1, 0;}" \
                 : ATTN_D_##R                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));             \
  }
#define ATTN_ROWS_TYPE(N, R, TYPE, BF16, C0, C1, C2, C3, C4, C5) \
  ATTN_ROWS_SHARED(N, R, TYPE, BF16, false, 0, C0, C1, C2)       \
  ATTN_ROWS_SHARED(N, R, TYPE, BF16, true, 1, C0, C1, C2)        \
  ATTN_ROWS_REGISTERS(N, R, TYPE, BF16, C0, C1, C2, C3, C4, C5)
#define ATTN_ROWS(N, R, C0, C1, C2, C3, C4, C5)              \
  ATTN_ROWS_TYPE(N, R, "bf16", true, C0, C1, C2, C3, C4, C5) \
  ATTN_ROWS_TYPE(N, R, "f16", false, C0, C1, C2, C3, C4, C5)

ATTN_ROWS(8, 4, 4, 5, 6, 7, 8, 9)
ATTN_ROWS(16, 8, 8, 9, 10, 11, 12, 13)
ATTN_ROWS(32, 16, 16, 17, 18, 19, 20, 21)
ATTN_ROWS(64, 32, 32, 33, 34, 35, 36, 37)

#undef ATTN_ROWS
#undef ATTN_ROWS_TYPE
#undef ATTN_ROWS_REGISTERS
#undef ATTN_ROWS_SHARED
#undef ATTN_D_32
#undef ATTN_D_16
#undef ATTN_D_8
#undef ATTN_D_4
#undef ATTN_REGS_32
#undef ATTN_REGS_16
#undef ATTN_REGS_8
#undef ATTN_REGS_4
#undef ATTN_D8
#undef ATTN_D4

}  // namespace attn::ptx
#endif
