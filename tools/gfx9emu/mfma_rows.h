// The vector code behind mfma(), once per instruction set of the host.
#pragma once
#include <cstdint>

namespace gfx9emu {

// sign, exponent and fraction, from the highest bit down.
struct SmallFloat {
  // fnuz: no infinity, and only the code of -0 is NaN. fn: no infinity, and only the largest code
  // of either sign is NaN.
  enum class Kind : uint8_t { ieee, fnuz, fn };
  int exponent_bits, fraction_bits, bias;
  Kind kind = Kind::ieee;
  constexpr int bits() const { return 1 + exponent_bits + fraction_bits; }
  constexpr uint32_t sign() const { return 1u << (exponent_bits + fraction_bits); }
};
inline constexpr SmallFloat fp8_format{4, 3, 8, SmallFloat::Kind::fnuz},
    bf8_format{5, 2, 16, SmallFloat::Kind::fnuz}, e4m3_format{4, 3, 7, SmallFloat::Kind::fn},
    f16_format{5, 10, 15}, bf16_format{8, 7, 127}, f32_format{8, 23, 127};

// Fraction bits that are kept: of products and of C, and of their sum where it meets C.
inline constexpr int mfma_term_bits = 24, mfma_sum_bits = 31;

// D = A B + C of a shape with one block of `size` rows and columns and `k` products, of f16 and
// bf16 those of gfx942. `c_stride` as of mfma(). False, with D untouched: an operand is infinite or
// NaN, or a product may be. D may be C and may overlap A and B.
struct MfmaRows {
  bool (*f8)(const SmallFloat& a_format, const SmallFloat& b_format, int size, int k, bool clamp,
             const uint32_t* a, const uint32_t* b, const uint32_t* c, int c_stride, uint32_t* d);
  bool (*f16)(int size, bool clamp, const uint32_t* a, const uint32_t* b, const uint32_t* c,
              int c_stride, uint32_t* d);
  bool (*bf16)(int size, bool clamp, const uint32_t* a, const uint32_t* b, const uint32_t* c,
               int c_stride, uint32_t* d);
};
extern const MfmaRows mfma_rows_baseline, mfma_rows_avx2, mfma_rows_avx512;

}  // namespace gfx9emu
