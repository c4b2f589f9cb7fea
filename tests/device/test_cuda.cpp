// What only a CUDA device can show: captured runs, contents of device arrays that break every rule,
// contexts and streams of the application, offsets beyond 2^31 elements.
#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "api/handles.h"
#include "catch.h"
#include "conformance/head_dims.h"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

// "" or why the outputs are not the reference's.
std::string check_outputs(const Case& c, const Data& data, const Kernel& kernel,
                          const Outputs& got) {
  if (!got.error.empty()) return got.error;
  return compare(c, data, kernel, got, reference_answer(c, data));
}

// Little work, so that it ends soon under compute-sanitizer too.
TEST_CASE("cuda: every forward kernel on few problems") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  for (const Kernel* kernel : kernels) DYNAMIC_SECTION(kernel->name) {
      if (kernel->limits.kv_types == type_bit(ATTN_MLA_656)) continue;  // test_mla.cpp has these
      const std::vector<const Kernel*> only = {kernel};
      int ran = 0;
      const auto check = [&](Case c) {
        if (kernel->limits.demands & ATTN_BLOCK_MASK) {
          if (!c.lengths_q.empty()) return;  // packed q takes no block mask
          c.flags |= ATTN_BLOCK_MASK;
          c.block_q = 64;
          c.block_k = 128;
        }
        c.flags &= kernel->limits.flags;
        if (!(c.flags & ATTN_WINDOW)) c.window_left = c.window_right = 0;
        c.name += std::string("-") + kernel->name;
        ran += check_case(c, only);
      };
      Case full = case_for(*kernel, "few-full", 1, 140, 150);
      full.head_dim_v = kernel->limits.head_dim_v.max;
      check(full);

      Case packed = full;
      packed.name = "few-packed";
      packed.batch = 2;
      const auto lower = [](int64_t dim, const Sizes& sizes, int64_t steps) {
        return std::max(sizes.multiple, dim - steps * sizes.multiple);
      };
      packed.head_dim = lower(full.head_dim, kernel->limits.head_dim, 3);
      packed.head_dim_v = lower(full.head_dim_v, kernel->limits.head_dim_v, 1);
      packed.lengths_q = {int32_t(std::min<int64_t>(3, packed.seqlen_q)), int32_t(packed.seqlen_q)};
      packed.flags = ATTN_CAUSAL | ATTN_SINKS | ATTN_SPLIT_INVARIANT;
      packed.segments[0].layout = ATTN_PACKED;
      packed.segments[0].lengths = {150, 1};
      check(packed);

      Case cut = full;
      cut.name = "few-segments";
      cut.batch = 2;
      cut.flags = ATTN_WINDOW | ATTN_ALIBI;
      cut.window_left = 90;
      cut.window_right = 3;
      cut.segments[0].arrange = Arrange::interleaved;
      cut.segments.push_back(full.segments[0]);
      cut.segments[0].lengths = {150, 0};
      cut.segments[1].lengths = {17, 149};
      if (kernel->limits.features & feature_bias) {
        cut.bias_type = ATTN_F32;
        cut.softcap = 3;
      }
      check(cut);

      Case few = full;
      few.name = "few-queries";
      few.batch = 2;
      few.seqlen_q = 2;
      few.flags = ATTN_CAUSAL | ATTN_SINKS;
      if (kernel->limits.features & feature_descale_block)
        (few.v_in_k ? few.segments[0].k_descale : few.segments[0].v_descale) = ATTN_DESCALE_BLOCK;
      few.segments[0].lengths = {150, 77};
      check(few);
      if (kernel->limits.features & feature_paged_kv) {
        few.segments[0].layout = ATTN_PAGED;
        few.segments[0].bad_pages = {1};
        for (const int32_t page_size : {3, 16, 64}) {
          few.name = "few-pages-" + std::to_string(page_size);
          few.segments[0].page_size = page_size;
          check(few);
        }
      }
      if (kernel->limits.features & feature_paged_kv) {
        Case paged = packed;
        paged.segments.push_back(full.segments[0]);
        paged.segments[0].layout = ATTN_PAGED;
        paged.segments[0].bad_pages = {2};
        for (const int32_t page_size : {24, 48}) {
          paged.name = "few-pages-packed-" + std::to_string(page_size);
          paged.segments[0].page_size = page_size;
          check(paged);
        }
      }
      INFO(kernel->name);
      CHECK(ran > 0);
    }
}

// Items of few tiles of keys follow each other in a block, and in a cluster of two; some see no
// key. With max_sms of 2 or 3, kernels whose blocks take one item after the other have at most 3
// blocks, or one cluster of two. An item is a tile of at most 256 queries of a head, or of 192 of a
// pair of heads: 260 queries of 4 heads in 3 batch entries are at least 24 items of heads, for 3
// blocks, and 12 of pairs, for one cluster.
void check_more_items_than_blocks(attn_dtype type) {
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* k) { return k->backend != ATTN_BACKEND_CUDA; });
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  int problems = 0, ran = 0;
  for (const int64_t head_dim : largest_head_dims(type_bit(type))) {
    for (const int32_t keys : {100, 300}) {
      for (const uint64_t mask :
           {uint64_t{0}, uint64_t{ATTN_CAUSAL}, uint64_t{ATTN_CAUSAL_TOP_LEFT}}) {
        Case c;
        c.name = join("items-", type, "-", head_dim, "-", keys, "-", mask);
        c.batch = 3;
        c.heads_q = 4;
        c.heads_kv = 2;
        c.head_dim = c.head_dim_v = head_dim;
        c.seqlen_q = 260;
        c.q_type = type;
        c.out_type = ATTN_F32;
        c.flags = mask;
        c.max_sms = 2 + problems++ % 2;
        SegmentCase s;
        s.k_type = s.v_type = type;
        s.capacity = keys;
        s.lengths = {keys, 0, keys / 2};
        c.segments = {s};
        ran += check_case(c, kernels);
      }
    }
  }
  CHECK(ran > 0);
}

// A case of each type, so that processes share them.
TEST_CASE("cuda: more items than blocks of bf16") {
  check_more_items_than_blocks(ATTN_BF16);
}
TEST_CASE("cuda: more items than blocks of f16") {
  check_more_items_than_blocks(ATTN_F16);
}
TEST_CASE("cuda: more items than blocks of fp8") {
  check_more_items_than_blocks(ATTN_F8_E4M3FN);
}

TEST_CASE("cuda: a captured run replays with other lengths and values") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  const Stream stream;
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    INFO(kernel->name);
    Case first = case_for(*kernel, "capture", 3, 70, 300);
    first.flags = ATTN_CAUSAL;
    first.segments.push_back(first.segments[0]);
    first.segments[1].capacity = 50;
    first.segments[0].lengths = {300, 1, 130};
    first.segments[1].lengths = {50, 49, 0};
    const Data first_data = make_data(first);
    if (declined(*kernel, run_forward(backend_of(ATTN_BACKEND_CUDA), first, first_data,
                                      kernel->name, first.out_type)))
      continue;
    ++ran;
    // A module of its own, captured before it has run: nothing is left to do at the first launch.
    Backend fresh(ATTN_BACKEND_CUDA);
    REQUIRE(fresh.reason == "");
    Forward forward(fresh, first, first_data, kernel->name, first.out_type);
    const Captured captured(stream, [&] { return forward.launch(stream.get()); });
    const std::vector<std::vector<int32_t>> lengths[] = {{{300, 1, 130}, {50, 49, 0}},
                                                         {{0, 0, 0}, {0, 1, 50}},
                                                         {{64, 65, 300}, {50, 50, 50}},
                                                         {{17, 0, 299}, {0, 0, 3}},
                                                         {{300, 300, 300}, {0, 50, 1}}};
    for (size_t n = 0; n < std::size(lengths); ++n) {
      Case now = first;
      now.seed = 100 + n;
      now.segments[0].lengths = lengths[n][0];
      now.segments[1].lengths = lengths[n][1];
      const Data data = make_data(now);
      forward.fill(now, data);
      captured.replay();
      INFO("replay " << n);
      CHECK(check_outputs(now, data, *kernel, forward.read()) == "");
    }
  }
  CHECK(ran > 0);
}

// Rows of blocks of which a third shows nothing, a third two blocks or so, and a third most of
// them.
std::vector<uint8_t> uneven_kinds(uint64_t seed, int64_t rows, int64_t columns) {
  std::vector<uint8_t> kinds;
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t of_eight = std::array{0, 1, 7}[hash(seed, uint64_t(row)) % 3];
    for (int64_t column = 0; column < columns; ++column) {
      const uint64_t h = hash(seed, uint64_t(row), uint64_t(column));
      kinds.push_back(uint8_t(h % 8 < of_eight ? 1 + (h >> 8) % 3 : 0));
    }
  }
  return kinds;
}

// Each run finds the workspace as the one before left it, and another mask: an item that it left
// out would keep the poison.
TEST_CASE("cuda: more items than blocks under uneven block masks") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  const Stream stream;
  struct Shape {
    int64_t heads, seqlen_q, seqlen_kv;
    int32_t max_sms;
    uint64_t flags;
    int replays;
  };
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    if (!(kernel->limits.demands & ATTN_BLOCK_MASK)) continue;
    // Others sort none.
    if (std::string(kernel->name).find("_sm90_") == std::string::npos) continue;
    for (const Shape& shape : {Shape{2, 1000, 400, 1, 0, 3}, Shape{5, 1100, 700, 7, ATTN_CAUSAL, 3},
                               Shape{40, 500, 300, 0, 0, 4}}) {
      Case c = case_for(*kernel, "uneven", 2, shape.seqlen_q, shape.seqlen_kv);
      c.head_dim = c.head_dim_v = 64;
      c.heads_q = shape.heads;
      c.heads_kv = 1;
      c.max_sms = shape.max_sms;
      c.flags = shape.flags | ATTN_BLOCK_MASK;
      c.segments[0].lengths = {int32_t(shape.seqlen_kv), int32_t(shape.seqlen_kv / 3)};
      c.block_q = kernel->limits.head_dim.max == 128 ? 128 : 64;
      c.block_k = kernel->limits.head_dim.max == 64 ? 128 : 64;
      c.mask_per_head = true;
      const int64_t rows = shape.heads * ((shape.seqlen_q + c.block_q - 1) / c.block_q);
      const int64_t columns = (shape.seqlen_kv + c.block_k - 1) / c.block_k;
      const auto set = [&](uint64_t seed) {
        c.seed = seed;
        c.mask_kinds = uneven_kinds(seed, rows, columns);
        return make_data(c);
      };
      const Data first = set(1);
      INFO(kernel->name << " max_sms " << shape.max_sms);
      Forward forward(backend_of(ATTN_BACKEND_CUDA), c, first, kernel->name, c.out_type);
      REQUIRE(forward.launch(nullptr));
      REQUIRE(check_outputs(c, first, *kernel, forward.read()) == "");
      const Captured captured(stream, [&] { return forward.launch(stream.get()); });
      std::vector<unsigned char> bits;
      for (int n = 0; n < shape.replays; ++n) {
        const Data data = set(uint64_t(2 + n / 2));  // each twice
        forward.fill(c, data);
        captured.replay();
        const Outputs got = forward.read();
        INFO("replay " << n);
        if (n % 2 == 0)
          CHECK(check_outputs(c, data, *kernel, got) == "");
        else
          CHECK(got.bits == bits);
        bits = got.bits;
      }
      ++ran;
    }
  }
  CHECK(ran > 0);
}

// ---- contents of device arrays that break the rules --------------------------------------------

constexpr int64_t clamped(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

TEST_CASE("cuda: lengths out of range are clamped") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  const std::vector<int32_t> garbage[] = {{-5, INT_MIN, INT_MAX, 101, 100, 37},
                                          {INT_MAX, -1, 1 << 30, INT_MIN, 0, 66}};
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    Case c = case_for(*kernel, "lengths", 6, 40, 100);
    c.segments.push_back(c.segments[0]);
    c.segments[1].capacity = 65;
    for (int s = 0; s < 2; ++s) {
      for (int32_t n : garbage[s])
        c.segments[s].lengths.push_back(int32_t(clamped(n, 0, c.segments[s].capacity)));
    }
    for (uint32_t flags : {0, int(ATTN_CAUSAL)}) {
      c.flags = flags;
      if (flags != 0 && (kernel->limits.features & feature_paged_kv))
        c.segments[0].layout = ATTN_PAGED;
      const Data data = make_data(c);
      Data broken = data;
      for (int s = 0; s < 2; ++s)
        std::copy_n(garbage[s].data(), 6, broken.segments[s].seqlens.as<int32_t>());
      INFO(kernel->name << " flags " << flags);
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, broken, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      CHECK(check_outputs(c, data, *kernel, got) == "");
      ++ran;
    }
  }
  CHECK(ran > 0);
}

TEST_CASE("cuda: kv_begin out of range is clamped") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  const std::vector<int32_t> garbage = {-5, INT_MIN, INT_MAX, 101, 100, 37};
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    if (!(kernel->limits.features & feature_kv_begin)) continue;
    Case c = case_for(*kernel, "begins", 6, 4, 100);
    c.flags = ATTN_CAUSAL | kernel->limits.demands;
    for (int32_t n : garbage) c.kv_begin.push_back(int32_t(clamped(n, 0, 100)));
    const Data data = make_data(c);
    Data broken = data;
    std::copy_n(garbage.data(), 6, broken.kv_begin.as<int32_t>());
    INFO(kernel->name);
    const Outputs got =
        run_forward(backend_of(kernel->backend), c, broken, kernel->name, c.out_type);
    if (declined(*kernel, got)) continue;
    CHECK(check_outputs(c, data, *kernel, got) == "");
    ++ran;
  }
  CHECK(ran > 0);
}

// [begin, end) of entry b in a buffer of `total` tokens, at most `capacity` of them.
struct Span {
  int64_t begin, end;
};
Span span_of(const std::vector<int32_t>& cu_seqlens, int64_t b, int64_t total, int64_t capacity) {
  const int64_t begin = clamped(cu_seqlens[b], 0, total);
  const int64_t end = clamped(cu_seqlens[b + 1], begin, total);
  return {begin, std::min(end, begin + capacity)};
}

// Packed q and K/V, one problem per kernel and many cu_seqlens.
struct PackedCase {
  static constexpr int64_t batch = 5, heads_q = 4, heads_kv = 2, max_q = 40, total_q = 90,
                           max_kv = 150, total_kv = 200;
  const Kernel& kernel;
  attn_dtype type;
  int64_t dim;
  Buffer q, k, v;

  explicit PackedCase(const Kernel& on)
      : kernel(on),
        type(float_type_of(on)),
        dim(std::min(on.limits.head_dim.max, on.limits.head_dim_v.max)),
        q(random(1, total_q * heads_q * dim)),
        k(random(2, total_kv * heads_kv * dim)),
        v(random(3, total_kv * heads_kv * dim)) {}

  Buffer random(uint64_t seed, int64_t elements) const {
    Buffer to(size_t(dtype_bytes(type, elements)), 0xff);
    for (int64_t n = 0; n < elements; ++n)
      encode_element(type, to.data(), n, normal(hash(seed, uint64_t(n))), false);
    return to;
  }

  attn_problem problem(attn_segment* segment, bool packed, Span queries, Span keys) const {
    *segment = {};
    segment->struct_size = sizeof *segment;
    segment->k_type = segment->v_type = type;
    segment->layout = packed ? ATTN_PACKED : ATTN_PADDED;
    segment->seqlen = packed ? max_kv : keys.end - keys.begin;
    segment->total = packed ? total_kv : 0;
    attn_problem p{};
    p.struct_size = sizeof p;
    p.batch = packed ? batch : 1;
    p.heads_q = heads_q;
    p.heads_kv = heads_kv;
    p.head_dim = dim;
    p.seqlen_q = packed ? max_q : queries.end - queries.begin;
    p.total_q = packed ? total_q : 0;
    p.q_layout = packed ? ATTN_PACKED : ATTN_PADDED;
    p.q_type = type;
    p.out_type = ATTN_F32;
    p.flags = ATTN_CAUSAL;
    p.num_segments = 1;
    p.segments = segment;
    p.kernel = packed ? kernel.name : "reference";
    return p;
  }

  struct Answer {
    Span queries;
    std::vector<float> out, lse;  // [queries, heads_q, dim], [heads_q, queries]
  };
  // What entry b computes, by the reference on the tokens of its spans alone.
  Answer answer(Span queries, Span keys) const {
    const size_t rows = size_t(queries.end - queries.begin);
    Answer a{queries, std::vector<float>(rows * heads_q * dim, 0),
             std::vector<float>(rows * heads_q, -INFINITY)};
    if (rows == 0 || keys.begin == keys.end) return a;
    attn_segment segment;
    const attn_problem p = problem(&segment, false, queries, keys);
    attn_context* context = backend_of(ATTN_BACKEND_REFERENCE).context;
    attn_plan* plan = nullptr;
    REQUIRE(attn_plan_create(context, &p, &plan) == ATTN_OK);
    Arena arena(context);
    const size_t bytes = attn_plan_workspace(plan);
    void* workspace = arena.workspace(bytes);
    attn_segment_args kv{};
    kv.struct_size = sizeof kv;
    kv.k = k.data() + dtype_bytes(type, keys.begin * heads_kv * dim);
    kv.v = v.data() + dtype_bytes(type, keys.begin * heads_kv * dim);
    attn_args args{};
    args.struct_size = sizeof args;
    args.q = q.data() + dtype_bytes(type, queries.begin * heads_q * dim);
    args.out = a.out.data();
    args.lse = a.lse.data();
    args.num_segments = 1;
    args.segments = &kv;
    REQUIRE(attn_workspace_init(plan, workspace, bytes, nullptr) == ATTN_OK);
    REQUIRE(attn_run(plan, &args, workspace, bytes, nullptr) == ATTN_OK);
    attn_plan_destroy(plan);
    return a;
  }

  // Whether a token lies behind one sequence and in front of the next, or outside of all.
  static bool of_nobody(const std::vector<Answer>& answers, int64_t token) {
    bool found = token < answers.front().queries.begin || token >= answers.back().queries.end;
    for (size_t b = 1; b < answers.size(); ++b)
      found |= token >= answers[b - 1].queries.end && token < answers[b].queries.begin;
    return found;
  }

  // "", "declined" or the first row that is wrong. Where spans of q overlap, any of their answers
  // is right; rows between one span and the next are nobody's, which are 0 and -inf.
  std::string run(const std::vector<int32_t>& cu_q, const std::vector<int32_t>& cu_kv) const {
    attn_context* context = backend_of(kernel.backend).context;
    attn_segment segment;
    const attn_problem p = problem(&segment, true, {}, {});
    attn_plan* made = nullptr;
    const attn_status status = attn_plan_create(context, &p, &made);
    if (status == ATTN_UNSUPPORTED) return "declined";
    if (status != ATTN_OK) return attn_last_error();
    const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
    const auto array = [](const std::vector<int32_t>& from) {
      Buffer to(from.size() * 4, 0xff);
      std::copy(from.begin(), from.end(), to.as<int32_t>());
      return to;
    };
    const Buffer cu_q_buffer = array(cu_q), cu_kv_buffer = array(cu_kv);
    const Buffer out(size_t(total_q * heads_q * dim) * 4, 0xff);
    const Buffer lse(size_t(total_q * heads_q) * 4, 0xff);
    Arena arena(context);
    attn_segment_args kv{};
    kv.struct_size = sizeof kv;
    kv.k = arena.add(k);
    kv.v = arena.add(v);
    kv.cu_seqlens = static_cast<int32_t*>(arena.add(cu_kv_buffer));
    attn_args args{};
    args.struct_size = sizeof args;
    args.q = arena.add(q);
    args.out = arena.add(out);
    args.lse = static_cast<float*>(arena.add(lse));
    args.cu_seqlens_q = static_cast<int32_t*>(arena.add(cu_q_buffer));
    args.num_segments = 1;
    args.segments = &kv;
    const size_t bytes = attn_plan_workspace(plan.get());
    void* workspace = arena.workspace(bytes);
    if (attn_workspace_init(plan.get(), workspace, bytes, nullptr) != ATTN_OK ||
        attn_run(plan.get(), &args, workspace, bytes, nullptr) != ATTN_OK ||
        attn_synchronize(context, nullptr) != ATTN_OK)
      return attn_last_error();
    if (std::string error = arena.check_unchanged({args.out, args.lse}); !error.empty())
      return error;
    const Buffer got = arena.fetch(out, args.out), got_lse = arena.fetch(lse, args.lse);
    for (const Buffer* buffer : {&got, &got_lse}) {
      const auto poisoned = [](unsigned char byte) { return byte == 0xff; };
      if (!std::all_of(buffer->bytes.begin(), buffer->bytes.begin() + Buffer::guard, poisoned) ||
          !std::all_of(buffer->bytes.end() - Buffer::guard, buffer->bytes.end(), poisoned))
        return "a guard of out or lse was written";
    }

    std::vector<Answer> answers;
    for (int64_t b = 0; b < batch; ++b)
      answers.push_back(
          answer(span_of(cu_q, b, total_q, max_q), span_of(cu_kv, b, total_kv, max_kv)));
    const double bound = 2 * half_ulp(type, 1) * 5 + 1e-5;  // |v| < 5
    for (int64_t token = 0; token < total_q; ++token) {
      for (int64_t h = 0; h < heads_q; ++h) {
        const float* row = got.as<float>() + (token * heads_q + h) * dim;
        const float row_lse = got_lse.as<float>()[h * total_q + token];
        // Where sequences overlap, or rows of nobody and a sequence, they are written at the same
        // time: each element is one of the answers.
        const bool nobodys = of_nobody(answers, token);
        bool written = nobodys, lse_right = nobodys && row_lse == -INFINITY;
        std::vector<bool> out_right(size_t(dim), false);
        for (int64_t d = 0; d < dim; ++d) out_right[size_t(d)] = nobodys && row[d] == 0;
        for (const Answer& a : answers) {
          if (token < a.queries.begin || token >= a.queries.end) continue;
          written = true;
          const int64_t i = token - a.queries.begin, rows = a.queries.end - a.queries.begin;
          const float want_lse = a.lse[size_t(h * rows + i)];
          if (row_lse == want_lse || std::abs(row_lse - want_lse) < 1e-4) lse_right = true;
          for (int64_t d = 0; d < dim; ++d)
            if (std::abs(row[d] - a.out[size_t((i * heads_q + h) * dim + d)]) < bound)
              out_right[size_t(d)] = true;
        }
        const bool right =
            written && lse_right && std::count(out_right.begin(), out_right.end(), false) == 0;
        if (!right)
          return "token " + std::to_string(token) + " head " + std::to_string(h) +
                 (written ? " is none of the answers" : " is nobody's and no sequence's");
      }
    }
    return "";
  }
};

TEST_CASE("cuda: cu_seqlens that break every rule are clamped") {
  const auto kernels = cuda_forward_kernels();
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> arrays = {
      {{0, 30, 30, 50, 70, 90}, {0, 100, 101, 101, 150, 200}},  // as it should be
      {{0, 30, 30, 50, 70, 90}, {-7, 50, INT_MAX, 20, INT_MIN, 60}},
      {{INT_MIN, -1, INT_MAX, 5, 91, 0}, {0, 100, 101, 101, 150, 200}},
      {{90, 70, 50, 30, 10, 0}, {200, 150, 100, 50, 10, 0}},
      {{INT_MAX, INT_MIN, INT_MAX, INT_MIN, INT_MAX, INT_MIN},
       {INT_MIN, INT_MAX, INT_MIN, INT_MAX, INT_MIN, INT_MAX}},
  };
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const auto draw = [&](int32_t total) {
      std::vector<int32_t> cu;
      for (uint64_t n = 0; n <= PackedCase::batch; ++n) {
        const uint64_t h = hash(seed, uint64_t(total), n);
        const int32_t values[] = {INT_MIN,   -1,      0,
                                  total - 1, total,   total + 1,
                                  INT_MAX,   1 << 30, int32_t(h >> 8) % (total + 1)};
        cu.push_back(values[h % 12 < 8 ? h % 12 : 8]);
      }
      return cu;
    };
    arrays.emplace_back(draw(PackedCase::total_q), draw(PackedCase::total_kv));
  }
  int ran = 0;
  for (const Kernel* kernel : kernels) {
    const PackedCase c(*kernel);
    for (const auto& [cu_q, cu_kv] : arrays) {
      std::string text;
      for (int32_t n : cu_q) text += " " + std::to_string(n);
      text += " |";
      for (int32_t n : cu_kv) text += " " + std::to_string(n);
      INFO(kernel->name << " cu_seqlens q | kv:" << text);
      const std::string result = c.run(cu_q, cu_kv);
      if (result == "declined") break;
      CHECK(result == "");
      ++ran;
    }
  }
  CHECK(ran > 0);
}

// ---- the application's contexts and threads ----------------------------------------------------

TEST_CASE("cuda: the caller's own context") {
  if (!backend_of(ATTN_BACKEND_CUDA).context) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  void* own = nullptr;
  REQUIRE(cuda().ctx_create(&own, 0, 0) == 0);
  {
    Backend backend(ATTN_BACKEND_CUDA);
    REQUIRE(backend.reason == "");
    void *memory = nullptr, *owner = nullptr, *current = nullptr;
    REQUIRE(attn_alloc(backend.context, 1024, &memory) == ATTN_OK);
    CHECK(cuda().pointer_attribute(&owner, pointer_context,
                                   reinterpret_cast<unsigned long long>(memory)) == 0);
    CHECK(owner == own);
    attn_free(backend.context, memory);
    int ran = 0;
    for (const Kernel* kernel : cuda_forward_kernels()) {
      const Case c = case_for(*kernel, "own-context", 2, 70, 130);
      const Data data = make_data(c);
      INFO(kernel->name);
      const Outputs got = run_forward(backend, c, data, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      ++ran;
      CHECK(check_outputs(c, data, *kernel, got) == "");
      // A stream of that context, and a thread that has no context current.
      void* stream = nullptr;
      REQUIRE(cuda().stream_create(&stream, stream_non_blocking) == 0);
      Forward forward(backend, c, data, kernel->name, c.out_type);
      std::thread([&] { forward.launch(stream); }).join();
      CHECK(cuda().stream_synchronize(stream) == 0);
      CHECK(check_outputs(c, data, *kernel, forward.read()) == "");
      cuda().stream_destroy(stream);
    }
    CHECK(ran > 0);
    CHECK(cuda().ctx_get_current(&current) == 0);
    CHECK(current == own);
  }
  CHECK(cuda().ctx_destroy(own) == 0);
}

// Why there are not two devices, or "".
std::string one_device() {
  std::vector<DeviceInfo> devices;
  if (const Status status = list_cuda(nullptr, &devices); !status.ok()) return status.text;
  return devices.size() < 2 ? "one CUDA device; two are needed" : "";
}

// Makes a device's primary context current for the thread while it lives; -1: none.
class Current {
 public:
  explicit Current(int device) : device_(device) {
    REQUIRE(cuda().ctx_get_current(&before_) == 0);
    if (device >= 0) REQUIRE(cuda().primary_retain(&context_, device) == 0);
    REQUIRE(cuda().ctx_set_current(context_) == 0);
  }
  ~Current() {
    cuda().ctx_set_current(before_);
    if (device_ >= 0) cuda().primary_release(device_);
  }
  Current(const Current&) = delete;
  void* context() const { return context_; }
  bool still() const {
    void* now = nullptr;
    return cuda().ctx_get_current(&now) == 0 && now == context_;
  }

 private:
  const int device_;
  void *before_ = nullptr, *context_ = nullptr;
};

TEST_CASE("cuda: a context of either device, whatever device is current") {
  const auto kernels = cuda_forward_kernels();  // before anything is current
  if (kernels.empty()) ATTN_SKIP(backend_of(ATTN_BACKEND_CUDA).reason);
  if (const std::string why = one_device(); !why.empty()) ATTN_SKIP(why);
  for (int device : {0, 1}) {
    void *own = nullptr, *stream = nullptr;
    {
      const Current current(device);
      own = current.context();
      REQUIRE(cuda().primary_retain(&own, device) == 0);  // until the end of the loop
      REQUIRE(cuda().stream_create(&stream, stream_non_blocking) == 0);
    }
    for (int other : {-1, device, 1 - device}) {
      INFO("device " << device << ", current " << other);
      const Current current(other);
      {
        Backend backend(ATTN_BACKEND_CUDA, 0, device);
        REQUIRE(backend.reason == "");
        CHECK(backend.context->context->driver->device().ordinal == device);
        void *memory = nullptr, *owner = nullptr;
        REQUIRE(attn_alloc(backend.context, 1024, &memory) == ATTN_OK);
        CHECK(cuda().pointer_attribute(&owner, pointer_context,
                                       reinterpret_cast<unsigned long long>(memory)) == 0);
        CHECK(owner == own);
        CHECK(attn_free(backend.context, memory) == ATTN_OK);
        int ran = 0;
        for (const Kernel* kernel : kernels) {
          Case c = case_for(*kernel, "two-devices", 2, 70, 130);
          if (kernel->limits.demands & ATTN_BLOCK_MASK) {
            c.flags |= ATTN_BLOCK_MASK;
            c.block_q = 64;
            c.block_k = 128;
          }
          const Data data = make_data(c);
          INFO(kernel->name);
          Forward forward(backend, c, data, kernel->name, c.out_type);
          forward.launch(nullptr);
          const Outputs got = forward.read();
          if (declined(*kernel, got)) continue;
          ++ran;
          CHECK(check_outputs(c, data, *kernel, got) == "");
          forward.fill(c, data);
          CHECK(attn_synchronize(backend.context, nullptr) == ATTN_OK);
          CHECK(forward.launch(stream));
          CHECK(attn_synchronize(backend.context, stream) == ATTN_OK);
          CHECK(check_outputs(c, data, *kernel, forward.read()) == "");
          CHECK(current.still());
        }
        CHECK(ran > 0);

        // A mask that the device builds.
        attn_block_mask_shape shape{};
        shape.struct_size = sizeof shape;
        shape.seqlen_q = shape.seqlen_kv = 128;
        shape.block_q = shape.block_k = 64;
        Arena arena(backend.context);
        auto* dense = static_cast<uint8_t*>(arena.add(Buffer(128 * 128, 1)));
        attn_block_mask* mask = nullptr;
        REQUIRE(attn_block_mask_from_dense(backend.context, &shape, dense, stream, &mask) ==
                ATTN_OK);
        attn_args args{};
        args.struct_size = sizeof args;
        CHECK(attn_synchronize(backend.context, stream) == ATTN_OK);
        REQUIRE(attn_block_mask_apply(mask, nullptr, &args) == ATTN_OK);
        std::vector<uint8_t> kinds(4);
        CHECK(attn_copy_out(backend.context, kinds.data(), args.block_kinds, 4, stream) == ATTN_OK);
        CHECK(kinds == std::vector<uint8_t>(4, ATTN_BLOCK_FULL));
        attn_block_mask_destroy(mask);
      }
      CHECK(current.still());
    }
    {
      const Current current(device);
      cuda().stream_destroy(stream);
    }
    cuda().primary_release(device);
  }
}

// Lengths, cumulative ones and pages that break every rule, and a graph whose runs go on where the
// one before has ended.
struct AppendRuns {
  static constexpr int64_t batch = 4, heads = 2, dim = 32, row = heads * dim, page_size = 4,
                           columns = 3, capacity = 10, pages = batch * columns;
  const std::vector<int32_t> table = {7, 3, 9, 11, INT_MAX, 2, 0, -1, 5, 4, 12, 8};
  std::vector<int32_t> lengths = {0, INT_MAX, -5, 3}, cu_seqlens;  // the latter if packed
  std::vector<float> cache = std::vector<float>(pages * page_size * row, -1);

  // Token n of k_new holds n + 1 everywhere.
  void append(int64_t seqlen_new, int64_t total_new) {
    for (int64_t b = 0; b < batch; ++b) {
      Span span = {b * seqlen_new, (b + 1) * seqlen_new};
      if (!cu_seqlens.empty()) span = span_of(cu_seqlens, b, total_new, seqlen_new);
      int64_t position = clamped(lengths[b], 0, capacity);
      lengths[b] = int32_t(std::min(position + span.end - span.begin, capacity));
      for (int64_t n = span.begin; n < span.end && position < capacity; ++n, ++position) {
        const int64_t page = table[b * columns + position / page_size];
        if (page >= 0 && page < pages)
          std::fill_n(&cache[(page * page_size + position % page_size) * row], row, float(n + 1));
      }
    }
  }
};

TEST_CASE("cuda: captured appends advance lengths and clamp them") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  const Stream stream;
  for (const int64_t seqlen_new : {1, 3})  // one launch, and two
    for (const bool packed : {false, true}) {
      INFO("seqlen_new " << seqlen_new << " packed " << packed);
      AppendRuns want;
      constexpr int64_t row = AppendRuns::row;
      const int64_t tokens = AppendRuns::batch * seqlen_new;
      if (packed) want.cu_seqlens = {0, 1, 1, INT_MAX, 2};
      std::vector<float> x;
      for (int64_t n = 0; n < tokens; ++n) x.insert(x.end(), row, float(n + 1));

      attn_kv_append_problem p{};
      p.struct_size = sizeof p;
      p.batch = AppendRuns::batch;
      p.heads_kv = AppendRuns::heads;
      p.head_dim = AppendRuns::dim;
      p.seqlen_new = seqlen_new;
      p.new_layout = packed ? ATTN_PACKED : ATTN_PADDED;
      p.total_new = packed ? tokens : 0;
      p.new_type = ATTN_F32;
      p.advance_seqlens = 1;
      p.segment.struct_size = sizeof p.segment;
      p.segment.layout = ATTN_PAGED;
      p.segment.k_type = p.segment.v_type = ATTN_F32;
      p.segment.has_seqlens = 1;
      p.segment.seqlen = AppendRuns::capacity;
      p.segment.page_size = AppendRuns::page_size;
      p.segment.max_pages = AppendRuns::columns;
      p.segment.num_pages = AppendRuns::pages;
      attn_plan* made = nullptr;
      REQUIRE(attn_plan_create_kv_append(backend.context, &p, &made) == ATTN_OK);
      const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);

      Arena arena(backend.context);
      const Buffer x_buffer = bytes_of(x), cache = bytes_of(want.cache),
                   lengths = bytes_of(want.lengths), table = bytes_of(want.table),
                   cu_seqlens = bytes_of(want.cu_seqlens);
      attn_kv_append_args args{};
      args.struct_size = sizeof args;
      args.cache.struct_size = sizeof args.cache;
      args.k_new = args.v_new = arena.add(x_buffer);
      void *const k = arena.add(cache), *const v = arena.add(cache);
      args.cache.k = k;
      args.cache.v = v;
      args.seqlens_out = static_cast<int32_t*>(arena.add(lengths));
      args.cache.seqlens = args.seqlens_out;
      args.cache.block_table = static_cast<const int32_t*>(arena.add(table));
      if (packed) args.cu_seqlens_new = static_cast<const int32_t*>(arena.add(cu_seqlens));
      const Captured captured(
          stream, [&] { return attn_run_kv_append(plan.get(), &args, stream.get()) == ATTN_OK; });
      for (int run = 0; run < 5; ++run) {
        INFO("run " << run);
        captured.replay();
        want.append(seqlen_new, tokens);
        CHECK(arena.fetch(lengths, args.seqlens_out).bytes == bytes_of(want.lengths).bytes);
        CHECK(arena.fetch(cache, k).bytes == bytes_of(want.cache).bytes);
        CHECK(arena.fetch(cache, v).bytes == bytes_of(want.cache).bytes);
        CHECK(arena.check_unchanged({k, v, args.seqlens_out}) == "");
      }
    }
}

// A case of one segment through the C API, in memory that the test lays out itself.
class OneSegment {
 public:
  OneSegment(attn_context* context, const Kernel& kernel, const Case& c,
             const attn_strides& q_stride = {}, const attn_strides& kv_stride = {})
      : arena_(context) {
    attn_segment segment{};
    segment.struct_size = sizeof segment;
    segment.k_type = segment.v_type = c.q_type;
    segment.seqlen = c.segments[0].capacity;
    segment.k_stride = segment.v_stride = kv_stride;
    attn_problem p = problem_of(c);
    p.q_stride = p.out_stride = q_stride;
    p.num_segments = 1;
    p.segments = &segment;
    p.kernel = kernel.name;
    const attn_status status = attn_plan_create(context, &p, &plan_);
    declined_ = status == ATTN_UNSUPPORTED;
    if (declined_) return;
    INFO(attn_last_error());
    REQUIRE(status == ATTN_OK);
    bytes_ = attn_plan_workspace(plan_);
    workspace_ = arena_.workspace(bytes_);
    REQUIRE(attn_workspace_init(plan_, workspace_, bytes_, nullptr) == ATTN_OK);
  }
  ~OneSegment() { attn_plan_destroy(plan_); }
  OneSegment(const OneSegment&) = delete;
  OneSegment& operator=(const OneSegment&) = delete;

  bool declined() const { return declined_; }
  attn_status run(const void* q, const void* k, const void* v, void* out, void* stream) const {
    attn_segment_args kv{};
    kv.struct_size = sizeof kv;
    kv.k = k;
    kv.v = v;
    attn_args args{};
    args.struct_size = sizeof args;
    args.q = q;
    args.out = out;
    args.num_segments = 1;
    args.segments = &kv;
    return attn_run(plan_, &args, workspace_, bytes_, stream);
  }

 private:
  Arena arena_;
  attn_plan* plan_ = nullptr;
  bool declined_ = false;
  size_t bytes_ = 0;
  void* workspace_ = nullptr;
};

// ---- order in a stream --------------------------------------------------------------------------

// Each run's q, k and v are what the run before it wrote: one that begins too early meets poison. A
// kernel that takes no equal numbers of heads reads the first half of it as k and v.
TEST_CASE("cuda: a run sees what those before it in the stream wrote") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  constexpr int runs = 6;
  constexpr int64_t batch = 2, seqlen = 1000, heads = 8;
  const Stream stream;
  int ran = 0;
  for (const Kernel* kernel : cuda_forward_kernels()) {
    INFO(kernel->name);
    Case c = case_for(*kernel, "chain", batch, seqlen, seqlen);
    c.seqlen_q = seqlen;
    c.heads_q = heads;
    c.heads_kv = heads / kernel->limits.group.multiple;
    c.head_dim = c.head_dim_v = std::min(c.head_dim, c.head_dim_v);  // out is the next q, k, v
    c.flags = ATTN_CAUSAL;
    const OneSegment forward(backend.context, *kernel, c);
    if (forward.declined()) continue;
    ++ran;
    const size_t elements = size_t(batch * seqlen * heads * c.head_dim);
    std::vector<uint16_t> first(elements), poison(elements, 0xffff);
    for (size_t i = 0; i < elements; ++i)  // of either type between 0.5 and 2
      first[i] = uint16_t(0x3f00 | (hash(7, i) & 0x807f));
    Arena arena(backend.context);
    char* const x = static_cast<char*>(arena.workspace((runs + 1) * 2 * elements));
    const auto tensor = [&](int n) { return x + size_t(n) * 2 * elements; };
    const auto begin = [&] {
      for (int n = 0; n <= runs; ++n)
        REQUIRE(attn_copy_in(backend.context, tensor(n), n == 0 ? first.data() : poison.data(),
                             2 * elements, nullptr) == ATTN_OK);
      REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);
    };
    const auto run = [&](bool waits) {
      for (int n = 0; n < runs; ++n) {
        REQUIRE(forward.run(tensor(n), tensor(n), tensor(n), tensor(n + 1), stream.get()) ==
                ATTN_OK);
        if (waits) REQUIRE(cuda().stream_synchronize(stream.get()) == 0);
      }
      return true;
    };
    const auto answer = [&] {
      REQUIRE(cuda().stream_synchronize(stream.get()) == 0);
      std::vector<uint16_t> last(elements);
      REQUIRE(attn_copy_out(backend.context, last.data(), tensor(runs), 2 * elements, nullptr) ==
              ATTN_OK);
      REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);
      return last;
    };
    begin();
    run(true);
    const std::vector<uint16_t> want = answer();
    CHECK(std::find(want.begin(), want.end(), 0xffff) == want.end());
    begin();
    run(false);
    CHECK(answer() == want);

    const Captured captured(stream, [&] { return run(false); });
    for (int replay = 0; replay < 3; ++replay) {
      begin();
      captured.replay();
      CHECK(answer() == want);
    }
  }
  CHECK(ran > 0);
}

// ---- offsets beyond 2^31 elements --------------------------------------------------------------

TEST_CASE("cuda: tensors with more than 2^31 elements") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  // One block of memory holds all: rows of q, k, v and out lie side by side at distances that end
  // beyond 2^31 elements, along each dimension in turn.
  constexpr int64_t far = (int64_t{1} << 31) + 4096, elements = far + (1 << 20);
  void* memory = nullptr;
  if (attn_alloc(backend.context, size_t(4 * elements), &memory) != ATTN_OK)
    ATTN_SKIP("no room for " + std::to_string(4 * elements) + " bytes: " + attn_last_error());
  char* const base = static_cast<char*>(memory);
  constexpr int64_t room = 1 << 17;  // elements of each tensor's rows within one distance
  int ran = 0;
  for (const Kernel* kernel : cuda_forward_kernels()) {
    for (int dimension = 0; dimension < 3; ++dimension) {
      Case c = case_for(*kernel, "far", 2, 3, 5);
      if (c.v_in_k) continue;  // V has a tensor of its own here
      c.out_type = ATTN_F32;
      c.heads_q = 2;
      c.heads_kv = 2 / kernel->limits.group.multiple;
      c.head_dim = c.head_dim_v = std::min(c.head_dim, c.head_dim_v);  // tensors are of one size
      const int64_t sizes[] = {2, 5, 2};                               // batch, keys, heads
      const int64_t queries = c.seqlen_q;                              // 2 or 3
      const int64_t d = c.head_dim;
      attn_strides stride{16 * d, 2 * d, d};
      (dimension == 0   ? stride.batch
       : dimension == 1 ? stride.seq
                        : stride.head) = far / (sizes[dimension] - 1) / 8 * 8;
      attn_strides q_stride = stride;
      if (dimension == 1) q_stride.seq = far / (queries - 1) / 8 * 8;
      const Data data = make_data(c);
      const auto at = [](const attn_strides& s, int64_t b, int64_t i, int64_t h) {
        return b * s.batch + i * s.seq + h * s.head;
      };
      REQUIRE(
          backend.context->context->driver->fill(memory, 0xff, size_t(4 * elements), nullptr).ok());
      const auto write = [&](int64_t tensor, const attn_strides& s, const View& view,
                             const Buffer& from, int64_t tokens, int64_t heads) {
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t i = 0; i < tokens; ++i) {
            for (int64_t h = 0; h < heads; ++h) {
              REQUIRE(attn_copy_in(backend.context, base + 2 * (tensor * room + at(s, b, i, h)),
                                   from.data() + 2 * view.at(b, i, h), size_t(2 * d),
                                   nullptr) == ATTN_OK);
            }
          }
        }
      };
      write(0, q_stride, data.q_view, data.q, queries, c.heads_q);
      write(1, stride, data.segments[0].k_view, data.segments[0].k, 5, c.heads_kv);
      write(2, stride, data.segments[0].v_view, data.segments[0].v, 5, c.heads_kv);

      INFO(kernel->name << " dimension " << dimension);
      const OneSegment forward(backend.context, *kernel, c, q_stride, stride);
      if (forward.declined()) continue;
      ++ran;
      char* const out = base + 6 * room;
      REQUIRE(forward.run(base, base + 2 * room, base + 4 * room, out, nullptr) == ATTN_OK);
      REQUIRE(attn_synchronize(backend.context, nullptr) == ATTN_OK);

      Outputs got;
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t i = 0; i < queries; ++i) {
          for (int64_t h = 0; h < 2; ++h) {
            std::vector<float> row(static_cast<size_t>(d));
            REQUIRE(attn_copy_out(backend.context, row.data(), out + 4 * at(q_stride, b, i, h),
                                  size_t(4 * d), nullptr) == ATTN_OK);
            got.out.insert(got.out.end(), row.begin(), row.end());
          }
        }
      }
      CHECK(compare(c, data, *kernel, got, reference_answer(c, data)) == "");
    }
  }
  CHECK(ran > 0);
  attn_free(backend.context, memory);
}

}  // namespace
}  // namespace attn::test
