#define GFX9EMU_SIMD_NAMESPACE simd_avx512
#define GFX9EMU_SIMD_ROWS mfma_rows_avx512
#include "gfx9emu/mfma_rows-inl.h"
