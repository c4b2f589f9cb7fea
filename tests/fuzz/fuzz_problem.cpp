// libFuzzer target: any bytes as the structs of attn.h. Nothing may crash; a refusal has a
// sentence; a problem that gets a plan and is small runs on buffers of exactly its size with any
// contents in them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attn/attn.h"
#include "core/ceil_div.h"
#include "core/dtype.h"
#include "problem/backward.h"
#include "problem/operations.h"
#include "problem/problem.h"

namespace {

void check(bool good) {
  if (!good) std::abort();
}

// Reads numbers off the input; zeros when it is used up.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  size_t left() const { return left_; }
  void bytes(void* to, size_t count) {
    std::memset(to, 0, count);
    const size_t n = std::min(count, left_);
    if (n) std::memcpy(to, data_, n);
    data_ += n;
    left_ -= n;
  }
  template <class T>
  T take() {
    T value;
    bytes(&value, sizeof value);
    return value;
  }
  // 0 .. limit - 1
  int64_t below(int64_t limit) { return take<uint8_t>() % limit; }
  // A size: mostly small, now and then one that breaks arithmetic.
  int64_t size() {
    constexpr int64_t odd[] = {
        -1,        INT32_MAX, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 60, INT64_MAX,
        INT64_MIN, 0};
    const int choice = take<uint8_t>();
    return choice >= 248 ? odd[choice - 248] : choice % 12;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Structs may claim up to 64 KiB, which the library then reads.
constexpr size_t kStruct = 1 << 16;
constexpr int kSegments = 6;

struct Structs {
  std::vector<unsigned char> problem = std::vector<unsigned char>(kStruct);
  std::vector<unsigned char> segments = std::vector<unsigned char>(kStruct * (kSegments + 1));
};

const char* const kKernels[] = {nullptr,   "reference", "cpu_baseline", "cpu_avx2", "merge_cpu",
                                "nothing", ""};

attn_strides make_strides(Source& in) {
  const int64_t unit = in.below(2) ? 1 : 32;
  const int64_t signs = in.below(3) ? 0 : in.below(8);
  const auto stride = [&](int n) {
    const int64_t size = in.size();
    return size < 12 && size > 0 ? (signs >> n & 1 ? -size : size) * unit : size;
  };
  return {stride(0), stride(1), stride(2)};
}

attn_segment make_segment(Source& in, attn_dtype q_type) {
  attn_segment s{};
  s.struct_size = sizeof s;
  const auto type = [&] { return in.below(2) ? q_type : attn_dtype(in.below(21)); };
  s.k_type = type();
  s.v_type = type();
  s.layout = attn_layout(in.below(3));
  if (s.layout == ATTN_PACKED) {
    s.seqlen = in.size();
    s.total = in.size();
  } else if (s.layout == ATTN_PAGED) {
    s.num_pages = in.size();
    s.page_size = int32_t(in.size());
    s.max_pages = int32_t(in.size());
    if (in.below(2)) s.seqlen = in.size();
  } else {
    s.seqlen = in.size();
  }
  s.has_seqlens = s.layout != ATTN_PACKED && in.below(2);
  s.shared = in.below(8) == 0;
  s.k_descale = attn_descale_kind(in.below(4));
  s.v_descale = attn_descale_kind(in.below(4));
  if (s.k_descale == ATTN_DESCALE_BLOCK || s.v_descale == ATTN_DESCALE_BLOCK)
    s.descale_block_keys = in.below(2) ? 64 : 128;
  if (in.below(6) == 0) s.k_stride = make_strides(in);
  if (in.below(6) == 0) s.v_stride = make_strides(in);
  if (attn::dtype_has_scales(s.k_type) && in.below(6) == 0) s.k_scale_stride = make_strides(in);
  if (in.below(4) == 0) {
    s.v_in_k = 1;
    if (in.below(8)) s.v_type = ATTN_DTYPE_NONE, s.v_stride = {}, s.v_descale = ATTN_DESCALE_NONE;
  }
  s.no_positions = in.below(6) == 0;
  if (in.below(4) == 0) {
    constexpr int32_t sizes[] = {0, 1, 64, 128, 3};
    s.list_size = in.size();
    s.list_heads = in.below(4);
    s.list_block = sizes[in.below(2) ? in.below(2) : in.below(5)];
    s.list_queries = sizes[in.below(2) ? in.below(2) : in.below(5)];
    s.has_list_lengths = in.below(3) == 0;
    if (in.below(4) == 0) {
      s.list_of_pool = s.no_positions = 1;
      s.has_seqlens = s.max_pages = 0;
    }
  }
  return s;
}

void add_places(Source& in, attn_segment* s) {
  s->has_key_start = 1;
  s->key_interleave = in.below(2) ? in.size() : 0;
  s->key_ranks = in.below(2) ? int32_t(in.size()) : 0;
  if (s->key_ranks > 0 && in.below(8)) s->key_rank = int32_t(in.below(s->key_ranks));
}

// As calls that write a cache want it.
void without_lists(attn_segment* s) {
  s->list_size = s->list_heads = 0;
  s->list_block = s->list_queries = s->has_list_lengths = s->list_of_pool = s->no_positions = 0;
}

attn_problem make_problem(Source& in) {
  attn_problem p{};
  p.struct_size = sizeof p;
  p.batch = in.below(4);
  p.heads_kv = 1 + in.below(3);
  p.heads_q = p.heads_kv * (1 + in.below(3));
  constexpr int64_t dims[] = {32, 32, 512, 576};
  p.head_dim = in.below(4) ? 1 + in.below(20) : dims[in.below(4)];
  p.head_dim_v = in.below(3) ? 0 : in.size();
  p.seqlen_q = in.below(12);
  p.q_type = attn_dtype(1 + in.below(6));
  p.out_type = in.below(2) ? ATTN_DTYPE_NONE : attn_dtype(in.below(21));
  p.q_layout = attn_layout(in.below(2));
  if (p.q_layout == ATTN_PACKED && p.batch > 0) p.total_q = in.size();
  p.q_descale = attn_descale_kind(in.below(3));
  p.num_segments = 1 + int32_t(in.below(3));
  p.scale = in.below(2) ? 0 : in.take<float>();
  p.softcap = in.below(3) ? 0 : in.take<float>();
  p.flags = in.below(4) ? uint32_t(in.below(32)) : in.take<uint16_t>() & 0x1bff;
  if (in.below(4) == 0) p.flags |= ATTN_BLOCK_MASK;
  if (p.flags & ATTN_WINDOW) {
    p.window_left = in.below(4) ? in.size() : -1;
    p.window_right = in.below(4) ? in.size() : -1;
  }
  if (in.below(3) == 0) {
    p.bias_type = in.below(2) ? ATTN_F32 : p.q_type;
    if (in.below(2))
      for (int64_t& stride : p.bias_stride) stride = in.below(4) ? in.size() : -in.below(12);
  }
  p.block_q = int32_t(in.size());
  p.block_k = int32_t(in.below(2) ? in.size() : 40);
  p.mask_batch = in.below(2) ? p.batch : in.below(3);
  p.mask_heads = in.below(2) ? p.heads_q : in.below(3);
  p.mask_partials = in.below(4);
  p.fixed_split = in.below(3) ? 0 : in.size();
  p.max_sms = in.below(8) ? 0 : int32_t(in.size());
  p.tree_keys = in.below(4) ? 0 : in.below(140);
  p.has_kv_begin = in.below(6) == 0;
  p.has_causal_sequences = p.flags & ATTN_CAUSAL && in.below(4) == 0;
  if (in.below(4) == 0) p.flags = (p.flags | ATTN_QUERY_POSITIONS) & ~ATTN_CAUSAL_TOP_LEFT;
  if (p.flags & ATTN_ACCUMULATE && in.below(8)) p.out_type = ATTN_F32;
  if (in.below(6) == 0) p.q_stride = make_strides(in);
  if (in.below(6) == 0) p.out_stride = make_strides(in);
  return p;
}

// Puts 32 or 64 bits of the input over a field.
void mutate(Source& in, void* structure, size_t size) {
  const size_t at = size_t(in.take<uint16_t>()) % (size / 4) * 4;
  const int64_t value = in.below(2) ? in.size() : in.take<int64_t>();
  std::memcpy(static_cast<char*>(structure) + at, &value, at + 8 <= size && in.below(2) ? 8 : 4);
}

// ---- running ----

// Memory of exactly `count` bytes, so that the address sanitizer sees a step beyond.
class Memory {
 public:
  explicit Memory(uint32_t seed) : state_(seed | 1) {}
  unsigned char* raw(int64_t count, size_t alignment = 16) {
    void* block = nullptr;
    check(::posix_memalign(&block, alignment, size_t(std::max<int64_t>(count, 1))) == 0);
    blocks_.emplace_back(static_cast<unsigned char*>(block));
    return blocks_.back().get();
  }
  unsigned char* noise(int64_t count) {
    unsigned char* block = raw(count);
    for (int64_t i = 0; i < count; ++i) block[i] = uint8_t(next());
    return block;
  }
  // Values in [low, high]; one in 16 calls breaks the rule somewhere.
  int32_t* integers(int64_t count, int64_t low, int64_t high) {
    auto* values = reinterpret_cast<int32_t*>(raw(count * 4));
    for (int64_t i = 0; i < count; ++i)
      values[i] = int32_t(low + int64_t(next() % uint64_t(std::max<int64_t>(high - low, 0) + 1)));
    if (count > 0 && next() % 16 == 0) values[next() % uint64_t(count)] = int32_t(next() << 8);
    return values;
  }
  // [batch + 1] from 0 with steps of at most `step`, up to `total`.
  int32_t* offsets(int64_t batch, int64_t step, int64_t total) {
    auto* values = reinterpret_cast<int32_t*>(raw((batch + 1) * 4));
    values[0] = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t room = std::min<int64_t>(step, total - values[b]);
      values[b + 1] = values[b] + int32_t(next() % uint64_t(room + 1));
    }
    if (next() % 16 == 0) values[next() % uint64_t(batch + 1)] = int32_t(next() << 8);
    return values;
  }
  int64_t* positions(int64_t count) {
    auto* values = reinterpret_cast<int64_t*>(raw(count * 8));
    for (int64_t i = 0; i < count; ++i)
      values[i] = next() % 16 ? int64_t(next() % 64) - 16 : int64_t(next()) - (int64_t{1} << 30);
    return values;
  }
  float* floats(int64_t count) { return reinterpret_cast<float*>(noise(count * 4)); }
  uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state_ >> 33);
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  uint64_t state_;
  std::vector<std::unique_ptr<unsigned char, Free>> blocks_;
};

constexpr __int128 kMaxBytes = 1 << 20;

// Bytes that a tensor reaches below and from its base.
struct Reach {
  __int128 below = 0, from = 0;
  __int128 size() const { return below + from; }
};
Reach reach(attn_dtype type, int64_t inner,
            std::initializer_list<std::pair<int64_t, int64_t>> dims) {
  Reach elements{0, inner};
  for (const auto& [size, stride] : dims) {
    if (size == 0) return {};
    const __int128 span = __int128(size - 1) * stride;
    (span < 0 ? elements.below : elements.from) += span < 0 ? -span : span;
  }
  const int64_t block = attn::dtype_block(type), bytes = attn::dtype_bytes(type);
  return {elements.below / block * bytes, elements.from / block * bytes};
}

// The two outer sizes of [n, m, heads, inner].
struct Rows {
  int64_t n, m;
};
Rows rows_of(attn_layout layout, int64_t batch, int64_t seqlen, int64_t total) {
  return layout == ATTN_PACKED ? Rows{1, total} : Rows{batch, seqlen};
}
Rows rows_of(const attn_segment& s, int64_t batch) {
  return s.layout == ATTN_PAGED ? Rows{s.num_pages, s.page_size}
                                : rows_of(s.layout, batch, s.seqlen, s.total);
}
Reach reach(attn_dtype type, Rows rows, int64_t heads, int64_t inner, const attn_strides& stride) {
  return reach(type, inner, {{rows.n, stride.batch}, {rows.m, stride.seq}, {heads, stride.head}});
}
Reach reach_of_bias(const attn::Problem& p, attn_dtype type, const int64_t stride[4]) {
  return reach(type, 1,
               {{p.batch, stride[0]},
                {p.heads_q, stride[1]},
                {p.seqlen_q, stride[2]},
                {p.seqlen_kv, stride[3]}});
}

struct Sizes {
  Reach q, out, bias;
  __int128 lse, kinds = 0, bits = 0, work;
  std::vector<std::pair<Reach, Reach>> kv, scales;
  __int128 largest = 0;
};

// Scales of a row in their array; 1 where there are none.
int64_t scales_of(attn_dtype type, int64_t dim) {
  return std::max<int64_t>(1, attn::scales_of_row(attn::type_info(type), dim));
}

Sizes sizes_of(const attn::Problem& p) {
  Sizes s;
  const Rows q = rows_of(p.q_layout, p.batch, p.seqlen_q, p.total_q);
  s.q = reach(p.q_type, q, p.heads_q, p.head_dim, p.q_stride);
  s.out = reach(p.out_type, q, p.heads_q, p.head_dim_v, p.out_stride);
  s.lse = __int128(q.n) * q.m * p.heads_q * 4;
  s.work = __int128(p.batch) * p.heads_q * std::max<int64_t>(p.seqlen_q, 1) *
           std::max<int64_t>(p.most_keys, 1) * (p.head_dim + p.head_dim_v);
  for (const attn::Segment& segment : p.segment) {
    const Rows kv = rows_of(segment, p.batch);
    s.kv.emplace_back(reach(segment.k_type, kv, p.heads_kv, p.head_dim, segment.k_stride),
                      reach(segment.v_type, kv, p.heads_kv, p.head_dim_v, segment.v_stride));
    const auto scales = [&](attn_dtype type, int64_t dim, const attn_strides& stride) {
      return reach(attn::scale_element(type), kv, p.heads_kv, scales_of(type, dim), stride);
    };
    s.scales.emplace_back(scales(segment.k_type, p.head_dim, segment.k_scale_stride),
                          scales(segment.v_type, p.head_dim_v, segment.v_scale_stride));
    s.largest = std::max({s.largest, __int128(segment.lists) * segment.list_size * 4,
                          s.scales.back().first.size(), s.scales.back().second.size(),
                          s.kv.back().first.size(), s.kv.back().second.size(),
                          __int128(p.batch) * segment.max_pages * 4,
                          __int128(p.batch) * p.heads_kv * (segment.seqlen / 64 + 1) * 4});
  }
  if (p.bias_type != ATTN_DTYPE_NONE) s.bias = reach_of_bias(p, p.bias_type, p.bias_stride);
  if (p.has(ATTN_BLOCK_MASK)) {
    const int64_t bq = p.block_q, bk = p.block_k;
    s.kinds = __int128(p.mask_batch) * p.mask_heads * ((p.seqlen_q + bq - 1) / bq) *
              ((p.seqlen_kv + bk - 1) / bk);
    s.bits = __int128(p.mask_partials) * bq * ((bk + 31) / 32) * 4;
  }
  s.largest = std::max({s.largest, s.q.size(), s.out.size(), s.lse, s.bias.size(), s.kinds * 4,
                        s.bits, __int128(p.batch + 1) * 4, __int128(p.batch) * p.heads_kv * 4,
                        __int128(p.heads_q) * 4});
  return s;
}

// The elements of q, without what lies between them.
std::vector<unsigned char> rows_of_q(const attn::Problem& p, const void* q) {
  std::vector<unsigned char> rows;
  const bool packed = p.q_layout == ATTN_PACKED;
  const size_t bytes = size_t(attn::dtype_bytes(p.q_type, p.head_dim));
  for (int64_t b = 0; b < (packed ? 1 : p.batch); ++b)
    for (int64_t i = 0; i < (packed ? p.total_q : p.seqlen_q); ++i)
      for (int64_t h = 0; h < p.heads_q; ++h) {
        const int64_t at = b * p.q_stride.batch + i * p.q_stride.seq + h * p.q_stride.head;
        const auto* row = static_cast<const unsigned char*>(q) + attn::dtype_bytes(p.q_type, at);
        rows.insert(rows.end(), row, row + bytes);
      }
  return rows;
}

bool too_large(const Sizes& size, attn_plan* plan) {
  return size.largest > kMaxBytes || size.work > 200'000 || attn_plan_workspace(plan) > (64u << 20);
}

unsigned char* tensor(Memory& memory, const Reach& r) {
  return memory.noise(int64_t(r.size())) + int64_t(r.below);
}

// The arrays of a forward run; `segments` is what the result points to.
attn_args make_args(const attn::Problem& p, const Sizes& size, Memory& memory,
                    std::vector<attn_segment_args>& segments) {
  attn_args args{};
  args.struct_size = sizeof args;
  args.q = tensor(memory, size.q);
  args.out = tensor(memory, size.out);
  if (memory.next() % 4) args.lse = reinterpret_cast<float*>(memory.noise(int64_t(size.lse)));
  if (p.q_layout == ATTN_PACKED) args.cu_seqlens_q = memory.offsets(p.batch, p.seqlen_q, p.total_q);
  if (p.q_descale != ATTN_DESCALE_NONE)
    args.q_descale = memory.floats(p.q_descale == ATTN_DESCALE_TENSOR ? 1 : p.batch * p.heads_kv);
  if (p.bias_type != ATTN_DTYPE_NONE) args.bias = tensor(memory, size.bias);
  if (p.has(ATTN_BIAS_SLOPES)) args.bias_slopes = memory.floats(p.heads_q);
  if (p.has(ATTN_ALIBI)) args.alibi_slopes = memory.floats(p.heads_q);
  if (p.has(ATTN_SINKS)) args.sinks = memory.floats(p.heads_q);
  if (p.has(ATTN_OUT_SCALE)) args.out_scale = memory.floats(1);
  if (p.has_kv_begin) args.kv_begin = memory.integers(p.batch, 0, p.seqlen_kv);
  if (p.has_causal_sequences) args.causal_sequences = memory.integers(p.batch, 0, 1);
  if (p.has(ATTN_QUERY_POSITIONS)) args.query_start = memory.positions(p.batch);
  if (p.tree_keys > 0)
    args.tree = reinterpret_cast<uint64_t*>(
        memory.noise((p.q_layout == ATTN_PACKED ? p.total_q : p.batch * p.seqlen_q) * 16));
  if (p.has(ATTN_BLOCK_MASK)) {
    unsigned char* kinds = memory.raw(int64_t(size.kinds));
    for (int64_t i = 0; i < int64_t(size.kinds); ++i)
      kinds[i] = uint8_t(memory.next() % 64 ? memory.next() % 4 : memory.next());
    args.block_kinds = kinds;
    if (p.mask_partials > 0) {
      args.block_index = memory.integers(int64_t(size.kinds), -1, p.mask_partials - 1);
      args.block_bits = reinterpret_cast<uint32_t*>(memory.noise(int64_t(size.bits)));
    }
  }
  segments.resize(p.segment.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    const attn::Segment& s = p.segment[i];
    attn_segment_args& a = segments[i];
    a.struct_size = sizeof a;
    a.k = tensor(memory, size.kv[i].first);
    if (!s.v_in_k || memory.next() % 64 == 0) a.v = tensor(memory, size.kv[i].second);
    if (s.list_size > 0) a.list = memory.integers(s.lists * s.list_size, -2, s.seqlen);
    if (s.has_key_start) a.key_start = memory.positions(p.batch);
    if (s.has_ready) a.ready = reinterpret_cast<const uint32_t*>(memory.integers(2, 3, 4));
    if (s.has_list_lengths) a.list_lengths = memory.integers(s.lists, 0, s.list_size);
    if (attn::dtype_has_scales(s.k_type)) a.k_scale = tensor(memory, size.scales[i].first);
    if (!s.v_in_k && attn::dtype_has_scales(s.v_type))
      a.v_scale = tensor(memory, size.scales[i].second);
    if (s.has_seqlens) a.seqlens = memory.integers(p.batch, 0, s.seqlen);
    if (s.layout == ATTN_PACKED) a.cu_seqlens = memory.offsets(p.batch, s.seqlen, s.total);
    if (s.layout == ATTN_PAGED && !s.list_of_pool)
      a.block_table = memory.integers(p.batch * s.max_pages, 0, s.num_pages - 1);
    const auto scales = [&](attn_descale_kind kind) -> const float* {
      const int64_t heads = p.batch * p.heads_kv;
      switch (kind) {
        case ATTN_DESCALE_TENSOR:
          return memory.floats(1);
        case ATTN_DESCALE_HEAD:
          return memory.floats(heads);
        case ATTN_DESCALE_BLOCK:
          return memory.floats(heads *
                               ((s.seqlen + s.descale_block_keys - 1) / s.descale_block_keys));
        default:
          return nullptr;
      }
    };
    a.k_descale = scales(s.k_descale);
    if (!s.v_in_k) a.v_descale = scales(s.v_descale);
  }
  args.num_segments = int32_t(segments.size());
  args.segments = segments.data();
  return args;
}

void run(attn_plan* plan, const attn::Problem& p, uint32_t seed) {
  const Sizes size = sizes_of(p);
  if (too_large(size, plan)) return;
  Memory memory(seed);
  std::vector<attn_segment_args> segments;
  attn_args args = make_args(p, size, memory, segments);
  // out somewhere over q: refused, or q is as it was.
  const bool shared = memory.next() % 4 == 0 && size.q.size() > 0;
  if (shared) {
    unsigned char* both = memory.noise(int64_t(size.q.size() + size.out.size()));
    args.q = both + int64_t(size.q.below);
    const auto element = attn::dtype_bytes(p.out_type);
    args.out = both + int64_t(memory.next() % uint64_t(size.q.size() + 1)) / element * element +
               int64_t(size.out.below);
  }
  const size_t workspace_bytes = attn_plan_workspace(plan);
  unsigned char* workspace = memory.raw(int64_t(workspace_bytes), 256);

  const std::vector<unsigned char> q_before =
      shared ? rows_of_q(p, args.q) : std::vector<unsigned char>();
  const attn_status checked = attn_check(plan, &args, nullptr);
  check(checked == ATTN_OK || checked == ATTN_INVALID_ARGUMENT);
  check(attn_workspace_init(plan, workspace, workspace_bytes, nullptr) == ATTN_OK);
  const attn_status ran = attn_run(plan, &args, workspace, workspace_bytes, nullptr);
  check(ran == ATTN_OK || ran == ATTN_INVALID_ARGUMENT);
  // attn_check looks at more than a run does, never at less.
  check(checked != ATTN_OK || ran == ATTN_OK);
  check(!shared || ran != ATTN_OK || rows_of_q(p, args.q) == q_before);
}

attn_context* context_of(bool reference) {
  static attn_context* contexts[2] = {};
  attn_context*& context = contexts[reference];
  if (!context) {
    attn_context_options options{};
    options.struct_size = sizeof options;
    options.cpu_threads = 1;
    check(attn_context_create(reference ? ATTN_BACKEND_REFERENCE : ATTN_BACKEND_CPU, &options,
                              &context) == ATTN_OK);
  }
  return context;
}

void check_refusal(attn_status status) {
  check(status != ATTN_INTERNAL && status != ATTN_OUT_OF_MEMORY);
  const std::string sentence = attn_last_error();
  check(!sentence.empty() && sentence.find('\n') == std::string::npos);
}

// Any problem, which is valid until the next call.
attn_problem* any_problem(Source& in) {
  static Structs structs;
  std::fill_n(structs.problem.begin(), sizeof(attn_problem) + 8, 0);
  auto* p = reinterpret_cast<attn_problem*>(structs.problem.data());
  const bool raw = in.below(8) == 0;
  if (raw) {
    in.bytes(p, sizeof *p);
    if (in.below(8)) p->struct_size = sizeof *p;
  } else {
    *p = make_problem(in);
  }
  attn_segment segments[kSegments];
  for (attn_segment& s : segments) {
    if (raw && in.below(2)) {
      in.bytes(&s, sizeof s);
      s.struct_size = sizeof s;
    } else {
      s = make_segment(in, p->q_type);
      s.has_ready = in.below(12) == 0;
    }
  }
  if (p->flags & ATTN_QUERY_POSITIONS && in.below(2)) {
    if (in.below(8)) p->tree_keys = p->has_kv_begin = 0;
    for (attn_segment& s : segments) {
      add_places(in, &s);
      if (in.below(8)) without_lists(&s);
    }
  }
  for (int64_t n = in.below(4); n > 0; --n) mutate(in, p, sizeof *p);
  for (int64_t n = in.below(4); n > 0; --n)
    mutate(in, reinterpret_cast<char*>(&segments[in.below(3)]) + sizeof(size_t),
           sizeof(attn_segment) - sizeof(size_t));
  // What the caller answers for: a count that fits the array, addresses that are some.
  if (p->num_segments > kSegments) p->num_segments = p->num_segments % kSegments;
  size_t step = sizeof(attn_segment);
  if (in.below(8) == 0) step = in.take<uint16_t>();
  const size_t used = kSegments * std::max(step, sizeof(attn_segment));
  std::fill_n(structs.segments.begin(),
              std::min(used + sizeof(attn_segment), structs.segments.size()), 0);
  for (int i = 0; i < kSegments; ++i) {
    unsigned char* at = structs.segments.data() + size_t(i) * step;
    segments[i].struct_size = step;
    std::memcpy(at, &segments[i], std::max(std::min(step, sizeof(attn_segment)), sizeof(size_t)));
  }
  p->segments =
      in.below(64) == 63 ? nullptr : reinterpret_cast<const attn_segment*>(structs.segments.data());
  p->kernel = kKernels[in.below(4) ? 0 : in.below(std::size(kKernels))];
  return p;
}

void forward(Source& in, attn_context* context) {
  attn_problem* p = any_problem(in);
  size_t needed = 0;
  char text[64];
  const attn_status explained = attn_explain(context, p, text, sizeof text, &needed);
  if (explained != ATTN_OK) check_refusal(explained);
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create(context, p, &plan);
  if (status != ATTN_OK) {
    check(!plan);
    check_refusal(status);
    return;
  }
  check(explained == ATTN_OK && std::strlen(attn_plan_kernel(plan)) > 0);
  attn::Problem resolved;
  check(attn::make_problem(p, &resolved).ok());
  run(plan, resolved, in.take<uint32_t>());
  attn_plan_destroy(plan);
}

// ---- gradients ----

void run_backward(attn_plan* plan, const attn::BackwardProblem& p, uint32_t seed) {
  const attn::Problem& f = p.of;
  Sizes size = sizes_of(f);
  const Rows q = rows_of(f.q_layout, f.batch, f.seqlen_q, f.total_q), kv = rows_of(p.kv(), f.batch);
  const Reach d_out = reach(p.d_out_type, q, f.heads_q, f.head_dim_v, p.d_out_stride),
              dq = reach(p.dq_type, q, f.heads_q, f.head_dim, p.dq_stride),
              dk = reach(p.dk_type, kv, f.heads_kv, f.head_dim, p.dk_stride),
              dv = reach(p.dv_type, kv, f.heads_kv, f.head_dim_v, p.dv_stride),
              d_bias = p.wants(ATTN_GRAD_BIAS) ? reach_of_bias(f, p.d_bias_type, p.d_bias_stride)
                                               : Reach{};
  size.largest =
      std::max({size.largest, d_out.size(), dq.size(), dk.size(), dv.size(), d_bias.size()});
  if (too_large(size, plan)) return;
  Memory memory(seed);
  std::vector<attn_segment_args> segments;
  const attn_args forward = make_args(f, size, memory, segments);
  attn_backward_args args{};
  args.struct_size = sizeof args;
  args.forward = &forward;
  args.d_out = tensor(memory, d_out);
  if (memory.next() % 2) args.d_lse = reinterpret_cast<float*>(memory.noise(int64_t(size.lse)));
  if (p.wants(ATTN_GRAD_Q)) args.dq = tensor(memory, dq);
  if (p.wants(ATTN_GRAD_K)) args.dk = tensor(memory, dk);
  if (p.wants(ATTN_GRAD_V)) args.dv = tensor(memory, dv);
  if (p.wants(ATTN_GRAD_SINKS)) args.d_sinks = memory.floats(f.heads_q);
  if (p.wants(ATTN_GRAD_BIAS)) args.d_bias = tensor(memory, d_bias);
  const size_t workspace_bytes = attn_plan_workspace(plan);
  unsigned char* workspace = memory.raw(int64_t(workspace_bytes), 256);
  const std::vector<unsigned char> q_before = rows_of_q(f, forward.q);
  check(attn_workspace_init(plan, workspace, workspace_bytes, nullptr) == ATTN_OK);
  const attn_status ran = attn_run_backward(plan, &args, workspace, workspace_bytes, nullptr);
  check(ran == ATTN_OK || ran == ATTN_INVALID_ARGUMENT);
  check(rows_of_q(f, forward.q) == q_before);
}

void backward(Source& in, attn_context* context) {
  attn_problem* forward = any_problem(in);
  // Mostly what has gradients.
  if (in.below(8)) {
    forward->num_segments = 1;
    forward->q_type = attn_dtype(1 + in.below(3));
    forward->out_type = ATTN_DTYPE_NONE;
    forward->tree_keys = 0;
    forward->q_descale = ATTN_DESCALE_NONE;
    if (auto* s = const_cast<attn_segment*>(forward->segments)) {
      s->k_type = s->v_type = forward->q_type;
      s->layout = forward->q_layout;
      s->k_descale = s->v_descale = ATTN_DESCALE_NONE;
      s->shared = 0;
      if (s->layout == ATTN_PACKED) {
        s->total = in.size();
        s->has_seqlens = 0;
      }
    }
  }
  forward->kernel = nullptr;
  attn_backward_problem p{};
  p.struct_size = sizeof p;
  p.forward = in.below(64) ? forward : nullptr;
  p.d_out_type = in.below(2) ? ATTN_DTYPE_NONE : attn_dtype(in.below(6));
  p.gradients = in.below(3) ? 0 : in.below(32);
  if (in.below(4) == 0) p.accumulate = uint32_t(in.below(32));
  for (attn_dtype* type : {&p.dq_type, &p.dk_type, &p.dv_type, &p.d_bias_type})
    if (in.below(4) == 0) *type = attn_dtype(in.below(5));
  for (attn_strides* stride : {&p.d_out_stride, &p.dq_stride, &p.dk_stride, &p.dv_stride})
    if (in.below(8) == 0) *stride = make_strides(in);
  if (in.below(6) == 0)
    for (int64_t& stride : p.d_bias_stride) stride = in.size();
  constexpr size_t first = offsetof(attn_backward_problem, d_out_type),
                   last = offsetof(attn_backward_problem, kernel);
  for (int64_t n = in.below(3); n > 0; --n)
    mutate(in, reinterpret_cast<char*>(&p) + first, last - first);
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create_backward(context, &p, &plan);
  if (status != ATTN_OK) return check_refusal(status);
  attn::BackwardProblem resolved;
  check(attn::make_backward_problem(&p, &resolved).ok());
  run_backward(plan, resolved, in.take<uint32_t>());
  attn_plan_destroy(plan);
}

// ---- kv_append ----

attn_kv_append_problem make_append(Source& in) {
  attn_kv_append_problem p{};
  p.struct_size = sizeof p;
  p.batch = in.below(4);
  p.heads_kv = 1 + in.below(3);
  p.head_dim = in.below(4) ? 1 + in.below(20) : 32 * (1 + in.below(9));
  p.head_dim_v = in.below(3) ? 0 : in.size();
  p.seqlen_new = in.below(8);
  p.new_layout = attn_layout(in.below(2));
  if (p.new_layout == ATTN_PACKED && p.batch > 0) p.total_new = in.size();
  p.new_type = attn_dtype(1 + in.below(3));
  if (in.below(6) == 0) p.k_new_stride = make_strides(in);
  if (in.below(6) == 0) p.v_new_stride = make_strides(in);
  p.segment = make_segment(in, p.new_type);
  if (in.below(16)) without_lists(&p.segment);
  if (in.below(16)) {
    if (p.segment.layout == ATTN_PACKED) {
      p.segment.layout = ATTN_PADDED;
      p.segment.total = 0;
    }
    p.segment.has_seqlens = 1;
  }
  p.advance_seqlens = int32_t(in.below(2));
  if (in.below(2)) {
    p.rotary_dim = in.below(8) ? in.below(p.head_dim / 2 + 1) * 2 : in.size();
    p.rotary_interleaved = int32_t(in.below(2));
    p.rotary_positions = int64_t(uint64_t(attn::segment_capacity(p.segment)) + in.below(3));
    p.heads_q = in.below(4);
    if (in.below(6) == 0) p.q_stride = make_strides(in);
    if (in.below(6) == 0) p.q_out_stride = make_strides(in);
  }
  return p;
}

void run_append(attn_plan* plan, const attn::KvAppendProblem& p, uint32_t seed) {
  const bool packed = p.new_layout == ATTN_PACKED, paged = p.segment.layout == ATTN_PAGED;
  const Rows rows = rows_of(p.new_layout, p.batch, p.seqlen_new, p.total_new);
  const attn_segment& s = p.segment;
  const auto fresh = [&](int64_t heads, int64_t dim, const attn_strides& stride) {
    return reach(p.new_type, rows, heads, dim, stride);
  };
  const auto kept = [&](attn_dtype type, int64_t dim, const attn_strides& stride) {
    return reach(type, rows_of(s, p.batch), p.heads_kv, dim, stride);
  };
  const Reach k_new = fresh(p.heads_kv, p.head_dim, p.k_new_stride),
              v_new = fresh(p.heads_kv, p.head_dim_v, p.v_new_stride),
              q = p.heads_q ? fresh(p.heads_q, p.head_dim, p.q_stride) : Reach{},
              q_out = p.heads_q ? fresh(p.heads_q, p.head_dim, p.q_out_stride) : Reach{},
              k = kept(s.k_type, p.head_dim, s.k_stride),
              v = kept(s.v_type, p.head_dim_v, s.v_stride);
  const __int128 table = __int128(p.rotary_positions) * (p.rotary_dim / 2) * 4;
  const __int128 work =
      __int128(rows.n) * rows.m * (p.heads_kv + p.heads_q) * (p.head_dim + p.head_dim_v);
  const __int128 largest = std::max({k_new.size(), v_new.size(), q.size(), q_out.size(), k.size(),
                                     v.size(), table, __int128(p.batch) * s.max_pages * 4,
                                     __int128(p.batch) * p.heads_kv * (s.seqlen / 64 + 1) * 4});
  if (largest > kMaxBytes || work > 200'000) return;
  Memory memory(seed);
  attn_kv_append_args args{};
  args.struct_size = sizeof args;
  args.k_new = tensor(memory, k_new);
  if (!s.v_in_k) args.v_new = tensor(memory, v_new);
  if (packed) args.cu_seqlens_new = memory.offsets(p.batch, p.seqlen_new, p.total_new);
  attn_segment_args& a = args.cache;
  a.struct_size = sizeof a;
  a.k = tensor(memory, k);
  if (!s.v_in_k) a.v = tensor(memory, v);
  int32_t* lengths = memory.integers(p.batch, 0, s.seqlen);
  a.seqlens = lengths;
  if (paged) a.block_table = memory.integers(p.batch * s.max_pages, 0, s.num_pages - 1);
  const auto scales = [&](attn_descale_kind kind) -> const float* {
    const int64_t heads = p.batch * p.heads_kv;
    if (kind == ATTN_DESCALE_NONE) return nullptr;
    if (kind == ATTN_DESCALE_TENSOR) return memory.floats(1);
    return memory.floats(
        kind == ATTN_DESCALE_HEAD ? heads : heads * attn::ceil_div(s.seqlen, s.descale_block_keys));
  };
  a.k_descale = scales(s.k_descale);
  if (!s.v_in_k) a.v_descale = scales(s.v_descale);
  if (p.rotary_dim > 0) {
    args.rotary_cos = memory.floats(int64_t(table) / 4);
    args.rotary_sin = memory.floats(int64_t(table) / 4);
  }
  if (p.heads_q > 0) {
    args.q = tensor(memory, q);
    const bool fits = q_out.below <= q.below && q_out.from <= q.from;
    args.q_out = fits && memory.next() % 2 ? const_cast<void*>(args.q) : tensor(memory, q_out);
  }
  if (p.advance_seqlens)
    args.seqlens_out = memory.next() % 2 ? lengths : memory.integers(p.batch, 0, 0);
  const attn_status ran = attn_run_kv_append(plan, &args, nullptr);
  check(ran == ATTN_OK || ran == ATTN_INVALID_ARGUMENT);
  if (ran != ATTN_OK || !p.advance_seqlens) return;
  for (int64_t b = 0; b < p.batch; ++b)
    check(args.seqlens_out[b] >= 0 && args.seqlens_out[b] <= s.seqlen);
}

void append(Source& in, attn_context* context) {
  attn_kv_append_problem p = make_append(in);
  for (int64_t n = in.below(4); n > 0; --n)
    mutate(in, reinterpret_cast<char*>(&p) + sizeof(size_t), sizeof p - sizeof(size_t));
  p.kernel = nullptr;
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create_kv_append(context, &p, &plan);
  if (status != ATTN_OK) return check_refusal(status);
  attn::KvAppendProblem resolved;
  check(attn::make_kv_append_problem(&p, &resolved).ok());
  run_append(plan, resolved, in.take<uint32_t>());
  attn_plan_destroy(plan);
}

// ---- kv_roll ----

struct RollInput {
  attn_kv_roll_problem problem{};
  attn_segment recent{}, old{};
};
void make_roll(Source& in, RollInput* r) {
  attn_kv_roll_problem& p = r->problem;
  p.struct_size = sizeof p;
  p.batch = in.below(4);
  p.heads_kv = 1 + in.below(3);
  p.head_dim = in.below(4) ? 1 + in.below(20) : 32 * (1 + in.below(3));
  p.head_dim_v = in.below(3) ? 0 : in.size();
  p.keep = in.below(4) ? in.below(12) : in.size();
  const auto type = attn_dtype(1 + in.below(3));
  r->recent = make_segment(in, type);
  r->old = make_segment(in, type);
  if (in.below(16)) {
    attn_segment& s = r->recent;
    s.k_type = s.v_type = type;
    s.layout = ATTN_PAGED;
    s.total = s.seqlen = 0;
    s.num_pages = in.size();
    s.page_size = int32_t(in.size());
    s.max_pages = int32_t(in.size());
    s.has_seqlens = 1;
    s.k_descale = s.v_descale = ATTN_DESCALE_NONE;
    s.descale_block_keys = 0;
    s.k_scale_stride = {};
    without_lists(&s);
    s.v_in_k = r->old.v_in_k;
  }
  if (in.below(16)) {
    attn_segment& s = r->old;
    without_lists(&s);
    if (r->old.layout == ATTN_PACKED) {
      r->old.layout = ATTN_PADDED;
      r->old.total = 0;
    }
    r->old.has_seqlens = 1;
  }
}

void run_roll(attn_plan* plan, const attn::KvRollProblem& p, uint32_t seed) {
  const attn_segment &from = p.from, &to = p.to;
  const bool paged = to.layout == ATTN_PAGED;
  const auto pages = [&](int64_t dim, const attn_strides& stride) {
    return reach(from.k_type, rows_of(from, p.batch), p.heads_kv, dim, stride);
  };
  const auto kept = [&](attn_dtype type, int64_t dim, const attn_strides& stride) {
    return reach(type, rows_of(to, p.batch), p.heads_kv, dim, stride);
  };
  const Reach k_recent = pages(p.head_dim, from.k_stride),
              v_recent = pages(p.head_dim_v, from.v_stride),
              k = kept(to.k_type, p.head_dim, to.k_stride),
              v = kept(to.v_type, p.head_dim_v, to.v_stride),
              k_scale = kept(attn::scale_element(to.k_type), scales_of(to.k_type, p.head_dim),
                             to.k_scale_stride),
              v_scale = kept(attn::scale_element(to.v_type), scales_of(to.v_type, p.head_dim_v),
                             to.v_scale_stride);
  const __int128 work =
      __int128(p.batch) * p.most_moved_keys() * p.heads_kv * (p.head_dim + p.head_dim_v);
  const __int128 largest = std::max(
      {k_recent.size(), v_recent.size(), k.size(), v.size(), k_scale.size(), v_scale.size(),
       __int128(p.batch) * from.max_pages * 4, __int128(p.batch) * to.max_pages * 4,
       __int128(p.batch) * p.heads_kv * (to.seqlen / 64 + 1) * 4});
  if (largest > kMaxBytes || work > 200'000) return;
  Memory memory(seed);
  attn_segment_args recent{}, old{};
  recent.struct_size = old.struct_size = sizeof recent;
  recent.k = tensor(memory, k_recent);
  if (!from.v_in_k) recent.v = tensor(memory, v_recent);
  recent.seqlens = memory.integers(p.batch, 0, from.seqlen);
  recent.block_table = memory.integers(p.batch * from.max_pages, 0, from.num_pages - 1);
  old.k = tensor(memory, k);
  if (!to.v_in_k) old.v = tensor(memory, v);
  if (attn::dtype_has_scales(to.k_type)) old.k_scale = tensor(memory, k_scale);
  if (!to.v_in_k && attn::dtype_has_scales(to.v_type)) old.v_scale = tensor(memory, v_scale);
  old.seqlens = memory.integers(p.batch, 0, to.seqlen);
  if (paged) old.block_table = memory.integers(p.batch * to.max_pages, 0, to.num_pages - 1);
  const auto descales = [&](attn_descale_kind kind) -> const float* {
    const int64_t heads = p.batch * p.heads_kv;
    if (kind == ATTN_DESCALE_NONE) return nullptr;
    if (kind == ATTN_DESCALE_TENSOR) return memory.floats(1);
    return memory.floats(kind == ATTN_DESCALE_HEAD
                             ? heads
                             : heads * attn::ceil_div(to.seqlen, to.descale_block_keys));
  };
  old.k_descale = descales(to.k_descale);
  if (!to.v_in_k) old.v_descale = descales(to.v_descale);
  attn_kv_roll_args args{};
  args.struct_size = sizeof args;
  args.recent = &recent;
  args.old = &old;
  const attn_status ran = attn_run_kv_roll(plan, &args, nullptr);
  check(ran == ATTN_OK || ran == ATTN_INVALID_ARGUMENT);
  if (ran != ATTN_OK) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    check(recent.seqlens[b] >= 0 && recent.seqlens[b] <= from.seqlen);
    check(old.seqlens[b] >= 0 && old.seqlens[b] <= to.seqlen);
  }
}

void roll(Source& in, attn_context* context) {
  RollInput r;
  make_roll(in, &r);
  constexpr size_t behind_size = sizeof(size_t);
  for (int64_t n = in.below(4); n > 0; --n) {
    if (in.below(2))
      mutate(in, reinterpret_cast<char*>(&r.problem) + behind_size, sizeof r.problem - behind_size);
    else
      mutate(in, reinterpret_cast<char*>(in.below(2) ? &r.recent : &r.old) + behind_size,
             sizeof r.recent - behind_size);
  }
  r.problem.recent = in.below(64) ? &r.recent : nullptr;
  r.problem.old = in.below(64) ? &r.old : nullptr;
  r.problem.kernel = nullptr;
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create_kv_roll(context, &r.problem, &plan);
  if (status != ATTN_OK) return check_refusal(status);
  attn::KvRollProblem resolved;
  check(attn::make_kv_roll_problem(&r.problem, &resolved).ok());
  run_roll(plan, resolved, in.take<uint32_t>());
  attn_plan_destroy(plan);
}

template <class Problem, class Create>
void other(Source& in, attn_context* context, Create create) {
  std::vector<unsigned char> room(kStruct);
  auto* p = reinterpret_cast<Problem*>(room.data());
  if (in.below(3)) {
    auto* field = reinterpret_cast<int32_t*>(room.data());
    for (size_t i = 0; i < sizeof(Problem) / 4; ++i)
      field[i] = in.below(3) ? int32_t(in.size()) : 0;
  } else {
    in.bytes(p, sizeof *p);
  }
  if (in.below(8)) p->struct_size = sizeof *p;
  p->kernel = kKernels[in.below(std::size(kKernels))];
  attn_plan* plan = nullptr;
  const attn_status status = create(context, p, &plan);
  if (status != ATTN_OK) return check_refusal(status);
  attn_plan_destroy(plan);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Source in(data, size);
  const int64_t what = in.below(16);
  attn_context* context = context_of(what & 1);
  switch (what / 2) {
    case 0:
      other<attn_merge_problem>(in, context, attn_plan_create_merge);
      break;
    case 1:
      other<attn_quantize_problem>(in, context, attn_plan_create_quantize);
      break;
    case 2:
      if (in.below(4))
        append(in, context);
      else
        other<attn_kv_append_problem>(in, context, attn_plan_create_kv_append);
      break;
    case 3:
      roll(in, context);
      break;
    case 4:
      backward(in, context);
      break;
    default:
      forward(in, context);
      break;
  }
  return 0;
}
