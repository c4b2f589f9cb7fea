#define ATTN_SIMD_NAMESPACE simd_baseline
#define ATTN_SIMD_OPS tile_ops_baseline
#include "cpu/simd/tile_ops-inl.h"
