#include "device.h"

KERNEL void integer_division(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  const uint a = spread((uint)in[i]), b = (spread((uint)in[i + n]) >> (i & 31)) + 1;
  out[i] = (int)(a / b);
  out[i + n] = (int)(a % b);
  out[i + 2 * n] = (int)a / (int)(b >> 1 | 1);
}
