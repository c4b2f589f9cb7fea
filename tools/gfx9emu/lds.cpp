// The ds_* operations: LDS and the permutations that go through its crossbar.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "gfx9emu/access.h"
#include "gfx9emu/model.h"
#include "gfx9emu/ops.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

constexpr Wave::Counts ds_counts{.vm = false, .lgkm = 1};

// What hardware asks for in its unaligned mode, which the driver sets: the natural alignment up
// to 8.
uint32_t alignment(uint32_t bytes) {
  return std::min(bytes == 12 ? 8u : bytes, 8u);
}

bool refuse_gds(Wave& w, const Inst& in) {
  if (in.gds) w.fail(FaultKind::UnknownInstruction, "global data share is not known");
  return in.gds;
}

void account(Wave& w, const Inst& in, const std::array<uint32_t, 64>& offsets, uint64_t lanes) {
  const uint32_t bytes = in.mem_bytes * static_cast<uint32_t>(std::popcount(lanes));
  w.counters.lds_bytes += bytes;
  if (!w.checks && !w.context.options->trace) return;
  const LdsClocks clocks = lds_clocks(in.mem_bytes, in.is_store, lanes, offsets);
  w.entry.lds_cycles = static_cast<uint16_t>(w.entry.lds_cycles + clocks.clocks);
  w.entry.bytes = static_cast<uint16_t>(w.entry.bytes + bytes);
  w.counters.lds_conflict_cycles += clocks.conflicts;
}

// Offsets of all lanes, and the active ones' in a row for the wave's record.
struct Offsets {
  std::array<uint32_t, 64> lane;
  std::vector<uint32_t> active;

  Offsets(Wave& w, const Operand& address, uint32_t constant, uint64_t lanes) {
    const Row& row = w.row(address.reg);
    for (int l = 0; l < wave_lanes; ++l) lane[l] = row.lane[l] + constant;
    if (!w.track) return;
    for (int l = 0; l < wave_lanes; ++l) {
      if (lanes >> l & 1) active.push_back(lane[l]);
    }
  }
};

bool read_rows(Wave& w, const Inst& in, const Offsets& at, uint64_t lanes, Row* rows) {
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4;
  for (uint64_t left = lanes; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    const std::byte* p = lds_bytes(w, at.lane[l], bytes, true, false, false, alignment(bytes));
    if (!p) return false;
    uint32_t words[4] = {};
    std::memcpy(words, p, bytes);
    if (bytes < 4) words[0] = extend_loaded(in, words[0]);
    for (uint32_t i = 0; i < dwords; ++i) rows[i].lane[l] = words[i];
  }
  return true;
}

bool write_rows(Wave& w, const Inst& in, const Offsets& at, uint64_t lanes, const RegRange& from) {
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4;
  for (uint64_t left = lanes; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < dwords; ++i) words[i] = w.row(from, static_cast<int>(i)).lane[l];
    if (in.d16 == 2) words[0] >>= 16;
    std::byte* p = lds_bytes(w, at.lane[l], bytes, false, true, false, alignment(bytes), words);
    if (!p) return false;
    std::memcpy(p, words, bytes);
  }
  return true;
}

void ds_read(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  const uint32_t dwords = (in.mem_bytes + 3u) / 4;
  const Offsets at(w, in.op[1], static_cast<uint32_t>(in.mem_offset), lanes);
  std::array<Row, 4> rows;
  if (!read_rows(w, in, at, lanes, rows.data())) return;
  account(w, in, at.lane, lanes);
  w.issue_load(in, ds_counts, in.op[0].reg, loaded_halves(in), {rows.data(), dwords}, lanes);
  w.issue_lds(in, {}, at.active, in.mem_bytes, false);
}

// Of each 16 lanes, pairs of lanes read the 8 rows of a matrix of 16 columns, of bytes; lane j gets
// column j.
void ds_read_tr_b8(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  if (~lanes != 0) {
    w.fail(FaultKind::UnknownInstruction, "transposing reads with inactive lanes are not known");
    return;
  }
  const Offsets at(w, in.op[1], static_cast<uint32_t>(in.mem_offset), lanes);
  std::array<Row, 2> rows, out{};
  if (!read_rows(w, in, at, lanes, rows.data())) return;
  for (int l = 0; l < wave_lanes; ++l) {
    const int group = l / 16 * 16, column = l % 16;
    for (int row = 0; row < 8; ++row) {
      const uint32_t word = rows[column % 8 / 4].lane[group + 2 * row + column / 8];
      out[row / 4].lane[l] |= (word >> column % 4 * 8 & 0xff) << row % 4 * 8;
    }
  }
  account(w, in, at.lane, lanes);
  w.issue_load(in, ds_counts, in.op[0].reg, 3, out, lanes);
  w.issue_lds(in, {}, at.active, in.mem_bytes, false);
}

void ds_write(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  const Offsets at(w, in.op[0], static_cast<uint32_t>(in.mem_offset), lanes);
  if (!write_rows(w, in, at, lanes, in.op[1].reg)) return;
  account(w, in, at.lane, lanes);
  w.issue_lds(in, ds_counts, at.active, in.mem_bytes, true);
}

void ds_read2(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  const uint32_t dwords = in.mem_bytes / 4u;
  std::array<Row, 4> rows;
  std::vector<uint32_t> active;
  for (int half = 0; half < 2; ++half) {
    const int32_t offset = half ? in.mem_offset1 : in.mem_offset;
    const Offsets at(w, in.op[1], static_cast<uint32_t>(offset) * in.stride, lanes);
    if (!read_rows(w, in, at, lanes, rows.data() + half * dwords)) return;
    account(w, in, at.lane, lanes);
    active.insert(active.end(), at.active.begin(), at.active.end());
  }
  w.issue_load(in, ds_counts, in.op[0].reg, 3, {rows.data(), 2 * dwords}, lanes);
  w.issue_lds(in, {}, active, in.mem_bytes, false);
}

void ds_write2(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  std::vector<uint32_t> active;
  for (int half = 0; half < 2; ++half) {
    const int32_t offset = half ? in.mem_offset1 : in.mem_offset;
    const Offsets at(w, in.op[0], static_cast<uint32_t>(offset) * in.stride, lanes);
    if (!write_rows(w, in, at, lanes, in.op[1 + half].reg)) return;
    account(w, in, at.lane, lanes);
    active.insert(active.end(), at.active.begin(), at.active.end());
  }
  w.issue_lds(in, ds_counts, active, in.mem_bytes, true);
}

void ds_atomic(Wave& w, const Inst& in) {
  if (refuse_gds(w, in)) return;
  const uint64_t lanes = w.exec();
  const uint32_t bytes = in.mem_bytes;
  const int d = in.dst_count;
  const Offsets at(w, in.op[d], static_cast<uint32_t>(in.mem_offset), lanes);
  const auto operand = [&](int n, int l) {
    const RegRange& r = in.op[d + 1 + n].reg;
    uint64_t x = w.row(r).lane[l];
    if (bytes == 8) x |= uint64_t{w.row(r, 1).lane[l]} << 32;
    return x;
  };
  std::array<Row, 2> old;
  for (uint64_t left = lanes; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    std::byte* p = lds_bytes(w, at.lane[l], bytes, true, true, true, bytes);
    if (!p) return;
    // ds_cmpst: what is compared comes first, then the new value.
    const bool compares = in.atomic == Atomic::CmpSwap;
    const uint64_t data = operand(compares ? 1 : 0, l), compare = compares ? operand(0, l) : 0;
    const uint64_t value = atomic_update(p, in.atomic, bytes, data, compare);
    old[0].lane[l] = static_cast<uint32_t>(value);
    old[1].lane[l] = static_cast<uint32_t>(value >> 32);
  }
  account(w, in, at.lane, lanes);
  if (d == 1) {
    w.issue_load(in, ds_counts, in.op[0].reg, 3, {old.data(), bytes / 4}, lanes);
  } else {
    w.issue_lds(in, ds_counts, at.active, bytes, true);
  }
}

// Lane l reads the lane that its address names; what that lane's data is, if it is active, else 0.
void ds_bpermute(Wave& w, const Inst& in) {
  const uint64_t lanes = w.exec();
  const Row& address = w.row(in.op[1].reg);
  const Row& data = w.row(in.op[2].reg);
  Row out{};
  for (int l = 0; l < wave_lanes; ++l) {
    const uint32_t from = (address.lane[l] + static_cast<uint32_t>(in.mem_offset)) / 4 % 64;
    out.lane[l] = lanes >> from & 1 ? data.lane[from] : 0;
  }
  w.issue_load(in, ds_counts, in.op[0].reg, 3, {&out, 1}, lanes);
}

// Lane l writes to the lane that its address names; of several the last counts.
void ds_permute(Wave& w, const Inst& in) {
  const uint64_t lanes = w.exec();
  const Row& address = w.row(in.op[1].reg);
  const Row& data = w.row(in.op[2].reg);
  Row out{};
  for (int l = 0; l < wave_lanes; ++l) {
    const uint32_t to = (address.lane[l] + static_cast<uint32_t>(in.mem_offset)) / 4 % 64;
    if (lanes >> l & 1) out.lane[to] = data.lane[l];
  }
  w.issue_load(in, ds_counts, in.op[0].reg, 3, {&out, 1}, lanes);
}

void ds_swizzle(Wave& w, const Inst& in) {
  const uint64_t lanes = w.exec();
  const Row& data = w.row(in.op[1].reg);
  const uint32_t pattern = static_cast<uint32_t>(in.imm);
  if (pattern >= 0xc000) {
    w.fail(FaultKind::UnknownInstruction, "this swizzle pattern is not known");
    return;
  }
  Row out{};
  for (int l = 0; l < wave_lanes; ++l) {
    int from;
    if (pattern & 0x8000) {  // within four lanes
      from = (l & ~3) | static_cast<int>(pattern >> (2 * (l & 3)) & 3);
    } else {  // within 32 lanes: and, or, xor on the lane number
      const int and_mask = pattern & 31, or_mask = pattern >> 5 & 31, xor_mask = pattern >> 10 & 31;
      from = (l & 32) | ((((l & 31) & and_mask) | or_mask) ^ xor_mask);
    }
    out.lane[l] = lanes >> from & 1 ? data.lane[from] : 0;
  }
  w.issue_load(in, ds_counts, in.op[0].reg, 3, {&out, 1}, lanes);
}

void ds_nop(Wave&, const Inst&) {}

constexpr Op read(std::string_view name, uint8_t bytes, bool sign = false, uint8_t d16 = 0) {
  return {.name = name,
          .cls = Class::Lds,
          .run = ds_read,
          .dsts = 1,
          .bytes = bytes,
          .load = true,
          .sign = sign,
          .d16 = d16};
}
constexpr Op write(std::string_view name, uint8_t bytes, uint8_t d16 = 0) {
  return {.name = name,
          .cls = Class::Lds,
          .run = ds_write,
          .dsts = 0,
          .bytes = bytes,
          .store = true,
          .d16 = d16};
}
constexpr Op read2(std::string_view name, uint8_t bytes, uint16_t stride) {
  return {.name = name,
          .cls = Class::Lds,
          .run = ds_read2,
          .dsts = 1,
          .bytes = bytes,
          .load = true,
          .stride = stride};
}
constexpr Op write2(std::string_view name, uint8_t bytes, uint16_t stride) {
  return {.name = name,
          .cls = Class::Lds,
          .run = ds_write2,
          .dsts = 0,
          .bytes = bytes,
          .store = true,
          .stride = stride};
}
constexpr Op atomic(std::string_view name, Atomic kind, uint8_t bytes, bool returns) {
  return {.name = name,
          .cls = Class::Lds,
          .run = ds_atomic,
          .dsts = static_cast<uint8_t>(returns ? 1 : 0),
          .bytes = bytes,
          .load = returns,
          .store = true,
          .atomic = kind};
}
constexpr Op permute(std::string_view name, Handler run) {
  return {.name = name, .cls = Class::Lds, .run = run, .dsts = 1};
}
#define ATOMIC(NAME, TYPE, KIND, BYTES)                    \
  atomic("ds_" NAME "_" TYPE, Atomic::KIND, BYTES, false), \
      atomic("ds_" NAME "_rtn_" TYPE, Atomic::KIND, BYTES, true)
#define ATOMICS(NAME, T32, T64, KIND) ATOMIC(NAME, T32, KIND, 4), ATOMIC(NAME, T64, KIND, 8)

const Op table[] = {
    read("ds_read_u8", 1),
    read("ds_read_i8", 1, true),
    read("ds_read_u16", 2),
    read("ds_read_i16", 2, true),
    read("ds_read_u8_d16", 1, false, 1),
    read("ds_read_u8_d16_hi", 1, false, 2),
    read("ds_read_i8_d16", 1, true, 1),
    read("ds_read_i8_d16_hi", 1, true, 2),
    read("ds_read_u16_d16", 2, false, 1),
    read("ds_read_u16_d16_hi", 2, false, 2),
    read("ds_read_b32", 4),
    read("ds_read_b64", 8),
    read("ds_read_b96", 12),
    read("ds_read_b128", 16),
    {.name = "ds_read_b64_tr_b8",
     .cls = Class::Lds,
     .run = ds_read_tr_b8,
     .bytes = 8,
     .load = true},
    read2("ds_read2_b32", 4, 4),
    read2("ds_read2_b64", 8, 8),
    read2("ds_read2st64_b32", 4, 256),
    read2("ds_read2st64_b64", 8, 512),
    write("ds_write_b8", 1),
    write("ds_write_b16", 2),
    write("ds_write_b8_d16_hi", 1, 2),
    write("ds_write_b16_d16_hi", 2, 2),
    write("ds_write_b32", 4),
    write("ds_write_b64", 8),
    write("ds_write_b96", 12),
    write("ds_write_b128", 16),
    write2("ds_write2_b32", 4, 4),
    write2("ds_write2_b64", 8, 8),
    write2("ds_write2st64_b32", 4, 256),
    write2("ds_write2st64_b64", 8, 512),
    ATOMICS("add", "u32", "u64", Add),
    ATOMICS("sub", "u32", "u64", Sub),
    ATOMICS("rsub", "u32", "u64", Rsub),
    ATOMICS("inc", "u32", "u64", Inc),
    ATOMICS("dec", "u32", "u64", Dec),
    ATOMICS("min", "i32", "i64", Smin),
    ATOMICS("max", "i32", "i64", Smax),
    ATOMICS("min", "u32", "u64", Umin),
    ATOMICS("max", "u32", "u64", Umax),
    ATOMICS("and", "b32", "b64", And),
    ATOMICS("or", "b32", "b64", Or),
    ATOMICS("xor", "b32", "b64", Xor),
    ATOMICS("cmpst", "b32", "b64", CmpSwap),
    atomic("ds_wrxchg_rtn_b32", Atomic::Swap, 4, true),
    atomic("ds_wrxchg_rtn_b64", Atomic::Swap, 8, true),
    ATOMIC("add", "f32", AddF32, 4),
    ATOMIC("min", "f32", MinF32, 4),
    ATOMIC("max", "f32", MaxF32, 4),
    ATOMIC("add", "f64", AddF64, 8),
    ATOMIC("min", "f64", MinF64, 8),
    ATOMIC("max", "f64", MaxF64, 8),
    ATOMIC("pk_add", "f16", PkAddF16, 4),
    ATOMIC("pk_add", "bf16", PkAddBf16, 4),
    permute("ds_bpermute_b32", ds_bpermute),
    permute("ds_permute_b32", ds_permute),
    permute("ds_swizzle_b32", ds_swizzle),
    {.name = "ds_nop", .cls = Class::Lds, .run = ds_nop, .dsts = 0},
};

}  // namespace

std::span<const Op> lds_ops() {
  return table;
}

}  // namespace gfx9emu
