//# architectures sm_80 sm_90 compute_80
// Copies the keys that each query visits, and their values, one after the other: those of its
// lists in their order, without those that it does not see, and all that it sees of segments
// without lists. Codes of 8 bits become 16-bit floats. A block has some of an item's visited keys;
// it first counts the kept ones before them, so their places do not depend on other blocks.
#include "../common/descale.cuh"
#include "../common/element.cuh"
#include "gather_args.h"
#include "sequences.cuh"

namespace {

using namespace attn;
using namespace attn::device;

constexpr int count = attn_gather_elements;
constexpr int warps = attn_gather_threads / 32;

// What an item visits of a segment: keys in [begin, end) of those in its list, or all of them.
struct Visit {
  int keys;  // visited, of a list with those that are not kept
  long long begin, end;
  const int* list;
};
// A visited key: where its row is. entry < 0: it is not kept.
struct Key {
  int segment, number, entry;
  long long row;
};
// An item: query i of sequence b, which has this many. queries 0: it visits nothing.
struct Item {
  int b;
  long long i, queries;
};

__device__ Item find_item(const attn_gather_kernarg& a, long long n) {
  if (a.by_sequence) return {int(n), 0, 1};
  if (!a.cu_seqlens_q) return {int(n / a.seqlen_q), n % a.seqlen_q, a.seqlen_q};
  const int b = find_sequence(a.cu_seqlens_q + 1, a.batch, n);
  if (b == a.batch) return {0, 0, 0};
  const Span span = packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q);
  if (n < span.begin || n - span.begin >= span.length) return {0, 0, 0};
  return {b, n - span.begin, span.length};
}

__device__ Visit visit(const attn_gather_kernarg& a, const attn_gather_segment& s, const Item& item,
                       long long n, KeyRange seen) {
  if (item.queries == 0) return {0, 0, 0, nullptr};
  Visit v{0, 0, segment_span(s.lengths, item.b).length, nullptr};
  if (s.of_pool) v.end = (long long)s.pages.num_pages * s.pages.page_size;
  if (!a.by_sequence && !s.no_positions) {
    v.begin = max(v.begin, seen.begin);
    v.end = min(v.end, seen.end);
  }
  v.keys = int(max(v.end - v.begin, 0ll));
  if (s.list_size == 0) return v;
  const long long lists = (a.seqlen_q + s.list_queries - 1) / s.list_queries;  // of a sequence
  const long long row = a.cu_seqlens_q ? n : item.b * lists + item.i / s.list_queries;
  const long long number = row * s.list_heads + (s.list_heads == 1 ? 0 : a.first_head);
  v.list = s.list + number * s.list_size;
  v.keys =
      (s.list_lengths ? clamp(s.list_lengths[number], 0, s.list_size) : s.list_size) * s.list_block;
  return v;
}

// What the item visits of each segment.
__device__ void find_visits(const attn_gather_kernarg& a, const Item& item, long long n,
                            Visit* visits) {
  long long all = 0, before = 0;
  for (int i = 0; i < a.num_segments; ++i)
    if (!a.segment[i].no_positions) all += segment_span(a.segment[i].lengths, item.b).length;
  const KeyRange seen = a.mask.keys(item.i, item.queries, all);
  for (int i = 0; i < a.num_segments; ++i) {
    const attn_gather_segment& s = a.segment[i];
    visits[i] = visit(a, s, item, n, {seen.begin - before, seen.end - before});
    if (!s.no_positions) before += segment_span(s.lengths, item.b).length;
  }
}

// Visited key j of an item.
__device__ Key find_key(const attn_gather_kernarg& a, int b, const Visit* visits, int j) {
  constexpr Key none{0, 0, -1, 0};
  int i = 0;
  while (i < a.num_segments && j >= visits[i].keys) j -= visits[i++].keys;
  if (i == a.num_segments) return none;
  const attn_gather_segment& s = a.segment[i];
  const Visit& v = visits[i];
  long long key = v.begin + j;
  if (v.list) {
    key = (long long)v.list[j / s.list_block] * s.list_block + j % s.list_block;
    if (key < v.begin || key >= v.end) return none;
  }
  if (s.of_pool) return {i, int(key), int(key / s.pages.page_size), key % s.pages.page_size};
  if (s.pages.block_table) {
    const int page =
        s.pages.block_table[b * (long long)s.pages.max_pages + key / s.pages.page_size];
    if (unsigned(page) >= unsigned(s.pages.num_pages)) return none;
    return {i, int(key), page, key % s.pages.page_size};
  }
  if (s.lengths.cu_seqlens) return {i, int(key), 0, segment_span(s.lengths, b).begin + key};
  return {i, int(key), b, key};
}

// Exact. There is an instruction for it from sm_89 on.
__device__ __forceinline__ float of_e4m3(unsigned code) {
  const unsigned magnitude = code & 0x7f;
  const float x = ptx::unpack_f16((unsigned short)((code & 0x80) << 8 | magnitude << 7)) * 256;
  return magnitude == 0x7f ? __uint_as_float(0x7fc00000) : x;
}
__device__ __forceinline__ void read_e4m3(const unsigned char* from, float scale,
                                          float (&x)[count]) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
#pragma unroll
  for (int k = 0; k < count; ++k) x[k] = of_e4m3((k < 4 ? v.x : v.y) >> k % 4 * 8 & 0xff) * scale;
}
template <class Element>
__device__ __forceinline__ void read_half(const unsigned char* from, float (&x)[count]) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const unsigned word[] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < count; ++k)
    x[k] = Element::unpack((unsigned short)(word[k / 2] >> k % 2 * 16));
}

// Elements d to d + count - 1 of a row.
template <class Element>
__device__ uint4 convert(const attn_gather_tensor& t, const unsigned char* row, const float* scale,
                         float descale, int d) {
  constexpr int latent = 512, group = 128, rope = 528;  // of mla_656: bytes
  float x[count];
  if (t.type == Element::type) {
    read_half<Element>(row + 2 * d, x);
  } else if (t.type == attn_element_mla_656 && d >= latent) {
    read_half<BF16>(row + rope + 2 * (d - latent), x);
  } else {
    const float by = t.type == attn_element_mla_656
                         ? reinterpret_cast<const float*>(row + latent)[d / group]
                     : t.type == attn_element_f8_e4m3fn_token ? *scale
                                                              : 1;
    read_e4m3(row + d, by, x);
  }
  unsigned word[count / 2];
#pragma unroll
  for (int k = 0; k < count; k += 2)
    word[k / 2] = Element::pack(x[k] * descale, x[k + 1] * descale);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Row `at` of the item's: by all lanes of a warp.
template <class Element>
__device__ void copy(const attn_gather_kernarg& a, int which, const Key& key, int b, long long at) {
  const attn_gather_tensor& t = a.segment[key.segment].tensor[which];
  const int of_head = a.dim[which] / count;
  uint4* const to = static_cast<uint4*>(a.dst[which]) + at * a.heads * of_head;
  const unsigned char* const from = static_cast<const unsigned char*>(t.src) +
                                    key.entry * t.src_stride[0] + key.row * t.src_stride[1];
  for (int v = threadIdx.x % 32; v < a.heads * of_head; v += 32) {
    const int h = a.first_head + v / of_head, d = v % of_head * count;
    const unsigned char* const row = from + h * t.src_stride[2];
    if (t.type == Element::type && !t.descale.at) {
      to[v] = *reinterpret_cast<const uint4*>(row + 2 * d);
      continue;
    }
    const float* const scale = t.scale + key.entry * t.scale_stride[0] +
                               key.row * t.scale_stride[1] + h * t.scale_stride[2];
    const float descale = t.descale.at ? *descale_at(t.descale, b, h, key.number) : 1;
    to[v] = convert<Element>(t, row, scale, descale, d);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_gather_threads)
    gather_cuda(const __grid_constant__ attn_gather_kernarg a) {
  __shared__ Visit visits[attn_gather_max_segments];
  __shared__ Key kept[attn_gather_threads];
  __shared__ int kept_of_warp[warps];
  static_assert(sizeof visits + sizeof kept + sizeof kept_of_warp == attn_gather_shared_bytes);
  const unsigned item = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Item of = find_item(a, a.first + item);
  if (threadIdx.x == 0) find_visits(a, of, a.first + item, visits);
  __syncthreads();

  const int first = int(part) * attn_gather_threads;
  int before = 0;
  for (int j = 0; j < first; j += attn_gather_threads)
    before += __syncthreads_count(find_key(a, of.b, visits, j + threadIdx.x).entry >= 0);
  const Key key = find_key(a, of.b, visits, first + threadIdx.x);
  const unsigned lanes = __ballot_sync(0xffffffff, key.entry >= 0);
  if (lane == 0) kept_of_warp[warp] = __popc(lanes);
  __syncthreads();
  int place = __popc(lanes & ((1u << lane) - 1)), all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) place += kept_of_warp[w];
    all += kept_of_warp[w];
  }
  if (key.entry >= 0) kept[place] = key;
  __syncthreads();

  for (int n = warp; n < all; n += warps) {
    const long long at = item * (long long)a.rows + before + n;
    for (int which = 0; which < 2; ++which) {
      if (!a.dst[which]) continue;
      if (a.dst_type == attn_element_f16)
        copy<F16>(a, which, kept[n], of.b, at);
      else
        copy<BF16>(a, which, kept[n], of.b, at);
    }
  }
  if (part == a.parts - 1 && threadIdx.x == 0) a.lengths[item] = before + all;
}
