// ggml's mask: an f16 for each query and key, times ALiBi's slope of the head, beside the softmax
// written out here.
#include <cmath>
#include <cstring>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"
#include "core/dtype.h"

namespace attn {
namespace {

constexpr int heads = 6, queries = 5, keys = 37, dim = 32;

// ggml's slopes: 2^(-8 (h + 1) / n) for the first n heads, the largest power of two, and
// 2^(-4 (2 (h - n) + 1) / n) behind them, for a max_bias of 8.
std::vector<float> slopes_of_ggml() {
  std::vector<float> slopes;
  const int n = 4;
  for (int h = 0; h < heads; ++h)
    slopes.push_back(float(h < n ? std::pow(std::exp2(-8.0 / n), h + 1)
                                 : std::pow(std::exp2(-4.0 / n), 2 * (h - n) + 1)));
  return slopes;
}

TEST_CASE("ggml's mask: f16 times a slope, under q of every type") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const context device(backend);
    for (const attn_dtype q_type : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
      for (const float softcap : {0.0f, 4.0f}) {
        // ggml pads a mask's rows.
        constexpr int row = keys + 11;
        std::vector<uint16_t> mask(queries * row, f16_code(NAN));
        for (int i = 0; i < queries; ++i)
          for (int j = 0; j < keys; ++j)
            mask[size_t(i * row + j)] =
                f16_code(j > i + keys - queries ? -INFINITY : -std::abs(j - i - keys + queries));
        std::vector<float> slopes = slopes_of_ggml();
        slopes[2] = 0;  // 0 times -inf hides all the same
        const auto values = [](attn_dtype type, int rows, double phase) {
          std::vector<unsigned char> bytes(size_t(dtype_bytes(type, rows * dim)));
          for (int n = 0; n < rows * dim; ++n)
            encode_element(type, bytes.data(), n, 1.5 * std::sin(0.7 * n + phase), false);
          return bytes;
        };
        const auto q = values(q_type, queries * heads, 0), k = values(ATTN_F16, keys * heads, 1),
                   v = values(ATTN_F16, keys * heads, 2);

        auto segment = make<attn_segment>();
        segment.k_type = segment.v_type = ATTN_F16;
        segment.seqlen = keys;
        auto p = make<attn_problem>();
        p.batch = 1;
        p.heads_q = p.heads_kv = heads;
        p.head_dim = dim;
        p.seqlen_q = queries;
        p.q_type = q_type;
        p.out_type = ATTN_F32;
        p.softcap = softcap;
        p.num_segments = 1;
        p.segments = &segment;
        p.bias_type = ATTN_F16;
        p.bias_stride[2] = row;
        p.bias_stride[3] = 1;
        p.flags = ATTN_BIAS_SLOPES;
        const plan made(device, p);
        auto kv = make<attn_segment_args>();
        kv.k = k.data();
        kv.v = v.data();
        std::vector<float> out(queries * heads * dim);
        auto args = make<attn_args>();
        args.q = q.data();
        args.out = out.data();
        args.num_segments = 1;
        args.segments = &kv;
        args.bias = mask.data();
        args.bias_slopes = slopes.data();
        made.run(args, made.make_workspace(device));

        INFO(made.kernel() << " q " << dtype_name(q_type) << " softcap " << softcap);
        for (int i = 0; i < queries; ++i) {
          for (int h = 0; h < heads; ++h) {
            std::vector<double> weight(keys);
            double sum = 0;
            for (int j = 0; j <= i + keys - queries; ++j) {
              double s = 0;
              for (int d = 0; d < dim; ++d)
                s += decode_element(q_type, q.data(), (i * heads + h) * dim + d) *
                     decode_element(ATTN_F16, k.data(), (j * heads + h) * dim + d);
              s /= std::sqrt(double(dim));
              if (softcap > 0) s = softcap * std::tanh(s / softcap);
              sum += weight[size_t(j)] = std::exp(s - slopes[size_t(h)] * (i + keys - queries - j));
            }
            for (int d = 0; d < dim; ++d) {
              double want = 0;
              for (int j = 0; j < keys; ++j)
                want += weight[size_t(j)] / sum *
                        decode_element(ATTN_F16, v.data(), (j * heads + h) * dim + d);
              REQUIRE(std::abs(out[size_t((i * heads + h) * dim + d)] - want) < 2e-6);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attn
