// The kernel table: what each kernel can do, where its bytes are, how it is launched.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"
#include "driver/driver.h"
#include "problem/problem.h"

namespace attn {

enum class Op { forward, merge, quantize, kv_append, block_mask };
const char* op_name(Op op);

constexpr uint32_t type_bit(attn_dtype type) {
  return 1u << type;
}

// What a forward kernel takes beyond attn_flag.
enum Feature : uint32_t {
  feature_softcap = 1 << 0,
  feature_bias = 1 << 1,
  feature_packed_q = 1 << 2,
  feature_packed_kv = 1 << 3,
  feature_paged_kv = 1 << 4,
  feature_seqlens = 1 << 5,
  feature_segments = 1 << 6,        // more than one
  feature_mixed_kv_types = 1 << 7,  // k and v, or segments, of different types
  feature_descale_tensor = 1 << 8,
  feature_descale_head = 1 << 9,
  feature_descale_block = 1 << 10,
  feature_any_block_size = 1 << 11,  // block masks beyond 64 and 128
  feature_any_stride = 1 << 12,      // else bases and outer strides are multiples of 16 bytes
  feature_fixed_split = 1 << 13,
  feature_negative_strides = 1 << 14,
  feature_all = (1 << 15) - 1,
};

// What a kernel takes. Kernels of ops other than forward use the types, head_dim and
// feature_negative_strides only.
struct Limits {
  uint32_t q_types = 0, kv_types = 0, out_types = 0;  // type_bit
  int64_t head_dim_multiple = 1, head_dim_max = INT64_MAX;
  int64_t head_dim_v_multiple = 1, head_dim_v_max = INT64_MAX;
  uint32_t flags = 0;     // attn_flag
  uint32_t demands = 0;   // of flags, those that a problem must have
  uint32_t features = 0;  // Feature
};

struct HostKernel;    // cpu/host_kernel.h
struct DeviceKernel;  // plan/device_kernel.h

// One row. Rows of one op and backend stand in order of preference.
struct Kernel {
  const char* name;  // symbol, file name, name in logs and tests
  Op op;
  attn_backend backend;
  Limits limits;
  const HostKernel* host = nullptr;      // reference and cpu; nullptr if this build leaves it out
  const DeviceKernel* device = nullptr;  // cuda and hip
};

std::span<const Kernel> catalog();
const Kernel* find_kernel(const char* name);  // nullptr if there is none

// Launches of a kernel so far; counted where the launch has succeeded.
void count_launch(const Kernel& kernel);
uint64_t launch_count(const Kernel& kernel);

// Device code that the build embedded: file kernels/**/NAME.cu or asm/**/NAME.s for one
// architecture.
struct Image {
  const char* name;
  const char* arch;  // "sm_80", "sm_90a", "compute_80" (PTX), "gfx942"
  const unsigned char* begin;
  const unsigned char* end;
  std::span<const unsigned char> bytes() const { return {begin, end}; }
};
std::span<const Image> images();

// The image of `name` that runs on `arch`, or an error that says which architectures exist.
Status find_image(const char* name, const std::string& arch, const Image** image);
// Whether code for `image_arch` runs on a device of `device_arch`: same major and minor not above
// for sm_XX, equal for sm_XXa and gfx, major.minor not above for compute_XX.
bool arch_runs_on(const std::string& image_arch, const std::string& device_arch);

// Why the kernel does not take the problem; "" if it does. The architecture is checked separately.
std::string decline(const Kernel& kernel, const Problem& problem);

}  // namespace attn
