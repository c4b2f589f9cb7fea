#include "device.h"

KERNEL void divergent(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float x = in[i];
  if (x > 2.0f) {
    x = x * 3.0f - in[i + n];
  } else if (i % 3 == 0) {
    x = in[i + 2 * n];
    if (x < 0) x = -x;
  } else {
    return;
  }
  out[i] = x;
}
