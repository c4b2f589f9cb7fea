// What a driver has for those who measure: events, streams, graphs. A driver may lack some of it;
// those calls fail with UNSUPPORTED.
#pragma once
#include <functional>

#include "core/status.h"

namespace attn {

using Event = struct EventHandle*;
using Graph = struct GraphHandle*;

class Timing {
 public:
  virtual ~Timing() = default;
  virtual Status event_create(Event* event) = 0;
  virtual void event_destroy(Event event) = 0;
  virtual Status event_record(Event event, void* stream) = 0;
  virtual Status event_elapsed(Event start, Event stop, float* milliseconds) = 0;

  // A stream that does not wait for the default one.
  virtual Status stream_create(void** stream) = 0;
  virtual void stream_destroy(void* stream) = 0;
  // What `work` launches on `stream`, a stream that stream_create made, as a graph; nothing runs.
  virtual Status capture(void* stream, const std::function<Status()>& work, Graph* graph) = 0;
  virtual Status graph_launch(Graph graph, void* stream) = 0;
  virtual void graph_destroy(Graph graph) = 0;

  // Does `work` with the device current, for vendors' libraries that look for it there.
  virtual Status with_device(const std::function<Status()>& work) = 0;
};

}  // namespace attn
