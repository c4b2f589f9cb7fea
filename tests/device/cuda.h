// What an application around libattn calls of the CUDA driver.
#pragma once
#include <string>
#include <vector>

#include "conformance/backend.h"

namespace attn::test {

// Functions of libcuda.so.1; all return 0 when they succeed.
struct Cuda {
  int (*ctx_create)(void** context, unsigned flags, int device);  // makes it current
  int (*ctx_destroy)(void* context);
  int (*ctx_get_current)(void** context);
  int (*ctx_set_current)(void* context);
  int (*primary_retain)(void** context, int device);
  int (*primary_release)(int device);
  int (*pointer_attribute)(void* value, int attribute, unsigned long long pointer);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_synchronize)(void* stream);
  int (*stream_begin_capture)(void* stream, int mode);
  int (*stream_end_capture)(void* stream, void** graph);
  int (*graph_instantiate)(void** exec, void* graph, unsigned long long flags);
  int (*graph_launch)(void* exec, void* stream);
  int (*graph_exec_destroy)(void* exec);
  int (*graph_destroy)(void* graph);
};
constexpr unsigned stream_non_blocking = 1;
constexpr int capture_global = 0;
constexpr int pointer_context = 1;

// Only after a backend has been opened on the device.
const Cuda& cuda();

// The forward kernels of the cuda backend that are here and take a 16-bit q. They may decline some
// problems, but each test finds one that runs. Empty without a device: skip then, with
// backend_of(ATTN_BACKEND_CUDA).reason.
std::vector<const Kernel*> cuda_forward_kernels();

// A problem in the kernel's type and largest head dimension, up to 128.
Case case_for(const Kernel& kernel, const std::string& name, int64_t batch, int64_t seqlen_q,
              int64_t seqlen_kv);

}  // namespace attn::test
