// Segments that the batch shares (attn_segment.shared): against the float64 reference, which is
// itself compared with a problem in which each sequence has a copy of the shared keys.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../catch.h"
#include "backend.h"
#include "formula.h"
#include "random_families.h"

namespace attn::test {
namespace {

bool composed(const Kernel& kernel) {
  return kernel.composed == Composed::prefix;
}

// The catalog's and the composed ones.
std::vector<const Kernel*> kernels_with_composed() {
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  for (const Kernel& kernel : all_kernels())
    if (composed(kernel) && (!stand_in() || kernel.backend == ATTN_BACKEND_CUDA) &&
        backend_of(kernel.backend).context)
      kernels.push_back(&kernel);
  return kernels;
}

// Without those that are slow and have random problems.
std::vector<const Kernel*> composed_and_fast() {
  std::vector<const Kernel*> kernels = kernels_with_composed();
  std::erase_if(kernels, [](const Kernel* k) { return emulated(*k) && !composed(*k); });
  return kernels;
}

Case with_copies(Case c) {
  for (SegmentCase& s : c.segments)
    if (s.keys == Keys::shared) s.keys = Keys::copied;
  return c;
}

constexpr Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major};

SegmentCase shared_segment(attn_dtype type, int64_t capacity) {
  SegmentCase s;
  s.k_type = s.v_type = type;
  s.capacity = capacity;
  s.keys = Keys::shared;
  return s;
}

// Whatever a problem with shared segments may ask for.
Case random_case(uint64_t seed) {
  Case c;
  c.name = "prefix-" + std::to_string(seed);
  c.thinning = {.sanitized = 3, .emulated = Thinning::fifth, .number = seed};
  c.seed = seed;
  Draw draw{seed, 977};
  c.batch = 2 + draw(4);
  c.heads_kv = 1 + draw(3);
  const int64_t groups[] = {1, 2, 3, 4, 8};
  c.heads_q = c.heads_kv * draw.pick(groups);
  c.seqlen_q = draw.chance(3) ? 2 + draw(3) : 1;
  const attn_dtype types[] = {ATTN_BF16, ATTN_BF16, ATTN_F16, ATTN_F32};
  c.q_type = draw.pick(types);
  c.out_type = draw.chance(3) ? ATTN_F32 : c.q_type;
  const int64_t dims[] = {64, 64, 128};
  c.head_dim = c.head_dim_v = draw.pick(dims);
  if (draw.chance(6)) c.head_dim_v = 32;
  if (draw.chance(5)) draw_lengths_q(draw, &c);
  const attn_dtype quantised[] = {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_Q8_0, ATTN_Q4_0, ATTN_I8};
  const attn_dtype type = draw.chance(2) ? c.q_type : draw.pick(quantised);
  const int64_t shared = draw.chance(4) ? 2 : 1, own = draw.chance(4) ? 2 : draw.chance(12) ? 0 : 1;
  for (int64_t n = 0; n < shared + own; ++n) {
    const int64_t capacities[] = {16, 63, 64, 65, 200, 257};
    SegmentCase s = shared_segment(type, draw.pick(capacities));
    if (draw.chance(3)) s.k_type = s.v_type = c.q_type;
    s.layout = draw.chance(3) ? ATTN_PAGED : ATTN_PADDED;
    const int32_t page_sizes[] = {1, 7, 16, 64};
    s.page_size = draw.pick(page_sizes);
    if (n < shared) {
      if (draw.chance(3))
        s.lengths.assign(size_t(c.batch), int32_t(draw(uint64_t(s.capacity) + 1)));
    } else {
      s.keys = Keys::own;
      s.layout = attn_layout(draw(3));
      if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    }
    if (dtype_is_fp8(s.k_type) && draw.chance(2)) {
      s.k_descale = attn_descale_kind(draw(4));
      s.v_descale = attn_descale_kind(draw(4));
    }
    s.arrange = draw.pick(arranges);
    if (s.layout == ATTN_PAGED && draw.chance(6)) s.bad_pages = {int32_t(draw(3))};
    c.segments.push_back(s);
  }
  if (draw.chance(2)) c.flags |= ATTN_CAUSAL;
  if (draw.chance(5)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(200) - 1;
    c.window_right = draw(4) - 1;
  }
  if (draw.chance(6)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(4)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(8) && c.lengths_q.empty() && c.capacity() > 0) c.flags |= ATTN_BLOCK_MASK;
  if (draw.chance(8) && c.lengths_q.empty()) c.bias_type = ATTN_F32;
  if (draw.chance(5)) c.softcap = 3;
  if (draw.chance(5)) c.scale = 0.25f;
  if (draw.chance(8)) c.tree_keys = 1 + draw(128);
  if (draw.chance(8)) c.fixed_split = 64;
  return c;
}

bool has_quantised_keys(const Case& c) {
  return std::any_of(c.segments.begin(), c.segments.end(), [](const auto& s) {
    return dtype_is_ggml(s.k_type) || dtype_has_scales(s.k_type);
  });
}

const AddRandomOperation added("prefix", [](uint64_t seed) {
  Case c = random_case(seed);
  c.thinning = on_all_kernels;
  auto kernels = kernels_with_composed();
  std::erase_if(kernels, [&](const Kernel* kernel) {
    return !emulated(*kernel) || (composed(*kernel) && has_quantised_keys(c));
  });
  return check_case(c, kernels);
});

TEST_CASE("prefix: a shared segment is a copy for each sequence, in the reference") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Case shared = random_case(seed), copied = with_copies(shared);
    INFO(describe(shared));
    const Data data = make_data(shared), of_copies = make_data(copied);
    const Outputs got = reference_answer(shared, data), want = reference_answer(copied, of_copies);
    REQUIRE(got.error == "");
    REQUIRE(want.error == "");
    CHECK(got.bits == want.bits);
    CHECK(std::equal(got.lse.begin(), got.lse.end(), want.lse.begin(), want.lse.end()));
    if (!sanitized && !shared.has(ATTN_BLOCK_MASK))
      CHECK(largest_difference(got, formula(copied, of_copies)) < 1e-5);
  }
}

// Both ways: prefix_* by name, and the kernels that read the shared keys for each sequence.
TEST_CASE("prefix: random problems") {
  std::vector<const Kernel*> taken;
  const auto kernels = kernels_with_composed();
  // How the parts of a composed kernel round quantised keys is not in its row.
  auto but_composed = kernels;
  std::erase_if(but_composed,
                [](const Kernel* k) { return composed(*k) && k->backend != ATTN_BACKEND_CPU; });
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    const Case c = random_case(seed);
    check_case(c, has_quantised_keys(c) ? but_composed : kernels, &taken);
  }
  const auto count = [&](auto&& which) { return std::count_if(taken.begin(), taken.end(), which); };
  for (const Kernel* kernel : kernels) {
    if (!composed(*kernel) || sanitized || std::getenv("ATTN_CASE")) continue;
    INFO(kernel->name);
    CHECK(std::count(taken.begin(), taken.end(), kernel) > (emulated(*kernel) ? 0 : 3));
    CHECK(count([&](const Kernel* other) {
            return !composed(*other) && other->backend == kernel->backend;
          }) > (emulated(*kernel) ? 5 : 15));
  }
}

// A step of a server: each sequence has some keys of its own, or none, after the prefix.
Case decode_case(attn_dtype type, int64_t group, int64_t prefix) {
  Case c;
  c.name = std::string("prefix-decode-") + dtype_name(type) + "-" + std::to_string(group) + "-" +
           std::to_string(prefix);
  c.thinning = on_all_kernels;
  c.seed = uint64_t(prefix + 1000 * group);
  c.batch = 5;
  c.heads_kv = 2;
  c.heads_q = 2 * group;
  c.q_type = type;
  c.out_type = type;
  c.flags = ATTN_CAUSAL;
  SegmentCase own = shared_segment(type, 70);
  own.keys = Keys::own;
  own.lengths = {70, 1, 0, 64, 33};
  c.segments = {shared_segment(type, prefix), own};
  return c;
}

TEST_CASE("prefix: lengths, groups of heads, sinks, pages") {
  const auto kernels = composed_and_fast();
  std::vector<const Kernel*> taken;
  for (const int64_t group : {1, 4, 8}) {
    for (const int64_t prefix : {0, 1, 63, 129}) {
      Case c = decode_case(group == 8 ? ATTN_F16 : ATTN_BF16, group, prefix);
      if (group == 8) c.heads_kv = 1, c.heads_q = 8;  // one K/V head
      if (prefix == 63) c.flags |= ATTN_SINKS;
      if (prefix == 129) c.segments[0].layout = ATTN_PAGED, c.segments[0].lengths.assign(5, 101);
      check_case(c, kernels, &taken);
    }
  }
  for (const Kernel* kernel : kernels)
    if (composed(*kernel) && !std::getenv("ATTN_CASE"))
      CHECK(std::count(taken.begin(), taken.end(), kernel) == 12);
}

// Prefixes so long that the shared keys are cut: parts end within segments and pages, and beyond
// the last key.
TEST_CASE("prefix: shared keys in several parts") {
  auto kernels = composed_and_fast();
  std::erase_if(kernels, [](const Kernel* k) { return emulated(*k); });
  std::vector<const Kernel*> taken;
  const char* const forward = "fwd_sm90_bf16_d128";
  const uint64_t before = attn_launch_count(forward);
  for (const bool paged : {false, true}) {
    for (const bool shorter : {false, true}) {
      Case c = decode_case(ATTN_BF16, 4, 2100);
      c.name += std::string(paged ? "-pages" : "") + (shorter ? "-shorter" : "");
      c.flags |= ATTN_SINKS;
      c.head_dim = c.head_dim_v = 128;
      c.segments.insert(c.segments.begin() + 1, shared_segment(ATTN_BF16, 700));
      if (paged) c.segments[0].layout = ATTN_PAGED, c.segments[0].page_size = 48;
      if (shorter) c.segments[0].lengths.assign(5, 1301);
      check_case(c, kernels, &taken);
    }
  }
  for (const Kernel* kernel : kernels) {
    if (!composed(*kernel) || std::getenv("ATTN_CASE")) continue;
    INFO(kernel->name);
    CHECK(std::count(taken.begin(), taken.end(), kernel) == 4);
  }
  const bool here = std::any_of(kernels.begin(), kernels.end(),
                                [&](const Kernel* k) { return std::string(k->name) == forward; });
  if (here && !stand_in() && !std::getenv("ATTN_CASE")) CHECK(attn_launch_count(forward) > before);
}

// Over quantised keys: as the kernel of the parts is over copies of the prefix. So few rows are not
// converted, also where there are keys for several parts.
TEST_CASE("prefix: quantised keys") {
  const char* const converts = "fwd_sm90_bf16_d128_dequantised";
  const uint64_t before = attn_launch_count(converts);
  for (const Kernel* kernel : kernels_with_composed()) {
    if (!composed(*kernel)) continue;
    for (const attn_dtype type : {ATTN_Q8_0, ATTN_Q4_0, ATTN_F8_E4M3FN}) {
      for (const int64_t keys : {129, 2100}) {
        if (keys > 129 && emulated(*kernel)) continue;
        Case c = decode_case(ATTN_BF16, 2, keys);
        c.name += std::string("-") + dtype_name(type);
        c.head_dim = c.head_dim_v = 128;
        c.out_type = ATTN_F32;
        c.segments[0].k_type = c.segments[0].v_type = type;
        INFO(kernel->name << " " << describe(c));
        const Data data = make_data(c);
        Backend& backend = backend_of(kernel->backend);
        const Outputs got = run_forward(backend, c, data, kernel->name, c.out_type);
        REQUIRE(got.error == "");
        // Some kernels round these values to 16 bits.
        const Outputs want = reference_answer(c, data);
        const double bound = 4 * half_ulp(ATTN_BF16, 1) * std::max(1.0, data.v_max);
        CHECK(largest_difference(got, want) < (kernel->backend == ATTN_BACKEND_CPU ? 1e-5 : bound));
      }
    }
  }
  CHECK(attn_launch_count(converts) == before);
}

// One query head: lse needs no other order. Batches of one share nothing.
TEST_CASE("prefix: one query head, one sequence") {
  const auto kernels = kernels_with_composed();
  Case c = decode_case(ATTN_BF16, 1, 65);
  c.heads_q = c.heads_kv = 1;
  c.name = "prefix-one-head";
  check_case(c, kernels);
  c.batch = 1;
  c.segments[1].lengths = {40};
  c.name = "prefix-one-sequence";
  std::vector<const Kernel*> taken;
  check_case(c, kernels, &taken);
  CHECK(std::none_of(taken.begin(), taken.end(), [](const Kernel* k) { return composed(*k); }));
}

// The first queries of a sequence with fewer keys of its own than queries do not see all of the
// prefix, so prefix_* want to know of keys enough.
TEST_CASE("prefix: several queries under a causal mask") {
  const auto kernels = composed_and_fast();
  for (const bool known : {false, true}) {
    Case c = decode_case(ATTN_BF16, 2, 65);
    c.name = known ? "prefix-queries-known" : "prefix-queries";
    c.seqlen_q = 4;
    c.segments[1].lengths = known ? std::vector<int32_t>{} : std::vector<int32_t>{70, 1, 0, 64, 33};
    std::vector<const Kernel*> taken;
    check_case(c, kernels, &taken);
    for (const Kernel* kernel : kernels)
      if (composed(*kernel) && !std::getenv("ATTN_CASE"))
        CHECK(std::count(taken.begin(), taken.end(), kernel) == known);
  }
}

// Its queries see the first keys of the prefix alone: prefix_* decline.
TEST_CASE("prefix: causal_top_left") {
  Case c = decode_case(ATTN_BF16, 1, 65);
  c.name = "prefix-top-left";
  c.heads_q = c.heads_kv = 1;
  c.seqlen_q = 3;
  c.flags = ATTN_CAUSAL_TOP_LEFT;
  std::vector<const Kernel*> taken;
  CHECK(check_case(c, kernels_with_composed(), &taken) > 0);
  CHECK(std::none_of(taken.begin(), taken.end(), [](const Kernel* k) { return composed(*k); }));
}

// What the comparison is worth: sums in which each sequence counts the prefix once for every
// sequence are not taken for right.
TEST_CASE("prefix: shared keys that are counted for each sequence are noticed") {
  const Case c = decode_case(ATTN_BF16, 4, 129);
  const Data data = make_data(c);
  const Outputs whole = reference_answer(c, data);
  REQUIRE(whole.error == "");
  // Own keys alone, with the data that they have after the prefix.
  Case only = c;
  only.flags |= ATTN_BLOCK_MASK;  // hides the prefix
  only.block_q = 1;
  only.block_k = 129;
  only.mask_kinds = {ATTN_BLOCK_EMPTY, ATTN_BLOCK_FULL};
  const Data of_own = make_data(only);
  const Outputs part = reference_answer(only, of_own);
  REQUIRE(part.error == "");
  Outputs wrong = whole;
  for (size_t row = 0; row < whole.lse.size(); ++row) {
    const double all = std::exp(whole.lse[row]), rest = std::exp(part.lse[row]),
                 times = double(c.batch), sum = times * (all - rest) + rest;
    wrong.lse[row] = std::log(sum);
    for (int64_t d = 0; d < c.head_dim_v; ++d) {
      const size_t n = row * size_t(c.head_dim_v) + size_t(d);
      wrong.out[n] = (times * (whole.out[n] * all - part.out[n] * rest) + part.out[n] * rest) / sum;
    }
  }
  for (const Kernel& kernel : all_kernels()) {
    if (!composed(kernel)) continue;
    INFO(kernel.name);
    CHECK(compare(c, data, kernel, whole, whole) == "");
    CHECK(compare(c, data, kernel, wrong, whole) != "");
    Outputs only_lse = whole;
    only_lse.lse = wrong.lse;
    CHECK(compare(c, data, kernel, only_lse, whole) != "");
  }
}

// attn_explain names the kernels of the parts, and a run launches each of them.
TEST_CASE("prefix: a run launches the parts that attn_explain names") {
  for (const Kernel* kernel : kernels_with_composed()) {
    if (!composed(*kernel)) continue;
    INFO(kernel->name);
    const Case c = decode_case(ATTN_BF16, 4, 129);
    const Data data = make_data(c);
    Backend& backend = backend_of(kernel->backend);
    std::vector<attn_segment> segments(2);
    for (attn_segment& s : segments) {
      s.struct_size = sizeof s;
      s.k_type = s.v_type = ATTN_BF16;
    }
    segments[0].seqlen = 129;
    segments[0].shared = 1;
    segments[1].seqlen = 70;
    segments[1].has_seqlens = 1;
    attn_problem p = problem_of(c);
    p.segments = segments.data();
    p.num_segments = 2;
    p.out_type = ATTN_BF16;
    p.kernel = kernel->name;
    size_t size = 0;
    REQUIRE(attn_explain(backend.context, &p, nullptr, 0, &size) == ATTN_OK);
    std::string text(size, 0);
    REQUIRE(attn_explain(backend.context, &p, text.data(), text.size(), nullptr) == ATTN_OK);
    const auto told = nlohmann::json::parse(text.c_str());
    REQUIRE(told["kernel"] == kernel->name);
    // Merges take the lse of the shared segments as it is, but for those of HIP.
    REQUIRE(told["parts"].size() == (kernel->backend == ATTN_BACKEND_HIP ? 4 : 3));
    std::vector<std::string> names;
    for (const auto& part : told["parts"]) names.push_back(part["kernel"]);
    std::vector<uint64_t> before;
    for (const std::string& name : names) before.push_back(attn_launch_count(name.c_str()));
    const Outputs got = run_forward(backend, c, data, kernel->name, c.out_type);
    CHECK(got.error == "");
    for (size_t n = 0; n < names.size(); ++n) {
      INFO(names[n]);
      const auto times = uint64_t(std::count(names.begin(), names.end(), names[n]));
      CHECK(attn_launch_count(names[n].c_str()) == before[n] + times);
    }
    CHECK(names[2] == names.back());  // merge_*
  }
}

}  // namespace
}  // namespace attn::test
