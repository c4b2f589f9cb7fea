//# architectures gfx942 gfx950
// Writes K and V of every (batch, KV head) as the forward kernels of bf16 and f16 read them. include/prepare.inc is the kernel and says how.
//
//# kernel prepare_gfx942_16bit workgroup=256
//# arguments prepare.inc
//# arguments kv_segment.inc
//#   i64[161] more_segments     seven more
//
// Registers: include/prepare.inc. No LDS. Occupancy: 8 waves per SIMD.
.include "prepare_16bit.inc"
prepare prepare_gfx942_16bit
