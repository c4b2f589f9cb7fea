#include "kernels/backward.h"

#include <algorithm>

#include "core/dtype.h"
#include "kernels/kv_args.h"

namespace attn {
namespace {

int64_t sink_parts(const Problem& p) {
  return p.batch * backward_rows(p).tiles_of_sequence();
}

void patch(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
           attn_backward_prepare_kernarg& a) {
  a.out = args.of.out;
  a.d_out = args.d_out;
  a.lse = args.of.lse;
  a.d_lse = args.d_lse;
  a.sinks = args.of.sinks;
  a.cu_seqlens_q = args.of.cu_seqlens_q;
  patch_gradients(b, args, &a.dq, &a.dk, &a.dv);
  patch_lengths(args.of.segment[0], &a.kv);
  rebase(workspace, a.lse2, a.delta, a.clear);
  if (b.wants(ATTN_GRAD_SINKS)) rebase(workspace, a.sink_parts);
}

void patch_sinks(const BackwardProblem&, const BackwardArgs& args, void* workspace,
                 attn_backward_sinks_kernarg& a) {
  a.d_sinks = args.d_sinks;
  rebase(workspace, a.parts);
}

}  // namespace

BackwardRows backward_rows(const Problem& p) {
  return {p.q_layout == ATTN_PACKED, int(p.batch), int(p.seqlen_q), p.total_q};
}

Status check_device_gradients(const BackwardProblem& b) {
  if (b.d_out_type != b.of.q_type)
    return unsupported("d_out_type is ", dtype_name(b.d_out_type), "; accepted: q's type, ",
                       dtype_name(b.of.q_type));
  return {};
}

attn_gradient_array gradient_array(const BackwardProblem& b, attn_gradient which) {
  attn_gradient_array g{};
  const bool q = which == ATTN_GRAD_Q, k = which == ATTN_GRAD_K;
  set(g.stride, q ? b.dq_stride : k ? b.dk_stride : b.dv_stride);
  g.type = q ? b.dq_type : k ? b.dk_type : b.dv_type;
  g.add = b.adds(which);
  return g;
}

BackwardSpace backward_space(const BackwardProblem& b, size_t clear_bytes) {
  const Problem& p = b.of;
  const size_t rows = aligned_bytes(size_t(p.heads_q * backward_rows(p).tiles()) *
                                    attn_backward_tile * sizeof(float));
  BackwardSpace space{};
  space.delta = space.lse2 + rows;
  space.sink_parts = space.delta + rows;
  space.bias_parts = space.sink_parts;
  if (b.wants(ATTN_GRAD_SINKS))
    space.bias_parts += aligned_bytes(size_t(p.heads_q * sink_parts(p)) * sizeof(float));
  space.clear = space.bias_parts + aligned_bytes(bias_parts_bytes(b));
  space.end = space.clear + aligned_bytes(clear_bytes);
  return space;
}

Status add_prepare_steps(const BackwardProblem& b, const DeviceInfo& device,
                         const BackwardSpace& space, size_t clear_bytes, Recipe* recipe) {
  const Problem& p = b.of;
  const BackwardRows rows = backward_rows(p);
  const int64_t pairs = p.batch * p.heads_q, tiles = rows.tiles_of_sequence();
  if (pairs > max_grid || pairs * tiles > max_grid)
    return unsupported("batch * heads_q * ceil(seqlen_q / ", int(attn_backward_tile), ") is ",
                       pairs, " * ", tiles, "; accepted: up to ", max_grid);
  attn_backward_prepare_kernarg a{};
  a.dq = gradient_array(b, ATTN_GRAD_Q);
  a.dk = gradient_array(b, ATTN_GRAD_K);
  a.dv = gradient_array(b, ATTN_GRAD_V);
  set(a.out_stride, p.out_stride);
  set(a.d_out_stride, b.d_out_stride);
  a.lse2 = offset_of<float>(space.lse2);
  a.delta = offset_of<float>(space.delta);
  a.sink_parts = offset_of<float>(b.wants(ATTN_GRAD_SINKS) ? space.sink_parts : 0);
  a.clear = offset_of<unsigned>(space.clear);
  a.clear_words = int64_t(clear_bytes / sizeof(unsigned));
  a.rows = rows;
  a.kv = kv_lengths(b.kv());
  a.mask = p.range_mask();
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.heads_kv = int(p.heads_kv);
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.out_type = p.out_type;
  a.d_out_type = b.d_out_type;
  // Blocks without queries have rows of no sequence and words to clear.
  recipe->steps.push_back({
      .image = backward_prepare_image,
      .static_shared_bytes = 64,
      .launch = {.grid = {uint32_t(std::max<int64_t>(1, pairs * tiles)), 1, 1},
                 .block = {attn_backward_threads, 1, 1}},
      .arguments = arguments_of<patch>(a),
  });
  if (b.wants(ATTN_GRAD_SINKS)) {
    attn_backward_sinks_kernarg sinks{};
    sinks.parts = offset_of<float>(space.sink_parts);
    sinks.num_parts = sink_parts(p);
    sinks.add = b.adds(ATTN_GRAD_SINKS);
    recipe->steps.push_back({
        .image = backward_sinks_image,
        .static_shared_bytes = sizeof(double) * attn_backward_threads,
        .launch = {.grid = {uint32_t(p.heads_q), 1, 1}, .block = {attn_backward_threads, 1, 1}},
        .arguments = arguments_of<patch_sinks>(sinks),
    });
  }
  return b.wants(ATTN_GRAD_BIAS) ? add_bias_steps(b, device, space, recipe) : Status{};
}

}  // namespace attn
