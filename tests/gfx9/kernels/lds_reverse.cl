#include "device.h"

KERNEL void lds_reverse(GLOBAL float* out, GLOBAL const float* in, int n) {
  LOCAL float tile[128];
  tile[local_id()] = in[global_id()];
  barrier();
  out[global_id()] = tile[127 - local_id()];
}
