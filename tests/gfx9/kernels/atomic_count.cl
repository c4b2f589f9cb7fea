#include "device.h"

KERNEL void atomic_count(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int word = (int)spread((uint)in[global_id()]);
  atomic_add_global(&out[word & 15], 1);
  atomic_add_global(&out[16], word);
  atomic_max_global(&out[17], word & 0xffff);
}
