// Stand-ins for libcuda.so.1 and libamdhip64.so whose device memory is host memory. A test scripts
// them and reads what they saw through the state that each exports as attn_mock_state().
#pragma once
#include <cstddef>
#include <cstring>

namespace attn::mock {

struct Launch {
  char symbol[64];
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  size_t kernarg_bytes;
  alignas(16) unsigned char kernarg[4096];
};

// What a driver says of a function.
struct Code {
  int threads, static_shared_bytes;
  size_t parameter_bytes;
};

struct State {
  // script
  int devices;
  // One for each device; the last is that of the rest too. A process that opens the stand-in by a
  // driver's name sets them by MOCK_COMPUTE_CAPABILITY ("75,90") and MOCK_GCN_ARCH.
  int compute_capability[2];  // cuda: 90
  char gcn_arch[64];          // hip: "gfx942:sramecc+:xnack-"; several with commas between them
  char failing[64];           // this function does nothing and returns `code`
  int code;
  char hidden[64];                       // cuda: cuGetProcAddress does not know it
  void (*kernel)(const Launch&);         // what a launch does
  Code (*compiled)(const char* symbol);  // cuda: null: a driver that cannot say
  size_t pointed_bytes;  // of parameters that come as pointers, whose size nobody says
  // record
  int init_calls;
  int launches;
  Launch last;
  int live_memory, live_modules, live_events, live_contexts, live_streams, live_graphs;
  // Where the last memory was allocated and the last launch went: a context, see cuda.cpp; hip: a
  // device.
  long allocated_in, launched_in;
  int enters;                 // cuda: contexts pushed; hip: hipSetDevice
  int early;                  // cuda: launches that may start early
  char attribute_symbol[64];  // cuda: the function whose dynamic shared memory was raised
  int attribute_value;
};

inline void set_text(char (&to)[64], const char* from) {
  std::strncpy(to, from, sizeof to - 1);
}

using StateFunction = State* (*)();

}  // namespace attn::mock
