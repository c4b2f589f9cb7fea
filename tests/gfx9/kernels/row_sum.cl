#include "device.h"

KERNEL void row_sum(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float sum = 0;
  for (int k = 0; k < 16; ++k) sum += in[k * n + i];
  out[i] = sum;
}
