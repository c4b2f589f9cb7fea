#include "cpu/backward_view.h"

#include <cstring>

namespace attn {
namespace {

// Rows [begin, end) of all heads become 0.
void clear_rows(attn_dtype type, void* base, const attn_strides& stride, int64_t b, int64_t begin,
                int64_t end, int64_t heads, int64_t dim) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h)
      std::memset(static_cast<char*>(base) +
                      dtype_bytes(type, b * stride.batch + row * stride.seq + h * stride.head),
                  0, size_t(dtype_bytes(type, dim)));  // 0 in each type
}

}  // namespace

KeyView key_view(const BackwardProblem& p, const BackwardArgs& args, int64_t b) {
  const Segment& s = p.kv();
  const SegmentView view = segment_view(p.of, args.of, b, 0, 0);
  const bool packed = s.layout == ATTN_PACKED;
  const int64_t entry = packed ? 0 : b, row = packed ? view.first_row : 0;
  const auto first = [&](const attn_strides& stride) {
    return entry * stride.batch + row * stride.seq;
  };
  return {view.length, first(s.k_stride), first(s.v_stride), first(p.dk_stride),
          first(p.dv_stride)};
}

QueryGradients query_gradients(const BackwardProblem& p, const BackwardArgs& args, int64_t b) {
  const int64_t row = query_view(p.of, args.of, b).row;
  if (p.of.q_layout == ATTN_PACKED) return {row * p.d_out_stride.seq, row * p.dq_stride.seq};
  return {b * p.d_out_stride.batch, b * p.dq_stride.batch};
}

void store_gradient(attn_dtype type, void* base, int64_t index, double x, bool add) {
  if (add) x += decode_element(type, base, index);
  encode_element(type, base, index, x, false);
}

void clear_rows_of_nobody(const BackwardProblem& p, const BackwardArgs& args) {
  const Problem& of = p.of;
  if (of.q_layout == ATTN_PACKED && p.wants(ATTN_GRAD_Q) && !p.adds(ATTN_GRAD_Q))
    clear_rows(p.dq_type, args.dq, p.dq_stride, 0, args.of.cu_seqlens_q[of.batch], of.total_q,
               of.heads_q, of.head_dim);
  const Segment& s = p.kv();
  const auto clear_keys = [&](uint32_t gradient, attn_dtype type, void* base,
                              const attn_strides& stride, int64_t dim) {
    if (!p.wants(gradient) || p.adds(gradient)) return;
    if (s.layout == ATTN_PACKED) {
      const int32_t* cu_seqlens = args.of.segment[0].cu_seqlens;
      clear_rows(type, base, stride, 0, cu_seqlens[of.batch], s.total, of.heads_kv, dim);
    } else {
      for (int64_t b = 0; b < of.batch; ++b)
        clear_rows(type, base, stride, b, key_view(p, args, b).length, s.seqlen, of.heads_kv, dim);
    }
  };
  clear_keys(ATTN_GRAD_K, p.dk_type, args.dk, p.dk_stride, of.head_dim);
  clear_keys(ATTN_GRAD_V, p.dv_type, args.dv, p.dv_stride, of.head_dim_v);
}

}  // namespace attn
