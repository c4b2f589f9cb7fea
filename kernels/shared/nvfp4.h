// nvfp4: e2m1 codes, two in a byte, the even element in its lower half. Each 16 elements of a row
// (a head of a token) have a scale in e4m3fn, in a separate array. An element is code x scale x
// descale.
#ifndef ATTN_KERNELS_SHARED_NVFP4_H
#define ATTN_KERNELS_SHARED_NVFP4_H

#include "row_scale.h"

enum { attn_element_nvfp4 = 17, attn_nvfp4_group = 16 };  // attn_dtype; elements of a scale

namespace attn {

// Whether rows have scales in a separate array.
ATTN_HOST_DEVICE constexpr bool has_scale_array(int type) {
  return has_row_scale(type) || type == attn_element_nvfp4 || type == attn_element_f8_e4m3fn_token;
}

}  // namespace attn
#endif
