#include "forward_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "core/cache_format.h"
#include "core/dtype.h"
#include "core/ggml.h"
#include "core/row_scale.h"

namespace attn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
enum Tag : uint64_t {
  tag_q = 1,
  tag_k,
  tag_v,
  tag_bias,
  tag_mask,
  tag_page,
  tag_sink,
  tag_scale,
  tag_tree
};

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <class T>
Buffer buffer_of(const std::vector<T>& values) {
  Buffer b(values.size() * sizeof(T), 0xff);
  std::memcpy(b.data(), values.data(), values.size() * sizeof(T));
  return b;
}

// Writes one row of real values as the type stores them, `scale_at` being the place of the row's
// scales, and returns what was stored, as real values.
std::vector<double> write_row(Buffer& to, attn_dtype type, int64_t at, const std::vector<float>& x,
                              float descale, Buffer* scales = nullptr, int64_t scale_at = 0) {
  const int64_t n = int64_t(x.size());
  double scale = 1;
  if (type == ATTN_NVFP4 || type == ATTN_F8_E4M3FN_TOKEN) {
    std::vector<double> real(x.begin(), x.end());
    double amax = 0;
    for (double& value : real) amax = std::max(amax, std::abs(value /= descale));
    char* const row = reinterpret_cast<char*>(to.data()) + dtype_bytes(type, at);
    char* const scales_of_row =
        reinterpret_cast<char*>(scales->data()) + scale_at * type_info(type).scale_bytes;
    const float of_token = token_scale(amax);
    if (type == ATTN_F8_E4M3FN_TOKEN) std::memcpy(scales_of_row, &of_token, sizeof of_token);
    encode_cache(type, row, scales_of_row, 0, n, real.data());
    decode_cache(type, row, scales_of_row, 0, n, real.data());
    for (double& value : real) value *= descale;
    return real;
  }
  if (dtype_has_scales(type)) {
    std::vector<double> scaled(x.begin(), x.end());
    double amax = 0;
    for (double& value : scaled) amax = std::max(amax, std::abs(value /= descale));
    uint16_t& code = scales->as<uint16_t>()[scale_at];
    code = row_scale(type, amax, false, false);
    encode_codes(type, to.data(), at, n, scaled.data(), code);
    scale = f16_value(code);
  } else if (dtype_is_ggml(type)) {
    std::vector<float> scaled(x);
    for (float& value : scaled) value /= descale;
    for (int64_t d = 0; d < n; d += 32) {
      unsigned char* block = to.data() + dtype_bytes(type, at + d);
      encode_block(type, &scaled[d], block, false);
    }
  } else {
    for (int64_t d = 0; d < n; ++d) {
      encode_element(type, to.data(), at + d, double(x[d]) / descale, true);
    }
  }
  std::vector<double> real(n);
  decode_row(type, to.data(), at, n, real.data());
  for (double& value : real) value *= descale * scale;
  return real;
}

double norm(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

float power_of_two(uint64_t h) {
  return float((h & 1 ? 1 : -1) * std::exp2(double(h >> 1 & 3) - 2));
}

std::vector<float> q_row(const Case& c, int64_t b, int64_t h, int64_t i) {
  std::vector<float> x(c.head_dim);
  for (int64_t d = 0; d < c.head_dim; ++d) {
    const uint64_t n = hash(c.seed, tag_q, b * 1000 + h, i, d);
    // one_hot: the key of number (i + h) % D stands out, see k_row.
    x[d] = c.values == Values::normal    ? float(c.sigma * normal(n))
           : c.values == Values::one_hot ? (d == (i + h) % c.head_dim ? 16.0f : 0.0f)
                                         : power_of_two(n);
  }
  return x;
}
std::vector<float> k_row(const Case& c, int64_t b, int64_t kv_head, int64_t j) {
  std::vector<float> x(c.head_dim, 0.0f);
  for (int64_t d = 0; d < c.head_dim; ++d) {
    if (c.values == Values::normal) {
      x[d] = float(c.sigma * normal(hash(c.seed, tag_k, b * 1000 + kv_head, j, d)));
    } else if (c.values == Values::one_hot) {
      x[d] = j % c.head_dim == d ? 16.0f : 0.0f;
    }
  }
  return x;
}
std::vector<float> v_row(const Case& c, int64_t b, int64_t kv_head, int64_t j) {
  std::vector<float> x(c.head_dim_v);
  for (int64_t d = 0; d < c.head_dim_v; ++d) {
    const uint64_t n = hash(c.seed, tag_v, b * 1000 + kv_head, j, d);
    x[d] = c.values == Values::normal     ? float(c.sigma * normal(n))
           : c.values == Values::identity ? (d == j % c.head_dim_v ? 1.0f : 0.0f)
                                          : power_of_two(n);
  }
  return x;
}

// `period`: after so many sequences they repeat.
std::vector<float> random_descales(const Case& c, uint64_t tag, attn_descale_kind kind,
                                   int64_t blocks, int64_t batch, int64_t period) {
  int64_t of_entry = c.heads_kv;
  if (kind == ATTN_DESCALE_BLOCK) of_entry *= blocks;
  const int64_t count = kind == ATTN_DESCALE_TENSOR ? 1 : batch * of_entry;
  std::vector<float> values(count);
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t h = hash(c.seed, tag_scale, tag, n % std::max<int64_t>(1, period * of_entry));
    values[n] = c.values == Values::normal ? 0.5f + float(h % 1000) / 1000
                                           : float(std::exp2(double(h % 3) - 1));
  }
  return values;
}
float descale_at(const Case& c, attn_descale_kind kind, const Buffer& values, int64_t b,
                 int64_t kv_head, int64_t block, int64_t blocks) {
  if (kind == ATTN_DESCALE_NONE) return 1;
  if (kind == ATTN_DESCALE_TENSOR) return values.as<float>()[0];
  const int64_t head = b * c.heads_kv + kv_head;
  return values.as<float>()[kind == ATTN_DESCALE_HEAD ? head : head * blocks + block];
}

void make_bias(const Case& c, Data* data) {
  const int64_t keys = c.capacity();
  const int64_t extent[4] = {c.bias_per_batch ? c.batch : 1, c.bias_per_head ? c.heads_q : 1,
                             c.bias_per_query ? c.seqlen_q : 1, keys};
  int64_t stride = c.bias_key_stride, count = 1;
  for (int n = 3; n >= 0; --n) {
    data->bias_stride[n] = extent[n] == 1 && n < 3 ? 0 : stride;
    stride *= extent[n];
    count *= extent[n];
  }
  data->bias =
      Buffer(size_t(dtype_bytes(c.bias_type, c.bias_first + stride)), poison_of(c.bias_type));
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t h = hash(c.seed, tag_bias, n / keys, n % keys);
    const float x = c.bias_value != 0 ? c.bias_value : h % 8 == 0 ? -infinity : float(normal(h));
    encode_element(c.bias_type, data->bias.data(), c.bias_first + n * c.bias_key_stride, x, false);
    if (std::abs(x) < 100) data->logit_bound = std::max(data->logit_bound, double(std::abs(x)));
  }
}

void make_mask(const Case& c, Data* data) {
  const int64_t planes = (c.mask_per_batch ? c.batch : 1) * (c.mask_per_head ? c.heads_q : 1);
  const int64_t cells =
      planes * ceil_div(c.seqlen_q, c.block_q) * ceil_div(c.capacity(), c.block_k);
  const int64_t words = ceil_div(c.block_k, 32), block_words = c.block_q * words;
  const bool random = c.mask_bits == MaskBits::random;
  std::vector<uint8_t> kinds(cells);
  std::vector<int32_t> index(cells, -1);
  data->num_partials = random ? 3 : planes;
  for (int64_t n = 0; n < cells; ++n) {
    const uint64_t h = hash(c.seed, tag_mask, n);
    kinds[n] = c.mask_kinds.empty() ? uint8_t(h % 4) : c.mask_kinds[n % c.mask_kinds.size()];
    if (!random) kinds[n] = ATTN_BLOCK_PARTIAL;
    if (kinds[n] == ATTN_BLOCK_PARTIAL)
      index[n] = int32_t(random ? int64_t(h >> 8) % data->num_partials : n);
    if (!c.mask_garbage || (h >> 16) % 2) continue;
    if (kinds[n] != ATTN_BLOCK_PARTIAL) {
      kinds[n] = uint8_t(4 + (h >> 24) % 252);
    } else {
      constexpr int32_t most = std::numeric_limits<int32_t>::max();
      const int32_t bad[] = {-1, -most - 1, most, int32_t(data->num_partials), 1 << 20};
      index[n] = bad[(h >> 24) % std::size(bad)];
    }
  }
  std::vector<uint32_t> bits(data->num_partials * block_words, c.mask_inverted ? ~0u : 0u);
  const auto change = [&](int64_t block, int64_t row, int64_t column) {
    bits[block * block_words + row * words + column / 32] ^= 1u << (column % 32);
  };
  for (int64_t n = 0; n < int64_t(bits.size()) && random; ++n)
    bits[n] = uint32_t(hash(c.seed, tag_mask, n, 1));
  for (int64_t n = 0; n < planes && !random; ++n) {
    const int64_t first = c.mask_first + n;
    if (c.mask_bits == MaskBits::one_element)
      change(n, first / c.block_k, first % c.block_k);
    else
      for (int64_t i = 0; i < c.block_q; ++i) change(n, i, (i + first) % c.block_k);
  }
  data->kinds = buffer_of(kinds);
  data->index = buffer_of(index);
  data->bits = buffer_of(bits);
}

// Bits that stand for no key, and the words of rows of nobody, are set at random too.
void make_tree(const Case& c, int64_t rows, Data* data) {
  data->tree = Buffer(size_t(rows) * 16, 0xff);
  for (int64_t n = 0; n < 2 * rows; ++n) {
    uint64_t word = 0;
    for (uint64_t bit = 0; bit < 64; ++bit)
      word |= uint64_t(hash(c.seed, tag_tree, uint64_t(n), bit) % uint64_t(c.tree_density) == 0)
              << bit;
    data->tree.as<uint64_t>()[n] = word;
  }
}

void make_segment_buffers(const Case& c, const SegmentCase& s, int64_t number, SegmentData* out) {
  const int64_t batch = s.entries(c.batch);
  int64_t outer = batch, rows = s.capacity;
  if (s.layout == ATTN_PACKED) {
    std::vector<int32_t> cu(1, 0);
    for (int64_t b = 0; b < c.batch; ++b) cu.push_back(cu.back() + int32_t(s.length(b)));
    out->total = cu.back() + 3;  // tokens that belong to nobody
    outer = 1;
    rows = out->total;
    out->cu_seqlens = buffer_of(cu);
  } else {
    if (!s.lengths.empty())
      out->seqlens = buffer_of(std::vector<int32_t>(s.lengths.begin(), s.lengths.begin() + batch));
    if (s.layout == ATTN_PAGED) {
      out->max_pages = ceil_div(s.capacity, s.page_size) + 1;
      out->num_pages = batch * out->max_pages + 2;
      outer = out->num_pages;
      rows = s.page_size;
      std::vector<int32_t> pages(out->num_pages);
      std::iota(pages.begin(), pages.end(), 0);
      for (size_t n = pages.size(); n > 1; --n) {
        std::swap(pages[n - 1], pages[hash(c.seed, tag_page, number, n) % n]);
      }
      pages.resize(batch * out->max_pages);
      for (int64_t b = 0; b < batch; ++b) {
        int32_t* row = &pages[b * out->max_pages];
        for (int64_t page = ceil_div(s.length(b), s.page_size); page < out->max_pages; ++page) {
          row[page] = page % 2 ? -1 : std::numeric_limits<int32_t>::max();
        }
        for (int32_t page : s.bad_pages) {
          if (page < out->max_pages) row[page] = b % 2 ? -7 : int32_t(out->num_pages);
        }
      }
      out->block_table = buffer_of(pages);
    }
  }
  if (!s.key_start.empty()) out->key_start = buffer_of(s.key_start);
  int64_t k_elements, v_elements;
  out->k_view = arrange_view(s.k_type, s.arrange, outer, rows, c.heads_kv, c.head_dim, &k_elements);
  out->v_view =
      arrange_view(s.v_type, s.arrange, outer, rows, c.heads_kv, c.head_dim_v, &v_elements);
  out->k = Buffer(size_t(dtype_bytes(s.k_type, k_elements)), poison_of(s.k_type));
  if (c.v_in_k) {
    out->v_view = {};
  } else if (s.arrange == Arrange::interleaved) {
    out->v_view.offset = c.head_dim;
  } else {
    out->v = Buffer(size_t(dtype_bytes(s.v_type, v_elements)), poison_of(s.v_type));
  }
  const Arrange arrange = s.arrange == Arrange::interleaved ? Arrange::contiguous : s.arrange;
  const auto make_scales = [&](attn_dtype type, int64_t dim, View* view, Buffer* scales) {
    if (!dtype_has_scales(type)) return;
    int64_t elements;
    *view = arrange_view(scale_element(type), arrange, outer, rows, c.heads_kv,
                         scales_of_row(type_info(type), dim), &elements);
    *scales = Buffer(size_t(elements) * size_t(type_info(type).scale_bytes),
                     poison_of(scale_element(type)));
  };
  make_scales(s.k_type, c.head_dim, &out->k_scale_view, &out->k_scale);
  make_scales(s.v_type, c.head_dim_v, &out->v_scale_view, &out->v_scale);
  const int64_t blocks = ceil_div(s.capacity, s.descale_block_keys),
                period = s.keys == Keys::own ? batch : 1;
  if (s.k_descale != ATTN_DESCALE_NONE) {
    out->k_descale =
        buffer_of(random_descales(c, tag_k + 10 * number, s.k_descale, blocks, batch, period));
  }
  if (s.v_descale != ATTN_DESCALE_NONE) {
    out->v_descale =
        buffer_of(random_descales(c, tag_v + 10 * number, s.v_descale, blocks, batch, period));
  }
}

// Where key `key` of the segment lies: (outer, row).
std::pair<int64_t, int64_t> key_place(const SegmentCase& s, const SegmentData& data, int64_t b,
                                      int64_t key) {
  if (s.layout == ATTN_PACKED) return {0, data.cu_seqlens.as<int32_t>()[b] + key};
  if (s.layout == ATTN_PADDED) return {s.entry(b), key};
  return {data.block_table.as<int32_t>()[s.entry(b) * data.max_pages + key / s.page_size],
          key % s.page_size};
}

bool in_bad_page(const SegmentCase& s, int64_t key) {
  return s.layout == ATTN_PAGED &&
         std::find(s.bad_pages.begin(), s.bad_pages.end(), key / s.page_size) != s.bad_pages.end();
}

}  // namespace

uint64_t hash(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t h = seed;
  for (uint64_t part : {a, b, c, d}) {
    h += part + 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
    h ^= h >> 31;
  }
  return h;
}

double normal(uint64_t hashed) {
  const double u = (double(hashed >> 32) + 0.5) * 0x1p-32;
  const double angle = double(hashed & 0xffffffff) * 0x1p-32 * 6.283185307179586;
  return std::sqrt(-2 * std::log(u)) * std::cos(angle);
}

int64_t Case::keys(int64_t b) const {
  int64_t sum = 0;
  for (const SegmentCase& s : segments) sum += s.length(b);
  return sum;
}
int64_t Case::capacity() const {
  int64_t sum = 0;
  for (const SegmentCase& s : segments) sum += s.capacity;
  return sum;
}
int64_t Case::query_position(int64_t b, int64_t i) const {
  return i + (query_start.empty() ? keys(b) - queries(b) : query_start[size_t(b)]);
}
int64_t Case::key_position(int64_t b, int64_t j) const {
  if (segments[0].key_start.empty()) return j;
  for (const SegmentCase& s : segments) {
    if (j < s.length(b))
      return s.key_start[size_t(s.entry(b))] +
             (j / s.key_interleave * s.key_ranks + s.key_rank) * s.key_interleave +
             j % s.key_interleave;
    j -= s.length(b);
  }
  return 0;
}

Case with_type(Case c, attn_dtype type) {
  const auto change = [&](attn_dtype* t) {
    if (*t == ATTN_F32) *t = type;
  };
  change(&c.q_type);
  for (SegmentCase& s : c.segments) {
    change(&s.k_type);
    change(&s.v_type);
  }
  return c;
}

std::string describe(const Case& c) {
  std::ostringstream out;
  const auto list = [&](const auto& values) {
    out << "[";
    for (size_t n = 0; n < values.size(); ++n) out << (n ? "," : "") << values[n];
    out << "]";
  };
  out << c.name << ": seed " << c.seed << ", B" << c.batch << " H" << c.heads_q << "/" << c.heads_kv
      << " D" << c.head_dim << "/" << c.head_dim_v << " Sq" << c.seqlen_q;
  if (!c.lengths_q.empty()) list(c.lengths_q);
  if (c.v_in_k) out << " v in k";
  out << " q " << dtype_name(c.q_type) << " out " << dtype_name(c.out_type) << " flags " << c.flags
      << " window " << c.window_left << "," << c.window_right << " scale " << c.scale << " softcap "
      << c.softcap << " bias " << dtype_name(c.bias_type) << " from " << c.bias_first << " by "
      << c.bias_key_stride << " values " << int(c.values) << " sigma " << c.sigma << " arrange "
      << int(c.q_arrange) << int(c.out_arrange) << " q_descale " << c.q_descale;
  if (c.has(ATTN_BLOCK_MASK)) {
    out << " blocks " << c.block_q << "x" << c.block_k << " kinds [";
    for (size_t n = 0; n < c.mask_kinds.size(); ++n) out << (n ? "," : "") << int(c.mask_kinds[n]);
    out << "] bits " << int(c.mask_bits) << (c.mask_inverted ? " inverted" : "") << " from "
        << c.mask_first << (c.mask_garbage ? " garbage" : "");
  }
  if (!c.kv_begin.empty()) {
    out << " begin ";
    list(c.kv_begin);
  }
  if (!c.query_start.empty()) {
    out << " queries from ";
    list(c.query_start);
  }
  if (c.tree_keys > 0) out << " tree " << c.tree_keys << " one in " << c.tree_density;
  for (const SegmentCase& s : c.segments) {
    out << " | " << dtype_name(s.k_type) << "/" << dtype_name(s.v_type) << " layout " << s.layout
        << " capacity " << s.capacity << " ";
    list(s.lengths);
    if (s.layout == ATTN_PAGED) out << " pages of " << s.page_size;
    if (!s.bad_pages.empty()) {
      out << " bad ";
      list(s.bad_pages);
    }
    out << " arrange " << int(s.arrange) << " descale " << s.k_descale << s.v_descale;
    if (s.keys != Keys::own) out << (s.keys == Keys::shared ? " shared" : " copied");
    if (!s.key_start.empty()) {
      out << " keys " << s.key_rank << " of " << s.key_ranks << " by " << s.key_interleave
          << " from ";
      list(s.key_start);
    }
  }
  return out.str();
}

unsigned char poison_of(attn_dtype type) {
  return type == ATTN_F8_E4M3FNUZ ? 0x80 : 0xff;
}

View arrange_view(attn_dtype type, Arrange arrange, int64_t batch, int64_t seq, int64_t heads,
                  int64_t dim, int64_t* elements) {
  const int64_t align = dtype_is_ggml(type)  ? 32 * 16
                        : type == ATTN_NVFP4 ? 32
                                             : 16 / std::min<int64_t>(dtype_bytes(type), 16);
  const auto aligned = [&](int64_t n) { return ceil_div(n, align) * align; };
  View view{type, {}, {}, 0};
  const int64_t tokens = std::max<int64_t>(seq, 1);
  switch (arrange) {
    case Arrange::contiguous:
    case Arrange::reversed:
      view.stride = {tokens * heads * dim, heads * dim, dim};
      break;
    case Arrange::padded:
    case Arrange::flipped:
      view.stride.head = aligned(dim + 1);
      view.stride.seq = heads * view.stride.head + align;
      view.stride.batch = tokens * view.stride.seq + align;
      break;
    case Arrange::head_major:
      view.stride.seq = aligned(dim);
      view.stride.head = tokens * view.stride.seq;
      view.stride.batch = heads * view.stride.head;
      break;
    case Arrange::odd:
      view.stride.head = dim + (dtype_is_ggml(type) ? 32 : 3 * dtype_block(type));
      view.stride.seq = heads * view.stride.head;
      view.stride.batch = tokens * view.stride.seq;
      break;
    case Arrange::interleaved:
      view.stride = {tokens * heads * 2 * dim, heads * 2 * dim, 2 * dim};
      break;
  }
  const bool empty = batch == 0 || seq == 0;
  *elements = empty ? 0 : view.at(batch - 1, seq - 1, heads - 1) + dim;
  const auto reverse = [&](int64_t& stride, int64_t size) {
    view.offset += std::max<int64_t>(size - 1, 0) * stride;
    stride = -stride;
  };
  if (arrange == Arrange::reversed) {
    reverse(view.stride.batch, batch);
    reverse(view.stride.head, heads);
  }
  if (arrange == Arrange::reversed || arrange == Arrange::flipped) reverse(view.stride.seq, seq);
  if (arrange != Arrange::contiguous) view.given = view.stride;
  if (!empty && arrange == Arrange::interleaved) *elements += dim;
  return view;
}

double bias_at(const Case& c, const Data& data, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c.bias_type == ATTN_DTYPE_NONE) return 0;
  const double x = decode_element(c.bias_type, data.bias.data(),
                                  c.bias_first + b * data.bias_stride[0] + h * data.bias_stride[1] +
                                      i * data.bias_stride[2] + j * data.bias_stride[3]);
  if (!c.has(ATTN_BIAS_SLOPES) || x == -infinity) return x;
  return x * data.bias_slopes.as<float>()[h];
}

bool visible(const Case& c, const Data& data, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (j < 0 || j >= c.keys(b)) return false;
  if (!c.kv_begin.empty() && j < c.kv_begin[size_t(b)]) return false;
  const int64_t query = c.query_position(b, i), key = c.key_position(b, j);
  if (c.has(ATTN_CAUSAL) && key > query) return false;
  if (c.has(ATTN_CAUSAL_TOP_LEFT) && j > i) return false;
  if (c.has(ATTN_WINDOW)) {
    if (c.window_left >= 0 && key < query - c.window_left) return false;
    if (c.window_right >= 0 && key > query + c.window_right) return false;
  }
  const int64_t bit = j - (c.keys(b) - c.tree_keys);
  if (c.tree_keys > 0 && bit >= 0) {
    int64_t row = i;
    for (int64_t before = 0; before < b; ++before)
      row += c.lengths_q.empty() ? c.seqlen_q : c.lengths_q[before];
    if (!(data.tree.as<uint64_t>()[2 * row + bit / 64] >> bit % 64 & 1)) return false;
  }
  if (c.has(ATTN_BLOCK_MASK)) {
    const int64_t rows = ceil_div(c.seqlen_q, c.block_q),
                  columns = ceil_div(c.capacity(), c.block_k);
    int64_t plane = c.mask_per_batch ? b : 0;
    plane = c.mask_per_head ? plane * c.heads_q + h : plane;
    const int64_t cell = (plane * rows + i / c.block_q) * columns + j / c.block_k;
    switch (data.kinds.as<uint8_t>()[cell]) {
      case ATTN_BLOCK_FULL:
        break;
      case ATTN_BLOCK_CAUSAL:
        if (key > query) return false;
        break;
      case ATTN_BLOCK_PARTIAL: {
        const int64_t words = ceil_div(c.block_k, 32), column = j % c.block_k;
        const int64_t index = data.index.as<int32_t>()[cell];
        if (index < 0 || index >= data.num_partials) return false;
        const int64_t row = index * c.block_q + i % c.block_q;
        if (!(data.bits.as<uint32_t>()[row * words + column / 32] >> (column % 32) & 1))
          return false;
        break;
      }
      default:
        return false;
    }
  }
  if (bias_at(c, data, b, h, i, j) == -infinity) {
    return false;
  }
  for (const SegmentCase& s : c.segments) {
    if (j < s.length(b)) return !in_bad_page(s, j);
    j -= s.length(b);
  }
  return false;
}

void draw_lengths_q(Draw& draw, Case* c) {
  for (int64_t b = 0; b < c->batch; ++b)
    c->lengths_q.push_back(int32_t(draw(uint64_t(c->seqlen_q) + 1)));
  c->lengths_q[size_t(draw(uint64_t(c->batch)))] = int32_t(c->seqlen_q);
}
void draw_lengths(Draw& draw, int64_t batch, SegmentCase* s) {
  for (int64_t b = 0; b < batch; ++b)
    s->lengths.push_back(int32_t(draw.chance(6) ? 0 : draw(uint64_t(s->capacity) + 1)));
}
void draw_begins(Draw& draw, Case* c) {
  for (int64_t b = 0; b < c->batch; ++b) {
    const int64_t keys = c->keys(b);
    c->kv_begin.push_back(int32_t(draw.chance(6)   ? 0
                                  : draw.chance(6) ? keys + draw(3)
                                                   : draw(uint64_t(keys) + 1)));
  }
}

Data make_data(const Case& c) {
  Data data;
  if (c.bias_type != ATTN_DTYPE_NONE) make_bias(c, &data);
  if (c.has(ATTN_BLOCK_MASK)) make_mask(c, &data);
  std::vector<float> slopes(c.heads_q), sinks(c.heads_q);
  double slope_max = 0;
  for (int64_t h = 0; h < c.heads_q; ++h) {
    slopes[h] = c.alibi_sign * float(std::exp2(-double(h % 8) - 1));
    sinks[h] = float(2 * normal(hash(c.seed, tag_sink, h)));
    slope_max = std::max(slope_max, double(std::abs(slopes[h])));
  }
  if (c.has(ATTN_ALIBI)) {
    data.slopes = buffer_of(slopes);
    int64_t distance = std::max(c.capacity(), c.seqlen_q);
    for (int64_t b = 0; b < c.batch && c.keys(b) > 0; ++b)
      for (const int64_t i : {int64_t{0}, c.seqlen_q})
        for (const int64_t j : {int64_t{0}, c.keys(b) - 1})
          distance = std::max(distance, std::abs(c.query_position(b, i) - c.key_position(b, j)));
    data.logit_bound += slope_max * double(distance);
  }
  if (c.has(ATTN_SINKS)) data.sinks = buffer_of(sinks);
  if (c.has(ATTN_BIAS_SLOPES)) {  // up to 1, and 0 for a head
    for (int64_t h = 0; h < c.heads_q; ++h)
      slopes[h] = h % 5 == 3 ? 0 : float(std::exp2(-double(h % 8)));
    data.bias_slopes = buffer_of(slopes);
  }
  if (c.has(ATTN_OUT_SCALE)) data.out_scale = buffer_of(std::vector<float>{1.75f});

  // Queries.
  int64_t outer = c.batch, rows = c.seqlen_q;
  std::vector<int32_t> cu_q(1, 0);
  if (!c.lengths_q.empty()) {
    for (int32_t n : c.lengths_q) cu_q.push_back(cu_q.back() + n);
    data.cu_seqlens_q = buffer_of(cu_q);
    outer = 1;
    rows = cu_q.back() + c.tokens_of_nobody;
  }
  if (!c.kv_begin.empty()) data.kv_begin = buffer_of(c.kv_begin);
  if (!c.query_start.empty()) data.query_start = buffer_of(c.query_start);
  if (c.tree_keys > 0) make_tree(c, outer * rows, &data);
  int64_t elements;
  data.q_view = arrange_view(c.q_type, c.q_arrange, outer, rows, c.heads_q, c.head_dim, &elements);
  data.q = Buffer(size_t(dtype_bytes(c.q_type, elements)), poison_of(c.q_type));
  if (c.q_descale != ATTN_DESCALE_NONE) {
    data.q_descale = buffer_of(random_descales(c, tag_q, c.q_descale, 1, c.batch, c.batch));
  }
  int64_t most_keys = 0;
  for (int64_t b = 0; b < c.batch; ++b) most_keys = std::max(most_keys, c.keys(b));
  data.q_real.resize(c.batch * c.heads_q * c.seqlen_q);
  data.k_real.resize(c.batch * c.heads_kv * most_keys);
  data.v_real.resize(c.batch * c.heads_kv * most_keys);
  data.v_scales.resize(data.v_real.size());
  data.most_keys = most_keys;
  double q_norm = 0, k_norm = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.queries(b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const int64_t at =
            c.lengths_q.empty() ? data.q_view.at(b, i, h) : data.q_view.at(0, cu_q[b] + i, h);
        const float descale =
            descale_at(c, c.q_descale, data.q_descale, b, h / (c.heads_q / c.heads_kv), 0, 1);
        auto& real = data.q_real[(b * c.heads_q + h) * c.seqlen_q + i];
        real = write_row(data.q, c.q_type, at, q_row(c, b, h, i), descale);
        q_norm = std::max(q_norm, norm(real));
      }
    }
  }

  // Keys and values that some query of their (batch entry, kv head) sees; the others stay poison.
  for (size_t n = 0; n < c.segments.size(); ++n) {
    data.segments.emplace_back();
    make_segment_buffers(c, c.segments[n], int64_t(n), &data.segments[n]);
  }
  const int64_t group = c.heads_q / c.heads_kv;
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t first = 0;
    for (size_t n = 0; n < c.segments.size(); ++n) {
      const SegmentCase& s = c.segments[n];
      SegmentData& to = data.segments[n];
      const int64_t blocks = ceil_div(s.capacity, s.descale_block_keys);
      for (int64_t key = 0; key < s.length(b); ++key) {
        const int64_t j = first + key, position = c.key_position(b, j);
        for (int64_t kv_head = 0; kv_head < c.heads_kv; ++kv_head) {
          bool seen = false;
          for (int64_t h = kv_head * group; h < (kv_head + 1) * group && !seen; ++h) {
            for (int64_t i = c.queries(b) - 1; i >= 0 && !seen; --i)
              seen = visible(c, data, b, h, i, j);
          }
          if (!seen) continue;
          const auto [place, row] = key_place(s, to, b, key);
          const int64_t block = key / s.descale_block_keys;
          const float k_descale =
              descale_at(c, s.k_descale, to.k_descale, s.entry(b), kv_head, block, blocks);
          const float v_descale =
              descale_at(c, s.v_descale, to.v_descale, s.entry(b), kv_head, block, blocks);
          const int64_t at = (b * c.heads_kv + kv_head) * most_keys + j;
          data.k_real[at] = write_row(to.k, s.k_type, to.k_view.at(place, row, kv_head),
                                      k_row(c, s.source(b), kv_head, position), k_descale,
                                      &to.k_scale, to.k_scale_view.at(place, row, kv_head));
          k_norm = std::max(k_norm, norm(data.k_real[at]));
          const auto bound_v = [&] {
            for (double x : data.v_real[at]) data.v_max = std::max(data.v_max, std::abs(x));
          };
          if (c.v_in_k) {
            data.v_real[at] = data.k_real[at];
            data.v_real[at].resize(size_t(c.head_dim_v));
            bound_v();
            continue;
          }
          Buffer& v = s.arrange == Arrange::interleaved ? to.k : to.v;
          const int64_t v_at = to.v_view.at(place, row, kv_head);
          data.v_real[at] =
              write_row(v, s.v_type, v_at, v_row(c, s.source(b), kv_head, position), v_descale,
                        &to.v_scale, to.v_scale_view.at(place, row, kv_head));
          if (dtype_is_ggml(s.v_type))
            for (int64_t d = 0; d < c.head_dim_v; d += 32) {
              const unsigned char* const block = v.data() + dtype_bytes(s.v_type, v_at + d);
              data.v_scales[at].push_back(decode_element(ATTN_F16, block, 0));
              data.v_scales[at].push_back(
                  block_layout(s.v_type).has_min ? decode_element(ATTN_F16, block, 1) : 0);
            }
          // Of nvfp4 the descale: its scales are in the values.
          if (dtype_has_scales(s.v_type)) {
            const int64_t at_scale = to.v_scale_view.at(place, row, kv_head);
            data.v_scales[at].push_back(
                s.v_type == ATTN_NVFP4
                    ? v_descale
                    : decode_element(scale_element(s.v_type), to.v_scale.data(), at_scale));
            data.v_scales[at].push_back(0);
          }
          bound_v();
        }
      }
      first += s.length(b);
    }
  }
  const double scale = c.scale != 0 ? std::abs(c.scale) : 1 / std::sqrt(double(c.head_dim));
  data.dot_bound = scale * q_norm * k_norm;
  data.logit_bound += c.softcap > 0 ? std::min(data.dot_bound, double(c.softcap)) : data.dot_bound;
  return data;
}

}  // namespace attn::test
