// Where sequences are.
#pragma once
#include "../common/lengths.cuh"
#include "backward_args.h"

namespace attn::bwd_sm90 {

// The queries of sequence b.
template <class Kernarg>
__device__ __forceinline__ device::Span query_span(const Kernarg& a, int b) {
  if (!a.cu_seqlens_q) return {0, a.rows.seqlen_q};
  return device::packed_span(a.cu_seqlens_q, b, a.rows.total_q, a.rows.seqlen_q);
}

}  // namespace attn::bwd_sm90
