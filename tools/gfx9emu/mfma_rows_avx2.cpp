#define GFX9EMU_SIMD_NAMESPACE simd_avx2
#define GFX9EMU_SIMD_ROWS mfma_rows_avx2
#include "gfx9emu/mfma_rows-inl.h"
