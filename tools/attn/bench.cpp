// attn bench: times attn_run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "api/handles.h"
#include "attn/bench_case.h"
#include "attn/ceilings.h"
#include "attn/clocks.h"
#include "attn/report.h"
#include "attn/timing.h"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "cpu/pool.h"

namespace attn::tools {
namespace {

struct BenchOptions {
  BackendOptions backend;
  std::string dtype, kv_dtype, out_dtype, kernel;
  Case shape;
  int repeats = 20;
  bool no_ceilings = false;
  bool launches = false;
  bool as_json = false;
  std::string report;
  std::vector<std::string> from;
};

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

// What a plan and a run cost besides the work: a problem of one query and one key, of prefix_*
// two sequences that share a key.
Overhead measure_overhead(const context& device, CaseTypes types, const std::string& kernel) {
  Case tiny{.heads = 1, .seqlen_q = 1, .head_dim = 64};
  const Kernel* row = find_kernel(kernel.c_str());
  if (row && row->composed == Composed::prefix) tiny.batch = 2, tiny.shared_keys = 1;
  const Ready ready(device, tiny, {types.q}, kernel);
  std::vector<double> plans, runs;
  for (int i = 0; i < 300; ++i) {
    const double start = seconds_now();
    const plan made(device, ready.problem());
    plans.push_back(seconds_now() - start);
  }
  for (int i = 0; i < 3000; ++i) {
    const double start = seconds_now();
    need_ok(ready.run());
    runs.push_back(seconds_now() - start);
    if (i % 100 == 99) device.synchronize();
  }
  device.synchronize();
  return {median(plans) * 1e6, median(runs) * 1e6};
}

// "71.3 %", or nothing where there is no ceiling.
std::string percent(double rate, double ceiling) {
  char text[16] = "";
  if (ceiling > 0) std::snprintf(text, sizeof text, "%.1f %%", rate / ceiling * 100);
  return text;
}
Json share(double rate, double ceiling) {
  return ceiling > 0 ? Json(rate / ceiling) : Json();
}

Json case_json(const Case& c, const Ready& ready, const Timing& timing) {
  const attn_problem& p = ready.problem();
  return {{"batch", p.batch},
          {"heads", p.heads_q},
          {"heads_kv", p.heads_kv},
          {"seqlen_q", p.seqlen_q},
          {"seqlen_kv", p.segments[p.num_segments - 1].seqlen},
          {"shared_keys", c.shared_keys},
          {"head_dim", p.head_dim},
          {"causal", c.causal},
          {"window", c.window.empty() ? Json() : Json(c.window)},
          {"kernel", ready.kernel()},
          {"median_us", timing.median_us},
          {"min_us", timing.min_us},
          {"repeats", timing.repeats},
          {"tflops", ready.operations() / timing.median_us / 1e6},
          {"gbytes_per_s", ready.bytes() / timing.median_us / 1e3}};
}

class Bench {
 public:
  Bench(const BenchOptions& options, std::vector<Case> shapes);
  Json run();

 private:
  bool emulated() const { return device_.backend() == ATTN_BACKEND_HIP_EMU; }
  Json on_host();
  Json on_device(Driver& driver);
  // A line of the table, under the head of its columns where it is the first.
  void line(const Ready& ready, const char* head, const std::string& columns);

  const BenchOptions& options_;
  const context device_;
  std::vector<Case> cases_;
  CaseTypes types_;
  Progress progress_;
  int lines_ = 0;
};

Bench::Bench(const BenchOptions& options, std::vector<Case> shapes)
    : options_(options), device_(options.backend.open()), cases_(std::move(shapes)) {
  if (cases_.empty()) cases_ = default_cases(device_.backend());
  types_.kv = parse_dtype("--kv-dtype", options.kv_dtype);
  types_.out = parse_dtype("--out-dtype", options.out_dtype);
  types_.q = parse_dtype("--dtype", options.dtype);
  if (types_.q == ATTN_DTYPE_NONE) types_.q = device_.get()->context->driver ? ATTN_F16 : ATTN_F32;
}

void Bench::line(const Ready& ready, const char* head, const std::string& columns) {
  progress_.say("");
  if (options_.as_json) return;
  if (lines_++ == 0)
    std::printf("%s, %s\n%-40s %-22s %s\n", attn_backend_string(device_.backend()),
                attn::dtype_name(types_.q), "shape", "kernel", head);
  std::printf("%-40s %-22s %s\n", ready.describe().c_str(), ready.kernel().c_str(),
              columns.c_str());
  std::fflush(stdout);
}

Json Bench::on_host() {
  Json rows = Json::array();
  double ceiling = 0;
  std::string ceiling_of;
  for (const Case& c : cases_) {
    progress_.say("preparing");
    const Ready ready(device_, c, types_, options_.kernel);
    progress_.say("timing " + ready.describe(), rows.size(), cases_.size());
    const Timing timing = time_on_host([&] { need_ok(ready.run()); },
                                       [&] { device_.synchronize(); }, options_.repeats);
    if (ceiling_of != ready.kernel()) ceiling = fma_rate(ready.kernel(), options_.backend.threads);
    ceiling_of = ready.kernel();
    Json row = case_json(c, ready, timing);
    const double tflops = row["tflops"], gbytes = row["gbytes_per_s"];
    row["fma_share"] = share(tflops * 1e12, ceiling);
    rows.push_back(row);
    char text[96];
    std::snprintf(text, sizeof text, "%12.1f %9.3f %9.2f %7s", timing.median_us, tflops, gbytes,
                  percent(tflops * 1e12, ceiling).c_str());
    line(ready, "          us   TFLOP/s      GB/s  of FMA", text);
  }
  Json report = {{"cases", rows}};
  report["fma_tflops"] = ceiling > 0 ? Json(ceiling / 1e12) : Json();
  if (ceiling > 0 && !options_.as_json)
    std::printf("multiply-adds on registers, float32: %.3f TFLOP/s\n", ceiling / 1e12);
  return report;
}

Json Bench::on_device(Driver& driver) {
  const DeviceInfo& info = driver.device();
  Json report = {{"device",
                  {{"name", info.name},
                   {"arch", info.arch},
                   {"multiprocessors", info.multiprocessors},
                   {"l2_bytes", info.l2_bytes},
                   {"driver_api", info.driver_version}}}};
  std::unique_ptr<Clocks> clocks;
  const attn::Status watched = Clocks::open(info.pci, &clocks);
  Json seen;
  const auto look = [&](const char* when) {
    ClockSample sample;
    if (clocks && clocks->read(&sample).ok()) seen[when] = to_json(sample);
  };
  if (clocks)
    seen["driver"] = clocks->driver();
  else
    seen["missing"] = watched.text;
  look("before");

  Ceilings ceilings;
  if (options_.no_ceilings) {
    ceilings.matmul.detail = ceilings.copy.detail = ceilings.read.detail = "--no-ceilings";
  } else {
    progress_.say("measuring ceilings");
    ceilings =
        measure_ceilings(driver, types_.q == ATTN_BF16 ? ATTN_BF16 : ATTN_F16, options_.repeats);
  }
  // A matrix unit is twice as fast on 8-bit inputs, which this ceiling does not measure.
  const double matmul = attn::dtype_is_fp8(types_.q) ? 0 : ceilings.matmul.rate;

  DeviceTimer timer(driver);
  const int64_t l2 = info.l2_bytes > 0 ? info.l2_bytes : int64_t{256} << 20;
  Json rows = Json::array();
  for (const Case& c : cases_) {
    progress_.say("preparing");
    // The emulator has no cache that inputs should not stay in.
    Ready ready(device_, c, types_, options_.kernel, emulated() ? 0 : 2 * l2);
    progress_.say("timing " + ready.describe(), rows.size(), cases_.size());
    const DeviceTimer::LaunchSet launch = [&](int set, void* stream) {
      return ready.run(set, stream);
    };
    ClockWatch watch(clocks.get());
    const Timing cold = timer.time(launch, ready.sets(), options_.repeats);
    const Timing warm = timer.time(launch, 1, options_.repeats);
    Json row = case_json(c, ready, cold);
    const double tflops = row["tflops"], gbytes = row["gbytes_per_s"];
    row["graph_launches"] = cold.graph;
    row["input_sets"] = ready.sets();
    row["warm_us"] = warm.median_us;
    row["warm_min_us"] = warm.min_us;
    row["matmul_share"] = share(tflops * 1e12, matmul);
    row["read_share"] = share(gbytes * 1e9, ceilings.read.rate);
    row["clocks"] = watch.stop();
    char state[32] = "";
    if (!row["clocks"].is_null())
      std::snprintf(state, sizeof state, "%.0f MHz %.0f W", row["clocks"]["sm_mhz"].get<double>(),
                    row["clocks"]["watts"].get<double>());
    if (options_.launches) {
      row["launches"] = Json::array();
      for (size_t i = 0; const std::string& name : ready.launches()) {
        ready.only(i++);
        const Timing alone = timer.time(launch, 1, options_.repeats);
        row["launches"].push_back({{"kernel", name}, {"warm_us", alone.median_us}});
      }
    }
    const Json launches = row.value("launches", Json::array());
    rows.push_back(row);
    char text[160];
    std::snprintf(text, sizeof text, "%10.2f %10.2f %9.2f %8s %9.1f %8s  %s", cold.median_us,
                  warm.median_us, tflops, percent(tflops * 1e12, matmul).c_str(), gbytes,
                  percent(gbytes * 1e9, ceilings.read.rate).c_str(), state);
    line(ready, "   cold us    warm us   TFLOP/s of matmul     GB/s  of read  clock", text);
    for (const Json& l : launches) {
      if (!options_.as_json)
        std::printf("  %-61s %21.2f\n", l["kernel"].get<std::string>().c_str(),
                    l["warm_us"].get<double>());
    }
  }
  look("after");
  report["clocks"] = seen;
  report["ceilings"] = ceilings.json();
  report["cases"] = rows;
  if (!options_.as_json && !options_.no_ceilings) {
    const auto say = [](const char* what, const Ceiling& ceiling, double scale, const char* unit) {
      if (ceiling.rate > 0)
        std::printf("%s: %.1f %s, %s\n", what, ceiling.rate / scale, unit, ceiling.detail.c_str());
      else
        std::printf("%s: not measured: %s\n", what, ceiling.detail.c_str());
    };
    say("matmul", ceilings.matmul, 1e12, "TFLOP/s");
    say("copy, read plus written", ceilings.copy, 1e9, "GB/s");
    say("read", ceilings.read, 1e9, "GB/s");
  }
  if (!options_.as_json && !clocks) std::printf("clocks: not measured: %s\n", watched.text.c_str());
  return report;
}

Json Bench::run() {
  const std::shared_ptr<Driver>& driver = device_.get()->context->driver;
  Json report = {{"backend", attn_backend_string(device_.backend())},
                 {"dtype", attn::dtype_name(types_.q)}};
  report.update(driver ? on_device(*driver) : on_host());
  if (emulated()) report["emulated"] = true;
  Overhead overhead;
  if (!emulated()) {  // whose launches last as long as what they execute
    progress_.say("measuring plan and run on one query and one key");
    overhead = measure_overhead(device_, types_, options_.kernel);
    progress_.say("");
    report["plan_us"] = overhead.plan_us;
    report["run_overhead_us"] = overhead.run_us;
  }
  if (options_.as_json)
    std::cout << report.dump(2) << "\n";
  else if (!emulated())
    std::printf("one query and one key: plan %.2f us, run %.2f us\n", overhead.plan_us,
                overhead.run_us);
  return report;
}

// What --from names, or a run of its own.
void bench(const BenchOptions& options, const std::vector<Case>& shapes) {
  std::vector<MeasuredRun> runs;
  for (const std::string& path : options.from) runs.push_back(read_run(path));
  if (runs.empty()) runs.push_back({"this run", Bench(options, shapes).run()});
  if (!options.report.empty()) write_report(options.report, runs);
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
      command
          ->add_option("--shared-keys", c.shared_keys,
                       "keys of a prefix that the batch shares, before those of seqlen-kv")
          ->check(size)
          ->type_name("N"),
      command->add_option("--head-dim", c.head_dim)->check(size)->type_name("N"),
      command->add_flag("--causal", c.causal),
      command->add_option("--window", c.window)->type_name("L,R"),
  };
  command->add_option("--repeats", o->repeats, "timings of which the median counts")
      ->type_name("N");
  command->add_flag("--no-ceilings", o->no_ceilings,
                    "GPU: do not measure matmul, copy and read in the same run");
  command->add_flag("--launches", o->launches,
                    "GPU: also time each launch of a run alone, with its inputs in L2");
  command->add_option("--report", o->report, "write one HTML page that draws the run")
      ->type_name("FILE");
  command
      ->add_option("--from", o->from,
                   "draw these runs' JSON instead of timing; of bench/ and attn-fp8-stress too")
      ->needs("--report")
      ->type_name("JSON");
  add_json(*command, o->as_json);
  command->callback([o, shape] {
    if (o->repeats < 1) throw InputError("--repeats is below 1; 1 or more is accepted");
    const bool one_shape = std::any_of(
        shape.begin(), shape.end(), [](const CLI::Option* option) { return option->count() > 0; });
    bench(*o, one_shape ? std::vector<Case>{o->shape} : std::vector<Case>{});
  });
}

}  // namespace attn::tools
