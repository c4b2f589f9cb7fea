// Scalar loads, and the vector loads, stores and atomics of global, buffer, flat and scratch
// memory.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>

#include "gfx9emu/access.h"
#include "gfx9emu/address.h"
#include "gfx9emu/ops.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

using Kind = Operand::Kind;

uint32_t scalar32(const Wave& w, const Operand& o) {
  return o.is_register() ? w.s[o.reg.first] : static_cast<uint32_t>(o.value);
}

// --- Scalar memory.

// The offset is a constant, a register, or both ("s6 offset:0x10").
uint64_t scalar_offset(const Wave& w, const Inst& in) {
  const Operand& o = in.op[2];
  uint64_t offset = static_cast<uint64_t>(int64_t{in.mem_offset});
  if (o.is_register()) return offset + w.s[o.reg.first];
  return offset + static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(o.value)));
}

// Two dwords and more count twice.
Wave::Counts scalar_counts(int dwords) {
  return {.vm = false, .lgkm = dwords > 1 ? 2 : 1, .unordered = true};
}

template <int dwords>
void s_load(Wave& w, const Inst& in) {
  const uint64_t address = scalar_load_address(w, in);
  std::array<uint32_t, dwords> data;
  // Loads of arguments may be wider than these and take padding along.
  const bool arguments =
      address - w.context.kernarg_address < w.context.kernel->descriptor.kernarg_bytes;
  const std::byte* p = device_bytes(w, address, dwords * 4, !arguments, false, 4);
  if (!p) return;
  std::memcpy(data.data(), p, sizeof data);
  if (arguments && w.checks) {
    const Allocation& a = *w.last_allocation;
    for (int i = 0; i < 4 * dwords; ++i) {
      if (!a.defined[address - a.address + i]) w.scalars_undefined |= 1u << (i / 4);
    }
  }
  w.issue_scalar_load(in, scalar_counts(dwords), in.op[0].reg, data);
}

template <int dwords>
void s_buffer_load(Wave& w, const Inst& in) {
  const int r = in.op[1].reg.first;
  const uint64_t base = w.scalar64(r) & 0xffff'ffff'ffff;
  const uint32_t stride = w.s[r + 1] >> 16 & 0x3fff;
  const uint64_t size = uint64_t{w.s[r + 2]} * std::max(stride, 1u);
  const uint64_t offset = scalar_offset(w, in) & ~uint64_t{3};
  std::array<uint32_t, dwords> data{};
  for (int i = 0; i < dwords; ++i) {
    const uint64_t at = offset + 4 * static_cast<uint64_t>(i);
    if (at + 4 > size) continue;  // outside the buffer: 0
    const std::byte* p = device_bytes(w, base + at, 4, true, false, 4);
    if (!p) return;
    std::memcpy(&data[i], p, 4);
  }
  w.issue_scalar_load(in, scalar_counts(dwords), in.op[0].reg, data);
}

// --- Vector memory: operands by position.

struct Places {
  int address = -1, scalar = -1, data = -1;
};

// global: [dst,] vaddr, [data,] saddr. flat: [dst,] vaddr [, data]. scratch: as global, vaddr may
// be off. buffer: dst or data, vaddr, srsrc, soffset; an atomic's data is its destination.
Places places(const Inst& in) {
  const int d = in.dst_count;
  Places p;
  if (in.cls == Class::Buffer) {
    const int first = in.is_lds_dma ? 0 : 1;
    p.data = 0;
    p.address = first;
    p.scalar = first + 1;
    return p;
  }
  p.address = d;
  const bool has_data = in.is_store;
  if (has_data) p.data = d + 1;
  p.scalar = d + 1 + (has_data ? 1 : 0);
  return p;
}

// What one lane accesses.
struct Target {
  enum class Space : uint8_t { Device, Lds, Scratch, Nowhere } space = Space::Device;
  uint64_t address = 0;
  uint32_t bytes_inside = 0;  // buffer: how many of the bytes are inside the range check
};

class Addresses {
 public:
  Addresses(Wave& w, const Inst& in) : w_(w), in_(in), places_(places(in)) {
    const Operand& v = in.op[places_.address];
    if (v.is_vector()) {
      low_ = w.row(v.reg).lane;
      if (v.reg.count == 2) high_ = w.row(v.reg, 1).lane;
    }
    switch (in.cls) {
      case Class::Global:
        if (const Operand& s = in.op[places_.scalar]; s.is_register()) {
          base_ = w.scalar64(s.reg.first);
        }
        break;
      case Class::Scratch:
        if (const Operand& s = in.op[places_.scalar]; s.is_register()) base_ = w.s[s.reg.first];
        break;
      case Class::Buffer:
        read_resource();
        break;
      default:
        break;
    }
  }

  Target lane(int l, uint32_t bytes) const {
    const uint64_t offset = static_cast<uint64_t>(int64_t{in_.mem_offset});
    Target t;
    t.bytes_inside = bytes;
    if (in_.cls == Class::Buffer) return buffer_lane(l, bytes);
    uint64_t address = base_ + offset;
    if (low_) address += low_[l];
    if (high_) address += uint64_t{high_[l]} << 32;
    t.address = address;
    if (in_.cls == Class::Scratch) {
      t.space = Target::Space::Scratch;
      t.address = static_cast<uint32_t>(address);
    } else if (in_.cls == Class::Flat) {
      const uint64_t aperture = address & ~uint64_t{0xffffffff};
      if (aperture == lds_aperture) t.space = Target::Space::Lds;
      if (aperture == scratch_aperture) t.space = Target::Space::Scratch;
      if (t.space != Target::Space::Device) t.address = address & 0xffffffff;
    }
    return t;
  }

  const Places& place() const { return places_; }

 private:
  void read_resource() {
    const int r = in_.op[places_.scalar].reg.first;
    base_ = w_.scalar64(r) & 0xffff'ffff'ffff;
    stride_ = w_.s[r + 1] >> 16 & 0x3fff;
    records_ = w_.s[r + 2];
    soffset_ = scalar32(w_, in_.op[places_.scalar + 1]);
    const bool swizzle = w_.s[r + 1] >> 31, add_tid = w_.s[r + 3] >> 23 & 1;
    const uint32_t type = w_.s[r + 3] >> 30;
    if (swizzle || add_tid || type != 0) {
      w_.fail(FaultKind::UnknownInstruction,
              "a buffer resource with swizzling, add_tid or a type other than 0 is not known");
    }
  }

  Target buffer_lane(int l, uint32_t bytes) const {
    uint64_t offset = static_cast<uint32_t>(in_.mem_offset);
    uint64_t index = 0;
    if (in_.offen) offset += in_.idxen ? high_[l] : low_[l];
    if (in_.idxen) index = low_[l];
    Target t;
    t.address = base_ + soffset_ + index * stride_ + offset;
    if (stride_ == 0) {
      // Each dword is checked by itself.
      const uint64_t limit = records_ > soffset_ ? records_ - soffset_ : 0;
      const uint64_t left = offset < limit ? limit - offset : 0;
      const uint32_t unit = std::min(bytes, 4u);
      t.bytes_inside = static_cast<uint32_t>(std::min<uint64_t>(left / unit * unit, bytes));
    } else {
      t.bytes_inside = index < records_ ? bytes : 0;
    }
    if (t.bytes_inside == 0) t.space = Target::Space::Nowhere;
    return t;
  }

  Wave& w_;
  const Inst& in_;
  Places places_;
  const uint32_t* low_ = nullptr;
  const uint32_t* high_ = nullptr;
  uint64_t base_ = 0;
  uint32_t stride_ = 0, records_ = 0, soffset_ = 0;
};

Wave::Counts vector_counts(const Inst& in) {
  const bool flat = in.cls == Class::Flat;
  return {.vm = true, .lgkm = flat ? 1 : 0, .unordered = flat};
}

// Scratch through flat addresses: undefined bytes are a fault at once.
std::byte* flat_scratch_bytes(Wave& w, const Target& t, int lane, uint32_t bytes, bool read,
                              bool write) {
  uint8_t* defined = nullptr;
  std::byte* p = scratch_bytes(w, lane, t.address, bytes, &defined);
  if (!p) return nullptr;
  if (read && w.checks && std::count(defined, defined + bytes, 0) != 0) {
    w.fail(FaultKind::UndefinedMemory, "scratch of lane " + std::to_string(lane) + " at byte " +
                                           std::to_string(t.address) +
                                           " is read, but was never written");
    return nullptr;
  }
  if (write) std::memset(defined, 1, bytes);
  return p;
}

// Device memory is in its unaligned mode, which the driver sets and compilers rely on: only atomics
// want multiples.
std::byte* target_bytes(Wave& w, const Target& t, int lane, uint32_t bytes, bool read, bool write,
                        uint32_t align, const void* value = nullptr) {
  switch (t.space) {
    case Target::Space::Device:
      return device_bytes(w, t.address, bytes, read, write, read && write ? align : 1, value);
    case Target::Space::Lds:
      return lds_bytes(w, t.address, bytes, read, write, false, align, value);
    case Target::Space::Scratch:
      return flat_scratch_bytes(w, t, lane, bytes, read, write);
    case Target::Space::Nowhere:
      break;
  }
  return nullptr;
}

void account(Wave& w, const Inst& in, bool written, uint64_t bytes) {
  if (in.cls == Class::Scratch) {
    w.counters.scratch_bytes += bytes;
  } else {
    (written ? w.counters.global_written_bytes : w.counters.global_read_bytes) += bytes;
  }
  w.entry.bytes = static_cast<uint16_t>(std::min<uint64_t>(w.entry.bytes + bytes, 65535));
}

// Lanes in order, as far as nothing fails.
template <class F>
void for_lanes(const Wave& w, uint64_t lanes, F f) {
  for (; lanes != 0 && !w.failed; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

// Between its access and what the memory model makes of it no other atomic access may come.
std::unique_lock<std::mutex> exclusive_access(const Wave& w, const Inst& in) {
  if (!w.context.memory_model) return {};
  return w.context.memory_model->exclusive(in);
}

void load(Wave& w, const Inst& in) {
  const auto exclusive = exclusive_access(w, in);
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4, align = std::min(bytes, 4u);
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  if (w.failed) return;
  std::array<Row, 4> data;
  std::vector<uint32_t> lds;
  for_lanes(w, lanes, [&](int l) {
    const Target t = addresses.lane(l, bytes);
    uint32_t words[4] = {};
    if (t.bytes_inside > 0) {
      const std::byte* p = target_bytes(w, t, l, t.bytes_inside, true, false, align);
      if (!p) return;
      std::memcpy(words, p, t.bytes_inside);
    }
    if (t.space == Target::Space::Lds) lds.push_back(static_cast<uint32_t>(t.address));
    if (bytes < 4) words[0] = extend_loaded(in, words[0]);
    for (uint32_t i = 0; i < dwords; ++i) data[i].lane[l] = words[i];
  });
  if (w.failed) return;
  account(w, in, false, uint64_t{bytes} * std::popcount(lanes));
  w.issue_load(in, vector_counts(in), in.op[0].reg, loaded_halves(in), {data.data(), dwords},
               lanes);
  if (!lds.empty()) w.issue_lds(in, {}, lds, bytes, false);
}

// Memory straight to LDS: lane after lane from M0 on; on gfx950 also 12 and 16 bytes of each lane.
void load_to_lds(Wave& w, const Inst& in) {
  const auto exclusive = exclusive_access(w, in);
  const uint32_t bytes = in.mem_bytes;
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  if (w.failed) return;
  const bool gfx950 = in.arch == Arch::Gfx950;
  if (bytes > 4 && (!gfx950 || bytes == 8)) {
    w.fail(FaultKind::UnknownInstruction,
           "loads to LDS of " + std::to_string(bytes) + " bytes a lane are not known");
    return;
  }
  const uint32_t m0_bits = gfx950 ? 0x3ffff : 0xffff;
  const uint32_t base = (w.s[scalar::m0] & m0_bits) + static_cast<uint32_t>(in.mem_offset);
  // A lane's place in LDS, and how it is aligned.
  const uint32_t place = std::max(bytes, 4u), align = bytes == 16 ? 16 : 4;
  std::vector<uint32_t> offsets, data;
  for_lanes(w, lanes, [&](int l) {
    // The constant offset moves both sides.
    const Target t = addresses.lane(l, bytes);
    uint32_t words[4] = {};
    if (t.bytes_inside > 0) {
      const std::byte* p =
          device_bytes(w, t.address, t.bytes_inside, true, false, std::min(bytes, 4u));
      if (!p) return;
      std::memcpy(words, p, t.bytes_inside);
    }
    const uint32_t to = base + static_cast<uint32_t>(l) * place;
    if (!lds_bytes(w, to, place, false, false, false, align)) return;
    if (w.checks && !w.group.note_lds_write(w, to, place, words, false, true)) return;
    for (uint32_t i = 0; i < place / 4; ++i) {
      offsets.push_back(to + 4 * i);
      data.push_back(bytes < 4 ? extend_loaded(in, words[i]) : words[i]);
    }
  });
  if (w.failed) return;
  account(w, in, false, uint64_t{bytes} * std::popcount(lanes));
  w.counters.lds_bytes += 4 * offsets.size();
  w.issue_lds_dma(in, offsets, 4, data);
}

// Where a word of scratch is kept that is defined in some bits only.
uint64_t scratch_word(const Wave& w, const uint8_t* flags) {
  return Wave::scratch_key + static_cast<uint64_t>(flags - w.group.scratch_defined.data());
}

void scratch_load(Wave& w, const Inst& in) {
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4;
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  std::array<Row, 4> data;
  for_lanes(w, lanes, [&](int l) {
    uint8_t* defined = nullptr;
    const std::byte* p = scratch_bytes(w, l, addresses.lane(l, bytes).address, bytes, &defined);
    if (!p) return;
    uint32_t words[4] = {};
    std::memcpy(words, p, bytes);
    if (bytes < 4) words[0] = extend_loaded(in, words[0]);
    for (uint32_t i = 0; i < dwords; ++i) {
      data[i].lane[l] = words[i];
      const uint8_t* flags = defined + 4 * i;
      const bool whole = std::count(flags, flags + std::min(bytes - 4 * i, 4u), 0) == 0;
      if (!whole) w.loaded_undefined[i] |= uint64_t{1} << l;
      if (whole || w.partly_defined.empty() || bytes < 4) continue;
      const auto found = w.partly_defined.find(scratch_word(w, flags));
      if (found != w.partly_defined.end()) {
        w.loaded_partly.push_back({static_cast<int>(i), l, found->second});
      }
    }
  });
  if (w.failed) return;
  account(w, in, false, uint64_t{bytes} * std::popcount(lanes));
  w.issue_load(in, vector_counts(in), in.op[0].reg, loaded_halves(in), {data.data(), dwords},
               lanes);
}

void scratch_store(Wave& w, const Inst& in) {
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4;
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  const RegRange& from = in.op[addresses.place().data].reg;
  for_lanes(w, lanes, [&](int l) {
    uint8_t* defined = nullptr;
    std::byte* p = scratch_bytes(w, l, addresses.lane(l, bytes).address, bytes, &defined);
    if (!p) return;
    for (uint32_t i = 0; i < dwords; ++i) {
      uint32_t word = w.row(from, static_cast<int>(i)).lane[l];
      if (in.d16 == 2) word >>= 16;
      const DefinedRow& row = w.defined[static_cast<size_t>(w.physical(from)) + i];
      const uint32_t n = std::min(bytes - 4 * i, 4u);
      std::memcpy(p + 4 * i, &word, n);
      if (!w.partly_defined.empty()) {
        w.note_partly_defined(scratch_word(w, defined + 4 * i),
                              n == 4 ? w.defined_bits(from, static_cast<int>(i), l) : 0);
      }
      for (uint32_t b = 0; b < n; ++b) {
        const int half = in.d16 == 2 ? 1 : static_cast<int>(b / 2);
        defined[4 * i + b] = row.half[half] >> l & 1;
      }
    }
  });
  if (w.failed) return;
  account(w, in, true, uint64_t{bytes} * std::popcount(lanes));
  w.issue_other(in, vector_counts(in));
}

void load_any(Wave& w, const Inst& in) {
  if (in.is_lds_dma) {
    load_to_lds(w, in);
  } else if (in.cls == Class::Scratch) {
    scratch_load(w, in);
  } else {
    load(w, in);
  }
}

void store(Wave& w, const Inst& in) {
  if (in.cls == Class::Scratch) return scratch_store(w, in);
  const auto exclusive = exclusive_access(w, in);
  const uint32_t bytes = in.mem_bytes, dwords = (bytes + 3) / 4, align = std::min(bytes, 4u);
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  if (w.failed) return;
  const RegRange& from = in.op[addresses.place().data].reg;
  std::vector<uint32_t> lds;
  for_lanes(w, lanes, [&](int l) {
    const Target t = addresses.lane(l, bytes);
    if (t.bytes_inside == 0) return;
    uint32_t words[4];
    for (uint32_t i = 0; i < dwords; ++i) words[i] = w.row(from, static_cast<int>(i)).lane[l];
    if (in.d16 == 2) words[0] >>= 16;
    std::byte* p = target_bytes(w, t, l, t.bytes_inside, false, true, align, words);
    if (!p) return;
    std::memcpy(p, words, t.bytes_inside);
    if (t.space == Target::Space::Lds) lds.push_back(static_cast<uint32_t>(t.address));
  });
  if (w.failed) return;
  account(w, in, true, uint64_t{bytes} * std::popcount(lanes));
  if (lds.empty()) {
    w.issue_other(in, vector_counts(in));
  } else {
    w.issue_lds(in, vector_counts(in), lds, bytes, true);
  }
}

void atomic(Wave& w, const Inst& in) {
  const auto exclusive = exclusive_access(w, in);
  const uint32_t bytes = in.mem_bytes;
  const int dwords = static_cast<int>(bytes / 4);
  const uint64_t lanes = w.exec();
  const Addresses addresses(w, in);
  if (w.failed) return;
  const RegRange& from = in.op[addresses.place().data].reg;
  const auto operand = [&](int l, int first) {
    uint64_t x = w.row(from, first).lane[l];
    if (dwords == 2) x |= uint64_t{w.row(from, first + 1).lane[l]} << 32;
    return x;
  };
  std::array<Row, 2> data;
  for_lanes(w, lanes, [&](int l) {
    const Target t = addresses.lane(l, bytes);
    uint64_t old = 0;
    if (t.space == Target::Space::Scratch) {
      w.fail(FaultKind::UnknownInstruction, "atomic operations on scratch are not known");
      return;
    }
    if (t.bytes_inside == bytes) {
      std::byte* p = t.space == Target::Space::Lds
                         ? lds_bytes(w, t.address, bytes, true, true, true, bytes)
                         : target_bytes(w, t, l, bytes, true, true, bytes);
      if (!p) return;
      // cmpswap: the new value first, then what it is compared with.
      const uint64_t compare = in.atomic == Atomic::CmpSwap ? operand(l, dwords) : 0;
      old = atomic_update(p, in.atomic, bytes, operand(l, 0), compare);
    }
    data[0].lane[l] = static_cast<uint32_t>(old);
    data[1].lane[l] = static_cast<uint32_t>(old >> 32);
  });
  if (w.failed) return;
  account(w, in, true, uint64_t{bytes} * std::popcount(lanes));
  if (!in.is_load) {
    w.issue_other(in, vector_counts(in));
    return;
  }
  RegRange to = in.op[0].reg;
  to.count = static_cast<uint16_t>(dwords);
  w.issue_load(in, vector_counts(in), to, 3, {data.data(), static_cast<size_t>(dwords)}, lanes);
}

void write_back_l2(Wave& w, const Inst& in) {
  if (w.view) w.view->write_back(in);
  w.issue_other(in, {.vm = true});
}
void invalidate(Wave& w, const Inst& in) {
  if (w.view) w.view->invalidate(in);
}

// --- The table: each operation for all address spaces that have it.

struct Named {
  const char* suffix;
  Op op;
};
constexpr Op loads(uint8_t bytes, bool sign = false, uint8_t d16 = 0) {
  return {.name = {},
          .run = load_any,
          .dsts = 1,
          .bytes = bytes,
          .load = true,
          .sign = sign,
          .d16 = d16};
}
constexpr Op stores(uint8_t bytes, uint8_t d16 = 0) {
  return {.name = {}, .run = store, .dsts = 0, .bytes = bytes, .store = true, .d16 = d16};
}
constexpr Op updates(Atomic kind, uint8_t bytes) {
  return {.name = {}, .run = atomic, .dsts = 0, .bytes = bytes, .store = true, .atomic = kind};
}

constexpr Named accesses[] = {
    {"load_ubyte", loads(1)},
    {"load_sbyte", loads(1, true)},
    {"load_ushort", loads(2)},
    {"load_sshort", loads(2, true)},
    {"load_dword", loads(4)},
    {"load_dwordx2", loads(8)},
    {"load_dwordx3", loads(12)},
    {"load_dwordx4", loads(16)},
    {"load_ubyte_d16", loads(1, false, 1)},
    {"load_ubyte_d16_hi", loads(1, false, 2)},
    {"load_sbyte_d16", loads(1, true, 1)},
    {"load_sbyte_d16_hi", loads(1, true, 2)},
    {"load_short_d16", loads(2, false, 1)},
    {"load_short_d16_hi", loads(2, false, 2)},
    {"load_lds_ubyte", loads(1)},
    {"load_lds_sbyte", loads(1, true)},
    {"load_lds_ushort", loads(2)},
    {"load_lds_sshort", loads(2, true)},
    {"load_lds_dword", loads(4)},
    {"load_lds_dwordx3", loads(12)},
    {"load_lds_dwordx4", loads(16)},
    {"store_byte", stores(1)},
    {"store_byte_d16_hi", stores(1, 2)},
    {"store_short", stores(2)},
    {"store_short_d16_hi", stores(2, 2)},
    {"store_dword", stores(4)},
    {"store_dwordx2", stores(8)},
    {"store_dwordx3", stores(12)},
    {"store_dwordx4", stores(16)},
    {"atomic_swap", updates(Atomic::Swap, 4)},
    {"atomic_cmpswap", updates(Atomic::CmpSwap, 4)},
    {"atomic_add", updates(Atomic::Add, 4)},
    {"atomic_sub", updates(Atomic::Sub, 4)},
    {"atomic_smin", updates(Atomic::Smin, 4)},
    {"atomic_umin", updates(Atomic::Umin, 4)},
    {"atomic_smax", updates(Atomic::Smax, 4)},
    {"atomic_umax", updates(Atomic::Umax, 4)},
    {"atomic_and", updates(Atomic::And, 4)},
    {"atomic_or", updates(Atomic::Or, 4)},
    {"atomic_xor", updates(Atomic::Xor, 4)},
    {"atomic_inc", updates(Atomic::Inc, 4)},
    {"atomic_dec", updates(Atomic::Dec, 4)},
    {"atomic_swap_x2", updates(Atomic::Swap, 8)},
    {"atomic_cmpswap_x2", updates(Atomic::CmpSwap, 8)},
    {"atomic_add_x2", updates(Atomic::Add, 8)},
    {"atomic_sub_x2", updates(Atomic::Sub, 8)},
    {"atomic_smin_x2", updates(Atomic::Smin, 8)},
    {"atomic_umin_x2", updates(Atomic::Umin, 8)},
    {"atomic_smax_x2", updates(Atomic::Smax, 8)},
    {"atomic_umax_x2", updates(Atomic::Umax, 8)},
    {"atomic_and_x2", updates(Atomic::And, 8)},
    {"atomic_or_x2", updates(Atomic::Or, 8)},
    {"atomic_xor_x2", updates(Atomic::Xor, 8)},
    {"atomic_inc_x2", updates(Atomic::Inc, 8)},
    {"atomic_dec_x2", updates(Atomic::Dec, 8)},
    {"atomic_add_f32", updates(Atomic::AddF32, 4)},
    {"atomic_pk_add_f16", updates(Atomic::PkAddF16, 4)},
    {"atomic_pk_add_bf16", updates(Atomic::PkAddBf16, 4)},
    {"atomic_add_f64", updates(Atomic::AddF64, 8)},
    {"atomic_min_f64", updates(Atomic::MinF64, 8)},
    {"atomic_max_f64", updates(Atomic::MaxF64, 8)},
};

constexpr Op scalar_load(std::string_view name, Handler run) {
  return {.name = name, .cls = Class::Smem, .run = run, .load = true};
}
constexpr Op others[] = {
    scalar_load("s_load_dword", s_load<1>),
    scalar_load("s_load_dwordx2", s_load<2>),
    scalar_load("s_load_dwordx4", s_load<4>),
    scalar_load("s_load_dwordx8", s_load<8>),
    scalar_load("s_load_dwordx16", s_load<16>),
    scalar_load("s_buffer_load_dword", s_buffer_load<1>),
    scalar_load("s_buffer_load_dwordx2", s_buffer_load<2>),
    scalar_load("s_buffer_load_dwordx4", s_buffer_load<4>),
    scalar_load("s_buffer_load_dwordx8", s_buffer_load<8>),
    scalar_load("s_buffer_load_dwordx16", s_buffer_load<16>),
    {.name = "buffer_wbl2", .cls = Class::Control, .run = write_back_l2, .dsts = 0},
    {.name = "buffer_inv", .cls = Class::Control, .run = invalidate, .dsts = 0},
};

// Names of all spaces, kept for as long as the table.
struct Table {
  std::vector<std::string> names;
  std::vector<Op> ops;

  Table() {
    constexpr std::pair<const char*, Class> spaces[] = {{"global_", Class::Global},
                                                        {"flat_", Class::Flat},
                                                        {"scratch_", Class::Scratch},
                                                        {"buffer_", Class::Buffer}};
    names.reserve(std::size(accesses) * std::size(spaces));
    for (const auto& [prefix, cls] : spaces) {
      for (const Named& access : accesses) {
        names.push_back(std::string(prefix) + access.suffix);
        Op op = access.op;
        op.name = names.back();
        op.cls = cls;
        ops.push_back(op);
      }
    }
    ops.insert(ops.end(), std::begin(others), std::end(others));
  }
};

}  // namespace

uint64_t scalar_load_address(const Wave& w, const Inst& inst) {
  return (w.scalar64(inst.op[1].reg.first) + scalar_offset(w, inst)) & ~uint64_t{3};
}

std::span<const Op> memory_ops() {
  static const Table table;
  return table.ops;
}

}  // namespace gfx9emu
