// Attention of ggml's CPU backend and of libggml-attn.so, by turns on the same tensors: the least
// processor time and the least time of each, in milliseconds.
//   g++ -O2 -std=c++20 -I$GGML/include bench/dev/ggml_attention.cpp -o ggml_attention
//   -L$LIBRARIES -lggml -lggml-base -lggml-cpu
//   ./ggml_attention libggml-attn.so threads heads/heads_kv dim keys rows rounds [random]
// K and V have the heads of a token side by side, as llama.cpp's cache. Mask: causal, or random.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

double now(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

std::vector<char> random_values(const ggml_tensor* t) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(ggml_nelements(t)));
  for (float& x : values) x = normal(random);
  std::vector<char> stored(ggml_nbytes(t));
  ggml_quantize_chunk(t->type, values.data(), stored.data(), 0, ggml_nelements(t) / t->ne[0],
                      t->ne[0], nullptr);
  return stored;
}

}  // namespace

int main(int count, char** argument) {
  if (count < 8) return 1;
  const ggml_backend_reg_t registry = ggml_backend_load(argument[1]);
  if (!registry) return 1;
  const int threads = std::atoi(argument[2]), rounds = std::atoi(argument[7]);
  const int64_t heads = std::atoi(argument[3]);
  const int64_t heads_kv = std::atoi(std::strchr(argument[3], '/') + 1);
  const int64_t dim = std::atoi(argument[4]), keys = std::atoi(argument[5]),
                rows = std::atoi(argument[6]);
  const bool random_mask = count > 8;
  ggml_backend_t backends[] = {ggml_backend_cpu_init(),
                               ggml_backend_dev_init(ggml_backend_reg_dev_get(registry, 0), "")};
  for (ggml_backend_t backend : backends) {
    ggml_backend_reg_t of = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(of, "ggml_backend_set_n_threads"));
    set(backend, threads);
  }
  for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    ggml_init_params params{ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true};
    ggml_context* ctx = ggml_init(params);
    ggml_tensor* q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, dim, heads, rows, 1);
    ggml_tensor* k = ggml_new_tensor_4d(ctx, type, dim, heads_kv, keys, 1);
    ggml_tensor* v = ggml_new_tensor_4d(ctx, type, dim, heads_kv, keys, 1);
    ggml_tensor* mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, keys, rows, 1, 1);
    const auto view = [&](ggml_tensor* t) { return ggml_permute(ctx, t, 0, 2, 1, 3); };
    ggml_tensor* out =
        ggml_flash_attn_ext(ctx, view(q), view(k), view(v), mask, 1 / std::sqrt(float(dim)), 0, 0);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(ctx, backends[0]);
    for (ggml_tensor* t : {q, k, v, mask}) {
      std::vector<char> stored = random_values(t);
      auto* codes = reinterpret_cast<ggml_fp16_t*>(stored.data());
      for (int64_t n = 0; t == mask && !random_mask && n < rows * keys; ++n)
        codes[n] = ggml_fp32_to_fp16(n % keys <= keys - rows + n / keys ? 0.0f : -INFINITY);
      ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
    }
    ggml_cgraph* graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    double processor[2] = {1e9, 1e9}, wall[2] = {1e9, 1e9};
    for (int round = 0; round < rounds; ++round) {
      for (int n = 0; n < 2; ++n) {
        const double w = now(CLOCK_MONOTONIC), p = now(CLOCK_PROCESS_CPUTIME_ID);
        if (ggml_backend_graph_compute(backends[n], graph) != GGML_STATUS_SUCCESS) return 1;
        processor[n] = std::min(processor[n], now(CLOCK_PROCESS_CPUTIME_ID) - p);
        wall[n] = std::min(wall[n], now(CLOCK_MONOTONIC) - w);
      }
    }
    std::printf(
        "%-5s processor: ggml %9.3f, libattn %9.3f, %5.2f; time: ggml %9.3f, libattn %9.3f, "
        "%5.2f\n",
        ggml_type_name(type), processor[0], processor[1], processor[0] / processor[1], wall[0],
        wall[1], wall[0] / wall[1]);
    ggml_backend_buffer_free(memory);
    ggml_free(ctx);
  }
  for (ggml_backend_t backend : backends) ggml_backend_free(backend);
}
