// attn run: IN's attention on one backend.
#include <cmath>
#include <cstdio>
#include <iostream>

#include "attn/forward.h"
#include "core/dtype.h"
#include "core/status.h"

namespace attn::tools {
namespace {

struct RunOptions {
  std::string in, out, window, out_dtype, kernel;
  BackendOptions backend;
  bool causal = false, causal_top_left = false, split_invariant = false, fp8_precise = false;
  bool explain = false, as_json = false;
  double scale = 0, softcap = 0;
  bool has_scale = false;
  int64_t fixed_split = 0;
};

void apply(const RunOptions& options, attn_problem& p) {
  if (options.causal) p.flags |= ATTN_CAUSAL;
  if (options.causal_top_left) p.flags |= ATTN_CAUSAL_TOP_LEFT;
  if (options.split_invariant) p.flags |= ATTN_SPLIT_INVARIANT;
  if (options.fp8_precise) p.flags |= ATTN_FP8_PRECISE;
  if (!options.window.empty()) {
    const Window window = parse_window(options.window);
    p.flags |= ATTN_WINDOW;
    p.window_left = window.left;
    p.window_right = window.right;
  }
  // 0 means "unset" in attn_problem, so it cannot be asked for.
  p.scale = static_cast<float>(options.scale);
  if (options.has_scale && (p.scale == 0 || !std::isfinite(p.scale)))
    throw InputError(
        attn::join("--scale is ", options.scale, "; finite values other than 0 are accepted"));
  p.softcap = static_cast<float>(options.softcap);
  p.fixed_split = options.fixed_split;
  p.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
}

void print_explanation(const Json& explanation) {
  if (explanation["kernel"].is_null()) {
    std::printf("no kernel of %s takes this\n", explanation["backend"].get<std::string>().c_str());
  } else {
    std::printf("%s runs\n", explanation["kernel"].get<std::string>().c_str());
  }
  for (const Json& part : explanation.value("parts", Json::array()))
    std::printf("  %s: %s\n", part["kernel"].get<std::string>().c_str(),
                part["computes"].get<std::string>().c_str());
  for (const Json& declined : explanation["declined"])
    std::printf("  not %s: %s\n", declined["kernel"].get<std::string>().c_str(),
                declined["reason"].get<std::string>().c_str());
}

void run(const RunOptions& options) {
  Progress progress;
  progress.say("reading " + options.in);
  const auto input = make_input(need(read_tensors(options.in)));
  attn_problem& p = input->problem;
  apply(options, p);
  const attn_dtype out_dtype = parse_dtype("--out-dtype", options.out_dtype);
  for (const std::string& name : input->unused)
    std::fprintf(stderr, "attn: %s: tensor %s is not used\n", options.in.c_str(),
                 quote(name).c_str());

  const context device = options.backend.open();
  const bool reference = device.backend() == ATTN_BACKEND_REFERENCE;
  if (out_dtype != ATTN_DTYPE_NONE) {
    p.out_type = out_dtype;
  } else if (reference) {
    p.out_type = ATTN_F32;
  } else {
    p.out_type = attn::dtype_is_fp8(p.q_type) ? ATTN_BF16 : p.q_type;
  }

  Json report = options.backend.report(device);
  if (options.explain) {
    report["explain"] = Json::parse(explain(device, p));
    if (!options.as_json) print_explanation(report["explain"]);
  }

  // Tokens of packed q after the last sequence belong to no sequence: as a row that sees no key.
  ForwardResult result = run_forward(device, *input, 0, progress);
  const auto out_shape = result.out.shape, lse_shape = result.lse.shape;
  progress.say("writing " + options.out);
  write_result(options.out, p.out_type, std::move(result.out), std::move(result.lse));
  progress.say("");

  if (options.as_json) {
    report["kernel"] = result.kernel;
    report["workspace"] = result.workspace;
    report["out"] = {{"dtype", attn::dtype_name(p.out_type)}, {"shape", out_shape}};
    report["lse"] = {{"dtype", "f32"}, {"shape", lse_shape}};
    report["plan_us"] = result.plan_us;
    report["run_us"] = result.run_us;
    std::cout << report.dump(2) << "\n";
  } else {
    std::printf("%s: out %s %s in %.1f us, written to %s\n",
                options.backend.ran(result.kernel, device).c_str(), attn::dtype_name(p.out_type),
                shape_text(out_shape).c_str(), result.run_us, options.out.c_str());
  }
}

}  // namespace

void add_run(CLI::App& app, int&) {
  auto* command = app.add_subcommand("run", "Attention of IN's q, k, v; writes out and lse to OUT");
  auto o = std::make_shared<RunOptions>();
  command->footer(input_help);
  command->add_option("IN", o->in)->required();
  command->add_option("OUT", o->out)->required();
  o->backend.add_to(*command);
  auto* causal = command->add_flag("--causal", o->causal, "query i sees key j <= i + Skv - Sq");
  command->add_flag("--causal-top-left", o->causal_top_left, "query i sees key j <= i")
      ->excludes(causal);
  command->add_option("--window", o->window, "keys to the left and right; -1: unbounded")
      ->type_name("L,R");
  auto* scale = command->add_option("--scale", o->scale, "default 1 / sqrt(D)")->type_name("X");
  command->add_option("--softcap", o->softcap, "scores become X * tanh(score / X)")->type_name("X");
  command
      ->add_option("--out-dtype", o->out_dtype,
                   attn::type_names(attn::q_types) +
                       ", on reference also f64; default: "
                       "f32 on reference, else q's type, bf16 for fp8")
      ->type_name("T");
  command->add_option("--fixed-split", o->fixed_split, "keys per split")->type_name("N");
  command->add_flag("--split-invariant", o->split_invariant,
                    "any cut of KV gives the same answer to float32 rounding");
  command->add_flag("--fp8-precise", o->fp8_precise, "fp8 q: weights as sums of two fp8 values");
  command->add_option("--kernel", o->kernel, "demand this kernel")->type_name("NAME");
  command->add_flag("--explain", o->explain, "tell why each other kernel declines");
  add_json(*command, o->as_json);
  command->callback([o, scale] {
    o->has_scale = scale->count() > 0;
    run(*o);
  });
}

}  // namespace attn::tools
