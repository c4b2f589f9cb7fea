#include "device.h"

KERNEL void scratch_index(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  volatile float kept[80];
  for (int k = 0; k < 80; ++k) kept[k] = in[(16 * i + k) % (16 * n)];
  float sum = 0;
  for (int k = 0; k < 80; ++k) sum += kept[k * 7 % 80] * (float)k;
  out[i] = sum;
}
