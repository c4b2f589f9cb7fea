// What kv_append_cuda does with a token, for launches of few. A block has heads of K, V and q of
// one token, a thread 8 neighbouring elements of a head at a time.
#pragma once
#include <cuda_bf16.h>

#include "../common/convert.cuh"
#include "../common/descale.cuh"
#include "../common/lengths.cuh"
#include "../common/row_scale.cuh"
#include "../ptx/convert.h"
#include "../ptx/convert_fp8.h"
#include "../ptx/grid.h"
#include "kv_append_args.h"

namespace attn::kv_append_token {

using namespace attn::device;

constexpr int count = attn_kv_append_elements;

// A row of new tokens.
struct Token {
  int b;                 // batch: it belongs to no sequence
  int t;                 // of the sequence
  long long entry, row;  // in k_new
};

// Where a token goes: entry and row in the cache. -1: nowhere, its page is out of range.
struct Place {
  long long entry, row;
};
__device__ Place find_place(const attn_kv_append_kernarg& a, int b, int position) {
  if (!a.block_table) return {b, position};
  const int page = a.block_table[b * (long long)a.max_pages + position / a.page_size];
  return {unsigned(page) < unsigned(a.num_pages) ? page : -1, position % a.page_size};
}

// Elements [at, at + count), of which n are there; all, if they are aligned.
__device__ __forceinline__ void load(const attn_kv_append_kernarg& a, const void* base,
                                     long long at, int n, float (&x)[count]) {
  if (!a.aligned) {
#pragma unroll
    for (int k = 0; k < count; ++k) x[k] = k < n ? load_element(base, a.new_type, at + k) : 0;
  } else if (a.new_type == attn_element_f32) {
    load_floats(static_cast<const float*>(base) + at, x);
    load_floats(static_cast<const float*>(base) + at + 4, x + 4);
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(base) + at);
    const unsigned word[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const auto bits = (unsigned short)(word[k / 2] >> k % 2 * 16);
      x[k] = a.new_type == attn_element_f16 ? ptx::unpack_f16(bits) : ptx::unpack_bf16(bits);
    }
  }
}

// What elements become: x cos + other sin.
struct Rotation {
  float other[count], cos[count], sin[count];
};
// Of the elements x from d on of the row at `row`, some of which are rotated.
__device__ __forceinline__ Rotation find_rotation(const attn_kv_append_kernarg& a, const void* base,
                                                  long long row, int d, int position,
                                                  const float (&x)[count]) {
  Rotation r;
  const float *cos = a.rotary_cos + position * (long long)a.half,
              *sin = a.rotary_sin + position * (long long)a.half;
  if (!a.aligned) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const int e = d + k;
      r.other[k] = r.sin[k] = 0;
      r.cos[k] = 1;
      if (e >= 2 * a.half) continue;
      const bool first = a.interleaved ? e % 2 == 0 : e < a.half;
      const int apart = a.interleaved ? 1 : a.half;
      const int pair = a.interleaved ? e / 2 : first ? e : e - a.half;
      const float y = load_element(base, a.new_type, row + (first ? e + apart : e - apart));
      r.other[k] = first ? -y : y;
      r.cos[k] = cos[pair], r.sin[k] = sin[pair];
    }
  } else if (a.interleaved) {
    float c[count / 2], s[count / 2];
    load_floats(cos + d / 2, c);
    load_floats(sin + d / 2, s);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      r.other[k] = k % 2 == 0 ? -x[k + 1] : x[k - 1];
      r.cos[k] = c[k / 2], r.sin[k] = s[k / 2];
    }
  } else {
    const bool first = d < a.half;
    const int pair = first ? d : d - a.half;
    load(a, base, row + (first ? d + a.half : pair), count, r.other);
#pragma unroll
    for (int k = 0; k < count; k += 4) {
      load_floats(cos + pair + k, r.cos + k);
      load_floats(sin + pair + k, r.sin + k);
    }
#pragma unroll
    for (int k = 0; k < count; ++k) r.other[k] = first ? -r.other[k] : r.other[k];
  }
  return r;
}

// Of n codes of the type T; all, if they are aligned.
template <class T>
__device__ __forceinline__ void store_codes(T* to, bool aligned, int n,
                                            const unsigned (&code)[count]) {
  if (!aligned) {
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (k < n) to[k] = T(code[k]);
    return;
  }
  constexpr int in_word = 4 / sizeof(T), words = count / in_word;
  unsigned word[words] = {};
#pragma unroll
  for (int k = 0; k < count; ++k) word[k / in_word] |= code[k] << k % in_word * 8 * int(sizeof(T));
  if constexpr (words == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else {
#pragma unroll
    for (int w = 0; w < words; w += 4)
      reinterpret_cast<uint4*>(to)[w / 4] =
          make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

// Two codes a byte, the first one in the low half; n is even.
__device__ __forceinline__ void store_halves(unsigned char* to, bool aligned, int n,
                                             const unsigned (&code)[count]) {
  unsigned word = 0;
#pragma unroll
  for (int k = 0; k < count; ++k) word |= (code[k] & 15) << 4 * k;
  if (aligned) {
    *reinterpret_cast<unsigned*>(to) = word;
    return;
  }
#pragma unroll
  for (int k = 0; k < count; k += 2)
    if (k < n) to[k / 2] = (unsigned char)(word >> 4 * k);
}

__device__ __forceinline__ void encode_fp8(const SmallFloat& format, const float (&x)[count],
                                           unsigned (&code)[count]) {
#if __CUDA_ARCH__ >= 890
  if (format.signed_zero_and_nan) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      if (k % 2 == 0) {
        const unsigned pair =
            format.mantissa_bits == 3 ? ptx::e4m3_of(x[k], x[k + 1]) : ptx::e5m2_of(x[k], x[k + 1]);
        code[k] = pair & 0xff;
        code[k + 1] = pair >> 8;
      }
      if (isnan(x[k])) code[k] = format.nan_code | (signbit(x[k]) ? format.sign_bit() : 0);
    }
    return;
  }
#endif
#pragma unroll
  for (int k = 0; k < count; ++k) code[k] = encode(format, x[k], true);
}

// scale: of i8 and i4.
__device__ __forceinline__ void store(const attn_kv_append_tensor& to, bool aligned, long long at,
                                      int n, const float (&x)[count], unsigned short scale) {
  unsigned code[count];
  switch (to.dst_type) {
    case attn_element_i8:
    case attn_element_i4:
#pragma unroll
      for (int k = 0; k < count; ++k) code[k] = unsigned(row_code(to.dst_type, x[k], scale)) & 0xff;
      if (to.dst_type == attn_element_i8)
        store_codes(static_cast<unsigned char*>(to.dst) + at, aligned, n, code);
      else
        store_halves(static_cast<unsigned char*>(to.dst) + at / 2, aligned, n, code);
      return;
    case attn_element_q8_0:
    case attn_element_q4_0:
      store_ggml(ggml_block(to.dst, to.dst_type, at), to.dst_type, x, true);
      return;
    case attn_element_f32:
#pragma unroll
      for (int k = 0; k < count; ++k) code[k] = __float_as_uint(x[k]);
      store_codes(static_cast<unsigned*>(to.dst) + at, aligned, n, code);
      return;
    case attn_element_f16:
    case attn_element_bf16:
#pragma unroll
      for (int k = 0; k < count; ++k)
        code[k] = to.dst_type == attn_element_f16 ? __half_as_ushort(__float2half_rn(x[k]))
                                                  : __bfloat16_as_ushort(__float2bfloat16_rn(x[k]));
      store_codes(static_cast<unsigned short*>(to.dst) + at, aligned, n, code);
      return;
    default:
      encode_fp8(to.format, x, code);
      store_codes(static_cast<unsigned char*>(to.dst) + at, aligned, n, code);
  }
}

// Elements of a row, rotated and divided.
__device__ __forceinline__ void convert(const attn_kv_append_kernarg& a,
                                        const attn_kv_append_tensor& of, const float* descale,
                                        long long row, int d, int position, bool rotated,
                                        float (&x)[count]) {
  load(a, of.src, row + d, of.dim - d, x);
  Rotation r;
  if (rotated) r = find_rotation(a, of.src, row, d, position, x);
  if (!descale) {
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (rotated) x[k] = fmaf(x[k], r.cos[k], r.other[k] * r.sin[k]);
    return;
  }
  // Quotients are float64, as in quantize_cuda, and so is what is divided.
  const double by = *descale;
  const bool to_nearest = of.dst_type == attn_element_f32 || of.dst_type == attn_element_q8_0 ||
                          of.dst_type == attn_element_q4_0;
#pragma unroll
  for (int k = 0; k < count; ++k) {
    const double y =
        rotated ? fma(double(x[k]), double(r.cos[k]), double(r.other[k]) * r.sin[k]) : x[k];
    x[k] = narrow(__ddiv_rn(y, by), to_nearest);
  }
}

// Of the largest |x| among n.
__device__ __forceinline__ unsigned largest_bits(const float (&x)[count], int n) {
  unsigned most = 0;
#pragma unroll
  for (int k = 0; k < count; ++k)
    if (k < n) most = max(most, __float_as_uint(x[k]) & 0x7fffffff);
  return most;
}

__device__ __forceinline__ void append(const attn_kv_append_kernarg& a, const Token& token,
                                       int position) {
  const Place place = find_place(a, token.b, position);
  // As bits, of which those of a NaN are the largest.
  __shared__ unsigned amax[attn_kv_append_max_threads / 4];  // of the block's heads
  const int heads_here = blockDim.x / a.threads_per_head, own = threadIdx.x / a.threads_per_head,
            d = threadIdx.x % a.threads_per_head * count;
#pragma unroll 1
  for (int begin = blockIdx.y * heads_here; begin < a.heads; begin += gridDim.y * heads_here) {
    const int head = begin + own;
    const int which = head < a.heads_kv       ? 0
                      : head < 2 * a.heads_kv ? 1
                                              : 2,
              h = head - which * a.heads_kv;
    const bool is_q = which == 2;
    const attn_kv_append_tensor& of = a.tensor[which];
    const bool there =
        own < heads_here && head < a.heads && d < of.dim && (is_q || place.entry >= 0);
    float x[count];
    if (there) {
      const long long row =
          token.entry * of.src_stride[0] + token.row * of.src_stride[1] + h * of.src_stride[2];
      const float* descale = of.descale.at ? descale_at(of.descale, token.b, h, position) : nullptr;
      convert(a, of, descale, row, d, position, which != 1 && d < 2 * a.half, x);
    }
    __syncthreads();  // q_out may be q
    unsigned short scale = 0;
    if (a.row_scales) {
      if (threadIdx.x < heads_here) amax[threadIdx.x] = 0;
      __syncthreads();
      if (there && has_row_scale(of.dst_type)) atomicMax(&amax[own], largest_bits(x, of.dim - d));
      __syncthreads();
      if (there && has_row_scale(of.dst_type)) {
        scale = row_scale(of.dst_type, __uint_as_float(amax[own]), true);
        if (d == 0)
          of.scale[place.entry * of.scale_stride[0] + place.row * of.scale_stride[1] +
                   h * of.scale_stride[2]] = scale;
      }
    }
    if (there) {
      const long long to = (is_q ? token.entry : place.entry) * of.dst_stride[0] +
                           (is_q ? token.row : place.row) * of.dst_stride[1] + h * of.dst_stride[2];
      store(of, a.aligned, to + d, of.dim - d, x, scale);
    }
  }
}

}  // namespace attn::kv_append_token
