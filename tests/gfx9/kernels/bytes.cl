#include "device.h"

KERNEL void bytes(GLOBAL uchar* out, GLOBAL const uchar* in, int n) {
  const int i = global_id();
  for (int k = 0; k < 8; ++k) {
    const int a = in[8 * i + k], b = (signed char)in[8 * (i ^ 1) + k];
    const int mean = (a + b) / 2;
    out[8 * i + (k ^ 3)] = (uchar)(mean < 0 ? 0 : mean > 200 ? 200 : mean);
  }
}
