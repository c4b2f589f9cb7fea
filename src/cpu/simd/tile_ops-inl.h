// The bodies of TileOps. Each file that includes this defines ATTN_SIMD_NAMESPACE and ATTN_SIMD_OPS (and
// ATTN_SIMD_LANES to have the instruction set checked), and is compiled with the flags of one instruction
// set. No standard library in here, see tile_ops.h.
#define HWY_COMPILE_ONLY_STATIC
#include <hwy/highway.h>
// highway.h first
#include <hwy/contrib/math/math-inl.h>

#include "cpu/simd/tile_ops.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace ATTN_SIMD_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using Vec = hn::Vec<F>;
constexpr F f;
constexpr I i32;
constexpr int64_t lanes = HWY_LANES(float);
#ifdef ATTN_SIMD_LANES
static_assert(lanes == ATTN_SIMD_LANES, "Highway wants more flags to choose this instruction set");
#endif

// Register tiles: accumulators, one row of operands and a broadcast fit the register file.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64
constexpr int panel_vectors = 3, score_keys = 8;   // 8 x 3
constexpr int slab_vectors = 4, value_rows = 6;    // 6 x 4
#else
constexpr int panel_vectors = 3, score_keys = 4;   // 4 x 3
constexpr int slab_vectors = 2, value_rows = 6;    // 6 x 2
#endif

const float minus_infinity = -__builtin_inff();

template <int n>
struct Int {
  static constexpr int value = n;
};

// Calls body(Int<n>) for the n in [1, limit] that equals `value`.
template <int limit, class Body>
HWY_INLINE void with_constant(int value, const Body& body) {
  if (value == limit) {
    body(Int<limit>());
  } else if constexpr (limit > 1) {
    with_constant<limit - 1>(value, body);
  }
}

// ---- products ----------------------------------------------------------------------------------

template <int M, int N>
HWY_INLINE void score_tile(const float* HWY_RESTRICT queries, const float* HWY_RESTRICT keys,
                           int64_t key_stride, int64_t dim, float* HWY_RESTRICT scores, Vec* max) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = hn::Zero(f);
  }
  for (int64_t d = 0; d < dim; ++d) {
    Vec q[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) q[n] = hn::Load(f, queries + (d * N + n) * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec k = hn::Set(f, keys[m * key_stride + d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = hn::MulAdd(k, q[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      hn::Store(sum[m][n], f, scores + (m * N + n) * lanes);
      max[n] = hn::Max(max[n], sum[m][n]);
    }
  }
}

template <int N>
void scores_n(const float* queries, const float* keys, int64_t key_stride, int64_t dim,
              int64_t num_keys, float* scores, float* max) {
  Vec top[N];
  for (int n = 0; n < N; ++n) top[n] = hn::Set(f, minus_infinity);
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
  for (int n = 0; n < N; ++n) hn::Store(top[n], f, max + n * lanes);
}

void scores(int vectors, const float* queries, const float* keys, int64_t key_stride, int64_t dim,
            int64_t num_keys, float* scores, float* max) {
  with_constant<panel_vectors>(vectors, [&](auto n) {
    scores_n<decltype(n)::value>(queries, keys, key_stride, dim, num_keys, scores, max);
  });
}

template <int M>
HWY_INLINE void few_tile(int rows, const float* HWY_RESTRICT queries, int64_t query_stride,
                         const float* HWY_RESTRICT keys, int64_t key_stride, int64_t dim,
                         float* HWY_RESTRICT scores) {
  for (int row = 0; row < rows; ++row) {
    Vec sum[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sum[m] = hn::Zero(f);
    for (int64_t d = 0; d < dim; d += lanes) {
      const Vec q = hn::Load(f, queries + row * query_stride + d);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sum[m] = hn::MulAdd(q, hn::LoadU(f, keys + m * key_stride + d), sum[m]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      scores[m * lanes + row] = hn::GetLane(hn::SumOfLanes(f, sum[m]));
    }
  }
}

void scores_few(int rows, const float* queries, int64_t query_stride, const float* keys,
                int64_t key_stride, int64_t dim, int64_t num_keys, float* scores) {
  for (int64_t key = 0; key < num_keys; ++key) hn::Store(hn::Zero(f), f, scores + key * lanes);
  int64_t key = 0;
  for (; key + 8 <= num_keys; key += 8) {
    few_tile<8>(rows, queries, query_stride, keys + key * key_stride, key_stride, dim,
                scores + key * lanes);
  }
  for (; key < num_keys; ++key) {
    few_tile<1>(rows, queries, query_stride, keys + key * key_stride, key_stride, dim,
                scores + key * lanes);
  }
}

template <int M, int N>
void value_tile(const float* HWY_RESTRICT weights, int64_t panel, const float* HWY_RESTRICT values,
                int64_t value_stride, int64_t num_keys, const float* HWY_RESTRICT rescale, float* HWY_RESTRICT out,
                int64_t out_stride) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec factor = hn::Set(f, rescale[m]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      sum[m][n] = hn::Mul(factor, hn::Load(f, out + m * out_stride + n * lanes));
    }
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    Vec v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) v[n] = hn::LoadU(f, values + key * value_stride + n * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec w = hn::Set(f, weights[key * panel + m]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = hn::MulAdd(w, v[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) hn::Store(sum[m][n], f, out + m * out_stride + n * lanes);
  }
}

void accumulate(int vectors, int rows, const float* weights, int64_t panel, const float* values,
                int64_t value_stride, int64_t num_keys, const float* rescale, float* out, int64_t out_stride) {
  with_constant<slab_vectors>(vectors, [&](auto n) {
    with_constant<value_rows>(rows, [&](auto m) {
      value_tile<decltype(m)::value, decltype(n)::value>(
          weights, panel, values, value_stride, num_keys, rescale, out, out_stride);
    });
  });
}

// ---- softmax -----------------------------------------------------------------------------------

// 2^(x * scale) for x * scale <= 0 or barely above, x >= lowest = -127 / scale. 2^n is made of the low
// bits of x * scale + magic; n = -127 gives 0. The polynomial is a minimax fit on [-1/2, 1/2] that is
// exact at 0, relative error 2e-9.
HWY_INLINE Vec exp2_scaled(Vec x, Vec scale, Vec lowest) {
  const Vec magic = hn::Set(f, 12582912.0f + 127.0f);
  // Not Max, which may drop NaN.
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  const Vec shifted = hn::MulAdd(x, scale, magic);
  const Vec n = hn::Sub(shifted, magic);
  const Vec r = hn::MulSub(x, scale, n);
  Vec p = hn::Set(f, 1.5353362063e-04f);
  p = hn::MulAdd(p, r, hn::Set(f, 1.3398874557e-03f));
  p = hn::MulAdd(p, r, hn::Set(f, 9.6184373582e-03f));
  p = hn::MulAdd(p, r, hn::Set(f, 5.5503324708e-02f));
  p = hn::MulAdd(p, r, hn::Set(f, 2.4022647914e-01f));
  p = hn::MulAdd(p, r, hn::Set(f, 6.9314720286e-01f));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0f));
  const Vec power = hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(i32, shifted)));
  return hn::Mul(p, power);
}

template <int N>
void softmax_n(float log2_scale, int64_t num_keys, float* HWY_RESTRICT scores, const float* max,
               const SoftmaxState& state) {
  const Vec scale = hn::Set(f, log2_scale);
  const Vec lowest = hn::Set(f, -127.0f / log2_scale);
  const Vec hidden = hn::Set(f, minus_infinity);
  Vec base[N], sum[N];
  for (int n = 0; n < N; ++n) {
    const Vec before = hn::Load(f, state.max + n * lanes);
    const Vec now = hn::Max(before, hn::Load(f, max + n * lanes));
    base[n] = hn::IfThenElseZero(hn::Ne(now, hidden), now);  // no visible key yet: any finite base
    sum[n] = hn::Zero(f);
    const Vec factor = exp2_scaled(hn::Sub(before, base[n]), scale, lowest);
    hn::Store(now, f, state.max + n * lanes);
    hn::Store(factor, f, state.rescale + n * lanes);
  }
  for (int64_t key = 0; key < num_keys; ++key) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = scores + (key * N + n) * lanes;
      const Vec p = exp2_scaled(hn::Sub(hn::Load(f, at), base[n]), scale, lowest);
      hn::Store(p, f, at);
      sum[n] = hn::Add(sum[n], p);
    }
  }
  for (int n = 0; n < N; ++n) {
    float* at = state.sum + n * lanes;
    hn::Store(hn::MulAdd(hn::Load(f, at), hn::Load(f, state.rescale + n * lanes), sum[n]), f, at);
  }
}

void softmax(int vectors, float log2_scale, int64_t num_keys, float* scores, const float* max,
             const SoftmaxState& state) {
  with_constant<panel_vectors>(vectors, [&](auto n) {
    softmax_n<decltype(n)::value>(log2_scale, num_keys, scores, max, state);
  });
}

void apply_rules(int vectors, const ScoreRules& rules, int64_t first, int64_t num_keys,
                 float* HWY_RESTRICT scores, float* HWY_RESTRICT max) {
  const int64_t panel = vectors * lanes;
  const Vec hidden = hn::Set(f, minus_infinity);
  const Vec scale = hn::Set(f, rules.scale);
  for (int64_t column = 0; column < panel; column += lanes) {
    Vec top = hidden;
    for (int64_t c = 0; c < num_keys; ++c) {
      const int64_t at = c * panel + column;
      Vec s = hn::Load(f, scores + at);
      if (rules.scale != 0) s = hn::Mul(s, scale);
      if (rules.softcap != 0) {
        const Vec cap = hn::Set(f, rules.softcap);
        s = hn::Mul(cap, hn::Tanh(f, hn::Div(s, cap)));
      }
      if (rules.add) {
        const Vec a = hn::Load(f, rules.add + first * panel + at);
        s = hn::IfThenElse(hn::Eq(a, hidden), hidden, hn::Add(s, a));
      }
      const auto key = hn::Set(i32, int32_t(first + c));
      if (rules.slope) {
        const auto distance =
            hn::Sub(hn::Abs(hn::Sub(hn::Load(i32, rules.position + column), key)),
                    hn::Load(i32, rules.nearest + column));
        s = hn::NegMulAdd(hn::Load(f, rules.slope + column), hn::ConvertTo(f, distance), s);
      }
      if (rules.begin) {
        const auto inside = hn::AndNot(hn::Lt(key, hn::Load(i32, rules.begin + column)),
                                       hn::Lt(key, hn::Load(i32, rules.end + column)));
        s = hn::IfThenElse(hn::RebindMask(f, inside), s, hidden);
      }
      hn::Store(s, f, scores + at);
      top = hn::Max(top, s);
      if (rules.seen && !hn::AllTrue(f, hn::Eq(s, hidden))) rules.seen[first + c] = 1;
    }
    hn::Store(top, f, max + column);
  }
}

// ---- rows --------------------------------------------------------------------------------------

void multiply(int64_t rows, const float* in, int64_t in_stride, float factor, int64_t n, float* out,
              int64_t out_stride) {
  const Vec scale = hn::Set(f, factor);
  for (int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    int64_t at = 0;
    for (; at + lanes <= n; at += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(f, in + at), scale), f, out + at);
    }
    for (; at < n; ++at) out[at] = in[at] * factor;
  }
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define ATTN_SIMD_F16 1
using F16 = hn::Rebind<hwy::float16_t, F>;
using U16 = hn::Rebind<uint16_t, F>;

// A row's end goes through a whole vector on the stack.
void f16_to_f32(const uint16_t* in, float* out, int64_t n) {
  int64_t at = 0;
  for (; at + lanes <= n; at += lanes) {
    const auto half = hn::BitCast(F16(), hn::LoadU(U16(), in + at));
    hn::StoreU(hn::PromoteTo(f, half), f, out + at);
  }
  if (at == n) return;
  HWY_ALIGN uint16_t part[lanes] = {};
  HWY_ALIGN float wide[lanes];
  for (int64_t j = at; j < n; ++j) part[j - at] = in[j];
  hn::Store(hn::PromoteTo(f, hn::BitCast(F16(), hn::Load(U16(), part))), f, wide);
  for (int64_t j = at; j < n; ++j) out[j] = wide[j - at];
}

void f32_to_f16(const float* in, uint16_t* out, int64_t n) {
  int64_t at = 0;
  for (; at + lanes <= n; at += lanes) {
    const auto half = hn::DemoteTo(F16(), hn::LoadU(f, in + at));
    hn::StoreU(hn::BitCast(U16(), half), U16(), out + at);
  }
  if (at == n) return;
  HWY_ALIGN float wide[lanes] = {};
  HWY_ALIGN uint16_t part[lanes];
  for (int64_t j = at; j < n; ++j) wide[j - at] = in[j];
  hn::Store(hn::BitCast(U16(), hn::DemoteTo(F16(), hn::Load(f, wide))), U16(), part);
  for (int64_t j = at; j < n; ++j) out[j] = part[j - at];
}
#endif

// Plain loops, which the compiler turns into vectors of this file's instruction set.
void bf16_to_f32(const uint16_t* HWY_RESTRICT in, float* HWY_RESTRICT out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t bits = uint32_t(in[j]) << 16;
    __builtin_memcpy(out + j, &bits, sizeof(bits));
  }
}

void f32_to_bf16(const float* HWY_RESTRICT in, uint16_t* HWY_RESTRICT out, int64_t n) {
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
  const Vec a = hn::Set(f, 0.999999f), b = hn::Set(f, 1e-6f);
  Vec sum[chains];
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) sum[c] = hn::Set(f, float(c) * *sink);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) sum[c] = hn::MulAdd(sum[c], a, b);
  }
#pragma GCC unroll 12
  for (int c = 1; c < chains; ++c) sum[0] = hn::Add(sum[0], sum[c]);
  *sink = hn::GetLane(sum[0]);
  return 2.0 * double(chains * lanes) * double(rounds);
}

}  // namespace
}  // namespace ATTN_SIMD_NAMESPACE

const TileOps ATTN_SIMD_OPS = {
    .lanes = int(ATTN_SIMD_NAMESPACE::lanes),
    .panel_vectors = ATTN_SIMD_NAMESPACE::panel_vectors,
    .slab_vectors = ATTN_SIMD_NAMESPACE::slab_vectors,
    .few_rows = int(ATTN_SIMD_NAMESPACE::lanes / 4),
#ifdef ATTN_SIMD_F16
    .f16_to_f32 = ATTN_SIMD_NAMESPACE::f16_to_f32,
#else
    .f16_to_f32 = nullptr,
#endif
    .bf16_to_f32 = ATTN_SIMD_NAMESPACE::bf16_to_f32,
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
    .multiply = ATTN_SIMD_NAMESPACE::multiply,
    .fma_rounds = ATTN_SIMD_NAMESPACE::fma_rounds,
};

}  // namespace attn
HWY_AFTER_NAMESPACE();
