// Steps of a server: packed q of sequences with a prompt or a chunk of one beside many with a token
// or a few, in every forward kernel that takes them. fwd_sm90_*_mixed give the first to one launch
// and the others to another.
#include <algorithm>
#include <string>
#include <vector>

#include "../catch.h"
#include "backend.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

bool is_mixed(const Kernel* kernel) {
  return std::string(kernel->name).ends_with("_mixed");
}

// fwd_sm90_*_mixed are demanded by name, whatever the plan would choose, and one of them takes each
// case.
void check_step(const Case& c) {
  static const std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  static const bool any_mixed = std::any_of(kernels.begin(), kernels.end(), is_mixed);
  std::vector<const Kernel*> taken;
  check_case(c, kernels, &taken);
  if (any_mixed && !taken.empty()) CHECK(std::any_of(taken.begin(), taken.end(), is_mixed));
}

// Sets queries and keys of each sequence: keys that were there before and, mostly, its own tokens.
void set_lengths(Case& c, std::vector<int32_t> queries, Draw& draw, int64_t most_before) {
  c.batch = int64_t(queries.size());
  c.lengths_q = std::move(queries);
  c.seqlen_q = *std::max_element(c.lengths_q.begin(), c.lengths_q.end());
  for (SegmentCase& s : c.segments) {
    const bool last = &s == &c.segments.back();
    s.lengths.clear();
    s.capacity = 1;
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t own = last && !draw.chance(10) ? c.lengths_q[size_t(b)] : 0;
      s.lengths.push_back(int32_t(own + draw(uint64_t(most_before) + 1)));
      s.capacity = std::max<int64_t>(s.capacity, s.lengths.back());
    }
    s.capacity += draw(40);
  }
}

Case random_case(uint64_t seed) {
  Case c;
  c.name = "mixed-" + std::to_string(seed);
  c.thinning = for_devices(seed + 101);
  c.seed = seed;
  Draw draw{seed, 171};
  c.heads_kv = 1 + draw(2);
  const int64_t groups[] = {1, 2, 3, 4, 4, 5, 8, 16};
  const int64_t group = draw.pick(groups), few = 16 / group;  // queries that 16 rows hold
  c.heads_q = c.heads_kv * group;
  constexpr uint32_t types = type_bit(ATTN_F16) | type_bit(ATTN_BF16);
  static const auto dims = head_dims(types, types);
  draw_head_dims(draw, dims, draw.chance(5), &c);
  c.q_type = draw.chance(3) ? ATTN_F16 : ATTN_BF16;
  const attn_dtype out_types[] = {ATTN_F32, c.q_type, ATTN_F16, ATTN_BF16};
  c.out_type = draw.pick(out_types);
  c.q_arrange = draw.chance(4) ? Arrange::padded : Arrange::contiguous;
  c.out_arrange = draw.chance(4) ? Arrange::head_major : Arrange::contiguous;
  const int64_t of_nobody[] = {0, 0, 2, 70};
  c.tokens_of_nobody = draw.pick(of_nobody);
  const int64_t segments = draw.chance(4) ? 2 + draw(2) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    s.k_type = s.v_type = c.q_type;
    s.layout = attn_layout(draw.chance(3) ? draw(3) : draw.chance(3) ? 0 : 2);
    const int32_t page_sizes[] = {16, 64, 48, 128};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PAGED && draw.chance(6)) s.bad_pages = {int32_t(draw(3))};
    if (draw.chance(4)) s.arrange = Arrange::padded;
    c.segments.push_back(s);
  }
  // Some with a chunk, at the border of what a row tile holds or far from it; more than a warp has
  // lanes, which look for them.
  std::vector<int32_t> queries;
  const int64_t sequences = draw.chance(4) ? 33 + draw(40) : 2 + draw(12);
  const int64_t chunks = draw.chance(8) ? 0 : 1 + draw(3);
  for (int64_t b = 0; b < sequences; ++b)
    queries.push_back(int32_t(draw.chance(8)   ? 0
                              : draw.chance(3) ? 1 + draw(uint64_t(few))
                              : draw.chance(4) ? few + draw(2)
                                               : 1));
  for (int64_t n = 0; n < chunks; ++n) {
    const int64_t lengths[] = {few + 1, 64, 65, 128, 129, 192, 193, 260};
    queries[size_t(draw(uint64_t(sequences)))] = int32_t(draw.pick(lengths));
  }
  queries[0] = std::max(queries[0], 1);
  set_lengths(c, queries, draw, sequences > 32 ? 80 : 300);

  if (!draw.chance(5)) c.flags |= draw.chance(8) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(200) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(4)) c.flags |= ATTN_SINKS;
  if (draw.chance(6)) c.flags |= ATTN_ALIBI;
  if (draw.chance(6)) c.softcap = 3;
  if (draw.chance(8)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  if (draw.chance(8)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  if (c.out_arrange == Arrange::contiguous && draw.chance(3)) c.more_tokens = 1 + draw(500);
  return c;
}

const AddRandomFamily added("steps of a server", random_case);

// The same over caches of fp8, which tokens read as they are and chunks converted.
Case fp8_case(uint64_t seed) {
  Case c = random_case(seed);
  c.name = "fp8-" + c.name;
  c.thinning = for_devices(seed + 113);
  Draw draw{seed, 173};
  static const auto dims = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16),
                                     type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2), 16);
  draw_head_dims(draw, dims, draw.chance(5), &c);
  const attn_dtype type = draw.chance(3) ? ATTN_F8_E5M2 : ATTN_F8_E4M3FN;
  for (SegmentCase& s : c.segments) {
    s.k_type = s.v_type = type;
    if (c.q_type == ATTN_F16) continue;  // whose range a product with a descale may leave
    s.k_descale = attn_descale_kind(draw(4));
    s.v_descale = attn_descale_kind(draw(4));
    s.descale_block_keys = draw.chance(2) ? 64 : 128;
  }
  return c;
}

TEST_CASE("decode: steps of a server, random problems") {
  for (uint64_t seed = 1; seed <= 60; ++seed) check_step(random_case(seed));
}
TEST_CASE("decode: steps of a server, fp8 caches") {
  for (uint64_t seed = 1; seed <= 40; ++seed) check_step(fp8_case(seed));
}

// With capacities from which fwd_sm90_*_mixed compute chunks and tokens at the same time. Packed K
// and V take no more memory for them.
TEST_CASE("decode: steps of a server, chunks beside tokens") {
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* k) { return !is_mixed(k); });
  if (kernels.empty()) ATTN_SKIP("no fwd_sm90_*_mixed here");
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Case c = seed <= 40 ? random_case(seed) : fp8_case(seed);
    c.name = "concurrent-" + std::to_string(seed);
    c.flags &= ~uint32_t{ATTN_ALIBI | ATTN_WINDOW};
    c.window_left = c.window_right = 0;
    c.max_sms = 0;
    for (SegmentCase& s : c.segments) {
      s.layout = ATTN_PACKED;
      s.bad_pages.clear();
      s.capacity = 1 << 17;
    }
    std::vector<const Kernel*> taken;
    check_case(c, kernels, &taken);
    CHECK(!taken.empty());
  }
}

// The same lengths through every cache and mask. At group 4 a row tile holds 4 queries.
TEST_CASE("decode: steps of a server, prompts beside tokens") {
  const std::vector<int32_t> steps[] = {{1, 1, 700, 1, 3, 0, 17, 1, 260},
                                        {4, 5, 4, 5, 1, 130, 5, 4},
                                        {0, 0, 5, 0},
                                        {4, 4, 0, 4},
                                        {300, 1}};
  uint64_t number = 0;
  for (const auto& lengths : steps) {
    for (int kind = 0; kind < 8; ++kind) {
      Case c;
      c.name = "step-" + std::to_string(++number);
      c.thinning = for_devices(number + 107);
      c.seed = number;
      Draw draw{number, 172};
      c.heads_kv = 2;
      c.heads_q = 8;
      c.head_dim = c.head_dim_v = number % 3 == 0 ? 128 : 64;
      c.q_type = number % 4 == 0 ? ATTN_F16 : ATTN_BF16;
      c.out_type = c.q_type;
      c.flags = ATTN_CAUSAL;
      SegmentCase s;
      s.k_type = s.v_type = c.q_type;
      if (kind != 0) s.layout = ATTN_PAGED;
      s.page_size = kind % 3 == 0 ? 16 : kind % 3 == 1 ? 64 : 48;
      c.segments.assign(kind == 1 ? 3 : 1, s);
      if (kind == 1) c.segments[1].layout = ATTN_PADDED;
      if (kind == 2) c.flags = 0;
      if (kind == 3) {
        c.flags |= ATTN_WINDOW;
        c.window_left = 100;
      }
      if (kind == 4) c.flags |= ATTN_SINKS;
      if (kind == 5) c.softcap = 3;
      if (kind == 6) c.flags |= ATTN_ALIBI;
      if (kind == 7) c.max_sms = 3;
      set_lengths(c, lengths, draw, 200);
      check_step(c);
    }
  }
}

}  // namespace
}  // namespace attn::test
