// The dense MFMA instructions of gfx942, and two of gfx950: shapes, register layouts, arithmetic.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace gfx9emu {

// Fp8 and Bf8 are FNUZ; E4m3 is e4m3 of the OCP kind.
enum class MfmaType : uint8_t { F32, Xf32, F16, Bf16, Fp8, Bf8, E4m3, I8, F64 };

struct MfmaShape {
  const char* name;  // "v_mfma_f32_32x32x16_fp8_bf8"
  MfmaType a, b;
  uint8_t m, n, k, blocks;
  uint8_t passes;          // of 4 clocks
  bool xdl;                // runs in the matrix unit proper; f32 and f64 do not (hazards differ)
  uint8_t a_regs, d_regs;  // 32-bit registers of A (and of B), of D (and of C)

  // Multiplications of one execution.
  uint64_t macs() const { return uint64_t(m) * n * k * blocks; }
};
std::span<const MfmaShape> mfma_shapes();  // of gfx942
// What is emulated of those that gfx950 alone has: ..._f8f6f4 with both operands in e4m3 (cbsz and
// blgp 0). Their scaled forms, bf8, fp6 and fp4 are not.
std::span<const MfmaShape> gfx950_mfma_shapes();
// Of either. Null if there is no such dense MFMA. The older spellings ("v_mfma_f32_32x32x8f16") are
// not known.
const MfmaShape* find_mfma(std::string_view name);

// Where an element lies: its lane, the register counted from the operand's first, its lowest bit.
// An f64 lies in registers `reg` and `reg` + 1.
struct MfmaPlace {
  int lane, reg, bit;
  bool operator==(const MfmaPlace&) const = default;
};
MfmaPlace mfma_a_place(const MfmaShape& s, int block, int i, int k);
MfmaPlace mfma_b_place(const MfmaShape& s, int block, int k, int j);
// Of C too.
MfmaPlace mfma_d_place(const MfmaShape& s, int block, int i, int j);

struct MfmaModifiers {
  uint8_t cbsz = 0, abid = 0;  // block `abid` of each 2^cbsz blocks of A serves them all
  uint8_t blgp = 0;            // pattern of B's lanes; of f64, the signs: bit 0 A, 1 B, 2 C
  bool fp16_ovfl = false;      // MODE.FP16_OVFL: f32 results that overflow are clamped
};
// "" or why the instruction does not take these modifiers.
std::string mfma_refuses(const MfmaShape& s, const MfmaModifiers& m);

// D = A B + C. A register is 64 consecutive uint32, by lane, and the next register follows it. C
// may be one constant for all of it: c_stride 0 and 64 equal values at `c`; else c_stride 64. D may
// be or overlap any source. EXEC has no part in it.
//
// F16, Bf16, Fp8, Bf8 follow the arithmetic that MMA-Sim (arXiv 2511.10909) found bit-equal to
// MI300X: exact products, truncated sums, one rounding per 16 (fp8, bf8) or 8 (f16, bf16) k. Its
// Xf32 likewise, per 4 k. E4m3 is computed as Fp8 is, for want of a model of gfx950: what depends
// on the order of its sums is not known. F32 and F64 are chains of FMA in the order of k. I8 wraps.
// A NaN result is 0x7fc00000; the payload on hardware is not known.
void mfma(const MfmaShape& s, const uint32_t* a, const uint32_t* b, const uint32_t* c, int c_stride,
          uint32_t* d, const MfmaModifiers& modifiers = {});

// As mfma(), element by element in integers. Slow; mfma() uses it where operands are infinite or
// NaN and for the shapes that it has no faster way for. Here for tests.
void mfma_by_element(const MfmaShape& s, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                     int c_stride, uint32_t* d, const MfmaModifiers& modifiers = {});

}  // namespace gfx9emu
