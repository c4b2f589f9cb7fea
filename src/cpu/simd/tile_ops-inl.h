// The bodies of TileOps. Each file that includes this defines ATTN_SIMD_NAMESPACE and ATTN_SIMD_OPS
// (and ATTN_SIMD_LANES to have the instruction set checked), and is compiled with the flags of one
// instruction set. No standard library in here, see tile_ops.h.
#include "core/types.h"
#include "cpu/simd/tile_ops.h"
#include "cpu/simd/vector.h"

namespace attn {
namespace ATTN_SIMD_NAMESPACE {
namespace {

#ifdef ATTN_SIMD_LANES
static_assert(lanes == ATTN_SIMD_LANES,
              "the flags of this file are not those of its instruction set");
#endif

// Register tiles: accumulators, one row of operands and a broadcast fit the register file.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int panel_vectors = 3, score_keys = 8;  // 8 x 3
constexpr int slab_vectors = 4, value_rows = 6;   // 6 x 4
#else
constexpr int panel_vectors = 3, score_keys = 4;  // 4 x 3
constexpr int slab_vectors = 2, value_rows = 6;   // 6 x 2
#endif

#if defined(__F16C__) || defined(__aarch64__)
#define ATTN_SIMD_F16 1
#endif

#ifdef ATTN_SIMD_F16
constexpr uint32_t few_types = kv_types & ~cache_types;
#else
constexpr uint32_t few_types = type_bit(ATTN_F32) | type_bit(ATTN_BF16);
#endif

const float minus_infinity = -__builtin_inff();

template <int n>
struct Int {
  static constexpr int value = n;
};

// Calls body(Int<n>) for the n in [1, limit] that equals `value`.
template <int limit, class Body>
ATTN_INLINE void with_constant(int value, const Body& body) {
  if (value == limit) {
    body(Int<limit>());
  } else if constexpr (limit > 1) {
    with_constant<limit - 1>(value, body);
  }
}

// ---- elements
// ------------------------------------------------------------------------------------

#ifdef ATTN_SIMD_F16

// Exact: e5m2 is the upper half of an f16, e4m3 fits in one times a power of two.
template <attn_dtype type>
ATTN_INLINE Vec fp8_to_f32(const char* from) {
  const Halves wide = halves(read<SignedBytes>(from));  // the sign is in all upper bits
  if constexpr (type == ATTN_F8_E5M2) return f16_to_f32(wide << 8);
  const Halves code = (wide << 7) & 0xbf80;
  if constexpr (type == ATTN_F8_E4M3FN) {
    // The code of NaN, and no other, carries into bit 14, which makes an f16 of all ones.
    return f16_to_f32(code | ((code + 0x80) & 0x4000)) * 256;
  } else {
    const Halves nan = reinterpret_cast<Halves>(code == 0x8000);
    return f16_to_f32(code | (nan & 0x7e00)) * 128;
  }
}

ATTN_INLINE Vec f16_in_all_lanes(const char* from) {
  uint16_t code;
  __builtin_memcpy(&code, from, sizeof(code));
  return f16_to_f32(code - Halves{});
}

// The values of vectors of codes.
template <attn_dtype type>
ATTN_INLINE Vec code_values(Ints codes, Vec d, Vec m) {
  constexpr BlockLayout layout = block_layout(type);
  if constexpr (layout.has_min) return fma(floats(codes), d, m);
  return floats(layout.offset > 0 ? codes - layout.offset : codes) * d;
}

// n vectors of the 32 values of a ggml block, from value `at` on, a multiple of what they hold.
template <attn_dtype type, int n>
ATTN_INLINE void ggml_to_f32(const char* block, int64_t at, Vec (&v)[n]) {
  static_assert(32 % (n * lanes) == 0);
  constexpr BlockLayout layout = block_layout(type);
  const Vec d = f16_in_all_lanes(block);
  const Vec m = layout.has_min ? f16_in_all_lanes(block + 2) : Vec{};
  const char* codes = block + layout.codes_at();
  if constexpr (layout.code_bytes == 32) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      v[i] = code_values<type>(ints(read<SignedBytes>(codes + at + i * lanes)), d, m);
    }
    return;
  }
#if defined(__AVX512F__)  // a vector has the values of all 16 codes
  if constexpr (!layout.has_bit) {
    const Ints all = type == ATTN_IQ4_NL
                         ? ints(read<SignedBytes>(reinterpret_cast<const char*>(iq4_nl_values)))
                         : numbers();
    const Vec table = code_values<type>(all, d, m);
    const Ints pairs = ints(read<Bytes>(codes));
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) v[i] = lookup(table, at + i * lanes < 16 ? pairs : pairs >> 4);
    return;
  }
#elif defined(__AVX2__)  // a whole block at once: its low halves, then its high ones
  if constexpr (!layout.has_bit && n * lanes == 32) {
    const __m128i pairs = read<__m128i>(codes), low = _mm_set1_epi8(15);
    const __m128i halves[] = {_mm_and_si128(pairs, low),
                              _mm_and_si128(_mm_srli_epi16(pairs, 4), low)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i all =
          type == ATTN_IQ4_NL
              ? _mm_shuffle_epi8(read<__m128i>(reinterpret_cast<const char*>(iq4_nl_values)),
                                 halves[half])
              : halves[half];
      const auto values = [&](__m128i eight) {
        return code_values<type>(reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(eight)), d, m);
      };
      v[half * 2] = values(all);
      v[half * 2 + 1] = values(_mm_unpackhi_epi64(all, all));
    }
    return;
  }
#endif
  int32_t bits = 0;
  if constexpr (layout.has_bit) __builtin_memcpy(&bits, codes - 4, sizeof(bits));
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    const int first = int(at) + i * int(lanes);
    const Bytes pairs = read<Bytes>(codes + first % 16);
    const Bytes low = first < 16 ? low_halves(pairs) : high_halves(pairs);
    Ints code;
    if constexpr (type == ATTN_IQ4_NL) {
      code = ints(lookup(iq4_nl_values, low));
    } else {
      code = ints(reinterpret_cast<SignedBytes>(low));
    }
    if constexpr (layout.has_bit) code |= (set(bits) >> (numbers() + first) & 1) << 4;
    v[i] = code_values<type>(code, d, m);
  }
}

#endif

// Of an element, 0 where they come in blocks or in halves of bytes.
constexpr int element_bytes_of(attn_dtype type) {
  return type_info(type).block_elements == 1 ? type_info(type).block_bytes : 0;
}

// Vectors that elements() reads at once, of `n` that are wanted: in blocks those under one scale.
template <attn_dtype type>
constexpr int together(int n) {
  int most = is_ggml(type) ? int(32 / lanes) : 1;
  while (n % most != 0) most /= 2;
  return most;
}

// Vectors of a row from element `at` on; of blocks as many as together() says, and at a multiple of
// what they hold.
template <attn_dtype type, int n>
ATTN_INLINE void elements(const char* row, int64_t at, Vec (&v)[n]) {
#ifdef ATTN_SIMD_F16
  if constexpr (is_ggml(type)) {
    constexpr int bytes = type_info(type).block_bytes;
    return ggml_to_f32<type>(row + at / 32 * bytes, n * lanes == 32 ? 0 : at % 32, v);
  }
#endif
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i, at += lanes) {
    if constexpr (type == ATTN_F32) {
      v[i] = read<Vec>(row + at * 4);
    } else if constexpr (type == ATTN_BF16) {
      v[i] = as_floats(ints(read<Halves>(row + at * 2)) << 16);
#ifdef ATTN_SIMD_F16
    } else if constexpr (type == ATTN_F16) {
      v[i] = f16_to_f32(read<Halves>(row + at * 2));
    } else if constexpr (type == ATTN_I8) {
      v[i] = floats(ints(read<SignedBytes>(row + at)));
    } else if constexpr (type == ATTN_I4) {
      v[i] = floats(ints_of_halves(row + at / 2));
    } else if constexpr (!is_ggml(type)) {
      v[i] = fp8_to_f32<type>(row + at);
#endif
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

template <int M, int N>
ATTN_INLINE void score_tile(const float* __restrict__ queries, const float* __restrict__ keys,
                            int64_t key_stride, int64_t dim, float* __restrict__ scores, Vec* max) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = Vec{};
  }
  for (int64_t d = 0; d < dim; ++d) {
    Vec q[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) q[n] = load(queries + (d * N + n) * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec k = set(keys[m * key_stride + d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = fma(k, q[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      store(sum[m][n], scores + (m * N + n) * lanes);
      max[n] = larger(max[n], sum[m][n]);
    }
  }
}

template <int N>
void scores_n(const float* queries, const float* keys, int64_t key_stride, int64_t dim,
              int64_t num_keys, float* scores, float* max) {
  Vec top[N];
  for (int n = 0; n < N; ++n) top[n] = set(minus_infinity);
  int64_t key = 0;
  for (; key + score_keys <= num_keys; key += score_keys) {
    score_tile<score_keys, N>(queries, keys + key * key_stride, key_stride, dim,
                              scores + key * N * lanes, top);
  }
  if (key < num_keys) {
    with_constant<score_keys - 1>(int(num_keys - key), [&](auto m) {
      score_tile<decltype(m)::value, N>(queries, keys + key * key_stride, key_stride, dim,
                                        scores + key * N * lanes, top);
    });
  }
  for (int n = 0; n < N; ++n) store(top[n], max + n * lanes);
}

void scores(int vectors, const float* queries, const float* keys, int64_t key_stride, int64_t dim,
            int64_t num_keys, float* scores, float* max) {
  with_constant<panel_vectors>(vectors, [&](auto n) {
    scores_n<decltype(n)::value>(queries, keys, key_stride, dim, num_keys, scores, max);
  });
}

ATTN_INLINE void prefetch(const Ahead& ahead, int64_t row) {
  if (row >= ahead.count) return;
  const char* from = ahead.first + row * ahead.row_bytes;
  for (int64_t at = 0; at < ahead.bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// So many rows at once, or one where there is no other: of as many keys as leave a lane for the sum
// of each pair.
constexpr int few_height = lanes / 4;

// Of the lanes of each row of a panel of few rows, combined in an order of their own; in all lanes.
template <class Combine>
ATTN_INLINE Vec over_keys(Vec v, int64_t panel, const Combine& combine) {
  alignas(sizeof(Vec)) float lane[lanes];
  store(v, lane);
  for (int64_t n = lanes / 2; n >= panel; n /= 2) {
    for (int64_t l = 0; l < n; ++l) lane[l] = combine(lane[l], lane[l + n]);
  }
  for (int64_t l = panel; l < lanes; ++l) lane[l] = lane[l - panel];
  return load(lane);
}
ATTN_INLINE Vec largest_over_keys(Vec v, int64_t panel) {
  return over_keys(v, panel, [](float a, float b) { return a > b ? a : b; });
}

template <attn_dtype type, int height, int M>
ATTN_INLINE void few_tile(const float* __restrict__ queries, int64_t query_stride,
                          const char* __restrict__ keys, int64_t row_bytes, int64_t dim,
                          float factor, float* __restrict__ scores, int64_t panel) {
  Vec sum[lanes] = {};
  constexpr int step = together<type>(32 / lanes);
  for (int64_t d = 0; d < dim; d += step * lanes) {
    Vec q[height][step];
#pragma GCC unroll 8
    for (int n = 0; n < height; ++n) {
#pragma GCC unroll 8
      for (int i = 0; i < step; ++i) q[n][i] = load(queries + n * query_stride + d + i * lanes);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec k[step];
      elements<type>(keys + m * row_bytes, d, k);
#pragma GCC unroll 8
      for (int i = 0; i < step; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < height; ++n) {
          sum[m * height + n] = fma(q[n][i], k[i], sum[m * height + n]);
        }
      }
    }
  }
  alignas(sizeof(Vec)) float sums[lanes];
  store(sums_of_lanes(sum) * factor, sums);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    __builtin_memcpy(scores + m * panel, sums + m * height, height * sizeof(float));
  }
}

template <attn_dtype type, int height>
void scores_few_of(int64_t panel, const float* queries, int64_t query_stride, const Rows& keys,
                   int64_t dim, int64_t num_keys, float* scores) {
  constexpr int at_once = lanes / height;
  for (int64_t row = 0; row < panel; row += height) {
    const float* q = queries + row * query_stride;
    int64_t key = 0;
    for (; key + at_once <= num_keys; key += at_once) {
      for (int n = 0; row == 0 && n < at_once; ++n) prefetch(keys.ahead, key + n);
      few_tile<type, height, at_once>(q, query_stride, keys.first + key * keys.row_bytes,
                                      keys.row_bytes, dim, keys.factor, scores + key * panel + row,
                                      panel);
    }
    for (; key < num_keys; ++key) {
      few_tile<type, height, 1>(q, query_stride, keys.first + key * keys.row_bytes, keys.row_bytes,
                                dim, keys.factor, scores + key * panel + row, panel);
    }
  }
}

void scores_few(int64_t panel, const float* queries, int64_t query_stride, const Rows& keys,
                int64_t dim, int64_t num_keys, float* scores, float* max) {
  with_type<few_types>(keys.type, [&](auto t) {
    if (panel == 1) {
      scores_few_of<t.type, 1>(panel, queries, query_stride, keys, dim, num_keys, scores);
    } else {
      scores_few_of<t.type, few_height>(panel, queries, query_stride, keys, dim, num_keys, scores);
    }
  });
  for (int64_t key = 0; keys.scales && key < num_keys; ++key) {
    for (int64_t row = 0; row < panel; ++row) scores[key * panel + row] *= keys.scales[key];
  }
  const Vec hidden = set(minus_infinity);
  store_unaligned(hidden, scores + num_keys * panel);
  Vec top = hidden;
  for (int64_t at = 0; at < num_keys * panel; at += lanes) {
    top = larger(top, load_unaligned(scores + at));
  }
  store(largest_over_keys(top, panel), max);
}

// Values from element `index` of each row on.
template <attn_dtype type, int M, int N>
void value_tile(const float* __restrict__ weights, int64_t panel, const Rows& values, int64_t index,
                int64_t num_keys, const float* __restrict__ rescale, float* __restrict__ out,
                int64_t out_stride) {
  const char* const first_row = values.first;
  const int64_t row_bytes = values.row_bytes;
  const float factor = values.factor;
  const auto weight = [&](int64_t key, int m) {
    const float w = weights[key * panel + m];
    if constexpr (type == ATTN_I8 || type == ATTN_I4) return set(w * values.scales[key]);
    return set(w);
  };
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = Vec{};
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    prefetch(values.ahead, key);
    constexpr int step = together<type>(N);
#pragma GCC unroll 8
    for (int first = 0; first < N; first += step) {
      Vec v[step];
      elements<type>(first_row + key * row_bytes, index + first * lanes, v);
#pragma GCC unroll 8
      for (int n = 0; n < step; ++n) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          sum[m][first + n] = fma(weight(key, m), v[n], sum[m][first + n]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec scale = set(rescale[m]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = out + m * out_stride + n * lanes;
      store(fma(sum[m][n], set(factor), scale * load(at)), at);
    }
  }
}

void accumulate(int vectors, int rows, const float* weights, int64_t panel, const float* values,
                int64_t value_stride, int64_t num_keys, const float* rescale, float* out,
                int64_t out_stride) {
  const Rows stored = {reinterpret_cast<const char*>(values), value_stride * int64_t(sizeof(float)),
                       ATTN_F32, 1};
  with_constant<slab_vectors>(vectors, [&](auto n) {
    with_constant<value_rows>(rows, [&](auto m) {
      value_tile<ATTN_F32, m.value, n.value>(weights, panel, stored, 0, num_keys, rescale, out,
                                             out_stride);
    });
  });
}

void accumulate_few(int vectors, int64_t panel, const float* weights, const Rows& values,
                    int64_t index, int64_t num_keys, const float* rescale, float* out,
                    int64_t out_stride) {
  with_type<few_types>(values.type, [&](auto t) {
    with_constant<slab_vectors>(vectors, [&](auto n) {
      if (panel == 1) {
        return value_tile<t.type, 1, n.value>(weights, panel, values, index, num_keys, rescale, out,
                                              out_stride);
      }
      Rows each = values;
      for (int64_t row = 0; row < panel; row += few_height, each.ahead = {}) {
        value_tile<t.type, few_height, n.value>(weights + row, panel, each, index, num_keys,
                                                rescale + row, out + row * out_stride, out_stride);
      }
    });
  });
}

// ---- softmax -----------------------------------------------------------------------------------

// 2^y for -127 <= y, y barely above 0 at most, as a sum: 2^n, and (2^r - 1) / r for r = y - n in
// [-1/2, 1/2]. 2^n is made of the low bits of y + magic; n = -127 gives 0. The polynomial is a
// minimax fit that makes 2^r exact at 0, relative error 2e-9.
struct Exp2 {
  Vec power, r, slope;
};
ATTN_INLINE Exp2 exp2_parts(Vec x, Vec scale) {
  const Vec magic = set(12582912.0f + 127.0f);
  const Vec shifted = fma(x, scale, magic);
  const Vec r = fma(x, scale, magic - shifted);
  Vec p = set(1.5353362063e-04f);
  p = fma(p, r, set(1.3398874557e-03f));
  p = fma(p, r, set(9.6184373582e-03f));
  p = fma(p, r, set(5.5503324708e-02f));
  p = fma(p, r, set(2.4022647914e-01f));
  p = fma(p, r, set(6.9314720286e-01f));
  return {as_floats(as_ints(shifted) << 23), r, p};
}

// 2^(x * scale) for x * scale <= 0 or barely above, x >= lowest = -127 / scale.
ATTN_INLINE Vec exp2_scaled(Vec x, Vec scale, Vec lowest) {
  x = x < lowest ? lowest : x;  // NaN stays
  const Exp2 y = exp2_parts(x, scale);
  return fma(y.slope, y.r, set(1.0f)) * y.power;
}

// With e = e^(2|x|) - 1, e / (e + 2); the sum that is e loses nothing near 0.
ATTN_INLINE Vec tanh(Vec x) {
  Vec size = abs(x);
  size = size > 10 ? set(10.0f) : size;                // where it is 1; NaN stays
  const Exp2 y = exp2_parts(size, set(2.885390082f));  // 2 log2(e)
  const Vec e = fma(y.slope * y.r, y.power, y.power - 1);
  return copysign(e / (e + 2), x);
}

// N vectors for each of `steps`: of one key, or one of several keys of a panel of few rows.
template <int N>
ATTN_INLINE void softmax_n(int64_t panel, float log2_scale, int64_t steps,
                           float* __restrict__ scores, const float* max,
                           const SoftmaxState& state) {
  const Vec scale = set(log2_scale);
  const Vec lowest = set(-127.0f / log2_scale);
  const Vec hidden = set(minus_infinity);
  Vec base[N], sum[N];
  for (int n = 0; n < N; ++n) {
    const Vec before = load(state.max + n * lanes);
    const Vec now = larger(before, load(max + n * lanes));
    base[n] = now != hidden ? now : Vec{};  // no visible key yet: any finite base
    sum[n] = Vec{};
    const Vec factor = exp2_scaled(before - base[n], scale, lowest);
    store(now, state.max + n * lanes);
    store(factor, state.rescale + n * lanes);
  }
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = scores + (step * N + n) * lanes;
      const Vec p = exp2_scaled(load_unaligned(at) - base[n], scale, lowest);
      store_unaligned(p, at);
      sum[n] += p;
    }
  }
  if (panel < lanes) sum[0] = over_keys(sum[0], panel, [](float a, float b) { return a + b; });
  for (int n = 0; n < N; ++n) {
    float* at = state.sum + n * lanes;
    store(fma(load(at), load(state.rescale + n * lanes), sum[n]), at);
  }
}

void softmax(int64_t panel, float log2_scale, int64_t num_keys, float* scores, const float* max,
             const SoftmaxState& state) {
  if (panel < lanes) {
    const int64_t steps = (num_keys * panel + lanes - 1) / lanes;
    return softmax_n<1>(panel, log2_scale, steps, scores, max, state);
  }
  with_constant<panel_vectors>(int(panel / lanes), [&](auto n) {
    softmax_n<decltype(n)::value>(lanes, log2_scale, num_keys, scores, max, state);
  });
}

void apply_rules(int64_t panel, const ScoreRules& rules, int64_t first, int64_t num_keys,
                 float* __restrict__ scores, float* __restrict__ max) {
  const bool few = panel < lanes;
  const int64_t keys_at_once = few ? lanes / panel : 1;
  alignas(sizeof(Vec)) int32_t key_of_lane[lanes] = {};
  for (int l = 0; few && l < lanes; ++l) key_of_lane[l] = l >> __builtin_ctzll(uint64_t(panel));
  const Vec hidden = set(minus_infinity);
  const Vec scale = set(rules.scale);
  for (int64_t column = 0; column < panel; column += lanes) {
    Vec top = hidden;
    for (int64_t c = 0; c < num_keys; c += keys_at_once) {
      const int64_t at = c * panel + column;
      Vec s = load_unaligned(scores + at);
      if (rules.scale != 0) s *= scale;
      if (rules.softcap != 0) {
        const Vec cap = set(rules.softcap);
        s = cap * tanh(s / cap);
      }
      if (rules.add) {
        const Vec a = load_unaligned(rules.add + first * panel + at);
        s = a == hidden ? hidden : s + a;
      }
      const Ints key = set(int32_t(first + c)) + load(key_of_lane);
      if (rules.slope) {
        const Ints from = load(rules.position + column) - key;
        const Ints distance = (from < 0 ? -from : from) - load(rules.nearest + column);
        s = fma(-load(rules.slope + column), floats(distance), s);
      }
      if (rules.begin) {
        const Ints inside = (key >= load(rules.begin + column)) & (key < load(rules.end + column));
        s = inside ? s : hidden;
      }
      if (few) s = key < int32_t(first + num_keys) ? s : hidden;
      store_unaligned(s, scores + at);
      top = larger(top, s);
      if (!few && rules.seen && any(s != hidden)) rules.seen[first + c] = 1;
    }
    store(few ? largest_over_keys(top, panel) : top, max + column);
  }
  for (int64_t at = 0; few && rules.seen && at < num_keys * panel; ++at) {
    if (scores[at] != minus_infinity) rules.seen[first + at / panel] = 1;
  }
}

// ---- gradients ---------------------------------------------------------------------------------

// 2^y, 0 below -127, at most 2^127.
ATTN_INLINE Vec exp2_clamped(Vec y) {
  y = y > 127 ? set(127.0f) : y;  // NaN stays
  return exp2_scaled(y, set(1.0f), set(-127.0f));
}

// `plain`: without softcap, ALiBi, bias and masks.
template <int N, bool plain>
void gradients_n(const GradientRules& rules, int64_t rows, float* __restrict__ scores,
                 float* __restrict__ products) {
  constexpr float log2_e = 1.4426950408889634f;
  alignas(64) static const int32_t numbers[48] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                                  12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
                                                  24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35,
                                                  36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47};
  static_assert(N * lanes <= 48);
  const Vec factor = set(plain ? rules.scale * log2_e : log2_e), hidden = set(minus_infinity);
  Ints keys_seen[N] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const Vec lse = set(rules.lse[row]), delta = set(rules.delta[row]);
    bool seen = false;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const int64_t at = (row * N + n) * lanes;
      Vec s = load(scores + at), slope = set(1.0f);
      if constexpr (!plain) {
        s *= set(rules.scale);
        if (rules.softcap != 0) {
          const Vec t = tanh(s / set(rules.softcap));
          s = set(rules.softcap) * t;
          slope = rules.of_scores ? slope : slope - t * t;
        }
        const Ints key = load(numbers + n * lanes);
        if (rules.slope) {
          const Ints from = set(rules.position[row]) - key;
          s = fma(set(-rules.slope[row]), floats(from < 0 ? -from : from), s);
        }
        if (rules.add) {
          const Vec a = load(rules.add + at);
          s = a == hidden ? hidden : s + a;
        }
        if (rules.begin) {
          const Ints inside = (key >= set(rules.begin[row])) & (key < set(rules.end[row]));
          s = inside ? s : hidden;
        }
      }
      Vec p = exp2_clamped(fma(s, factor, -lse));
      Vec ds = p * (load(products + at) - delta);
      if constexpr (!plain) {
        const Ints visible = s != hidden;
        p = visible ? p : Vec{};
        ds = visible ? ds * slope : Vec{};
        keys_seen[n] |= visible;
        seen |= any(visible);
      }
      store(p, scores + at);
      store(ds, products + at);
    }
    if constexpr (!plain) rules.rows_seen[row] = seen;
  }
  if constexpr (!plain) {
    for (int n = 0; n < N; ++n)
      store(as_floats(keys_seen[n]), reinterpret_cast<float*>(rules.keys_seen + n * lanes));
  }
}

void gradients(int vectors, const GradientRules& rules, int64_t rows, float* scores,
               float* products) {
  with_constant<panel_vectors>(vectors, [&](auto n) {
    if (rules.softcap == 0 && !rules.add && !rules.slope && !rules.begin) {
      gradients_n<decltype(n)::value, true>(rules, rows, scores, products);
    } else {
      gradients_n<decltype(n)::value, false>(rules, rows, scores, products);
    }
  });
}

// rows_first: neighbours in `weights` are of neighbouring rows.
template <int M, int N, bool rows_first>
void product_tile(const float* __restrict__ weights, int64_t stride,
                  const float* __restrict__ values, int64_t value_stride, int64_t count,
                  float* __restrict__ out, int64_t out_stride) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = Vec{};
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) v[n] = load(values + k * value_stride + n * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec w = set(rows_first ? weights[k * stride + m] : weights[m * stride + k]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = fma(w, v[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = out + m * out_stride + n * lanes;
      store(load(at) + sum[m][n], at);
    }
  }
}

void add_products(int vectors, int rows, const float* weights, int64_t row_step, int64_t step,
                  const float* values, int64_t value_stride, int64_t count, float* out,
                  int64_t out_stride) {
  with_constant<slab_vectors>(vectors, [&](auto n) {
    with_constant<value_rows>(rows, [&](auto m) {
      if (row_step == 1) {
        product_tile<m.value, n.value, true>(weights, step, values, value_stride, count, out,
                                             out_stride);
      } else {
        product_tile<m.value, n.value, false>(weights, row_step, values, value_stride, count, out,
                                              out_stride);
      }
    });
  });
}

// ---- rows --------------------------------------------------------------------------------------

void multiply(int64_t rows, const float* in, int64_t in_stride, float factor, int64_t n, float* out,
              int64_t out_stride) {
  const Vec scale = set(factor);
  for (int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    int64_t at = 0;
    for (; at + lanes <= n; at += lanes) {
      store_unaligned(load_unaligned(in + at) * scale, out + at);
    }
    for (; at < n; ++at) out[at] = in[at] * factor;
  }
}

#ifdef ATTN_SIMD_F16
void f32_to_f16(const float* in, uint16_t* out, int64_t n) {
  int64_t at = 0;
  for (; at + lanes <= n; at += lanes) f32_to_f16(in + at, out + at);
  if (at == n) return;
  // A row's end goes through a whole vector on the stack.
  float wide[lanes] = {};
  uint16_t part[lanes];
  for (int64_t j = at; j < n; ++j) wide[j - at] = in[j];
  f32_to_f16(wide, part);
  for (int64_t j = at; j < n; ++j) out[j] = part[j - at];
}
#endif

// Rows of blocks have whole vectors.
template <attn_dtype type, int element_bytes, bool scaled>
void load_rows_as(const char* base, int64_t row_bytes, int64_t rows, int64_t index, int64_t n,
                  float factor, float* __restrict__ out, int64_t out_stride) {
  const auto value = [&](const char* row, int64_t at) {
    Vec v[1];
    elements<type>(row, at, v);
    return scaled ? v[0] * factor : v[0];
  };
  for (int64_t row = 0; row < rows; ++row, base += row_bytes, out += out_stride) {
    int64_t at = 0;
    for (; at + lanes <= n; at += lanes) {
      store_unaligned(value(base, index + at), out + at);
    }
    constexpr bool whole = is_ggml(type);
    if (whole || at == n) continue;
    const auto bytes = [](int64_t n) { return type == ATTN_I4 ? n / 2 : n * element_bytes; };
    char part[4 * lanes] = {};
    __builtin_memcpy(part, base + bytes(index + at), size_t(bytes(n - at)));
    const Vec last = value(part, 0);
    __builtin_memcpy(out + at, &last, size_t(n - at) * sizeof(float));
  }
}

template <attn_dtype type, int element_bytes>
void load_rows_of(const char* base, int64_t row_bytes, int64_t rows, int64_t index, int64_t n,
                  float factor, float* out, int64_t out_stride) {
  if (factor == 1) {
    load_rows_as<type, element_bytes, false>(base, row_bytes, rows, index, n, 1, out, out_stride);
  } else {
    load_rows_as<type, element_bytes, true>(base, row_bytes, rows, index, n, factor, out,
                                            out_stride);
  }
}

bool load_rows(attn_dtype type, const char* base, int64_t row_bytes, int64_t rows, int64_t index,
               int64_t n, float factor, float* out, int64_t out_stride) {
  return with_type<few_types>(type, [&](auto t) {
    load_rows_of<t.type, element_bytes_of(t.type)>(base, row_bytes, rows, index, n, factor, out,
                                                   out_stride);
  });
}

// A plain loop, which the compiler turns into vectors of this file's instruction set.
void f32_to_bf16(const float* __restrict__ in, uint16_t* __restrict__ out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    uint32_t bits;
    __builtin_memcpy(&bits, in + j, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out[j] = uint16_t(nan ? (bits >> 31 << 15 | 0x7fc0) : rounded);
  }
}

// ---- the ceiling -------------------------------------------------------------------------------

double fma_rounds(int64_t rounds, float* sink) {
  constexpr int chains = 12;  // more than latency times pipes
  const Vec a = set(0.999999f), b = set(1e-6f);
  Vec sum[chains];
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) sum[c] = set(float(c) * *sink);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) sum[c] = fma(sum[c], a, b);
  }
#pragma GCC unroll 12
  for (int c = 1; c < chains; ++c) sum[0] += sum[c];
  *sink = sum[0][0];
  return 2.0 * double(chains * lanes) * double(rounds);
}

}  // namespace
}  // namespace ATTN_SIMD_NAMESPACE

const TileOps ATTN_SIMD_OPS = {
    .lanes = int(ATTN_SIMD_NAMESPACE::lanes),
    .panel_vectors = ATTN_SIMD_NAMESPACE::panel_vectors,
    .slab_vectors = ATTN_SIMD_NAMESPACE::slab_vectors,
    .value_rows = ATTN_SIMD_NAMESPACE::value_rows,
    .few_rows = int(ATTN_SIMD_NAMESPACE::lanes / 2),
    .few_height = ATTN_SIMD_NAMESPACE::few_height,
    .few_types = ATTN_SIMD_NAMESPACE::few_types,
    .load_rows = ATTN_SIMD_NAMESPACE::load_rows,
#ifdef ATTN_SIMD_F16
    .f32_to_f16 = ATTN_SIMD_NAMESPACE::f32_to_f16,
#else
    .f32_to_f16 = nullptr,
#endif
    .f32_to_bf16 = ATTN_SIMD_NAMESPACE::f32_to_bf16,
    .scores = ATTN_SIMD_NAMESPACE::scores,
    .scores_few = ATTN_SIMD_NAMESPACE::scores_few,
    .apply_rules = ATTN_SIMD_NAMESPACE::apply_rules,
    .softmax = ATTN_SIMD_NAMESPACE::softmax,
    .accumulate = ATTN_SIMD_NAMESPACE::accumulate,
    .accumulate_few = ATTN_SIMD_NAMESPACE::accumulate_few,
    .gradients = ATTN_SIMD_NAMESPACE::gradients,
    .add_products = ATTN_SIMD_NAMESPACE::add_products,
    .multiply = ATTN_SIMD_NAMESPACE::multiply,
    .fma_rounds = ATTN_SIMD_NAMESPACE::fma_rounds,
};

}  // namespace attn
