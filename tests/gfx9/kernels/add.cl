#include "device.h"

KERNEL void add(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  out[i] = in[i] + in[i + n];
}
