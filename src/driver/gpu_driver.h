// What the CUDA and HIP drivers have in common, which is all but names, contexts and error texts.
#pragma once
#include <iosfwd>
#include <type_traits>

#include "driver/driver.h"
#include "driver/library.h"
#include "driver/timing.h"

namespace attn {

// Handles and device pointers of both APIs are passed as void*. CUdeviceptr is an unsigned long
// long, which every 64-bit ABI that the drivers exist for passes like a pointer.
struct GpuCalls {
  Call<unsigned> init;
  Call<int*> driver_version;
  Call<int*> device_count;
  Call<int*, int> device_get;  // (device, ordinal)
  Call<void**, size_t> alloc;
  Call<void*> free;
  Call<void*, const void*, size_t, void*> copy_in;  // (dst, src, bytes, stream)
  Call<void*, const void*, size_t, void*> copy_out;
  Call<void*, unsigned char, size_t, void*> fill;
  Call<void*> synchronize;
  Call<void**, const void*> module_load;
  Call<void**, const char*> module_load_file;
  Call<void*> module_unload;
  Call<void**, void*, const char*> module_function;
  // (function, grid x y z, block x y z, shared bytes, stream, parameters, extra)
  Call<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
       void**>
      launch;
  Call<void**, unsigned> event_create;
  Call<void*> event_destroy;
  Call<void*, void*> event_record;
  Call<void*> event_synchronize;
  Call<float*, void*, void*> event_elapsed;  // (milliseconds, start, stop)

  // A driver may lack these: nothing but timing and captures needs them.
  Call<int*> exchange_capture_mode;  // of the calling thread
  Call<void*, const void*, size_t, void*> copy;
  Call<void**, unsigned> stream_create;
  Call<void*> stream_destroy;
  Call<void*, int> capture_begin;
  Call<void*, void**> capture_end;
  Call<void**, void*, void**, char*, size_t> graph_instantiate;  // last three: an error's details
  Call<void*> graph_destroy;
  Call<void*, void*> graph_launch;
  Call<void*> graph_exec_destroy;

  // "CUDA_ERROR_OUT_OF_MEMORY (2)", followed by the vendor's sentence if there is one.
  virtual std::string error(int code) const = 0;
  virtual ~GpuCalls() = default;

  // Calls, and on failure says "cuMemAlloc(123456 bytes): CUDA_ERROR_OUT_OF_MEMORY (2): out of
  // memory"; `what` is the text in the brackets, put together only then.
  template <class What, class... Parameters>
  Status run(const Call<Parameters...>& call, const What& what,
             std::type_identity_t<Parameters>... arguments) const {
    if (!call.pointer) return {ATTN_UNSUPPORTED, join(call.name, ": the driver does not have it")};
    const int code = call(arguments...);
    return code == 0 ? Status{} : failure(call.name, join(what), code);
  }
  Status failure(const char* function, const std::string& what, int code) const;
  // Checks that there is a device `ordinal` and gets the vendor's handle of it.
  Status device_handle(const char* vendor, int ordinal, int* handle) const;
};

// For errors.
std::ostream& operator<<(std::ostream& out, const Launch& launch);
std::ostream& operator<<(std::ostream& out, const TensorMap& map);

class GpuDriver : public Driver, public Timing {
 public:
  const DeviceInfo& device() const override { return device_; }
  Status alloc(size_t bytes, void** memory) override;
  Status free(void* memory) override;
  Status copy_in(void* dst, const void* host_src, size_t bytes, void* stream) override;
  Status copy_out(void* host_dst, const void* src, size_t bytes, void* stream) override;
  Status copy(void* dst, const void* src, size_t bytes, void* stream) override;
  Status fill(void* dst, uint8_t value, size_t bytes, void* stream) override;
  Status synchronize(void* stream) override;
  Status load(std::span<const unsigned char> image, Module* module) override;
  Status load_file(const char* path, Module* module) override;
  void unload(Module module) override;
  Status function(Module module, const char* symbol, uint32_t shared_bytes,
                  Function* function) override;
  Status encode(const TensorMap& map, void* encoded) override;
  Status launch(const Launch& launch, void* stream) override;
  Timing& timing() override { return *this; }

  // gpu_timing.cpp
  Status event_create(Event* event) override;
  void event_destroy(Event event) override;
  Status event_record(Event event, void* stream) override;
  Status event_elapsed(Event start, Event stop, float* milliseconds) override;
  Status stream_create(void** stream) override;
  void stream_destroy(void* stream) override;
  Status capture(void* stream, const std::function<Status()>& work, Graph* graph) override;
  Status graph_launch(Graph graph, void* stream) override;
  void graph_destroy(Graph graph) override;
  Status with_device(const std::function<Status()>& work) override;

 protected:
  GpuDriver(const GpuCalls& calls, DeviceInfo device, void* launch_end)
      : calls_(calls), device_(std::move(device)), launch_end_(launch_end) {}

  // Makes the device current for the calling thread; *previous says what leave() has to restore.
  virtual Status enter(void** previous) = 0;
  virtual void leave(void* previous) = 0;
  virtual Status allow_shared(Function function, uint32_t bytes) = 0;
  virtual Status encode_map(const TensorMap&, void*) { return no_maps(); }
  virtual Status set_address(void*, const void*) { return no_maps(); }
  template <class Body>
  Status inside(Body body) {
    void* previous = nullptr;
    ATTN_TRY(enter(&previous));
    Status status = body();
    leave(previous);
    return status;
  }
  // The last step of a launch; parameters and extra are the driver call's.
  virtual Status start(const Launch& l, void* stream, void** parameters, void** extra);

 private:
  static Status no_maps() { return unsupported("tensor maps: not on this driver"); }
  // inside(), for memory and modules, which belong to no stream: they are made while one is being
  // captured, too, where the driver would refuse that.
  template <class Body>
  Status beside_captures(Body body) {
    return inside([&]() -> Status {
      if (!calls_.exchange_capture_mode.pointer) return body();
      int mode = stream_capture_mode_relaxed;
      ATTN_TRY(calls_.run(calls_.exchange_capture_mode, "", &mode));
      Status status = body();
      (void)calls_.run(calls_.exchange_capture_mode, "", &mode);
      return status;
    });
  }
  static constexpr int stream_capture_mode_relaxed = 2;  // of both APIs

  const GpuCalls& calls_;
  const DeviceInfo device_;
  void* const launch_end_;  // CU_LAUNCH_PARAM_END and HIP_LAUNCH_PARAM_END differ
};

}  // namespace attn
