#include "device.h"

KERNEL void divide(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  out[i] = in[i] / (in[i + n] + 17.0f);
  out[i + n] = __builtin_sqrtf(in[i] * in[i] + 3.0f);
}
