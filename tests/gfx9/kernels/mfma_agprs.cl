#include "device.h"

// More accumulators than arch VGPRs: AGPRs are needed.
enum { tiles = 20 };

KERNEL void mfma_agprs(GLOBAL float* out, GLOBAL const float* in, int n) {
  const int i = global_id();
  float_v16 c[tiles];
  UNROLL for (int t = 0; t < tiles; ++t) UNROLL for (int r = 0; r < 16; ++r) c[t][r] = (float)t;
  for (int k = 0; k < n / 128; ++k) {
    half_v4 a, b;
    UNROLL for (int e = 0; e < 4; ++e) {
      a[e] = (half)in[e * n + (i + k) % n];
      b[e] = (half)in[(e + 4) * n + (i + k) % n];
    }
    UNROLL for (int t = 0; t < tiles; ++t) c[t] =
        mfma_f32_32x32x8_f16(t % 2 ? a : b, t % 3 ? a : b, c[t]);
  }
  UNROLL for (int r = 0; r < 16; ++r) {
    float sum = 0;
    UNROLL for (int t = 0; t < tiles; ++t) sum += c[t][r];
    out[r * n + i] = sum;
  }
}
