#define ATTN_SIMD_LANES 8
#define ATTN_SIMD_NAMESPACE simd_avx2
#define ATTN_SIMD_OPS tile_ops_avx2
#include "cpu/simd/tile_ops-inl.h"
