#include "device.h"

KERNEL void atomic_histogram(GLOBAL int* out, GLOBAL const int* in, int n) {
  LOCAL int bins[64];
  const int i = local_id();
  if (i < 64) bins[i] = 0;
  barrier();
  for (int k = 0; k < 16; ++k) atomic_add_local(&bins[in[k * n + global_id()] >> 20 & 63], 1);
  barrier();
  if (i < 64) out[64 * group_id() + i] = bins[i];
}
