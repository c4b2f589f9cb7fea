// The mask rule, stated once for every backend. No host headers: kernels/ includes this file too.
#pragma once

#ifdef __CUDACC__
#define ATTN_HOST_DEVICE __host__ __device__
#else
#define ATTN_HOST_DEVICE
#endif

namespace attn {

// Causal, window and lengths leave each query an interval of keys [begin, end).
struct KeyRange {
  long long begin, end;
};

// `diagonal` is Skv - Sq (0 for top-left): query i stands at key position i + diagonal.
// Unbounded sides have left or right < 0.
struct RangeMask {
  bool causal;
  bool top_left;
  bool window;
  long long left, right;

  // Keys that query i of seqlen_q sees among seqlen_kv keys. Empty ranges have end <= begin.
  ATTN_HOST_DEVICE constexpr KeyRange keys(long long i, long long seqlen_q,
                                           long long seqlen_kv) const {
    const long long position = i + seqlen_kv - seqlen_q;
    KeyRange range{0, seqlen_kv};
    if (causal && position + 1 < range.end) range.end = position + 1;
    if (top_left && i + 1 < range.end) range.end = i + 1;
    if (window && left >= 0 && position - left > range.begin) range.begin = position - left;
    if (window && right >= 0 && position + right + 1 < range.end) range.end = position + right + 1;
    return range;
  }
};

}  // namespace attn
