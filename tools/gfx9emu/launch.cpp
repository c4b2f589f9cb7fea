// From a grid to workgroups to waves: what the command processor and the dispatcher do.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "gfx9emu/emu.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

constexpr size_t interleaved = 3;                // workgroups of one host thread that take turns
constexpr uint32_t dynamic_stack_bytes = 16384;  // per lane, where a kernel calls through pointers

uint32_t scratch_per_lane(const Descriptor& d) {
  return d.scratch_bytes + (d.dynamic_stack ? dynamic_stack_bytes : 0);
}

// The hidden arguments of code object version 5 that have a meaning here; the others are 0.
uint64_t hidden_value(const std::string& kind, Dim3 grid, Dim3 block) {
  const uint32_t grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
  const int axis = kind.empty() ? 0 : kind.back() - 'x';
  if (kind.starts_with("hidden_block_count_")) return grids[axis];
  if (kind.starts_with("hidden_group_size_")) return blocks[axis];
  if (kind == "hidden_grid_dims") return grid.z * block.z > 1 ? 3 : grid.y * block.y > 1 ? 2 : 1;
  if (kind == "hidden_dynamic_lds_size") return 0;
  return 0;
}

std::string check_launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t kernarg,
                         uint32_t dynamic_lds) {
  if (uint64_t(grid.x) * grid.y * grid.z == 0) return "grid: it has no workgroups";
  const uint64_t items = uint64_t(block.x) * block.y * block.z;
  if (items == 0 || items > 1024) {
    return "block: " + std::to_string(items) + " work items, 1 to 1024 are possible";
  }
  if (items > kernel.max_workgroup_size) {
    return "block: " + std::to_string(items) + " work items, the kernel's metadata allows " +
           std::to_string(kernel.max_workgroup_size);
  }
  const uint32_t max_lds = facts_of(kernel.object->arch()).lds_bytes;
  if (uint64_t(kernel.descriptor.lds_bytes) + dynamic_lds > max_lds) {
    return "dynamic_lds: " + std::to_string(dynamic_lds) + " bytes after the kernel's " +
           std::to_string(kernel.descriptor.lds_bytes) + " exceed " + std::to_string(max_lds);
  }
  uint32_t needed = 0;
  for (const KernelArg& a : kernel.args) {
    if (!a.value_kind.starts_with("hidden_")) needed = std::max(needed, a.offset + a.size);
  }
  if (kernarg < needed) {
    return "kernarg: " + std::to_string(kernarg) + " bytes, the kernel's arguments take " +
           std::to_string(needed);
  }
  const uint32_t waves_per_simd = 512 / ((kernel.descriptor.vgprs + 7) / 8 * 8);
  if (waves_per_simd * 4 < (items + 63) / 64) {
    return "block: its " + std::to_string((items + 63) / 64) + " waves of " +
           std::to_string(kernel.descriptor.vgprs) + " VGPRs do not fit one compute unit";
  }
  return "";
}

// Keeps what is freed meanwhile until the launch has ended.
class Running {
 public:
  explicit Running(Memory& memory) : memory_(memory) { memory_.begin_launch(); }
  ~Running() { memory_.end_launch(); }
  Running(const Running&) = delete;

 private:
  Memory& memory_;
};

// Frees what a launch allocated for itself.
class Temporary {
 public:
  Temporary(Memory& memory, uint64_t bytes, std::string label)
      : memory_(memory), address_(memory.allocate(bytes, std::move(label))) {}
  ~Temporary() { memory_.free(address_); }
  Temporary(const Temporary&) = delete;
  uint64_t address() const { return address_; }

 private:
  Memory& memory_;
  uint64_t address_;
};

void fill_kernarg(Memory& memory, uint64_t address, const Kernel& kernel, Dim3 grid, Dim3 block,
                  std::span<const std::byte> kernarg, uint32_t dynamic_lds) {
  const size_t given = std::min<size_t>(kernarg.size(), kernel.descriptor.kernarg_bytes);
  if (kernel.args.empty()) memory.write(address, kernarg.first(given));
  for (const KernelArg& a : kernel.args) {
    // What lies between and behind the arguments stays undefined.
    if (!a.value_kind.starts_with("hidden_")) {
      if (a.offset >= given) continue;
      memory.write(address + a.offset,
                   kernarg.subspan(a.offset, std::min<size_t>(a.size, given - a.offset)));
      continue;
    }
    uint64_t value = hidden_value(a.value_kind, grid, block);
    if (a.value_kind == "hidden_dynamic_lds_size") value = dynamic_lds;
    std::byte bytes[8];
    std::memcpy(bytes, &value, 8);
    const uint32_t size = std::min(a.size, 8u);
    memory.write(address + a.offset, {bytes, size});
  }
}

// The dispatch packet, for kernels that read their sizes from it.
void fill_dispatch(Memory& memory, uint64_t address, const LaunchContext& c) {
  std::array<std::byte, 64> packet{};
  const auto put = [&](size_t offset, auto value) {
    std::memcpy(packet.data() + offset, &value, sizeof value);
  };
  put(2, uint16_t{3});  // dimensions
  put(4, static_cast<uint16_t>(c.block.x));
  put(6, static_cast<uint16_t>(c.block.y));
  put(8, static_cast<uint16_t>(c.block.z));
  put(12, c.grid.x * c.block.x);
  put(16, c.grid.y * c.block.y);
  put(20, c.grid.z * c.block.z);
  put(24, scratch_per_lane(c.kernel->descriptor));
  put(28, c.lds_bytes);
  put(40, c.kernarg_address);
  memory.write(address, packet);
}

// The scalar and vector registers that a wave begins with.
void set_entry_state(Wave& w, const LaunchContext& c, Dim3 workgroup, uint32_t lanes) {
  const Descriptor& d = c.kernel->descriptor;
  int next = 0;
  const auto put = [&](uint32_t value) {
    if (next < scalar::count) {
      w.s[next] = value;
      w.scalar_defined[next] = ~0u;
    }
    ++next;
  };
  const auto put64 = [&](uint64_t value) {
    put(static_cast<uint32_t>(value));
    put(static_cast<uint32_t>(value >> 32));
  };
  if (d.dispatch_ptr) put64(c.dispatch_address);
  if (d.queue_ptr) put64(c.queue_address);
  if (d.kernarg_ptr) put64(c.kernarg_address);
  if (d.dispatch_id) put64(0);
  for (uint32_t i = 0; i < d.kernarg_preload_dwords; ++i) {
    uint32_t value = 0;
    const uint64_t from = c.kernarg_address + 4 * (d.kernarg_preload_offset + uint64_t{i});
    c.memory->read(from, {reinterpret_cast<std::byte*>(&value), 4});
    put(value);
  }
  if (d.private_segment_size) put(scratch_per_lane(d));
  next = static_cast<int>(d.user_sgprs);
  if (d.workgroup_id_x) put(workgroup.x);
  if (d.workgroup_id_y) put(workgroup.y);
  if (d.workgroup_id_z) put(workgroup.z);
  if (d.workgroup_info) put(0);

  const uint64_t active = lanes >= 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1;
  w.set_scalar64(scalar::exec, active);
  w.define({RegFile::Scalar, scalar::exec, 2}, 3, 0);
  for (uint32_t l = 0; l < lanes && l < 64; ++l) {
    const uint32_t item = w.index * 64 + l;
    const uint32_t x = item % c.block.x, y = item / c.block.x % c.block.y,
                   z = item / c.block.x / c.block.y;
    w.v[0].lane[l] =
        x | (d.workitem_id_vgprs >= 1 ? y << 10 : 0) | (d.workitem_id_vgprs >= 2 ? z << 20 : 0);
  }
  w.define({RegFile::Vgpr, 0, 1}, 3, active);
}

}  // namespace

Workgroup::Workgroup(const LaunchContext& context, Dim3 id_, uint64_t seed)
    : id(id_), lds(context.lds_bytes), random(seed), context_(context) {
  const uint32_t items = context.block.x * context.block.y * context.block.z;
  const uint32_t count = (items + 63) / 64;
  if (context.options->checks) lds_state.resize(lds.size());
  const size_t scratch_bytes = size_t{scratch_per_lane(context.kernel->descriptor)} * count * 64;
  scratch.resize(scratch_bytes);
  scratch_defined.resize(scratch_bytes);
  for (uint32_t i = 0; i < count; ++i) {
    waves.push_back(std::make_unique<Wave>(*this, context, i));
    set_entry_state(*waves.back(), context, id, items - i * 64);
  }
}

void Workgroup::release_barrier() {
  ++epoch;
  for (const auto& w : waves) {
    w->at_barrier = false;
    if (w->checks) w->carry_lds_over_barrier();
  }
  MemoryView::meet(waves);
}

bool Workgroup::run() {
  const bool shuffled = context_.options->seed != 0;
  // Long enough to be fast, short enough that a wave that waits for another's flag gets its turn.
  constexpr uint64_t turn = 4096;
  std::vector<Wave*> ready;
  uint32_t ended = 0;
  Wave* waiting = nullptr;
  for (const auto& w : waves) {
    if (w->failed) return false;
    if (w->done) {
      ++ended;
    } else if (w->at_barrier) {
      waiting = w.get();
    } else {
      ready.push_back(w.get());
    }
  }
  if (ended == waves.size()) return false;
  if (ready.empty()) {
    if (ended > 0 && context_.options->checks) {
      waiting->fail(FaultKind::Barrier, std::to_string(ended) + " of " +
                                            std::to_string(waves.size()) +
                                            " waves have ended and never reach this barrier");
      return false;
    }
    release_barrier();
    return true;
  }
  if (shuffled) {
    // A few instructions of any wave, again and again.
    for (int i = 0; i < 64 && !ready.empty(); ++i) {
      Wave* w = ready[random() % ready.size()];
      w->run(1 + random() % 32);
      if (w->failed) return false;
      if (w->done || w->at_barrier) std::erase(ready, w);
    }
    return true;
  }
  for (Wave* w : ready) {
    w->run(turn);
    if (w->failed) return false;
  }
  return true;
}

Report launch(Memory& memory, const Kernel& kernel, Dim3 grid, Dim3 block,
              std::span<const std::byte> kernarg, uint32_t dynamic_lds, const Options& options) {
  Report report;
  const auto refuse = [&](std::string message) {
    Fault f;
    f.kernel = kernel.name;
    f.message = std::move(message);
    report.faults.push_back(std::move(f));
    return report;
  };
  const std::string problem = check_launch(kernel, grid, block, kernarg.size(), dynamic_lds);
  if (!problem.empty()) return refuse(problem);
  if (kernel.object->address() == 0) return refuse("the code object was not loaded into a Memory");

  const Running running(memory);
  const Temporary arguments(memory, std::max(kernel.descriptor.kernarg_bytes, 16u),
                            "the kernarg segment");
  const Temporary dispatch(memory, 64, "the dispatch packet");
  // What is in a queue is the runtime's; none of it is defined.
  const Temporary queue(memory, 256, "the queue");
  if (arguments.address() == 0 || dispatch.address() == 0 || queue.address() == 0) {
    return refuse("out of memory");
  }
  LaunchContext context;
  context.memory = &memory;
  context.kernel = &kernel;
  context.program = &kernel.object->program();
  context.options = &options;
  context.image_address = kernel.object->address();
  context.kernarg_address = arguments.address();
  context.dispatch_address = dispatch.address();
  context.queue_address = queue.address();
  context.grid = grid;
  context.block = block;
  context.lds_bytes = kernel.descriptor.lds_bytes + dynamic_lds;
  // The manual does not speak of it.
  context.replays = options.level == Level::Strict && kernel.object->xnack() != Setting::Off;
  // What the register file has room for is all that is asked where nothing is checked.
  const Level range_level = options.checks ? options.level : Level::Isa;
  for (const Inst& inst : context.program->insts) {
    context.bad_registers.push_back(!bad_register_message(kernel, inst, range_level).empty());
    if (options.checks && options.hazards)
      context.hazard_roles.push_back(hazard_roles(inst, options.level));
  }
  fill_kernarg(memory, arguments.address(), kernel, grid, block, kernarg, dynamic_lds);
  fill_dispatch(memory, dispatch.address(), context);

  std::unique_ptr<MemoryModel> memory_model;
  if (options.checks && options.memory_model) memory_model = MemoryModel::create(context);
  context.memory_model = memory_model.get();

  const uint64_t groups = uint64_t(grid.x) * grid.y * grid.z;
  std::atomic<uint64_t> next{0};
  // Nobody knows the order of workgroups either; this takes each once.
  const uint64_t first = options.seed % groups;
  const bool backwards = options.seed & 1;
  std::mutex mutex;
  int errors = 0;
  // Workgroups that hand data to each other take turns too.
  const size_t at_once =
      options.seed != 0 && memory_model && memory_model->synchronises() ? interleaved : 1;
  const auto work = [&] {
    std::vector<std::pair<uint64_t, std::unique_ptr<Workgroup>>> residents;
    std::mt19937_64 random(options.seed);
    for (;;) {
      while (residents.size() < at_once) {
        const uint64_t turn = next++;
        if (turn >= groups) break;
        const uint64_t n = (first + (backwards ? groups - turn : turn)) % groups;
        const Dim3 id{static_cast<uint32_t>(n % grid.x), static_cast<uint32_t>(n / grid.x % grid.y),
                      static_cast<uint32_t>(n / grid.x / grid.y)};
        residents.emplace_back(
            n, std::make_unique<Workgroup>(context, id, options.seed ^ (n * 0x9e3779b97f4a7c15)));
      }
      if (residents.empty()) return;
      const size_t chosen = residents.size() == 1 ? 0 : random() % residents.size();
      if (residents[chosen].second->run()) continue;
      const uint64_t n = residents[chosen].first;
      const std::unique_ptr<Workgroup> ended = std::move(residents[chosen].second);
      Workgroup& group = *ended;
      residents.erase(residents.begin() + static_cast<ptrdiff_t>(chosen));
      const std::lock_guard lock(mutex);
      for (Fault& f : group.faults) {
        // What one workgroup warned of, the others need not repeat.
        const bool repeated =
            f.warning &&
            std::any_of(report.faults.begin(), report.faults.end(), [&](const Fault& g) {
              return g.warning && g.where.offset == f.where.offset;
            });
        if (repeated) continue;
        if (!f.warning) ++errors;
        // Warnings do not crowd out errors.
        if (!f.warning || static_cast<int>(report.faults.size()) < options.max_faults) {
          report.faults.push_back(std::move(f));
        }
      }
      for (const auto& w : group.waves) {
        report.counters += w->counters;
        if (n == 0) report.waves.push_back(w->counters);
        if (n == 0 && options.trace) report.traces.push_back(std::move(w->trace));
      }
      if (errors >= options.max_faults) next = groups;
    }
  };
  uint64_t threads = options.threads > 0 ? static_cast<uint64_t>(options.threads)
                                         : std::max(1u, std::thread::hardware_concurrency());
  threads = std::min(threads, groups);
  std::vector<std::thread> helpers;
  for (uint64_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
  return report;
}

}  // namespace gfx9emu
