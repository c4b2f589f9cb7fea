// The block mask of a file.
#pragma once

#include "attn/io.h"

namespace attn::tools {

struct FileMask {
  int64_t batch = 1, heads = 1, rows = 0, columns = 0;  // the grid
  int32_t block_q = 0, block_k = 0;
  int64_t partials = 0;
  Tensor kinds;  // u8, the grid
  Tensor index;  // i32, the grid
  Tensor bits;   // u32 [partials, block_q, ceil(block_k / 32)]

  uint8_t kind(int64_t b, int64_t h, int64_t row, int64_t column) const;
  // Whether the element (i, j) of partial block `n` is set.
  bool bit(int64_t n, int64_t i, int64_t j) const;
  int64_t cell(int64_t b, int64_t h, int64_t row, int64_t column) const {
    return ((b * heads + h) * rows + row) * columns + column;
  }
};

// Reads block_kinds, block_size, block_index, block_bits and checks that kinds are 0..3 and that
// every partial block has bits. The file must have block_kinds.
FileMask read_mask(const TensorFile& file);

}  // namespace attn::tools
