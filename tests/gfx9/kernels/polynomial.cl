#include "device.h"

KERNEL void polynomial(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  const float x = in[i];
  float y = 0;
  for (int k = 0; k < n % 7 + 4; ++k) y = y * x + in[k];
  out[i] = y;
}
