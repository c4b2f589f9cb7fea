#include "device.h"

KERNEL void copy_wide(GLOBAL float_v4* out, GLOBAL const float_v4* in, int n) {
  for (int i = global_id(); i < 4 * n; i += n) out[i] = in[i] * 2.0f;
}
