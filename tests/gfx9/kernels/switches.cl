#include "device.h"

KERNEL void switches(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  int x = in[i] >> 16;
  for (int k = 0; k < 10; ++k) {
    switch (x & 7) {
      case 0:
        x += 5;
        break;
      case 1:
        x *= 3;
        break;
      case 2:
        x ^= i;
        break;
      case 3:
        x -= n;
        break;
      case 4:
        x = x >> 1 | 1;
        break;
      case 5:
        x = ~x;
        break;
      default:
        x += in[(i + k) % n] >> 20;
    }
  }
  out[i] = x;
}
