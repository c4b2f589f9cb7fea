// What a kernel fwd_sm90_* can do beyond masks of ranges, and its parameter struct.
#pragma once
#include "forward_args.h"

namespace attn::sm90 {

enum : unsigned {
  plain = 0,
  with_score = 1,              // softcap, ALiBi, a scale that is not above 0
  with_mask = 2,               // block masks
  with_bias = 4 | with_score,  // a bias beside those
};

template <unsigned with>
struct KernargOf {
  using type = attn_sm90_forward_kernarg;
};
template <>
struct KernargOf<with_mask> {
  using type = attn_sm90_mask_kernarg;
};
template <>
struct KernargOf<with_bias> {
  using type = attn_sm90_bias_kernarg;
};
template <unsigned with>
using Kernarg = typename KernargOf<with>::type;

}  // namespace attn::sm90
