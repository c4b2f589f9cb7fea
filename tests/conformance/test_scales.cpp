// i8 and i4, whose scales lie beside the codes, by bytes worked by hand.
#include <cmath>
#include <cstring>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

Case one_key(attn_dtype type, int64_t dim) {
  Case c;
  c.name = "one-key";
  c.thinning = on_all_kernels;
  c.heads_kv = 2;
  c.heads_q = 4;
  c.head_dim = c.head_dim_v = dim;
  c.q_type = ATTN_F16;
  c.out_type = ATTN_F32;
  SegmentCase s;
  s.k_type = s.v_type = type;
  s.capacity = 1;
  c.segments = {s};
  return c;
}

void set_scale(Buffer& scales, int64_t n, double value) {
  encode_element(ATTN_F16, scales.data(), n, value, false);
}

// Element i of a row of i4: the low half of byte i / 2 where i is even, else its high half.
int code_at(attn_dtype type, const unsigned char* row, int64_t i) {
  if (type == ATTN_I8) return row[i] < 128 ? row[i] : row[i] - 256;
  const int half = i % 2 == 0 ? row[i / 2] % 16 : row[i / 2] / 16;
  return half < 8 ? half : half - 16;
}

// With one key out is its value, whatever the scores are, and lse the one score.
TEST_CASE("scales: values and keys are code times scale") {
  for (const attn_dtype type : {ATTN_I8, ATTN_I4}) {
    for (const int64_t dim : {2, 48, 64, 128, 200, 256}) {
      Case c = one_key(type, dim);
      c.scale = 1;
      Data data = make_data(c);
      SegmentData& s = data.segments[0];
      const int64_t bytes = dtype_bytes(type, dim);
      for (int64_t n = 0; n < c.heads_kv * bytes; ++n) {
        s.k.data()[n] = uint8_t(29 * n + 7);
        s.v.data()[n] = uint8_t(37 * n + 5);
      }
      const double k_scale[] = {0.25, -0.5}, v_scale[] = {0.5, 0x1p-24};
      for (int64_t h = 0; h < c.heads_kv; ++h) {
        set_scale(s.k_scale, h, k_scale[h]);
        set_scale(s.v_scale, h, v_scale[h]);
      }
      std::memset(data.q.data(), 0, data.q.size());
      const int64_t column = dim - 1;
      for (int64_t h = 0; h < c.heads_q; ++h) data.q.as<uint16_t>()[h * dim + column] = 0x3c00;
      for (const Kernel* kernel : kernels_here(Op::forward, true)) {
        if (!share(*kernel, c)) continue;
        const Outputs got =
            run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
        if (declined(*kernel, got)) continue;
        INFO(kernel->name << " " << dtype_name(type) << " head_dim " << dim);
        REQUIRE(got.error == "");
        for (int64_t h = 0; h < c.heads_q; ++h) {
          const int64_t kv_head = h / 2;
          const double score =
              k_scale[kv_head] * code_at(type, s.k.data() + kv_head * bytes, column);
          CHECK(std::abs(got.lse[size_t(h)] - score) <= 1e-6 * std::abs(score));
          for (int64_t d = 0; d < dim; ++d) {
            const double want = v_scale[kv_head] * code_at(type, s.v.data() + kv_head * bytes, d);
            REQUIRE(std::abs(got.out[size_t(h * dim + d)] - want) <= 1e-6 * std::abs(want));
          }
        }
      }
    }
  }
}

// A scale of its neighbour would show: each token and head has another.
TEST_CASE("scales: of 0, subnormal, infinite and NaN, and beside descales") {
  for (const attn_dtype type : {ATTN_I8, ATTN_I4}) {
    for (const int64_t queries : {1, 20}) {
      Case c = one_key(type, 64);
      c.seqlen_q = queries;
      c.segments[0].capacity = 70;
      c.segments[0].k_descale = ATTN_DESCALE_HEAD;
      c.segments[0].v_descale = ATTN_DESCALE_BLOCK;
      for (const bool of_v : {false, true}) {
        for (const double scale : {0.0, 0x1p-24, HUGE_VAL, double(NAN)}) {
          if (!of_v && std::isinf(scale)) continue;  // inf - inf, or a weight of 1: as it comes
          Data data = make_data(c);
          SegmentData& s = data.segments[0];
          // Of K/V head 1, keys 7 and 40.
          for (const int64_t key : {7, 40})
            set_scale(of_v ? s.v_scale : s.k_scale, 2 * key + 1, scale);
          const Outputs want = reference_answer(c, data);
          REQUIRE(want.error == "");
          for (const Kernel* kernel : kernels_here(Op::forward, false)) {
            if (!share(*kernel, c)) continue;
            const Outputs got =
                run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
            if (declined(*kernel, got)) continue;
            INFO(kernel->name << " " << dtype_name(type) << (of_v ? " v " : " k ") << scale);
            REQUIRE(got.error == "");
            const auto agree = [](double x, double y) {
              return std::isfinite(y) ? std::abs(x - y) < 1e-5 : !std::isfinite(x);
            };
            for (size_t n = 0; n < want.out.size(); ++n) REQUIRE(agree(got.out[n], want.out[n]));
            for (size_t n = 0; n < want.lse.size(); ++n) REQUIRE(agree(got.lse[n], want.lse[n]));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
