// Finds the descale of a key.
#pragma once
#include "../shared/forward_args.h"

namespace attn::device {

__device__ __forceinline__ const float* descale_at(const attn_descale& d, int b, int h, int key) {
  return d.at +
         (b * (long long)d.batch + h * (long long)d.head + (d.block_keys ? key / d.block_keys : 0));
}

}  // namespace attn::device
