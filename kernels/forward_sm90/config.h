// What a kernel fwd_sm90_* can do beyond masks of ranges, and its parameter struct. Host code
// includes this too.
#ifndef ATTN_KERNELS_FORWARD_SM90_CONFIG_H
#define ATTN_KERNELS_FORWARD_SM90_CONFIG_H

#include "forward_args.h"

namespace attn::sm90 {

enum : unsigned {
  plain = 0,
  with_score = 1,              // softcap, ALiBi, a scale that is not above 0
  with_mask = 2,               // block masks
  with_bias = 4 | with_score,  // a bias as well as those
  with_pages = 8,              // segments may be paged
  with_score_and_pages = with_score | with_pages,
  with_fp8 =
      16,  // q, k and v of fp8; together with with_score: descales of blocks and segments too
  with_fp8_and_score = with_fp8 | with_score,
  with_fp8_and_mask = with_fp8 | with_mask,
};

template <unsigned with>
constexpr auto kernarg_of() {
  if constexpr (with & with_fp8 && with & with_mask)
    return attn_sm90_fp8_mask_kernarg{};
  else if constexpr (with & with_fp8)
    return attn_sm90_fp8_kernarg{};
  else if constexpr (with & with_mask)
    return attn_sm90_mask_kernarg{};
  else if constexpr (with & with_pages)
    return attn_sm90_paged_kernarg{};
  else if constexpr (with == with_bias)
    return attn_sm90_bias_kernarg{};
  else
    return attn_sm90_forward_kernarg{};
}
template <unsigned with>
using Kernarg = decltype(kernarg_of<with>());

}  // namespace attn::sm90
#endif
