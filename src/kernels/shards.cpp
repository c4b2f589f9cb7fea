// The kernel shards_cuda: attention over segments that have ready words or say where their keys
// are, and attention whose result is added to an earlier one, composed of other kernels
// (plan/shards.h). What it takes here is what
// the composition allows; its parts decide the rest.
#include "kernels/shards.h"

#include "kernels/families.h"
#include "kernels/kernarg.h"
#include "kernels/limits.h"
#include "kernels/merge/shards_args.h"

namespace attn {
namespace {

constinit const Kernel rows[] = {
    {.name = "shards_cuda",
     .op = Op::forward,
     .backend = ATTN_BACKEND_CUDA,
     .limits = {.in_types = q_types,
                .kv_types = kv_types,
                .out_types = q_types,
                .flags = forward_flags | ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_OUT_SCALE |
                         ATTN_SPLIT_INVARIANT | ATTN_BIAS_SLOPES | ATTN_FP8_PRECISE |
                         ATTN_QUERY_POSITIONS | ATTN_ACCUMULATE,
                .features = feature_all & ~feature_slots},
     .first_images = {wait_image, accumulate_image},
     .composed = Composed::shards},
};

void patch_wait(const Problem& p, const Args& args, void*, attn_wait_kernarg& a) {
  int words = 0;
  for (int32_t i = a.first_segment; words < a.count; ++i)
    if (p.segment[i].has_ready) a.ready[words++] = args.segment[i].ready;
}

void patch_accumulate(const Problem&, const Args& args, void* workspace,
                      attn_accumulate_kernarg& a) {
  rebase(workspace, a.part, a.part_lse);
  a.out = static_cast<float*>(args.out);
  a.lse = args.lse;
}

}  // namespace

std::vector<Step> wait_steps(const Problem& p, int64_t first, int64_t count) {
  std::vector<Step> steps;
  attn_wait_kernarg a{};
  for (int64_t i = first; i < first + count; ++i) {
    if (p.segment[i].has_ready && a.count++ == 0) a.first_segment = int(i);
    const bool last = i + 1 == first + count;
    if (a.count == 0 || (a.count < attn_wait_most && !last)) continue;
    steps.push_back({.image = wait_image,
                     .launch = {.block = {32, 1, 1}},
                     .arguments = arguments_of<patch_wait>(a)});
    a = {};
  }
  return steps;
}

Step accumulate_step(const Problem& p, const DeviceInfo& device, size_t out, size_t lse) {
  const bool packed = p.q_layout == ATTN_PACKED;
  attn_accumulate_kernarg a{};
  a.part = offset_of<const float>(out);
  a.part_lse = offset_of<const float>(lse);
  set(a.out_stride, p.out_stride);
  a.heads = int(p.heads_q);
  a.seqlen_q = int(packed ? p.total_q : p.seqlen_q);
  a.rows = (packed ? 1 : p.batch) * p.heads_q * a.seqlen_q;
  a.head_dim = int(p.head_dim_v);
  a.fours = (p.head_dim_v | p.out_stride.batch | p.out_stride.seq | p.out_stride.head) % 4 == 0;
  return {.image = accumulate_image,
          .launch = {.grid = {uint32_t(ceil_div(a.rows, int64_t{attn_accumulate_warps})), 1, 1},
                     .block = {32 * attn_accumulate_warps, 1, 1},
                     .starts_early = device.arch == "sm_90"},
          .arguments = arguments_of<patch_accumulate>(a)};
}

std::span<const Kernel> shards_rows() {
  return rows;
}

}  // namespace attn
