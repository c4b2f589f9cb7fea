#include "device.h"

KERNEL void integer_64(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  uint_64 hash = 14695981039346656037ul;
  for (int k = 0; k < 16; ++k)
    hash = (hash ^ (uint_64)spread((uint)in[k * n + i])) * 1099511628211ul;
  out[i] = (int)hash;
  out[i + n] = (int)(hash >> 32);
}
