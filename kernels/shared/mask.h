// The mask rule, stated once for every backend. No host headers: kernels/ includes this file too.
#pragma once
#include "host_device.h"

namespace attn {

// Causal, window and lengths leave each query an interval of keys [begin, end).
struct KeyRange {
  long long begin, end;
};

// Query i sees keys [i + lower, i + upper) of those there are.
struct KeyBand {
  long long lower, upper;
};

// `diagonal` is Skv - Sq (0 for top-left): query i is at key position i + diagonal.
// Unbounded sides have left or right < 0.
struct RangeMask {
  bool causal;
  bool top_left;
  bool window;
  long long left, right;

  ATTN_HOST_DEVICE constexpr KeyBand band(long long seqlen_q, long long seqlen_kv) const {
    constexpr long long unbounded = 1ll << 60;
    const long long diagonal = seqlen_kv - seqlen_q;
    KeyBand band{-unbounded, unbounded};
    if (causal && diagonal + 1 < band.upper) band.upper = diagonal + 1;
    if (top_left && 1 < band.upper) band.upper = 1;
    if (window && left >= 0 && diagonal - left > band.lower) band.lower = diagonal - left;
    if (window && right >= 0 && diagonal + right + 1 < band.upper)
      band.upper = diagonal + right + 1;
    return band;
  }
  // Keys that query i of seqlen_q sees among seqlen_kv keys. Empty ranges have end <= begin.
  ATTN_HOST_DEVICE constexpr KeyRange keys(long long i, long long seqlen_q,
                                           long long seqlen_kv) const {
    const KeyBand seen = band(seqlen_q, seqlen_kv);
    return {i + seen.lower > 0 ? i + seen.lower : 0,
            i + seen.upper < seqlen_kv ? i + seen.upper : seqlen_kv};
  }
};

// A bit for each of the last `keys` keys in two words of each query; 0: there are none.
struct TreeMask {
  long long keys;

  // Bit n: whether the query of these words sees key first + n as far as the tree goes.
  ATTN_HOST_DEVICE constexpr unsigned long long seen(unsigned long long low,
                                                     unsigned long long high, long long first,
                                                     long long seqlen_kv) const {
    const long long at = first - (seqlen_kv - keys);  // the first key's bit
    if (at <= -64) return ~0ull;
    if (at < 0) return low << -at | ((1ull << -at) - 1);
    if (at == 0) return low;
    if (at < 64) return low >> at | high << (64 - at);
    return at < 128 ? high >> (at - 64) : 0;
  }
};

}  // namespace attn
