#include "device.h"

KERNEL void lds_reduce(GLOBAL float* out, GLOBAL const float* in, int n) {
  LOCAL float part[128];
  const int i = local_id();
  part[i] = in[global_id()];
  for (int step = 64; step > 0; step /= 2) {
    barrier();
    if (i < step) part[i] += part[i + step];
  }
  if (i == 0) out[group_id()] = part[0];
}
