#include "gfx9emu/access.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "gfx9emu/convert.h"

namespace gfx9emu {
namespace {

std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

bool misaligned(Wave& w, const char* space, uint64_t address, uint32_t align) {
  if (address % align == 0) return false;
  w.fail(FaultKind::Misaligned, std::string(space) + " address " + hex(address) +
                                    " is not a multiple of " + std::to_string(align));
  return true;
}

}  // namespace

std::byte* device_bytes(Wave& w, uint64_t address, uint32_t bytes, bool read, bool write,
                        uint32_t align, const void* value) {
  const Allocation* a = w.last_allocation;
  if (!a || address - a->address >= a->bytes) {
    a = w.last_allocation = w.context.memory->find(address);
  }
  if (!a || a->freed || bytes > a->bytes - (address - a->address)) {
    const bool freed = a && a->freed;
    w.fail(freed ? FaultKind::UseAfterFree : FaultKind::OutOfBounds,
           w.context.memory->explain(address, bytes));
    return nullptr;
  }
  // The host cannot do misaligned atomics, checked or not.
  const bool atomic = read && write;
  if ((w.checks || atomic) && misaligned(w, "device", address, align)) return nullptr;
  const uint64_t at = address - a->address;
  if (read && w.checks) {
    for (uint32_t i = 0; i < bytes; ++i) {
      if (a->defined[at + i]) continue;
      w.fail(FaultKind::UndefinedMemory, "byte " + std::to_string(at + i) + " of " +
                                             (a->label.empty() ? "an allocation" : a->label) +
                                             " of " + std::to_string(a->bytes) +
                                             " bytes is read, but was never written");
      return nullptr;
    }
  }
  if (w.view && (read || write) && !w.view->note(*a, at, bytes, read, write, value)) return nullptr;
  if (write) std::memset(a->defined + at, 1, bytes);
  return a->data + at;
}

std::byte* lds_bytes(Wave& w, uint64_t offset, uint32_t bytes, bool read, bool write, bool atomic,
                     uint32_t align, const void* value) {
  const uint64_t size = w.group.lds.size();
  if (offset > size || size - offset < bytes) {
    w.fail(FaultKind::OutOfBounds, "LDS bytes " + std::to_string(offset) + " to " +
                                       std::to_string(offset + bytes - 1) + " are outside the " +
                                       std::to_string(size) + " that the workgroup has");
    return nullptr;
  }
  const uint32_t at = static_cast<uint32_t>(offset);
  if ((w.checks || atomic) && misaligned(w, "LDS", offset, align)) return nullptr;
  if (w.checks) {
    if (read && !write && !w.group.note_lds_read(w, at, bytes)) return nullptr;
    if (read && write) {
      for (uint32_t i = at; i < at + bytes; ++i) {
        if (w.group.lds_state[i].write_epoch != 0) continue;
        w.fail(FaultKind::UndefinedLds, "LDS byte " + std::to_string(i) + " was never written");
        return nullptr;
      }
    }
    if (write && !w.group.note_lds_write(w, at, bytes, value, atomic)) return nullptr;
  }
  return w.group.lds.data() + offset;
}

std::byte* scratch_bytes(Wave& w, int lane, uint64_t offset, uint32_t bytes, uint8_t** defined) {
  const uint64_t size = w.group.scratch.size() / (w.group.waves.size() * wave_lanes);
  if (offset > size || size - offset < bytes) {
    w.fail(FaultKind::OutOfBounds, "scratch bytes " + std::to_string(offset) + " to " +
                                       std::to_string(offset + bytes - 1) + " of lane " +
                                       std::to_string(lane) + " are outside the " +
                                       std::to_string(size) + " that a lane has");
    return nullptr;
  }
  const uint64_t at =
      (uint64_t(w.index) * wave_lanes + static_cast<uint64_t>(lane)) * size + offset;
  *defined = w.group.scratch_defined.data() + at;
  return w.group.scratch.data() + at;
}

uint32_t extend_loaded(const Inst& inst, uint32_t value) {
  if (inst.mem_bytes == 1)
    value = inst.sign ? static_cast<uint32_t>(static_cast<int8_t>(value)) : value & 0xff;
  if (inst.mem_bytes == 2)
    value = inst.sign ? static_cast<uint32_t>(static_cast<int16_t>(value)) : value & 0xffff;
  if (inst.d16 == 1) value &= 0xffff;
  if (inst.d16 == 2) value <<= 16;
  return value;
}

uint8_t loaded_halves(const Inst& inst) {
  return inst.other_half == D16::Keeps ? inst.halves[0] : uint8_t{3};
}

namespace {

uint64_t combine_integer(Atomic op, uint32_t size, uint64_t old, uint64_t data, uint64_t compare) {
  const bool wide = size == 8;
  const auto is_less_signed = [&](uint64_t a, uint64_t b) {
    return wide ? static_cast<int64_t>(a) < static_cast<int64_t>(b)
                : static_cast<int32_t>(a) < static_cast<int32_t>(b);
  };
  switch (op) {
    case Atomic::Swap:
      return data;
    case Atomic::CmpSwap:
      return old == compare ? data : old;
    case Atomic::Add:
      return old + data;
    case Atomic::Sub:
      return old - data;
    case Atomic::Rsub:
      return data - old;
    case Atomic::Smin:
      return is_less_signed(data, old) ? data : old;
    case Atomic::Umin:
      return data < old ? data : old;
    case Atomic::Smax:
      return is_less_signed(old, data) ? data : old;
    case Atomic::Umax:
      return data > old ? data : old;
    case Atomic::And:
      return old & data;
    case Atomic::Or:
      return old | data;
    case Atomic::Xor:
      return old ^ data;
    case Atomic::Inc:
      return old >= data ? 0 : old + 1;
    case Atomic::Dec:
      return old == 0 || old > data ? data : old - 1;
    default:
      return old;
  }
}

uint64_t combine(Atomic op, uint32_t size, uint64_t old, uint64_t data, uint64_t compare) {
  const float a = as_f32(static_cast<uint32_t>(old)), b = as_f32(static_cast<uint32_t>(data));
  const double x = as_f64(old), y = as_f64(data);
  const auto half = [](uint64_t bits, int i) {
    return as_f32(f16_to_f32(bits >> (16 * i) & 0xffff));
  };
  const auto brain = [](uint64_t bits, int i) {
    return as_f32(static_cast<uint32_t>(bits >> (16 * i) & 0xffff) << 16);
  };
  switch (op) {
    case Atomic::AddF32:
      return bits_of(a + b);
    case Atomic::MinF32:
      return bits_of(b < a || a != a ? b : a);
    case Atomic::MaxF32:
      return bits_of(b > a || a != a ? b : a);
    case Atomic::AddF64:
      return bits_of64(x + y);
    case Atomic::MinF64:
      return bits_of64(y < x || x != x ? y : x);
    case Atomic::MaxF64:
      return bits_of64(y > x || x != x ? y : x);
    case Atomic::PkAddF16: {
      uint64_t r = 0;
      for (int i = 0; i < 2; ++i) {
        r |= uint64_t{f32_to_f16(bits_of(half(old, i) + half(data, i)), false)} << (16 * i);
      }
      return r;
    }
    case Atomic::PkAddBf16: {
      uint64_t r = 0;
      for (int i = 0; i < 2; ++i) {
        const uint32_t sum = bits_of(brain(old, i) + brain(data, i));
        const bool nan = (sum & 0x7fffffff) > 0x7f800000;
        const uint32_t rounded = nan ? 0x7fc0 : (sum + 0x7fff + (sum >> 16 & 1)) >> 16;
        r |= uint64_t{rounded} << (16 * i);
      }
      return r;
    }
    default:
      return combine_integer(op, size, old, data, compare);
  }
}

template <class T>
uint64_t update(std::byte* p, Atomic op, uint64_t data, uint64_t compare) {
  T* at = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  for (;;) {
    const T wanted = static_cast<T>(combine(op, sizeof(T), old, data, compare));
    if (__atomic_compare_exchange_n(at, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      return old;
    }
  }
}

}  // namespace

uint64_t atomic_update(std::byte* p, Atomic op, uint32_t size, uint64_t data, uint64_t compare) {
  return size == 8 ? update<uint64_t>(p, op, data, compare)
                   : update<uint32_t>(p, op, data, compare);
}

}  // namespace gfx9emu
