// The description of a kernel fwd_sm90_*.
#ifndef ATTN_KERNELS_FORWARD_SM90_VARIANT_H
#define ATTN_KERNELS_FORWARD_SM90_VARIANT_H

#include "../shared/find_variant.h"
#include "../shared/types.h"
#include "config.h"
#include "tiles.h"

namespace attn::sm90 {

struct Variant {
  const char* name;
  int type;            // of q
  int kv_type = type;  // of k and v
  Tile tile;
  unsigned with = plain;
  int local_bytes = 0;  // local memory that a thread may have, spilled registers included

  static constexpr const char* architectures() { return "sm_90a"; }
};

}  // namespace attn::sm90
#endif
