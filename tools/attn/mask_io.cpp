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

  // The library's own rules.
  auto shape = make<attn_block_mask_shape>();
  shape.batch = mask.batch;
  shape.heads = mask.heads;
  shape.seqlen_q = mask.rows * mask.block_q;
  shape.seqlen_kv = mask.columns * mask.block_k;
  shape.block_q = mask.block_q;
  shape.block_k = mask.block_k;
  auto options = make<attn_context_options>();
  options.cpu_threads = 1;
  const context host(ATTN_BACKEND_REFERENCE, &options);
  try {
    if (mask.kinds.elements() > 0)
      block_mask::from_kinds(host, shape, mask.kinds.as<uint8_t>(), mask.index.as<int32_t>(),
                             mask.partials > 0 ? mask.bits.as<uint32_t>() : nullptr, mask.partials);
  } catch (const error& refused) {
    throw InputError(file.label + ": block_" + refused.what());
  }
  return mask;
}

}  // namespace attn::tools
