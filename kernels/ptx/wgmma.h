// wgmma.mma_async m64nNk16: d += A B by the four warps of a warpgroup, float32 sums of bf16 or f16
// products. Warp w, lane l holds d[i] = D(16w + l/4 + 8(i/2 % 2), 8(i/4) + 2(l%4) + i%2). A in
// registers: a[0..3] are the pairs that mma.m16n8k16 takes (mma.h), so pairs of neighbouring d are
// an A in their order. The multiplication runs on after the call: between wgmma_fence() and
// wgmma_wait() the registers of d and a, and the shared memory, belong to it.
#ifndef ATTN_KERNELS_PTX_WGMMA_H
#define ATTN_KERNELS_PTX_WGMMA_H

namespace attn::ptx {

// A matrix in shared memory as TMA leaves it with the 128-byte swizzle: rows of 128 bytes, eight of
// them in 1024 bytes (PTX ISA, "Matrix descriptor"). at_16: its address / 16. panel_bytes: from one
// panel of 64 columns to the next, for transposed B.
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned at_16,
                                                               unsigned panel_bytes) {
  return (unsigned long long)at_16 | (unsigned long long)(panel_bytes >> 4) << 16 | 64ull << 32 |
         1ull << 62;
}

// Orders earlier writes of registers before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `pending` of the committed groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// The compiler may not move accesses to x across this.
template <int count>
__device__ __forceinline__ void pin(float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// What x holds is not needed any more. Without it an array that products begin in would keep, for
// the compiler, what another array in the same place had.
template <int count>
__device__ __forceinline__ void forget(float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "=f"(x[i]));
}

#define ATTN_REGS_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_REGS_4 "%0, %1, %2, %3"
#define ATTN_REGS_8 ATTN_REGS_4 ", %4, %5, %6, %7"
#define ATTN_REGS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_REGS_20 ATTN_REGS_16 ", %16, %17, %18, %19"
#define ATTN_REGS_24 ATTN_REGS_20 ", %20, %21, %22, %23"
#define ATTN_REGS_36 ATTN_REGS_32 ", %32, %33, %34, %35"
#define ATTN_REGS_40 ATTN_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTN_REGS_48 ATTN_REGS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_REGS_56 ATTN_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ATTN_REGS_64 \
  ATTN_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_REGS_68 ATTN_REGS_64 ", %64, %65, %66, %67"
#define ATTN_REGS_88                                                                 \
  ATTN_REGS_64                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ATTN_REGS_96                                                                 \
  ATTN_REGS_64                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTN_REGS_128                                                                        \
  ATTN_REGS_96                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"                                                                                     \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
  "%126, %127"
#define ATTN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTN_D8(i) ATTN_D4(i), ATTN_D4(i + 4)
#define ATTN_D32(i) ATTN_D8(i), ATTN_D8(i + 8), ATTN_D8(i + 16), ATTN_D8(i + 24)
#define ATTN_D_4 ATTN_D4(0)
#define ATTN_D_8 ATTN_D8(0)
#define ATTN_D_32 ATTN_D32(0)
#define ATTN_D_16 ATTN_D8(0), ATTN_D8(8)
#define ATTN_D_20 ATTN_D_16, ATTN_D4(16)
#define ATTN_D_24 ATTN_D_20, ATTN_D4(20)
#define ATTN_D_36 ATTN_D_32, ATTN_D4(32)
#define ATTN_D_40 ATTN_D_32, ATTN_D8(32)
#define ATTN_D_48 ATTN_D_40, ATTN_D8(40)
#define ATTN_D_56 ATTN_D_48, ATTN_D8(48)
#define ATTN_D_64 ATTN_D_32, ATTN_D32(32)
#define ATTN_D_68 ATTN_D_64, ATTN_D4(64)
#define ATTN_D_88 ATTN_D_64, ATTN_D8(64), ATTN_D8(72), ATTN_D8(80)
#define ATTN_D_96 ATTN_D_64, ATTN_D32(64)
#define ATTN_D_128 ATTN_D_96, ATTN_D32(96)

// Without `add` the sums start at 0. B is [n][16] in shared memory, transposed: [16][n]. A in
// shared memory is [64][16], in wgmma_transposed_a [16][64]. wgmma_transposed: both are transposed.
template <bool bf16, bool transposed, int registers>
__device__ __forceinline__ void wgmma(float (&d)[registers], const unsigned (&a)[4],
                                      unsigned long long b, bool add);
template <bool bf16, int registers>
__device__ __forceinline__ void wgmma(float (&d)[registers], unsigned long long a,
                                      unsigned long long b, bool add);
template <bool bf16, int registers>
__device__ __forceinline__ void wgmma_transposed_a(float (&d)[registers], unsigned long long a,
                                                   unsigned long long b, bool add);
template <bool bf16, int registers>
__device__ __forceinline__ void wgmma_transposed(float (&d)[registers], unsigned long long a,
                                                 unsigned long long b, bool add);

// N: columns, R: registers of d, C..C+5: numbers of the operands behind d.
#define ATTN_WGMMA_SHARED(FUNCTION, TRANSPOSED, N, R, TYPE, BF16, C0, C1, C2)                      \
  template <>                                                                                      \
  __device__ __forceinline__ void FUNCTION<BF16, R>(float(&d)[R], unsigned long long a,            \
                                                    unsigned long long b, bool add) {              \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" ATTN_REGS_##R "}, %" #C0 ", %" #C1                  \
                                                             ", p, 1, 1, " TRANSPOSED ";}"         \
                 : ATTN_D_##R                                                                      \
                 : "l"(a), "l"(b), "r"(int(add)));                                                 \
  }
#define ATTN_WGMMA_TYPE(N, R, TYPE, BF16, C0, C1, C2, C3, C4, C5)                                  \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma<BF16, false, R>(float(&d)[R], const unsigned(&a)[4],       \
                                                        unsigned long long b, bool add) {          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" ATTN_REGS_##R "}, {%" #C0 ", %" #C1 ", %" #C2       \
                                                             ", %" #C3 "}, %" #C4 ", p, 1, 1, 0;}" \
                 : ATTN_D_##R                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));             \
  }                                                                                                \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma<BF16, true, R>(float(&d)[R], const unsigned(&a)[4],        \
                                                       unsigned long long b, bool add) {           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" ATTN_REGS_##R "}, {%" #C0 ", %" #C1 ", %" #C2       \
                                                             ", %" #C3 "}, %" #C4 ", p, 1, 1, 1;}" \
                 : ATTN_D_##R                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));             \
  }                                                                                                \
  ATTN_WGMMA_SHARED(wgmma, "0, 0", N, R, TYPE, BF16, C0, C1, C2)                                   \
  ATTN_WGMMA_SHARED(wgmma_transposed_a, "1, 0", N, R, TYPE, BF16, C0, C1, C2)                      \
  ATTN_WGMMA_SHARED(wgmma_transposed, "1, 1", N, R, TYPE, BF16, C0, C1, C2)
#define ATTN_WGMMA(N, R, C0, C1, C2, C3, C4, C5)              \
  ATTN_WGMMA_TYPE(N, R, "bf16", true, C0, C1, C2, C3, C4, C5) \
  ATTN_WGMMA_TYPE(N, R, "f16", false, C0, C1, C2, C3, C4, C5)
ATTN_WGMMA(8, 4, 4, 5, 6, 7, 8, 9)
ATTN_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
ATTN_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
ATTN_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
ATTN_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
ATTN_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
ATTN_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
ATTN_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
ATTN_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
ATTN_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
ATTN_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

// wgmma.mma_async m64nNk32 of fp8: A e4m3, B [n][32] in shared memory, e5m2 or e4m3. A in
// registers: a[h + 2 half] has the four of row l/4 + 8h from column 4(l%4) + 16 half on. Sums are
// not float32: a product keeps some 13 bits below the largest of what it is added to
// (docs/numerics.md).
template <bool e5m2, int registers>
__device__ __forceinline__ void wgmma_fp8(float (&d)[registers], const unsigned (&a)[4],
                                          unsigned long long b, bool add);
template <bool e5m2, int registers>
__device__ __forceinline__ void wgmma_fp8(float (&d)[registers], unsigned long long a,
                                          unsigned long long b, bool add);

#define ATTN_WGMMA_FP8_TYPE(N, R, TYPE, E5M2, C0, C1, C2, C3, C4, C5)                              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_fp8<E5M2, R>(float(&d)[R], const unsigned(&a)[4],          \
                                                     unsigned long long b, bool add) {             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3." TYPE " {" ATTN_REGS_##R "}, {%" #C0 ", %" #C1 ", %" #C2 ", %" #C3 \
                                                         "}, %" #C4 ", p, 1, 1;}"                  \
                 : ATTN_D_##R                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));             \
  }                                                                                                \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_fp8<E5M2, R>(float(&d)[R], unsigned long long a,           \
                                                     unsigned long long b, bool add) {             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3." TYPE " {" ATTN_REGS_##R "}, %" #C0 ", %" #C1 ", p, 1, 1;}"        \
                 : ATTN_D_##R                                                                      \
                 : "l"(a), "l"(b), "r"(int(add)));                                                 \
  }
#define ATTN_WGMMA_FP8(N, R, C0, C1, C2, C3, C4, C5)              \
  ATTN_WGMMA_FP8_TYPE(N, R, "e5m2", true, C0, C1, C2, C3, C4, C5) \
  ATTN_WGMMA_FP8_TYPE(N, R, "e4m3", false, C0, C1, C2, C3, C4, C5)
ATTN_WGMMA_FP8(32, 16, 16, 17, 18, 19, 20, 21)
ATTN_WGMMA_FP8(40, 20, 20, 21, 22, 23, 24, 25)
ATTN_WGMMA_FP8(48, 24, 24, 25, 26, 27, 28, 29)
ATTN_WGMMA_FP8(64, 32, 32, 33, 34, 35, 36, 37)
ATTN_WGMMA_FP8(72, 36, 36, 37, 38, 39, 40, 41)
ATTN_WGMMA_FP8(96, 48, 48, 49, 50, 51, 52, 53)
ATTN_WGMMA_FP8(128, 64, 64, 65, 66, 67, 68, 69)
ATTN_WGMMA_FP8(136, 68, 68, 69, 70, 71, 72, 73)
ATTN_WGMMA_FP8(192, 96, 96, 97, 98, 99, 100, 101)
#undef ATTN_WGMMA_FP8
#undef ATTN_WGMMA_FP8_TYPE
#undef ATTN_REGS_4
#undef ATTN_D_4
#undef ATTN_REGS_8
#undef ATTN_D_8
#undef ATTN_REGS_32
#undef ATTN_D_32
#undef ATTN_REGS_16
#undef ATTN_D_16
#undef ATTN_REGS_20
#undef ATTN_D_20
#undef ATTN_REGS_24
#undef ATTN_D_24
#undef ATTN_REGS_36
#undef ATTN_D_36
#undef ATTN_REGS_40
#undef ATTN_D_40
#undef ATTN_REGS_48
#undef ATTN_D_48
#undef ATTN_REGS_56
#undef ATTN_D_56
#undef ATTN_REGS_64
#undef ATTN_D_64
#undef ATTN_REGS_68
#undef ATTN_D_68
#undef ATTN_REGS_88
#undef ATTN_D_88
#undef ATTN_REGS_96
#undef ATTN_D_96
#undef ATTN_REGS_128
#undef ATTN_D_128
#undef ATTN_D4
#undef ATTN_D8
#undef ATTN_D32
#undef ATTN_WGMMA
#undef ATTN_WGMMA_TYPE
#undef ATTN_WGMMA_SHARED

}  // namespace attn::ptx
#endif
