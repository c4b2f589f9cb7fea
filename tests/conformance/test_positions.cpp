// Queries and keys at positions of their own, in every forward kernel that takes them: what a rank
// computes whose keys are part of longer sequences. Keys that no query sees are NaN here.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

// Queries at any place among, before or after the keys.
void draw_positions(Draw& draw, Case* c) {
  c->flags |= ATTN_QUERY_POSITIONS;
  const bool places = !draw.chance(5);
  const int64_t far = draw.chance(6) && !c->has(ATTN_ALIBI) ? (int64_t{1} << 30) - 40000 : 0,
                side = draw.chance(2) ? 1 : -1;
  for (SegmentCase& s : c->segments) {
    if (!places) continue;
    const int64_t interleaves[] = {1, 1, 3, 16, 64, 5000};
    if (!draw.chance(3)) s.key_ranks = 2 + draw(4);
    s.key_interleave = draw.pick(interleaves);
    s.key_rank = draw(uint64_t(s.key_ranks));
    for (int64_t b = 0; b < c->batch; ++b) s.key_start.push_back(side * far + draw(90) - 30);
  }
  for (int64_t b = 0; b < c->batch; ++b) {
    int64_t first = c->keys(b) > 0 ? c->key_position(b, 0) : 0, last = first;
    for (int64_t j = 1; j < c->keys(b); ++j) {
      first = std::min(first, c->key_position(b, j));
      last = std::max(last, c->key_position(b, j));
    }
    // Mostly around the keys, sometimes before the first one or after the last.
    int64_t at = first - 20 + draw(uint64_t(last - first) + 60) - c->seqlen_q / 2;
    if (draw.chance(8)) at = draw.chance(2) ? last + 500 : first - 500;
    c->query_start.push_back(at);
  }
}

Case random_case(uint64_t seed) {
  Case c;
  c.name = "positions-" + std::to_string(seed);
  c.thinning = for_devices(seed + 17);
  c.seed = seed;
  Draw draw{seed, 191};
  c.batch = 1 + draw(4);
  c.heads_kv = 1 + draw(2);
  const int64_t groups[] = {1, 1, 2, 4, 8};
  const int64_t group = draw.pick(groups);
  c.heads_q = c.heads_kv * group;
  // Up to 16 rows, which all decode kernels take, or up to 64 or more.
  const int64_t rows[] = {1, 8, 16, 64, 300};
  c.seqlen_q = 1 + draw(uint64_t(std::max<int64_t>(1, draw.pick(rows) / group)));
  const attn_dtype q_types[] = {ATTN_BF16, ATTN_BF16, ATTN_F16};
  c.q_type = draw.pick(q_types);
  static const auto dims = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16));
  draw_head_dims(draw, dims, false, &c);
  c.out_type = draw.chance(2) ? ATTN_F32 : c.q_type;
  if (draw.chance(3)) draw_lengths_q(draw, &c);
  const attn_dtype kv_type = draw.chance(4) ? ATTN_F8_E4M3FN : c.q_type;
  const int64_t segments = draw.chance(6) ? 2 : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 5, 64, 70, 130, 200, 333, 1200};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = kv_type;
    s.layout = attn_layout(draw(3));
    const int32_t page_sizes[] = {1, 3, 16, 32, 64, 128};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    if (dtype_is_fp8(kv_type)) s.k_descale = s.v_descale = attn_descale_kind(draw(4));
    c.segments.push_back(s);
  }
  if (!draw.chance(4)) c.flags |= ATTN_CAUSAL;
  if (draw.chance(2)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(300) - 1;
    c.window_right = draw(40) - 1;
  }
  if (draw.chance(5)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(6)) c.softcap = 3;
  if (draw.chance(6)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(8)) c.fixed_split = 64;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  draw_positions(draw, &c);
  return c;
}

// Of one segment, which kernels compute without others' help.
const AddRandomFamily family{"positions", [](uint64_t seed) {
                               Case c = random_case(seed);
                               c.segments.resize(1);
                               return c;
                             }};

TEST_CASE("positions: random problems") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 300; ++seed) check_case(random_case(seed), kernels);
}

// How the keys of a sequence are spread.
struct Spread {
  int64_t ranks, interleave;
};

// A whole sequence on a kernel.
Case whole_case(const Kernel& kernel, int64_t queries, attn_layout layout) {
  Case c = small_case(kernel, "shards", layout, 200);
  c.batch = 3;
  c.seqlen_q = queries;
  c.segments[0].lengths = {200, 131, 64};
  return c;
}

// What one rank has of it, with positions. Lengths are those of this rank's keys.
Case shard_of(const Case& whole, const Spread& of, int64_t rank) {
  Case c = whole;
  c.flags |= ATTN_QUERY_POSITIONS;
  SegmentCase& s = c.segments[0];
  s.key_ranks = of.ranks;
  s.key_interleave = of.interleave;
  s.key_rank = rank;
  s.key_start.assign(size_t(c.batch), 0);
  s.lengths.clear();
  for (int64_t b = 0; b < c.batch; ++b) {
    c.query_start.push_back(whole.keys(b) - whole.queries(b));
    int32_t own = 0;
    for (int64_t j = 0; j < whole.keys(b); ++j) own += j / of.interleave % of.ranks == rank;
    s.lengths.push_back(own);
  }
  return c;
}

// Float32 results of ranks, merged by attn_merge on the reference.
Outputs merged(const Case& c, const std::vector<Outputs>& parts) {
  Outputs all;
  Backend& backend = backend_of(ATTN_BACKEND_REFERENCE);
  const size_t rows = parts[0].lse.size(), dim = size_t(c.head_dim_v);
  std::vector<std::vector<float>> outs, lses;
  std::vector<const void*> out_of;
  std::vector<const float*> lse_of;
  for (const Outputs& part : parts) {
    outs.emplace_back(part.out.begin(), part.out.end());
    lses.emplace_back(part.lse.begin(), part.lse.end());
  }
  for (size_t n = 0; n < parts.size(); ++n) {
    out_of.push_back(outs[n].data());
    lse_of.push_back(lses[n].data());
  }
  attn_merge_problem p{};
  p.struct_size = sizeof p;
  p.batch = int64_t(rows);  // rows in the order of Outputs, each a sequence of its own
  p.heads_q = p.seqlen_q = 1;
  p.head_dim_v = c.head_dim_v;
  p.num_parts = int32_t(parts.size());
  p.part_type = p.out_type = ATTN_F32;
  attn_plan* made = nullptr;
  REQUIRE(attn_plan_create_merge(backend.context, &p, &made) == ATTN_OK);
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
  std::vector<float> out(rows * dim), lse(rows);
  attn_merge_args args{};
  args.struct_size = sizeof args;
  args.num_parts = p.num_parts;
  args.outs = out_of.data();
  args.lses = lse_of.data();
  args.out = out.data();
  args.lse = lse.data();
  REQUIRE(attn_run_merge(plan.get(), &args, nullptr) == ATTN_OK);
  all.out.assign(out.begin(), out.end());
  all.lse.assign(lse.begin(), lse.end());
  return all;
}

// Ranks' results on one kernel, merged, are the whole sequence's. 0: it declines.
int check_shards(const Kernel& kernel, const Case& whole, const Spread& of) {
  std::vector<Outputs> parts;
  for (int64_t rank = 0; rank < of.ranks; ++rank) {
    const Case part = shard_of(whole, of, rank);
    INFO(describe(part));
    const Data data = make_data(part);
    parts.push_back(run_forward(backend_of(kernel.backend), part, data, kernel.name, ATTN_F32));
    if (declined(kernel, parts.back())) return 0;
    REQUIRE(parts.back().error == "");
  }
  const Data data = make_data(whole);
  CHECK(compare(whole, data, kernel, merged(whole, parts), formula(whole, data)) == "");
  return 1;
}

// Queries over more keys than a tile has, so that some rows of a tile of queries see a tile of keys
// whole and others do not.
TEST_CASE("positions: many queries") {
  const auto kernels = kernels_here(Op::forward, false);
  for (const attn_dtype type : {ATTN_F16, ATTN_BF16})
    for (const attn_layout layout : {ATTN_PADDED, ATTN_PAGED})
      for (const Spread of : {Spread{1, 1}, {2, 1}, {3, 64}}) {
        Case c;
        c.name = "many-queries";
        c.seed = uint64_t(of.ranks);
        c.batch = 2;
        c.heads_q = 2;
        c.head_dim = c.head_dim_v = type == ATTN_BF16 ? 64 : 128;
        c.q_type = type;
        c.out_type = ATTN_F32;
        c.seqlen_q = 420;
        c.flags = ATTN_CAUSAL | ATTN_QUERY_POSITIONS;
        SegmentCase keys;
        keys.k_type = keys.v_type = type;
        keys.layout = layout;
        keys.page_size = 64;
        keys.capacity = 640;
        keys.lengths = {640, 411};
        keys.key_ranks = of.ranks;
        keys.key_interleave = of.interleave;
        keys.key_rank = of.ranks - 1;
        keys.key_start = {100, -40};
        c.segments = {keys};
        c.query_start = {300, -40};
        check_case(c, kernels);
        c.flags |= ATTN_WINDOW;
        c.window_left = 230;
        c.window_right = 20;
        check_case(c, kernels);
      }
}

TEST_CASE("positions: the merged results of ranks are the whole sequence's") {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.features & feature_key_positions) || kernel->composed != Composed::no)
      continue;
    if (float_type_of(*kernel) == ATTN_DTYPE_NONE) continue;
    int computed = 0;
    for (const Spread of : {Spread{2, 256}, {3, 1}, {4, 16}})
      for (const attn_layout layout : {ATTN_PADDED, ATTN_PAGED}) {
        if (layout == ATTN_PAGED && !(kernel->limits.features & feature_paged_kv)) continue;
        INFO(kernel->name << ", " << of.ranks << " ranks, interleave " << of.interleave);
        int here = 0;
        for (const int64_t queries : {8, 4}) {
          Case whole = with_heads_for(*kernel, whole_case(*kernel, queries, layout));
          if (here > 0) break;
          here = check_shards(*kernel, whole, of);
          if (here == 0) continue;
          whole.flags |= ATTN_WINDOW;
          whole.window_left = 70;
          whole.window_right = -1;
          check_shards(*kernel, whole, of);
        }
        computed += here;
      }
    INFO(kernel->name);
    CHECK((computed > 0 || kernel_file()));
    ran += computed;
  }
  CHECK(ran > 0);
}

// Over interleaved keys only decode kernels take it.
TEST_CASE("positions: ALiBi counts from the queries' positions") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.flags & ATTN_QUERY_POSITIONS) || !(kernel->limits.flags & ATTN_ALIBI))
      continue;
    if (float_type_of(*kernel) == ATTN_DTYPE_NONE || kernel->composed != Composed::no) continue;
    Case whole = with_heads_for(*kernel, whole_case(*kernel, 4, ATTN_PADDED));
    whole.flags |= ATTN_ALIBI;
    INFO(kernel->name);
    CHECK((check_shards(*kernel, whole, {2, 256}) == 1 || kernel_file()));
    check_shards(*kernel, whole, {3, 4});
    Case shifted = shard_of(whole, {1, 1}, 0);
    for (int64_t& start : shifted.query_start) start -= 37;
    shifted.name = "alibi";
    check_case(shifted, {kernel});
  }
}

}  // namespace
}  // namespace attn::test
