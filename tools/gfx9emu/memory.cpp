#include "gfx9emu/memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gfx9emu/address.h"

namespace gfx9emu {
namespace {

std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

constexpr uint64_t alignment = 256;
// Between allocations, so that what runs over the end of one does not meet the next.
constexpr uint64_t gap = 64 << 10;

}  // namespace

struct Memory::Owned : Allocation {
  bool owns = true;
  ~Owned() { release(); }
  void release() {
    if (owns) std::free(data);
    std::free(defined);
    data = nullptr;
    defined = nullptr;
  }
};

// Freed allocations that are remembered, so that their use is told from any other address.
constexpr size_t freed_remembered = 1024;

Memory::Memory() : next_(device_base) {}
Memory::~Memory() = default;

uint64_t Memory::allocate(uint64_t bytes, std::string label) {
  if (bytes > uint64_t{1} << 40) return 0;
  auto a = std::make_unique<Owned>();
  a->bytes = bytes;
  a->label = std::move(label);
  // calloc gives untouched pages; so a large allocation costs what is used of it.
  a->data = static_cast<std::byte*>(std::calloc(bytes + alignment, 1));
  a->defined = static_cast<uint8_t*>(std::calloc(bytes + 1, 1));
  if (!a->data || !a->defined) return 0;
  const std::unique_lock lock(mutex_);
  a->address = next_;
  next_ += (bytes + gap + alignment - 1) / alignment * alignment;
  in_use_ += bytes;
  const uint64_t address = a->address;
  const auto at = at_or_after(address);
  allocations_.insert(at, std::move(a));
  return address;
}

void Memory::skip_to(uint64_t address) {
  const std::unique_lock lock(mutex_);
  next_ = std::max(next_, address / alignment * alignment);
}

std::string Memory::map_host(void* pointer, uint64_t bytes, std::string label) {
  auto a = std::make_unique<Owned>();
  a->owns = false;
  a->address = reinterpret_cast<uint64_t>(pointer);
  a->bytes = bytes;
  a->label = std::move(label);
  a->data = static_cast<std::byte*>(pointer);
  a->defined = static_cast<uint8_t*>(std::malloc(bytes + 1));
  if (!a->defined) return "no memory for " + std::to_string(bytes) + " bytes";
  std::memset(a->defined, 1, bytes);
  const std::unique_lock lock(mutex_);
  // Host memory comes back at the same address; what was unmapped there before is forgotten.
  for (auto& x : allocations_) {
    if (!x->freed || x->address >= a->address + bytes || a->address >= x->address + x->bytes)
      continue;
    forgotten_.push_back(std::move(x));
    --freed_count_;
  }
  std::erase(allocations_, nullptr);
  const auto at = at_or_after(a->address);
  const bool meets_next = at != allocations_.end() && (*at)->address < a->address + bytes;
  const bool meets_previous =
      at != allocations_.begin() && (*(at - 1))->address + (*(at - 1))->bytes > a->address;
  if (meets_next || meets_previous) return hex(a->address) + " is mapped already";
  in_use_ += bytes;
  allocations_.insert(at, std::move(a));
  return "";
}

std::string Memory::free(uint64_t address) {
  const std::unique_lock lock(mutex_);
  const auto at = at_or_after(address);
  if (at == allocations_.end() || (*at)->address != address) {
    return hex(address) + " is not the start of an allocation";
  }
  Owned& a = **at;
  if (a.freed) return hex(address) + " was freed before";
  a.freed = true;
  in_use_ -= a.bytes;
  freed_.push_back(&a);
  ++freed_count_;
  if (launches_ == 0) release_freed();
  return "";
}

std::vector<std::unique_ptr<Memory::Owned>>::iterator Memory::at_or_after(uint64_t address) {
  return std::lower_bound(
      allocations_.begin(), allocations_.end(), address,
      [](const std::unique_ptr<Owned>& x, uint64_t value) { return x->address < value; });
}

void Memory::release_freed() {
  for (Owned* a : freed_) a->release();
  freed_.clear();
  forgotten_.clear();
  if (freed_count_ <= 2 * freed_remembered) return;
  // The older half is forgotten; addresses only grow.
  size_t forget = freed_count_ - freed_remembered;
  freed_count_ = freed_remembered;
  std::erase_if(allocations_, [&](const std::unique_ptr<Owned>& a) {
    if (!a->freed || forget == 0) return false;
    --forget;
    return true;
  });
}

void Memory::begin_launch() {
  const std::unique_lock lock(mutex_);
  ++launches_;
}

void Memory::end_launch() {
  const std::unique_lock lock(mutex_);
  if (--launches_ == 0) release_freed();
}

const Allocation* Memory::find(uint64_t address) const {
  const std::shared_lock lock(mutex_);
  const auto after = std::upper_bound(
      allocations_.begin(), allocations_.end(), address,
      [](uint64_t value, const std::unique_ptr<Owned>& x) { return value < x->address; });
  if (after == allocations_.begin()) return nullptr;
  const Allocation* a = (after - 1)->get();
  return address - a->address < a->bytes ? a : nullptr;
}

std::string Memory::explain(uint64_t address, uint64_t bytes) const {
  if (const Allocation* a = find(address)) {
    const std::string name = a->label.empty() ? "an allocation" : a->label;
    const std::string where = hex(address) + " is byte " + std::to_string(address - a->address) +
                              " of " + name + " of " + std::to_string(a->bytes) + " bytes";
    if (a->freed) return where + ", which was freed";
    if (bytes > a->bytes - (address - a->address)) {
      return where + ", and " + std::to_string(bytes) + " bytes reach past its end";
    }
    return "";
  }
  const std::shared_lock lock(mutex_);
  const Allocation* nearest = nullptr;
  for (const auto& a : allocations_) {
    if (a->address + a->bytes <= address) nearest = a.get();
  }
  std::string text = hex(address) + " is in no allocation";
  if (nearest && address - nearest->address - nearest->bytes < gap) {
    text += "; it is " + std::to_string(address - nearest->address - nearest->bytes) +
            " bytes past the end of " + (nearest->label.empty() ? "one" : nearest->label) + " of " +
            std::to_string(nearest->bytes) + " bytes";
  }
  return text;
}

uint64_t Memory::bytes_in_use() const {
  const std::shared_lock lock(mutex_);
  return in_use_;
}

std::string Memory::check(uint64_t address, uint64_t bytes, Allocation** found) const {
  std::string error = explain(address, bytes);
  // The end of an allocation is a fine place for no bytes.
  if (bytes == 0) error.clear();
  *found = const_cast<Allocation*>(find(address));
  return error;
}

std::string Memory::write(uint64_t address, std::span<const std::byte> from) {
  Allocation* a = nullptr;
  const std::string error = check(address, from.size(), &a);
  if (!error.empty() || from.empty()) return error;
  const uint64_t at = address - a->address;
  std::memcpy(a->data + at, from.data(), from.size());
  std::memset(a->defined + at, 1, from.size());
  return "";
}

std::string Memory::read(uint64_t address, std::span<std::byte> to) const {
  Allocation* a = nullptr;
  const std::string error = check(address, to.size(), &a);
  if (!error.empty() || to.empty()) return error;
  std::memcpy(to.data(), a->data + (address - a->address), to.size());
  return "";
}

std::string Memory::fill(uint64_t address, uint8_t value, uint64_t bytes) {
  Allocation* a = nullptr;
  const std::string error = check(address, bytes, &a);
  if (!error.empty() || bytes == 0) return error;
  std::memset(a->data + (address - a->address), value, bytes);
  std::memset(a->defined + (address - a->address), 1, bytes);
  return "";
}

std::string Memory::copy(uint64_t to, uint64_t from, uint64_t bytes) {
  Allocation *a = nullptr, *b = nullptr;
  std::string error = check(to, bytes, &a);
  if (error.empty()) error = check(from, bytes, &b);
  if (!error.empty() || bytes == 0) return error;
  std::memmove(a->data + (to - a->address), b->data + (from - b->address), bytes);
  std::memmove(a->defined + (to - a->address), b->defined + (from - b->address), bytes);
  return "";
}

}  // namespace gfx9emu
