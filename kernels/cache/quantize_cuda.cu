//# architectures sm_80 sm_90 compute_80 local_bytes=8
// Quantisation to fp8 and to ggml blocks, with the codes of core/dtype.h, to i8, i4 and nvfp4. A
// warp takes 32 neighbouring elements of a row at a time, which is one ggml block.
//
// A launch is one kernel, so that only a block can know the maximum of a group before it quantizes:
// with scale amax a group is the work of one block, a whole tensor too. That is slow for large
// tensors with one scale, and right.
#include "../common/cache_format.cuh"
#include "../common/convert.cuh"
#include "../common/row_scale.cuh"
#include "../shared/quantize_args.h"

namespace {

constexpr unsigned all_lanes = 0xffffffff;
constexpr float float_infinity = __builtin_huge_valf();

// A box of rows.
struct Span {
  long long b, s, h;               // its first row
  long long batches, seqs, heads;  // its extent
};

__device__ Span whole(const attn_quantize_kernarg& a) {
  return {0, 0, 0, a.batch, a.seqlen, a.heads};
}
__device__ Span group_span(const attn_quantize_kernarg& a, long long group) {
  const long long heads = a.heads / a.group_heads;
  const long long s = group % a.seq_groups * a.group_seqs, outer = group / a.seq_groups;
  const long long rest = a.seqlen - s;
  return {outer / heads * a.group_batch,
          s,
          outer % heads * a.group_heads,
          a.group_batch,
          rest < a.group_seqs ? rest : a.group_seqs,
          a.group_heads};
}

// Element 32 * chunk + lane of a row, for item number `item` of the span.
struct Place {
  long long src, dst;      // offsets in elements
  long long group, scale;  // scale: of nvfp4 its own, else its row's
  bool inside;             // of head_dim
};

__device__ Place place(const attn_quantize_kernarg& a, const Span& span, long long chunks,
                       long long item) {
  const long long d = item % chunks * 32 + threadIdx.x % 32;
  item /= chunks;
  const long long h = span.h + item % span.heads;
  item /= span.heads;
  const long long s = span.s + item % span.seqs, b = span.b + item / span.seqs;
  Place p;
  p.src = b * a.src_stride[0] + s * a.src_stride[1] + h * a.src_stride[2] + d;
  p.dst = b * a.dst_stride[0] + s * a.dst_stride[1] + h * a.dst_stride[2] + d;
  p.group = (b / a.group_batch * (a.heads / a.group_heads) + h / a.group_heads) * a.seq_groups +
            s / a.group_seqs;
  p.scale = b * a.scale_stride[0] + s * a.scale_stride[1] + h * a.scale_stride[2];
  if (a.dst_type == attn_element_nvfp4) p.scale += d / attn_nvfp4_group;
  p.inside = d < a.head_dim;
  return p;
}

__device__ float load(const attn_quantize_kernarg& a, long long at) {
  return attn::device::load_element(a.src, a.src_type, at);
}

__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}

// The quotient in float64, as src/cpu/quantize.cpp says. A NaN keeps its sign, which the conversion
// to float64 here may drop.
__device__ unsigned encode_quotient(const attn_quantize_kernarg& a, float x, float descale) {
  const attn::SmallFloat& f = a.format;
  if (x != x) return f.nan_code | (f.signed_zero_and_nan && signbit(x) ? f.sign_bit() : 0);
  return attn::encode(f, __ddiv_rn(x, descale), a.saturate);
}

// Codes of neighbours, each half a byte, by all lanes of a warp.
__device__ void store_halves(unsigned char* dst, const Place& p, unsigned code) {
  const unsigned behind = __shfl_down_sync(all_lanes, code, 1);
  if (p.inside && threadIdx.x % 2 == 0)
    dst[p.dst / 2] = (unsigned char)((code & 15) | (behind & 15) << 4);
}

__device__ void quantize_nvfp4(const attn_quantize_kernarg& a, const Place& p, float by) {
  const float x[] = {p.inside ? attn::device::narrow(__ddiv_rn(load(a, p.src), by), false) : 0};
  float most = attn::device::largest_finite(x);
  for (int step = attn_nvfp4_group / 2; step > 0; step /= 2)
    most = attn::ptx::max_nan(most, __shfl_xor_sync(all_lanes, most, step));
  const unsigned scale = attn::device::nvfp4_scale(most);
  if (p.inside && threadIdx.x % attn_nvfp4_group == 0)
    static_cast<unsigned char*>(a.scales)[p.scale] = (unsigned char)scale;
  store_halves(static_cast<unsigned char*>(a.dst), p, attn::device::nvfp4_code(x[0], scale));
}

// The items first, first + step, .. of the span; `descale` counts with scale amax.
__device__ void quantize(const attn_quantize_kernarg& a, const Span& span, long long first,
                         long long step, float descale) {
  const bool ggml = a.dst_type == attn_element_q8_0 || a.dst_type == attn_element_q4_0;
  const long long chunks = (a.head_dim + 31) / 32;
  const long long items = span.batches * span.seqs * span.heads * chunks;
  for (long long item = first; item < items; item += step) {
    const Place p = place(a, span, chunks, item);
    const float by = a.scale == attn_quantize_given ? a.descale[p.group] : descale;
    if (ggml) {
      const float x[] = {load(a, p.src)};
      attn::device::store_ggml(attn::device::ggml_block(a.dst, a.dst_type, p.dst), a.dst_type, x,
                               a.saturate);
    } else if (a.dst_type == attn_element_nvfp4) {
      quantize_nvfp4(a, p, by);
    } else if (p.inside) {
      static_cast<unsigned char*>(a.dst)[p.dst] =
          (unsigned char)encode_quotient(a, load(a, p.src), by);
    }
  }
}

// f8_e4m3fn_token: its codes saturate whatever a.saturate is.
__device__ void quantize_token(const attn_quantize_kernarg& a, long long row, long long chunks) {
  const Span span = whole(a);
  float most = 0;
  for (long long chunk = 0; chunk < chunks; ++chunk) {
    const Place p = place(a, span, chunks, row * chunks + chunk);
    most = fmaxf(most, p.inside ? attn::device::finite_magnitude(load(a, p.src)) : 0);
  }
  const float scale = attn::device::token_scale(warp_max(most));
  for (long long chunk = 0; chunk < chunks; ++chunk) {
    const Place p = place(a, span, chunks, row * chunks + chunk);
    if (chunk == 0 && threadIdx.x % 32 == 0) static_cast<float*>(a.scales)[p.scale] = scale;
    if (!p.inside) continue;
    const float x = load(a, p.src);
    static_cast<unsigned char*>(a.dst)[p.dst] =
        (unsigned char)attn::encode(a.format, __ddiv_rn(x, scale), true);
  }
}

// Types with a scale of a row: rows first, first + step, ..
__device__ void quantize_rows(const attn_quantize_kernarg& a, long long first, long long step) {
  const Span span = whole(a);
  const long long chunks = (a.head_dim + 31) / 32, rows = span.batches * span.seqs * span.heads;
  for (long long row = first; row < rows; row += step) {
    if (a.dst_type == attn_element_f8_e4m3fn_token) {
      quantize_token(a, row, chunks);
      continue;
    }
    float amax = 0;
    bool has_nan = false;
    for (long long chunk = 0; chunk < chunks; ++chunk) {
      const Place p = place(a, span, chunks, row * chunks + chunk);
      const float x = p.inside ? load(a, p.src) : 0;
      has_nan |= x != x;
      amax = fmaxf(amax, fabsf(x));
    }
    amax = warp_max(amax);
    if (__any_sync(all_lanes, has_nan)) amax = __uint_as_float(0x7fc00000);
    const unsigned short scale = attn::device::row_scale(a.dst_type, amax, a.saturate);
    if (threadIdx.x % 32 == 0) {
      const long long h = row % a.heads, s = row / a.heads % a.seqlen, b = row / a.heads / a.seqlen;
      static_cast<unsigned short*>(
          a.scales)[b * a.scale_stride[0] + s * a.scale_stride[1] + h * a.scale_stride[2]] = scale;
    }
    for (long long chunk = 0; chunk < chunks; ++chunk) {
      const Place p = place(a, span, chunks, row * chunks + chunk);
      const int code = attn::device::row_code(a.dst_type, p.inside ? load(a, p.src) : 0, scale);
      unsigned char* dst = static_cast<unsigned char*>(a.dst);
      if (a.dst_type == attn_element_i8) {
        if (p.inside) dst[p.dst] = (unsigned char)code;
      } else {
        store_halves(dst, p, unsigned(code));
      }
    }
  }
}

// The descale of a group, in every thread of the block.
__device__ float find_descale(const attn_quantize_kernarg& a, const Span& span) {
  __shared__ float highest[attn_quantize_warps];
  const int warp = threadIdx.x / 32;
  const long long chunks = (a.head_dim + 31) / 32;
  const long long items = span.batches * span.seqs * span.heads * chunks;
  float amax = 0;
  for (long long item = warp; item < items; item += attn_quantize_warps) {
    const Place p = place(a, span, chunks, item);
    const float x = p.inside ? fabsf(load(a, p.src)) : 0;
    if (x < float_infinity) amax = fmaxf(amax, x);
  }
  amax = warp_max(amax);
  __syncthreads();  // the previous group has been read
  if (threadIdx.x % 32 == 0) highest[warp] = amax;
  __syncthreads();
  for (int w = 0; w < attn_quantize_warps; ++w) amax = fmaxf(amax, highest[w]);
  // A maximum so small that the quotient underflows keeps the smallest positive descale.
  if (amax == 0) return 1;
  return fmaxf(float(__ddiv_rn(amax, a.max_finite)), __uint_as_float(1));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * attn_quantize_warps)
    quantize_cuda(const __grid_constant__ attn_quantize_kernarg a) {
  const int warp = threadIdx.x / 32;
  if (a.scale == attn_quantize_amax) {
    for (long long group = blockIdx.x; group < a.groups; group += gridDim.x) {
      const Span span = group_span(a, group);
      const float descale = find_descale(a, span);
      if (threadIdx.x == 0) a.descale[group] = descale;
      quantize(a, span, warp, attn_quantize_warps, descale);
    }
    return;
  }
  const long long threads = gridDim.x * 32ll * attn_quantize_warps;
  if (a.scale == attn_quantize_one && a.descale) {
    for (long long g = blockIdx.x * 32ll * attn_quantize_warps + threadIdx.x; g < a.groups;
         g += threads)
      a.descale[g] = 1;
  }
  if (attn::has_row_scale(a.dst_type) || a.dst_type == attn_element_f8_e4m3fn_token)
    return quantize_rows(a, blockIdx.x * (long long)attn_quantize_warps + warp, threads / 32);
  quantize(a, whole(a), blockIdx.x * (long long)attn_quantize_warps + warp, threads / 32, 1);
}
