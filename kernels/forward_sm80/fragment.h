// Where mma.sync leaves the elements of a 16 x 8 tile: register 2 * half + i of a
// lane.
#pragma once

namespace attn::sm80 {

__device__ __forceinline__ int fragment_row(int half, int lane) {
  return 8 * half + lane / 4;
}
__device__ __forceinline__ int fragment_column(int i, int lane) {
  return lane % 4 * 2 + i;
}

}  // namespace attn::sm80
