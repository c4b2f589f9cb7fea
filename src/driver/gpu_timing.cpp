// Events, streams and graphs of both drivers.
#include "driver/gpu_driver.h"

namespace attn {
namespace {

// The two APIs agree on these flags.
constexpr unsigned stream_non_blocking = 1;
constexpr int stream_capture_mode_thread_local = 1;

}  // namespace

Status GpuDriver::event_create(Event* event) {
  return inside([&]() -> Status {
    void* created = nullptr;
    ATTN_TRY(calls_.run(calls_.event_create, "", &created, 0));
    *event = static_cast<Event>(created);
    return {};
  });
}

void GpuDriver::event_destroy(Event event) {
  (void)inside([&] { return calls_.run(calls_.event_destroy, "", event); });
}

Status GpuDriver::event_record(Event event, void* stream) {
  return inside([&] { return calls_.run(calls_.event_record, "", event, stream); });
}

Status GpuDriver::event_elapsed(Event start, Event stop, float* milliseconds) {
  return inside([&]() -> Status {
    ATTN_TRY(calls_.run(calls_.event_synchronize, "", stop));
    return calls_.run(calls_.event_elapsed, "", milliseconds, start, stop);
  });
}

Status GpuDriver::stream_create(void** stream) {
  return inside([&]() -> Status {
    void* created = nullptr;
    ATTN_TRY(calls_.run(calls_.stream_create, "", &created, stream_non_blocking));
    *stream = created;
    return {};
  });
}

void GpuDriver::stream_destroy(void* stream) {
  (void)inside([&] { return calls_.run(calls_.stream_destroy, "", stream); });
}

Status GpuDriver::capture(void* stream, const std::function<Status()>& work, Graph* graph) {
  return inside([&]() -> Status {
    ATTN_TRY(calls_.run(calls_.capture_begin, "", stream, stream_capture_mode_thread_local));
    Status status = work();
    void* captured = nullptr;
    Status ended = calls_.run(calls_.capture_end, "", stream, &captured);
    if (status.ok()) status = std::move(ended);
    void* executable = nullptr;
    if (status.ok())
      status = calls_.run(calls_.graph_instantiate, "", &executable, captured, nullptr, nullptr, 0);
    if (captured) (void)calls_.run(calls_.graph_destroy, "", captured);
    if (status.ok()) *graph = static_cast<Graph>(executable);
    return status;
  });
}

Status GpuDriver::graph_launch(Graph graph, void* stream) {
  return inside([&] { return calls_.run(calls_.graph_launch, "", graph, stream); });
}

void GpuDriver::graph_destroy(Graph graph) {
  (void)inside([&] { return calls_.run(calls_.graph_exec_destroy, "", graph); });
}

Status GpuDriver::with_device(const std::function<Status()>& work) {
  return inside(work);
}

}  // namespace attn
