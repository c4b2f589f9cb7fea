#include "attn/forward.h"

#include <cstring>
#include <limits>

namespace attn::tools {

ForwardResult run_forward(const context& device, Input& input, int unwritten, Progress& progress) {
  const attn_problem& p = input.problem;
  ForwardResult result;
  const double before_plan = seconds_now();
  const plan chosen(device, p);
  result.plan_us = (seconds_now() - before_plan) * 1e6;
  result.kernel = chosen.kernel();
  result.workspace = chosen.workspace();

  const bool packed = p.q_layout == ATTN_PACKED;
  Tensor& out = result.out;
  Tensor& lse = result.lse;
  if (packed) {
    out = make_typed(p.out_type, {p.total_q, p.heads_q, p.head_dim_v});
    lse = make_tensor(Dtype::f32, {p.heads_q, p.total_q});
  } else {
    out = make_typed(p.out_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    lse = make_tensor(Dtype::f32, {p.batch, p.heads_q, p.seqlen_q});
  }
  std::memset(out.data.get(), unwritten, out.bytes);
  std::fill_n(lse.as<float>(), lse.elements(), -std::numeric_limits<float>::infinity());

  progress.say("copying");
  Arrays arrays(device);
  input.stage(arrays);
  input.args.out = arrays.copy_of(out.data.get(), out.bytes);
  input.args.lse = static_cast<float*>(arrays.copy_of(lse.data.get(), lse.bytes));
  chosen.check_args(input.args);
  const buffer workspace = chosen.make_workspace(device);
  device.synchronize();

  progress.say("running " + result.kernel);
  const double before_run = seconds_now();
  chosen.run(input.args, workspace);
  device.synchronize();
  result.run_us = (seconds_now() - before_run) * 1e6;

  copy_out(device, out.data.get(), input.args.out, out.bytes);
  copy_out(device, lse.data.get(), input.args.lse, lse.bytes);
  return result;
}

}  // namespace attn::tools
