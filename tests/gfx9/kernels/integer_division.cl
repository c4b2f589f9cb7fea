#include "device.h"

KERNEL void integer_division(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  const uint a = (uint)in[i], b = ((uint)in[i + n] >> 12) + 1;
  out[i] = (int)(a / b);
  out[i + n] = (int)(a % b);
  out[i + 2 * n] = in[i] / (int)b;
}
