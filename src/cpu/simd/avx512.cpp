#define ATTN_SIMD_LANES 16
#define ATTN_SIMD_NAMESPACE simd_avx512
#define ATTN_SIMD_OPS tile_ops_avx512
#include "cpu/simd/tile_ops-inl.h"
