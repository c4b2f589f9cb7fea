#include "cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "core/dtype.h"

namespace attn::test {
namespace {

Cuda load() {
  Cuda c{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
  };
  find(c.ctx_create, "cuCtxCreate_v2");
  find(c.ctx_destroy, "cuCtxDestroy_v2");
  find(c.ctx_get_current, "cuCtxGetCurrent");
  find(c.ctx_set_current, "cuCtxSetCurrent");
  find(c.primary_retain, "cuDevicePrimaryCtxRetain");
  find(c.primary_release, "cuDevicePrimaryCtxRelease_v2");
  find(c.pointer_attribute, "cuPointerGetAttribute");
  find(c.stream_create, "cuStreamCreate");
  find(c.stream_destroy, "cuStreamDestroy_v2");
  find(c.stream_synchronize, "cuStreamSynchronize");
  find(c.stream_query, "cuStreamQuery");
  find(c.copy, "cuMemcpyDtoDAsync_v2");
  find(c.stream_begin_capture, "cuStreamBeginCapture_v2");
  find(c.stream_end_capture, "cuStreamEndCapture");
  find(c.graph_instantiate, "cuGraphInstantiateWithFlags");
  find(c.graph_launch, "cuGraphLaunch");
  find(c.graph_exec_destroy, "cuGraphExecDestroy");
  find(c.graph_destroy, "cuGraphDestroy");
  return c;
}

}  // namespace

const Cuda& cuda() {
  static const Cuda calls = load();
  return calls;
}

Buffer random_values(attn_dtype type, int64_t count, uint64_t seed) {
  Buffer buffer(size_t(dtype_bytes(type, count)), poison_of(type));
  Draw draw{seed, 7};
  for (int64_t n = 0; n < count; ++n)
    encode_element(type, buffer.data(), n, float(int(draw(2001)) - 1000) / 500, false);
  return buffer;
}

std::vector<const Kernel*> cuda_forward_kernels() {
  std::vector<const Kernel*> kernels = kernels_here(Op::forward, false);
  std::erase_if(kernels, [](const Kernel* k) {
    return k->backend != ATTN_BACKEND_CUDA || float_type_of(*k) == ATTN_DTYPE_NONE;
  });
  return kernels;
}

Case case_for(const Kernel& kernel, const std::string& name, int64_t batch, int64_t seqlen_q,
              int64_t seqlen_kv) {
  Case c;
  c.name = name;
  c.batch = batch;
  c.heads_q = 4;
  c.heads_kv = 2;
  c.head_dim = kernel.limits.head_dim.max;
  c.head_dim_v = std::min(c.head_dim, kernel.limits.head_dim_v.max);
  // Kernels for few queries take so many of the two heads in a group.
  c.seqlen_q = std::min(seqlen_q, std::max<int64_t>(1, kernel.limits.seqlen_q.max / 4));
  c.q_type = c.out_type = float_type_of(kernel);
  c.v_in_k = (kernel.limits.demanded_features & feature_v_in_k) != 0;
  SegmentCase s;
  s.k_type = s.v_type = kv_type_of(kernel, c.q_type);
  s.capacity = seqlen_kv;
  c.segments = {s};
  return c;
}

}  // namespace attn::test
