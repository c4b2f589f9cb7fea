#include "attn/timing.h"

#include <algorithm>
#include <cmath>

namespace attn::tools {
namespace {

constexpr double host_seconds_per_case = 3;
constexpr double graph_below_us = 200;
constexpr int graph_launches = 50;
constexpr double device_ms = 5;   // work between two events
constexpr double settle_ms = 50;  // work before the first timing, for the clocks

Timing timing_of(std::vector<double> microseconds, int graph) {
  Timing timing;
  timing.min_us = *std::min_element(microseconds.begin(), microseconds.end());
  timing.repeats = static_cast<int>(microseconds.size());
  timing.median_us = median(std::move(microseconds));
  timing.graph = graph;
  return timing;
}

}  // namespace

void need_ok(const attn::Status& status) {
  if (!status.ok()) throw attn::error(status.code, status.text.c_str());
}

Timing time_on_host(const std::function<void()>& run, const std::function<void()>& finish,
                    int repeats) {
  const auto once = [&](int runs) {
    const double start = seconds_now();
    for (int i = 0; i < runs; ++i) run();
    finish();
    return (seconds_now() - start) / runs;
  };
  once(1);
  // Enough runs between two looks at the clock that reading it and waiting do not count.
  const int runs = static_cast<int>(std::clamp(2e-3 / std::max(once(1), 1e-9), 1.0, 1000.0));
  std::vector<double> microseconds;
  const double start = seconds_now();
  while (static_cast<int>(microseconds.size()) < repeats &&
         (microseconds.size() < 3 || seconds_now() - start < host_seconds_per_case))
    microseconds.push_back(once(runs) * 1e6);
  return timing_of(std::move(microseconds), 0);
}

DeviceTimer::DeviceTimer(Driver& driver) : driver_(driver) {
  // A driver without streams has the default one.
  if (const attn::Status made = driver.timing().stream_create(&stream_);
      made.code != ATTN_UNSUPPORTED)
    need_ok(made);
  need_ok(driver.timing().event_create(&start_));
  need_ok(driver.timing().event_create(&stop_));
}

DeviceTimer::~DeviceTimer() {
  if (start_) driver_.timing().event_destroy(start_);
  if (stop_) driver_.timing().event_destroy(stop_);
  if (stream_) driver_.timing().stream_destroy(stream_);
}

double DeviceTimer::milliseconds(const std::function<attn::Status()>& work) {
  float elapsed = 0;
  need_ok(driver_.timing().event_record(start_, stream_));
  need_ok(work());
  need_ok(driver_.timing().event_record(stop_, stream_));
  need_ok(driver_.timing().event_elapsed(start_, stop_, &elapsed));
  return elapsed;
}

Timing DeviceTimer::time(const LaunchSet& launch, int sets, int repeats) {
  const auto one_by_one = [&](int launches) -> attn::Status {
    for (int i = 0; i < launches; ++i) ATTN_TRY(launch(i % sets, stream_));
    return {};
  };
  milliseconds([&] { return one_by_one(sets); });
  double once_ms = milliseconds([&] { return one_by_one(sets); }) / sets;

  const auto free_graph = [this](Graph g) { driver_.timing().graph_destroy(g); };
  std::unique_ptr<GraphHandle, decltype(free_graph)> graph(nullptr, free_graph);
  int launches = sets;
  if (once_ms * 1e3 < graph_below_us) {
    launches = (graph_launches + sets - 1) / sets * sets;
    Graph captured = nullptr;
    const attn::Status made =
        driver_.timing().capture(stream_, [&] { return one_by_one(launches); }, &captured);
    if (made.code != ATTN_UNSUPPORTED) need_ok(made);
    graph.reset(captured);
  }
  const std::function<attn::Status()> play = [&] {
    return graph ? driver_.timing().graph_launch(graph.get(), stream_) : one_by_one(launches);
  };
  milliseconds(play);
  once_ms = milliseconds(play) / launches;

  const auto plays_in = [&](double ms) {
    return static_cast<int>(std::clamp(ms / std::max(once_ms * launches, 1e-6), 1.0, 1e4));
  };
  const auto played = [&](int plays) {
    return [&play, plays]() -> attn::Status {
      for (int i = 0; i < plays; ++i) ATTN_TRY(play());
      return {};
    };
  };
  milliseconds(played(plays_in(settle_ms)));
  const int plays = plays_in(device_ms);
  std::vector<double> microseconds;
  for (int i = 0; i < repeats; ++i)
    microseconds.push_back(milliseconds(played(plays)) * 1e3 / plays / launches);
  return timing_of(std::move(microseconds), graph ? launches : 0);
}

}  // namespace attn::tools
