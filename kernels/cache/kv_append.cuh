// Rows of tokens into a KV cache. A warp has heads of K, of V or of q, of several tokens one after
// the other; a thread has 8 neighbouring elements of a head. Heads of more than 256 elements have
// several warps each.
#pragma once
#include "../common/cache_format.cuh"
#include "../common/convert.cuh"
#include "../common/descale.cuh"
#include "../common/lengths.cuh"
#include "../common/row_scale.cuh"
#include "../ptx/convert.h"
#include "../ptx/convert_fp8.h"
#include "../ptx/grid.h"
#include "../ptx/max.h"
#include "../ptx/uniform.h"
#include "../shared/ggml_layout.h"
#include "kv_append_args.h"

namespace attn::kv_append {

using namespace attn::device;

constexpr int count = attn_kv_append_elements, warp_size = 32;
constexpr unsigned all_lanes = 0xffffffff;

// A new token.
struct Token {
  int b, t;              // of a sequence; t -1: it goes nowhere
  long long entry, row;  // in k_new
};

// Of `elements`, whole blocks of them.
__device__ __forceinline__ long long bytes_of(int type, long long elements) {
  switch (type) {
    case attn_element_f32:
      return 4 * elements;
    case attn_element_f16:
    case attn_element_bf16:
      return 2 * elements;
    case attn_element_q8_0:
      return elements / 32 * 34;
    case attn_element_q4_0:
      return elements / 32 * 18;
    case attn_element_i4:
    case attn_element_nvfp4:
      return elements / 2;
    default:
      return elements;
  }
}

// Of an element of k_new.
__device__ __forceinline__ int new_bytes(const attn_kv_append_kernarg& a) {
  return a.new_type == attn_element_f32 ? 4 : 2;
}
// Computed once: the compiler would do so again in each turn of a loop, to save registers.
__device__ __forceinline__ long long keep(long long x) {
  asm volatile("" : "+l"(x));
  return x;
}

// What a thread has of each token.
struct Slice {
  int which, h, d;  // of K, V or q: the head, and the first element
  int n;            // elements of the head from d on; 0 or less: the thread has none
  long long from;   // bytes after those where a token's row begins
  bool rotated;
};
__device__ __forceinline__ Slice slice_of(const attn_kv_append_kernarg& a, int unit) {
  Slice s;
  s.which = unit < a.units_kv ? 0 : unit < 2 * a.units_kv ? 1 : 2;
  const int thread = threadIdx.x & (1 << a.log_unit) - 1,
            heads = s.which == 2 ? a.heads_q : a.heads_kv;
  s.h = (unit - s.which * a.units_kv << a.log_unit | thread) >> a.log_head;
  s.d = (thread & (1 << a.log_head) - 1) * count;
  s.n = unit < a.units && s.h < heads ? a.tensor[s.which].dim - s.d : 0;
  s.from = keep((s.h * a.tensor[s.which].src_stride[2] + s.d) * new_bytes(a));
  s.rotated = s.which != 1 && s.d < 2 * a.half;
  return s;
}

// The first 16 bytes of 8 elements, which are all of f16 and bf16.
__device__ __forceinline__ uint4 load_raw(const void* from) {
  __builtin_assume(__isGlobal(from));
  return *static_cast<const uint4*>(from);
}
// Two of f16 or bf16.
__device__ __forceinline__ void unpack_word(bool f16, unsigned word, float* x) {
  const auto low = (unsigned short)word, high = (unsigned short)(word >> 16);
  x[0] = f16 ? ptx::unpack_f16(low) : ptx::unpack_bf16(low);
  x[1] = f16 ? ptx::unpack_f16(high) : ptx::unpack_bf16(high);
}
__device__ __forceinline__ void unpack_words(bool f16, const uint4& raw, float (&x)[count]) {
  unpack_word(f16, raw.x, x);
  unpack_word(f16, raw.y, x + 2);
  unpack_word(f16, raw.z, x + 4);
  unpack_word(f16, raw.w, x + 6);
}
__device__ __forceinline__ void unpack(const attn_kv_append_kernarg& a, const void* from,
                                       const uint4& raw, float (&x)[count]) {
  if (a.new_type == attn_element_f32) {
    x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    return load_floats(static_cast<const float*>(from) + 4, x + 4);
  }
  unpack_words(a.new_type == attn_element_f16, raw, x);
}

// What elements become: x cos + other sin. Of four, so that the registers suffice.
constexpr int together = 4;
struct Rotation {
  float other[together], cos[together], sin[together];
};
// Of elements x that are a head's from d on, all of which are rotated. load_others(to): those that
// they are rotated with, unless these are among them.
template <class LoadOthers>
__device__ __forceinline__ Rotation find_aligned_rotation(const attn_kv_append_kernarg& a, int d,
                                                          int position, const float* x,
                                                          const LoadOthers& load_others) {
  Rotation r;
  const float *cos = a.rotary_cos + position * (long long)a.half,
              *sin = a.rotary_sin + position * (long long)a.half;
  if (a.interleaved) {
    const float2 c = *reinterpret_cast<const float2*>(cos + d / 2),
                 s = *reinterpret_cast<const float2*>(sin + d / 2);
#pragma unroll
    for (int k = 0; k < together; ++k) {
      r.other[k] = k % 2 == 0 ? -x[k + 1] : x[k - 1];
      r.cos[k] = k < 2 ? c.x : c.y, r.sin[k] = k < 2 ? s.x : s.y;
    }
    return r;
  }
  const bool first = d < a.half;
  const int pair = first ? d : d - a.half;
  load_others(r.other);
  load_floats(cos + pair, r.cos);
  load_floats(sin + pair, r.sin);
#pragma unroll
  for (int k = 0; k < together; ++k) r.other[k] = first ? -r.other[k] : r.other[k];
  return r;
}
// Of the elements x at `from`, which are a head's from d on, some of which are rotated.
template <bool aligned>
__device__ __forceinline__ Rotation find_rotation(const attn_kv_append_kernarg& a, const void* from,
                                                  int d, int position, const float* x) {
  Rotation r;
  const float *cos = a.rotary_cos + position * (long long)a.half,
              *sin = a.rotary_sin + position * (long long)a.half;
  if (!aligned) {
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int e = d + k;
      r.other[k] = r.sin[k] = 0;
      r.cos[k] = 1;
      if (e >= 2 * a.half) continue;
      const bool first = a.interleaved ? e % 2 == 0 : e < a.half;
      const int apart = a.interleaved ? 1 : a.half;
      const int pair = a.interleaved ? e / 2 : first ? e : e - a.half;
      const float y = load_element(from, a.new_type, first ? k + apart : k - apart);
      r.other[k] = first ? -y : y;
      r.cos[k] = cos[pair], r.sin[k] = sin[pair];
    }
  } else {
    r = find_aligned_rotation(a, d, position, x, [&](float* to) {
      const int apart = d < a.half ? a.half : -a.half;
      if (a.new_type == attn_element_f32)
        return load_floats(static_cast<const float*>(from) + apart, to);
      const uint2 v =
          *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(from) + apart);
      unpack_word(a.new_type == attn_element_f16, v.x, to);
      unpack_word(a.new_type == attn_element_f16, v.y, to + 2);
    });
  }
  return r;
}

// The elements as the words have them, of which n are there; all, if they are aligned.
template <bool aligned, class T, int words>
__device__ __forceinline__ void store_words(unsigned char* at, int n,
                                            const unsigned (&word)[words]) {
  T* const to = reinterpret_cast<T*>(at);
  constexpr int in_word = 4 / sizeof(T);
  if constexpr (!aligned) {
#pragma unroll
    for (int k = 0; k < words * in_word; ++k)
      if (k < n) to[k] = T(word[k / in_word] >> k % in_word * 8 * int(sizeof(T)));
  } else if constexpr (words == 1) {
    *reinterpret_cast<unsigned*>(to) = word[0];
  } else if constexpr (words == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else {
#pragma unroll
    for (int w = 0; w < words; w += 4)
      reinterpret_cast<uint4*>(to)[w / 4] =
          make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

__device__ __forceinline__ void encode_fp8(const SmallFloat& format, const float (&x)[count],
                                           unsigned (&word)[count / 4]) {
#if __CUDA_ARCH__ >= 890
  if (format.signed_zero_and_nan) {
    const bool e4m3 = format.mantissa_bits == 3;
    unsigned nan = 0;  // bit 7 of a byte: in any word the byte is that of a NaN, 0x7f
#pragma unroll
    for (int w = 0; w < count / 4; ++w) {
      const float* const y = x + 4 * w;
      word[w] = e4m3 ? ptx::e4m3_of(y[0], y[1]) | unsigned(ptx::e4m3_of(y[2], y[3])) << 16
                     : ptx::e5m2_of(y[0], y[1]) | unsigned(ptx::e5m2_of(y[2], y[3])) << 16;
      nan |= (word[w] & 0x7f7f7f7f) + 0x01010101;
    }
    if ((nan & 0x80808080) == 0) [[likely]]
      return;
  }
#endif
#pragma unroll
  for (int k = 0; k < count; ++k) {
    if (k % 4 == 0) word[k / 4] = 0;
    word[k / 4] |= encode(format, x[k], true) << k % 4 * 8;
  }
}

// scale: of i8, i4 and nvfp4. to: the elements' place, or the block's that they are in. whole_warp:
// by all lanes of a warp, some of which may have nothing, n <= 0.
template <bool aligned, bool whole_warp>
__device__ __forceinline__ void store(int type, const SmallFloat& format, unsigned char* to, int n,
                                      const float (&x)[count], unsigned short scale) {
  if (is_ggml(type)) return store_ggml<count, whole_warp>(to, type, x, true, n > 0);
  if (whole_warp && n <= 0) return;
  unsigned words[count], halves[count / 2], bytes[count / 4];
  switch (type) {
    case attn_element_i8:
    case attn_element_i4: {
      int code[count];
      row_codes(type, x, scale, code);
      if (type == attn_element_i8) {
        bytes[0] = pack_bytes(code), bytes[1] = pack_bytes(code + 4);
        return store_words<aligned, unsigned char>(to, n, bytes);
      }
      const int even[] = {code[0], code[2], code[4], code[6]},
                odd[] = {code[1], code[3], code[5], code[7]};
      const unsigned pairs[] = {pack_bytes(even) & 0x0f0f0f0f | pack_bytes(odd) << 4 & 0xf0f0f0f0};
      return store_words<aligned, unsigned char>(to, n / 2, pairs);  // n is even
    }
    case attn_element_nvfp4: {
      unsigned pairs[1] = {};
#pragma unroll
      for (int k = 0; k < count; ++k) pairs[0] |= nvfp4_code(x[k], scale) << 4 * k;
      return store_words<aligned, unsigned char>(to, n / 2, pairs);
    }
    case attn_element_f32:
#pragma unroll
      for (int k = 0; k < count; ++k) words[k] = __float_as_uint(x[k]);
      return store_words<aligned, unsigned>(to, n, words);
    case attn_element_f16:
    case attn_element_bf16:
#pragma unroll
      for (int k = 0; k < count; k += 2)
        halves[k / 2] = type == attn_element_f16 ? ptx::pack_f16(x[k], x[k + 1])
                                                 : ptx::pack_bf16(x[k], x[k + 1]);
      return store_words<aligned, unsigned short>(to, n, halves);
    default:
      encode_fp8(format, x, bytes);
      return store_words<aligned, unsigned char>(to, n, bytes);
  }
}

// x / by, as __ddiv_rn has it, by way of 1 / by: Markstein's theorem. The remainder is NaN where a
// quotient is not finite, or `by` is not. Where it is 0, adding it would make -0 a +0.
__device__ __forceinline__ double divide(double x, double by, double inverse) {
  const double quotient = x * inverse, rest = fma(-quotient, by, x);
  return fabs(rest) > 0 ? fma(rest, inverse, quotient) : quotient;
}

// A slice, rotated and divided. raw: see request().
template <bool aligned>
__device__ __forceinline__ void convert(const attn_kv_append_kernarg& a, int dst_type,
                                        const char* from, const uint4& raw, const float* descale,
                                        const Slice& s, int position, float (&x)[count]) {
  if constexpr (aligned) {
    unpack(a, from, raw, x);
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) x[k] = k < s.n ? load_element(from, a.new_type, k) : 0;
  }
  // Quotients are float64, as in quantize_cuda, and so is what is divided.
  const double by = descale ? *descale : 1, inverse = __drcp_rn(by);
  const bool to_nearest = dst_type == attn_element_f32 || is_ggml(dst_type);
#pragma unroll
  for (int begin = 0; begin < count; begin += together) {
    Rotation r;
    if (s.rotated)
      r = find_rotation<aligned>(a, from + begin * new_bytes(a), s.d + begin, position, x + begin);
    if (descale) {
#pragma unroll
      for (int k = 0; k < together; ++k) {
        float& e = x[begin + k];
        const double y =
            s.rotated ? fma(double(e), double(r.cos[k]), double(r.other[k]) * r.sin[k]) : e;
        e = narrow(divide(y, by, inverse), to_nearest);
      }
    } else if (s.rotated) {
#pragma unroll
      for (int k = 0; k < together; ++k)
        x[begin + k] = fmaf(x[begin + k], r.cos[k], r.other[k] * r.sin[k]);
    }
  }
}

// convert() of 16-bit elements, divided by one descale for small floats, or by none. By all lanes
// of a warp, which has whole heads.
template <int new_type, bool rotated, bool divided>
__device__ __forceinline__ void convert_usual(const attn_kv_append_kernarg& a, const uint4& raw,
                                              double by, double inverse, const Slice& s,
                                              int position, float (&x)[count]) {
  constexpr bool f16 = new_type == attn_element_f16;
  static_assert(!rotated || !divided);
  unpack_words(f16, raw, x);
  if constexpr (divided) {
#pragma unroll
    for (float& e : x) e = narrow(divide(double(e), by, inverse), false);
  }
  if (!rotated) return;
  float other[count];
  if (!a.interleaved) {
    const int lane = threadIdx.x % warp_size + (s.d < a.half ? a.half : -a.half) / count;
    const auto of_other = [&](unsigned word) { return __shfl_sync(all_lanes, word, lane); };
    unpack_words(f16, {of_other(raw.x), of_other(raw.y), of_other(raw.z), of_other(raw.w)}, other);
  }
  if (!s.rotated) return;
#pragma unroll
  for (int begin = 0; begin < count; begin += together) {
    const Rotation r = find_aligned_rotation(a, s.d + begin, position, x + begin, [&](float* to) {
#pragma unroll
      for (int k = 0; k < together; ++k) to[k] = other[begin + k];
    });
#pragma unroll
    for (int k = 0; k < together; ++k)
      x[begin + k] = fmaf(x[begin + k], r.cos[k], r.other[k] * r.sin[k]);
  }
}

__device__ __forceinline__ bool is_wide(const attn_kv_append_kernarg& a) {
  return 1 << a.log_head > warp_size;
}
// Of a thread's |x|, the largest of its head, NaN if there is one. By all lanes of a warp; where
// heads are wide, as they can be unless `narrow`, by all warps of the block.
template <bool narrow>
__device__ __forceinline__ float largest_of_head(const attn_kv_append_kernarg& a, float most) {
#pragma unroll
  for (int log = 0; 1 << log < warp_size; ++log)
    if (log < a.log_head) most = ptx::max_nan(most, __shfl_xor_sync(all_lanes, most, 1 << log));
  if (narrow || !is_wide(a)) return most;
  __shared__ float of_warp[attn_kv_append_max_threads / warp_size];
  const int warps = (1 << a.log_head) / warp_size, warp = threadIdx.x / warp_size;
  __syncthreads();  // all have read the last ones
  if (threadIdx.x % warp_size == 0) of_warp[warp] = most;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < warps; ++i) most = ptx::max_nan(most, of_warp[warp / warps * warps + i]);
  return most;
}

// What a lane has of the block's token of its number. position -1: it goes nowhere.
struct Row {
  Token token;
  int position, page;
};
__device__ __forceinline__ const char* find_source(const attn_kv_append_kernarg& a,
                                                   const Token& token, const Slice& s) {
  const attn_kv_append_tensor& of = a.tensor[s.which];
  if (token.t < 0) return nullptr;
  return static_cast<const char*>(of.src) +
         (token.entry * of.src_stride[0] + token.row * of.src_stride[1]) * new_bytes(a);
}
// Where K, V or q begins, and its scales; null: nowhere, or its page is out of range.
struct Destination {
  unsigned char *at, *scale;
};
__device__ __forceinline__ int scale_bytes(int type) {
  return type == attn_element_nvfp4 ? 1 : type == attn_element_f8_e4m3fn_token ? 4 : 2;
}
__device__ __forceinline__ Destination find_destination(const attn_kv_append_kernarg& a, int type,
                                                        const Row& row, int which) {
  const attn_kv_append_tensor& of = a.tensor[which];
  long long entry = row.token.entry, n = row.token.row;
  if (which != 2) entry = row.token.b, n = row.position;
  if (which != 2 && a.page_size > 0) entry = row.page, n = row.position % a.page_size;
  if (row.position < 0 ||
      which != 2 && a.page_size > 0 && unsigned(row.page) >= unsigned(a.num_pages))
    return {};
  return {static_cast<unsigned char*>(of.dst) +
              bytes_of(type, entry * of.dst_stride[0] + n * of.dst_stride[1]),
          static_cast<unsigned char*>(of.scale) +
              (entry * of.scale_stride[0] + n * of.scale_stride[1]) * scale_bytes(type)};
}

template <class T>
__device__ __forceinline__ T* of_lane(T* x, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(x), lane));
}
// Asks for a slice of aligned rows.
__device__ __forceinline__ uint4 request(const attn_kv_append_kernarg& a, const Slice& s,
                                         const char* from) {
  uint4 raw;
  if (a.aligned && s.n > 0 && from) raw = load_raw(from + s.from);
  return raw;
}

// The slices of the block's tokens, of which lane n has where the n-th is, and `next` the first.
// By all lanes of a warp; where heads are wide by all warps, which meet at the same barriers
// whatever their types are. fixed: the type of aligned rows; 0: any, of rows that are not.
// new_type: that of new elements of 16 bits whose heads are not wide; 0: any. Then `rotated` says
// whether some are, and `divided` whether all are, by `one_descale`.
template <int fixed, int new_type = 0, bool rotated = false, bool divided = false>
__device__ __forceinline__ void append_slices(const attn_kv_append_kernarg& a, const Slice& s,
                                              int tokens, const Row& row, const char* source,
                                              uint4 first, float one_descale) {
  constexpr bool aligned = fixed != 0, usual = new_type != 0;
  constexpr int ahead = usual ? 2 : 1;  // tokens whose elements are asked for
  const attn_kv_append_tensor& of = a.tensor[s.which];
  const int type = aligned ? fixed : of.dst_type;
  const long long to_slice = keep(bytes_of(type, s.h * of.dst_stride[2] + s.d));
  const Destination to = find_destination(a, type, row, s.which);
  const double by = divided ? one_descale : 1, inverse = divided ? __drcp_rn(by) : 1;
  const char* next_from = of_lane(source, 0);  // of next[0], if that is all
  uint4 next[ahead] = {first};
  if (ahead > 1 && tokens > 1) next[ahead - 1] = request(a, s, of_lane(source, 1));
#pragma unroll 1
  for (int i = 0; i < tokens; ++i) {
    const uint4 raw = next[0];
    const char* const from = next_from + s.from;
    next[0] = next[ahead - 1];
    if (i + ahead < tokens) next[ahead - 1] = request(a, s, next_from = of_lane(source, i + ahead));
    unsigned char* const to_row = of_lane(to.at, i);
    const bool there = to_row && s.n > 0;
    const int position = __shfl_sync(all_lanes, row.position, i);
    float x[count];
    if constexpr (usual) {
      if (!to_row) continue;
      convert_usual<new_type, rotated, divided>(a, raw, by, inverse, s, position, x);
    } else {
      const int b = __shfl_sync(all_lanes, row.token.b, i);
      if (position >= 0 && s.n > 0) {
        const float* descale = of.descale.at ? descale_at(of.descale, b, s.h, position) : nullptr;
        convert<aligned>(a, type, from, raw, descale, s, position, x);
      }
      // q_out may be q
      if (is_wide(a))
        __syncthreads();
      else
        __syncwarp();
    }
    unsigned short scale = 0;
    constexpr int of_token = attn_element_f8_e4m3fn_token;
    if (has_row_scale(type) || type == of_token || !usual && is_wide(a) && a.row_scales) {
      float most = 0;
#pragma unroll
      for (int k = 0; k < count; ++k)
        most = ptx::max_nan(most, type == of_token ? finite_magnitude(x[k]) : fabsf(x[k]));
      most = largest_of_head<usual>(a, there ? most : 0);
      unsigned char* const scales =
          of_lane(to.scale, i) + s.h * of.scale_stride[2] * scale_bytes(type);
      if (type == of_token) {
        const float by = token_scale(most);
        if (there && s.d == 0) *reinterpret_cast<float*>(scales) = by;
        const double wide = by, inverse = __drcp_rn(wide);
#pragma unroll
        for (float& e : x) e = narrow(divide(double(e), wide, inverse), false);
      } else {
        scale = row_scale(type, most, true);
        if (there && has_row_scale(type) && s.d == 0)
          *reinterpret_cast<unsigned short*>(scales) = scale;
      }
    }
    if (type == attn_element_nvfp4) {  // two threads have 16 elements
      float most = there ? largest_finite(x) : 0;
      most = ptx::max_nan(most, __shfl_xor_sync(all_lanes, most, 1));
      scale = (unsigned short)nvfp4_scale(most);
      unsigned char* const scales = of_lane(to.scale, i);
      if (there && s.d % attn_nvfp4_group == 0)
        scales[s.h * of.scale_stride[2] + s.d / attn_nvfp4_group] = (unsigned char)scale;
    }
    if (!usual && !there) continue;
    __builtin_assume(__isGlobal(to_row + to_slice));
    store<aligned, usual>(type, of.format, to_row + to_slice, s.n, x, scale);
  }
}

// Appends the tokens of a block. find: the n-th token of all, by all lanes of a warp, each for its
// own n. find_position: that of a token in its sequence, or in all pages in order, if there are
// pages and no block_table; -1: it goes nowhere. The first elements are asked for before positions,
// which take a load, and before pages, which take another. may_rotate: some launches do.
template <bool may_rotate, class Find, class FindPosition>
__device__ __forceinline__ void append_tokens(const attn_kv_append_kernarg& a, const Find& find,
                                              const FindPosition& find_position) {
  const int first = blockIdx.x * a.tokens_of_block,
            tokens = min(a.tokens_of_block, a.tokens - first), abreast = blockDim.x >> a.log_unit;
  const Slice s = slice_of(a, blockIdx.y * abreast + ptx::uniform(threadIdx.x >> a.log_unit));
  Row row;
  row.token = find(first + min(int(threadIdx.x % warp_size), tokens - 1));
  const char* const source = find_source(a, row.token, s);
  const uint4 next = request(a, s, of_lane(source, 0));
  // One descale for all of the block's tokens is asked for as early as these.
  const attn_descale& descale = a.tensor[s.which].descale;
  bool has_one = false;
  float one_descale = 1;
  if (descale.at) {
    has_one = descale.block_keys == 0 && (descale.batch == 0 || a.tokens_of_block == 1);
    if (has_one && s.n > 0 && row.token.t >= 0)
      one_descale = *descale_at(descale, row.token.b, s.h, 0);
  }
  row.position = row.token.t < 0 ? -1 : find_position(row.token);
  row.page = -1;
  if (row.position >= 0 && a.page_size > 0) {
    row.page = row.position / a.page_size;
    if (a.block_table) row.page = a.block_table[row.token.b * (long long)a.max_pages + row.page];
  }
  // The compiler would widen it, and so wait for it, before it asks for positions.
  asm volatile("" : "+f"(one_descale));
  const bool rotated = s.which != 1 && a.half > 0, narrow_heads = !is_wide(a),
             usual = a.new_type != attn_element_f32 && !descale.at && narrow_heads,
             divided = has_one && !rotated && narrow_heads;
  const auto append = [&]<int fixed, int new_type = 0, bool rotates = false, bool divides = false> {
    append_slices<fixed, new_type, rotates, divides>(a, s, tokens, row, source, next, one_descale);
  };
  // The type of new elements and rotation are not looked at for each token.
  const auto append_of = [&]<int fixed, int new_type> {
    if (may_rotate && rotated) return append.template operator()<fixed, new_type, may_rotate>();
    append.template operator()<fixed, new_type>();
  };
  const auto append_to = [&]<int fixed> {
    constexpr bool is_f16 = fixed == attn_element_f16, is_bf16 = fixed == attn_element_bf16;
    if (!is_bf16 && usual && a.new_type == attn_element_f16)
      return append_of.template operator()<is_bf16 ? attn_element_f16 : fixed, attn_element_f16>();
    if (!is_f16 && usual && a.new_type == attn_element_bf16)
      return append_of.template operator()<is_f16 ? attn_element_bf16 : fixed, attn_element_bf16>();
    append.template operator()<fixed>();
  };
  switch (a.aligned ? a.tensor[s.which].dst_type : 0) {
    case 0:
      return append.template operator()<0>();
    case attn_element_f32:
      return append.template operator()<attn_element_f32>();
    case attn_element_f16:
      return append_to.template operator()<attn_element_f16>();
    case attn_element_bf16:
      return append_to.template operator()<attn_element_bf16>();
    case attn_element_q8_0:
      return append_to.template operator()<attn_element_q8_0>();
    case attn_element_q4_0:
      return append_to.template operator()<attn_element_q4_0>();
    case attn_element_i8:
      return append_to.template operator()<attn_element_i8>();
    case attn_element_i4:
      return append_to.template operator()<attn_element_i4>();
    case attn_element_nvfp4:
      return append_to.template operator()<attn_element_nvfp4>();
    case attn_element_f8_e4m3fn_token:
      return append_to.template operator()<attn_element_f8_e4m3fn_token>();
    default: {
      constexpr int fp8 = attn_element_f8_e4m3fn;
      if (divided && a.new_type == attn_element_f16)
        return append.template operator()<fp8, attn_element_f16, false, true>();
      if (divided && a.new_type == attn_element_bf16)
        return append.template operator()<fp8, attn_element_bf16, false, true>();
      return append_to.template operator()<fp8>();
    }
  }
}

}  // namespace attn::kv_append
