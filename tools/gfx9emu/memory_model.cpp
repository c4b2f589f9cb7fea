#include "gfx9emu/memory_model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

constexpr uint32_t byte_bits = 4, all_bytes = 15;
constexpr uint64_t max_clock = (uint64_t{1} << MemoryModel::clock_bits) - 1;

uint64_t pack(uint64_t wave, uint64_t clock, uint64_t inst) {
  constexpr int inst_at = byte_bits, clock_at = inst_at + MemoryModel::inst_bits,
                wave_at = clock_at + MemoryModel::clock_bits;
  return wave << wave_at | clock << clock_at | inst << inst_at;
}
uint32_t wave_of(uint64_t entry) {
  return static_cast<uint32_t>(entry >> (64 - MemoryModel::wave_bits));
}
uint32_t clock_of(uint64_t entry) {
  return static_cast<uint32_t>(entry >> (byte_bits + MemoryModel::inst_bits) & max_clock);
}
uint32_t inst_of(uint64_t entry) {
  return static_cast<uint32_t>(entry >> byte_bits & 0xffff);
}

uint64_t load(const uint64_t& x) {
  return __atomic_load_n(&x, __ATOMIC_ACQUIRE);
}
void store(uint64_t& x, uint64_t value) {
  __atomic_store_n(&x, value, __ATOMIC_RELEASE);
}
// Bytes of one instruction add up.
void record(uint64_t& x, uint64_t mine, uint32_t bytes) {
  if (bytes != all_bytes) {
    const uint64_t before = load(x);
    if (before >> byte_bits == mine >> byte_bits) bytes |= before & all_bytes;
  }
  store(x, mine | bytes);
}

Scope scope_of(const Inst& inst) {
  if (inst.cls == Class::Smem) return Scope::Wave;
  // sc0 of these says that they return the old value.
  if (inst.is_atomic) return inst.sc1 ? Scope::System : Scope::Agent;
  return static_cast<Scope>((inst.sc0 ? 1 : 0) + (inst.sc1 ? 2 : 0));
}
const char* bits_of_scope(Scope scope) {
  return scope == Scope::System ? "sc0 sc1" : scope == Scope::Agent ? "sc1" : "sc0";
}

}  // namespace

void Known::join(const Known& o) {
  issued = std::max(issued, o.issued);
  done = std::max(done, o.done);
  written = std::max(written, o.written);
  fresh_done = std::max(fresh_done, o.fresh_done);
  fresh_written = std::max(fresh_written, o.fresh_written);
  scalar_done = std::max(scalar_done, o.scalar_done);
  scalar_written = std::max(scalar_written, o.scalar_written);
}

// ---- A launch ----------------------------------------------------------------------------------

std::unique_ptr<MemoryModel> MemoryModel::create(const LaunchContext& c) {
  const uint64_t waves =
      uint64_t{c.grid.x} * c.grid.y * c.grid.z * ((c.block.x * c.block.y * c.block.z + 63) / 64);
  if (waves >> wave_bits != 0 || c.program->insts.size() >> inst_bits != 0) return nullptr;
  return std::make_unique<MemoryModel>(c);
}

MemoryModel::MemoryModel(const LaunchContext& context)
    : waves_per_group_((context.block.x * context.block.y * context.block.z + 63) / 64) {
  const auto& insts = context.program->insts;
  synchronises_ = std::any_of(insts.begin(), insts.end(), [](const Inst& i) {
    const bool device = i.cls == Class::Global || i.cls == Class::Buffer || i.cls == Class::Flat;
    return device && scope_of(i) != Scope::Wave;
  });
}

std::unique_lock<std::mutex> MemoryModel::exclusive(const Inst& inst) {
  if (scope_of(inst) == Scope::Wave) return {};
  return std::unique_lock(atomics_);
}

Cell* MemoryModel::cells(const Allocation& a) {
  {
    const std::shared_lock lock(mutex_);
    const auto found = cells_.find(&a);
    if (found != cells_.end()) return found->second.get();
  }
  const std::unique_lock lock(mutex_);
  auto& cells = cells_[&a];
  // Untouched pages cost nothing. Without the memory for it the allocation is not looked at.
  if (!cells) cells.reset(static_cast<Cell*>(std::calloc(a.bytes / 4 + 1, sizeof(Cell))));
  return cells.get();
}

// ---- A wave ------------------------------------------------------------------------------------

struct MemoryView::Access {
  const Allocation& allocation;
  uint64_t dword;
  Scope scope;
};

MemoryView::MemoryView(MemoryModel& model, Wave& wave)
    : model_(model), wave_(wave), id_([&] {
        const Dim3 grid = wave.context.grid, at = wave.group.id;
        const uint32_t group = (at.z * grid.y + at.y) * grid.x + at.x;
        return group * model.waves_per_group_ + wave.index + 1;
      }()) {}

bool MemoryView::is_mate(uint32_t wave) const {
  return (wave - 1) / model_.waves_per_group_ == (id_ - 1) / model_.waves_per_group_;
}

Cell* MemoryView::cells_of(const Allocation& a) {
  Place& place = places_[reinterpret_cast<uintptr_t>(&a) / sizeof a % std::size(places_)];
  if (place.allocation != &a) place = {&a, model_.cells(a)};
  return place.cells;
}

Known MemoryView::own() const {
  Known k;
  k.issued = static_cast<uint32_t>(std::min(wave_.next_operation() - 1, max_clock));
  k.done = static_cast<uint32_t>(std::min(wave_.completed_operations(), max_clock));
  k.written = written_;
  k.scalar_done = scalar_done_;
  return k;
}

Known MemoryView::known(uint32_t wave) const {
  if (!rest_) return {};
  const auto at = std::lower_bound(rest_->begin(), rest_->end(), wave,
                                   [](const KnownWave& k, uint32_t w) { return k.wave < w; });
  return at != rest_->end() && at->wave == wave ? at->known : Known{};
}

template <class F>
void MemoryView::change(F f) {
  auto changed = rest_ ? std::make_shared<Knowledge>(*rest_) : std::make_shared<Knowledge>();
  f(*changed);
  rest_ = std::move(changed);
}

void MemoryView::settle() {
  size_t settled = 0;
  const uint64_t done = wave_.completed_operations();
  for (; settled < pending_.size() && pending_[settled].clock <= done; ++settled) {
    const Pending& p = pending_[settled];
    if (!p.write_back) {
      acquire(p.released);
      continue;
    }
    written_ = std::max(written_, static_cast<uint32_t>(std::min(p.clock, max_clock)));
    if (!p.then) continue;
    // What other waves of this workgroup had stored by then was in the same L2.
    change([&](Knowledge& rest) {
      size_t i = 0;
      for (const KnownWave& before : *p.then) {
        if (!is_mate(before.wave)) continue;
        while (rest[i].wave != before.wave) ++i;
        rest[i].known.written = std::max(rest[i].known.written, before.known.done);
      }
    });
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<ptrdiff_t>(settled));
}

void MemoryView::acquire(const std::vector<Released>& released) {
  Knowledge more;
  for (const Released& r : released) {
    if (r.wave != id_) more.push_back({r.wave, r.own});
    if (r.rest) more.insert(more.end(), r.rest->begin(), r.rest->end());
  }
  if (more.empty()) return;
  for (KnownWave& k : more) {
    // Caches are each compute unit's own.
    k.known = {k.known.issued, k.known.done, k.known.written, 0, 0, 0, 0};
  }
  change([&](Knowledge& rest) {
    rest.insert(rest.end(), more.begin(), more.end());
    std::stable_sort(rest.begin(), rest.end(),
                     [](const KnownWave& a, const KnownWave& b) { return a.wave < b.wave; });
    size_t n = 0;
    for (size_t i = 0; i < rest.size(); ++i) {
      if (n > 0 && rest[n - 1].wave == rest[i].wave) {
        rest[n - 1].known.join(rest[i].known);
      } else {
        rest[n++] = rest[i];
      }
    }
    rest.resize(n);
  });
}

void MemoryView::write_back(const Inst& inst) {
  if (scope_of(inst) < wave_.context.options->apart) return;
  settle();
  pending_.push_back({wave_.next_operation(), true, rest_, {}});
}

void MemoryView::invalidate(const Inst& inst) {
  if (scope_of(inst) < wave_.context.options->apart) return;
  settle();
  if (!rest_) return;
  change([](Knowledge& rest) {
    for (auto& [wave, k] : rest) k.fresh_done = k.done, k.fresh_written = k.written;
  });
}

void MemoryView::invalidate_scalar() {
  settle();
  scalar_done_ = own().done;
  if (!rest_) return;
  change([&](Knowledge& rest) {
    for (auto& [wave, k] : rest) {
      k.scalar_done = is_mate(wave) ? k.done : k.fresh_done;
      k.scalar_written = k.fresh_written;
    }
  });
}

void MemoryView::meet(std::span<const std::unique_ptr<Wave>> waves) {
  if (waves.size() < 2) return;
  std::vector<Released> all;
  for (const auto& w : waves) {
    if (!w->view) return;
    w->view->settle();
    const SharedKnowledge& rest = w->view->rest_;
    const bool known =
        std::any_of(all.begin(), all.end(), [&](const Released& r) { return r.rest == rest; });
    all.push_back({w->view->id_, Scope::Workgroup, w->view->own(), known ? nullptr : rest});
  }
  Knowledge joined;
  for (const Released& r : all) {
    joined.push_back({r.wave, r.own});
    if (r.rest) joined.insert(joined.end(), r.rest->begin(), r.rest->end());
  }
  std::stable_sort(joined.begin(), joined.end(),
                   [](const KnownWave& a, const KnownWave& b) { return a.wave < b.wave; });
  auto shared = std::make_shared<Knowledge>();
  for (const KnownWave& k : joined) {
    if (!shared->empty() && shared->back().wave == k.wave) {
      shared->back().known.join(k.known);
    } else {
      shared->push_back(k);
    }
  }
  for (const auto& w : waves) {
    MemoryView& v = *w->view;
    v.rest_ = shared;
    // Another wave's write-back takes this one's stores along.
    const Known k = v.known(v.id_);
    v.written_ = std::max(v.written_, k.written);
    v.scalar_done_ = std::max(v.scalar_done_, k.scalar_done);
  }
}

// ---- Accesses ----------------------------------------------------------------------------------

bool MemoryView::note(const Allocation& a, uint64_t at, uint32_t bytes, bool read, bool write,
                      const void* value) {
  Cell* cells = cells_of(a);
  const uint64_t clock = wave_.next_operation();
  if (!cells || clock > max_clock) return true;
  const Inst& inst = *wave_.current;
  const Scope scope = scope_of(inst);
  const bool scalar = inst.cls == Class::Smem;
  const uint64_t mine = pack(id_, clock, wave_.entry.inst), end = at + bytes;
  for (uint64_t i = at / 4; 4 * i < end; ++i) {
    const uint64_t from = std::max(4 * i, at), to = std::min(4 * i + 4, end);
    const uint32_t touched = (all_bytes << (from - 4 * i)) & (all_bytes >> (4 * i + 4 - to));
    const std::byte* data = value ? static_cast<const std::byte*>(value) + (from - at) : nullptr;
    Cell& c = cells[i];
    const uint64_t last_write = load(c.write);
    const bool by_other = last_write & touched && (scalar || wave_of(last_write) != id_);
    if (!write) {
      if (by_other && !check_read({a, i, scope}, last_write)) return false;
      record(c.read, mine, touched);
    } else {
      // Who writes what is there already does not matter.
      const bool same = by_other && data && std::memcmp(a.data + from, data, to - from) == 0;
      if (by_other && !same && !check_write({a, i, scope}, last_write)) return false;
      const uint64_t last_read = load(c.read);
      if (last_read & touched && wave_of(last_read) != id_ &&
          !check_write_after_read({a, i, scope}, last_read)) {
        return false;
      }
      // Who sees the record sees the value.
      if (data) std::memcpy(a.data + from, data, to - from);
      record(c.write, mine, touched);
    }
    if (scope != Scope::Wave) {
      synchronise(a.address + 4 * i, clock, scope, read && inst.is_load, write, read);
    }
  }
  return true;
}

// `keeps`: what others released there before is handed on too, as by a read-modify-write.
void MemoryView::synchronise(uint64_t address, uint64_t clock, Scope scope, bool acquires,
                             bool releases, bool keeps) {
  settle();
  if (!releases) {
    const auto found = model_.released_.find(address);
    if (found == model_.released_.end()) return;
  }
  std::vector<Released>& there = model_.released_[address];
  if (acquires && !there.empty()) {
    if (pending_.empty() || pending_.back().clock != clock || pending_.back().write_back)
      pending_.push_back({clock, false, nullptr, {}});
    for (const Released& r : there) {
      const Scope needed = is_mate(r.wave) ? Scope::Workgroup : wave_.context.options->apart;
      if (r.wave != id_ && std::min(r.scope, scope) >= needed)
        pending_.back().released.push_back(r);
    }
  }
  if (!releases) return;
  if (keeps) {
    std::erase_if(there, [&](const Released& r) { return r.wave == id_; });
  } else {
    there.clear();
  }
  Known k = own();
  k.issued = static_cast<uint32_t>(clock);
  there.push_back({id_, scope, k, rest_});
}

// ---- Checks ------------------------------------------------------------------------------------

bool MemoryView::fail(const Access& access, uint64_t entry, FaultKind kind, bool read,
                      const std::string& why) {
  const Allocation& a = access.allocation;
  const Dim3 grid = wave_.context.grid;
  const uint32_t wave = wave_of(entry) - 1, group = wave / model_.waves_per_group_;
  std::string who = "wave " + std::to_string(wave % model_.waves_per_group_);
  if (wave_of(entry) == id_) {
    who = "this wave";
  } else if (!is_mate(wave_of(entry))) {
    who += " of workgroup " + std::to_string(group % grid.x) + "," +
           std::to_string(group / grid.x % grid.y) + "," + std::to_string(group / grid.x / grid.y);
  }
  wave_.fail(kind,
             "dword " + std::to_string(access.dword) + " of " +
                 (a.label.empty() ? "an allocation" : a.label) + " of " + std::to_string(a.bytes) +
                 " bytes was " + (read ? "read" : "written") + " by " + who + " " + why,
             &wave_.context.program->insts[inst_of(entry)]);
  return false;
}

namespace {

std::string write_back_text(Scope scope) {
  return std::string("and not written back (buffer_wbl2 ") + bits_of_scope(scope) +
         ", s_waitcnt vmcnt(0)) before the atomic that orders the two";
}
const char* const unordered = "with no barrier or atomic in between";
const char* const outstanding =
    "before the barrier or atomic that orders the two, but without the s_waitcnt vmcnt that covers "
    "it";

}  // namespace

bool MemoryView::check_read(const Access& access, uint64_t write) {
  const LaunchContext& c = wave_.context;
  const uint32_t writer = wave_of(write), clock = clock_of(write);
  const bool scalar = wave_.current->cls == Class::Smem, mate = is_mate(writer);
  const Scope needed = mate ? Scope::Workgroup : c.options->apart;
  const bool through = scope_of(c.program->insts[inst_of(write)]) >= needed;
  if (through && access.scope >= needed) return true;
  settle();
  const char* const in_scalar_cache =
      "and the scalar cache may hold what was there before: no s_dcache_inv since";
  if (writer == id_) {
    if (scalar_done_ >= clock) return true;
    return fail(access, write, FaultKind::Incoherent, false, in_scalar_cache);
  }
  const Known k = known(writer);
  if (k.issued < clock) return fail(access, write, FaultKind::MemoryRace, false, unordered);
  if ((mate && c.options->level == Level::Isa ? k.issued : k.done) < clock)
    return fail(access, write, FaultKind::MissingWaitcnt, false, outstanding);
  if (!mate) {
    if (!through && k.written < clock)
      return fail(access, write, FaultKind::Incoherent, false, write_back_text(needed));
    if (access.scope < needed && (through ? k.fresh_done : k.fresh_written) < clock) {
      return fail(access, write, FaultKind::Incoherent, false,
                  std::string("and caches here may hold what was there before: no buffer_inv ") +
                      bits_of_scope(needed) +
                      " since the atomic that orders the two was waited for");
    }
  }
  if (scalar && (mate || through ? k.scalar_done : k.scalar_written) < clock)
    return fail(access, write, FaultKind::Incoherent, false, in_scalar_cache);
  return true;
}

bool MemoryView::check_write(const Access& access, uint64_t write) {
  const LaunchContext& c = wave_.context;
  const uint32_t writer = wave_of(write), clock = clock_of(write);
  const bool mate = is_mate(writer);
  const Scope needed = mate ? Scope::Workgroup : c.options->apart;
  const bool through = scope_of(c.program->insts[inst_of(write)]) >= needed;
  if (through && access.scope >= needed) return true;
  settle();
  const Known k = known(writer);
  if (k.issued < clock) return fail(access, write, FaultKind::MemoryRace, false, unordered);
  if ((mate && c.options->level == Level::Isa ? k.issued : k.done) < clock)
    return fail(access, write, FaultKind::MissingWaitcnt, false, outstanding);
  if (!mate && !through && k.written < clock)
    return fail(access, write, FaultKind::Incoherent, false, write_back_text(needed));
  return true;
}

bool MemoryView::check_write_after_read(const Access& access, uint64_t read) {
  const LaunchContext& c = wave_.context;
  const uint32_t clock = clock_of(read);
  const bool mate = is_mate(wave_of(read));
  const Inst& reader = c.program->insts[inst_of(read)];
  const Scope needed = mate ? Scope::Workgroup : c.options->apart;
  if (scope_of(reader) >= needed && access.scope >= needed) return true;
  settle();
  const Known k = known(wave_of(read));
  if (k.issued < clock) return fail(access, read, FaultKind::MemoryRace, true, unordered);
  // Scalar loads have a counter of their own; who uses what they return has waited for them.
  const bool by_order = reader.cls == Class::Smem || (mate && c.options->level == Level::Isa);
  if (!by_order && k.done < clock)
    return fail(access, read, FaultKind::MissingWaitcnt, true, outstanding);
  return true;
}

}  // namespace gfx9emu
