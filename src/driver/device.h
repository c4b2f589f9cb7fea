// What is known of a device: enough to choose kernels by.
#pragma once
#include <cstdint>
#include <string>

namespace attn {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;  // as the driver says
  std::string arch;  // "sm_90", "gfx942" (feature suffixes such as :sramecc+ removed)
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t shared_bytes_max = 0;  // shared memory or LDS that one block can have
  int64_t l2_bytes = 0;          // cuda only
  std::string pci;               // "0000:1b:00.0"; cuda only
  bool tensor_maps = false;  // launches can have maps: sm_90 and newer, with a driver for CUDA 12
  std::string driver_version;
};

}  // namespace attn
