// Block masks built on a device. The counterpart of block_mask.h.
#pragma once
#include "masks/block_mask.h"
#include "plan/plan.h"

namespace attn {

// Either dense or intervals, in the device's memory, as in attn.h.
struct MaskSource {
  const uint8_t* dense = nullptr;
  const int32_t* intervals = nullptr;
  int32_t num_intervals = 0;
};

// Where a mask lies in one allocation. There is room for a PARTIAL block in every cell, so that
// nobody has to know how many there are.
struct DeviceMask {
  size_t table, partials, kinds, index, bits;  // offsets
  size_t cleared;                              // bytes from 0 on that are zero at first
  size_t bytes;
};
DeviceMask device_mask(const MaskShape& shape);

// Starts building at `memory` on `stream`; does not wait.
Status build_mask(Context& context, const MaskShape& shape, const MaskSource& source, void* memory,
                  void* stream);

}  // namespace attn
