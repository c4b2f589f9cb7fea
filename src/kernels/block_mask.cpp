// The kernel mask_cuda.
#include <algorithm>

#include "kernels/families.h"
#include "kernels/kernarg.h"
#include "kernels/shared/mask_args.h"
#include "masks/device_mask.h"

namespace attn {
namespace {

void patch(const MaskProblem&, const MaskArgs& args, void* memory, attn_mask_kernarg& a) {
  a.dense = args.dense;
  a.intervals = args.intervals;
  a.num_intervals = args.num_intervals;
  rebase(memory, a.kinds, a.index, a.bits, a.table, a.partials);
}

attn_mask_kernarg constants(const MaskShape& shape, const DeviceMask& at) {
  attn_mask_kernarg a{};
  a.seqlen_q = int(shape.seqlen_q);
  a.seqlen_kv = int(shape.seqlen_kv);
  a.block_q = shape.block_q;
  a.block_k = shape.block_k;
  a.rows = int(shape.rows());
  a.columns = int(shape.columns());
  a.cells = unsigned(shape.cells());
  a.kinds = offset_of<unsigned char>(at.kinds);
  a.index = offset_of<int>(at.index);
  a.bits = offset_of<unsigned>(at.bits);
  a.table_size = at.table_size;
  a.partials = offset_of<int>(at.partials);
  return a;
}

Status make_recipe(const MaskProblem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr int64_t most_cells = (int64_t{1} << 31) - 1;
  const int64_t cells = p.shape.cells();
  if (cells > most_cells)
    return unsupported("batch * heads * rows * columns of blocks is ", cells, "; accepted: up to ",
                       most_cells);
  // Blocks go on to further work.
  const int64_t blocks = std::min(cells, int64_t{attn_mask_blocks} * device.multiprocessors);
  const DeviceMask at = device_mask(p.shape);
  recipe->workspace = at.workspace;
  recipe->steps.push_back({
      .image = "mask_cuda",
      .static_shared_bytes = attn_mask_shared_bytes,
      .launch = {.grid = {uint32_t(blocks), 1, 1}, .block = {attn_mask_threads, 1, 1}},
      .arguments = arguments_of<patch>(constants(p.shape, at)),
  });
  return {};
}

constexpr Kernel row = {.name = "mask_cuda",
                        .op = Op::block_mask,
                        .backend = ATTN_BACKEND_CUDA,
                        .recipe = recipe_of<make_recipe>};

}  // namespace

std::span<const Kernel> block_mask_rows() {
  return {&row, 1};
}

}  // namespace attn
