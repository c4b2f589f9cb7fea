// Problems made for kernels on matrix units: 16-bit types, head dimensions in steps of 8, strides
// in steps of 16 bytes, several tiles of queries and keys. The random problems of test_forward.cpp
// are seldom all of that.
#include <algorithm>
#include <iostream>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "catalog/catalog.h"
#include "formula.h"
#include "head_dims.h"
#include "random_families.h"

namespace attn::test {
namespace {

constexpr uint32_t of_16_bits = type_bit(ATTN_F16) | type_bit(ATTN_BF16);

// From this seed on K and V are paged.
constexpr uint64_t first_paged = 5300;

Case random_case(uint64_t seed) {
  Case c;
  c.name = "matrix-" + std::to_string(seed);
  c.thinning = for_devices(seed + 557, 6);
  c.seed = seed;
  Draw draw{seed, 77};

  const bool packed_q = draw.chance(4), scores = draw.chance(2), paged = seed >= first_paged;
  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(2);
  c.heads_q = c.heads_kv * (1 + draw(3));
  static const auto dims = head_dims(of_16_bits, of_16_bits);
  draw_head_dims(draw, dims, draw.chance(4), &c);
  const int64_t queries[] = {1, 2, 16, 63, 64, 65, 127, 129, 150, 260};
  c.seqlen_q = draw.pick(queries);
  c.q_type = draw.chance(2) ? ATTN_F16 : ATTN_BF16;
  const attn_dtype out_types[] = {c.q_type, c.q_type, ATTN_F32, ATTN_F16, ATTN_BF16};
  c.out_type = draw.pick(out_types);
  const Arrange arranges[] = {Arrange::contiguous, Arrange::padded, Arrange::head_major};
  c.q_arrange = draw.pick(arranges);
  c.out_arrange = draw.pick(arranges);
  if (packed_q) draw_lengths_q(draw, &c);
  const int64_t segments = draw.chance(3) ? 2 + draw(4) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 31, 64, 65, 127, 128, 200, 333, 512};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = c.q_type;
    s.layout = draw.chance(3) ? ATTN_PACKED : ATTN_PADDED;
    if (paged && (n == 0 || draw.chance(2))) {
      s.layout = ATTN_PAGED;
      const int32_t page_sizes[] = {1, 3, 8, 16, 24, 64, 100};
      s.page_size = draw.pick(page_sizes);
      if (draw.chance(3))
        s.bad_pages = {int32_t(draw(3)), int32_t(draw(uint64_t(s.capacity / s.page_size + 1)))};
    }
    if (s.layout == ATTN_PACKED || draw.chance(2)) draw_lengths(draw, c.batch, &s);
    s.arrange = draw.pick(arranges);
    if (c.head_dim == c.head_dim_v && draw.chance(5)) s.arrange = Arrange::interleaved;
    c.segments.push_back(s);
  }
  if (draw.chance(2)) c.flags |= draw.chance(3) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(3)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(200) - 1;
    c.window_right = draw(60) - 1;
  }
  if (draw.chance(4)) c.flags |= ATTN_SINKS;
  if (draw.chance(3)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(5)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  if (scores && draw.chance(2)) c.flags |= ATTN_ALIBI;
  if (scores && draw.chance(2)) c.softcap = 3;
  if (scores && !packed_q && !paged && draw.chance(2)) {
    c.bias_type = draw.chance(2) ? c.q_type : ATTN_F32;
    c.bias_per_batch = draw.chance(2);
    c.bias_per_head = draw.chance(2);
    c.bias_per_query = !draw.chance(4);
  }
  const double sigmas[] = {0.5, 1, 3};
  c.sigma = draw.pick(sigmas);
  if (paged) c.sigma = std::min(c.sigma, 1.0);
  if (draw.chance(8)) c.values = draw.chance(2) ? Values::uniform : Values::one_hot;
  if (draw.chance(2))
    c.max_sms = int32_t(1 + draw(3));  // blocks that take one tile after the other
  return c;
}

const AddRandomFamily added("matrix units", random_case);

TEST_CASE("forward: random problems for matrix units") {
  const auto kernels = kernels_here(Op::forward, false);
  constexpr uint64_t count = 300, count_paged = 150;
  std::cout << "forward: random problems for matrix units: seeds 5000 to " << 4999 + count << ", "
            << first_paged << " to " << first_paged + count_paged - 1 << std::endl;
  for (uint64_t seed = 5000; seed < 5000 + count; ++seed) check_case(random_case(seed), kernels);
  for (uint64_t seed = first_paged; seed < first_paged + count_paged; ++seed)
    check_case(random_case(seed), kernels);
}

// The largest error of this problem on an H100 was 1.934e-4 in fwd_sm90_f16_d256, most of it from
// rows whose m lags. docs/log/2026-11-26_decode_rows.md
TEST_CASE("formula: the rounding of row maxima that lag") {
  Case c;
  c.name = "lagging";
  c.seed = 5203;
  c.batch = 2;
  c.heads_q = c.heads_kv = 1;
  c.head_dim = 128, c.head_dim_v = 104;
  c.seqlen_q = 63;
  c.q_type = ATTN_F16, c.out_type = ATTN_F32;
  c.flags = ATTN_CAUSAL;
  SegmentCase keys;
  keys.capacity = 200;
  keys.k_type = keys.v_type = ATTN_F16;
  c.segments.push_back(keys);
  const Data data = make_data(c);
  const Outputs want = formula(c, data);
  const Rounding as = rounding_of(c, find_kernel("fwd_sm90_f16_d256")->numerics);
  REQUIRE(as.lag == 8);
  const Outputs rounded = rounded_formula(c, data, as);
  CHECK(std::abs(distance(rounded, want).max - 1.934e-4) < 0.01e-4);
  Rounding without_lag = as, uncorrected = as;
  without_lag.lag = 0;
  uncorrected.rounded_largest = false;
  CHECK(distance(rounded_formula(c, data, without_lag), want).max < 1e-4);
  CHECK(distance(rounded_formula(c, data, uncorrected), want).max > 2.5e-4);
  // Weights of bf16 are no such rounding.
  Case coarse = c;
  coarse.q_type = ATTN_BF16;
  CHECK(compare_with_rounded(c, data, rounded_formula(coarse, data, as), want, rounded) != "");
}

// Prompts and chunks behind what a cache holds, whose pages begin and end anywhere in a tile; a
// page in the middle of one sequence is bad, and all pages of a tile are.
TEST_CASE("forward: prefill over pages") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 1;
  for (const int32_t page_size : {1, 3, 8, 16, 24, 32, 48, 64, 100, 128, 1000, 1024}) {
    for (const int64_t head_dim : largest_head_dims(of_16_bits)) {
      for (const bool scores : {false, true}) {
        Case c;
        c.name = "paged-prefill-" + std::to_string(++seed);
        c.thinning = for_devices(seed + 108, 10);
        c.seed = seed;
        c.q_type = c.out_type = seed % 2 ? ATTN_F16 : ATTN_BF16;
        c.batch = 3;
        c.heads_q = 4;
        c.heads_kv = 2;
        c.head_dim = c.head_dim_v = head_dim;
        c.seqlen_q = 150;
        if (seed % 3) c.lengths_q = {150, 1, 70};
        c.flags = ATTN_CAUSAL;
        if (scores) {
          c.flags |= ATTN_ALIBI | ATTN_SINKS;
          c.softcap = 3;
        }
        SegmentCase s;
        s.k_type = s.v_type = c.q_type;
        s.layout = ATTN_PAGED;
        s.page_size = page_size;
        s.capacity = 400;
        s.lengths = {400, 0, 333};
        s.arrange = seed % 4 < 2 ? Arrange::head_major : Arrange::contiguous;
        if (seed % 5 < 2)
          for (int32_t key = 64; key < 200; key += page_size)
            s.bad_pages.push_back(key / page_size);
        SegmentCase fresh;
        fresh.k_type = fresh.v_type = c.q_type;
        fresh.layout = seed % 2 ? ATTN_PACKED : ATTN_PADDED;
        fresh.capacity = 150;
        fresh.lengths = {150, 1, 70};
        c.segments = {s};
        if (seed % 4) c.segments.push_back(fresh);
        check_case(c, kernels);
      }
    }
  }
}

// Windows of chunks that begin anywhere in a page and in a tile: what no query sees is NaN, in the
// pages of what is seen too, and where all pages of a tile, or of all that a query sees, are bad.
TEST_CASE("forward: windows over pages") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t seed = 1;
  for (const int32_t page_size : {16, 64, 100, 128}) {
    for (const int64_t head_dim : largest_head_dims(of_16_bits)) {
      for (const int64_t left : {0, 37, 200}) {
        for (const bool causal : {false, true}) {
          Case c;
          c.name = "paged-window-" + std::to_string(++seed);
          c.thinning = for_devices(seed - 2, 10);
          c.seed = seed;
          c.q_type = c.out_type = seed % 2 ? ATTN_F16 : ATTN_BF16;
          c.batch = 2;
          c.heads_q = 2;
          c.heads_kv = 1;
          c.head_dim = c.head_dim_v = head_dim;
          c.seqlen_q = 260;
          c.flags = ATTN_WINDOW | (causal ? ATTN_CAUSAL : 0);
          c.window_left = left;
          c.window_right = 5;
          if (seed % 3 == 0) c.max_sms = 1;
          SegmentCase s;
          s.k_type = s.v_type = c.q_type;
          s.layout = ATTN_PAGED;
          s.page_size = page_size;
          s.capacity = 700;
          s.lengths = {700, 611};
          if (seed % 4 == 0)
            for (int32_t key = 450; key < 640; key += page_size)
              s.bad_pages.push_back(key / page_size);
          c.segments = {s};
          if (seed % 5 == 0) {  // a tile that is cut begins a segment
            s.capacity = 90;
            s.lengths = {90, 3};
            s.bad_pages.clear();
            c.segments.insert(c.segments.begin(), s);
          }
          check_case(c, kernels);
        }
      }
    }
  }
}

// Rows of a bias begin at odd elements and at even ones, keys lie apart, what is before it is
// poison. A column of -inf hides a key, whose value is NaN, from all queries or from those of some
// warps.
TEST_CASE("forward: a bias of any layout") {
  const auto kernels = kernels_here(Op::forward, false);
  struct Layout {
    int64_t first, key_stride, seqlen_kv;
    bool per_query;
  };
  uint64_t seed = 1;
  for (const Layout& layout : {Layout{0, 1, 330, true},
                               {1, 1, 330, true},
                               {0, 1, 331, true},
                               {0, 3, 330, true},
                               {0, 1, 330, false},
                               {1, 2, 331, false}}) {
    for (int64_t seqlen_q : {2, 66, 200}) {
      for (const bool as_q : {false, true}) {
        Case c;
        c.name = "bias-layout";
        c.seed = ++seed;
        c.q_type = c.out_type = seed / 2 % 2 ? ATTN_F16 : ATTN_BF16;
        c.bias_type = as_q ? c.q_type : ATTN_F32;
        c.bias_first = layout.first;
        c.bias_key_stride = layout.key_stride;
        c.bias_per_query = layout.per_query;
        c.heads_q = 2;
        c.seqlen_q = seqlen_q;
        SegmentCase s;
        s.k_type = s.v_type = c.q_type;
        s.capacity = layout.seqlen_kv;
        c.segments = {s};
        if (seed % 5 == 0) c.flags |= ATTN_CAUSAL;
        check_case(c, kernels);
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
