#include "attn/mask_io.h"

#include <cstring>

namespace attn::tools {

uint8_t FileMask::kind(int64_t b, int64_t h, int64_t row, int64_t column) const {
  return kinds.as<uint8_t>()[cell(b, h, row, column)];
}

bool FileMask::bit(int64_t n, int64_t i, int64_t j) const {
  const int64_t words = (int64_t{block_k} + 31) / 32;
  return bits.as<uint32_t>()[(n * block_q + i) * words + j / 32] >> (j % 32) & 1;
}

FileMask read_mask(const TensorFile& file) {
  FileMask mask;
  mask.kinds = need_tensor(file, "block_kinds");
  need_shape(file, "block_kinds", mask.kinds, Dtype::u8, {-1, -1, -1, -1},
             "[B or 1, Hq or 1, ceil(Sq / bq), ceil(Skv / bk)]");
  mask.batch = mask.kinds.shape[0];
  mask.heads = mask.kinds.shape[1];
  mask.rows = mask.kinds.shape[2];
  mask.columns = mask.kinds.shape[3];

  const Tensor& size = need_tensor(file, "block_size");
  need_shape(file, "block_size", size, Dtype::i32, {2}, "(bq, bk)");
  mask.block_q = size.as<int32_t>()[0];
  mask.block_k = size.as<int32_t>()[1];
  if (mask.block_q < 1 || mask.block_k < 1)
    throw InputError(file.label + ": block_size is (" + std::to_string(mask.block_q) + ", " +
                     std::to_string(mask.block_k) + "); two sizes from 1 up are expected");

  if (const Tensor* bits = file.find("block_bits")) {
    need_shape(file, "block_bits", *bits, Dtype::boolean, {-1, mask.block_q, mask.block_k},
               "[P, bq, bk]");
    mask.partials = bits->shape[0];
    const int64_t words = (int64_t{mask.block_k} + 31) / 32;
    mask.bits = make_tensor(Dtype::u32, {mask.partials, mask.block_q, words});
    std::memset(mask.bits.data.get(), 0, mask.bits.bytes);
    const uint8_t* from = bits->as<uint8_t>();
    uint32_t* row = mask.bits.as<uint32_t>();
    for (int64_t i = 0; i < mask.partials * mask.block_q; ++i, row += words)
      for (int64_t j = 0; j < mask.block_k; ++j) row[j / 32] |= uint32_t{*from++} << (j % 32);
  }
  if (const Tensor* index = file.find("block_index")) {
    need_shape(file, "block_index", *index, Dtype::i32, mask.kinds.shape,
               "the grid of block_kinds");
    mask.index = *index;
  } else {
    mask.index = make_tensor(Dtype::i32, mask.kinds.shape);
    std::memset(mask.index.data.get(), 0xff, mask.index.bytes);
  }

  for (int64_t n = 0; n < mask.kinds.elements(); ++n) {
    const auto at = [&] {
      return " at block row " + std::to_string(n / mask.columns % mask.rows) + ", column " +
             std::to_string(n % mask.columns) + " is ";
    };
    const int kind = mask.kinds.as<uint8_t>()[n];
    if (kind > ATTN_BLOCK_PARTIAL)
      throw InputError(file.label + ": block_kinds" + at() + std::to_string(kind) +
                       "; EMPTY 0, CAUSAL 1, FULL 2 and PARTIAL 3 are accepted");
    const int32_t index = mask.index.as<int32_t>()[n];
    if (kind != ATTN_BLOCK_PARTIAL || (index >= 0 && index < mask.partials)) continue;
    if (mask.partials == 0)
      throw InputError(file.label + ": block_kinds" + at() +
                       "3 (PARTIAL) and the file has no block_bits");
    throw InputError(file.label + ": block_index" + at() + std::to_string(index) + "; 0 to " +
                     std::to_string(mask.partials - 1) + " is expected for a PARTIAL block");
  }
  return mask;
}

}  // namespace attn::tools
