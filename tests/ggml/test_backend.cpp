// libggml-attn.so, loaded through ggml's registry, beside the formula in double.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catch.h"

namespace {

struct Case {
  ggml_type k = GGML_TYPE_F16, v = GGML_TYPE_F16;
  int64_t dim = 64, dim_v = 64, heads = 4, heads_kv = 2, rows = 3, keys = 100, batch = 1;
  enum { none, causal, window, numbers } mask = causal;
  bool sinks = false, tokens_first = true;
  float max_bias = 0, softcap = 0;
};

ggml_backend_reg_t registry() {
  static const ggml_backend_reg_t loaded = [] {
    setenv("GGML_ATTN_ALL", "1", 1);  // the cases here are small
    return ggml_backend_load(ATTN_GGML_BACKEND);
  }();
  REQUIRE(loaded);
  return loaded;
}
int64_t calls() {
  using Count = int64_t (*)();
  return reinterpret_cast<Count>(
      ggml_backend_reg_get_proc_address(registry(), "ggml_backend_attn_calls"))();
}

std::vector<float> normal(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = distribution(random);
  return values;
}

// A tensor of any type, and its elements as ggml decodes them, in the order of its memory.
struct Values {
  ggml_tensor* tensor;
  std::vector<float> decoded;
};
void fill(Values& values, uint32_t seed) {
  ggml_tensor* t = values.tensor;
  values.decoded = normal(ggml_nelements(t), seed);
  std::vector<char> stored(ggml_nbytes(t));
  ggml_quantize_chunk(t->type, values.decoded.data(), stored.data(), 0,
                      ggml_nelements(t) / t->ne[0], t->ne[0], nullptr);
  ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
  if (t->type != GGML_TYPE_F32)
    ggml_get_type_traits(t->type)->to_float(stored.data(), values.decoded.data(),
                                            ggml_nelements(t));
}

// The largest error beside the formula.
double error_of(const Case& c) {
  ggml_init_params params{ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true};
  ggml_context* ctx = ggml_init(params);
  // K and V as llama.cpp has them: heads of a token side by side; or heads outermost.
  const auto cache = [&](ggml_type type, int64_t dim) {
    return c.tokens_first ? ggml_new_tensor_4d(ctx, type, dim, c.heads_kv, c.keys, c.batch)
                          : ggml_new_tensor_4d(ctx, type, dim, c.keys, c.heads_kv, c.batch);
  };
  const auto view = [&](ggml_tensor* t) {
    return c.tokens_first ? ggml_permute(ctx, t, 0, 2, 1, 3) : t;
  };
  Values q{ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.dim, c.heads, c.rows, c.batch), {}};
  Values k{cache(c.k, c.dim), {}}, v{cache(c.v, c.dim_v), {}};
  ggml_tensor* mask = c.mask == Case::none
                          ? nullptr
                          : ggml_new_tensor_4d(ctx, GGML_TYPE_F16, c.keys, c.rows, 1, c.batch);
  ggml_tensor* sinks = c.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.heads) : nullptr;
  const float scale = 1 / std::sqrt(float(c.dim));
  ggml_tensor* out =
      ggml_flash_attn_ext(ctx, ggml_permute(ctx, q.tensor, 0, 2, 1, 3), view(k.tensor),
                          view(v.tensor), mask, scale, c.max_bias, c.softcap);
  if (sinks) ggml_flash_attn_ext_add_sinks(out, sinks);

  ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry(), 0);
  REQUIRE(ggml_backend_dev_supports_op(device, out));
  ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
  ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(ctx, backend);
  fill(q, 1);
  fill(k, 2);
  fill(v, 3);
  const float hidden = -std::numeric_limits<float>::infinity();
  std::vector<float> added(size_t(c.batch * c.rows * c.keys));
  if (mask) {
    std::vector<ggml_fp16_t> codes(added.size());
    const std::vector<float> noise = normal(int64_t(added.size()), 4);
    for (int64_t n = 0; n < int64_t(added.size()); ++n) {
      const int64_t b = n / (c.rows * c.keys), i = n / c.keys % c.rows, j = n % c.keys;
      const int64_t last = c.keys - c.rows + i - 5 * b;  // entries of the batch differ in length
      const bool seen = j <= last && (c.mask != Case::window || last - j <= 20);
      const float x = c.mask == Case::numbers ? noise[size_t(n)] : 0.0f;
      codes[size_t(n)] = ggml_fp32_to_fp16(seen ? x : hidden);
      added[size_t(n)] = ggml_fp16_to_fp32(codes[size_t(n)]);
    }
    ggml_backend_tensor_set(mask, codes.data(), 0, codes.size() * 2);
  }
  const std::vector<float> sink = normal(c.heads, 5);
  if (sinks) ggml_backend_tensor_set(sinks, sink.data(), 0, sink.size() * 4);

  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, out);
  const int64_t before = calls();
  REQUIRE(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
  REQUIRE(calls() == before + 1);
  std::vector<float> got(size_t(ggml_nelements(out)));
  ggml_backend_tensor_get(out, got.data(), 0, got.size() * 4);

  double worst = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      // Heads here are powers of two.
      const double slope = c.max_bias > 0 ? std::exp2(-c.max_bias * double(h + 1) / c.heads) : 1;
      const int64_t kv_head = h / (c.heads / c.heads_kv);
      const auto row = [&](const Values& values, int64_t j) {
        const int64_t at = c.tokens_first ? (b * c.keys + j) * c.heads_kv + kv_head
                                          : (b * c.heads_kv + kv_head) * c.keys + j;
        return values.decoded.data() + at * values.tensor->ne[0];
      };
      for (int64_t i = 0; i < c.rows; ++i) {
        const float* query = q.decoded.data() + ((b * c.rows + i) * c.heads + h) * c.dim;
        std::vector<double> score(static_cast<size_t>(c.keys)), sum(static_cast<size_t>(c.dim_v));
        double total = c.sinks ? std::exp(double(sink[size_t(h)])) : 0;
        for (int64_t j = 0; j < c.keys; ++j) {
          double s = 0;
          for (int64_t d = 0; d < c.dim; ++d) s += double(query[d]) * row(k, j)[d];
          s *= scale;
          if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
          const float a = added[size_t((b * c.rows + i) * c.keys + j)];
          const double p = a == hidden ? 0 : std::exp(s + slope * a);
          total += p;
          for (int64_t d = 0; d < c.dim_v; ++d) sum[size_t(d)] += p * row(v, j)[d];
        }
        const float* result = got.data() + ((b * c.rows + i) * c.heads + h) * c.dim_v;
        for (int64_t d = 0; d < c.dim_v; ++d)
          worst = std::max(worst, std::abs(result[d] - sum[size_t(d)] / total));
      }
    }
  }
  ggml_backend_buffer_free(memory);
  ggml_backend_free(backend);
  ggml_free(ctx);
  return worst;
}

constexpr double bound = 1e-5;  // float32 rounding; ggml's own tests allow more

}  // namespace

TEST_CASE("ggml loads the backend") {
  ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry(), 0);
  CHECK(ggml_backend_dev_by_name("ATTN") == device);
  CHECK(ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL);
}

TEST_CASE("ggml: every pair of types") {
  const ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                             GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                             GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL};
  for (ggml_type k : types) {
    for (ggml_type v : types) {
      Case c;
      c.k = k;
      c.v = v;
      INFO(ggml_type_name(k) << " " << ggml_type_name(v));
      CHECK(error_of(c) < bound);
    }
  }
}

TEST_CASE("ggml: masks, slopes, sinks, softcap, shapes") {
  for (auto mask : {Case::none, Case::causal, Case::window, Case::numbers}) {
    for (int64_t rows : {1, 3, 40}) {
      for (int variant = 0; variant < 4; ++variant) {
        Case c;
        c.mask = mask;
        c.rows = rows;
        c.sinks = variant == 1;
        c.softcap = variant == 2 ? 3.0f : 0.0f;
        c.max_bias = variant == 3 && mask != Case::none ? 8.0f : 0.0f;
        c.batch = 1 + variant % 2;
        c.tokens_first = variant != 2;
        c.heads_kv = variant == 3 ? 4 : 2;
        c.dim_v = variant == 1 ? 96 : 64;
        INFO("mask " << int(mask) << ", rows " << rows << ", variant " << variant);
        CHECK(error_of(c) < bound);
      }
    }
  }
}

#ifdef __linux__
namespace {

int64_t threads_of_process() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}
template <class Function>
Function function_of(ggml_backend_t backend, const char* name) {
  ggml_backend_reg_t of = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  return reinterpret_cast<Function>(ggml_backend_reg_get_proc_address(of, name));
}

}  // namespace

TEST_CASE("ggml: attention runs on the threads of ggml's CPU backend") {
  ggml_backend_t cpu = ggml_backend_cpu_init();
  bool openmp = false;
  auto features = function_of<ggml_backend_get_features_t>(cpu, "ggml_backend_get_features");
  for (auto* f = features(ggml_backend_cpu_reg()); f->name; ++f)
    openmp |= !strcmp(f->name, "OPENMP");
  if (!openmp || !ATTN_GGML_OPENMP) {
    ggml_backend_free(cpu);
    std::printf("SKIP: no OpenMP in %s\n", openmp ? "libggml-attn.so" : "ggml");
    return;
  }
  ggml_init_params params{ggml_tensor_overhead() * 8 + 2 * ggml_graph_overhead(), nullptr, true};
  ggml_context* ctx = ggml_init(params);
  ggml_tensor* q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 16, 8, 1);
  ggml_tensor* kv = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 4096, 8, 1);
  ggml_tensor* out = ggml_flash_attn_ext(ctx, q, kv, kv, nullptr, 0.125f, 0, 0);
  ggml_backend_t attn = ggml_backend_dev_init(ggml_backend_reg_dev_get(registry(), 0), nullptr);
  ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(ctx, cpu);
  for (ggml_tensor* t : {q, kv}) {
    const std::vector<float> values = normal(ggml_nelements(t), 1);
    ggml_backend_tensor_set(t, values.data(), 0, values.size() * 4);
  }
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, out);
  std::vector<float> result[2];
  int64_t threads[2];
  for (int n = 0; n < 2; ++n) {
    ggml_backend_t backend = n ? attn : cpu;
    function_of<ggml_backend_set_n_threads_t>(backend, "ggml_backend_set_n_threads")(backend, 3);
    const int64_t before = calls();
    REQUIRE(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    CHECK(calls() - before == n);
    threads[n] = threads_of_process();
    result[n].resize(size_t(ggml_nelements(out)));
    ggml_backend_tensor_get(out, result[n].data(), 0, result[n].size() * 4);
  }
  CHECK(threads[0] >= 3);
  CHECK(threads[1] == threads[0]);
  double worst = 0;
  for (size_t n = 0; n < result[0].size(); ++n)
    worst = std::max(worst, std::abs(double(result[0][n]) - result[1][n]));
  CHECK(worst < 1e-4);  // beside ggml, which rounds more
  ggml_backend_buffer_free(memory);
  ggml_backend_free(attn);
  ggml_backend_free(cpu);
  ggml_free(ctx);
}
#endif

TEST_CASE("ggml: small attentions are left to ggml") {
  ggml_init_params params{ggml_tensor_overhead() * 16, nullptr, true};
  ggml_context* ctx = ggml_init(params);
  ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry(), 0);
  const auto served = [&](int64_t rows, int64_t keys) {
    ggml_tensor* q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, rows, 8, 1);
    ggml_tensor* kv = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 64, keys, 4, 1);
    return ggml_backend_dev_supports_op(device,
                                        ggml_flash_attn_ext(ctx, q, kv, kv, nullptr, 0.125f, 0, 0));
  };
  // 8 heads, 128 multiply-adds for each row and key: 2^19 with 512 of those.
  CHECK(served(1, 511));
  unsetenv("GGML_ATTN_ALL");
  CHECK_FALSE(served(1, 511));
  CHECK(served(1, 512));
  CHECK_FALSE(served(2, 255));
  CHECK(served(2, 256));
  setenv("GGML_ATTN_ALL", "1", 1);
  ggml_free(ctx);
}

TEST_CASE("ggml: what is not served is left to others") {
  ggml_init_params params{ggml_tensor_overhead() * 8, nullptr, true};
  ggml_context* ctx = ggml_init(params);
  ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry(), 0);
  ggml_tensor* q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 1, 4, 1);
  ggml_tensor* kv = ggml_new_tensor_4d(ctx, GGML_TYPE_Q1_0, 128, 32, 4, 1);
  ggml_tensor* wide = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 128, 1, 4, 1);
  CHECK_FALSE(ggml_backend_dev_supports_op(
      device, ggml_flash_attn_ext(ctx, wide, kv, kv, nullptr, 1, 0, 0)));
  CHECK_FALSE(ggml_backend_dev_supports_op(device, ggml_add(ctx, q, q)));
  ggml_free(ctx);
}
