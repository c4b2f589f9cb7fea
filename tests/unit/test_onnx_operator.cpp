// The operator that onnxruntime calls, on each backend that is here, without onnxruntime: heads of
// any size, a past, what is present afterwards.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"
#include "conformance/backend.h"
#include "core/dtype.h"
#include "python/onnxruntime/attention.h"

using namespace attn;
using namespace attn::test;

namespace {

using Shape = std::vector<int64_t>;

size_t elements_of(const Shape& shape) {
  size_t n = 1;
  for (int64_t s : shape) n *= size_t(s);
  return n;
}

// f16 in a context's memory.
struct Halves {
  Shape shape;
  std::vector<uint16_t> host;
  std::shared_ptr<buffer> memory;

  Halves(const context& owner, const Shape& of, uint64_t seed)
      : shape(of), host(elements_of(of)), memory(std::make_shared<buffer>(owner, host.size() * 2)) {
    for (size_t i = 0; i < host.size(); ++i)  // 0: what no run wrote
      host[i] = seed ? store_f16(normal(hash(seed, i))) : 0x7e00;
    memory->copy_in(host.data(), host.size() * 2);
  }
  static uint16_t store_f16(double x) {
    uint16_t bits;
    encode_element(ATTN_F16, &bits, 0, x, false);
    return bits;
  }
  double at(size_t i) const { return decode_element(ATTN_F16, host.data(), int64_t(i)); }
  // [B, H, S, D], or [B, S, H * D] of `heads`.
  double at(int64_t heads, int64_t b, int64_t h, int64_t s, int64_t d) const {
    if (shape.size() == 4) return at(size_t(((b * heads + h) * shape[2] + s) * shape[3] + d));
    return at(size_t((b * shape[1] + s) * shape[2] + h * (shape[2] / heads) + d));
  }
  onnx::Tensor tensor() const { return {memory->data(), ATTN_F16, false, shape}; }
  void fetch() { memory->copy_out(host.data(), host.size() * 2); }
};

struct Sizes {
  int64_t batch, heads_q, heads_kv, seqlen_q, past, fresh, dim, dim_v;
  bool hidden, causal;
};

void check_operator(const std::shared_ptr<context>& owner, const Sizes& c) {
  CAPTURE(attn_backend_string(owner->backend()), c.dim, c.dim_v, c.past, c.hidden, c.causal);
  const auto shape = [&](int64_t heads, int64_t seqlen, int64_t dim) {
    return c.hidden ? Shape{c.batch, seqlen, heads * dim} : Shape{c.batch, heads, seqlen, dim};
  };
  Halves q(*owner, shape(c.heads_q, c.seqlen_q, c.dim), 1);
  Halves k(*owner, shape(c.heads_kv, c.fresh, c.dim), 2);
  Halves v(*owner, shape(c.heads_kv, c.fresh, c.dim_v), 3);
  Halves past_k(*owner, {c.batch, c.heads_kv, c.past, c.dim}, 4);
  Halves past_v(*owner, {c.batch, c.heads_kv, c.past, c.dim_v}, 5);
  const int64_t total = c.past + c.fresh;
  onnx::Attributes attributes;
  attributes.is_causal = c.causal;
  if (c.hidden) attributes.q_num_heads = c.heads_q, attributes.kv_num_heads = c.heads_kv;
  onnx::Attention operation(owner, attributes);
  for (int run = 0; run < 2; ++run) {  // the second in memory that the first has used
    Halves out(*owner, shape(c.heads_q, c.seqlen_q, c.dim_v), 0);
    Halves present_k(*owner, {c.batch, c.heads_kv, total, c.dim}, 0);
    Halves present_v(*owner, {c.batch, c.heads_kv, total, c.dim_v}, 0);
    Halves* const made[] = {&out, &present_k, &present_v};
    onnx::Inputs in;
    in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
    if (c.past) in.past_key = past_k.tensor(), in.past_value = past_v.tensor();
    operation.run(
        in,
        [&](onnx::Output which, const Shape& wanted) {
          REQUIRE(wanted == made[size_t(which)]->shape);
          return made[size_t(which)]->memory->data();
        },
        nullptr);
    owner->synchronize();
    for (Halves* values : made) values->fetch();

    const auto key = [&](const Halves& old, const Halves& fresh, int64_t b, int64_t h, int64_t j,
                         int64_t d) {
      return j < c.past ? old.at(c.heads_kv, b, h, j, d)
                        : fresh.at(c.heads_kv, b, h, j - c.past, d);
    };
    double worst = 0;
    bool same = true;
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads_q; ++h)
        for (int64_t i = 0; i < c.seqlen_q; ++i) {
          const int64_t kv = h / (c.heads_q / c.heads_kv);
          std::vector<double> sum(size_t(c.dim_v));
          double weights = 0;
          for (int64_t j = 0; j < total && (!c.causal || j <= i + c.past); ++j) {
            double s = 0;
            for (int64_t d = 0; d < c.dim; ++d)
              s += q.at(c.heads_q, b, h, i, d) * key(past_k, k, b, kv, j, d);
            const double p = std::exp(s / std::sqrt(double(c.dim)));
            weights += p;
            for (int64_t d = 0; d < c.dim_v; ++d) sum[size_t(d)] += p * key(past_v, v, b, kv, j, d);
          }
          for (int64_t d = 0; d < c.dim_v; ++d) {
            const double got = out.at(c.heads_q, b, h, i, d);
            const double off = std::abs(got - sum[size_t(d)] / weights);
            worst = std::isnan(off) ? 1e9 : std::max(worst, off);
          }
        }
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads_kv; ++h)
        for (int64_t j = 0; j < total; ++j) {
          for (int64_t d = 0; d < c.dim; ++d)
            same &= present_k.at(c.heads_kv, b, h, j, d) == key(past_k, k, b, h, j, d);
          for (int64_t d = 0; d < c.dim_v; ++d)
            same &= present_v.at(c.heads_kv, b, h, j, d) == key(past_v, v, b, h, j, d);
        }
    CHECK(worst < 4e-3);
    CHECK(same);
  }
}

std::vector<std::shared_ptr<context>> contexts() {
  std::vector<std::shared_ptr<context>> made = {std::make_shared<context>(ATTN_BACKEND_CPU)};
  attn_context_options options{};
  options.struct_size = sizeof options;
#ifdef ATTN_HIPEMU
  options.driver_path = ATTN_HIPEMU;
#endif
  for (attn_backend backend : {ATTN_BACKEND_CUDA, ATTN_BACKEND_HIP_EMU}) {
    if (!backend_of(backend == ATTN_BACKEND_HIP_EMU ? ATTN_BACKEND_HIP : backend).context) continue;
    made.push_back(
        std::make_shared<context>(backend, backend == ATTN_BACKEND_HIP_EMU ? &options : nullptr));
  }
  return made;
}

}  // namespace

TEST_CASE("onnx operator: heads whose rows no kernel of a GPU takes, a past, presents") {
  for (const auto& owner : contexts())
    for (const bool hidden : {false, true})
      for (const int64_t past : {0, 3}) {
        check_operator(owner, {2, 4, 2, 5, past, 7, 10, 6, hidden, true});
        check_operator(owner, {1, 2, 1, 3, past, 9, 16, 9, hidden, false});
        check_operator(owner, {1, 3, 3, 4, past, 4, 24, 24, hidden, true});
      }
}

TEST_CASE("onnx operator: K of another head size than Q is refused") {
  const auto owner = std::make_shared<context>(ATTN_BACKEND_CPU);
  Halves q(*owner, {1, 2, 3, 16}, 1), k(*owner, {1, 2, 3, 8}, 2);
  onnx::Attention operation(owner, {});
  onnx::Inputs in;
  in.q = q.tensor(), in.k = k.tensor(), in.v = k.tensor();
  CHECK_THROWS_WITH(operation.run(
                        in, [](onnx::Output, const Shape&) -> void* { return nullptr; }, nullptr),
                    attn::test::contains("K [1, 2, 3, 8], Q [1, 2, 3, 16]") &&
                        attn::test::contains("K's head size as Q's"));
}
