// Mistakes that other attention libraries have made, one test each, against answers worked out
// here.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

void expect_nothing_seen(const Case& c, const Outputs& got, int64_t first_rows) {
  size_t wrong = 0;
  for (int64_t row = 0; row < first_rows * c.heads_q; ++row) {
    for (int64_t d = 0; d < c.head_dim_v; ++d)
      wrong += got.out[size_t(row * c.head_dim_v + d)] != 0;
    wrong += got.lse[size_t(row)] != -std::numeric_limits<double>::infinity();
  }
  CHECK(wrong == 0);
  for (size_t n = 0; n < got.out.size(); ++n) {
    if (!std::isfinite(got.out[n])) FAIL("out " << n << " is " << got.out[n]);
  }
}

TEST_CASE("L1: rows that see nothing give 0 and -inf, never NaN") {
  // More queries than keys, causal: the first Sq - Skv queries stand before every key.
  for (int64_t skv : {1, 5, 64, 100}) {
    Case c = small("L1-causal", 130, skv);
    c.flags = ATTN_CAUSAL;
    on_every_kernel(c, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
      expect_nothing_seen(c, got, 130 - skv);
      CHECK(std::isfinite(got.lse.back()));
    });
  }
  Case window = small("L1-window", 40, 10);
  window.flags = ATTN_WINDOW;
  window.window_left = -1;
  window.window_right = 0;
  on_every_kernel(window, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    expect_nothing_seen(window, got, 30);
  });
  Case blocks = small("L1-blocks", 40, 70);
  blocks.flags = ATTN_BLOCK_MASK;
  blocks.mask_kinds = {ATTN_BLOCK_EMPTY};
  on_every_kernel(blocks, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    expect_nothing_seen(blocks, got, 40);
  });
  Case bias = small("L1-bias", 40, 70);
  bias.bias_type = ATTN_F32;
  bias.bias_value = -std::numeric_limits<float>::infinity();
  on_every_kernel(bias, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    expect_nothing_seen(bias, got, 40);
  });
}

TEST_CASE("L1: rows that see nothing but a sink give 0 and the sink") {
  Case c = small("L1-sink", 40, 10);
  c.flags = ATTN_CAUSAL | ATTN_SINKS;
  on_every_kernel(c, [&](const Kernel&, const Case&, const Data& data, const Outputs& got) {
    for (int64_t row = 0; row < 30 * 2; ++row) {
      for (int64_t d = 0; d < 64; ++d) REQUIRE(got.out[size_t(row * 64 + d)] == 0);
      REQUIRE(std::abs(got.lse[size_t(row)] - data.sinks.as<float>()[row % 2]) < 1e-6);
    }
  });
}

TEST_CASE("L1: rows that see nothing but a sink give 0 behind rows that see keys") {
  // A block that takes one item after the other still has the sums of the one before.
  Case c = small("L1-sink-behind", 160, 160);
  c.flags = ATTN_CAUSAL | ATTN_SINKS;
  c.batch = 4;
  c.segments[0].lengths = {160, 64, 160, 64};
  c.max_sms = 2;  // the fewest that clusters of two blocks take
  on_every_kernel(c, [&](const Kernel&, const Case&, const Data& data, const Outputs& got) {
    for (int64_t b : {1, 3}) {
      for (int64_t row = b * 160 * 2; row < (b * 160 + 96) * 2; ++row) {
        for (int64_t d = 0; d < 64; ++d) REQUIRE(got.out[size_t(row * 64 + d)] == 0);
        REQUIRE(std::abs(got.lse[size_t(row)] - data.sinks.as<float>()[row % 2]) < 1e-6);
      }
    }
  });
}

TEST_CASE("L1: keys far below a sink keep their precision") {
  // Scores 0 beside a sink of 13: taken against the sink, a weight has 5 bits in f16.
  Case c = small("L1-far-sink", 70, 200);
  c.flags = ATTN_SINKS;
  c.values = Values::uniform;
  c.out_type = ATTN_F32;
  on_every_kernel(
      c,
      [](const Case&, Data& data) {
        for (int64_t h = 0; h < 2; ++h) data.sinks.as<float>()[h] = 13;
      },
      [&](const Kernel& kernel, const Case& typed, const Data& data, const Outputs& got) {
        const Outputs want = reference_answer(typed, data);
        for (size_t n = 0; n < want.out.size(); ++n) {
          INFO(kernel.name << ": " << n);
          REQUIRE(std::abs(got.out[n] - want.out[n]) <= 2e-3 * std::abs(want.out[n]) + 1e-9);
        }
      });
}

TEST_CASE("L1: a finite mask value is a number") {
  // All scores of a row shifted by the same amount leave the weights as they are.
  for (float value : {-65504.0f, -1e9f, -1e38f}) {
    Case plain = small("L1-finite-mask", 33, 64);
    plain.values = Values::uniform;  // scores 0
    Case c = plain;
    c.bias_type = ATTN_F32;
    c.bias_value = value;
    on_every_kernel(c,
                    [&](const Kernel& kernel, const Case& typed, const Data&, const Outputs& got) {
                      Case same = with_type(plain, typed.q_type);
                      same.heads_kv = typed.heads_kv;
                      const Outputs want = run_forward(backend_of(kernel.backend), same,
                                                       make_data(same), kernel.name, same.out_type);
                      REQUIRE(got.out.size() == want.out.size());
                      for (size_t n = 0; n < want.out.size(); ++n)
                        REQUIRE(within_a_step(got.out[n], want.out[n]));
                      for (double lse : got.lse)
                        REQUIRE(std::abs(lse / (value + std::log(64.0)) - 1) < 1e-6);
                    });
  }
}

TEST_CASE("L4: a window holds left + 1 + right keys, the query's own among them") {
  for (int64_t sq : {1, 30, 60}) {
    Case c = small("L4", sq, 60);
    c.thinning.number = 0;
    c.values = Values::identity;
    c.flags = ATTN_WINDOW;
    constexpr int64_t most = std::numeric_limits<int64_t>::max();
    for (auto [left, right] : {std::pair<int64_t, int64_t>{0, 0},
                               {4, 0},
                               {0, 4},
                               {5, 6},
                               {-1, 0},
                               {3, -1},
                               {1000, 1000},
                               {(int64_t{1} << 31) - 1, 2},
                               {int64_t{1} << 31, 0},
                               {most, 3},
                               {1, int64_t{1} << 62}}) {
      c.window_left = left;
      c.window_right = right;
      ++*c.thinning.number;
      on_every_kernel(c, [&, left = left, right = right](const Kernel&, const Case&, const Data&,
                                                         const Outputs& got) {
        for (int64_t i = 0; i < sq; ++i) {
          const int64_t own = i + 60 - sq;
          const int64_t low = left < 0 ? 0 : std::max<int64_t>(0, own - left);
          const int64_t high = right < 0 || right > 59 ? 59 : std::min<int64_t>(59, own + right);
          for (int64_t j = 0; j < 60; ++j) {
            const double want = j >= low && j <= high ? 1.0 / double(high - low + 1) : 0;
            REQUIRE(std::abs(got.out[size_t(i * 2 * 64 + j)] - want) < 1e-6);
          }
        }
      });
    }
  }
}

TEST_CASE("L5: NaN in unused K and V reaches nothing") {
  // make_data leaves NaN in all memory that no query sees; here each kind of such memory once,
  // beside the sizes at which tiles end.
  uint64_t number = 0;
  for (attn_dtype type : {ATTN_F32, ATTN_F8_E5M2, ATTN_Q8_0}) {
    const auto finite = [](const Kernel&, const Case&, const Data&, const Outputs& got) {
      size_t wrong = 0;
      for (double x : got.out) wrong += !std::isfinite(x);
      CHECK(wrong == 0);
    };
    for (int64_t length : {1, 15, 63, 64, 65, 127}) {
      for (attn_layout layout : {ATTN_PADDED, ATTN_PACKED, ATTN_PAGED}) {
        if (!share(number++)) continue;
        Case c = small("L5", 20, 128);
        c.batch = 2;
        SegmentCase& s = c.segments[0];
        s.k_type = s.v_type = type;
        s.layout = layout;
        s.lengths = {int32_t(length), 3};
        on_every_kernel(c, finite);
        c.flags = ATTN_WINDOW;
        c.window_left = 2;
        c.window_right = 0;
        on_every_kernel(c, finite);
      }
    }
  }
}

TEST_CASE("L5: NaN in K reaches the rows that see it and no other") {
  // Rows in front of it do not see it, by the mask or by a bias.
  for (const bool by_bias : {false, true}) {
    for (int64_t poisoned : {0, 40, 99}) {
      Case c = small("L5-key", 100, 100);
      if (by_bias) {
        c.bias_type = ATTN_F32;
        c.bias_value = 0.5;
      } else {
        c.flags = ATTN_CAUSAL;
      }
      c.heads_kv = 1;
      const auto poison = [&](const Case& typed, Data& data) {
        SegmentData& s = data.segments[0];
        encode_element(typed.q_type, s.k.data(), s.k_view.at(0, poisoned, 0) + 5, NAN, false);
        for (int64_t i = 0; by_bias && i < poisoned; ++i)
          for (int64_t h : {0, 1})
            data.bias.as<float>()[(h * 100 + i) * 100 + poisoned] =
                -std::numeric_limits<float>::infinity();
      };
      on_every_kernel(c, poison,
                      [&](const Kernel& kernel, const Case&, const Data&, const Outputs& got) {
                        INFO(kernel.name << ", by bias: " << by_bias);
                        size_t wrong = 0;
                        for (int64_t row = 0; row < 100 * 2; ++row) {
                          const bool sees_none = row / 2 < poisoned;
                          for (int64_t d = 0; d < 64; ++d)
                            wrong += std::isfinite(got.out[size_t(row * 64 + d)]) != sees_none;
                          wrong += std::isfinite(got.lse[size_t(row)]) != sees_none;
                        }
                        CHECK(wrong == 0);
                      });
    }
  }
}

TEST_CASE("L5: NaN in V reaches every row that sees it") {
  Case c = small("L5-value", 100, 100);
  c.heads_q = 4;
  c.flags = ATTN_CAUSAL;
  const auto poison = [](const Case& typed, Data& data) {
    SegmentData& s = data.segments[0];
    encode_element(typed.q_type, s.v.data(), s.v_view.at(0, 40, 1) + 5, NAN, false);
  };
  on_every_kernel(c, poison, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    for (int64_t i = 0; i < 100; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        const int64_t row = i * 4 + h;
        if (h < 2) REQUIRE(std::isfinite(got.out[size_t(row * 64 + 5)]));  // of the other K/V head
        if (h >= 2 && i >= 40) REQUIRE(std::isnan(got.out[size_t(row * 64 + 5)]));
        REQUIRE(std::isfinite(got.lse[size_t(row)]));
      }
    }
  });
}

TEST_CASE("L7: strides are believed") {
  const auto kernels = kernels_here(Op::forward, false);
  for (attn_dtype type : {ATTN_F32, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_Q8_0}) {
    for (attn_layout layout : {ATTN_PADDED, ATTN_PACKED, ATTN_PAGED}) {
      for (Arrange arrange : {Arrange::padded, Arrange::head_major, Arrange::interleaved,
                              Arrange::reversed, Arrange::flipped}) {
        Case c = small("L7", 20, 100);
        c.name +=
            "-" + std::to_string(type) + std::to_string(layout) + std::to_string(int(arrange));
        c.batch = 2;
        c.q_arrange = c.out_arrange = arrange == Arrange::interleaved ? Arrange::padded : arrange;
        SegmentCase& s = c.segments[0];
        s.k_type = s.v_type = type;
        s.layout = layout;
        s.lengths = {100, 71};
        s.arrange = arrange;
        check_case(c, kernels);
      }
    }
  }
}

TEST_CASE("L7: a bias may run backwards") {
  Case c = small("L7-bias", 20, 70);
  c.batch = 2;
  c.bias_type = ATTN_F32;
  c.bias_first = 2 * 2 * 20 * 70 - 1;  // room in front of it
  const auto reverse = [](const Case& typed, Data& data) {
    float* bias = data.bias.as<float>() + typed.bias_first;
    for (int64_t n = 1; n <= typed.bias_first; ++n) bias[-n] = bias[n];
    for (int64_t& stride : data.bias_stride) stride = -stride;
  };
  Outputs want = reference_answer(c, make_data(c));
  for (const char* kernel : {"reference", "cpu_baseline"}) {
    Data data = make_data(c);
    reverse(c, data);
    const Outputs got =
        run_forward(backend_of(find_kernel(kernel)->backend), c, data, kernel, ATTN_F32);
    INFO(kernel);
    CHECK(compare(c, data, *find_kernel(kernel), got, want) == "");
    CHECK(got.error == "");
  }
}

TEST_CASE("L7: the stride of a dimension of size 1 means nothing") {
  const auto types = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F8_E4M3FNUZ};
  for (int64_t heads_q : {1, 2}) {
    Case c = small("L7-degenerate", 1, 50);
    c.heads_q = heads_q;
    c.heads_kv = 1;
    c.thinning.number = 0;
    for (int64_t stride : {0, 3, 64, 1 << 20}) {
      ++*c.thinning.number;
      Outputs want;
      const auto change = [&](const Case& typed, Data& data) {
        want = reference_answer(typed, data);
        data.q_view.given = {stride, stride, heads_q == 1 ? stride : 64};
        data.segments[0].k_view.given = {stride, 64, stride};
        data.segments[0].v_view.given = {0, 64, stride};
      };
      std::vector<std::string> ran;
      const auto check = [&](const Kernel& kernel, const Case& typed, const Data& data,
                             const Outputs& got) {
        CHECK(compare(typed, data, kernel, got, want) == "");
        ran.push_back(kernel.name);
      };
      on_every_kernel(c, change, check, types);
      // Odd ones are no reason to decline.
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        const Limits& takes = kernel->limits;
        if (takes.demands) continue;  // of block masks, which the case has not
        if (heads_q % takes.group.multiple != 0) continue;
        const auto fits = [&](attn_dtype type) {
          return takes.in_types & takes.kv_types & type_bit(type);
        };
        if (kernel->numerics.rounds_kv || std::none_of(types.begin(), types.end(), fits))
          continue;  // q, k and v of the case are alike
        if (c.head_dim % takes.head_dim.multiple != 0) continue;  // nor are these
        Case typed = with_type(c, *std::find_if(types.begin(), types.end(), fits));
        typed.thinning.emulated = Thinning::no_other;
        if (!share(*kernel, typed)) continue;
        INFO(kernel->name << " stride " << stride << " heads_q " << heads_q);
        CHECK(std::count(ran.begin(), ran.end(), kernel->name) > 0);
      }
    }
  }
}

TEST_CASE("L14: block masks broadcast, and their last blocks are partial") {
  const auto kernels = kernels_here(Op::forward, false);
  uint64_t number = 0;
  for (auto [bq, bk] : {std::pair{64, 64}, {128, 64}, {64, 128}, {128, 128}, {16, 48}}) {
    for (bool per_batch : {false, true}) {
      for (bool per_head : {false, true}) {
        for (int kind : {-1, int(ATTN_BLOCK_PARTIAL), int(ATTN_BLOCK_CAUSAL)}) {
          Case c = small("L14", 130, 257);
          c.thinning = one_of_many(number++);
          c.name += "-" + std::to_string(bq) + "x" + std::to_string(bk) + "-" +
                    std::to_string(per_batch) + std::to_string(per_head) + std::to_string(kind);
          c.batch = 2;
          c.heads_q = 4;
          c.flags = ATTN_BLOCK_MASK;
          c.block_q = bq;
          c.block_k = bk;
          c.mask_per_batch = per_batch;
          c.mask_per_head = per_head;
          if (kind >= 0) c.mask_kinds = {uint8_t(kind)};
          check_case(c, kernels);
        }
      }
    }
  }
}

TEST_CASE("L14: kinds and indices out of range see nothing") {
  Case c = small("L14-bad", 10, 128);
  c.flags = ATTN_BLOCK_MASK;
  c.mask_kinds = {ATTN_BLOCK_FULL};
  on_every_kernel(
      c, [](const Case&, Data& data) { data.kinds.data()[0] = 77; },
      [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
        for (double lse : got.lse) REQUIRE(std::isfinite(lse));
      });
  const auto both = [](const Case&, Data& data) {
    data.kinds.data()[0] = 77;
    data.kinds.data()[1] = ATTN_BLOCK_PARTIAL;
    data.index.as<int32_t>()[1] = 1000;
  };
  on_every_kernel(c, both, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    expect_nothing_seen(c, got, 10);
  });
}

// One query, two keys: score 0 = 1, score 1 = 9 before scale, softcap and bias.
struct Pair {
  Case c = small("L15", 1, 2);
  float bias[2] = {0, 0};
  Pair() {
    c.heads_kv = 1;
    c.head_dim = 8;
    c.scale = 1;
  }
  void expect_lse(double a, double b) {
    const auto write = [&](const Case& typed, Data& data) {
      SegmentData& s = data.segments[0];
      for (int64_t d = 0; d < 8; ++d) {
        const bool third = d == 3;
        encode_element(typed.q_type, data.q.data(), d, third ? 1 : 0, false);
        encode_element(typed.q_type, s.k.data(), s.k_view.at(0, 0, 0) + d, third ? 1 : 0, false);
        encode_element(typed.q_type, s.k.data(), s.k_view.at(0, 1, 0) + d, third ? 9 : 0, false);
      }
      if (c.bias_type == ATTN_F32) std::copy_n(bias, 2, data.bias.as<float>());
    };
    on_every_kernel(c, write, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
      CHECK(std::abs(got.lse[0] - std::log(std::exp(a) + std::exp(b))) < 2e-6 * std::max(a, b));
    });
  }
};

TEST_CASE("L15: scale, softcap, bias in this order") {
  Pair pair;
  pair.expect_lse(1, 9);
  pair.c.softcap = 2;
  pair.expect_lse(2 * std::tanh(0.5), 2 * std::tanh(4.5));
  pair.c.scale = 0.5;
  pair.expect_lse(2 * std::tanh(0.25), 2 * std::tanh(2.25));
  // The bias comes after the cap: 5 is above it.
  pair.c.bias_type = ATTN_F32;
  pair.c.bias_value = 1;  // no -inf
  pair.bias[0] = 5;
  pair.bias[1] = -1;
  pair.expect_lse(2 * std::tanh(0.25) + 5, 2 * std::tanh(2.25) - 1);
}

TEST_CASE("L15: the smallest normal scale leaves nothing of the scores") {
  // As with keys of zero, whatever is added to the scores.
  for (int variant = 0; variant < 7; ++variant) {
    Case c = small("L15-scale", 33, 64);
    c.values = Values::identity;
    if (variant == 1) c.flags = ATTN_CAUSAL | ATTN_SINKS;
    if (variant == 2) c.softcap = 30;
    if (variant == 3) c.bias_type = ATTN_F32;
    if (variant == 4) c.flags = ATTN_ALIBI;
    if (variant == 5) c.softcap = 0.25, c.bias_type = ATTN_F32, c.flags = ATTN_SINKS;
    if (variant == 6) c.seqlen_q = 1, c.flags = ATTN_SINKS;
    INFO("variant " << variant);
    const auto give_keys = [](const Case& with, Data& data) {
      Case random = with;
      random.values = Values::normal;
      data.segments[0].k = make_data(random).segments[0].k;
    };
    Case scaled = c;
    scaled.scale = std::numeric_limits<float>::min();
    on_every_kernel(scaled, give_keys,
                    [&](const Kernel& kernel, const Case& ran, const Data&, const Outputs& got) {
                      Case same = ran;
                      same.scale = c.scale;
                      const Data zero = make_data(same);
                      CHECK(compare(same, zero, kernel, got, reference_answer(same, zero)) == "");
                    });
  }
}

TEST_CASE("L15: a capped score cannot come back from the mask") {
  // A cap applied after masking would turn -inf into -cap.
  Case c = small("L15-mask", 20, 40);
  c.softcap = 1;
  c.flags = ATTN_CAUSAL;
  c.head_dim_v = 64;
  c.values = Values::identity;
  on_every_kernel(c, [&](const Kernel&, const Case&, const Data&, const Outputs& got) {
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = i + 21; j < 40; ++j) REQUIRE(got.out[size_t(i * 2 * 64 + j)] == 0);
    }
  });
}

TEST_CASE("L15: ALiBi falls with the distance from the query's place among the keys") {
  for (auto [sq, skv] : {std::pair{1, 50}, {7, 50}, {50, 50}, {60, 50}}) {
    Case c = small("L15-alibi", sq, skv);
    c.head_dim_v = 64;
    c.values = Values::identity;  // scores 0
    c.flags = ATTN_ALIBI;
    on_every_kernel(c, [&, sq = sq, skv = skv](const Kernel& kernel, const Case&, const Data& data,
                                               const Outputs& got) {
      // Matrix units take the weights in v's type.
      const double bound = 2e-6 + (kernel.host ? 0 : 2 * half_ulp(data.q_view.type, 1));
      for (int64_t i = 0; i < sq; ++i) {
        for (int64_t h = 0; h < 2; ++h) {
          const double slope = data.slopes.as<float>()[h];
          REQUIRE(slope > 0);
          double sum = 0;
          for (int64_t j = 0; j < skv; ++j)
            sum += std::exp(-slope * std::abs(double(i + skv - sq - j)));
          for (int64_t j = 0; j < skv; ++j) {
            const double want = std::exp(-slope * std::abs(double(i + skv - sq - j))) / sum;
            REQUIRE(std::abs(got.out[size_t((i * 2 + h) * 64 + j)] - want) < bound);
          }
        }
      }
    });
  }
}

// The sign of so small a sum is that of rounding errors, which backends do not share.
TEST_CASE("an fp8 result that rounds to zero is +0 on every backend") {
  for (attn_dtype type : {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ}) {
    for (float scale : {1.75f, -1.75f}) {
      Case c = small("fp8-zero", 130, 90);
      c.thinning = on_all_kernels;
      c.out_type = type;
      c.flags = ATTN_OUT_SCALE | ATTN_CAUSAL;  // the first rows see nothing
      c.sigma = 1e-6;
      Data data = make_data(c);
      data.out_scale.as<float>()[0] = scale;
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        if (!share(*kernel, c)) continue;
        const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, type);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << dtype_name(type));
        REQUIRE(got.error == "");
        size_t zeros = 0, negative = 0;
        for (double x : got.out) {
          zeros += x == 0;
          negative += x == 0 && std::signbit(x);
        }
        CHECK(zeros > 1000);
        CHECK(negative == 0);
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
