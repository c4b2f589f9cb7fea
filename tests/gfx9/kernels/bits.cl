#include "device.h"

KERNEL void bits(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  const uint a = spread((uint)in[i]), b = spread((uint)in[i + n]);
  out[i] = __builtin_popcount(a) + (a ? __builtin_clz(a) : 32);
  out[i + n] = (int)(a << (b & 31) | a >> ((32 - (b & 31)) & 31));
  out[i + 2 * n] = (int)((a & b) ^ (~a | b >> 3));
  out[i + 3 * n] = (int)(a >> 7 & 0x3ff) - ((int)b >> 5);
}
