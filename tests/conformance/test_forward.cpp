// The body of the forward operation: every kernel of the catalog that runs here, against the
// float64 reference.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

SegmentCase keys(int64_t capacity, attn_dtype type = ATTN_F32) {
  SegmentCase s;
  s.k_type = s.v_type = type;
  s.capacity = capacity;
  return s;
}

Case shape(std::string name, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t dim,
           int64_t sq, int64_t skv, attn_dtype type = ATTN_F32) {
  Case c;
  c.name = std::move(name);
  c.batch = batch;
  c.heads_q = heads_q;
  c.heads_kv = heads_kv;
  c.head_dim = c.head_dim_v = dim;
  c.seqlen_q = sq;
  c.q_type = type;
  c.out_type = dtype_is_fp8(type) ? ATTN_BF16 : type;
  c.segments = {keys(skv, type)};
  return c;
}

std::string name_of(const char* what, std::initializer_list<int64_t> numbers) {
  std::string name = what;
  for (int64_t n : numbers) name.append("-").append(std::to_string(n));
  return name;
}

constexpr attn_dtype float_types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
constexpr attn_dtype q_types[] = {ATTN_F32,       ATTN_F16,     ATTN_BF16,
                                  ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ};
constexpr attn_dtype kv_types[] = {ATTN_F32,     ATTN_F16,         ATTN_BF16, ATTN_F8_E4M3FN,
                                   ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ, ATTN_Q8_0, ATTN_Q4_0};

TEST_CASE("forward: boundary shapes") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t number = 0;
  for (attn_dtype type : float_types) {
    for (int64_t sq : {1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 129}) {
      for (int64_t skv : {1, 31, 64, 65, 127, 128, 131}) {
        for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_CAUSAL_TOP_LEFT)}) {
          if (type != ATTN_F32 && (sq + skv) % 3 != 0) continue;
          Case c = shape(name_of(dtype_name(type), {sq, skv, flags}), 1, 2, 1, 64, sq, skv, type);
          c.thinning.number = number++;
          c.flags = flags;
          check_case(c, kernels);
        }
      }
    }
  }
}

TEST_CASE("forward: head dimensions") {
  const auto kernels = kernels_here(Op::forward, false);
  for (int64_t d : {1, 2, 3, 7, 8, 15, 16, 17, 32, 40, 64, 80, 96, 127, 128, 192, 256, 257, 576}) {
    for (attn_dtype type : {ATTN_F32, ATTN_F16}) {
      check_case(shape(name_of("dim", {type, d}), 2, 2, 2, d, 33, 70, type), kernels);
    }
    for (int64_t dv : {1, 5, 32, 64, 129, 512}) {
      if ((d + dv) % 2) continue;
      Case c = shape(name_of("dims", {d, dv}), 1, 2, 1, d, 9, 40);
      c.head_dim_v = dv;
      check_case(c, kernels);
    }
  }
  // The largest of each kernel, and one that is too large for it.
  for (const HeadDims& dims : head_dims(type_bit(ATTN_F16))) {
    for (const int64_t more : {int64_t{0}, dims.qk.multiple}) {
      const int64_t d = dims.qk.max + more, dv = dims.v.max;
      Case c = shape(name_of("largest", {d, dv}), 1, 2, 1, d, 9, 40, ATTN_F16);
      c.head_dim_v = dv;
      check_case(c, kernels);
    }
  }
}

TEST_CASE("forward: every combination of types") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t number = 5;
  for (attn_dtype q : q_types) {
    for (attn_dtype k : kv_types) {
      for (attn_dtype v : kv_types) {
        if (v != k && hash(1, q, k, v) % 4 != 0) continue;
        Case c = shape(name_of("types", {q, k, v}), 2, 4, 2, 64, 5, 70, q);
        c.thinning.number = number++;
        c.segments[0].k_type = k;
        c.segments[0].v_type = v;
        check_case(c, kernels);
      }
    }
    for (attn_dtype block : host_types) {
      for (auto [k, v] : {std::pair(block, block), {block, ATTN_F16}, {ATTN_Q8_0, block}}) {
        for (int64_t sq : {1, 5}) {
          Case c = shape(name_of("types", {q, k, v, sq}), 2, 4, 2, 64, sq, 70, q);
          c.thinning.number = number++;
          c.segments[0].k_type = k;
          c.segments[0].v_type = v;
          check_case(c, kernels);
        }
      }
    }
    for (attn_dtype out :
         {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ}) {
      Case c = shape(name_of("out", {q, out}), 1, 2, 2, 32, 20, 50, q);
      c.thinning.number = number++;
      c.out_type = out;
      check_case(c, kernels);
      if (!dtype_is_fp8(out)) continue;
      c.flags = ATTN_OUT_SCALE;
      c.name += "-scaled";
      check_case(c, kernels);
      c.values = Values::one_hot;  // v up to 2, times the scale, stays exact
      c.name += "-exact";
      check_case(c, kernels);
    }
  }
}

TEST_CASE("forward: f32 stays below 2e-6 at sigma 1") {
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (!(kernel->limits.in_types & type_bit(ATTN_F32))) continue;
    for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL)}) {
      Case c = shape("f32-sigma-1", 1, 2, 2, 128, 200, 1031);
      c.flags = flags;
      const Data data = make_data(c);
      const Outputs want = reference_answer(c, data);
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
      INFO(kernel->name << " flags " << flags);
      REQUIRE(got.error == "");
      double worst = 0;
      for (size_t n = 0; n < want.out.size(); ++n) {
        worst = std::max(worst, std::abs(got.out[n] - want.out[n]));
      }
      CHECK(worst < 2e-6);
      CHECK(worst > 0);
    }
  }
}

TEST_CASE("forward: f16 and bf16 meet the bounds of the design") {
  for (int mask = 0; mask < 3; ++mask) {
    Case c = shape(name_of("f16-sigma-half", {mask}), 1, 4, 4, 128, 128, 1024, ATTN_F16);
    c.sigma = 0.5;
    if (mask == 1) c.flags = ATTN_CAUSAL;
    if (mask == 2) c.flags = ATTN_WINDOW, c.window_left = 256, c.window_right = 0;
    c.thinning = on_all_kernels;
    const Data data = make_data(c);
    const Outputs want = reference_answer(c, data);
    for (const Kernel* kernel : kernels_here(Op::forward, false)) {
      if (!share(*kernel, c)) continue;
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F16);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " mask " << mask);
      REQUIRE(got.error == "");
      double worst = 0, sum = 0;
      for (size_t n = 0; n < want.out.size(); ++n) {
        worst = std::max(worst, std::abs(got.out[n] - want.out[n]));
        sum += std::abs(got.out[n] - want.out[n]);
      }
      CHECK(worst < 1e-3);
      CHECK(sum / double(want.out.size()) < 1e-5);
    }
  }
}

// Sums of few powers of two over a power of two of keys are exact in float32, and so is a lone key.
TEST_CASE("forward: exact inputs give exact outputs") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    uint64_t number = 0;
    for (attn_dtype type : float_types) {
      for (Values values : {Values::uniform, Values::one_hot}) {
        for (int64_t skv : {1, 2, 64, 128, 512}) {
          Case c = shape(name_of("exact", {int64_t(values), skv}), 2, 4, 2, 64, 70, skv, type);
          c.thinning = many_on_all_kernels(number++);
          c.values = values;
          c.out_type = ATTN_F32;
          c.scale = 1;
          if (values == Values::one_hot && skv > 64) continue;  // D one-hot keys
          // A kernel may divide by multiplying with a rounded reciprocal only where that is exact:
          // the sum of 2^n equal weights is a power of two.
          if (share(*kernel, c)) check_exact(c, *kernel);
        }
      }
    }
  }
}

// With k = 0 and v = unit vectors the output is the mask itself, divided by the row's number of
// ones.
TEST_CASE("forward: the output shows the mask") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (float_type_of(*kernel) == ATTN_DTYPE_NONE) continue;  // see test_fp8.cpp
    uint64_t number = 0;
    for (int64_t sq : {1, 5, 40, 100}) {
      for (int64_t skv : {1, 40, 70}) {
        for (int mask = 0; mask < 8; ++mask) {
          Case c = shape(name_of("mask", {sq, skv, mask}), 2, 2, 1, 16, sq, skv);
          c.thinning = fifth_of_many(number++, 20);
          c.head_dim_v = 80;
          c.values = Values::identity;
          if (mask == 1) c.flags = ATTN_CAUSAL;
          if (mask == 2) c.flags = ATTN_CAUSAL_TOP_LEFT;
          if (mask == 3) c.flags = ATTN_WINDOW, c.window_left = 7, c.window_right = 3;
          if (mask == 4) c.flags = ATTN_WINDOW, c.window_left = -1, c.window_right = 0;
          if (mask == 5)
            c.flags = ATTN_WINDOW | ATTN_CAUSAL, c.window_left = 0, c.window_right = -1;
          if (mask == 6) c.flags = ATTN_BLOCK_MASK, c.block_q = 13, c.block_k = 17;
          if (mask == 7) c.flags = ATTN_BLOCK_MASK | ATTN_CAUSAL, c.mask_per_head = true;
          c = with_type(c, float_type_of(*kernel));
          if (!share(*kernel, c)) continue;
          const Data data = make_data(c);
          const Outputs got =
              run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
          if (declined(*kernel, got)) continue;
          INFO(kernel->name << " " << describe(c));
          REQUIRE(got.error == "");
          size_t row = 0, wrong = 0;
          for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t i = 0; i < sq; ++i) {
              for (int64_t h = 0; h < c.heads_q; ++h, ++row) {
                int64_t seen = 0;
                for (int64_t j = 0; j < skv; ++j) seen += visible(c, data, b, h, i, j);
                for (int64_t j = 0; j < c.head_dim_v; ++j) {
                  const double want = visible(c, data, b, h, i, j) ? 1.0 / double(seen) : 0.0;
                  wrong += !(std::abs(got.out[row * 80 + size_t(j)] - want) < 1e-6);
                }
                const double lse = seen ? std::log(double(seen)) : -INFINITY;
                wrong += !(got.lse[row] == lse || std::abs(got.lse[row] - lse) < 1e-6);
              }
            }
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

// ---- random problems --------------------------------------------------------------------------

template <class T, size_t n>
T pick(uint64_t h, const T (&values)[n]) {
  return values[h % n];
}

// Any combination of features; sizes small enough for a reference answer in milliseconds.
Case random_case(uint64_t seed) {
  Case c;
  c.name = "random-" + std::to_string(seed);
  c.thinning = one_of_many(seed);
  c.seed = seed;
  Draw draw{seed, 99};

  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(3);
  c.heads_q = c.heads_kv * (1 + draw(4));
  static const auto dims = head_dims(~0u);
  draw_head_dims(draw, dims, draw.chance(3), &c);
  const int64_t odd[] = {1, 5, 33};  // for hosts
  if (draw.chance(4)) c.head_dim = pick(draw(1000), odd);
  if (draw.chance(4)) c.head_dim_v = c.head_dim;
  const int64_t queries[] = {1, 1, 2, 7, 16, 17, 40, 64, 65, 100, 130};
  c.seqlen_q = pick(draw(1000), queries);
  c.q_type = pick(draw(1000), q_types);
  c.out_type = dtype_is_fp8(c.q_type) ? ATTN_BF16 : c.q_type;
  if (draw.chance(4)) c.out_type = pick(draw(1000), q_types);
  if (dtype_is_fp8(c.out_type) && draw.chance(2)) c.flags |= ATTN_OUT_SCALE;
  const attn_descale_kind q_kinds[] = {ATTN_DESCALE_NONE, ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD};
  c.q_descale = dtype_is_fp8(c.q_type) ? pick(draw(1000), q_kinds) : ATTN_DESCALE_NONE;
  const Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major,
                              Arrange::odd};
  c.q_arrange = pick(draw(1000), arranges);
  c.out_arrange = pick(draw(1000), arranges);

  const bool packed_q = draw.chance(4);
  if (packed_q) draw_lengths_q(draw, &c);
  const int64_t segments = draw.chance(3) ? 2 + draw(3) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 16, 63, 64, 65, 128, 200, 257};
    s.capacity = pick(draw(1000), capacities) / (segments > 2 ? 2 : 1) + (draw.chance(9) ? 1 : 0);
    s.capacity = std::max<int64_t>(s.capacity, 1);  // 0 is not empty but unset
    s.k_type = pick(draw(1000), kv_types);
    s.v_type = draw.chance(2) ? s.k_type : pick(draw(1000), kv_types);
    if (c.head_dim % 32 != 0 && dtype_is_ggml(s.k_type)) s.k_type = ATTN_F16;
    if (c.head_dim_v % 32 != 0 && dtype_is_ggml(s.v_type)) s.v_type = ATTN_F8_E4M3FN;
    const bool same = s.k_type == s.v_type;
    s.k_type = host_type(s.k_type, c.head_dim, seed, 2 * uint64_t(n));
    s.v_type = same && c.head_dim == c.head_dim_v
                   ? s.k_type
                   : host_type(s.v_type, c.head_dim_v, seed, 2 * uint64_t(n) + 1);
    s.layout = attn_layout(draw(3));
    const int32_t page_sizes[] = {1, 3, 16, 64};
    s.page_size = pick(draw(1000), page_sizes);
    if (s.layout == ATTN_PACKED || draw.chance(2)) draw_lengths(draw, c.batch, &s);
    s.k_descale = attn_descale_kind(draw(4));
    s.v_descale = attn_descale_kind(draw(4));
    s.descale_block_keys = draw.chance(2) ? 64 : 128;
    s.arrange = pick(draw(1000), arranges);
    if (s.k_type == s.v_type && c.head_dim == c.head_dim_v && draw.chance(5))
      s.arrange = Arrange::interleaved;
    if (s.layout == ATTN_PAGED && draw.chance(8)) s.bad_pages = {int32_t(draw(3))};
    c.segments.push_back(s);
  }

  if (draw.chance(3)) c.flags |= draw.chance(3) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(60) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(5)) c.flags |= ATTN_ALIBI;
  if (draw.chance(5)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.softcap = 3;
  if (draw.chance(5)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  if (!packed_q && draw.chance(4)) {
    const bool narrow = c.q_type == ATTN_F16 || c.q_type == ATTN_BF16;
    c.bias_type = narrow && draw.chance(2) ? c.q_type : ATTN_F32;
    c.bias_per_batch = draw.chance(2);
    c.bias_per_head = draw.chance(2);
    c.bias_per_query = !draw.chance(4);
    // Of the seed alone, as host_type.
    Draw of_ggml{seed, 98};
    if (of_ggml.chance(2)) c.flags |= ATTN_BIAS_SLOPES;
    if (of_ggml.chance(3)) c.bias_type = ATTN_F16;
  }
  if (!packed_q && draw.chance(4)) {
    c.flags |= ATTN_BLOCK_MASK;
    const int32_t sizes[] = {64, 128, 64, 16, 33, 1};
    c.block_q = pick(draw(1000), sizes);
    c.block_k = pick(draw(1000), sizes);
    c.mask_per_batch = draw.chance(2);
    c.mask_per_head = draw.chance(2);
  }
  if (draw.chance(8)) c.fixed_split = 32 * (1 + draw(4));
  if (draw.chance(8)) c.flags |= ATTN_SPLIT_INVARIANT;
  const double sigmas[] = {0.5, 1, 1, 3};
  c.sigma = pick(draw(1000), sigmas);
  if (draw.chance(8)) c.values = draw.chance(2) ? Values::uniform : Values::one_hot;
  if (draw.chance(8)) c.tree_keys = 1 + draw(128);
  return c;
}

const AddRandomFamily added("forward", random_case);

TEST_CASE("forward: random problems") {
  constexpr uint64_t first_seed = 1000, count = 400;
  std::cout << "forward: random problems: seeds " << first_seed << " to " << first_seed + count - 1
            << std::endl;
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    check_case(random_case(seed), kernels);
  }
}

// Host kernels cut many keys of few queries into parts.
TEST_CASE("forward: random problems of few queries and many keys") {
  constexpr uint64_t first_seed = 3000, count = 100;
  std::cout << "forward: few queries and many keys: seeds " << first_seed << " to "
            << first_seed + count - 1 << std::endl;
  std::vector<const Kernel*> kernels;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (kernel->host) kernels.push_back(kernel);
  }
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    Case c = random_case(seed);
    c.name = "few-queries-" + std::to_string(seed);
    Draw draw{seed, 98};
    const int64_t queries[] = {1, 1, 2, 4, 16};
    c.seqlen_q = pick(draw(1000), queries);
    for (int32_t& length : c.lengths_q) length = std::min(length, int32_t(c.seqlen_q));
    if (!c.lengths_q.empty()) c.lengths_q[0] = int32_t(c.seqlen_q);
    for (SegmentCase& s : c.segments) {
      const int32_t times = 1 + int32_t(draw(24));
      s.capacity *= times;
      for (int32_t& length : s.lengths) length *= times;
    }
    if (c.window_left > 0 && draw.chance(2)) c.window_left *= 20;
    if (c.fixed_split > 0) c.fixed_split *= 16;
    check_case(c, kernels);
  }
}

// Holds the reference to the contract where the other kernels share code with it.
TEST_CASE("reference: random problems against the formula") {
  for (uint64_t seed = 5000; seed < 5300; ++seed) {
    if (!share(seed)) continue;
    Case c = random_case(seed);
    c.heads_q = c.heads_kv * std::min<int64_t>(c.heads_q / c.heads_kv, 2);
    const Data data = make_data(c);
    const Outputs got = reference_answer(c, data), want = formula(c, data);
    INFO(describe(c));
    REQUIRE(got.error == "");
    REQUIRE(got.out.size() == want.out.size());
    double worst = 0;
    for (size_t n = 0; n < want.out.size(); ++n) {
      const double difference = std::abs(got.out[n] - want.out[n]);
      worst = difference <= worst ? worst : difference;  // NaN stays
    }
    CHECK(worst < 1e-12);
    size_t wrong = 0;
    for (size_t n = 0; n < want.lse.size(); ++n) {
      // The same float, or its neighbour where the last bit of the sum decided.
      wrong += !(got.lse[n] == want.lse[n] ||
                 std::abs(got.lse[n] - want.lse[n]) <= 2.1 * half_ulp(ATTN_F32, want.lse[n]));
    }
    CHECK(wrong == 0);
  }
}

// ---- cuts of KV -------------------------------------------------------------------------------

// The first keys of a case's one segment, cut at random places into `parts` segments of any layout.
Case cut(const Case& whole, int64_t parts, uint64_t seed) {
  Case c = whole;
  const SegmentCase one = whole.segments[0];
  std::vector<int64_t> cuts = {0, one.capacity};
  for (int64_t n = 1; n < parts; ++n)
    cuts.push_back(int64_t(hash(seed, 7, n) % uint64_t(one.capacity + 1)));
  std::sort(cuts.begin(), cuts.end());
  c.segments.clear();
  for (int64_t n = 0; n < parts; ++n) {
    SegmentCase s = one;
    s.layout = attn_layout(hash(seed, 8, n) % 3);
    s.capacity = cuts[n + 1] - cuts[n];
    s.lengths.assign(size_t(c.batch), int32_t(s.capacity));
    c.segments.push_back(s);
  }
  c.name += name_of("-cut", {parts, int64_t(seed)});
  return c;
}

TEST_CASE("forward: a cut of KV into segments changes nothing") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    uint64_t number = 0;
    if ((kernel->limits.features & feature_segments) &&
        (kernel->limits.flags & ATTN_SPLIT_INVARIANT)) {
      for (attn_dtype type : float_types) {
        for (double sigma : {0.5, 1.0, 3.0}) {
          const int64_t keys = sanitized ? 130 : 300;
          Case whole = shape(name_of("whole", {type}), 2, 4, 2, 64, 33, keys, type);
          whole.sigma = sigma;
          whole.out_type = ATTN_F32;
          whole.flags = ATTN_CAUSAL | ATTN_WINDOW | ATTN_ALIBI | ATTN_SINKS | ATTN_SPLIT_INVARIANT;
          whole.flags &= kernel->limits.flags;
          whole.window_left = 250;
          whole.window_right = -1;
          Backend& backend = backend_of(kernel->backend);
          const auto answer = [&](const Case& c) {
            return run_forward(backend, c, make_data(c), kernel->name, ATTN_F32);
          };
          Outputs uncut;
          for (int64_t parts = 1; parts <= 5; ++parts) {
            Case pieces = cut(whole, parts, uint64_t(parts) * 31 + uint64_t(sigma * 10));
            pieces.thinning = fifth_of_many(number++, 12);
            if (!share(*kernel, pieces)) continue;
            if (uncut.out.empty()) uncut = answer(whole);
            if (declined(*kernel, uncut)) break;
            REQUIRE(uncut.error == "");
            for (SegmentCase& s : pieces.segments)
              if (s.layout == ATTN_PAGED && !(kernel->limits.features & feature_paged_kv))
                s.layout = ATTN_PADDED;
            INFO(kernel->name << " " << describe(pieces));
            const Outputs got = answer(pieces);
            REQUIRE(got.error == "");
            const double worst = largest_difference(got, uncut);
            // What differs is the last bit of a score less its reference, which now and then rounds
            // a weight the other way; ALiBi makes single weights large.
            const bool large =
                kernel->backend == ATTN_BACKEND_CUDA && (whole.flags & ATTN_ALIBI) != 0;
            CHECK(worst < (large ? 1e-4 : sigma > 1 ? 2e-5 : 5e-6));
          }
        }
      }
    }
  }
}

TEST_CASE("forward: the same plan gives the same bits") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (float_type_of(*kernel) == ATTN_DTYPE_NONE) continue;  // see test_fp8.cpp
    Case square = shape("repeat", 2, 4, 2, 64, 100, sanitized ? 130 : 500, float_type_of(*kernel));
    Case decode = shape("repeat-decode", 2, 8, 2, 64, 3, 5000, float_type_of(*kernel));
    decode.segments[0].lengths = {4777, 5000};
    for (Case c : {square, decode}) {
      c.flags = ATTN_CAUSAL;
      c.thinning = on_all_kernels;
      if (emulated(*kernel) && c.seqlen_q < 64) continue;
      if (!share(*kernel, c)) continue;
      const Data data = make_data(c);
      Outputs first = run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      if (declined(*kernel, first)) continue;
      INFO(kernel->name << " " << c.name);
      REQUIRE(first.error == "");
      for (int n = 0; n < (sanitized || emulated(*kernel) ? 1 : 3); ++n) {
        const Outputs again =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
        CHECK(again.bits == first.bits);
        CHECK(again.lse == first.lse);
      }
      // Host kernels: whatever the number of threads.
      if (backend_of(kernel->backend).context && kernel->host) {
        for (int threads : {1, 2, 3, 7}) {
          Backend some(kernel->backend, threads);
          CHECK(run_forward(some, c, data, kernel->name, c.out_type).bits == first.bits);
        }
      }
    }
  }
}

TEST_CASE("forward: fixed_split makes bits independent of the batch") {
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (!(kernel->limits.features & feature_fixed_split)) continue;
    for (int64_t sq : {1, 20}) {
      Case one = shape("fixed-split", 1, 4, 1, 64, sq, 700, float_type_of(*kernel));
      one.fixed_split = 128;
      one.thinning = on_all_kernels;
      if (!share(*kernel, one)) continue;
      Case many = one;
      many.batch = 5;
      const Outputs alone =
          run_forward(backend_of(kernel->backend), one, make_data(one), kernel->name, one.out_type);
      if (declined(*kernel, alone)) continue;
      const Outputs among = run_forward(backend_of(kernel->backend), many, make_data(many),
                                        kernel->name, one.out_type);
      INFO(kernel->name << " Sq " << sq);
      REQUIRE(alone.error == "");
      REQUIRE(among.error == "");
      CHECK(std::equal(alone.bits.begin(), alone.bits.end(), among.bits.begin()));
    }
  }
}

TEST_CASE("forward: lse is optional") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (float_type_of(*kernel) == ATTN_DTYPE_NONE) continue;  // see test_fp8.cpp
    Case c = shape("no-lse", 1, 2, 1, 64, 20, 50, float_type_of(*kernel));
    c.thinning = on_all_kernels;
    if (!share(*kernel, c)) continue;
    const Data data = make_data(c);
    const Outputs with =
        run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
    if (declined(*kernel, with)) continue;
    INFO(kernel->name);
    CHECK(with.error == "");
    const Outputs without =
        run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type, false);
    CHECK(without.error == "");
    CHECK(with.bits == without.bits);
  }
}

TEST_CASE("forward: nothing to do") {
  const auto kernels = kernels_here(Op::forward, true);
  for (attn_dtype type : float_types) {
    const std::string tail = std::string("-") + dtype_name(type);
    const auto small_shape = [&](const char* name, int64_t batch, int64_t sq, int64_t skv) {
      Case c = shape(name + tail, batch, 2, 2, 64, sq, skv, type);
      c.thinning = on_all_kernels;
      return c;
    };
    check_case(small_shape("no-queries", 2, 0, 50), kernels);
    Case none = small_shape("no-keys", 2, 9, 0);
    check_case(none, kernels);
    none.flags = ATTN_SINKS;
    none.name = "no-keys-but-sinks" + tail;
    check_case(none, kernels);
    Case empty = small_shape("empty-sequences", 3, 5, 40);
    empty.heads_kv = 1;
    empty.segments[0].lengths = {0, 40, 0};
    check_case(empty, kernels);
  }
}

attn_dtype cache_type_of(const Kernel& kernel, attn_dtype q_type) {
  for (const attn_dtype type : {q_type, ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_Q8_0, ATTN_Q4_0})
    if (kernel.limits.kv_types & type_bit(type)) return type;
  return q_type;
}

// Under sanitizers too, where kernels have few of the random problems: the largest.
TEST_CASE("forward: every kernel at the limits of its head dimensions") {
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (kernel->host) continue;
    if (kernel->limits.kv_types == type_bit(ATTN_MLA_656)) continue;  // test_mla.cpp has these
    const Sizes &qk = kernel->limits.head_dim, &v = kernel->limits.head_dim_v;
    const auto middle = [](const Sizes& of) {
      return (of.max / of.multiple + 1) / 2 * of.multiple;
    };
    attn_dtype type = float_type_of(*kernel);
    if (type == ATTN_DTYPE_NONE) type = ATTN_F8_E4M3FN;
    int ran = 0;
    uint64_t number = 0;
    for (const auto& [d, dv] :
         {std::pair{qk.max, v.max}, {qk.multiple, v.multiple}, {middle(qk), middle(v)}}) {
      Case c = shape(name_of("limits", {d, dv}), 1, 4, 2, d, 3, 70, type);
      c.head_dim_v = dv;
      c.out_type = ATTN_F32;
      c.flags = kernel->limits.demands;
      c.v_in_k = kernel->limits.demanded_features & feature_v_in_k;
      c.mask_kinds = {ATTN_BLOCK_FULL, ATTN_BLOCK_PARTIAL};
      attn_dtype kv_type = kv_type_of(*kernel, type);
      if (!(kernel->limits.kv_types & type_bit(kv_type))) kv_type = cache_type_of(*kernel, type);
      c.segments[0].k_type = c.segments[0].v_type = kv_type;
      if (kernel->limits.demanded_features & feature_paged_kv) c.segments[0].layout = ATTN_PAGED;
      c.thinning = {.sanitized = 3, .emulated = Thinning::all, .number = number++};
      c = with_heads_for(*kernel, c);
      if (!share(*kernel, c)) continue;
      const Data data = make_data(c);
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      CHECK(compare(c, data, *kernel, got, reference_answer(c, data)) == "");
      ++ran;
    }
    INFO(kernel->name);
    CHECK(ran > 0);
  }
}

// Longer than what kernels for AMD count, find or look up at once: 64 tiles of keys, 64 sequences,
// 64 keys of a page table; with what is done on the way to a tile. share() leaves them out of
// most problems of that length.
TEST_CASE("forward: every emulated kernel beyond 64 tiles and 64 sequences") {
  std::map<std::string, Outputs> answers;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    if (!emulated(*kernel) || kernel->limits.demands & ATTN_BLOCK_MASK) continue;
    const attn_dtype type = float_type_of(*kernel);
    const attn_dtype kv_type = cache_type_of(*kernel, type);
    const bool few_queries = kernel->limits.seqlen_q.max < 256;
    const auto takes = [&](uint32_t features) { return kernel->limits.features & features; };
    Case whole = shape("whole", 1, 1, 1, 64, few_queries ? 3 : 40, 64 * 66 + 5, type);
    whole.out_type = ATTN_F32;
    whole.segments[0].k_type = whole.segments[0].v_type = kv_type;
    std::vector<Case> cases = {whole};
    const auto add = [&](const char* name) -> Case& {
      cases.push_back(whole);
      cases.back().name = name;
      return cases.back();
    };
    add("causal").flags = ATTN_CAUSAL | ATTN_SINKS;
    Case& window = add("window");
    window.flags = ATTN_CAUSAL | ATTN_WINDOW;
    window.window_left = 64 * 65;
    if (takes(feature_softcap)) {
      Case& terms = add("terms");
      terms.flags = ATTN_CAUSAL | ATTN_ALIBI;
      terms.softcap = 3;
    }
    if (takes(feature_bias)) add("bias").bias_type = type;
    if (takes(feature_paged_kv)) {
      Case& paged = add("paged");
      paged.segments[0].layout = ATTN_PAGED;
      paged.segments[0].bad_pages = {0, 77, 263};
    }
    if (takes(feature_segments)) {
      Case& segments = add("segments");
      segments.segments.assign(4, segments.segments[0]);
      segments.segments[1].capacity = 1;
      for (SegmentCase& s : segments.segments)
        if (takes(feature_descale_block)) s.k_descale = s.v_descale = ATTN_DESCALE_BLOCK;
      segments.flags = ATTN_CAUSAL;
    }
    Case& many = add("sequences");
    many.batch = 70;
    many.segments[0].capacity = 130;
    for (int64_t b = 0; b < many.batch; ++b)
      many.segments[0].lengths.push_back(int32_t(b * 37 % 131));
    many.flags = ATTN_CAUSAL;
    if (!few_queries) many.seqlen_q = 5;
    uint64_t number = cases.size() * (hash_of_names({kernel->name}) % 100);
    for (Case& c : cases) {  // under a sanitizer one of them
      c.thinning = many_on_all_kernels(number++);
      c.thinning.sanitized = cases.size();
      if (!share(*kernel, c)) continue;
      const Data data = make_data(c);
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      Outputs& want = answers[describe(c)];
      if (want.out.empty()) want = reference_answer(c, data);
      CHECK(compare(c, data, *kernel, got, want) == "");
    }
  }
}

}  // namespace
}  // namespace attn::test
