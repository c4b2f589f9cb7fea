#include "attn/clocks.h"

#include <algorithm>

#include "driver/library.h"

namespace attn::tools {
namespace {

// nvml.h
enum { clock_sm = 1, clock_memory = 2, temperature_gpu = 0 };
constexpr unsigned field_power_instant = 186;  // milliwatts; nvmlDeviceGetPowerUsage: mean of 1 s

struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int value_type, status;
  union {
    unsigned u32;
    unsigned long long u64;
  };
};
static_assert(sizeof(FieldValue) == 40);

}  // namespace

struct NvmlCalls {
  const char* (*error_string)(int) = nullptr;
  Call<> init;
  Call<const char*, void**> device;
  Call<void*, int, unsigned*> clock;
  Call<void*, int, unsigned*> temperature;
  Call<void*, unsigned long long*> throttle;
  Call<void*, int, FieldValue*> fields;
  Call<char*, unsigned> driver_version;
};

attn::Status Clocks::call(int code, const char* function) const {
  return code == 0 ? attn::Status{} : unsupported(function, ": ", calls_->error_string(code));
}

attn::Status Clocks::open(const std::string& pci, std::unique_ptr<Clocks>* clocks) {
  void* library = nullptr;
  if (attn::Status opened = open_library("libnvidia-ml.so.1", &library); !opened.ok())
    return unsupported(opened.text);
  std::unique_ptr<Clocks> made(new Clocks);
  made->calls_ = std::make_shared<NvmlCalls>();
  NvmlCalls& c = *made->calls_;
  const Symbol symbols[] = {
      {c.init, "nvmlInit_v2"},
      {c.device, "nvmlDeviceGetHandleByPciBusId_v2"},
      {c.clock, "nvmlDeviceGetClockInfo"},
      {c.temperature, "nvmlDeviceGetTemperature"},
      {c.throttle, "nvmlDeviceGetCurrentClocksEventReasons"},
      {c.fields, "nvmlDeviceGetFieldValues"},
      {c.driver_version, "nvmlSystemGetDriverVersion"},
  };
  for (const Symbol& symbol : symbols) {
    *symbol.pointer = find_symbol(library, symbol.name);
    if (!*symbol.pointer) return unsupported("libnvidia-ml.so.1 has no ", symbol.name);
  }
  c.error_string =
      reinterpret_cast<decltype(c.error_string)>(find_symbol(library, "nvmlErrorString"));
  if (!c.error_string) return unsupported("libnvidia-ml.so.1 has no nvmlErrorString");
  ATTN_TRY(made->call(c.init(), c.init.name));
  ATTN_TRY(made->call(c.device(pci.c_str(), &made->device_), c.device.name));
  char version[96] = "";
  ATTN_TRY(made->call(c.driver_version(version, sizeof version), c.driver_version.name));
  made->driver_ = version;
  ClockSample sample;
  ATTN_TRY(made->read(&sample));
  *clocks = std::move(made);
  return {};
}

attn::Status Clocks::read(ClockSample* sample) const {
  const NvmlCalls& c = *calls_;
  FieldValue power{};
  power.field = field_power_instant;
  ATTN_TRY(call(c.clock(device_, clock_sm, &sample->sm_mhz), c.clock.name));
  ATTN_TRY(call(c.clock(device_, clock_memory, &sample->memory_mhz), c.clock.name));
  ATTN_TRY(call(c.temperature(device_, temperature_gpu, &sample->celsius), c.temperature.name));
  ATTN_TRY(call(c.throttle(device_, &sample->throttle), c.throttle.name));
  ATTN_TRY(call(c.fields(device_, 1, &power), c.fields.name));
  ATTN_TRY(call(power.status, "power"));
  sample->watts = power.u32 / 1e3;
  return {};
}

ClockWatch::ClockWatch(const Clocks* clocks) {
  if (!clocks) return;
  thread_ = std::thread([this, clocks] {
    std::unique_lock lock(mutex_);
    do {
      ClockSample sample;
      if (clocks->read(&sample).ok()) samples_.push_back(sample);
    } while (!stopped_.wait_for(lock, std::chrono::milliseconds(10), [this] { return stop_; }));
  });
}

ClockWatch::~ClockWatch() {
  join();
}

void ClockWatch::join() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Json ClockWatch::stop() {
  join();
  if (samples_.empty()) return {};
  double mhz = 0, watts = 0;
  unsigned lowest = samples_[0].sm_mhz, highest = 0;
  for (const ClockSample& s : samples_) {
    mhz += s.sm_mhz;
    watts += s.watts;
    lowest = std::min(lowest, s.sm_mhz);
    highest = std::max(highest, s.sm_mhz);
  }
  const auto count = static_cast<double>(samples_.size());
  return {{"sm_mhz", mhz / count},
          {"sm_mhz_min", lowest},
          {"sm_mhz_max", highest},
          {"watts", watts / count},
          {"samples", samples_.size()}};
}

Json to_json(const ClockSample& sample) {
  return {{"sm_mhz", sample.sm_mhz},
          {"memory_mhz", sample.memory_mhz},
          {"watts", sample.watts},
          {"celsius", sample.celsius},
          {"throttle_reasons", sample.throttle}};
}

}  // namespace attn::tools
