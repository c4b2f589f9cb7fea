// Quantisation to fp8, to ggml blocks and to codes with scales.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/cache_format.h"
#include "core/ceil_div.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "core/interrupt.h"
#include "core/row_scale.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "problem/operations.h"

namespace attn {
namespace {

constexpr int64_t chunk = 128;  // elements decoded at a time; whole ggml blocks

struct Row {
  int64_t b, s, h;
  int64_t src, dst;  // offsets in elements
  int64_t group;     // index of its descale
};

Row row_of(const attn_quantize_problem& p, int64_t item) {
  Row r{item / p.heads / p.seqlen, item / p.heads % p.seqlen, item % p.heads, 0, 0, 0};
  r.src = r.b * p.src_stride.batch + r.s * p.src_stride.seq + r.h * p.src_stride.head;
  r.dst = r.b * p.dst_stride.batch + r.s * p.dst_stride.seq + r.h * p.dst_stride.head;
  if (p.kind == ATTN_DESCALE_HEAD) r.group = r.b * p.heads + r.h;
  if (p.kind == ATTN_DESCALE_BLOCK) {
    r.group = (r.b * p.heads + r.h) * ceil_div(p.seqlen, p.descale_block_keys) +
              r.s / p.descale_block_keys;
  }
  return r;
}

// Calls visit(first element, count, values) for the row's elements.
template <class Visit>
void for_each_chunk(const attn_quantize_problem& p, const attn_quantize_args& args, const Row& row,
                    Interrupt& interrupt, int thread, Visit&& visit) {
  float x[chunk];
  for (int64_t d = 0; d < p.head_dim; d += chunk) {
    const int64_t n = std::min(chunk, p.head_dim - d);
    if (interrupt.stop(thread, 4 * n)) return;
    decode_row(p.src_type, args.src, row.src + d, n, x);
    visit(d, n, x);
  }
}

// descale = max |x| over the finite x, divided by the largest value of the type. Finite floats that
// are not negative are ordered as their bits, so that any number of threads may raise a maximum.
void find_descales(const attn_quantize_problem& p, const attn_quantize_args& args, int64_t rows,
                   ThreadPool& pool, Interrupt& interrupt, int threads) {
  std::fill_n(args.descale, num_descales(p), 0.0f);
  auto one = [&](int64_t item, int thread) {
    const Row row = row_of(p, item);
    float amax = 0;
    for_each_chunk(p, args, row, interrupt, thread, [&](int64_t, int64_t n, const float* x) {
      for (int64_t k = 0; k < n; ++k) {
        if (std::isfinite(x[k])) amax = std::max(amax, std::abs(x[k]));
      }
    });
    std::atomic_ref<float> shared(args.descale[row.group]);
    float seen = shared.load(std::memory_order_relaxed);
    while (seen < amax && !shared.compare_exchange_weak(seen, amax, std::memory_order_relaxed)) {
    }
  };
  pool.for_each(rows, one, &interrupt, threads);
  // Of nvfp4 a code times a scale of 16 elements.
  const double max_finite = type_info(p.dst_type).max_finite *
                            (p.dst_type == ATTN_NVFP4 ? type_info(ATTN_F8_E4M3FN).max_finite : 1);
  for (int64_t g = 0; g < num_descales(p); ++g) {
    // A maximum so small that the quotient underflows keeps the smallest positive descale.
    float& descale = args.descale[g];
    if (descale == 0)
      descale = 1;
    else
      descale = std::max(float(descale / max_finite), std::bit_cast<float>(1u));
  }
}

// The scales of a row, in their array.
char* scales_of(const attn_quantize_problem& p, const attn_quantize_args& args, const Row& row) {
  const attn_strides& stride = p.scale_stride;
  const int64_t at = row.b * stride.batch + row.s * stride.seq + row.h * stride.head;
  return static_cast<char*>(args.scale) + at * type_info(p.dst_type).scale_bytes;
}

// Formats of servers' caches; a chunk is a whole number of pieces of one scale.
void quantize_cache_row(const attn_quantize_problem& p, const attn_quantize_args& args,
                        const Row& row, Interrupt& interrupt, int thread) {
  char* const scales = scales_of(p, args, row);
  char* const to = static_cast<char*>(args.dst) + dtype_bytes(p.dst_type, row.dst);
  const double descale = p.scale == ATTN_SCALE_ONE ? 1 : args.descale[row.group];
  if (p.dst_type == ATTN_F8_E4M3FN_TOKEN) {
    double amax = 0;
    for_each_chunk(p, args, row, interrupt, thread, [&](int64_t, int64_t n, const float* x) {
      for (int64_t k = 0; k < n; ++k)
        if (std::isfinite(x[k])) amax = std::max(amax, std::abs(double(x[k])));
    });
    const float scale = token_scale(amax);
    std::memcpy(scales, &scale, sizeof scale);
  }
  for_each_chunk(p, args, row, interrupt, thread, [&](int64_t d, int64_t n, const float* x) {
    double wide[chunk];
    for (int64_t k = 0; k < n; ++k) wide[k] = x[k] / descale;
    encode_cache(p.dst_type, to, scales, d, n, wide);
  });
}

// i8 and i4: a scale for each row.
void quantize_scaled_row(const attn_quantize_problem& p, const attn_quantize_args& args,
                         const Row& row, Interrupt& interrupt, int thread) {
  RowMax most;
  for_each_chunk(p, args, row, interrupt, thread,
                 [&](int64_t, int64_t n, const float* x) { most.take(x, n); });
  const uint16_t scale = row_scale(p.dst_type, most.amax, most.has_nan, p.saturate != 0);
  std::memcpy(scales_of(p, args, row), &scale, sizeof scale);
  for_each_chunk(p, args, row, interrupt, thread, [&](int64_t d, int64_t n, const float* x) {
    double wide[chunk];
    std::copy_n(x, n, wide);
    encode_codes(p.dst_type, args.dst, row.dst + d, n, wide, scale);
  });
}

// The quotient of two floats is computed in float64: no rounding there can create a tie, so the
// codes are those of the exact quotient.
void quantize_row(const attn_quantize_problem& p, const attn_quantize_args& args, const Row& row,
                  Interrupt& interrupt, int thread) {
  if (dtype_is_cache(p.dst_type)) return quantize_cache_row(p, args, row, interrupt, thread);
  if (dtype_has_scales(p.dst_type)) return quantize_scaled_row(p, args, row, interrupt, thread);
  const bool saturate = p.saturate != 0;
  const double descale = p.scale == ATTN_SCALE_ONE ? 1 : args.descale[row.group];
  for_each_chunk(p, args, row, interrupt, thread, [&](int64_t d, int64_t n, const float* x) {
    if (dtype_is_ggml(p.dst_type)) {
      for (int64_t k = 0; k < n; k += 32) {
        char* block = static_cast<char*>(args.dst) + dtype_bytes(p.dst_type, row.dst + d + k);
        encode_block(p.dst_type, x + k, block, saturate);
      }
      return;
    }
    for (int64_t k = 0; k < n; ++k) {
      encode_element(p.dst_type, args.dst, row.dst + d + k, x[k] / descale, saturate);
    }
  });
}

void quantize(const attn_quantize_problem& p, const attn_quantize_args& args, ThreadPool& pool,
              Interrupt& interrupt) {
  const int64_t rows = p.batch * p.seqlen * p.heads;
  const int threads = pool.worth(double(rows) * 4 * double(p.head_dim));
  if (p.scale == ATTN_SCALE_AMAX) find_descales(p, args, rows, pool, interrupt, threads);
  if (p.scale == ATTN_SCALE_ONE && args.descale) std::fill_n(args.descale, num_descales(p), 1.0f);
  pool.for_each(
      rows,
      [&](int64_t item, int thread) { quantize_row(p, args, row_of(p, item), interrupt, thread); },
      &interrupt, threads);
}

bool always() {
  return true;
}

}  // namespace

const HostKernel quantize_reference_kernel = {
    .runs_here = always, .isa = "any", .quantize = quantize};
const HostKernel quantize_cpu_kernel = {.runs_here = always, .isa = "any", .quantize = quantize};

}  // namespace attn
