// The body of the kv_append operation, for every kernel of the catalog that runs here, beside the
// contract in float64: positions, pages and rotation are found here once more, conversions are
// those of core/dtype.h, which tests/unit/test_dtype.cpp checks against a search.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>
#include <tuple>

#include "../catch.h"
#include "backend.h"
#include "core/cache_format.h"
#include "core/ceil_div.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "core/row_scale.h"
#include "random_families.h"

namespace attn::test {
namespace {

struct AppendCase {
  uint64_t seed = 1;
  int64_t batch = 2, heads_kv = 2, heads_q = 0, dim = 64, dim_v = 64;
  int64_t seqlen_new = 3;
  std::vector<int32_t> lengths_new;  // given: packed
  int64_t tokens_of_nobody = 2;      // of packed tokens, behind the last sequence
  int64_t capacity = 20;
  std::vector<int32_t> lengths = {5, 0};
  attn_dtype new_type = ATTN_F32, k_type = ATTN_F32, v_type = ATTN_F32;
  bool paged = false;
  int32_t page_size = 4;
  attn_descale_kind k_descale = ATTN_DESCALE_NONE, v_descale = ATTN_DESCALE_NONE;
  int32_t block_keys = 64;
  Arrange new_arrange = Arrange::contiguous, cache_arrange = Arrange::contiguous;
  int64_t rotary_dim = 0;
  int32_t interleaved = 0;
  bool q_in_place = false, advance = false, lengths_in_place = false;
  bool slots = false;       // of a paged cache, by slot_mapping
  bool odd_values = false;  // NaN, infinities and huge values among the others
  float sigma = 1;

  bool packed() const { return !lengths_new.empty(); }
  int64_t added(int64_t b) const { return packed() ? lengths_new[size_t(b)] : seqlen_new; }
  int64_t total() const {
    return std::accumulate(lengths_new.begin(), lengths_new.end(), tokens_of_nobody);
  }
};

std::string describe(const AppendCase& c) {
  std::ostringstream out;
  const auto list = [&](const char* name, const std::vector<int32_t>& values) {
    out << " " << name;
    for (int32_t n : values) out << " " << n;
  };
  out << dtype_name(c.new_type) << " -> " << dtype_name(c.k_type) << " " << dtype_name(c.v_type)
      << " B" << c.batch << " Hkv" << c.heads_kv << " Hq" << c.heads_q << " D" << c.dim << " Dv"
      << c.dim_v << " new " << c.seqlen_new << " capacity " << c.capacity << " page "
      << (c.paged ? c.page_size : 0) << " descale " << c.k_descale << " " << c.v_descale << " of "
      << c.block_keys << " arrange " << int(c.new_arrange) << " " << int(c.cache_arrange)
      << " rotary " << c.rotary_dim << " interleaved " << c.interleaved << " in place "
      << c.q_in_place << " slots " << c.slots << " advance " << c.advance << c.lengths_in_place
      << " odd " << c.odd_values << " sigma " << c.sigma << " seed " << c.seed;
  list("lengths", c.lengths);
  list("packed", c.lengths_new);
  return out.str();
}

float source_value(const AppendCase& c, uint64_t which, uint64_t row, uint64_t d) {
  const uint64_t h = hash(c.seed, which, row, d);
  if (c.odd_values) {
    if (h % 16 == 0) return NAN;
    if (h % 16 == 1) return h % 32 == 1 ? INFINITY : -INFINITY;
    if (h % 16 == 2) return 3e38f;
    if (h % 16 == 3) return -0.0f;
  }
  return c.sigma * float(normal(h));
}

template <class T>
Buffer buffer_of(const std::vector<T>& values) {
  Buffer buffer(values.size() * sizeof(T), 0xff);
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  return buffer;
}

// New tokens, or q: rows as the problem lays them out.
struct Rows {
  View view;
  Buffer buffer;
};
Rows make_rows(const AppendCase& c, uint64_t which, int64_t heads, int64_t dim) {
  Rows rows;
  int64_t elements;
  const int64_t batch = c.packed() ? 1 : c.batch, seq = c.packed() ? c.total() : c.seqlen_new;
  rows.view = arrange_view(c.new_type, c.new_arrange, batch, seq, heads, dim, &elements);
  rows.buffer = Buffer(size_t(dtype_bytes(c.new_type, elements)), poison_of(c.new_type));
  for (int64_t b = 0, row = 0; b < batch; ++b)
    for (int64_t s = 0; s < seq; ++s)
      for (int64_t h = 0; h < heads; ++h, ++row)
        for (int64_t d = 0; d < dim; ++d)
          encode_element(c.new_type, rows.buffer.data(), rows.view.at(b, s, h) + d,
                         source_value(c, which, uint64_t(row), uint64_t(d)), false);
  return rows;
}

// What a row becomes before it is stored. `size`: of the terms of each sum.
struct Real {
  std::vector<double> x, size;
};
Real rotated(const AppendCase& c, const Rows& rows, int64_t at, int64_t dim, bool rotate,
             const float* cos, const float* sin) {
  Real real{std::vector<double>(size_t(dim)), std::vector<double>(size_t(dim))};
  decode_row(c.new_type, rows.buffer.data(), at, dim, real.x.data());
  for (size_t d = 0; d < real.x.size(); ++d) real.size[d] = std::abs(real.x[d]);
  for (int64_t i = 0; rotate && i < c.rotary_dim / 2; ++i) {
    const size_t first = size_t(c.interleaved ? 2 * i : i);
    const size_t second = c.interleaved ? first + 1 : first + size_t(c.rotary_dim / 2);
    const double x = real.x[first], y = real.x[second];
    real.x[first] = x * cos[i] - y * sin[i];
    real.x[second] = x * sin[i] + y * cos[i];
    real.size[first] = real.size[second] = std::abs(x) + std::abs(y);
  }
  return real;
}

// Rows that a run must have written, with the bytes around them as they were.
class Expected {
 public:
  Expected(attn_dtype type, const Buffer& before) : type_(type), want_(before) {}
  void write(int64_t at, const Real& real, double descale) {
    const int64_t dim = int64_t(real.x.size()), block = dtype_block(type_);
    for (int64_t d = 0; d < dim; d += block) {
      if (block == 1) {
        encode_element(type_, want_.data(), at + d, real.x[size_t(d)] / descale, true);
        continue;
      }
      float x[32];
      for (int64_t i = 0; i < 32; ++i) x[i] = float(real.x[size_t(d + i)] / descale);
      encode_block(type_, x, want_.data() + dtype_bytes(type_, at + d), true);
    }
    rows_.push_back({at, real, descale});
  }
  // A row of a type whose scales are elements of `scales`.
  void write_scaled(int64_t at, const Real& real, double descale, Expected& scales,
                    int64_t scale_at) {
    std::vector<double> x(real.x);
    double amax = 0;
    bool nan = false;
    for (double& value : x) {
      value /= descale;
      nan |= std::isnan(value);
      amax = std::max(amax, std::abs(value));
    }
    char* const row = reinterpret_cast<char*>(want_.data()) + dtype_bytes(type_, at);
    if (type_ == ATTN_F8_E4M3FN_TOKEN) {
      double finite = 0;
      for (const double value : x)
        if (std::isfinite(value)) finite = std::max(finite, std::abs(value));
      float scale = token_scale(finite);
      encode_cache(type_, row, reinterpret_cast<char*>(&scale), 0, int64_t(x.size()), x.data());
      rows_.push_back({at, real, descale});
      return scales.write(scale_at, {{scale}, {scale}}, 1);
    }
    if (type_ == ATTN_NVFP4) {
      std::vector<char> codes(x.size() / 16);
      encode_cache(type_, row, codes.data(), 0, int64_t(x.size()), x.data());
      rows_.push_back({at, real, descale});
      for (size_t n = 0; n < codes.size(); ++n) {
        const double value = decode_element(ATTN_F8_E4M3FN, codes.data(), int64_t(n));
        scales.write(scale_at + int64_t(n), {{value}, {value}}, 1);
      }
      return;
    }
    const uint16_t scale = row_scale(type_, amax, nan, true);
    encode_codes(type_, want_.data(), at, int64_t(x.size()), x.data(), scale);
    rows_.push_back({at, real, descale});
    const double value = f16_value(scale);
    scales.write(scale_at, {{value}, {value}}, 1);
  }
  // "" or what differs. Kernels of devices compute in float32.
  std::string compare(const char* name, Buffer got, bool exact) const {
    for (const Row& row : rows_)
      for (size_t d = 0; d < row.real.x.size(); ++d) {
        const int64_t at = row.at + int64_t(d);
        const double x = decode_element(type_, got.data(), at);
        const double y = decode_element(type_, want_.data(), at);
        if (!close(x, y, row, d, exact))
          return join(name, ": element ", d, " of the row at ", row.at, " is ", x, ", expected ",
                      y);
      }
    for (const Row& row : rows_) {
      const size_t from = size_t(dtype_bytes(type_, row.at));
      std::memcpy(got.data() + from, want_.data() + from,
                  size_t(dtype_bytes(type_, int64_t(row.real.x.size()))));
    }
    for (size_t n = 0; n < got.bytes.size(); ++n)
      if (got.bytes[n] != want_.bytes[n])
        return join(name, ": byte ", int64_t(n) - int64_t(Buffer::guard), " was written");
    return "";
  }

 private:
  struct Row {
    int64_t at;
    Real real;
    double descale;
  };
  bool close(double x, double y, const Row& row, size_t d, bool exact) const {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
    if (x == y) return !exact || std::signbit(x) == std::signbit(y) || dtype_is_ggml(type_);
    if (exact || std::isinf(x) || std::isinf(y)) return false;
    if (!dtype_is_ggml(type_))
      return std::abs(x - y) <= 2.01 * half_ulp(type_, std::max(std::abs(x), std::abs(y))) +
                                    1e-6 * row.real.size[d] / std::abs(row.descale);
    double most = 0;  // the neighbouring code, at most
    for (size_t i = d / 32 * 32; i < d / 32 * 32 + 32; ++i)
      most = std::max(most, std::abs(row.real.x[i] / row.descale));
    return std::abs(x - y) <= 1.01 * most / (type_ == ATTN_Q8_0 ? 127 : 8);
  }
  attn_dtype type_;
  Buffer want_;
  std::vector<Row> rows_;
};

// A cache of any bytes.
struct Cache {
  View view;
  Buffer buffer;
};
Cache make_cache(const AppendCase& c, uint64_t which, attn_dtype type, int64_t pages, int64_t dim) {
  Cache cache;
  int64_t elements;
  cache.view = arrange_view(type, c.cache_arrange, c.paged ? pages : c.batch,
                            c.paged ? c.page_size : c.capacity, c.heads_kv, dim, &elements);
  cache.buffer = Buffer(size_t(dtype_bytes(type, elements)), 0);
  for (size_t n = 0; n < cache.buffer.bytes.size(); ++n)
    cache.buffer.bytes[n] = uint8_t(hash(c.seed, which, n));
  return cache;
}

std::string run_append_case(const AppendCase& c, const Kernel& kernel, bool* ran) {
  Backend& backend = backend_of(kernel.backend);
  Rows k_new = make_rows(c, 1, c.heads_kv, c.dim), v_new = make_rows(c, 2, c.heads_kv, c.dim_v);
  Rows q = make_rows(c, 3, std::max<int64_t>(c.heads_q, 1), c.dim);
  Rows q_out = q;
  std::fill(q_out.buffer.bytes.begin(), q_out.buffer.bytes.end(), poison_of(c.new_type));

  // Pages in any order. Those of tokens that are not new are none.
  const int64_t columns = c.paged ? ceil_div(c.capacity, c.page_size) : 0;
  const int64_t pages = c.batch * columns + 1;
  std::vector<int32_t> order(size_t(pages), 0), table(size_t(c.batch * columns), -1);
  std::iota(order.begin(), order.end(), 0);
  for (size_t n = order.size() - 1; n > 0; --n) std::swap(order[n], order[hash(c.seed, 4, n) % n]);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t t = 0; t < c.added(b) && c.lengths[size_t(b)] + t < c.capacity && c.paged; ++t) {
      const size_t at = size_t(b * columns + (c.lengths[size_t(b)] + t) / c.page_size);
      table[at] = order[at];
    }
  // Each slot once, in any order; one token in four goes nowhere. Hosts refuse slots beyond the
  // pages.
  const int64_t room = pages * c.page_size;
  std::vector<int64_t> free_slots(size_t(c.slots ? room : 0)), slot_mapping;
  std::iota(free_slots.begin(), free_slots.end(), 0);
  for (int64_t n = 0; c.slots && n < c.batch * c.seqlen_new; ++n) {
    const uint64_t h = hash(c.seed, 12, uint64_t(n));
    const int64_t nowhere[] = {-1, INT64_MIN, kernel.host ? -2 : room,
                               kernel.host ? -3 : int64_t{1} << 32};
    if (h % 4 == 0 || free_slots.empty()) {
      slot_mapping.push_back(nowhere[h / 4 % 4]);
      continue;
    }
    std::swap(free_slots[h / 4 % free_slots.size()], free_slots.back());
    slot_mapping.push_back(free_slots.back());
    free_slots.pop_back();
  }
  Cache k = make_cache(c, 5, c.k_type, pages, c.dim),
        v = make_cache(c, 6, c.v_type, pages, c.dim_v);

  const int64_t half = c.rotary_dim / 2, positions = c.capacity + int64_t(c.seed % 3);
  std::vector<float> cos(size_t(c.rotary_dim ? positions * half : 0)), sin = cos;
  for (size_t n = 0; n < cos.size(); ++n) {
    const double angle = double(hash(c.seed, 7, n) % 10000) / 1000;
    cos[n] = float(std::cos(angle));
    sin[n] = float(std::sin(angle));
  }
  const int64_t blocks = ceil_div(c.capacity, c.block_keys);
  const auto descales = [&](attn_descale_kind kind, uint64_t which) {
    const int64_t heads = c.batch * c.heads_kv;
    std::vector<float> values(size_t(kind == ATTN_DESCALE_TENSOR ? 1
                                     : kind == ATTN_DESCALE_HEAD ? heads
                                                                 : heads * blocks));
    for (size_t n = 0; n < values.size(); ++n)
      values[n] = 0.25f + float(hash(c.seed, which, n) % 1000) / 500;
    return values;
  };
  const std::vector<float> k_descales = descales(c.k_descale, 8),
                           v_descales = descales(c.v_descale, 9);
  const auto descale_at = [&](attn_descale_kind kind, const std::vector<float>& values, int64_t b,
                              int64_t h, int64_t position) -> double {
    const int64_t head = b * c.heads_kv + h;
    if (kind == ATTN_DESCALE_NONE) return 1;
    if (kind == ATTN_DESCALE_TENSOR) return values[0];
    return values[size_t(kind == ATTN_DESCALE_HEAD ? head
                                                   : head * blocks + position / c.block_keys)];
  };

  // Of types that have them; of others they are not passed.
  const auto make_scales = [&](uint64_t which, attn_dtype type, int64_t dim) {
    if (!dtype_has_scales(type)) return make_cache(c, which, ATTN_F16, pages, 1);
    return make_cache(c, which, scale_element(type), pages, scales_of_row(type_info(type), dim));
  };
  Cache k_scale = make_scales(10, c.k_type, c.dim), v_scale = make_scales(11, c.v_type, c.dim_v);
  Expected want_k(c.k_type, k.buffer), want_v(c.v_type, v.buffer);
  Expected want_k_scale(k_scale.view.type, k_scale.buffer),
      want_v_scale(v_scale.view.type, v_scale.buffer);
  Expected want_q(c.new_type, c.q_in_place ? q.buffer : q_out.buffer);
  std::vector<int32_t> offsets = {0}, lengths_after;
  for (int64_t b = 0; b < c.batch; ++b) {
    offsets.push_back(offsets.back() + int32_t(c.added(b)));
    lengths_after.push_back(
        int32_t(std::min<int64_t>(c.lengths[size_t(b)] + c.added(b), c.capacity)));
    for (int64_t t = 0; t < c.added(b); ++t) {
      const int64_t position =
          c.slots ? slot_mapping[size_t(b * c.seqlen_new + t)] : c.lengths[size_t(b)] + t;
      if (c.slots && (position < 0 || position >= room)) continue;
      if (!c.slots && position >= c.capacity) break;
      const int64_t entry = c.packed() ? 0 : b, row = c.packed() ? offsets[size_t(b)] + t : t;
      const int64_t page = c.slots   ? position / c.page_size
                           : c.paged ? table[size_t(b * columns + position / c.page_size)]
                                     : b;
      const int64_t slot = c.paged ? position % c.page_size : position;
      const int64_t angles = c.slots ? 0 : position * half;
      const float *cs = cos.data() + angles, *sn = sin.data() + angles;
      for (int64_t h = 0; h < c.heads_kv; ++h) {
        const Real key = rotated(c, k_new, k_new.view.at(entry, row, h), c.dim, true, cs, sn),
                   value = rotated(c, v_new, v_new.view.at(entry, row, h), c.dim_v, false, cs, sn);
        const double k_by = descale_at(c.k_descale, k_descales, b, h, position),
                     v_by = descale_at(c.v_descale, v_descales, b, h, position);
        if (dtype_has_scales(c.k_type))
          want_k.write_scaled(k.view.at(page, slot, h), key, k_by, want_k_scale,
                              k_scale.view.at(page, slot, h));
        else
          want_k.write(k.view.at(page, slot, h), key, k_by);
        if (dtype_has_scales(c.v_type))
          want_v.write_scaled(v.view.at(page, slot, h), value, v_by, want_v_scale,
                              v_scale.view.at(page, slot, h));
        else
          want_v.write(v.view.at(page, slot, h), value, v_by);
      }
      for (int64_t h = 0; h < c.heads_q; ++h)
        want_q.write(q.view.at(entry, row, h),
                     rotated(c, q, q.view.at(entry, row, h), c.dim, true, cs, sn), 1);
    }
  }

  attn_kv_append_problem p{};
  p.struct_size = sizeof p;
  p.batch = c.batch;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.dim;
  p.head_dim_v = c.dim_v == c.dim ? 0 : c.dim_v;
  p.seqlen_new =
      c.packed() ? *std::max_element(c.lengths_new.begin(), c.lengths_new.end()) : c.seqlen_new;
  p.new_layout = c.packed() ? ATTN_PACKED : ATTN_PADDED;
  p.total_new = c.packed() ? c.total() : 0;
  p.new_type = c.new_type;
  p.k_new_stride = k_new.view.given;
  p.v_new_stride = v_new.view.given;
  p.segment.struct_size = sizeof p.segment;
  p.segment.layout = c.paged ? ATTN_PAGED : ATTN_PADDED;
  p.segment.has_seqlens = !c.slots;
  p.has_slots = c.slots;
  p.segment.k_type = c.k_type;
  p.segment.v_type = c.v_type;
  p.segment.seqlen = c.slots ? 0 : c.capacity;
  if (c.paged) {
    p.segment.page_size = c.page_size;
    p.segment.max_pages = c.slots ? 0 : int32_t(columns);
    p.segment.num_pages = pages;
  }
  p.segment.k_stride = k.view.given;
  p.segment.v_stride = v.view.given;
  if (dtype_has_scales(c.k_type)) p.segment.k_scale_stride = k_scale.view.given;
  if (dtype_has_scales(c.v_type)) p.segment.v_scale_stride = v_scale.view.given;
  p.segment.k_descale = c.k_descale;
  p.segment.v_descale = c.v_descale;
  p.segment.descale_block_keys = c.block_keys;
  p.kernel = kernel.name;
  p.advance_seqlens = c.advance;
  if (c.rotary_dim) {
    p.rotary_dim = c.rotary_dim;
    p.rotary_interleaved = c.interleaved;
    p.rotary_positions = positions;
    p.heads_q = c.heads_q;
    p.q_stride = p.q_out_stride = q.view.given;
  }
  attn_plan* made = nullptr;
  const attn_status status = attn_plan_create_kv_append(backend.context, &p, &made);
  *ran = status != ATTN_UNSUPPORTED;
  if (status == ATTN_UNSUPPORTED) return "";
  if (status != ATTN_OK) return attn_last_error();
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);

  Arena arena(backend.context);
  const Buffer lengths = buffer_of(c.lengths), offsets_buffer = buffer_of(offsets),
               table_buffer = buffer_of(table), k_descale = buffer_of(k_descales),
               v_descale = buffer_of(v_descales), cos_buffer = buffer_of(cos),
               sin_buffer = buffer_of(sin), slots = buffer_of(slot_mapping);
  const Buffer lengths_out(c.lengths.size() * 4, 0xee);
  attn_kv_append_args args{};
  args.struct_size = sizeof args;
  args.cache.struct_size = sizeof args.cache;
  void *const k_data = arena.add(k.buffer), *const v_data = arena.add(v.buffer);
  args.k_new = address_of(arena.add(k_new.buffer), k_new.view);
  args.v_new = address_of(arena.add(v_new.buffer), v_new.view);
  args.cache.k = address_of(k_data, k.view);
  args.cache.v = address_of(v_data, v.view);
  void *k_scale_data = nullptr, *v_scale_data = nullptr;
  if (dtype_has_scales(c.k_type)) k_scale_data = arena.add(k_scale.buffer);
  if (dtype_has_scales(c.v_type)) v_scale_data = arena.add(v_scale.buffer);
  args.cache.k_scale = address_of(k_scale_data, k_scale.view);
  args.cache.v_scale = address_of(v_scale_data, v_scale.view);
  void* const lengths_data = arena.add(lengths);
  if (c.slots)
    args.slot_mapping = static_cast<const int64_t*>(arena.add(slots));
  else
    args.cache.seqlens = static_cast<const int32_t*>(lengths_data);
  if (c.packed()) args.cu_seqlens_new = static_cast<const int32_t*>(arena.add(offsets_buffer));
  if (c.paged && !c.slots)
    args.cache.block_table = static_cast<const int32_t*>(arena.add(table_buffer));
  if (c.k_descale) args.cache.k_descale = static_cast<const float*>(arena.add(k_descale));
  if (c.v_descale) args.cache.v_descale = static_cast<const float*>(arena.add(v_descale));
  void* q_data = nullptr;
  if (c.rotary_dim) {
    args.rotary_cos = static_cast<const float*>(arena.add(cos_buffer));
    args.rotary_sin = static_cast<const float*>(arena.add(sin_buffer));
    if (c.heads_q) {
      q_data = arena.add(q.buffer);
      args.q = address_of(q_data, q.view);
      if (!c.q_in_place) q_data = arena.add(q_out.buffer);
      args.q_out = address_of(q_data, q.view);
    }
  }
  void* lengths_out_data = nullptr;
  if (c.advance) {
    lengths_out_data = c.lengths_in_place ? lengths_data : arena.add(lengths_out);
    args.seqlens_out = static_cast<int32_t*>(lengths_out_data);
  }
  const uint64_t launches = attn_launch_count(kernel.name);
  if (attn_run_kv_append(plan.get(), &args, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_synchronize(backend.context, nullptr) != ATTN_OK) return attn_last_error();
  if (attn_launch_count(kernel.name) <= launches) return "not launched";

  if (std::string e = arena.check_unchanged(
          {k_data, v_data, k_scale_data, v_scale_data, q_data, lengths_out_data});
      !e.empty())
    return e;
  // Of caches' formats, with which no case is rotated, devices too have all bits.
  const bool exact = kernel.host != nullptr || dtype_is_cache(c.k_type);
  if (std::string e = want_k.compare("k", arena.fetch(k.buffer, k_data), exact); !e.empty())
    return e;
  if (std::string e = want_v.compare("v", arena.fetch(v.buffer, v_data), exact); !e.empty())
    return e;
  for (const auto& [scales, want, data] : {std::tuple(&k_scale, &want_k_scale, k_scale_data),
                                           std::tuple(&v_scale, &want_v_scale, v_scale_data)}) {
    if (!data) continue;
    const std::string e = want->compare("scale", arena.fetch(scales->buffer, data), exact);
    if (!e.empty()) return e;
  }
  if (q_data) {
    const std::string e = want_q.compare("q_out", arena.fetch(q.buffer, q_data), exact);
    if (!e.empty()) return e;
  }
  if (c.advance) {
    Buffer want = c.lengths_in_place ? lengths : lengths_out;
    std::memcpy(want.data(), lengths_after.data(), want.size());
    if (arena.fetch(want, lengths_out_data).bytes != want.bytes) return "seqlens_out differs";
  }
  return "";
}

constexpr attn_dtype new_types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
constexpr attn_dtype cache_types[] = {ATTN_F32,     ATTN_F16,         ATTN_BF16, ATTN_F8_E4M3FN,
                                      ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ, ATTN_Q8_0, ATTN_Q4_0};

AppendCase random_case(uint64_t seed) {
  Draw draw{seed, 77};
  AppendCase c;
  c.seed = seed;
  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(3);
  c.new_type = draw.pick(new_types);
  c.k_type = draw.pick(cache_types);
  c.v_type = draw.chance(2) ? c.k_type : draw.pick(cache_types);
  constexpr int64_t dims[] = {1, 2, 7, 8, 32, 48, 64, 80, 128, 136, 256, 300};
  constexpr int64_t block_dims[] = {32, 64, 96, 128, 160, 256};
  c.dim = dtype_is_ggml(c.k_type) ? draw.pick(block_dims) : draw.pick(dims);
  c.dim_v = dtype_is_ggml(c.v_type)                      ? draw.pick(block_dims)
            : draw.chance(2) && !dtype_is_ggml(c.k_type) ? c.dim
                                                         : draw.pick(dims);
  c.k_type = host_type(c.k_type, c.dim, seed, 0);
  c.v_type = host_type(c.v_type, c.dim_v, seed, 1);
  c.capacity = draw(8) ? 1 + draw(150) : 0;
  c.seqlen_new = draw(8);
  c.lengths.clear();
  for (int64_t b = 0; b < c.batch; ++b) {
    c.lengths.push_back(int32_t(draw(uint64_t(c.capacity) + 1)));
    if (draw.chance(4)) c.lengths.back() = int32_t(std::max<int64_t>(c.capacity - 2, 0));
  }
  if (draw.chance(3)) {
    for (int64_t b = 0; b < c.batch; ++b) c.lengths_new.push_back(int32_t(draw(6)));
    c.tokens_of_nobody = draw(3);
  }
  c.paged = draw.chance(2);
  constexpr int32_t pages[] = {1, 3, 4, 16, 64};
  c.page_size = draw.pick(pages);
  c.k_descale = attn_descale_kind(draw.chance(2) ? 0 : draw(4));
  c.v_descale = attn_descale_kind(draw.chance(2) ? 0 : draw(4));
  c.block_keys = draw.chance(2) ? 64 : 128;
  constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded,   Arrange::head_major,
                                  Arrange::odd,        Arrange::reversed, Arrange::flipped};
  c.new_arrange = draw.pick(arranges);
  c.cache_arrange = draw.pick(arranges);
  if (draw(3)) {
    c.rotary_dim = draw.chance(2) ? c.dim / 2 * 2 : 2 * draw(uint64_t(c.dim / 2) + 1);
    c.interleaved = int32_t(draw(2));
    if (draw(3)) c.heads_q = c.rotary_dim ? 1 + draw(4) : 0;
    c.q_in_place = draw.chance(2);
    if (c.rotary_dim == 0) c.interleaved = 0;
  }
  c.advance = draw.chance(2);
  c.lengths_in_place = draw.chance(2);
  c.odd_values = draw.chance(4);
  constexpr float sigmas[] = {1, 200, 1e-3f};
  c.sigma = draw.pick(sigmas);
  return c;
}

bool check(const AppendCase& c, const Kernel& kernel) {
  INFO(kernel.name << " " << describe(c));
  bool ran = false;
  CHECK(run_append_case(c, kernel, &ran) == "");
  if (kernel.host) CHECK(ran);
  return ran;
}

const AddRandomOperation added("kv_append", [](uint64_t seed) {
  int ran = 0;
  for (const Kernel* kernel : emulated_kernels(Op::kv_append))
    ran += check(random_case(seed), *kernel);
  return ran;
});

TEST_CASE("kv_append: every pair of types, with and without rotation") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    uint64_t number = 0;
    std::vector<attn_dtype> types(std::begin(cache_types), std::end(cache_types));
    if (kernel->host) types.insert(types.end(), std::begin(host_types), std::end(host_types));
    for (attn_dtype new_type : new_types)
      for (attn_dtype type : types)
        for (int rotary : {0, 1, 2})
          for (bool paged : {false, true})
            for (attn_descale_kind descale : {ATTN_DESCALE_NONE, ATTN_DESCALE_HEAD}) {
              AppendCase c;
              c.seed = ++number;
              if (!share(number)) continue;
              c.new_type = new_type;
              c.k_type = c.v_type = type;
              c.rotary_dim = rotary ? 48 : 0;
              c.interleaved = rotary == 2;
              c.heads_q = rotary ? 4 : 0;
              c.q_in_place = paged;
              c.paged = paged;
              c.k_descale = c.v_descale = descale;
              c.advance = true;
              check(c, *kernel);
            }
  }
}

TEST_CASE("kv_append: slots") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    if (!(kernel->limits.features & feature_slots)) continue;
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      if (!share(seed)) continue;
      AppendCase c = random_case(seed);
      c.paged = c.slots = true;
      c.lengths_new.clear();
      c.rotary_dim = c.heads_q = c.interleaved = 0;
      c.advance = false;
      for (attn_descale_kind* kind : {&c.k_descale, &c.v_descale})
        if (*kind == ATTN_DESCALE_BLOCK) *kind = ATTN_DESCALE_HEAD;
      check(c, *kernel);
    }
  }
}

TEST_CASE("kv_append: random layouts, lengths and values") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true))
    for (uint64_t seed = 1; seed <= 1500; ++seed)
      if (share(seed)) check(random_case(seed), *kernel);
}

TEST_CASE("kv_append: long rows, full caches and no tokens") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    AppendCase c;
    c.heads_q = 2;
    c.q_in_place = c.advance = c.lengths_in_place = true;
    const int64_t largest = kernel->host ? 1024 : kernel->limits.head_dim.max;
    for (int64_t dim : {int64_t{600}, largest})
      for (int64_t rotary_dim : {dim, dim - 46, int64_t{258}, int64_t{2}})
        for (int32_t interleaved : {0, 1}) {
          AppendCase wide = c;
          wide.dim = dim;
          wide.rotary_dim = rotary_dim;
          wide.interleaved = interleaved;
          check(wide, *kernel);
        }
    c.rotary_dim = 64;
    for (bool paged : {false, true}) {
      c.paged = paged;
      c.capacity = 20;
      c.lengths = {20, 19};
      c.seqlen_new = 3;
      check(c, *kernel);
      c.seqlen_new = 0;
      check(c, *kernel);
      c.capacity = 0;
      c.lengths = {0, 0};
      c.seqlen_new = 3;
      check(c, *kernel);
    }
  }
}

// So many that blocks of kv_append_cuda have two on devices of up to 200 multiprocessors; some are
// of two sequences, or of tokens that find their sequence full.
TEST_CASE("kv_append: many tokens") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    AppendCase c;
    c.batch = 3;
    c.heads_kv = 32;
    c.seqlen_new = 1701;
    c.capacity = 1800;
    c.lengths = {50, 150, 0};
    c.paged = c.advance = true;
    c.page_size = 64;
    c.new_type = c.k_type = c.v_type = ATTN_BF16;
    c.dim = c.dim_v = c.rotary_dim = 8;
    c.interleaved = 1;
    check(c, *kernel);
    c.lengths_new = {1701, 0, 1800, 1700};
    c.batch = 4;
    c.seqlen_new = 1800;
    c.lengths = {50, 0, 150, 0};
    c.new_type = ATTN_F32;
    c.k_type = ATTN_F8_E4M3FN;
    c.k_descale = ATTN_DESCALE_HEAD;
    c.dim = c.dim_v = 2;
    c.rotary_dim = 0;
    check(c, *kernel);
  }
}

// Of dimensions of which a warp has 8 heads to one, and of which a head has several warps.
TEST_CASE("kv_append: heads have scales of their own") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true))
    for (attn_dtype type : {ATTN_I8, ATTN_I4, ATTN_F8_E4M3FN_TOKEN, ATTN_NVFP4})
      for (int64_t dim : {32, 64, 96, 128, 256, 320})
        for (bool packed : {false, true}) {
          AppendCase c;
          c.seed = uint64_t(dim);
          c.heads_kv = 5;
          c.k_type = type;
          c.v_type = dim == 64 ? ATTN_Q8_0 : type;
          c.dim = c.dim_v = dim;
          c.new_type = packed ? ATTN_F16 : ATTN_BF16;
          if (packed) c.lengths_new.assign(size_t(c.batch), 3);
          check(c, *kernel);
        }
}

TEST_CASE("kv_append: caches' formats from every type, by layout and descale") {
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    uint64_t seed = 0;
    for (const attn_dtype new_type : new_types)
      for (const attn_descale_kind kind :
           {ATTN_DESCALE_NONE, ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD})
        for (const Arrange arrange : {Arrange::contiguous, Arrange::padded, Arrange::head_major})
          for (const bool odd_values : {false, true})
            for (const float sigma : {1.0f, 3000.0f, 1e-3f}) {
              AppendCase c;
              c.seed = ++seed;
              c.heads_kv = 3;
              c.dim = 16 * int64_t(1 + seed % 20);
              c.dim_v = 16 * int64_t(1 + seed % 7);
              c.new_type = new_type;
              const bool token = kind == ATTN_DESCALE_NONE && seed % 2 == 0;
              c.k_type = c.v_type = token ? ATTN_F8_E4M3FN_TOKEN : ATTN_NVFP4;
              c.k_descale = c.v_descale = kind;
              c.cache_arrange = arrange;
              c.paged = seed % 4 < 2;
              c.odd_values = odd_values;
              c.sigma = sigma;
              check(c, *kernel);
            }
  }
}

TEST_CASE("kv_append: token by token is all at once") {
  // Of lengths that the run itself advances.
  for (const Kernel* kernel : kernels_here(Op::kv_append, true)) {
    if (!kernel->host) continue;
    constexpr int64_t tokens = 9, dim = 8, heads = 2, row = heads * dim;
    std::vector<float> x(tokens * row), cos(tokens * dim / 2), sin = cos, one(x.size()),
                                                               all(x.size());
    for (size_t n = 0; n < x.size(); ++n) x[n] = float(normal(hash(3, n)));
    for (size_t n = 0; n < cos.size(); ++n) {
      cos[n] = float(std::cos(double(n)));
      sin[n] = float(std::sin(double(n)));
    }
    attn_context* context = backend_of(kernel->backend).context;
    const auto append = [&](std::vector<float>& cache, int64_t step) {
      attn_kv_append_problem p{};
      p.struct_size = sizeof p;
      p.batch = 1;
      p.heads_kv = heads;
      p.head_dim = p.rotary_dim = dim;
      p.seqlen_new = step;
      p.new_type = ATTN_F32;
      p.segment.struct_size = sizeof p.segment;
      p.segment.k_type = p.segment.v_type = ATTN_F32;
      p.segment.has_seqlens = 1;
      p.segment.seqlen = p.rotary_positions = tokens;
      p.advance_seqlens = 1;
      attn_plan* plan = nullptr;
      REQUIRE(attn_plan_create_kv_append(context, &p, &plan) == ATTN_OK);
      int32_t length = 0;
      std::vector<float> v(cache.size());
      attn_kv_append_args args{};
      args.struct_size = sizeof args;
      args.cache.struct_size = sizeof args.cache;
      args.cache.k = cache.data();
      args.cache.v = v.data();
      args.cache.seqlens = args.seqlens_out = &length;
      args.rotary_cos = cos.data();
      args.rotary_sin = sin.data();
      for (int64_t t = 0; t < tokens; t += step) {
        args.k_new = args.v_new = x.data() + t * row;
        CHECK(attn_run_kv_append(plan, &args, nullptr) == ATTN_OK);
        CHECK(length == t + step);
      }
      attn_plan_destroy(plan);
      CHECK(v == x);
    };
    append(one, 1);
    append(all, tokens);
    CHECK(one == all);
    CHECK(one != x);
  }
}

}  // namespace
}  // namespace attn::test
