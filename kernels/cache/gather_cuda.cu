//# architectures sm_80 sm_90 compute_80
// Copies the keys that each query visits (visits.cuh), and their values, one after the other.
// Codes of 8 bits become 16-bit floats. A block has some of an item's visited keys; it first counts
// the kept ones before them, so their places do not depend on other blocks.
#include "../common/descale.cuh"
#include "../common/element.cuh"
#include "visits.cuh"

namespace {

using namespace attn;
using namespace attn::device;

constexpr int count = attn_gather_elements;
constexpr int warps = attn_gather_threads / 32;

// Visited key j of an item, over all its segments.
__device__ Key find_key(const attn_gather_kernarg& a, int b, const Visit* visits, int j) {
  int i = 0;
  while (i < a.visits.num_segments && j >= visits[i].keys) j -= visits[i++].keys;
  if (i == a.visits.num_segments) return {0, 0, -1, 0};
  Key key[1];
  find_keys(a.visits, b, visits[i], i, j, 0, key);
  return key[0];
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
  const attn_gather_tensor& t = a.tensor[key.segment][which];
  const int of_head = a.dim[which] / count;
  uint4* const to = static_cast<uint4*>(a.dst[which]) + at * a.heads * of_head;
  const unsigned char* const from = static_cast<const unsigned char*>(t.src) +
                                    key.entry * t.src_stride[0] + key.row * t.src_stride[1];
  for (int v = threadIdx.x % 32; v < a.heads * of_head; v += 32) {
    const int h = a.visits.first_head + v / of_head, d = v % of_head * count;
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
  const int warp = threadIdx.x / 32;
  const Item of = find_item(a.visits, a.visits.first + item);
  if (threadIdx.x < 32) find_visits(a.visits, of, a.visits.first + item, visits);
  __syncthreads();

  const int first = int(part) * attn_gather_threads;
  int before = 0;
  for (int j = 0; j < first; j += attn_gather_threads)
    before += __syncthreads_count(find_key(a, of.b, visits, j + threadIdx.x).entry >= 0);
  const Key key = find_key(a, of.b, visits, first + threadIdx.x);
  const Kept<warps, 1> of_block({key.entry >= 0}, kept_of_warp);
  if (key.entry >= 0) kept[of_block.place[0]] = key;
  __syncthreads();

  for (int n = warp; n < of_block.all; n += warps) {
    const long long at = item * (long long)a.rows + before + n;
    for (int which = 0; which < 2; ++which) {
      if (!a.dst[which]) continue;
      if (a.dst_type == attn_element_f16)
        copy<F16>(a, which, kept[n], of.b, at);
      else
        copy<BF16>(a, which, kept[n], of.b, at);
    }
  }
  if (part == a.parts - 1 && threadIdx.x == 0) a.lengths[item] = before + of_block.all;
}
