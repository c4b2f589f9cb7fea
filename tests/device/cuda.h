// What an application around libattn calls of the CUDA driver.
#pragma once
#include <algorithm>
#include <functional>
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
  int (*stream_query)(void* stream);
  int (*copy)(unsigned long long to, unsigned long long from, size_t bytes, void* stream);
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
constexpr int not_ready = 600;  // of stream_query: there is work left

// Only after a backend has been opened on the device.
const Cuda& cuda();

// A stream of the device's primary context, which is current as long as the object lives.
class Stream {
 public:
  Stream() {
    REQUIRE(cuda().primary_retain(&context_, 0) == 0);
    REQUIRE(cuda().ctx_set_current(context_) == 0);
    REQUIRE(cuda().stream_create(&stream_, stream_non_blocking) == 0);
  }
  ~Stream() {
    cuda().stream_destroy(stream_);
    cuda().ctx_set_current(nullptr);
    cuda().primary_release(0);
  }
  Stream(const Stream&) = delete;
  void* get() const { return stream_; }

 private:
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

// Of -2 to 2.
Buffer random_values(attn_dtype type, int64_t count, uint64_t seed);

// What `launch` launches on the stream, as a graph; it returns false if something has failed.
class Captured {
 public:
  Captured(const Stream& stream, const std::function<bool()>& launch) : stream_(stream) {
    REQUIRE(cuda().stream_begin_capture(stream.get(), capture_global) == 0);
    const bool launched = launch();
    REQUIRE(cuda().stream_end_capture(stream.get(), &graph_) == 0);
    REQUIRE(launched);
    REQUIRE(cuda().graph_instantiate(&exec_, graph_, 0) == 0);
  }
  ~Captured() {
    cuda().graph_exec_destroy(exec_);
    cuda().graph_destroy(graph_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  void start() const { REQUIRE(cuda().graph_launch(exec_, stream_.get()) == 0); }
  void replay() const {
    start();
    REQUIRE(cuda().stream_synchronize(stream_.get()) == 0);
  }

 private:
  const Stream& stream_;
  void *graph_ = nullptr, *exec_ = nullptr;
};

template <class T>
Buffer bytes_of(const std::vector<T>& values) {
  Buffer buffer(values.size() * sizeof(T), 0xff);
  std::copy(values.begin(), values.end(), buffer.as<T>());
  return buffer;
}

// The forward kernels of the cuda backend that are here and take a 16-bit q. They may decline some
// problems, but each test finds one that runs. Empty without a device: skip then, with
// backend_of(ATTN_BACKEND_CUDA).reason.
std::vector<const Kernel*> cuda_forward_kernels();

// A problem in the kernel's type and largest head dimension, up to 128.
Case case_for(const Kernel& kernel, const std::string& name, int64_t batch, int64_t seqlen_q,
              int64_t seqlen_kv);

}  // namespace attn::test
