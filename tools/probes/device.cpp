// A device through the library's own driver: libamdhip64, or the emulator's stand-in for it.
#include "driver/driver.h"
#include "driver/timing.h"
#include "probes/machine.h"

namespace attn::probes {
namespace {

void need_ok(const Status& status) {
  if (!status.ok()) throw error(status.code, status.text.c_str());
}

class Device final : public Machine {
 public:
  Device(const std::string& object, bool emulator, const std::string& library, int ordinal) {
    need_ok(open_hip(library.empty() ? nullptr : library.c_str(), emulator, ordinal, &driver_));
    if (!object.empty()) need_ok(driver_->load_file(object.c_str(), &module_));
  }
  ~Device() override {
    if (module_) driver_->unload(module_);
  }

  tools::Json describe() const override {
    const DeviceInfo& d = driver_->device();
    return {{"name", d.name},
            {"arch", d.arch},
            {"compute_units", d.multiprocessors},
            {"memory_bytes", d.memory_bytes},
            {"driver", d.driver_version}};
  }

  Outcome launch(const LaunchSpec& spec, const std::vector<std::byte>& data) override {
    Outcome outcome;
    std::vector<void*> memory(spec.buffers.size());
    const Status status = run(spec, data, memory, outcome);
    if (!status.ok()) outcome.error = status.text;
    for (void* address : memory) (void)driver_->free(address);
    return outcome;
  }

 private:
  Status run(const LaunchSpec& spec, const std::vector<std::byte>& data, std::vector<void*>& memory,
             Outcome& outcome) {
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < spec.buffers.size(); ++i) {
      const BufferSpec& b = spec.buffers[i];
      ATTN_TRY(driver_->alloc(b.bytes, &memory[i]));
      if (b.from >= 0) {
        ATTN_TRY(driver_->copy_in(memory[i], data.data() + b.from, b.bytes, nullptr));
      } else {
        ATTN_TRY(driver_->fill(memory[i], b.fill, b.bytes, nullptr));
      }
      addresses.push_back(reinterpret_cast<uint64_t>(memory[i]));
    }
    std::vector<std::byte> kernarg = pack(spec, addresses);
    Launch launch;
    ATTN_TRY(driver_->function(module_, spec.kernel.c_str(), 0, &launch.function));
    std::copy(spec.grid, spec.grid + 3, launch.grid);
    std::copy(spec.block, spec.block + 3, launch.block);
    launch.kernarg = kernarg.data();
    launch.kernarg_bytes = kernarg.size();
    ATTN_TRY(time(launch, spec.repeats, outcome.milliseconds));
    for (size_t i = 0; i < spec.buffers.size(); ++i) {
      if (!spec.buffers[i].read) continue;
      outcome.read.emplace_back(spec.buffers[i].bytes);
      ATTN_TRY(
          driver_->copy_out(outcome.read.back().data(), memory[i], spec.buffers[i].bytes, nullptr));
    }
    return {};
  }

  Status time(const Launch& launch, int repeats, double& milliseconds) {
    Timing& timing = driver_->timing();
    Event events[2] = {};
    for (Event& event : events) ATTN_TRY(timing.event_create(&event));
    const auto measure = [&]() -> Status {
      ATTN_TRY(timing.event_record(events[0], nullptr));
      for (int i = 0; i < repeats; ++i) ATTN_TRY(driver_->launch(launch, nullptr));
      ATTN_TRY(timing.event_record(events[1], nullptr));
      ATTN_TRY(driver_->synchronize(nullptr));
      float elapsed = 0;
      ATTN_TRY(timing.event_elapsed(events[0], events[1], &elapsed));
      milliseconds = double{elapsed};
      return {};
    };
    const Status status = measure();
    for (Event event : events) timing.event_destroy(event);
    return status;
  }

  std::shared_ptr<Driver> driver_;
  Module module_ = nullptr;
};

}  // namespace

std::unique_ptr<Machine> open_device(const std::string& object, bool emulator,
                                     const std::string& library, int ordinal) {
  return std::make_unique<Device>(object, emulator, library, ordinal);
}

}  // namespace attn::probes
