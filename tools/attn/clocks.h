// Clocks, power and temperature of an NVIDIA device, from its management library. That one is a
// tool's business: attention does not depend on it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attn/common.h"
#include "core/status.h"

namespace attn::tools {

struct ClockSample {
  unsigned sm_mhz = 0, memory_mhz = 0, celsius = 0;
  double watts = 0;                 // at this moment
  unsigned long long throttle = 0;  // bits of nvmlClocksEventReasons; 4: software power cap
};

struct NvmlCalls;

class Clocks {
 public:
  // UNSUPPORTED, with the reason, where libnvidia-ml.so.1 is absent or does not know the device.
  static attn::Status open(const std::string& pci, std::unique_ptr<Clocks>* clocks);

  attn::Status read(ClockSample* sample) const;
  const std::string& driver() const { return driver_; }  // "580.65.06"

 private:
  Clocks() = default;
  attn::Status call(int code, const char* function) const;

  std::shared_ptr<NvmlCalls> calls_;
  void* device_ = nullptr;
  std::string driver_;
};

// Samples every 10 ms from construction to stop(). `clocks` may be null: no samples.
class ClockWatch {
 public:
  explicit ClockWatch(const Clocks* clocks);
  ~ClockWatch();
  ClockWatch(const ClockWatch&) = delete;
  Json stop();  // mean, lowest and highest SM clock, mean power; null without samples

 private:
  void join();

  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::vector<ClockSample> samples_;
  std::thread thread_;
};

Json to_json(const ClockSample& sample);

}  // namespace attn::tools
