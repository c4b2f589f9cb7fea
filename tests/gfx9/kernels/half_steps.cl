#include "device.h"

KERNEL void half_steps(GLOBAL half* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  half_v2 pair = {(half)in[i], (half)in[i + n]};
  const half_v2 step = {(half)0.5f, (half)-0.25f};
  for (int k = 0; k < 4; ++k) pair = pair * step + step;
  out[2 * i] = pair[0];
  out[2 * i + 1] = pair[1];
}
