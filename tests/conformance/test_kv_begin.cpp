// A first visible key for each sequence, in every forward kernel that takes it. Keys before it are
// NaN here.
#include <algorithm>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

Case random_case(uint64_t seed) {
  Case c;
  c.name = "kv-begin-" + std::to_string(seed);
  c.thinning = one_of_many(seed);
  c.seed = seed;
  Draw draw{seed, 161};
  c.batch = 1 + draw(4);
  c.heads_kv = 1 + draw(2);
  const int64_t groups[] = {1, 1, 2, 4, 8};
  const int64_t group = draw.pick(groups);
  c.heads_q = c.heads_kv * group;
  // Up to 16 rows, which all decode kernels take, or up to 48 or more.
  const int64_t rows[] = {1, 8, 16, 48, 300};
  c.seqlen_q = 1 + draw(uint64_t(std::max<int64_t>(1, draw.pick(rows) / group)));
  const attn_dtype q_types[] = {ATTN_BF16, ATTN_BF16, ATTN_F16, ATTN_F32, ATTN_F8_E4M3FN};
  c.q_type = draw.pick(q_types);
  const bool fp8 = dtype_is_fp8(c.q_type);
  static const auto dims = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16));
  static const auto fp8_dims = head_dims(type_bit(ATTN_F8_E4M3FN));
  draw_head_dims(draw, fp8 ? fp8_dims : dims, false, &c);
  c.out_type = fp8 || draw.chance(2) ? ATTN_F32 : c.q_type;
  if (draw.chance(2)) draw_lengths_q(draw, &c);
  const attn_dtype kv_type = fp8 || !draw.chance(3) ? c.q_type : ATTN_F8_E4M3FN;
  const int64_t segments = draw.chance(3) ? 2 + draw(2) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 5, 64, 70, 130, 200, 333};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = kv_type;
    s.layout = attn_layout(draw(3));
    const int32_t page_sizes[] = {1, 3, 16, 32, 64, 128};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    if (dtype_is_fp8(kv_type)) s.k_descale = s.v_descale = attn_descale_kind(draw(4));
    c.segments.push_back(s);
  }
  draw_begins(draw, &c);
  if (draw.chance(2)) c.flags |= draw.chance(5) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(150) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(5)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.softcap = 3;
  return c;
}
const AddRandomFamily family{"kv_begin", random_case};

TEST_CASE("kv_begin: random problems") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 240; ++seed) check_case(random_case(seed), kernels);
}

// Bias and block masks, which kernels of few queries decline.
TEST_CASE("kv_begin: beside bias and block masks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Case c = random_case(1000 + seed);
    c.lengths_q.clear();
    Draw draw{seed, 162};
    if (draw.chance(2)) {
      c.bias_type = ATTN_F32;
      c.bias_per_head = draw.chance(2);
    } else {
      c.flags |= ATTN_BLOCK_MASK;
      const int32_t blocks[] = {64, 128};
      c.block_q = draw.pick(blocks);
      c.block_k = draw.pick(blocks);
    }
    check_case(c, kernels);
  }
}

// Trees and fixed splits, which kernels of few queries alone take.
TEST_CASE("kv_begin: beside trees and fixed splits") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Case c = random_case(2000 + seed);
    Draw draw{seed, 163};
    if (draw.chance(2)) c.tree_keys = 1 + draw(128);
    const int64_t splits[] = {64, 128, 192};
    if (c.tree_keys == 0 || draw.chance(2)) c.fixed_split = draw.pick(splits);
    check_case(c, kernels);
  }
}

// A case with first keys in, between and after tiles.
Case case_of(const Kernel& kernel, attn_layout layout) {
  Case c = small_case(kernel, "kv-begin", layout, 300);
  c.batch = 6;
  c.kv_begin = {0, 1, 64, 191, 299, 300};
  return c;
}

// Each kernel that takes it computes that case, with as many queries as it takes.
TEST_CASE("kv_begin: every kernel that takes it") {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.features & feature_kv_begin)) continue;
    for (const attn_layout layout : {ATTN_PADDED, ATTN_PAGED}) {
      if (layout == ATTN_PAGED && !(kernel->limits.features & feature_paged_kv)) continue;
      Case c = case_of(*kernel, layout);
      INFO(kernel->name << ", layout " << int(layout));
      int computed = 0;
      for (const int64_t rows : {140, 64, 32, 16, 8}) {  // queries times the heads of a K/V head
        c.seqlen_q = rows / 2;
        if (computed == 0) computed = check_case(c, {kernel});
      }
      CHECK(computed == 1);
      ran += computed;
    }
  }
  CHECK(ran > 0);
}

}  // namespace
}  // namespace attn::test
