// How long something takes: on the host by its clock, on a device by events around many launches.
#pragma once

#include <functional>

#include "attn/common.h"
#include "driver/driver.h"
#include "driver/timing.h"

namespace attn::tools {

struct Timing {
  double median_us = 0, min_us = 0;  // of one run
  int repeats = 0;                   // timings of which these are the median and the smallest
  int graph = 0;  // launches in the graph that was replayed; 0: launched one by one
};

// Throws attn::error with the status' sentence.
void need_ok(const attn::Status& status);

// `run` returns when its work is done or `finish` waits for it.
Timing time_on_host(const std::function<void()>& run, const std::function<void()>& finish,
                    int repeats);

// Runs work on a stream of its own between two events.
class DeviceTimer {
 public:
  explicit DeviceTimer(Driver& driver);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;

  // launch(set, stream), with sets 0 ... sets-1 in turn. What takes less than 200 us is replayed as
  // a graph, so that not the launches are timed; where the driver knows no graphs, they are.
  using LaunchSet = std::function<attn::Status(int set, void* stream)>;
  Timing time(const LaunchSet& launch, int sets, int repeats);

 private:
  double milliseconds(const std::function<attn::Status()>& work);

  Driver& driver_;
  void* stream_ = nullptr;
  Event start_ = nullptr, stop_ = nullptr;
};

}  // namespace attn::tools
