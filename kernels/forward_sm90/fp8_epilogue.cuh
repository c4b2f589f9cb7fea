// fp8: rows of out, whose columns are in the order of V^T (fp8_values.cuh).
#pragma once
#include "../ptx/convert_fp8.h"
#include "epilogue.cuh"

namespace attn::sm90 {

// Four e4m3 or e5m2, zeros as +0.
__device__ __forceinline__ unsigned pack_fp8(int type, const float (&x)[4]) {
  const bool e4m3 = type == attn_element_f8_e4m3fn;
  const unsigned low = e4m3 ? ptx::e4m3_of(x[0], x[1]) : ptx::e5m2_of(x[0], x[1]);
  const unsigned high = e4m3 ? ptx::e4m3_of(x[2], x[3]) : ptx::e5m2_of(x[2], x[3]);
  const unsigned codes = low | high << 16, magnitudes = codes & 0x7f7f7f7f;
  return magnitudes | codes & (magnitudes + 0x7f7f7f7f) & 0x80808080;
}

// Stores four elements.
__device__ __forceinline__ void store_four(float* to, int, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_four(unsigned short* to, int type, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = type == attn_element_f16
                                      ? make_uint2(F16::pack(x[0], x[1]), F16::pack(x[2], x[3]))
                                      : make_uint2(BF16::pack(x[0], x[1]), BF16::pack(x[2], x[3]));
}
__device__ __forceinline__ void store_four(unsigned char* to, int type, const float (&x)[4]) {
  *reinterpret_cast<unsigned*>(to) = pack_fp8(type, x);
}

// A row, of which the lane has four columns of every 16.
template <class Element, int count>
__device__ __forceinline__ void store_fp8_row(Element* row, int type, const float (&o)[count],
                                              int half, float factor, int columns) {
  row += threadIdx.x % 4 * 4;
#pragma unroll
  for (int n = 0; n < count / 8; ++n) {
    const int at = 8 * n + 2 * half;
    const float x[4] = {o[at] * factor, o[at + 4] * factor, o[at + 1] * factor, o[at + 5] * factor};
    if (16 * n < columns) store_four(row + 16 * n, type, x);
  }
}

template <Tile tile>
__device__ __forceinline__ void store_fp8_rows(const attn_sm90_forward_kernarg& a,
                                               const Warp<tile>& warp, const Item& item,
                                               Sums<tile>& o, const float (&factor)[2],
                                               float scale) {
  clear_rows(o, factor);
  // One after the other: of a small scale of V and many keys their product would be subnormal or 0.
#pragma unroll
  for (int i = 0; i < tile.head_dim_v / 2; ++i) o[i] *= factor[i / 2 % 2];
  // A row without a key is 0, whatever the scale is.
  const float scales[2] = {factor[0] == 0 ? 1 : scale, factor[1] == 0 ? 1 : scale};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp.row(item, half);
    const long long at = (a.cu_seqlens_q ? 0 : item.b * a.out_stride[0]) +
                         ((long long)item.q_begin + row) * a.out_stride[1] +
                         item.h * a.out_stride[2];
    const int columns = row < item.seqlen_q ? a.head_dim_v : 0;
    const float by = scales[half];
    if (a.out_type == attn_element_f32)
      store_fp8_row(static_cast<float*>(a.out) + at, a.out_type, o, half, by, columns);
    else if (a.out_type <= attn_element_bf16)
      store_fp8_row(static_cast<unsigned short*>(a.out) + at, a.out_type, o, half, by, columns);
    else
      store_fp8_row(static_cast<unsigned char*>(a.out) + at, a.out_type, o, half, by, columns);
  }
}

}  // namespace attn::sm90
