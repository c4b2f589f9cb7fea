#include "device.h"

KERNEL void scratch_sort(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  volatile int row[16];
  for (int k = 0; k < 16; ++k) {
    const int value = in[16 * i + k];
    int at = k;
    while (at > 0 && row[at - 1] > value) {
      row[at] = row[at - 1];
      --at;
    }
    row[at] = value;
  }
  for (int k = 0; k < 16; ++k) out[16 * i + k] = row[k];
}
