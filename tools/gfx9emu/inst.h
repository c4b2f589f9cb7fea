// One decoded instruction of gfx942 or gfx950, as everything after the decoder sees it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace gfx9emu {

class Wave;
struct Inst;
struct MfmaShape;
using Handler = void (*)(Wave&, const Inst&);
struct WaveRegisters;
// An operation whose bits each depend on the same bit of two operands. Of save-exec operations the
// second is EXEC; where there is one, the second is 0.
using BitFunction = uint64_t (*)(uint64_t, uint64_t);
using LaneHandler = void (*)(WaveRegisters&, const Inst&);

// What they differ in: gfx950 has fp8 of the OCP kind and 160 KiB of LDS, and waits longer behind
// an MFMA.
enum class Arch : uint8_t { Gfx942, Gfx950 };
struct ArchFacts {
  const char* name;
  uint32_t mach;  // the low byte of e_flags
  uint32_t lds_bytes;
};
const ArchFacts& facts_of(Arch arch);

enum class RegFile : uint8_t { Scalar, Vgpr, Agpr };

// Scalar registers carry their hardware numbers: s0..s101, then these. 64-bit ones take two.
namespace scalar {
inline constexpr uint16_t flat_scratch = 102, xnack_mask = 104, vcc = 106, ttmp0 = 108, m0 = 124,
                          exec = 126;
inline constexpr uint16_t scc = 128;  // not a register of the file: the condition bit
inline constexpr uint16_t count = 129;
}  // namespace scalar

// `count` consecutive 32-bit registers.
struct RegRange {
  RegFile file = RegFile::Scalar;
  uint16_t first = 0;
  uint16_t count = 0;

  bool overlaps(const RegRange& o) const {
    return file == o.file && first < o.first + o.count && o.first < first + count;
  }
  bool operator==(const RegRange&) const = default;
};

// What an operand holds. Its constants, the bit that neg and abs change and the halves that are
// read follow from it.
enum class Type : uint8_t {
  None,
  B16,  // an integer in half a register, which op_sel names
  F16,
  PkB16,  // two in the halves of a register, which op_sel and op_sel_hi name
  PkF16,
  Fp8,  // one or two codes in half a register
  B32,
  F32,
  Mix,    // F16 where op_sel_hi says so, else F32
  PkB32,  // two in a pair of registers, which op_sel and op_sel_hi name
  PkF32,
  B64,  // a literal is extended by zeros
  I64,  // by its sign
  F64,  // a literal is the high half
};
constexpr bool is_float(Type t) {
  return t == Type::F16 || t == Type::PkF16 || t == Type::F32 || t == Type::Mix ||
         t == Type::PkF32 || t == Type::F64;
}

// Which half of its destination an operation leaves as it was; Other: the one that op_sel does not
// name.
enum class Keeps : uint8_t { Nothing, Other, High, Low };

// Of an operation. What is not said is B32.
struct Types {
  Type dst = Type::B32;
  std::array<Type, 3> src{Type::B32, Type::B32, Type::B32};
  Keeps keeps = Keeps::Nothing;
};

// Which part of a 32-bit register an SDWA operand is.
enum class Sdwa : uint8_t { Byte0, Byte1, Byte2, Byte3, Word0, Word1, Dword };

struct Operand {
  enum class Kind : uint8_t { None, Register, Constant, Off };
  Kind kind = Kind::None;
  RegRange reg;        // Kind::Register
  RegRange read;       // what of it a source reads: op_sel may name one of two registers
  uint64_t value = 0;  // Kind::Constant: the bits, in the operand's own width
  bool neg = false, abs = false, sext = false;
  Sdwa sel = Sdwa::Dword;

  bool is_register() const { return kind == Kind::Register; }
  bool is_vector() const { return is_register() && reg.file != RegFile::Scalar; }
  bool is_scalar() const { return is_register() && reg.file == RegFile::Scalar; }
};

enum class Class : uint8_t {
  Salu,
  Smem,
  Branch,   // jumps, taken or not; s_setpc, s_swappc
  Wait,     // s_waitcnt
  Nop,      // s_nop: `imm` + 1 wait states
  Barrier,  // s_barrier
  End,      // s_endpgm
  Control,  // s_sleep, s_setprio, s_sendmsg, cache control: no effect on values
  Valu,     // 4 clocks
  Trans,    // v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin, v_cos: 16 clocks
  PackedF32,
  Mfma,
  Lds,      // ds_*
  Buffer,   // buffer_*
  Global,   // global_*
  Flat,     // flat_*
  Scratch,  // scratch_*
};
inline constexpr int class_count = static_cast<int>(Class::Scratch) + 1;
const char* class_name(Class cls);

enum class Atomic : uint8_t {
  None,
  Swap,
  CmpSwap,
  Add,
  Sub,
  Rsub,
  Smin,
  Umin,
  Smax,
  Umax,
  And,
  Or,
  Xor,
  Inc,
  Dec,
  AddF32,
  AddF64,
  MinF32,
  MaxF32,
  MinF64,
  MaxF64,
  PkAddF16,
  PkAddBf16
};

// What a load into half a register does to the other half: without ECC it is kept, with ECC
// (sramecc) cleared. Code that says neither may not look at it.
enum class D16 : uint8_t { Keeps, Clears, Undefines };

enum class Dpp : uint8_t {
  None,
  QuadPerm,
  RowShl,
  RowShr,
  RowRor,
  WaveShl,
  WaveRol,
  WaveShr,
  WaveRor,
  RowMirror,
  RowHalfMirror,
  RowBcast15,
  RowBcast31,
  RowNewbcast
};

struct Inst {
  uint64_t offset = 0;  // of the encoding, from the start of the loaded image
  uint32_t size = 0;    // bytes
  Arch arch = Arch::Gfx942;
  std::string text;          // "v_fma_f32 v0, -v1, |v2|, s3 clamp", as LLVM prints it
  bool has_literal = false;  // 32 bits that follow the encoding of a vector ALU operation
  std::string name;          // "v_fma_f32": without _e32, _e64, _sdwa, _dpp
  Class cls = Class::Salu;
  Handler run = nullptr;        // null: not known; executing it is a fault
  LaneHandler lanes = nullptr;  // of the vector ALU, called by `run`

  // As written: destinations first, then sources. MFMA: D, A, B, C. Stores have no destination.
  std::array<Operand, 6> op;
  uint8_t op_count = 0;
  uint8_t dst_count = 0;

  // Every register read and written, implicit ones too (vcc, m0, scc, exec where it is written or
  // an operand), but not the EXEC that every vector instruction reads. What is only partly written
  // (the other half kept) is in `writes` and in `reads`. LDS-DMA writes no register.
  std::vector<RegRange> reads;
  std::vector<RegRange> writes;

  // Of each operand the 16-bit halves that are read or written: bit 0 low, bit 1 high.
  std::array<uint8_t, 6> halves{3, 3, 3, 3, 3, 3};
  uint16_t flags = 0;        // OpFlags
  bool keeps_half = false;   // of its destination
  bool dst_is_read = false;  // v_fmac and the like
  bool own_lanes = false;    // v_readlane and the like: not EXEC's lanes
  bool selects = false;      // v_cndmask
  bool copies = false;       // v_mov and the like, without modifiers: not a use of what it copies
  bool lane_mask = false;    // source 2 has a bit for each lane
  bool inserts = false;      // v_bfi by a mask that is the same for all lanes
  BitFunction bits = nullptr;

  // VOP modifiers.
  bool is_e64 = false, is_sdwa = false;
  bool clamp = false;
  uint8_t omod = 0;  // 1: *2, 2: *4, 3: /2
  // One bit per operand: sources 0..2, and of op_sel bit 3 the destination. Absent in the text:
  // op_sel and neg 0, op_sel_hi all ones, of v_fma_mix 0 (VOP3P).
  uint8_t op_sel = 0, op_sel_hi = 7, neg_lo = 0, neg_hi = 0;
  uint8_t cbsz = 0, abid = 0, blgp = 0;
  Dpp dpp = Dpp::None;
  uint8_t dpp_arg = 0;  // shift, lane, or the four 2-bit selectors of QuadPerm
  uint8_t row_mask = 15, bank_mask = 15;
  bool bound_ctrl = false;
  Sdwa dst_sel = Sdwa::Dword;
  uint8_t dst_unused = 0;  // 0 pad with zeros, 1 sign extend, 2 preserve

  // Memory.
  int32_t mem_offset = 0;   // bytes; read2/write2: offset0, in elements
  int32_t mem_offset1 = 0;  // read2/write2
  uint8_t mem_bytes = 0;    // per lane and address
  bool is_load = false;     // returns data to registers (atomics with sc0 too) or to LDS
  bool is_store = false;    // atomics too
  bool is_atomic = false;
  bool is_lds_dma = false;  // buffer_load ... lds, global_load_lds
  Atomic atomic = Atomic::None;
  bool sign = false;  // sub-dword loads: sign extended
  uint8_t d16 = 0;    // 1: the low half of the register, 2: the high half
  D16 other_half = D16::Keeps;
  uint16_t stride = 0;  // read2/write2: bytes per element of the offsets, 64 elements with st64
  bool offen = false, idxen = false, sc0 = false, sc1 = false, nt = false, gds = false;

  // Scalar.
  // simm16, s_nop count, branch displacement in dwords, ds_swizzle offset, gpr_idx's operands
  int64_t imm = 0;
  uint8_t hwreg = 0, hwreg_offset = 0, hwreg_size = 32;
  // s_waitcnt: the most that may stay outstanding; 255 where unsaid.
  uint8_t vmcnt = 255, lgkmcnt = 255, expcnt = 255;

  uint8_t passes = 0;  // MFMA: of 4 clocks
  const MfmaShape* mfma = nullptr;
};

// A maximal run of code that was decoded front to back.
struct Program {
  std::vector<Inst> insts;
  // By (offset - base) / 4: index into `insts`, or -1 where no instruction starts.
  std::vector<int32_t> at;
  uint64_t base = 0;

  int32_t find(uint64_t offset) const {
    if (offset < base || offset % 4 != 0 || (offset - base) / 4 >= at.size()) return -1;
    return at[(offset - base) / 4];
  }
};

}  // namespace gfx9emu
