// One query against two keys with scores ln 3 and 0, weights 3/4 and 1/4; then the call that must
// fail.
#include <attn/attn.hpp>
#include <cmath>
#include <cstdio>
#include <string>

int main() {
  const float q[2] = {std::log(3.0f), 0}, k[4] = {1, 0, 0, 1}, v[4] = {1, 0, 0, 4};
  float out[2] = {NAN, NAN}, lse = NAN;

  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F32;
  segment.seqlen = 2;
  auto problem = attn::make<attn_problem>();
  problem.batch = problem.heads_q = problem.heads_kv = problem.seqlen_q = 1;
  problem.head_dim = 2;
  problem.q_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  problem.scale = 1;
  auto data = attn::make<attn_segment_args>();
  data.k = k;
  data.v = v;
  auto args = attn::make<attn_args>();
  args.q = q;
  args.out = out;
  args.lse = &lse;
  args.num_segments = 1;
  args.segments = &data;

  const attn::context context(ATTN_BACKEND_CPU);
  const attn::plan plan(context, problem);
  plan.run(args, plan.make_workspace(context));
  const bool near = std::abs(out[0] - 0.75) < 1e-6 && std::abs(out[1] - 1) < 1e-6 &&
                    std::abs(lse - std::log(4.0)) < 1e-6;
  std::printf("%s: out %.9g %.9g, lse %.9g\n", plan.kernel(), out[0], out[1], lse);
  const bool ran = attn_launch_count(plan.kernel()) == 1;

  bool refused = false;
  problem.head_dim = -1;
  try {
    const attn::plan bad(context, problem);
  } catch (const attn::error& e) {
    refused = e.status() == ATTN_INVALID_ARGUMENT &&
              std::string(e.what()).find("head_dim") != std::string::npos;
  }
  return near && ran && refused ? 0 : 1;
}
