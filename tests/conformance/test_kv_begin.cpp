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

// About one sequence in six sees all keys, one in six none.
void draw_begins(Draw& draw, Case* c) {
  for (int64_t b = 0; b < c->batch; ++b) {
    const int64_t keys = c->keys(b);
    c->kv_begin.push_back(int32_t(draw.chance(6)   ? 0
                                  : draw.chance(6) ? keys + draw(3)
                                                   : draw(uint64_t(keys) + 1)));
  }
}

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

// Each kernel that takes it computes a case with first keys in, between and beyond its tiles.
TEST_CASE("kv_begin: every kernel that takes it") {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.features & feature_kv_begin)) continue;
    const attn_dtype found = float_type_of(*kernel),
                     type = found == ATTN_DTYPE_NONE ? ATTN_F8_E4M3FN : found;
    Case c;
    c.name = "kv-begin";
    c.thinning = on_all_kernels;
    c.batch = 6;
    c.heads_q = 4;
    c.heads_kv = 2;
    c.head_dim = c.head_dim_v = 64;
    c.seqlen_q = std::min<int64_t>(70, kernel->limits.seqlen_q.max / 2);
    c.q_type = type;
    c.out_type = ATTN_F32;
    SegmentCase keys;
    keys.k_type = keys.v_type = kv_type_of(*kernel, type);
    for (const attn_dtype blocks : {ATTN_Q8_0, ATTN_Q4_0})
      if (!(kernel->limits.kv_types & type_bit(keys.k_type)) &&
          kernel->limits.kv_types & type_bit(blocks))
        keys.k_type = keys.v_type = blocks;
    keys.capacity = 300;
    c.segments = {keys};
    c.flags = ATTN_CAUSAL | kernel->limits.demands;
    c.kv_begin = {0, 1, 64, 191, 299, 300};
    INFO(kernel->name);
    const int computed = check_case(c, {kernel});
    CHECK(computed == 1);
    ran += computed;
  }
  CHECK(ran > 0);
}

}  // namespace
}  // namespace attn::test
