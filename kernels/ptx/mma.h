// mma.m16n8k16: d += a b with float32 accumulation. Lane l holds, with g = l/4 and t = l%4:
//   a[0..3]  A(g, 2t..), A(g+8, 2t..), A(g, 2t+8..), A(g+8, 2t+8..)   two elements each
//   b0, b1   B(2t.., g), B(2t+8.., g)
//   d[0..3]  D(g, 2t), D(g, 2t+1), D(g+8, 2t), D(g+8, 2t+1)
#ifndef ATTN_KERNELS_PTX_MMA_H
#define ATTN_KERNELS_PTX_MMA_H

namespace attn::ptx {

__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace attn::ptx
#endif
