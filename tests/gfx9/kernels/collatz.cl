#include "device.h"

KERNEL void collatz(GLOBAL int* out, GLOBAL const int* in, int n) {
  const int i = global_id();
  uint word = (spread((uint)in[i]) & 0xffff) + 1;
  int steps = 0;
  while (word != 1 && steps < 40) {
    word = word % 2 ? 3 * word + 1 : word / 2;
    ++steps;
  }
  out[i] = steps;
  out[i + n] = (int)word;
}
