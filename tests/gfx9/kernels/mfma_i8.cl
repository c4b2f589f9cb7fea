#include "device.h"

static int_64 codes(int_64 word) {
  return (int_64)((uint_64)spread((uint)word) << 32 | spread((uint)(word >> 32)));
}

KERNEL void mfma_i8(GLOBAL int* out, GLOBAL const int_64* in, int n) {
  const int i = global_id();
  int_v16 c;
  int_v4 d = {1, -2, 3, -4};
  for (int r = 0; r < 16; ++r) c[r] = 0;
  for (int k = 0; k < 4; ++k) {
    const int_64 a = codes(in[k * n + i]), b = codes(in[(k + 4) * n + i]);
    c = mfma_i32_32x32x16_i8(a, b, c);
    d = mfma_i32_16x16x32_i8(a, b, d);
  }
  for (int r = 0; r < 16; ++r) out[r * n + i] = c[r] ^ d[r % 4];
}
