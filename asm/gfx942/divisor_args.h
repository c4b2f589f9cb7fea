// Division by a number that the host knows.
#ifndef ATTN_ASM_GFX942_DIVISOR_ARGS_H
#define ATTN_ASM_GFX942_DIVISOR_ARGS_H

// n / d of n below 2^31 is (2 n * magic >> 32) >> shift.
struct attn_gfx942_divisor {
  unsigned magic;
  int shift;
};

#endif
