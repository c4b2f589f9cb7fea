//# architectures sm_90
// K and V of segments in codes of 8, 5 or 4 bits, times their scales, as 16-bit floats that
// fwd_sm90_* read. An item is a part of a sequence's keys or values. Keys that no query sees stay
// unwritten; so do entries for pages after the last key that some query sees.
#include "../common/descale.cuh"
#include "../common/element.cuh"
#include "../common/iq4_nl.cuh"
#include "../common/lengths.cuh"
#include "../ptx/convert_fp8.h"
#include "../ptx/grid.h"
#include "../shared/ggml_layout.h"
#include "../shared/nvfp4.h"
#include "dequantise_args.h"

namespace {

using namespace attn;
using namespace attn::device;

constexpr int count = attn_dequantise_elements;
constexpr int chunk_keys = attn_dequantise_keys;

// Types of src: `read` takes `count` elements from element `at` on, a multiple of `count`.
template <auto f16_of_pair>
struct Fp8 {
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const uint4 v =
        __ldcs(reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(base) + at));
    const unsigned word[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < count; k += 2) {
      const unsigned pair = f16_of_pair((unsigned short)(word[k / 4] >> k % 4 * 8));
      x[k] = ptx::unpack_f16((unsigned short)pair);
      x[k + 1] = ptx::unpack_f16((unsigned short)(pair >> 16));
    }
  }
};
using E4M3 = Fp8<ptx::f16_of_e4m3>;
using E5M2 = Fp8<ptx::f16_of_e5m2>;

// As it is in dst.
template <class Element>
struct Plain {
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const unsigned short* from = static_cast<const unsigned short*>(base) + at;
#pragma unroll
    for (int k = 0; k < count; k += 8) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from + k));
      const unsigned word[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[k + i] = Element::unpack((unsigned short)(word[i / 2] >> i % 2 * 16));
    }
  }
};

// 16 bytes of ggml's block behind its scale, from an even address on. Words that begin 2 bytes in
// front of that are the block's too.
__device__ __forceinline__ void load_codes(const unsigned char* from, unsigned (&word)[4]) {
  const bool between = reinterpret_cast<unsigned long long>(from) % 4 != 0;
  const unsigned* words = reinterpret_cast<const unsigned*>(from - (between ? 2 : 0));
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = __ldg(words + i);
  if (!between) return;
  const unsigned last = __ldg(reinterpret_cast<const unsigned short*>(words + 4));
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = __byte_perm(word[i], i < 3 ? word[i + 1] : last, 0x5432);
}
__device__ __forceinline__ float load_half(const unsigned short* from) {
  return ptx::unpack_f16(__ldg(from));
}
// iq4_nl's value at a code.
__device__ __forceinline__ int iq4_nl_value(unsigned code) {
  constexpr unsigned words[] = {iq4_nl_word(0), iq4_nl_word(4), iq4_nl_word(8), iq4_nl_word(12)};
  const unsigned low = __byte_perm(words[0], words[1], code & 7),
                 high = __byte_perm(words[2], words[3], code & 7);
  return (signed char)(code < 8 ? low : high);
}

// Half a block. Products are exact, sums rounded once.
template <int type>
struct Block {
  static constexpr BlockLayout layout = block_layout(type);
  static constexpr bool bytes = layout.code_bytes == 32;
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const unsigned char* block = static_cast<const unsigned char*>(base) + at / 32 * layout.size();
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(block);
    const int half = int(at % 32 / 16);
    const float d = load_half(halves), m = layout.has_min ? load_half(halves + 1) : 0;
    const unsigned fifth = layout.has_bit ? __ldg(halves + layout.bits_at() / 2 + half) << 4 : 0;
    unsigned word[4];
    load_codes(block + layout.codes_at() + (bytes ? at % 32 : 0), word);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const unsigned byte = word[k / 4] >> k % 4 * 8;
      const unsigned code = (byte >> 4 * half & 15) | (fifth >> k & 16);
      const float value = bytes                         ? float((signed char)byte)
                          : type == attn_element_iq4_nl ? float(iq4_nl_value(code))
                                                        : float(int(code) - layout.offset);
      x[k] = layout.has_min ? fmaf(value, d, m) : value * d;
    }
  }
};
// Whose scales are beside them.
struct I8 {
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const uint4 v =
        __ldcs(reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(base) + at));
    const unsigned word[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < count; ++k) x[k] = float((signed char)(word[k / 4] >> k % 4 * 8));
  }
};
struct I4 {
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const uint2 v =
        __ldcs(reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(base) + at / 2));
    const unsigned word[] = {v.x, v.y};
#pragma unroll
    for (int k = 0; k < count; ++k) x[k] = float(int(word[k / 8] << (28 - k % 8 * 4)) >> 28);
  }
};

// Of 16 elements.
struct NvFp4 {
  static_assert(count == attn_nvfp4_group);
  static __device__ __forceinline__ void read(const void* base, long long at, float (&x)[count]) {
    const uint2 v =
        __ldcs(reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(base) + at / 2));
    const unsigned word[] = {v.x, v.y};
#pragma unroll
    for (int k = 0; k < count; ++k) {
      // In f16's bits, with the exponent's low two, it is 2^-14 times its value.
      const unsigned code = word[k / 8] >> k % 8 * 4;
      x[k] = ptx::unpack_f16((unsigned short)((code & 7) << 9 | (code & 8) << 12)) * (1 << 14);
    }
  }
};
__device__ __forceinline__ float load_e4m3(const unsigned char* from) {
  return ptx::unpack_f16((unsigned short)ptx::f16_of_e4m3(__ldg(from)));
}

template <class Element>
__device__ __forceinline__ void store(unsigned short* to, const float (&x)[count]) {
#pragma unroll
  for (int k = 0; k < count; k += 8)
    *reinterpret_cast<uint4*>(to + k) =
        make_uint4(Element::pack(x[k], x[k + 1]), Element::pack(x[k + 2], x[k + 3]),
                   Element::pack(x[k + 4], x[k + 5]), Element::pack(x[k + 6], x[k + 7]));
}

// Keys of a segment that some query of sequence b sees.
struct SeenRange {
  int begin, end;
};
__device__ SeenRange seen_range(const attn_dequantise_kernarg& a, int segment, int b) {
  long long before = 0, all = 0;
  int length = 0;
  for (int i = 0; i < a.num_segments; ++i) {
    if (i == segment) before = all;
    const int keys = segment_span(a.segment[i].lengths, b).length;
    if (i == segment) length = keys;
    all += keys;
  }
  const int queries =
      a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q).length : a.seqlen_q;
  if (queries == 0) return {0, 0};
  return {clamp(a.mask.keys(0, queries, all).begin - before, 0, length),
          clamp(a.mask.keys(queries - 1, queries, all).end - before, 0, length)};
}

// Rows of src and of dst that follow each other, of keys in one block of descales.
struct Rows {
  long long entry, src, dst;
  int count;
};

enum class Scales { none, of_row, of_row_f32, of_16 };
template <class Type, class Element, Scales scales = Scales::none>
__device__ __forceinline__ void convert(const attn_dequantise_tensor& t, int heads, int b, int key,
                                        const Rows& rows) {
  // Vectors of a head and of a row. A thread has some of a row each time, or the same of some rows.
  const unsigned of_head = t.dim / count, of_row = heads * of_head;
  const unsigned first = threadIdx.x / of_row, step = max(blockDim.x / of_row, 1u);
  if (first >= step) return;
  for (unsigned column = threadIdx.x % of_row; column < of_row; column += blockDim.x) {
    const int h = int(column / of_head);
    const float descale = t.descale.at ? *descale_at(t.descale, b, h, key) : 1;
    using Scale =
        std::conditional_t<scales == Scales::of_16, unsigned char,
                           std::conditional_t<scales == Scales::of_row_f32, float, unsigned short>>;
    const Scale* scale = static_cast<const Scale*>(t.scale) + rows.entry * t.scale_stride[0] +
                         (rows.src + first) * t.scale_stride[1] + h * t.scale_stride[2] +
                         (scales == Scales::of_16 ? column % of_head : 0);
    long long src = rows.entry * t.src_stride[0] + (rows.src + first) * t.src_stride[1] +
                    h * t.src_stride[2] + column % of_head * count;
    unsigned short* dst =
        static_cast<unsigned short*>(t.dst) + ((rows.dst + first) * of_row + column) * count;
    for (int row = int(first); row < rows.count; row += int(step)) {
      float x[count];
      Type::read(t.src, src, x);
      if constexpr (scales != Scales::none) {
        float by;
        if constexpr (scales == Scales::of_16)
          by = load_e4m3(scale);
        else if constexpr (scales == Scales::of_row_f32)
          by = __ldg(scale);
        else
          by = load_half(scale);
#pragma unroll
        for (float& value : x) value *= by;
        scale += step * t.scale_stride[1];
      }
#pragma unroll
      for (float& value : x) value *= descale;
      store<Element>(dst, x);
      src += step * t.src_stride[1];
      dst += (long long)step * of_row * count;
    }
  }
}

template <class Element>
__device__ __forceinline__ void convert(const attn_dequantise_tensor& t, int heads, int b, int key,
                                        const Rows& rows) {
  switch (t.type) {
    case attn_element_f8_e4m3fn:
      return convert<E4M3, Element>(t, heads, b, key, rows);
    case attn_element_f8_e5m2:
      return convert<E5M2, Element>(t, heads, b, key, rows);
    case attn_element_q8_0:
      return convert<Block<attn_element_q8_0>, Element>(t, heads, b, key, rows);
    case attn_element_q4_0:
      return convert<Block<attn_element_q4_0>, Element>(t, heads, b, key, rows);
    case attn_element_q4_1:
      return convert<Block<attn_element_q4_1>, Element>(t, heads, b, key, rows);
    case attn_element_q5_0:
      return convert<Block<attn_element_q5_0>, Element>(t, heads, b, key, rows);
    case attn_element_q5_1:
      return convert<Block<attn_element_q5_1>, Element>(t, heads, b, key, rows);
    case attn_element_iq4_nl:
      return convert<Block<attn_element_iq4_nl>, Element>(t, heads, b, key, rows);
    case attn_element_i8:
      return convert<I8, Element, Scales::of_row>(t, heads, b, key, rows);
    case attn_element_i4:
      return convert<I4, Element, Scales::of_row>(t, heads, b, key, rows);
    case attn_element_f8_e4m3fn_token:
      return convert<E4M3, Element, Scales::of_row_f32>(t, heads, b, key, rows);
    case attn_element_nvfp4:
      return convert<NvFp4, Element, Scales::of_16>(t, heads, b, key, rows);
    default:
      return convert<Plain<Element>, Element>(t, heads, b, key, rows);
  }
}

// Part `part` of a sequence's keys or values, counted by `which`: K and V of each segment.
__device__ __forceinline__ void convert_part(const attn_dequantise_kernarg& a, unsigned which,
                                             int b, unsigned part) {
  const attn_dequantise_segment& s = a.segment[which / 2];
  const attn_dequantise_tensor& t = s.tensor[which % 2];
  const int first = int(part) * a.part_keys;
  if (!t.dst || first >= s.lengths.capacity) return;
  const SeenRange seen = seen_range(a, int(which) / 2, b);
  const int end = min(seen.end, first + a.part_keys);
  // A tile of the forward kernel may begin before the first key that some query sees, and reads the
  // entries of all its keys.
  if (s.pages.block_table && which % 2 == 0 && threadIdx.x == 0)
#pragma unroll 1
    for (int n = first / s.pages.page_size;
         n < min(seen.begin, first + a.part_keys) / s.pages.page_size; ++n)
      s.table[b * s.table_pages + n] = -1;
  for (int key = max(first, seen.begin / chunk_keys * chunk_keys); key < end; key += chunk_keys) {
    Rows rows{b, key, b * s.rows + key, min(chunk_keys, end - key)};
    if (s.pages.block_table) {
      const int n = key / s.pages.page_size,
                page = s.pages.block_table[b * (long long)s.pages.max_pages + n];
      const bool there = unsigned(page) < unsigned(s.pages.num_pages);
      const int at = b * s.table_pages + n;
      if (which % 2 == 0 && threadIdx.x == 0) s.table[at] = there ? at : -1;
      if (!there) continue;
      rows.entry = page;
      rows.src = key % s.pages.page_size;
    } else if (s.lengths.cu_seqlens) {
      rows.entry = 0;
      rows.src = rows.dst = segment_span(s.lengths, b).begin + key;
    }
    if (a.dst_type == attn_element_f16)
      convert<F16>(t, a.heads, b, key, rows);
    else
      convert<BF16>(t, a.heads, b, key, rows);
  }
}

struct Part {
  unsigned which, part;
  int b;  // below 0: there are no more
};
__device__ __forceinline__ Part part_of_capacities(const attn_dequantise_kernarg& a,
                                                   unsigned item) {
  if (item >= a.items) return {0, 0, -1};
  return {item / a.parts / a.batch, item % a.parts, int(item / a.parts % a.batch)};
}
// Of the sequences that have least_queries queries or more, one sequence after the other. By all
// lanes of each warp, 32 sequences at a time. Nothing is kept between items, for want of registers.
__device__ __forceinline__ Part part_of_lengths(const attn_dequantise_kernarg& a, unsigned item) {
  const int lane = threadIdx.x % 32;
  unsigned before = 0;
#pragma unroll 1
  for (int first = 0; first < int(a.batch); first += 32) {
    const int b = first + lane;
    unsigned parts = 0;
    if (b < int(a.batch) &&
        packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q).length >= a.least_queries) {
      int longest = 0;
      for (int i = 0; i < a.num_segments; ++i)
        longest = max(longest, segment_span(a.segment[i].lengths, b).length);
      parts = unsigned((longest + a.part_keys - 1) / a.part_keys);
    }
    unsigned through = 2 * a.num_segments * parts;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned x = __shfl_up_sync(0xffffffff, through, step);
      if (lane >= step) through += x;
    }
    through += before;
    const unsigned found = __ballot_sync(0xffffffff, item < through);
    if (found) {
      const int at = __ffs(found) - 1;
      parts = __shfl_sync(0xffffffff, parts, at);
      const unsigned n = item + 2 * a.num_segments * parts - __shfl_sync(0xffffffff, through, at);
      return {n / parts, n % parts, first + at};
    }
    before = __shfl_sync(0xffffffff, through, 31);
  }
  return {0, 0, -1};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_dequantise_threads, attn_dequantise_blocks)
    dequantise_sm90(const __grid_constant__ attn_dequantise_kernarg a) {
  if (!a.concurrent) ptx::grid_let_next_start();
  ptx::grid_wait();
  if (a.concurrent) ptx::grid_let_next_start();  // it reads memory as soon as it starts
#pragma unroll 1
  for (unsigned item = blockIdx.x;; item += gridDim.x) {
    const Part at = a.least_queries > 0 ? part_of_lengths(a, item) : part_of_capacities(a, item);
    if (at.b < 0) return;
    convert_part(a, at.which, at.b, at.part);
  }
}
