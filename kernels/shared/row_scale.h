// Types whose rows (a head of a token) have a scale in a separate array. Types are those of
// types.h.
#ifndef ATTN_KERNELS_SHARED_ROW_SCALE_H
#define ATTN_KERNELS_SHARED_ROW_SCALE_H

#include "host_device.h"
#include "types.h"

namespace attn {

ATTN_HOST_DEVICE constexpr bool has_row_scale(int type) {
  return type == attn_element_i8 || type == attn_element_i4;
}

}  // namespace attn
#endif
