#include "device.h"

KERNEL void mfma_f16_16(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  half_v4 a, b;
  float_v4 c;
  for (int e = 0; e < 4; ++e) {
    a[e] = (half)in[e * n + i];
    b[e] = (half)in[(e + 4) * n + i];
    c[e] = in[(e + 8) * n + i];
  }
  c = mfma_f32_16x16x16_f16(a, b, c);
  c = mfma_f32_16x16x16_f16(b, a, c);
  for (int r = 0; r < 4; ++r) out[r * n + i] = c[r];
}
