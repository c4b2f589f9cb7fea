// d_bias on CUDA: the steps of bwd_bias_cuda, before those of a family bwd_*.
#include "kernels/backward.h"
#include "kernels/backward_sm80/bias_args.h"
#include "kernels/kernarg.h"

namespace attn {
namespace {

using bwd_sm80::BiasSums, bwd_sm80::bias_tile;

// As many thread blocks as this keep a device busy. It decides how sums are divided, and so bits:
// it is the same on all devices.
constexpr int64_t enough_blocks = 512;

BiasSums bias_sums(const BackwardProblem& b) {
  const Problem& p = b.of;
  const int64_t sizes[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv};
  BiasSums s{};
  for (int n = 0; n < 4; ++n) {
    const int tiles = int(n < 2 ? sizes[n] : ceil_div(sizes[n], bias_tile));
    const bool sums = b.d_bias_stride[n] == 0;  // also where there is one
    s.extent[n] = sums ? 1 : int(sizes[n]);
    s.kept[n] = sums ? 1 : tiles;
    s.summed[n] = sums ? tiles : 1;
  }
  const int64_t tiles = BiasSums::count(s.kept);
  s.parts = int(std::clamp<int64_t>(enough_blocks / std::max<int64_t>(1, tiles), 1,
                                    std::max<int64_t>(1, BiasSums::count(s.summed))));
  return s;
}

void patch(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
           attn_backward_bias_kernarg& a) {
  patch_sm80_backward(b, args, workspace, &a.of);
  a.d_bias = args.d_bias;
  if (a.sums.parts > 1) rebase(workspace, a.part_sums);
}

}  // namespace

size_t bias_parts_bytes(const BackwardProblem& b) {
  if (!b.wants(ATTN_GRAD_BIAS)) return 0;
  const BiasSums sums = bias_sums(b);
  return sums.parts > 1 ? size_t(sums.parts * BiasSums::count(sums.extent)) * sizeof(float) : 0;
}

Status add_bias_steps(const BackwardProblem& b, const DeviceInfo& device,
                      const BackwardSpace& space, Recipe* recipe) {
  const BiasSums sums = bias_sums(b);
  const int64_t elements = BiasSums::count(sums.extent);
  if (b.of.batch == 0 || b.of.heads_q == 0 || b.of.seqlen_q == 0 || b.of.seqlen_kv == 0) return {};
  const int64_t blocks = BiasSums::count(sums.kept) * sums.parts;
  if (blocks > max_grid)
    return unsupported("d_bias has ", blocks, " tiles of ", bias_tile, " x ", bias_tile,
                       "; accepted: up to ", max_grid);
  attn_backward_bias_kernarg a{};
  a.of = sm80_backward_arguments(b, space, device);
  a.element = b.of.q_type;
  std::copy_n(b.d_bias_stride, 4, a.stride);
  a.type = b.d_bias_type;
  a.add = b.adds(ATTN_GRAD_BIAS);
  a.part_sums = offset_of<float>(space.bias_parts);
  a.sums = sums;
  const auto add_step = [&](int64_t blocks, uint32_t shared_bytes) {
    recipe->steps.push_back({
        .image = backward_bias_image,
        .static_shared_bytes = bwd_sm80::bias_static_shared_bytes,
        .launch = {.grid = {uint32_t(blocks), 1, 1},
                   .block = {bwd_sm80::bias_threads, 1, 1},
                   .shared_bytes = shared_bytes},
        .arguments = arguments_of<patch>(a),
    });
  };
  add_step(blocks, bwd_sm80::bias_shared_bytes);
  if (sums.parts > 1) {
    a.adds_parts = 1;
    add_step(ceil_div(elements, bwd_sm80::bias_threads), 0);
  }
  return {};
}

}  // namespace attn
