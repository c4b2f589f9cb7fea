#include "device.h"

KERNEL void lds_transpose(GLOBAL float* out, GLOBAL const float* in, int n) {
  LOCAL float tile[16][129];
  const int i = local_id();
  for (int k = 0; k < 16; ++k) tile[k][i] = in[k * n + global_id()];
  barrier();
  for (int k = 0; k < 16; ++k) {
    const int at = 128 * k + i;
    out[2048 * group_id() + at] = tile[at % 16][at / 16];
  }
}
