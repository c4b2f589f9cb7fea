//# architectures gfx942 gfx950
// Writes K and V of every (batch, KV head) as the forward kernels of bf16 and f16 read them, from segments and pages.
// include/prepare.inc and prepare_segments.inc are the kernel and say how.
//
//# kernel prepare_gfx942_16bit_segments workgroup=256
//# arguments prepare.inc
//# arguments kv_segment.inc
//#   i64[161] more_segments     seven more
//
// Registers: include/prepare.inc. No LDS. Occupancy: 8 waves per SIMD.
.set with_segments, 1
.include "prepare_16bit.inc"
prepare prepare_gfx942_16bit_segments
