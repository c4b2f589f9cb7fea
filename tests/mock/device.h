// What the two stand-ins have in common: memory, modules, launches, events.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "mock.h"

namespace attn::mock {

#define MOCK_API extern "C" __attribute__((visibility("default")))

inline State state;
MOCK_API State* attn_mock_state() {
  return &state;
}
// For callers that cannot read a State.
MOCK_API int attn_mock_live_memory() {
  return state.live_memory;
}

constexpr int success = 0, invalid_value = 1, out_of_memory = 2, invalid_handle = 400,
              not_found = 500, capture_unsupported = 900;

// While a stream is being captured a thread may not make memory and modules, unless it says that it
// does not care.
constexpr int relaxed = 2;
inline thread_local int capture_mode = 0;
inline void* captured_stream = nullptr;
#define MOCK_NO_CAPTURE()                                                                   \
  if (::attn::mock::captured_stream && ::attn::mock::capture_mode != ::attn::mock::relaxed) \
  return ::attn::mock::capture_unsupported
inline int exchange_mode(int* mode) {
  std::swap(*mode, capture_mode);
  return success;
}

// The scripted failure of a function, else 0.
inline int scripted(const char* function) {
  return std::strcmp(state.failing, function) == 0 ? state.code : success;
}
#define MOCK_SCRIPTED() \
  if (const int code = ::attn::mock::scripted(__func__)) return code

// What is current: a context (cuda), a device (hip). Modules, functions, streams and events belong
// to where they were made and are refused elsewhere, as by the real drivers. Each stand-in defines
// it.
intptr_t current_place();
MOCK_API long attn_mock_place() {
  return long(current_place());
}
inline std::map<const void*, intptr_t> places;
inline void made_here(const void* handle) {
  places[handle] = current_place();
}
inline bool foreign(const void* handle) {
  const auto found = places.find(handle);
  return found != places.end() && found->second != current_place();
}
#define MOCK_OURS(handle) \
  if (::attn::mock::foreign(handle)) return ::attn::mock::invalid_handle

inline std::set<void*> memory;

inline int allocate(void** out, size_t bytes) {
  MOCK_NO_CAPTURE();
  if (bytes == 0) return invalid_value;
  if (bytes > size_t{1} << 40) return out_of_memory;
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!*out) return out_of_memory;
  memory.insert(*out);
  state.allocated_in = long(current_place());
  ++state.live_memory;
  return success;
}
inline int release(void* p) {
  MOCK_NO_CAPTURE();
  if (memory.erase(p) == 0) return invalid_value;
  std::free(p);
  --state.live_memory;
  return success;
}

// As an application would, which does not know what a library does.
MOCK_API int attn_mock_try_alloc() {
  void* made = nullptr;
  const int code = allocate(&made, 16);
  return code == success ? release(made) : code;
}

// A module is a string, empty; a function is its name and its place.
inline int load_module(void** out, const void* image) {
  MOCK_NO_CAPTURE();
  if (!image) return invalid_value;
  *out = new std::string;
  made_here(*out);
  ++state.live_modules;
  return success;
}
inline int unload_module(void* module) {
  MOCK_OURS(module);
  places.erase(module);
  delete static_cast<std::string*>(module);
  --state.live_modules;
  return success;
}
using Function = std::pair<std::string, intptr_t>;
inline std::set<Function> functions;
inline int find_function(void** out, const void* module, const char* name) {
  MOCK_NO_CAPTURE();
  MOCK_OURS(module);
  *out = const_cast<Function*>(&*functions.insert({name, current_place()}).first);
  made_here(*out);
  return success;
}
inline const std::string& function_name(void* function) {
  return static_cast<Function*>(function)->first;
}

// A graph is the work that was submitted during its capture.
using Work = std::function<void()>;
using Graph = std::vector<Work>;
inline Graph capture;
inline int ticks = 0;  // pieces of work done so far

// Allocates for a capture only, so that tests may count what a run allocates.
template <class W>
int submit(void* stream, const W& work) {
  MOCK_OURS(stream);
  const auto counted = [work] {
    work();
    ++ticks;
  };
  if (stream && stream == captured_stream)
    capture.push_back(counted);
  else
    counted();
  return success;
}

// Takes no time.
inline int fill(void* to, unsigned char value, size_t bytes, void* stream) {
  MOCK_OURS(stream);
  const auto work = [=] { std::memset(to, value, bytes); };
  if (stream && stream == captured_stream)
    capture.push_back(work);
  else
    work();
  return success;
}
inline int copy(void* to, const void* from, size_t bytes, void* stream) {
  return submit(stream, [=] { std::memcpy(to, from, bytes); });
}

// Takes the kernel's parameters as a buffer; where there are tensor maps, as pointers too.
inline int launch(void* function, const unsigned (&dims)[6], unsigned shared_bytes, void* stream,
                  void** parameters, void** extra, void* end) {
  MOCK_OURS(function);
#ifdef MOCK_TENSOR_MAPS
  const bool pointers = parameters && !extra;
#else
  const bool pointers = false;
#endif
  if (!pointers && (parameters || !extra)) return invalid_value;
  const void* buffer = pointers ? parameters[0] : nullptr;
  size_t bytes = pointers ? state.pointed_bytes : 0;
  for (; !pointers && *extra != end; extra += 2) {
    if (*extra == reinterpret_cast<void*>(1))
      buffer = extra[1];
    else if (*extra == reinterpret_cast<void*>(2))
      bytes = *static_cast<size_t*>(extra[1]);
    else
      return invalid_value;
  }
  Launch l{};
  if (!buffer || bytes > sizeof l.kernarg) return invalid_value;
  set_text(l.symbol, function_name(function).c_str());
  for (int i = 0; i < 3; ++i) {
    if (dims[i] == 0 || dims[3 + i] == 0) return invalid_value;
    l.grid[i] = dims[i];
    l.block[i] = dims[3 + i];
  }
  l.shared_bytes = shared_bytes;
  l.stream = stream;
  l.kernarg_bytes = bytes;
  std::memcpy(l.kernarg, buffer, bytes);
  return submit(stream, [l, place = current_place()] {
    state.last = l;
    ++state.launches;
    state.launched_in = long(place);
    if (state.kernel) state.kernel(l);
  });
}

// A stream is a byte of its own.
inline int create_stream(void** out, unsigned flags) {
  if (flags != 1) return invalid_value;  // non-blocking
  *out = new char;
  made_here(*out);
  ++state.live_streams;
  return success;
}
inline int destroy_stream(void* stream) {
  places.erase(stream);
  delete static_cast<char*>(stream);
  --state.live_streams;
  return success;
}
inline int begin_capture(void* stream, int mode) {
  MOCK_OURS(stream);
  if (!stream || captured_stream || mode == relaxed) return invalid_value;
  captured_stream = stream;
  capture.clear();
  return success;
}
inline int end_capture(void* stream, void** graph) {
  if (stream != captured_stream) return invalid_value;
  captured_stream = nullptr;
  *graph = new Graph(capture);
  ++state.live_graphs;
  return success;
}
inline int instantiate(void** executable, void* graph) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  ++state.live_graphs;
  return success;
}
inline int launch_graph(void* executable, void* stream) {
  MOCK_OURS(stream);
  for (const Work& work : *static_cast<Graph*>(executable)) work();
  return success;
}
inline int destroy_graph(void* graph) {
  delete static_cast<Graph*>(graph);
  --state.live_graphs;
  return success;
}

// An event holds the ticks in front of it. One takes a millisecond, or what MOCK_TICK_MS says.
inline int create_event(void** out) {
  *out = new int(-1);
  made_here(*out);
  ++state.live_events;
  return success;
}
inline int destroy_event(void* event) {
  places.erase(event);
  delete static_cast<int*>(event);
  --state.live_events;
  return success;
}
inline int record_event(void* event, void* stream) {
  MOCK_OURS(event);
  MOCK_OURS(stream);
  *static_cast<int*>(event) = ticks;
  return success;
}
inline int elapsed(float* milliseconds, void* start, void* stop) {
  const char* tick = std::getenv("MOCK_TICK_MS");
  *milliseconds =
      float((tick ? std::atof(tick) : 1) * (*static_cast<int*>(stop) - *static_cast<int*>(start)));
  return success;
}

}  // namespace attn::mock
