// Vectors of the instruction set whose flags this is compiled with: the compiler's own types and
// operators, and intrinsics for what those have not. For tile_ops-inl.h, which gives the namespace.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ATTN_INLINE inline __attribute__((always_inline))

namespace attn {
namespace ATTN_SIMD_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#elif defined(__AVX2__)
constexpr int64_t lanes = 8;
#else
constexpr int64_t lanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));  // a comparison gives -1 and 0
// The same in memory, at an address of whole vectors or of any float.
typedef float Stored __attribute__((vector_size(4 * lanes), may_alias));
typedef float StoredAnywhere __attribute__((vector_size(4 * lanes), may_alias, aligned(4)));
typedef int32_t StoredInts __attribute__((vector_size(4 * lanes), may_alias));
// As many smaller numbers.
typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
typedef uint8_t Bytes __attribute__((vector_size(lanes)));
typedef int8_t SignedBytes __attribute__((vector_size(lanes)));

// From any address.
template <class V>
ATTN_INLINE V read(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

ATTN_INLINE Vec load(const float* from) {
  return *reinterpret_cast<const Stored*>(from);
}
ATTN_INLINE Vec load_unaligned(const float* from) {
  return *reinterpret_cast<const StoredAnywhere*>(from);
}
ATTN_INLINE Ints load(const int32_t* from) {
  return *reinterpret_cast<const StoredInts*>(from);
}
ATTN_INLINE void store(Vec v, float* to) {
  *reinterpret_cast<Stored*>(to) = v;
}
ATTN_INLINE void store_unaligned(Vec v, float* to) {
  *reinterpret_cast<StoredAnywhere*>(to) = v;
}

// In all lanes. Not Vec{} + x, which makes 0 of -0.
ATTN_INLINE Vec set(float x) {
  return x - Vec{};
}
ATTN_INLINE Ints set(int32_t x) {
  return x - Ints{};
}
ATTN_INLINE Vec as_floats(Ints bits) {
  return reinterpret_cast<Vec>(bits);
}
ATTN_INLINE Ints as_ints(Vec v) {
  return reinterpret_cast<Ints>(v);
}
ATTN_INLINE Vec floats(Ints numbers) {
  return __builtin_convertvector(numbers, Vec);
}

#if defined(__AVX2__)
// The numbers of the low eight bytes, two in each.
ATTN_INLINE __m128i signed_halves(__m128i pairs) {
  const __m128i low = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
  const __m128i codes =
      _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  return _mm_sub_epi8(_mm_xor_si128(codes, sign), sign);
}
#endif

// fma: a * b + c, rounded once where the instruction set can. larger: b where one is NaN, on
// aarch64 NaN. sum_of_lanes, sums_of_lanes (lane n: that of v[n]): always in the same order. any:
// of a comparison's lanes. ints, halves: the same numbers in more bits.
#if defined(__AVX512F__)
ATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
ATTN_INLINE Vec larger(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
ATTN_INLINE float sum_of_lanes(Vec v) {
  return _mm512_reduce_add_ps(v);
}
// In each quarter the sums of v[0] to v[3] over that quarter.
ATTN_INLINE Vec sums_in_quarters(const Vec* v) {
  const Vec ab = _mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]);
  const Vec cd = _mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]);
  return _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
}
ATTN_INLINE Vec sums_of_lanes(const Vec (&v)[lanes]) {
  const Vec a = sums_in_quarters(v), b = sums_in_quarters(v + 4), c = sums_in_quarters(v + 8),
            d = sums_in_quarters(v + 12);
  const Vec ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const Vec cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  return _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
}
ATTN_INLINE bool any(Ints mask) {
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
}
ATTN_INLINE Ints ints(Halves v) {
  return reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
}
ATTN_INLINE Ints ints(SignedBytes v) {
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(v)));
}
ATTN_INLINE Ints ints(Bytes v) {
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(v)));
}
// lanes / 2 bytes, each of which has two numbers with a sign, the first one in its low half.
ATTN_INLINE Ints ints_of_halves(const char* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(signed_halves(bytes)));
}
ATTN_INLINE Ints numbers() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
// table[index % 16] of each index.
ATTN_INLINE Vec lookup(Vec table, Ints index) {
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), table);
}
ATTN_INLINE SignedBytes lookup(const int8_t (&table)[16], Bytes index) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return reinterpret_cast<SignedBytes>(_mm_shuffle_epi8(all, reinterpret_cast<__m128i>(index)));
}
ATTN_INLINE Halves halves(SignedBytes v) {
  return reinterpret_cast<Halves>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(v)));
}
ATTN_INLINE Vec f16_to_f32(Halves codes) {
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(codes));
}
ATTN_INLINE void f32_to_f16(const float* in, uint16_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtps_ph(load_unaligned(in), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
ATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
ATTN_INLINE Vec larger(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
ATTN_INLINE float sum_of_lanes(Vec v) {
  __m128 part = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
  part += _mm_movehl_ps(part, part);
  return part[0] + part[1];
}
ATTN_INLINE Vec sums_in_halves(const Vec* v) {
  return _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
}
ATTN_INLINE Vec sums_of_lanes(const Vec (&v)[lanes]) {
  const Vec a = sums_in_halves(v), b = sums_in_halves(v + 4);
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
ATTN_INLINE bool any(Ints mask) {
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
}
ATTN_INLINE Ints ints(Halves v) {
  return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
}
ATTN_INLINE Ints ints(SignedBytes v) {
  const __m128i low = _mm_cvtsi64_si128(reinterpret_cast<int64_t>(v));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(low));
}
ATTN_INLINE Ints ints_of_halves(const char* from) {
  int32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(signed_halves(_mm_cvtsi32_si128(bytes))));
}
ATTN_INLINE Ints numbers() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7};
}
// table[index] of each index below 16.
ATTN_INLINE SignedBytes lookup(const int8_t (&table)[16], Bytes index) {
  const __m128i low = _mm_cvtsi64_si128(reinterpret_cast<int64_t>(index));
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return reinterpret_cast<SignedBytes>(_mm_cvtsi128_si64(_mm_shuffle_epi8(all, low)));
}
ATTN_INLINE Halves halves(SignedBytes v) {
  const __m128i low = _mm_cvtsi64_si128(reinterpret_cast<int64_t>(v));
  return reinterpret_cast<Halves>(_mm_cvtepi8_epi16(low));
}
ATTN_INLINE Vec f16_to_f32(Halves codes) {
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(codes));
}
ATTN_INLINE void f32_to_f16(const float* in, uint16_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm256_cvtps_ph(load_unaligned(in), _MM_FROUND_TO_NEAREST_INT));
}
#else
ATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
ATTN_INLINE Vec larger(Vec a, Vec b) {
#if defined(__x86_64__)
  return _mm_max_ps(a, b);
#elif defined(__aarch64__)
  return vmaxq_f32(a, b);
#else
  return a > b ? a : b;
#endif
}
ATTN_INLINE float sum_of_lanes(Vec v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}
ATTN_INLINE Vec sums_of_lanes(const Vec (&v)[lanes]) {
  return Vec{sum_of_lanes(v[0]), sum_of_lanes(v[1]), sum_of_lanes(v[2]), sum_of_lanes(v[3])};
}
ATTN_INLINE Ints ints(Halves v) {
  return __builtin_convertvector(v, Ints);
}
ATTN_INLINE bool any(Ints mask) {
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
}
#endif
#if defined(__aarch64__)
// Four bytes are half of the smallest vector; its upper half is 0.
template <class V>
ATTN_INLINE int8x8_t widened(V four) {
  return vreinterpret_s8_u64(vcreate_u64(__builtin_bit_cast(uint32_t, four)));
}
ATTN_INLINE Halves halves(SignedBytes v) {
  return reinterpret_cast<Halves>(vget_low_s16(vmovl_s8(widened(v))));
}
ATTN_INLINE Ints ints(SignedBytes v) {
  return vmovl_s16(vget_low_s16(vmovl_s8(widened(v))));
}
ATTN_INLINE Ints ints_of_halves(const char* from) {
  const uint32_t pairs = uint8_t(from[0]) | uint8_t(from[1]) << 16, sign = 0x08080808;
  const int8x8_t codes = widened(((pairs | pairs << 4) & 0x0f0f0f0f) ^ sign);
  return vmovl_s16(vget_low_s16(vsubl_s8(codes, widened(sign))));
}
ATTN_INLINE Ints numbers() {
  return Ints{0, 1, 2, 3};
}
ATTN_INLINE SignedBytes lookup(const int8_t (&table)[16], Bytes index) {
  const int8x8_t found = vqtbl1_s8(vld1q_s8(table), vreinterpret_u8_s8(widened(index)));
  return __builtin_bit_cast(SignedBytes, vget_lane_s32(vreinterpret_s32_s8(found), 0));
}
ATTN_INLINE Vec f16_to_f32(Halves codes) {
  return vcvt_f32_f16(reinterpret_cast<float16x4_t>(codes));
}
ATTN_INLINE void f32_to_f16(const float* in, uint16_t* out) {
  vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32(load_unaligned(in))));
}
#endif
// Of bytes with two numbers below 16 in each.
ATTN_INLINE Bytes low_halves(Bytes pairs) {
  return pairs & 15;
}
ATTN_INLINE Bytes high_halves(Bytes pairs) {
#if defined(__aarch64__)
  return __builtin_bit_cast(Bytes, __builtin_bit_cast(uint32_t, pairs) >> 4 & 0x0f0f0f0f);
#else
  return pairs >> 4;
#endif
}

ATTN_INLINE Vec abs(Vec v) {
  return as_floats(as_ints(v) & 0x7fffffff);
}
ATTN_INLINE Vec copysign(Vec size, Vec sign) {
  return as_floats(as_ints(size) | (as_ints(sign) & INT32_MIN));
}

}  // namespace
}  // namespace ATTN_SIMD_NAMESPACE
}  // namespace attn
