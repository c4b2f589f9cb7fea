// The kernels of tests/gfx9/kernels, compiled for the host.
#pragma once
#include <span>

struct HostKernel {
  const char* name;
  void (*run)(void* out, const void* in, int n);
};
// Empty where no compiler for gfx942 was found. The source is generated.
std::span<const HostKernel> host_kernels();
