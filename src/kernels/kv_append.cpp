// The kernels kv_append_*.
#include "cpu/kernels.h"
#include "kernels/families.h"
#include "kernels/limits.h"

namespace attn {
namespace {

constexpr Limits host_limits = {.in_types = float_types,
                                .kv_types = float_types | fp8_types | ggml_types,
                                .out_types = float_types,
                                .features = feature_all};

constinit const Kernel rows[] = {
    {.name = "kv_append_reference",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = host_limits,
     .host = &kv_append_reference_kernel},
    {.name = "kv_append_cpu",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_CPU,
     .limits = host_limits,
     .host = &kv_append_cpu_kernel},
};

}  // namespace

std::span<const Kernel> kv_append_rows() {
  return rows;
}

}  // namespace attn
