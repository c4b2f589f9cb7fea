// What the two stand-ins have in common: memory, modules, launches, events.
#pragma once
#include <cstdlib>
#include <set>
#include <string>

#include "mock.h"

namespace attn::mock {

#define MOCK_API extern "C" __attribute__((visibility("default")))

inline State state;
MOCK_API State* attn_mock_state() {
  return &state;
}

constexpr int success = 0, invalid_value = 1, out_of_memory = 2, not_found = 500;

// The scripted failure of a function, else 0.
inline int scripted(const char* function) {
  return std::strcmp(state.failing, function) == 0 ? state.code : success;
}
#define MOCK_SCRIPTED() \
  if (const int code = ::attn::mock::scripted(__func__)) return code

inline std::set<void*> memory;

inline int allocate(void** out, size_t bytes) {
  if (bytes == 0) return invalid_value;
  if (bytes > size_t{1} << 40) return out_of_memory;
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!*out) return out_of_memory;
  memory.insert(*out);
  ++state.live_memory;
  return success;
}
inline int release(void* p) {
  if (memory.erase(p) == 0) return invalid_value;
  std::free(p);
  --state.live_memory;
  return success;
}

// Both kinds of handle are strings here: the module's is empty, the function's is its name.
inline int load_module(void** out, const void* image) {
  if (!image) return invalid_value;
  *out = new std::string;
  ++state.live_modules;
  return success;
}
inline int unload_module(void* module) {
  delete static_cast<std::string*>(module);
  --state.live_modules;
  return success;
}
inline std::set<std::string> functions;
inline int find_function(void** out, const char* name) {
  *out = const_cast<std::string*>(&*functions.insert(name).first);
  return success;
}
inline const std::string& function_name(void* function) {
  return *static_cast<std::string*>(function);
}

// Takes the kernel's parameters as a buffer and in no other way.
inline int launch(void* function, const unsigned (&dims)[6], unsigned shared_bytes, void* stream,
                  void** parameters, void** extra, void* end) {
  if (parameters || !extra) return invalid_value;
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; *extra != end; extra += 2) {
    if (*extra == reinterpret_cast<void*>(1))
      buffer = extra[1];
    else if (*extra == reinterpret_cast<void*>(2))
      bytes = *static_cast<size_t*>(extra[1]);
    else
      return invalid_value;
  }
  Launch& l = state.last;
  if (!buffer || bytes > sizeof l.kernarg) return invalid_value;
  l = {};
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
  ++state.launches;
  if (state.kernel) state.kernel(l);
  return success;
}

// An event holds the number of launches in front of it; that is its time, in milliseconds.
inline int create_event(void** out) {
  *out = new int(-1);
  ++state.live_events;
  return success;
}
inline int destroy_event(void* event) {
  delete static_cast<int*>(event);
  --state.live_events;
  return success;
}
inline int record_event(void* event) {
  *static_cast<int*>(event) = state.launches;
  return success;
}
inline int elapsed(float* milliseconds, void* start, void* stop) {
  *milliseconds = float(*static_cast<int*>(stop) - *static_cast<int*>(start));
  return success;
}

}  // namespace attn::mock
