#include "masks/device_mask.h"

#include <bit>

#include "core/ceil_div.h"

namespace attn {

DeviceMask device_mask(const MaskShape& shape) {
  const size_t cells = size_t(shape.cells());
  DeviceMask m;
  m.table_size = unsigned(std::bit_ceil(uint64_t(cells) * 2));
  m.partials = 8 * size_t{m.table_size};
  m.workspace = m.partials + 4;
  m.kinds = aligned_bytes(m.workspace);
  m.index = aligned_bytes(m.kinds + cells);
  m.bits = aligned_bytes(m.index + 4 * cells);
  m.bytes = m.bits + 4 * cells * size_t(shape.block_words());
  return m;
}

}  // namespace attn
