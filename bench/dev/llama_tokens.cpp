// A model of llama.cpp with ggml's attention and with libattn's, by turns in one process: 512
// tokens after `depth` others, and each of 16 tokens after those (depth 0: after none). Prints
// JSON: the processor time and the time of each round in milliseconds, and their medians.
//   g++ -O2 -std=c++20 -I$LLAMA/include -I$LLAMA/ggml/include bench/dev/llama_tokens.cpp
//   -o llama_tokens -L$LIBRARIES -lllama -lggml -lggml-base -lggml-cpu
//   ./llama_tokens libggml-attn.so MODEL.gguf f16|q8_0|q4_0 threads depth rounds
// Other work on the machine disturbs it: run it alone, or with real-time priority (chrt -f 50).
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <llama.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int prompt = 512, tokens = 16;

double now(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "llama_tokens: %s\n", what);
  std::exit(1);
}

ggml_type type_named(const std::string& name) {
  for (ggml_type type :
       {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
        GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
    if (name == ggml_type_name(type)) return type;
  }
  fail("no such type");
}

struct Times {
  std::vector<double> processor, wall;

  template <class Work>
  void add(double count, const Work& work) {
    const double p = now(CLOCK_PROCESS_CPUTIME_ID), w = now(CLOCK_MONOTONIC);
    work();
    processor.push_back((now(CLOCK_PROCESS_CPUTIME_ID) - p) / count);
    wall.push_back((now(CLOCK_MONOTONIC) - w) / count);
  }
  static void print(const char* name, std::vector<double> values) {
    std::printf("\"%s\": {\"rounds\": [", name);
    for (size_t n = 0; n < values.size(); ++n) std::printf("%s%.3f", n ? ", " : "", values[n]);
    std::sort(values.begin(), values.end());
    const size_t middle = values.size() / 2;
    std::printf("], \"median\": %.3f}",
                values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2);
  }
  void print(const char* name) const {
    std::printf("\"%s\": {", name);
    print("processor_ms", processor);
    std::printf(", ");
    print("wall_ms", wall);
    std::printf("}");
  }
};

struct Side {
  llama_context* context;
  Times prompt_time, token_time;

  void decode(std::vector<llama_token>& batch, int count) {
    if (llama_decode(context, llama_batch_get_one(batch.data(), count)) != 0) fail("decode");
    llama_synchronize(context);
  }
  void forget(int from) { llama_memory_seq_rm(llama_get_memory(context), 0, from, -1); }
};

}  // namespace

int main(int count, char** argument) {
  if (count < 7) fail("libggml-attn.so MODEL.gguf type threads depth rounds");
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argument[2], llama_model_default_params());
  if (!model) fail("no model");
  const int threads = std::atoi(argument[4]), depth = std::atoi(argument[5]),
            rounds = std::atoi(argument[6]);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = uint32_t(depth + 2 * prompt);
  params.n_batch = params.n_ubatch = prompt;
  params.n_threads = params.n_threads_batch = threads;
  params.type_k = params.type_v = type_named(argument[3]);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

  // A context uses the backends that are loaded when it is made.
  Side sides[2] = {};
  sides[0].context = llama_init_from_model(model, params);
  const ggml_backend_reg_t registry = ggml_backend_load(argument[1]);
  if (!registry) fail("libggml-attn.so did not load");
  const auto calls = reinterpret_cast<int64_t (*)()>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_attn_calls"));
  sides[1].context = llama_init_from_model(model, params);
  if (!sides[0].context || !sides[1].context) fail("no context");
  // As llama.cpp's programs do.
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
  ggml_threadpool* pool = ggml_threadpool_new(&pool_params);
  for (Side& side : sides) llama_attach_threadpool(side.context, pool, nullptr);

  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  uint32_t state = 1;
  std::vector<llama_token> batch(prompt);
  const auto draw = [&] {
    for (llama_token& token : batch) {
      state = state * 1664525 + 1013904223;
      token = llama_token((state >> 8) % uint32_t(vocabulary));
    }
  };
  // One fills the cache, the other gets a copy.
  for (int at = 0; at < depth; at += prompt) {
    draw();
    sides[1].decode(batch, std::min(prompt, depth - at));
  }
  if (depth > 0) {
    std::vector<uint8_t> cache(llama_state_seq_get_size(sides[1].context, 0));
    llama_state_seq_get_data(sides[1].context, cache.data(), cache.size(), 0);
    if (llama_state_seq_set_data(sides[0].context, cache.data(), cache.size(), 0) == 0)
      fail("the cache was not copied");
  }
  // Round -1 warms up.
  for (int round = -1; round < rounds; ++round) {
    for (int n = 0; n < 2; ++n) {
      Side& side = sides[n];
      const int64_t before = calls();
      Times ignored;
      draw();
      if (depth == 0) {
        (round < 0 ? ignored : side.token_time).add(tokens, [&] {
          for (int t = 0; t < tokens; ++t) side.decode(batch, 1);
        });
        side.forget(0);
      }
      // Long rounds need no warming.
      if (round >= 0 || depth == 0)
        (round < 0 ? ignored : side.prompt_time).add(1, [&] { side.decode(batch, prompt); });
      if (depth > 0) {
        (round < 0 ? ignored : side.token_time).add(tokens, [&] {
          for (int t = 0; t < tokens; ++t) side.decode(batch, 1);
        });
      }
      side.forget(depth);
      if ((calls() > before) != (n == 1)) fail("the wrong side computed attention");
    }
  }
  std::printf("{\"type\": \"%s\", \"threads\": %d, \"depth\": %d,\n", argument[3], threads, depth);
  for (int n = 0; n < 2; ++n) {
    std::printf(" \"%s\": {", n ? "libattn" : "ggml");
    sides[n].prompt_time.print("prompt_512");
    std::printf(",\n  ");
    sides[n].token_time.print("token");
    std::printf(n ? "}}\n" : "},\n");
  }
  for (Side& side : sides) llama_free(side.context);
  ggml_threadpool_free(pool);
  llama_model_free(model);
}
