// wgmma m64n256k16 with A [64][16] and B [16][256] in shared memory: of P and V as they are there.
// wgmma.h has the other forms.
#ifndef ATTN_KERNELS_PTX_WGMMA_WIDE_H
#define ATTN_KERNELS_PTX_WGMMA_WIDE_H

namespace attn::ptx {

#define ATTN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTN_D16(i) ATTN_D4(i), ATTN_D4(i + 4), ATTN_D4(i + 8), ATTN_D4(i + 12)
#define ATTN_WGMMA_WIDE(type)                                                              \
  asm volatile(                                                                            \
      "{.reg .pred p; setp.ne.b32 p, %130, 0; "                                            \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                         \
      " {"                                                                                 \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "             \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "   \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "   \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "   \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "   \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "   \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "               \
      "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "           \
      "%120, %121, %122, %123, %124, %125, %126, %127}, "                                  \
      "%128, %129, p, 1, 1, 0, 1;}"                                                        \
      : ATTN_D16(0), ATTN_D16(16), ATTN_D16(32), ATTN_D16(48), ATTN_D16(64), ATTN_D16(80), \
        ATTN_D16(96), ATTN_D16(112)                                                        \
      : "l"(a), "l"(b), "r"(int(add)))

template <bool bf16>
__device__ __forceinline__ void wgmma_wide(float (&d)[128], unsigned long long a,
                                           unsigned long long b, bool add) {
  if constexpr (bf16)
    ATTN_WGMMA_WIDE("bf16");
  else
    ATTN_WGMMA_WIDE("f16");
}
#undef ATTN_WGMMA_WIDE
#undef ATTN_D4
#undef ATTN_D16

}  // namespace attn::ptx
#endif
