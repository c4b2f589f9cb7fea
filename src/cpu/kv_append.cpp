// Appending to a KV cache: rows of new tokens are rotated, divided by their descale and stored. And
// moving pages of one cache to the end of another, which is the same with rows from pages.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/cache_format.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "core/interrupt.h"
#include "core/row_scale.h"
#include "cpu/kernels.h"
#include "cpu/kv_view.h"
#include "cpu/pool.h"
#include "problem/operations.h"

namespace attn {
namespace {

constexpr int64_t chunk = 128;  // elements at a time; whole ggml blocks and pairs of neighbours

// One head of one token.
struct Row {
  attn_dtype type;
  const void* base;
  int64_t at;              // of its first element
  int64_t half;            // pairs to rotate
  bool interleaved;        // as rotary_interleaved
  const float *cos, *sin;  // [half], at the token's position

  // Elements [d, d + n), rotated, n <= chunk.
  void read(int64_t d, int64_t n, double* x) const {
    decode_row(type, base, at + d, n, x);
    const int64_t end = std::min(n, 2 * half - d);
    if (end <= 0) return;
    if (interleaved) {
      for (int64_t k = 0; k < end; k += 2) rotate((d + k) / 2, &x[k], &x[k + 1]);
      return;
    }
    // Before `middle` the other element of a pair is `half` later, from there on `half` earlier.
    double other[chunk];
    const int64_t middle = std::clamp<int64_t>(half - d, 0, end);
    decode_row(type, base, at + d + half, middle, other);
    decode_row(type, base, at + d + middle - half, end - middle, other + middle);
    for (int64_t k = 0; k < middle; ++k) rotate(d + k, &x[k], &other[k]);
    for (int64_t k = middle; k < end; ++k) rotate(d + k - half, &other[k], &x[k]);
  }

 private:
  // In float64 products of floats are exact.
  void rotate(int64_t i, double* x, double* y) const {
    const double c = cos[i], s = sin[i], first = *x;
    *x = first * c - *y * s;
    *y = first * s + *y * c;
  }
};

// Stores x / descale, n elements in whole blocks, from element d of a row on. Not for types with
// scales of a row or its pieces.
void store(attn_dtype type, char* row, int64_t d, int64_t n, const double* x, double descale) {
  if (!dtype_is_ggml(type)) {
    for (int64_t k = 0; k < n; ++k) encode_element(type, row, d + k, x[k] / descale, true);
    return;
  }
  for (int64_t k = 0; k < n; k += 32) {
    float block[32];
    for (int64_t i = 0; i < 32; ++i) block[i] = float(x[k + i] / descale);
    encode_block(type, block, row + dtype_bytes(type, d + k), true);
  }
}

// Types with scales. i8, i4, f8_e4m3fn_token: a scale for all of the row; else one for each of its
// pieces, of which a chunk is a whole number.
void append_scaled_row(const Row& row, int64_t dim, attn_dtype type, char* to, char* scales,
                       float descale, Interrupt& interrupt, int thread) {
  double x[chunk];
  RowMax most;
  const auto read = [&](int64_t d) {
    const int64_t n = std::min(chunk, dim - d);
    row.read(d, n, x);
    for (int64_t k = 0; k < n; ++k) x[k] /= descale;
    return n;
  };
  const bool one_scale = type_info(type).kind == ATTN_KIND_CODES, cache = !one_scale;
  for (int64_t d = 0; d < dim && (one_scale || type == ATTN_F8_E4M3FN_TOKEN); d += chunk) {
    if (interrupt.stop(thread, 16 * chunk)) return;
    const int64_t n = read(d);
    if (cache) std::replace_if(x, x + n, [](double e) { return !std::isfinite(e); }, 0.0);
    most.take(x, n);
  }
  uint16_t scale = 0;
  if (one_scale) {
    scale = row_scale(type, most.amax, most.has_nan, true);
    std::memcpy(scales, &scale, sizeof scale);
  } else if (type == ATTN_F8_E4M3FN_TOKEN) {
    const float wide = token_scale(most.amax);
    std::memcpy(scales, &wide, sizeof wide);
  }
  for (int64_t d = 0; d < dim; d += chunk) {
    if (interrupt.stop(thread, 16 * chunk)) return;
    const int64_t n = read(d);
    if (cache)
      encode_cache(type, to, scales, d, n, x);
    else
      encode_codes(type, to, d, n, x, scale);
  }
}

void append_row(const Row& row, int64_t dim, attn_dtype type, const char* cache, const char* scales,
                float descale, Interrupt& interrupt, int thread) {
  if (dtype_has_scales(type) || dtype_is_cache(type))
    return append_scaled_row(row, dim, type, const_cast<char*>(cache), const_cast<char*>(scales),
                             descale, interrupt, thread);
  char* const to = const_cast<char*>(cache);
  double x[chunk];
  for (int64_t d = 0; d < dim; d += chunk) {
    const int64_t n = std::min(chunk, dim - d);
    if (interrupt.stop(thread, 8 * n)) return;
    if (type == row.type && descale == 1 && row.half == 0) {
      const char* from = static_cast<const char*>(row.base) + dtype_bytes(type, row.at + d);
      std::memcpy(to + dtype_bytes(type, d), from, size_t(dtype_bytes(type, n)));
      continue;
    }
    row.read(d, n, x);
    store(type, to, d, n, x, descale);
  }
}

// `to` may be where the row is: both elements of a pair are read before either is written.
void rotate_row(const Row& row, int64_t dim, char* to, Interrupt& interrupt, int thread) {
  double x[chunk], y[chunk];
  int64_t d = 0;
  if (!row.interleaved) {
    for (; d < row.half && !interrupt.stop(thread, 16 * chunk); d += chunk) {
      const int64_t n = std::min(chunk, row.half - d);
      row.read(d, n, x);
      row.read(row.half + d, n, y);
      store(row.type, to, d, n, x, 1);
      store(row.type, to, row.half + d, n, y, 1);
    }
    d = 2 * row.half;
  }
  for (; d < dim && !interrupt.stop(thread, 8 * chunk); d += chunk) {
    const int64_t n = std::min(chunk, dim - d);
    row.read(d, n, x);
    store(row.type, to, d, n, x, 1);
  }
}

struct Token {
  int64_t b;         // batch: it belongs to no sequence, or its slot is to be skipped
  int64_t row;       // in k_new, of b where it is padded
  int64_t position;  // in the cache; of a slot, in its page
  int32_t page = 0;  // of a slot
};

Token token_of(const attn_kv_append_problem& p, const attn_kv_append_args& args, int64_t n) {
  if (p.new_layout != ATTN_PACKED) {
    const int64_t b = n / p.seqlen_new, t = n % p.seqlen_new;
    if (p.has_slots) {
      const int64_t slot = args.slot_mapping[n], size = p.segment.page_size;
      if (slot < 0) return {p.batch, t, 0};
      return {b, t, slot % size, int32_t(slot / size)};
    }
    return {b, t, args.cache.seqlens[b] + t};
  }
  const int32_t *begin = args.cu_seqlens_new, *ends = begin + 1;
  const int64_t b = std::upper_bound(ends, ends + p.batch, n) - ends;
  return {b, n, b == p.batch ? 0 : args.cache.seqlens[b] + n - begin[b]};
}

void append(const attn_kv_append_problem& p, const attn_kv_append_args& args, ThreadPool& pool,
            Interrupt& interrupt) {
  const bool packed = p.new_layout == ATTN_PACKED;
  const int64_t tokens = packed ? p.total_new : p.batch * p.seqlen_new;
  const int64_t heads = p.heads_kv + p.heads_q, half = p.rotary_dim / 2;
  auto one = [&](int64_t item, int thread) {
    const Token token = token_of(p, args, item / heads);
    if (interrupt.stop(thread, 16) || token.b == p.batch ||
        (!p.has_slots && token.position >= p.segment.seqlen))
      return;
    const auto offset = [&](const attn_strides& stride, int64_t head) {
      return token.b * stride.batch + token.row * stride.seq + head * stride.head;
    };
    const auto rotated = [&](const void* base, int64_t at) {
      const int64_t table = token.position * half;
      return Row{p.new_type,
                 base,
                 at,
                 half,
                 p.rotary_interleaved != 0,
                 half ? args.rotary_cos + table : nullptr,
                 half ? args.rotary_sin + table : nullptr};
    };
    const int64_t h = item % heads, q_head = h - p.heads_kv;
    if (q_head >= 0) {
      char* to =
          static_cast<char*>(args.q_out) + dtype_bytes(p.new_type, offset(p.q_out_stride, q_head));
      rotate_row(rotated(args.q, offset(p.q_stride, q_head)), p.head_dim, to, interrupt, thread);
      return;
    }
    SegmentView cache = segment_view(p.segment, args.cache, token.b, token.position + 1);
    if (p.has_slots) cache.pages = &token.page;
    const KeyRun to = cache.run(token.position, h);
    const Row value{p.new_type, args.v_new, offset(p.v_new_stride, h), 0, false, nullptr, nullptr};
    append_row(rotated(args.k_new, offset(p.k_new_stride, h)), p.head_dim, p.segment.k_type, to.k,
               to.k_scale, cache.k_descale(token.position, h, p.heads_kv), interrupt, thread);
    if (p.segment.v_in_k) return;
    append_row(value, p.head_dim_v, p.segment.v_type, to.v, to.v_scale,
               cache.v_descale(token.position, h, p.heads_kv), interrupt, thread);
  };
  const double nanoseconds = double(tokens) * double(heads) * 4 * double(p.head_dim + p.head_dim_v);
  pool.for_each(tokens * heads, one, &interrupt, pool.worth(nanoseconds));
  if (!p.advance_seqlens || interrupt.stopped()) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t added =
        packed ? int64_t{args.cu_seqlens_new[b + 1]} - args.cu_seqlens_new[b] : p.seqlen_new;
    args.seqlens_out[b] = int32_t(std::min(args.cache.seqlens[b] + added, p.segment.seqlen));
  }
}

void roll(const KvRollProblem& p, const KvRollArgs& args, ThreadPool& pool, Interrupt& interrupt) {
  const int64_t tokens = p.most_moved_keys();
  const auto moved = [&](int64_t b) {
    return p.moved_keys(args.from.seqlens[b], args.to.seqlens[b]);
  };
  auto one = [&](int64_t item, int thread) {
    const int64_t h = item % p.heads_kv, t = item / p.heads_kv % tokens,
                  b = item / p.heads_kv / tokens;
    if (interrupt.stop(thread, 16) || t >= moved(b)) return;
    const int64_t position = args.to.seqlens[b] + t;
    const KeyRun from = segment_view(p.from, args.from, b, t + 1).run(t, h);
    const SegmentView cache = segment_view(p.to, args.to, b, position + 1);
    const KeyRun to = cache.run(position, h);
    const attn_dtype type = p.from.k_type;
    append_row(Row{type, from.k, 0, 0, false, nullptr, nullptr}, p.head_dim, p.to.k_type, to.k,
               to.k_scale, cache.k_descale(position, h, p.heads_kv), interrupt, thread);
    if (p.to.v_in_k) return;
    append_row(Row{type, from.v, 0, 0, false, nullptr, nullptr}, p.head_dim_v, p.to.v_type, to.v,
               to.v_scale, cache.v_descale(position, h, p.heads_kv), interrupt, thread);
  };
  const int64_t rows = p.batch * tokens * p.heads_kv;
  const double nanoseconds = double(rows) * 4 * double(p.head_dim + p.head_dim_v);
  if (rows > 0) pool.for_each(rows, one, &interrupt, pool.worth(nanoseconds));
  if (interrupt.stopped()) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = moved(b);
    int32_t* const table = const_cast<int32_t*>(args.from.block_table) + b * p.from.max_pages;
    std::rotate(table, table + keys / p.from.page_size,
                table + ceil_div(int64_t{args.from.seqlens[b]}, int64_t{p.from.page_size}));
    const_cast<int32_t*>(args.from.seqlens)[b] -= int32_t(keys);
    const_cast<int32_t*>(args.to.seqlens)[b] += int32_t(keys);
  }
}

bool always() {
  return true;
}

}  // namespace

const HostKernel kv_append_reference_kernel = {
    .runs_here = always, .isa = "any", .kv_append = append};
const HostKernel kv_append_cpu_kernel = {.runs_here = always, .isa = "any", .kv_append = append};
const HostKernel kv_roll_reference_kernel = {.runs_here = always, .isa = "any", .kv_roll = roll};
const HostKernel kv_roll_cpu_kernel = {.runs_here = always, .isa = "any", .kv_roll = roll};

}  // namespace attn
