#include "device.h"

KERNEL void atomic_claim(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  out[n + i] = atomic_xchg_cas(&out[i], 0, in[i] | 1);
}
