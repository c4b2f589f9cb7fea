//# architectures gfx942 gfx950
// Attention of a few queries against many keys in q8_0, head dimensions up to 64. include/decode.inc is the kernel,
// docs/gfx942.md describes it.
//
// Grid: columns * column_blocks workgroups.
//
//# kernel decode_gfx942_q8_0_d64 workgroup=256 lds=lds_bytes workgroup_id=x
//# arguments decode.inc
//# arguments kv_segment.inc
//#   i64[161] more_segments     seven more
//
// Registers and LDS: include/decode.inc. Occupancy: 2 waves per SIMD.
.include "decode_elements.inc"
.set dim, 64
.set element, element_q8_0
.include "decode.inc"
decode decode_gfx942_q8_0_d64
