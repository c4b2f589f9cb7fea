// Addresses within shared memory, as instructions take them.
#ifndef ATTN_KERNELS_PTX_ADDRESS_H
#define ATTN_KERNELS_PTX_ADDRESS_H

namespace attn::ptx {

__device__ __forceinline__ unsigned address(const void* shared) {
  return unsigned(__cvta_generic_to_shared(shared));
}

}  // namespace attn::ptx
#endif
