// Contexts, memory, streams.
#include <cstring>
#include <new>
#include <optional>

#include "api/error.h"
#include "api/handles.h"
#include "plan/automatic.h"
#include "problem/rules.h"

using namespace attn;

namespace {

std::optional<int> device_of(const attn_context_options& options) {
  if (!options.has_device && options.device == 0) return {};
  return options.device;
}

Status open_backend(attn_backend backend, const attn_context_options& options, Context* context) {
  switch (backend) {
    case ATTN_BACKEND_REFERENCE:
    case ATTN_BACKEND_CPU:
      if (options.device != 0)
        return invalid("options.device is ", options.device, "; accepted with ",
                       attn_backend_string(backend), ": 0");
      if (options.driver_path)
        return invalid("options.driver_path is given; accepted with ", attn_backend_string(backend),
                       ": NULL");
      context->pool = std::make_unique<ThreadPool>(
          options.cpu_threads, ThreadPool::Callers{options.run_threads, options.run_threads_user});
      break;
    case ATTN_BACKEND_CUDA:
      ATTN_TRY(open_cuda(options.driver_path, device_of(options), &context->driver));
      break;
    case ATTN_BACKEND_HIP:
    case ATTN_BACKEND_HIP_EMU:
      ATTN_TRY(open_hip(options.driver_path, backend == ATTN_BACKEND_HIP_EMU, options.device,
                        &context->driver));
      break;
    default:
      return invalid(
          "backend is ", int(backend),
          "; accepted: auto (0), reference (1), cpu (2), cuda (3), hip (4), hip-emu (5)");
  }
  context->backend = backend;
  context->interrupted = options.interrupted;
  context->interrupted_user = options.interrupted_user;
  if (!options.kernel_file) return {};
  if (context->host_memory())
    return invalid("options.kernel_file is given; accepted with ", attn_backend_string(backend),
                   ": NULL");
  return context->use_file(options.kernel_file);
}

Status create(attn_backend backend, const attn_context_options* in, Context* context) {
  attn_context_options options{};
  if (in) ATTN_TRY(copy_versioned("options", in, &options));
  ATTN_TRY(in_range("options.device", options.device, 0, 1024));
  ATTN_TRY(in_range("options.has_device", options.has_device, 0, 2));
  ATTN_TRY(in_range("options.cpu_threads", options.cpu_threads, 0, max_threads + 1));
  if (backend != ATTN_BACKEND_AUTO) return open_backend(backend, options, context);
  if (options.driver_path)
    return invalid("options.driver_path is given; accepted with backend auto: NULL");
  if (options.kernel_file)
    return invalid("options.kernel_file is given; accepted with backend auto: NULL");
  std::string devices;  // that would be accepted, "cuda 0, hip 1, "
  for (const attn_backend of : automatic_backends) {
    const Shown shown = show_devices(of);
    if (const std::optional<int> device = taken_device(shown, device_of(options))) {
      attn_context_options with = options;
      with.device = *device;
      with.has_device = 1;
      if (open_backend(of, with, context).ok()) return {};
    }
    for (const DeviceInfo& device : shown.devices)
      if (passed_by(of, device).empty())
        devices += join(attn_backend_string(of), " ", device.ordinal, ", ");
  }
  if (options.device != 0)
    return invalid("options.device is ", options.device, "; accepted with auto here: ", devices,
                   "cpu 0");
  return open_backend(ATTN_BACKEND_CPU, options, context);
}

// Host memory in the library's own alignment.
constexpr std::align_val_t host_alignment{256};

Status with_driver(attn_context* context, auto&& on_host, auto&& on_device) {
  if (!context) return invalid("context is NULL; accepted: a context");
  Context& c = *context->context;
  return c.host_memory() ? on_host() : on_device(*c.driver);
}

Status host_stream(const void* stream) {
  return stream ? invalid("stream is ", stream, "; accepted on reference and cpu: NULL") : Status{};
}

template <class Pointer>
struct Named {
  const char* name;
  Pointer address;
};

attn_status copy(attn_context* context, Named<void*> dst, Named<const void*> src, size_t bytes,
                 void* stream, Status (Driver::*driver_copy)(void*, const void*, size_t, void*)) {
  return guarded([&]() -> Status {
    if (bytes > 0 && !dst.address) return invalid(dst.name, " is NULL; accepted: an address");
    if (bytes > 0 && !src.address) return invalid(src.name, " is NULL; accepted: an address");
    return with_driver(
        context,
        [&]() -> Status {
          ATTN_TRY(host_stream(stream));
          if (bytes > 0) std::memcpy(dst.address, src.address, bytes);
          return {};
        },
        [&](Driver& driver) {
          return (driver.*driver_copy)(dst.address, src.address, bytes, stream);
        });
  });
}

}  // namespace

attn_status attn_context_create(attn_backend backend, const attn_context_options* options,
                                attn_context** context) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: where to put the context");
    auto made = std::make_unique<attn_context>();
    made->context = std::make_shared<Context>();
    ATTN_TRY(create(backend, options, made->context.get()));
    *context = made.release();
    return {};
  });
}

void attn_context_destroy(attn_context* context) {
  delete context;
}

attn_backend attn_context_backend(const attn_context* context) {
  return context ? context->context->backend : ATTN_BACKEND_AUTO;
}

int32_t attn_context_threads(const attn_context* context) {
  return context && context->context->pool ? context->context->pool->threads() : 0;
}

const char* attn_backend_string(attn_backend backend) {
  switch (backend) {
    case ATTN_BACKEND_AUTO:
      return "auto";
    case ATTN_BACKEND_REFERENCE:
      return "reference";
    case ATTN_BACKEND_CPU:
      return "cpu";
    case ATTN_BACKEND_CUDA:
      return "cuda";
    case ATTN_BACKEND_HIP:
      return "hip";
    case ATTN_BACKEND_HIP_EMU:
      return "hip-emu";
  }
  return "unknown backend";
}

attn_status attn_alloc(attn_context* context, size_t bytes, void** memory) {
  return guarded([&]() -> Status {
    if (!memory) return invalid("memory is NULL; accepted: where to put the address");
    if (bytes == 0) return invalid("bytes is 0; accepted: 1 or more");
    return with_driver(
        context,
        [&]() -> Status {
          *memory = ::operator new(bytes, host_alignment, std::nothrow);
          if (*memory) return {};
          return {ATTN_OUT_OF_MEMORY, join("bytes is ", bytes, ": host memory is exhausted")};
        },
        [&](Driver& driver) { return driver.alloc(bytes, memory); });
  });
}

attn_status attn_free(attn_context* context, void* memory) {
  return guarded([&]() -> Status {
    return with_driver(
        context,
        [&]() -> Status {
          ::operator delete(memory, host_alignment);
          return {};
        },
        [&](Driver& driver) { return memory ? driver.free(memory) : Status{}; });
  });
}

attn_status attn_copy_in(attn_context* context, void* backend_dst, const void* host_src,
                         size_t bytes, void* stream) {
  return copy(context, {"backend_dst", backend_dst}, {"host_src", host_src}, bytes, stream,
              &Driver::copy_in);
}

attn_status attn_copy_out(attn_context* context, void* host_dst, const void* backend_src,
                          size_t bytes, void* stream) {
  return copy(context, {"host_dst", host_dst}, {"backend_src", backend_src}, bytes, stream,
              &Driver::copy_out);
}

attn_status attn_synchronize(attn_context* context, void* stream) {
  return guarded([&]() -> Status {
    return with_driver(
        context, [&] { return host_stream(stream); },
        [&](Driver& driver) { return driver.synchronize(stream); });
  });
}
