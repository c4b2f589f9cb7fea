// A launch of device code, as every driver takes it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace attn {

using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;

// A tensor that CUDA's copy engine reads box by box into shared memory, with the swizzle that is as
// wide as a box's row: 32, 64 or 128 bytes. Its address, 16-byte aligned, comes with each launch.
// The first dimension is contiguous.
struct TensorMap {
  int rank;            // 2 to 5
  int element_bytes;   // 1 or 2
  int64_t size[5];     // elements
  int64_t stride[4];   // bytes, of dimensions from 1 on: multiples of 16
  int box[5];          // elements; of dimension 0 at most 128 bytes, 256 elements if not swizzled
  int l2_bytes = 256;  // that L2 reads at once: 64, 128 or 256
  bool swizzled = true;
};
constexpr size_t tensor_map_bytes = 128;

struct Launch {
  Function function = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;  // dynamic
  void* kernarg = nullptr;    // the parameters, laid out as the kernel declares them
  size_t kernarg_bytes = 0;
  // Addresses of the tensor maps with which kernarg, which the launch then writes to, begins as
  // encode() made them.
  std::span<const void* const> map_base = {};
  // cuda: the kernel waits by itself (griddepcontrol) for the work before it in the stream, so its
  // blocks may be placed while that ends.
  bool starts_early = false;
};

inline bool is_empty(const Launch& launch) {
  return launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0;
}

}  // namespace attn
