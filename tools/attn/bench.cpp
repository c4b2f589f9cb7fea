// attn bench: times attn_run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "attn/io.h"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "cpu/host_kernel.h"
#include "cpu/pool.h"

namespace attn::tools {
namespace {

struct Case {
  int64_t batch = 1, heads = 8, heads_kv = 0, seqlen_q = 2048, seqlen_kv = 0, head_dim = 128;
  bool causal = false;
  std::string window{};
};

struct BenchOptions {
  BackendOptions backend;
  std::string dtype, kv_dtype, out_dtype, kernel;
  Case shape;
  int repeats = 20;
  bool as_json = false;
};

struct Timing {
  std::string kernel;
  double run_us = 0, min_us = 0;
  int repeats = 0;
  double flops = 0, bytes = 0;
};

constexpr double kSecondsPerCase = 3;

std::vector<Case> default_cases(attn_backend backend) {
  if (backend == ATTN_BACKEND_REFERENCE)
    return {{.heads = 4, .seqlen_q = 128, .head_dim = 64},
            {.heads = 4, .seqlen_q = 128, .head_dim = 64, .causal = true}};
  if (backend == ATTN_BACKEND_CPU)
    return {{},
            {.causal = true},
            {.heads = 12, .seqlen_q = 512, .head_dim = 32},
            {.batch = 4, .heads = 32, .heads_kv = 8, .seqlen_q = 1, .seqlen_kv = 4096}};
  return {{.batch = 4, .heads = 32, .seqlen_q = 4096},
          {.batch = 4, .heads = 32, .seqlen_q = 4096, .causal = true},
          {.batch = 32, .heads = 32, .heads_kv = 8, .seqlen_q = 1, .seqlen_kv = 8192}};
}

// Values in [-1, 1), the same in every run.
Tensor random_tensor(attn_dtype type, std::vector<int64_t> shape, uint64_t seed) {
  Tensor tensor = make_typed(type, shape);
  const int64_t count = *element_count(shape);
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  const auto next = [&] {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
  };
  if (attn::dtype_is_ggml(type)) {
    float block[32];
    std::byte* to = tensor.data.get();
    for (int64_t i = 0; i < count / 32; ++i, to += attn::dtype_bytes(type)) {
      for (float& x : block) x = next();
      (type == ATTN_Q8_0 ? attn::encode_q8_0 : attn::encode_q4_0)(block, to, true);
    }
    return tensor;
  }
  for (int64_t i = 0; i < count; ++i)
    attn::encode_element(type, tensor.data.get(), i, next(), true);
  return tensor;
}

attn_problem make_problem(const Case& c, attn_segment& segment, attn_dtype type, attn_dtype kv_type,
                          attn_dtype out_type) {
  segment = make<attn_segment>();
  segment.k_type = segment.v_type = kv_type == ATTN_DTYPE_NONE ? type : kv_type;
  segment.seqlen = c.seqlen_kv ? c.seqlen_kv : c.seqlen_q;
  auto p = make<attn_problem>();
  p.batch = c.batch;
  p.heads_q = c.heads;
  p.heads_kv = c.heads_kv ? c.heads_kv : c.heads;
  p.head_dim = p.head_dim_v = c.head_dim;
  p.seqlen_q = c.seqlen_q;
  p.q_type = type;
  p.out_type = out_type;
  p.num_segments = 1;
  p.segments = &segment;
  if (c.causal) p.flags |= ATTN_CAUSAL;
  if (!c.window.empty()) {
    const Window window = parse_window(c.window);
    p.flags |= ATTN_WINDOW;
    p.window_left = window.left;
    p.window_right = window.right;
  }
  return p;
}

// A plan with its data in place.
struct Ready {
  attn_segment segment;
  attn_problem problem;
  plan chosen;
  Arrays arrays;
  attn_args args = make<attn_args>();
  attn_segment_args segment_args = make<attn_segment_args>();
  buffer workspace;
  double bytes = 0;

  Ready(const context& device, const Case& c, attn_dtype type, attn_dtype kv_type,
        attn_dtype out_type, const std::string& kernel)
      : problem(named(make_problem(c, segment, type, kv_type, out_type), kernel)),
        chosen(device, problem),
        arrays(device),
        workspace(chosen.make_workspace(device)) {
    const attn_problem& p = problem;
    const auto put = [&](attn_dtype t, std::vector<int64_t> shape, uint64_t seed) {
      const Tensor tensor = random_tensor(t, std::move(shape), seed);
      bytes += static_cast<double>(tensor.bytes);
      return arrays.copy_of(tensor.data.get(), tensor.bytes);
    };
    args.q = put(type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, 1);
    segment_args.k = put(segment.k_type, {p.batch, segment.seqlen, p.heads_kv, p.head_dim}, 2);
    segment_args.v = put(segment.v_type, {p.batch, segment.seqlen, p.heads_kv, p.head_dim}, 3);
    args.num_segments = 1;
    args.segments = &segment_args;
    const attn_dtype out = p.out_type ? p.out_type : attn::dtype_is_fp8(type) ? ATTN_BF16 : type;
    const int64_t rows = p.batch * p.seqlen_q * p.heads_q;
    const auto out_bytes = static_cast<size_t>(attn::dtype_bytes(out, rows * p.head_dim_v));
    args.out = arrays.room(out_bytes);
    args.lse = static_cast<float*>(arrays.room(static_cast<size_t>(rows) * sizeof(float)));
    bytes += static_cast<double>(out_bytes) + static_cast<double>(rows) * sizeof(float);
  }
  Ready(const Ready&) = delete;

  void run() const { chosen.run(args, workspace); }

 private:
  static attn_problem named(attn_problem p, const std::string& kernel) {
    p.kernel = kernel.empty() ? nullptr : kernel.c_str();
    return p;
  }
};

// Two operations per multiply-add, of both products, over the pairs that the mask leaves.
double operations(const attn_problem& p) {
  const RangeMask mask{(p.flags & ATTN_CAUSAL) != 0, false, (p.flags & ATTN_WINDOW) != 0,
                       p.window_left, p.window_right};
  double pairs = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const KeyRange keys = mask.keys(i, p.seqlen_q, p.segments->seqlen);
    pairs += static_cast<double>(std::max(0ll, keys.end - keys.begin));
  }
  return 2 * pairs * static_cast<double>(p.batch * p.heads_q) *
         static_cast<double>(p.head_dim + p.head_dim_v);
}

Timing time_case(const context& device, const Ready& ready, int repeats) {
  const auto once = [&](int runs) {
    const double start = seconds_now();
    for (int i = 0; i < runs; ++i) ready.run();
    device.synchronize();
    return (seconds_now() - start) / runs;
  };
  once(1);
  // Enough runs between two looks at the clock that reading it and waiting do not count.
  const int runs = static_cast<int>(std::clamp(2e-3 / std::max(once(1), 1e-9), 1.0, 1000.0));
  std::vector<double> seconds;
  const double start = seconds_now();
  while (static_cast<int>(seconds.size()) < repeats &&
         (seconds.size() < 3 || seconds_now() - start < kSecondsPerCase))
    seconds.push_back(once(runs));
  Timing timing;
  timing.kernel = ready.chosen.kernel();
  timing.run_us = median(seconds) * 1e6;
  timing.min_us = *std::min_element(seconds.begin(), seconds.end()) * 1e6;
  timing.repeats = static_cast<int>(seconds.size());
  timing.flops = operations(ready.problem);
  timing.bytes = ready.bytes;
  return timing;
}

// The multiply-adds per second that this machine does on registers; 0 where that is not measured.
double fma_rate(const std::string& kernel, int threads) {
  const Kernel* row = find_kernel(kernel.c_str());
  if (!row || !row->host || !row->host->fma_rate) return 0;
  ThreadPool pool(threads);
  double best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, row->host->fma_rate(pool));
  return best;
}

struct Overhead {
  double plan_us = 0, run_us = 0;
};

// What a plan and a run cost beside the work: a problem of one query and one key.
Overhead measure_overhead(const context& device, attn_dtype type, const std::string& kernel) {
  const Case tiny{.heads = 1, .seqlen_q = 1, .head_dim = 64};
  const Ready ready(device, tiny, type, ATTN_DTYPE_NONE, ATTN_DTYPE_NONE, kernel);
  std::vector<double> plans, runs;
  for (int i = 0; i < 300; ++i) {
    const double start = seconds_now();
    const plan made(device, ready.problem);
    plans.push_back(seconds_now() - start);
  }
  for (int i = 0; i < 3000; ++i) {
    const double start = seconds_now();
    ready.run();
    runs.push_back(seconds_now() - start);
    if (i % 100 == 99) device.synchronize();
  }
  device.synchronize();
  return {median(plans) * 1e6, median(runs) * 1e6};
}

std::string describe(const attn_problem& p) {
  std::string text = "B" + std::to_string(p.batch) + " H" + std::to_string(p.heads_q);
  if (p.heads_kv != p.heads_q) text += "/" + std::to_string(p.heads_kv);
  text += " Sq" + std::to_string(p.seqlen_q) + " Skv" + std::to_string(p.segments->seqlen) + " D" +
          std::to_string(p.head_dim);
  if (p.flags & ATTN_CAUSAL) text += " causal";
  if (p.flags & ATTN_WINDOW)
    text += " window " + std::to_string(p.window_left) + "," + std::to_string(p.window_right);
  return text;
}

void bench(const BenchOptions& options, bool one_shape) {
  if (options.repeats < 1) throw InputError("--repeats is below 1; 1 or more is accepted");
  const attn_dtype given = parse_dtype("--dtype", options.dtype);
  const attn_dtype kv_type = parse_dtype("--kv-dtype", options.kv_dtype);
  const attn_dtype out_type = parse_dtype("--out-dtype", options.out_dtype);
  const context device = options.backend.open();
  const bool host =
      device.backend() == ATTN_BACKEND_CPU || device.backend() == ATTN_BACKEND_REFERENCE;
  const attn_dtype type = given != ATTN_DTYPE_NONE ? given : host ? ATTN_F32 : ATTN_F16;
  const std::vector<Case> cases =
      one_shape ? std::vector<Case>{options.shape} : default_cases(device.backend());

  Progress progress;
  Json rows = Json::array();
  double ceiling = 0;
  std::string ceiling_of;
  for (const Case& c : cases) {
    progress.say("preparing");
    const Ready ready(device, c, type, kv_type, out_type, options.kernel);
    const std::string shape = describe(ready.problem);
    progress.say("timing " + shape);
    const Timing timing = time_case(device, ready, options.repeats);
    if (ceiling_of != timing.kernel) ceiling = fma_rate(timing.kernel, options.backend.threads);
    ceiling_of = timing.kernel;
    progress.say("");
    const double rate = timing.flops / timing.run_us / 1e6, share = rate * 1e12 / ceiling;
    const attn_problem& p = ready.problem;
    Json row = {{"batch", p.batch},
                {"heads", p.heads_q},
                {"heads_kv", p.heads_kv},
                {"seqlen_q", p.seqlen_q},
                {"seqlen_kv", p.segments->seqlen},
                {"head_dim", p.head_dim},
                {"causal", c.causal},
                {"window", c.window.empty() ? Json() : Json(c.window)},
                {"kernel", timing.kernel},
                {"median_us", timing.run_us},
                {"min_us", timing.min_us},
                {"repeats", timing.repeats},
                {"tflops", rate},
                {"gbytes_per_s", timing.bytes / timing.run_us / 1e3}};
    row["fma_share"] = ceiling > 0 ? Json(share) : Json();
    rows.push_back(row);
    if (!options.as_json) {
      if (rows.size() == 1)
        std::printf("%s, %s\n%-40s %-18s %12s %9s %9s %7s\n", attn_backend_string(device.backend()),
                    attn::dtype_name(type), "shape", "kernel", "us", "TFLOP/s", "GB/s", "of FMA");
      char percent[16] = "";
      if (ceiling > 0) std::snprintf(percent, sizeof percent, "%.1f %%", share * 100);
      std::printf("%-40s %-18s %12.1f %9.3f %9.2f %7s\n", shape.c_str(), timing.kernel.c_str(),
                  timing.run_us, rate, timing.bytes / timing.run_us / 1e3, percent);
      std::fflush(stdout);
    }
  }
  progress.say("measuring plan and run on one query and one key");
  const Overhead overhead = measure_overhead(device, type, options.kernel);
  progress.say("");
  if (options.as_json) {
    Json report = {{"backend", attn_backend_string(device.backend())},
                   {"dtype", attn::dtype_name(type)},
                   {"cases", rows},
                   {"plan_us", overhead.plan_us},
                   {"run_overhead_us", overhead.run_us}};
    report["fma_tflops"] = ceiling > 0 ? Json(ceiling / 1e12) : Json();
    std::cout << report.dump(2) << "\n";
    return;
  }
  if (ceiling > 0)
    std::printf("multiply-adds on registers, float32: %.3f TFLOP/s\n", ceiling / 1e12);
  std::printf("one query and one key: plan %.2f us, run %.2f us\n", overhead.plan_us,
              overhead.run_us);
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  auto* command = app.add_subcommand(
      "bench", "Time attention on random data; without shape options a small table");
  auto o = std::make_shared<BenchOptions>();
  o->backend.add_to(*command);
  command->add_option("--dtype", o->dtype, "of q; default f32 on cpu and reference, else f16")
      ->type_name("T");
  command->add_option("--kv-dtype", o->kv_dtype, "of k and v; default as q")->type_name("T");
  command->add_option("--out-dtype", o->out_dtype, "default as q, bf16 for fp8")->type_name("T");
  command->add_option("--kernel", o->kernel, "demand this kernel")->type_name("NAME");
  const auto size = CLI::Range(int64_t{1}, int64_t{1} << 31);
  Case& c = o->shape;
  const std::vector<CLI::Option*> shape = {
      command->add_option("--batch", c.batch)->check(size)->type_name("N"),
      command->add_option("--heads", c.heads)->check(size)->type_name("N"),
      command->add_option("--heads-kv", c.heads_kv, "default: heads")->check(size)->type_name("N"),
      command->add_option("--seqlen-q", c.seqlen_q)->check(size)->type_name("N"),
      command->add_option("--seqlen-kv", c.seqlen_kv, "default: seqlen-q")
          ->check(size)
          ->type_name("N"),
      command->add_option("--head-dim", c.head_dim)->check(size)->type_name("N"),
      command->add_flag("--causal", c.causal),
      command->add_option("--window", c.window)->type_name("L,R"),
  };
  command->add_option("--repeats", o->repeats, "timings of which the median counts")
      ->type_name("N");
  command->add_flag("--json", o->as_json, "print JSON");
  command->callback([o, shape] {
    bench(*o, std::any_of(shape.begin(), shape.end(),
                          [](const CLI::Option* option) { return option->count() > 0; }));
  });
}

}  // namespace attn::tools
