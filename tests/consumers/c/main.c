/* One query against two keys with scores ln 3 and 0: weights 3/4 and 1/4. */
#include <attn/attn.h>
#include <math.h>
#include <stdio.h>

static int check(attn_status status) {
  if (status != ATTN_OK) {
    fprintf(stderr, "%s: %s\n", attn_status_string(status), attn_last_error());
  }
  return status == ATTN_OK;
}

static int near(const char* name, double value, double expected) {
  const int ok = fabs(value - expected) < 1e-6;
  if (!ok) fprintf(stderr, "%s: %.9g, not %.9g\n", name, value, expected);
  return ok;
}

int main(void) {
  const float q[2] = {1.0986123f, 0};
  const float k[4] = {1, 0, 0, 1};
  const float v[4] = {1, 0, 0, 4};
  float out[2] = {-1, -1}, lse = -1;
  int ok;
  attn_context* context = NULL;
  attn_plan* plan = NULL;
  attn_segment segment = {sizeof segment};
  attn_problem problem = {sizeof problem};
  attn_segment_args segment_args = {sizeof segment_args};
  attn_args args = {sizeof args};

  segment.k_type = segment.v_type = ATTN_F32;
  segment.seqlen = 2;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.head_dim = 2;
  problem.seqlen_q = 1;
  problem.q_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  problem.scale = 1;
  segment_args.k = k;
  segment_args.v = v;
  args.q = q;
  args.out = out;
  args.lse = &lse;
  args.num_segments = 1;
  args.segments = &segment_args;

  if (!check(attn_context_create(ATTN_BACKEND_CPU, NULL, &context)) ||
      !check(attn_plan_create(context, &problem, &plan))) {
    return 1;
  }
  {
    const size_t bytes = attn_plan_workspace(plan);
    void* workspace = NULL;
    if (bytes > 0) {
      if (!check(attn_alloc(context, bytes, &workspace))) return 1;
      if (!check(attn_workspace_init(plan, workspace, bytes, NULL))) return 1;
    }
    if (!check(attn_run(plan, &args, workspace, bytes, NULL))) return 1;
    if (workspace != NULL && !check(attn_free(context, workspace))) return 1;
  }
  ok = attn_launch_count(attn_plan_kernel(plan)) == 1;
  if (!ok) fprintf(stderr, "%s did not run\n", attn_plan_kernel(plan));
  ok &= near("out[0]", out[0], 0.75) & near("out[1]", out[1], 1);
  ok &= near("lse", lse, log(4));
  attn_plan_destroy(plan);
  attn_context_destroy(context);
  if (ok) printf("attn %s: as expected\n", attn_version());
  return !ok;
}
