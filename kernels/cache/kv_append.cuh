// Rows of tokens into a KV cache. A thread has 8 neighbouring elements of a head of K, V or q.
// A block has several tokens, one after the other.
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

namespace attn::kv_append {

using namespace attn::device;

constexpr int count = attn_kv_append_elements;

// A row of new tokens.
struct Token {
  int b, t;              // of a sequence; t -1: it goes nowhere
  long long entry, row;  // in k_new
  int position;          // in the sequence
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
      return elements / 2;
    default:
      return elements;
  }
}

// Where a token's K, V or q begins, and goes; null: nowhere, or its page is out of range.
struct Row {
  const char* from;
  unsigned char* to;
  unsigned short* scale;
};
__device__ const char* find_source(const attn_kv_append_kernarg& a, const Token& token, int which) {
  const attn_kv_append_tensor& of = a.tensor[which];
  if (token.t < 0) return nullptr;
  return static_cast<const char*>(of.src) +
         bytes_of(a.new_type, token.entry * of.src_stride[0] + token.row * of.src_stride[1]);
}
__device__ void place(const attn_kv_append_kernarg& a, const Token& token, int which, Row* row) {
  const attn_kv_append_tensor& of = a.tensor[which];
  row->to = nullptr;
  if (token.t < 0 || token.position < 0) return;
  long long entry = token.entry, n = token.row;
  if (which != 2) entry = token.b, n = token.position;
  if (which != 2 && a.block_table) {
    const int page = a.block_table[token.b * (long long)a.max_pages + token.position / a.page_size];
    if (unsigned(page) >= unsigned(a.num_pages)) return;
    entry = page, n = token.position % a.page_size;
  }
  row->to = static_cast<unsigned char*>(of.dst) +
            bytes_of(of.dst_type, entry * of.dst_stride[0] + n * of.dst_stride[1]);
  row->scale = of.scale + (entry * of.scale_stride[0] + n * of.scale_stride[1]);
}

// The first 16 bytes of 8 elements, which are all of f16 and bf16.
__device__ __forceinline__ uint4 load_raw(const void* from) {
  __builtin_assume(__isGlobal(from));
  return *static_cast<const uint4*>(from);
}
// Two of f16 or bf16.
__device__ __forceinline__ void unpack_word(const attn_kv_append_kernarg& a, unsigned word,
                                            float* x) {
  const bool f16 = a.new_type == attn_element_f16;
  const auto low = (unsigned short)word, high = (unsigned short)(word >> 16);
  x[0] = f16 ? ptx::unpack_f16(low) : ptx::unpack_bf16(low);
  x[1] = f16 ? ptx::unpack_f16(high) : ptx::unpack_bf16(high);
}
__device__ __forceinline__ void unpack(const attn_kv_append_kernarg& a, const void* from,
                                       const uint4& raw, float (&x)[count]) {
  if (a.new_type == attn_element_f32) {
    x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    return load_floats(static_cast<const float*>(from) + 4, x + 4);
  }
  unpack_word(a, raw.x, x);
  unpack_word(a, raw.y, x + 2);
  unpack_word(a, raw.z, x + 4);
  unpack_word(a, raw.w, x + 6);
}

// What elements become: x cos + other sin. Of four, so that the registers suffice.
constexpr int together = 4;
struct Rotation {
  float other[together], cos[together], sin[together];
};
// Of the elements x from d on of a head at `head`, some of which are rotated.
template <bool plain>
__device__ __forceinline__ Rotation find_rotation(const attn_kv_append_kernarg& a, const void* head,
                                                  int d, int position, const float* x) {
  Rotation r;
  const float *cos = a.rotary_cos + position * (long long)a.half,
              *sin = a.rotary_sin + position * (long long)a.half;
  if (!plain && !a.aligned) {
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int e = d + k;
      r.other[k] = r.sin[k] = 0;
      r.cos[k] = 1;
      if (e >= 2 * a.half) continue;
      const bool first = a.interleaved ? e % 2 == 0 : e < a.half;
      const int apart = a.interleaved ? 1 : a.half;
      const int pair = a.interleaved ? e / 2 : first ? e : e - a.half;
      const float y = load_element(head, a.new_type, first ? e + apart : e - apart);
      r.other[k] = first ? -y : y;
      r.cos[k] = cos[pair], r.sin[k] = sin[pair];
    }
  } else if (a.interleaved) {
    const float2 c = *reinterpret_cast<const float2*>(cos + d / 2),
                 s = *reinterpret_cast<const float2*>(sin + d / 2);
#pragma unroll
    for (int k = 0; k < together; ++k) {
      r.other[k] = k % 2 == 0 ? -x[k + 1] : x[k - 1];
      r.cos[k] = k < 2 ? c.x : c.y, r.sin[k] = k < 2 ? s.x : s.y;
    }
  } else {
    const bool first = d < a.half;
    const int pair = first ? d : d - a.half;
    const int at = first ? d + a.half : pair;
    if (a.new_type == attn_element_f32) {
      load_floats(static_cast<const float*>(head) + at, r.other);
    } else {
      const uint2 v =
          *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(head) + at);
      unpack_word(a, v.x, r.other);
      unpack_word(a, v.y, r.other + 2);
    }
    load_floats(cos + pair, r.cos);
    load_floats(sin + pair, r.sin);
#pragma unroll
    for (int k = 0; k < together; ++k) r.other[k] = first ? -r.other[k] : r.other[k];
  }
  return r;
}

// n elements as the words have them; all, if they are aligned.
template <class T>
__device__ __forceinline__ void store_words(unsigned char* at, bool aligned, int n,
                                            const unsigned (&word)[count * sizeof(T) / 4]) {
  T* const to = reinterpret_cast<T*>(at);
  constexpr int in_word = 4 / sizeof(T), words = count / in_word;
  if (!aligned) {
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (k < n) to[k] = T(word[k / in_word] >> k % in_word * 8 * int(sizeof(T)));
  } else if constexpr (words == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else {
#pragma unroll
    for (int w = 0; w < words; w += 4)
      reinterpret_cast<uint4*>(to)[w / 4] =
          make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

// Two codes a byte, the first one in the low half; n is even.
__device__ __forceinline__ void store_pairs(unsigned char* to, bool aligned, int n, unsigned word) {
  if (aligned) {
    *reinterpret_cast<unsigned*>(to) = word;
    return;
  }
#pragma unroll
  for (int k = 0; k < count; k += 2)
    if (k < n) to[k / 2] = (unsigned char)(word >> 4 * k);
}

__device__ __forceinline__ void encode_fp8(const SmallFloat& format, const float (&x)[count],
                                           unsigned (&word)[count / 4]) {
  const auto put = [&](int k, unsigned code) {
    const int shift = k % 4 * 8;
    word[k / 4] = word[k / 4] & ~(0xffu << shift) | code << shift;
  };
#if __CUDA_ARCH__ >= 890
  if (format.signed_zero_and_nan) {
    bool nan = false;
#pragma unroll
    for (int k = 0; k < count; k += 4) {
      const auto pair = [&](int i) -> unsigned {
        return format.mantissa_bits == 3 ? ptx::e4m3_of(x[i], x[i + 1])
                                         : ptx::e5m2_of(x[i], x[i + 1]);
      };
      word[k / 4] = pair(k) | pair(k + 2) << 16;
#pragma unroll
      for (int i = k; i < k + 4; ++i) nan = nan || isnan(x[i]);
    }
    if (!nan) [[likely]]
      return;
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (isnan(x[k])) put(k, format.nan_code | (signbit(x[k]) ? format.sign_bit() : 0));
    return;
  }
#endif
#pragma unroll
  for (int k = 0; k < count; ++k) put(k, encode(format, x[k], true));
}

// scale: of i8 and i4. to: the elements' place, or the block's that they are in.
__device__ __forceinline__ void store(const attn_kv_append_tensor& of, bool aligned,
                                      unsigned char* to, int n, const float (&x)[count],
                                      unsigned short scale) {
  unsigned halves[count / 2], bytes[count / 4];
  switch (of.dst_type) {
    case attn_element_i8:
    case attn_element_i4: {
      int code[count];  // i4: the even ones first
      const bool i4 = of.dst_type == attn_element_i4;
#pragma unroll
      for (int k = 0; k < count; ++k) code[k] = row_code(of.dst_type, x[k], scale);
      if (!i4) {
        bytes[0] = pack_bytes(code), bytes[1] = pack_bytes(code + 4);
        return store_words<unsigned char>(to, aligned, n, bytes);
      }
      const int even[] = {code[0], code[2], code[4], code[6]},
                odd[] = {code[1], code[3], code[5], code[7]};
      return store_pairs(to, aligned, n,
                         pack_bytes(even) & 0x0f0f0f0f | (pack_bytes(odd) & 0x0f0f0f0f) << 4);
    }
    case attn_element_q8_0:
    case attn_element_q4_0:
      return store_ggml(to, of.dst_type, x, true);
    case attn_element_f32: {
      unsigned words[count];
#pragma unroll
      for (int k = 0; k < count; ++k) words[k] = __float_as_uint(x[k]);
      return store_words<unsigned>(to, aligned, n, words);
    }
    case attn_element_f16:
    case attn_element_bf16:
#pragma unroll
      for (int k = 0; k < count; k += 2)
        halves[k / 2] = of.dst_type == attn_element_f16 ? ptx::pack_f16(x[k], x[k + 1])
                                                        : ptx::pack_bf16(x[k], x[k + 1]);
      return store_words<unsigned short>(to, aligned, n, halves);
    default:
      encode_fp8(of.format, x, bytes);
      return store_words<unsigned char>(to, aligned, n, bytes);
  }
}

// x / by, as __ddiv_rn has it, by way of 1 / by: Markstein's theorem. The remainder is NaN where a
// quotient is not finite, or `by` is not.
__device__ __forceinline__ double divide(double x, double by, double inverse) {
  const double quotient = x * inverse, rest = fma(-quotient, by, x);
  return rest == rest ? fma(rest, inverse, quotient) : quotient;
}

// Elements of a head from d on, of which n are there, rotated and divided. raw: of aligned rows.
template <bool plain>
__device__ __forceinline__ void convert(const attn_kv_append_kernarg& a, int dst_type,
                                        const uint4& raw, const float* descale, const char* head,
                                        int d, int n, int position, bool rotated,
                                        float (&x)[count]) {
  if (plain || a.aligned) {
    unpack(a, head + d * (a.new_type == attn_element_f32 ? 4 : 2), raw, x);
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) x[k] = k < n ? load_element(head, a.new_type, d + k) : 0;
  }
  // Quotients are float64, as in quantize_cuda, and so is what is divided.
  const bool divided = !plain && descale;
  const double by = divided ? *descale : 1, inverse = __drcp_rn(by);
  const bool to_nearest = dst_type == attn_element_f32 || dst_type == attn_element_q8_0 ||
                          dst_type == attn_element_q4_0;
#pragma unroll
  for (int begin = 0; begin < count; begin += together) {
    Rotation r;
    if (rotated) r = find_rotation<plain>(a, head, d + begin, position, x + begin);
#pragma unroll
    for (int k = 0; k < together; ++k) {
      float& e = x[begin + k];
      if (divided) {
        const double y =
            rotated ? fma(double(e), double(r.cos[k]), double(r.other[k]) * r.sin[k]) : e;
        e = narrow(divide(y, by, inverse), to_nearest);
      } else if (rotated) {
        e = fmaf(e, r.cos[k], r.other[k] * r.sin[k]);
      }
    }
  }
}

// The largest of a value of each of the head's threads. By all threads of the block. quad: for one
// of each 4 threads.
__device__ __forceinline__ unsigned largest_of_head(int threads_per_head, unsigned* quad,
                                                    unsigned most) {
  const bool in_warp = 32 % threads_per_head == 0;
  for (int step = 1; step < (in_warp ? threads_per_head : 4); step *= 2)
    most = max(most, __shfl_xor_sync(0xffffffff, most, step));
  if (in_warp) return most;
  const int quads = threads_per_head / 4, first = threadIdx.x / threads_per_head * quads;
  __syncthreads();  // all have read the last ones
  if (threadIdx.x % 4 == 0) quad[threadIdx.x / 4] = most;
  __syncthreads();
#pragma unroll 1
  for (int i = first; i < min(first + quads, int(blockDim.x / 4)); ++i) most = max(most, quad[i]);
  return most;
}

// 8 neighbouring elements of a head: what a thread has of each token.
struct Slice {
  int which, h, d;     // of K, V or q: the head, and the first element
  int n;               // elements of the head from d on; 0 or less: the thread has none
  long long from, to;  // bytes after those where a token's row begins
  bool rotated;
};
__device__ __forceinline__ int heads_of_block(const attn_kv_append_kernarg& a) {
  return blockDim.x / a.threads_per_head;
}
// Where `begin` is the first head of the block.
__device__ __forceinline__ Slice slice_of(const attn_kv_append_kernarg& a, int begin) {
  Slice s;
  const int own = threadIdx.x / a.threads_per_head, head = begin + own;
  s.which = head < a.heads_kv ? 0 : head < 2 * a.heads_kv ? 1 : 2;
  s.h = head - s.which * a.heads_kv;
  s.d = threadIdx.x % a.threads_per_head * count;
  const attn_kv_append_tensor& of = a.tensor[s.which];
  s.n = own < heads_of_block(a) && head < a.heads ? of.dim - s.d : 0;
  s.from = bytes_of(a.new_type, s.h * of.src_stride[2]);
  s.to = bytes_of(of.dst_type, s.h * of.dst_stride[2] + s.d);
  s.rotated = s.which != 1 && s.d < 2 * a.half;
  return s;
}

// Asks for the slice of a token whose row begins at `from`, if rows are aligned.
template <bool plain>
__device__ __forceinline__ uint4 request(const attn_kv_append_kernarg& a, const Slice& s,
                                         const char* from) {
  uint4 raw;
  if ((plain || a.aligned) && s.n > 0 && from)
    raw = load_raw(from + s.from + s.d * (a.new_type == attn_element_f32 ? 4 : 2));
  return raw;
}

// Converts and stores the slice of a token of sequence b. By all threads of the block. raw: of
// request(). quad: see largest_of_head.
template <bool plain>
__device__ __forceinline__ void put(const attn_kv_append_kernarg& a, const Slice& s, const Row& row,
                                    int b, int position, const uint4& raw, unsigned* quad) {
  const attn_kv_append_tensor& of = a.tensor[s.which];
  const bool there = s.n > 0 && row.to;
  float x[count];
  if (there) {
    const float* descale =
        !plain && of.descale.at ? descale_at(of.descale, b, s.h, position) : nullptr;
    convert<plain>(a, of.dst_type, raw, descale, row.from + s.from, s.d, s.n, position, s.rotated,
                   x);
  }
  if (a.heads > 2 * a.heads_kv) __syncthreads();  // q_out may be q
  unsigned short scale = 0;
  if (a.row_scales) {
    unsigned most = 0;  // as bits, of which those of a NaN are the largest
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (there && (plain || k < s.n)) most = max(most, __float_as_uint(x[k]) & 0x7fffffff);
    most = largest_of_head(a.threads_per_head, quad, most);
    if (there && has_row_scale(of.dst_type)) {
      scale = row_scale(of.dst_type, __uint_as_float(most), true);
      if (s.d == 0) row.scale[s.h * of.scale_stride[2]] = scale;
    }
  }
  if (there) store(of, plain || a.aligned, row.to + s.to, s.n, x, scale);
}

// Calls `work` as plain, for aligned rows that are not divided, or not: compiled twice, as what is
// rare takes registers.
template <class Work>
__device__ __forceinline__ void plain_or_not(const attn_kv_append_kernarg& a, const Work& work) {
  if (a.aligned && !a.tensor[0].descale.at && !a.tensor[1].descale.at)
    work.template operator()<true>();
  else
    work.template operator()<false>();
}

// Computed once: the compiler would do so again in each turn of a loop, to save registers.
__device__ __forceinline__ long long keep(long long x) {
  asm volatile("" : "+l"(x));
  return x;
}

// The tokens of a block.
struct Block {
  int tokens;
  Token token[attn_kv_append_max_tokens];
  Row row[attn_kv_append_max_tokens][3];
  unsigned quad[attn_kv_append_max_threads / 4];
};

// place_all: by all threads, finds where the tokens go.
template <bool plain, class Place>
__device__ __forceinline__ void append_block(const attn_kv_append_kernarg& a, Block& block,
                                             const Place& place_all) {
  const int heads_here = heads_of_block(a);
  bool placed = false;
#pragma unroll 1
  for (int begin = blockIdx.y * heads_here; begin < a.heads; begin += gridDim.y * heads_here) {
    Slice s = slice_of(a, begin);
    s.from = keep(s.from), s.to = keep(s.to);
    uint4 next = request<plain>(a, s, block.row[0][s.which].from);
    if (!placed) place_all();
    placed = true;
#pragma unroll 1
    for (int i = 0; i < block.tokens; ++i) {
      const uint4 raw = next;
      if (i + 1 < block.tokens) next = request<plain>(a, s, block.row[i + 1][s.which].from);
      const Token& token = block.token[i];
      put<plain>(a, s, block.row[i][s.which], token.b, token.position, raw, block.quad);
    }
  }
}

// First a warp for each token of the block finds where its rows are and go to. Then each thread
// asks for its elements of the next token before it converts those of one. find: the n-th token,
// but for its position. find_position: that; -1: it goes nowhere. Both by a warp. The first rows
// are asked for before positions, which take two loads.
template <class Find, class FindPosition>
__device__ __forceinline__ void append_tokens(const attn_kv_append_kernarg& a, const Find& find,
                                              const FindPosition& find_position) {
  constexpr int warp_size = 32;
  __shared__ Block block;
  const int first = blockIdx.x * a.tokens_of_block, lane = threadIdx.x % warp_size,
            tokens = min(a.tokens_of_block, a.tokens - first);
  const auto each = [&](const auto& work) {
#pragma unroll 1
    for (int n = threadIdx.x / warp_size; n < tokens; n += blockDim.x / warp_size) work(n);
    __syncthreads();
  };
  if (threadIdx.x == 0) block.tokens = tokens;
  each([&](int n) {
    const Token token = find(first + n);
    if (lane == 0) block.token[n] = token;
    if (lane < 3) block.row[n][lane].from = find_source(a, token, lane);
  });
  const auto place_all = [&] {
    each([&](int n) {
      Token token = block.token[n];
      token.position = token.t < 0 ? -1 : find_position(token);
      __syncwarp();
      if (lane == 0) block.token[n].position = token.position;
      if (lane < 3) place(a, token, lane, &block.row[n][lane]);
    });
  };
  plain_or_not(a, [&]<bool plain>() { append_block<plain>(a, block, place_all); });
}

}  // namespace attn::kv_append
