//# architectures gfx942 gfx950
// Writes K and V of every (batch, KV head) as the FP8 forward kernels read them, from segments and pages, on gfx942 OCP codes as the FNUZ
// codes of half their values. include/prepare.inc and prepare_segments.inc are the kernel and say how.
//
//# kernel prepare_gfx942_fp8_segments workgroup=128
//# arguments prepare.inc
//# arguments kv_segment.inc
//#   i64[161] more_segments     seven more
//
// Registers: include/prepare.inc. No LDS. Occupancy: 8 waves per SIMD.
.set with_segments, 1
.include "prepare_fp8.inc"
prepare prepare_gfx942_fp8_segments
