#include "device.h"

KERNEL void mfma_f16_32(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float_v16 c;
  for (int r = 0; r < 16; ++r) c[r] = 0;
  for (int k = 0; k < 2; ++k) {
    half_v4 a, b;
    for (int e = 0; e < 4; ++e) {
      a[e] = (half)in[(8 * k + e) * n + i];
      b[e] = (half)in[(8 * k + e + 4) * n + i];
    }
    c = mfma_f32_32x32x8_f16(a, b, c);
  }
  for (int r = 0; r < 16; ++r) out[r * n + i] = c[r];
}
