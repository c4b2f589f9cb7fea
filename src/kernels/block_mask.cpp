// The host side of kernels/sm80/mask_sm80.cu.
#include "kernels/block_mask.h"

#include <algorithm>
#include <bit>

#include "kernels/kernarg.h"
#include "kernels/shared/mask_args.h"

namespace attn {
namespace {

unsigned table_size(const MaskShape& shape) {
  return unsigned(std::bit_ceil(uint64_t(shape.cells()) * 2));
}

}  // namespace

DeviceMask device_mask(const MaskShape& shape) {
  const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  const size_t cells = size_t(shape.cells());
  DeviceMask m;
  m.table = 0;
  m.partials = 8 * size_t{table_size(shape)};
  m.cleared = m.partials + 4;
  m.kinds = aligned(m.cleared);
  m.index = aligned(m.kinds + cells);
  m.bits = aligned(m.index + 4 * cells);
  m.bytes = m.bits + 4 * cells * size_t(shape.block_words());
  return m;
}

Status build_mask(Context& context, const MaskShape& shape, const MaskSource& source, void* memory,
                  void* stream) {
  const Kernel* kernel = nullptr;
  for (const Kernel& row : catalog())
    if (row.op == Op::block_mask && row.backend == context.backend) kernel = &row;
  if (!kernel)
    return unsupported("block mask from arrays: no kernel of backend ",
                       attn_backend_string(context.backend), " yet");
  if (const std::string reason = context.without_code(*kernel); !reason.empty())
    return unsupported(reason, " (", kernel->name, ")");
  constexpr int64_t most_cells = (int64_t{1} << 31) - 1;
  if (shape.cells() > most_cells)
    return unsupported("block mask: batch * heads * rows * columns of blocks is ", shape.cells(),
                       "; accepted: up to ", most_cells);
  Launch launch;
  ATTN_TRY(context.function(*kernel, 0, &launch.function));
  const DeviceMask at = device_mask(shape);
  auto* base = static_cast<unsigned char*>(memory);
  attn_mask_kernarg a{};
  a.dense = source.dense;
  a.intervals = source.intervals;
  a.num_intervals = source.num_intervals;
  a.seqlen_q = int(shape.seqlen_q);
  a.seqlen_kv = int(shape.seqlen_kv);
  a.block_q = shape.block_q;
  a.block_k = shape.block_k;
  a.rows = int(shape.rows());
  a.columns = int(shape.columns());
  a.cells = unsigned(shape.cells());
  a.kinds = base + at.kinds;
  a.index = reinterpret_cast<int*>(base + at.index);
  a.bits = reinterpret_cast<unsigned*>(base + at.bits);
  a.table = reinterpret_cast<unsigned long long*>(base + at.table);
  a.table_size = table_size(shape);
  a.partials = reinterpret_cast<int*>(base + at.partials);
  const int64_t blocks = int64_t{attn_mask_blocks} * context.driver->device().multiprocessors;
  launch.grid[0] = uint32_t(std::min(shape.cells(), blocks));  // they go on to further work
  launch.block[0] = attn_mask_threads;
  launch.kernarg = &a;
  launch.kernarg_bytes = sizeof a;
  ATTN_TRY(context.driver->fill(memory, 0, at.cleared, stream));
  ATTN_TRY(context.driver->launch(launch, stream));
  count_launch(*kernel);
  return {};
}

const DeviceKernel mask_sm80_kernel = {.kernarg_bytes = sizeof(attn_mask_kernarg)};

}  // namespace attn
