// Block masks built on a device, from arrays of its memory: an operation like others. The
// counterpart of block_mask.h.
#pragma once
#include "masks/block_mask.h"
#include "problem/any_problem.h"

namespace attn {

// The layout of a mask in one allocation. There is room for a PARTIAL block in every cell, so the
// number of PARTIAL blocks need not be known.
struct DeviceMask {
  unsigned table_size;                  // entries of 8 bytes
  size_t partials, kinds, index, bits;  // offsets; the table is at 0
  size_t workspace;                     // bytes from 0 on that are zero at first
  size_t bytes;
};
DeviceMask device_mask(const MaskShape& shape);

struct MaskProblem : AnyProblem {
  explicit MaskProblem(const MaskShape& shape) : AnyProblem(Op::block_mask), shape(shape) {}
  const MaskShape shape;
};

// The workspace of the plan is the memory's beginning.
struct MaskArgs {
  // Either dense or intervals, in the device's memory, as in attn.h.
  const uint8_t* dense = nullptr;
  const int32_t* intervals = nullptr;
  int32_t num_intervals = 0;
  void* memory = nullptr;  // device_mask().bytes
};

}  // namespace attn
