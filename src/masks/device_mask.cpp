#include "masks/device_mask.h"

#include <bit>

namespace attn {

DeviceMask device_mask(const MaskShape& shape) {
  const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  const size_t cells = size_t(shape.cells());
  DeviceMask m;
  m.table_size = unsigned(std::bit_ceil(uint64_t(cells) * 2));
  m.partials = 8 * size_t{m.table_size};
  m.workspace = m.partials + 4;
  m.kinds = aligned(m.workspace);
  m.index = aligned(m.kinds + cells);
  m.bits = aligned(m.index + 4 * cells);
  m.bytes = m.bits + 4 * cells * size_t(shape.block_words());
  return m;
}

}  // namespace attn
