// The interface of kernels that run on a device: how a problem becomes a launch, as plain functions
// in a row of the catalog. The counterpart of cpu/host_kernel.h.
#pragma once
#include <cstddef>
#include <string>

#include "driver/driver.h"
#include "problem/problem.h"

namespace attn {

constexpr int max_tensor_maps = 17;

// A kernel without a row of its own that is launched before a row's, in the same stream, and leaves
// its result in the workspace.
struct FirstKernel {
  const char* name;  // of the image and its entry point
  uint32_t kernarg_bytes;
  uint32_t static_shared_bytes = 0;
  // Plan time, for problems that the row's shape_forward takes. A grid of 0: not launched.
  void (*shape)(const Problem& problem, Launch* launch) = nullptr;
  void (*pack)(const Problem& problem, const Args& args, void* workspace, void* kernarg) = nullptr;
};

struct DeviceKernel {
  uint32_t kernarg_bytes;            // of the parameter struct; at most max_kernarg_bytes
  uint32_t static_shared_bytes = 0;  // shared memory or LDS that the kernel declares itself

  // Why a plan passes over the kernel unless the problem demands it by name, though it takes the
  // problem; "": it does not. null: never.
  std::string (*passed_over)(const Problem& problem) = nullptr;

  // Plan time: grid, block and dynamic shared memory of the launch, and the workspace it needs.
  // What the kernel cannot take beyond its Limits is an ATTN_UNSUPPORTED with the reason.
  Status (*shape_forward)(const Problem& problem, const DeviceInfo& device, Launch* launch,
                          size_t* workspace) = nullptr;
  Status (*shape_merge)(const attn_merge_problem& problem, const DeviceInfo& device,
                        Launch* launch) = nullptr;
  Status (*shape_quantize)(const attn_quantize_problem& problem, const DeviceInfo& device,
                           Launch* launch) = nullptr;

  // Run time: fills the parameter struct. Neither allocates nor locks.
  // maps_forward: where the parameter struct begins with tensor maps, what they describe; returns
  // how many there are.
  int (*maps_forward)(const Problem& problem, const Args& args,
                      TensorMap (&maps)[max_tensor_maps]) = nullptr;
  void (*pack_forward)(const Problem& problem, const Args& args, void* workspace,
                       void* kernarg) = nullptr;
  void (*pack_merge)(const attn_merge_problem& problem, const attn_merge_args& args,
                     void* kernarg) = nullptr;
  void (*pack_quantize)(const attn_quantize_problem& problem, const attn_quantize_args& args,
                        void* kernarg) = nullptr;

  const FirstKernel* first = nullptr;  // forward only
};

constexpr size_t max_kernarg_bytes = 4096;  // CUDA's limit before 12.1 drivers; HIP's is the same

extern const DeviceKernel merge_sm80_kernel;  // merge_device.cpp
extern const DeviceKernel merge_gfx942_kernel;
extern const DeviceKernel quantize_sm80_kernel;   // quantize_device.cpp
extern const DeviceKernel mask_sm80_kernel;       // mask_device.cpp
extern const DeviceKernel convert_gfx942_kernel;  // convert_gfx942.cpp

}  // namespace attn
