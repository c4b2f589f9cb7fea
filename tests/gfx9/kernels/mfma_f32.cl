#include "device.h"

KERNEL void mfma_f32(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float_v16 c;
  for (int r = 0; r < 16; ++r) c[r] = in[r * n + i];
  for (int k = 0; k < 8; ++k) c = mfma_f32_32x32x2_f32(in[k * n + i], in[(k + 8) * n + i], c);
  for (int r = 0; r < 16; ++r) out[r * n + i] = c[r];
}
