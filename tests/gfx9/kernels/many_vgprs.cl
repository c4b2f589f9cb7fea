#include "device.h"

KERNEL void many_vgprs(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float x[16], sum[9][9];
  for (int k = 0; k < 16; ++k) x[k] = in[k * n + i];
  UNROLL for (int a = 0; a < 9; ++a) UNROLL for (int b = 0; b < 9; ++b) sum[a][b] = x[a] - x[b + 7];
  for (int k = 0; k < n / 128; ++k) {
    const float y = in[k];
    UNROLL for (int a = 0; a < 9; ++a) UNROLL for (int b = 0; b < 9; ++b) sum[a][b] =
        sum[a][b] * y + x[a];
  }
  UNROLL for (int a = 0; a < 9; ++a) {
    float total = 0;
    UNROLL for (int b = 0; b < 9; ++b) total += sum[a][b];
    out[a * n + i] = total;
  }
}
