// Positions of a segment's keys. No host headers: kernels/ includes this file too.
#pragma once
#include "host_device.h"

namespace attn {

// Where the keys of a segment are whose sequence is spread over ranks: in runs of `interleave`
// consecutive positions, which begin `period` = ranks * interleave positions apart. Int holds all
// positions that are asked for.
template <class Int>
struct KeyPlaces {
  Int start;  // of key 0: rank * interleave after the segment's
  Int interleave, period;

  // The position of key c.
  ATTN_HOST_DEVICE constexpr Int at(Int c) const {
    return start + c / interleave * period + c % interleave;
  }
  // How many keys are before a position. Positions increase, so a band of them is a range of keys.
  ATTN_HOST_DEVICE constexpr Int before(Int position) const {
    const Int x = position - start;
    if (x <= 0) return 0;
    const Int of_run = x % period;
    return x / period * interleave + (of_run < interleave ? of_run : interleave);
  }
};

}  // namespace attn
