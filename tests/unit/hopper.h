// An H200 as plans see it.
#pragma once
#include <string>

#include "plan/choose.h"

namespace attn::test {

constexpr int hopper_multiprocessors = 132;
inline DeviceInfo hopper() {
  DeviceInfo device;
  device.arch = "sm_90";
  device.multiprocessors = hopper_multiprocessors;
  device.shared_bytes_max = 227 << 10;
  device.tensor_maps = true;
  return device;
}

// The kernel that the plan gives p to on it, as if each image were there, or why none.
inline std::string chosen(const AnyProblem& p) {
  struct All : CodeFile {
    std::string without(const char*) const override { return ""; }
  } const all;
  const DeviceInfo device = hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &all};
  Choice choice;
  const Status status = choose(p, machine, &choice);
  return status.ok() ? std::string(choice.kernel->name) : status.text;
}

}  // namespace attn::test
