// The host kernels that the catalog lists.
#pragma once
#include "cpu/host_kernel.h"

namespace attn {

extern const HostKernel reference_kernel;  // forward in float64
extern const HostKernel backward_reference_kernel;
#ifdef __x86_64__
bool has_avx2();
bool has_avx512();
extern const HostKernel cpu_avx512_kernel, cpu_avx2_kernel;  // forward in float32
extern const HostKernel backward_avx512_kernel, backward_avx2_kernel;
#endif
extern const HostKernel cpu_baseline_kernel, backward_baseline_kernel;
extern const HostKernel merge_reference_kernel;      // float64
extern const HostKernel merge_cpu_kernel;            // float32
extern const HostKernel quantize_reference_kernel;   // both compute quotients in float64: the codes
extern const HostKernel quantize_cpu_kernel;         // are exact, there is only one answer
extern const HostKernel kv_append_reference_kernel;  // both compute in float64, as quantize does
extern const HostKernel kv_append_cpu_kernel;
extern const HostKernel kv_roll_reference_kernel;
extern const HostKernel kv_roll_cpu_kernel;

}  // namespace attn
