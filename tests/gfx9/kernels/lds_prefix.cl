#include "device.h"

KERNEL void lds_prefix(GLOBAL int* out, GLOBAL const int* in, int n) {
  LOCAL int sums[2][128];
  const int i = local_id();
  int now = 0;
  sums[0][i] = (int)spread((uint)in[global_id()]);
  barrier();
  for (int step = 1; step < 128; step *= 2) {
    const int before = i >= step ? sums[now][i - step] : 0;
    sums[1 - now][i] = sums[now][i] + before;
    now = 1 - now;
    barrier();
  }
  out[global_id()] = sums[now][i];
}
