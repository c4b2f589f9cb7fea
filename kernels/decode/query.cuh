// Rows of Q: where they lie, what they see of the tree, and they themselves as the matrix unit
// takes them if K and V become f16.
#pragma once
#include "../common/element.cuh"
#include "merge.cuh"

namespace attn::decode {

__device__ __forceinline__ const char* q_address(const attn_decode_kernarg& a, const Head& at,
                                                 const Row& row) {
  return static_cast<const char*>(a.q) +
         2 * ((a.cu_seqlens_q ? at.q_begin * a.q_stride[1] : at.b * a.q_stride[0]) +
              row.query * a.q_stride[1] + row.head * a.q_stride[2]);
}

// What a query sees of the tree.
__device__ __forceinline__ ulonglong2 tree_words(const attn_decode_kernarg& a, const Head& at,
                                                 int query) {
  const long long first = a.cu_seqlens_q ? at.q_begin : (long long)at.b * a.seqlen_q;
  const unsigned long long* words = a.tree + 2 * (first + query);
  return make_ulonglong2(words[0], words[1]);
}

// What a row of Q with this largest value is multiplied with to become f16, which has fewer
// exponents than bf16: a power of two, so that it is in [1, 2). What is lost is below 2^-25 of
// that.
struct QueryFactor {
  float value, undo;
  explicit __device__ __forceinline__ QueryFactor(float most) {
    const int exponent = __float_as_int(most) >> 23;
    const bool usual = exponent > 0 && exponent < 254;
    value = usual ? __int_as_float((254 - exponent) << 23) : 1;
    undo = usual ? __int_as_float(exponent << 23) : 1;
  }
};

// A row of Q, which 8 lanes share, to f16 for fp8 K.
// Returns what undoes it. words(f): calls f with each of the lane's pairs.
template <class Words>
__device__ __forceinline__ float q_to_f16(int q_type, Words&& words) {
  const auto value = [&](unsigned pair, int half) {
    const unsigned short bits = pair >> 16 * half;
    return q_type == attn_element_f16 ? F16::unpack(bits) : BF16::unpack(bits);
  };
  float most = 0;
  words([&](unsigned pair) {
    most = fmaxf(most, fmaxf(fabsf(value(pair, 0)), fabsf(value(pair, 1))));
  });
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
    most = fmaxf(most, __shfl_xor_sync(__activemask(), most, step));
  const QueryFactor factor(most);
  words([&](unsigned& pair) {
    pair = F16::pack(value(pair, 0) * factor.value, value(pair, 1) * factor.value);
  });
  return factor.undo;
}

}  // namespace attn::decode
