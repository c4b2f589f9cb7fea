// All backends in one process: the host's, and those of GPUs on stand-ins for their drivers.
#pragma once
#include <functional>
#include <utility>

#include "attn/attn.hpp"
#include "catch.h"
#include "mock_library.h"

namespace attn::test {

// On the stand-in for a driver, as if all kernels were in the build.
inline context device_on(const mock::MockLibrary& library,
                         attn_backend backend = ATTN_BACKEND_CUDA) {
  auto options = make<attn_context_options>();
  options.driver_path = library.path();
  options.kernel_file = "all kernels";
  return context(backend, &options);
}

// Calls body for the host backends and for the stand-ins of the others, which compute nothing.
// `library` is null for the host.
inline void on_every_backend(
    const std::function<void(attn_context*, const mock::MockLibrary* library)>& body) {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    INFO(attn_backend_string(backend));
    const context host(backend);
    body(host.get(), nullptr);
  }
  for (const auto& [backend, name] :
       {std::pair(ATTN_BACKEND_CUDA, "cuda_12"), std::pair(ATTN_BACKEND_HIP, "hip")}) {
    INFO(attn_backend_string(backend));
    const mock::MockLibrary library(name);
    const context device = device_on(library, backend);
    body(device.get(), &library);
  }
}

struct Plan {
  attn_plan* plan = nullptr;
  ~Plan() { attn_plan_destroy(plan); }
};

}  // namespace attn::test
