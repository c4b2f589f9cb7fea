// attn-fp8-stress: inputs that break FP8 attention, on every backend that serves FP8.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <set>

#include "attn/forward.h"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "fp8_stress/dump.h"
#include "fp8_stress/self_check.h"
#include "fp8_stress/verdict.h"

using namespace attn::tools;

namespace {

struct Options {
  StressOptions stress;
  BackendOptions backend;
  int64_t choices = 0;
  bool every_backend = true, precise = false, as_json = false, dump = false;
  std::string selection;
};

std::vector<double> decoded(attn_dtype type, const void* data, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  attn::decode_row(type, data, 0, count, values.data());
  return values;
}

// Runs the codes through the C ABI. out that no kernel has written is NaN.
ForwardResult run_on(const attn::context& device, const StressInputs& in, attn_dtype out_type,
                     bool precise, Progress& progress) {
  TensorFile file;
  file.label = "the case";
  const auto add = [&](const char* name, const std::vector<uint8_t>& codes, int64_t seqlen) {
    Tensor tensor = make_typed(in.type, {1, seqlen, in.heads, in.head_dim});
    std::memcpy(tensor.data.get(), codes.data(), codes.size());
    add_typed(file, name, in.type, std::move(tensor));
  };
  add("q", in.q, in.seqlen_q);
  add("k", in.k, in.seqlen_kv);
  add("v", in.v, in.seqlen_kv);
  const auto input = make_input(std::move(file));
  input->problem.out_type = out_type;
  if (precise) input->problem.flags |= ATTN_FP8_PRECISE;
  return run_forward(device, *input, 0xff, progress);
}

// FNUZ where the matrix units know it: those of gfx942, not of gfx950.
attn_dtype type_of(const attn::context& device) {
  if (device.backend() != ATTN_BACKEND_HIP && device.backend() != ATTN_BACKEND_HIP_EMU)
    return ATTN_F8_E4M3FN;
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = ATTN_F8_E4M3FNUZ;
  segment.seqlen = 64;
  attn_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seqlen_q = problem.head_dim = problem.head_dim_v = 64;
  problem.q_type = ATTN_F8_E4M3FNUZ;
  problem.out_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  attn_plan* plan = nullptr;
  const bool taken = attn_plan_create(device.get(), &problem, &plan) == ATTN_OK;
  attn_plan_destroy(plan);
  return taken ? ATTN_F8_E4M3FNUZ : ATTN_F8_E4M3FN;
}

// Whether its P is rounded to fp8: what the test is for. reference and cpu do not count.
bool on_device(attn_backend backend) {
  return backend != ATTN_BACKEND_REFERENCE && backend != ATTN_BACKEND_CPU;
}

class Stress {
 public:
  explicit Stress(const Options& options)
      : options_(options), reference_(ATTN_BACKEND_REFERENCE), pool_(0) {
    for (StressCase& c : stress_cases(options.stress))
      if (selected(c, options.selection)) cases_.push_back(std::move(c));
    if (!cases_.empty()) return;
    std::set<std::string> groups;
    for (const StressCase& c : stress_cases(options.stress))
      groups.insert(c.name.substr(0, c.name.find('/')));
    std::string names;
    for (const std::string& group : groups) names += ' ' + group;
    throw InputError("--case " + quote(options.selection) + " is none of" + names +
                     ", nor one of their cases (see the table)");
  }

  // Every case on one backend; whether all passed.
  bool run(const attn::context& device) {
    const char* backend = attn_backend_string(device.backend());
    Json report = options_.backend.report(device);
    const attn_dtype type = type_of(device);
    report["dtype"] = attn::dtype_name(type);
    report["cases"] = Json::array();
    int failed = 0;
    std::string kernel;
    for (size_t n = 0; n < cases_.size(); ++n) {
      const StressCase& c = cases_[n];
      progress_.say(std::string(backend) + ": " + c.name, n, cases_.size());
      const StressInputs inputs = make_inputs(c, options_.stress, type);
      const ForwardResult result = run_on(device, inputs, ATTN_F32, options_.precise, progress_);
      const attn::Numerics& rule = attn::find_kernel(result.kernel.c_str())->numerics;
      progress_.say(std::string(backend) + ": " + c.name + ", reference", n, cases_.size());
      const ForwardResult exact = run_on(reference_, inputs, ATTN_F64, false, progress_);
      const std::vector<double> truth(exact.out.as<double>(),
                                      exact.out.as<double>() + exact.out.elements());
      progress_.say(std::string(backend) + ": " + c.name + ", model", n, cases_.size());
      const std::vector<double> model = model_output(rule, inputs, ATTN_F32, pool_);
      const std::vector<double> out =
          decoded(ATTN_F32, result.out.data.get(), result.out.elements());
      double max_v = 0;
      for (const double x :
           decoded(inputs.type, inputs.v.data(), static_cast<int64_t>(inputs.v.size())))
        max_v = std::max(max_v, std::abs(x));
      const Verdict verdict = judge(out, truth, model, max_v);
      progress_.say("");

      if (result.kernel != kernel && !options_.as_json)
        print_head(options_.backend.ran(result.kernel, device), inputs.type);
      kernel = result.kernel;
      failed += !verdict.broken.empty();
      if (options_.as_json) {
        report["cases"].push_back(json_of(c, result.kernel, verdict));
      } else {
        print(c, verdict);
        if (options_.dump && (!verdict.broken.empty() || !options_.selection.empty()))
          dump_worst_row(stdout, rule, inputs, result.out, ATTN_F32, truth, model);
        std::fflush(stdout);
      }
    }
    report["passed"] = cases_.size() - static_cast<size_t>(failed);
    report["failed"] = failed;
    report_.push_back(std::move(report));
    if (!options_.as_json) {
      std::printf("%s: %zu cases, %d failed\n", backend, cases_.size(), failed);
      if (!on_device(device.backend()))
        std::printf(
            "%s keeps its weights in floating point of 32 bits or more: no FP8 kernel has "
            "passed by this\n",
            backend);
      std::printf("\n");
    }
    return failed == 0;
  }

  void print_json() const {
    const StressOptions& o = options_.stress;
    const Json all = {{"seed", o.seed},
                      {"seqlen", o.seqlen},
                      {"heads", o.heads},
                      {"head_dim", o.head_dim},
                      {"backends", report_}};
    std::cout << all.dump(2) << "\n";
  }

 private:
  void print_head(const std::string& ran, attn_dtype type) const {
    const StressOptions& o = options_.stress;
    std::printf("%s, %s, B1 H%lld D%lld seed %llu\n", ran.c_str(), attn::dtype_name(type),
                static_cast<long long>(o.heads), static_cast<long long>(o.head_dim),
                static_cast<unsigned long long>(o.seed));
    std::printf("%-32s %6s %6s  %-9s  %-8s  %-8s  %-8s  %4s\n", "case", "Sq", "Skv", "max error",
                "/ max|V|", "rel fro", "/ model", "NaN");
  }

  static void print(const StressCase& c, const Verdict& v) {
    char frobenius[32] = "-";
    if (v.frobenius) std::snprintf(frobenius, sizeof frobenius, "%.5f", *v.frobenius);
    std::printf("%-32s %6lld %6lld  %-9.3g  %-8.5f  %-8s  %-8.3f  %4lld  %s%s\n", c.name.c_str(),
                static_cast<long long>(c.seqlen_q), static_cast<long long>(c.seqlen_kv),
                v.max_error, v.share, frobenius, v.ratio, static_cast<long long>(v.not_finite),
                v.broken.empty() ? "pass" : "FAIL: ", v.broken.c_str());
  }

  static Json json_of(const StressCase& c, const std::string& kernel, const Verdict& v) {
    return {{"case", c.name},
            {"kernel", kernel},
            {"seqlen_q", c.seqlen_q},
            {"seqlen_kv", c.seqlen_kv},
            {"max_error", v.max_error},
            {"share_of_max_v", v.share},
            {"rel_fro", v.frobenius ? Json(*v.frobenius) : Json()},
            {"ratio_to_model", v.ratio},
            {"not_finite", v.not_finite},
            {"pass", v.broken.empty()},
            {"broken", v.broken}};
  }

  const Options& options_;
  const attn::context reference_;
  attn::ThreadPool pool_;
  std::vector<StressCase> cases_;
  Progress progress_;
  Json report_ = Json::array();
};

// Random choices of what the options say, by the model alone; whether it passes and no bug does.
bool check_self(const Options& options) {
  const attn::Kernel& kernel = *attn::find_kernel("fwd_gfx942_fp8_d128");
  constexpr size_t count = std::size(planted_bugs);
  attn::ThreadPool pool(0);
  Progress progress;
  int64_t cases = 0, above = 0, broken = 0, failed[count] = {}, unchanged[count] = {};
  Json wrong = Json::array();
  for (uint64_t n = 0; n < static_cast<uint64_t>(options.choices); ++n) {
    progress.say("random choices", n, static_cast<size_t>(options.choices));
    const StressOptions choice = random_choice(options.stress.seed, n);
    const SelfCheck found = self_check(kernel.numerics, choice, pool);
    cases += found.cases;
    above += found.above;
    broken += static_cast<int64_t>(found.broken.size());
    std::vector<std::string> sentences = found.broken;
    for (size_t b = 0; b < count; ++b) {
      failed[b] += !found.bugs[b].failed.empty();
      unchanged[b] += !found.bugs[b].changes;
      if (found.bugs[b].failed.empty() && found.bugs[b].changes)
        sentences.push_back(std::string(planted_bugs[b].name) + ": passes every case");
    }
    for (const std::string& sentence : sentences)
      wrong.push_back({{"seed", choice.seed},
                       {"seqlen", choice.seqlen},
                       {"heads", choice.heads},
                       {"head_dim", choice.head_dim},
                       {"what", sentence}});
  }
  progress.say("");
  Json bugs = Json::array();
  for (size_t b = 0; b < count; ++b)
    bugs.push_back({{"bug", planted_bugs[b].name},
                    {"fails", failed[b]},
                    {"changes_nothing", unchanged[b]},
                    {"passes", options.choices - failed[b] - unchanged[b]}});
  if (options.as_json) {
    const Json all = {{"seed", options.stress.seed},
                      {"choices", options.choices},
                      {"cases", cases},
                      {"cases_failed", broken},
                      {"cases_above_fixed_bounds", above},
                      {"bugs", bugs},
                      {"wrong", wrong}};
    std::cout << all.dump(2) << "\n";
    return wrong.empty();
  }
  std::printf("the model of %s in the place of a kernel, %lld choices from seed %llu\n",
              kernel.name, static_cast<long long>(options.choices),
              static_cast<unsigned long long>(options.stress.seed));
  std::printf("%-40s %6s %15s %6s\n", "choices in which a planted bug", "fails", "changes nothing",
              "passes");
  for (const Json& bug : bugs)
    std::printf("  %-38s %6lld %15lld %6lld\n", bug["bug"].get<std::string>().c_str(),
                bug["fails"].get<long long>(), bug["changes_nothing"].get<long long>(),
                bug["passes"].get<long long>());
  for (const Json& what : wrong)
    std::printf("FAIL: --seq %lld --heads %lld --dim %lld --seed %llu: %s\n",
                what["seqlen"].get<long long>(), what["heads"].get<long long>(),
                what["head_dim"].get<long long>(), what["seed"].get<unsigned long long>(),
                what["what"].get<std::string>().c_str());
  std::printf("model: %lld cases, %lld failed; %lld above a bound's fixed part\n",
              static_cast<long long>(cases), static_cast<long long>(broken),
              static_cast<long long>(above));
  return wrong.empty();
}

// The backends that are here and have a kernel for FP8, the reference aside.
std::vector<std::string> backends_here() {
  const Json info = Json::parse(attn::info());
  std::vector<std::string> names;
  for (const Json& backend : info["backends"]) {
    const std::string name = backend["name"];
    if (name == "reference" || !backend["available"].get<bool>()) continue;
    for (const Json& kernel : info["kernels"]) {
      const std::string of = kernel["backend"];
      const bool hip = name == "hip-emu" && of == "hip";  // one catalog for both
      if (kernel["op"] != "forward" || (of != name && !hip) || !kernel["in_build"].get<bool>() ||
          !kernel.value("runs_here", true))
        continue;
      const Json& in = kernel["in"];
      if (std::find(in.begin(), in.end(), "f8_e4m3fn") == in.end()) continue;
      names.push_back(name);
      break;
    }
  }
  return names;
}

int stress(Options options) {
  Stress stress(options);
  bool passed = true, counted = false;
  for (const std::string& name :
       options.every_backend ? backends_here() : std::vector{options.backend.backend}) {
    options.backend.backend = name;
    const attn::context device = options.backend.open();
    passed = stress.run(device) && passed;
    counted = counted || on_device(device.backend());
  }
  if (passed && options.every_backend && !counted)
    return fail(ATTN_NO_DEVICE,
                "no backend with an FP8 kernel is here (attn info says why); cpu does not count");
  if (options.as_json) stress.print_json();
  return passed ? exit_done : exit_failed;
}

int run(int argc, char** argv) {
  CLI::App app("Attention on FP8 inputs that break kernels, compared with float64.",
               "attn-fp8-stress");
  app.set_version_flag("--version", attn_version());
  app.footer(
      "Each case passes if every element is finite, the largest error is below 0.5 and 4 % of "
      "max|V|, the relative Frobenius error below 3 % where the output's rms is above 2 % of "
      "max|V|, and largest and rms error are at most 1.25 times those of the float64 model of this "
      "kernel's weights plus 2e-4 of max|V|. Where the model's own figure is beyond one of the "
      "first three bounds, 1.1 times that figure is the bound.\n"
      "Without --backend: every backend that is here and has an FP8 kernel. cpu does not count as "
      "one that passed.\n"
      "Exit codes: 0 all passed; 1 a case failed; 2 bad usage; 3 that backend, or any, is not "
      "here; "
      "4 unsupported or a driver error.");
  Options o;
  o.backend.add_to(app);
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 20);
  app.add_option("--seq", o.stress.seqlen, "queries, and keys where the case does not say (512)")
      ->check(positive)
      ->type_name("N");
  app.add_option("--heads", o.stress.heads, "heads of q, k and v (4)")
      ->check(positive)
      ->type_name("N");
  app.add_option("--dim", o.stress.head_dim, "head_dim (128)")->check(positive)->type_name("N");
  app.add_option("--seed", o.stress.seed, "of the random inputs (1)")->type_name("N");
  app.add_option("--case", o.selection,
                 "one case (\"matrix/row-column-random/4\") or those that begin so (\"sink/10\")")
      ->type_name("NAME");
  app.add_flag("--precise", o.precise, "kernels whose weights are sums of two fp8 values");
  add_json(app, o.as_json);
  app.add_flag("--dump", o.dump,
               "print the worst row of each case that fails, with --case of each: fp8 bits and "
               "decoded values")
      ->excludes("--json");
  auto* self_check =
      app.add_option("--self-check", o.choices,
                     "instead of a backend: on N random choices of seed, lengths, heads and "
                     "head_dim, from --seed, the model passes and each planted bug fails a case")
          ->check(positive)
          ->type_name("N");
  for (const char* other : {"--backend", "--device", "--threads", "--driver", "--kernel-file",
                            "--seq", "--heads", "--dim", "--case", "--dump"})
    self_check->excludes(app.get_option(other));
  if (const auto code = parse_command_line(app, argc, argv)) return *code;
  if (o.choices > 0) return check_self(o) ? exit_done : exit_failed;
  o.every_backend = app.count("--backend") == 0;
  if (o.every_backend)
    for (const char* needs : {"--kernel-file", "--driver", "--device"})
      if (app.count(needs) > 0) throw InputError(std::string(needs) + " needs --backend");
  return stress(o);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("attn-fp8-stress", run, argc, argv);
}
