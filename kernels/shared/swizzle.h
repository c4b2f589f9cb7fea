// The 128-byte swizzle of shared memory.
#pragma once

namespace attn::device {

// 16-byte chunk c of row r is at chunk c ^ (r % 8) of its 128-byte line, so that the eight rows
// that ldmatrix reads at once are in different banks.
template <int pitch>
__device__ __forceinline__ unsigned chunk_offset(int row, int chunk) {
  return row * pitch + chunk / 8 * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

}  // namespace attn::device
