// A tensor map as parameter structs have it: what the driver makes and the copy engine reads.
#ifndef ATTN_KERNELS_SHARED_TENSOR_MAP_H
#define ATTN_KERNELS_SHARED_TENSOR_MAP_H

struct alignas(64) attn_tensor_map {
  unsigned char bytes[128];
};

#endif
