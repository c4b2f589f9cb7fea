#define GFX9EMU_SIMD_NAMESPACE simd_baseline
#define GFX9EMU_SIMD_ROWS mfma_rows_baseline
#include "gfx9emu/mfma_rows-inl.h"
