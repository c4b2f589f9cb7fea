//# architectures gfx942 gfx950
// Attention of a few queries against many keys in q4_0, head dimensions up to 128. include/decode.inc is the kernel,
// docs/gfx942.md describes it.
//
// Grid: columns * column_blocks workgroups.
//
//# kernel decode_gfx942_q4_0_d128 workgroup=256 lds=lds_bytes workgroup_id=x
//# arguments decode.inc
//# arguments kv_segment.inc
//#   i64[161] more_segments     seven more
//
// Registers and LDS: include/decode.inc. Occupancy: 2 waves per SIMD.
.include "decode_elements.inc"
.set dim, 128
.set element, element_q4_0
.include "decode.inc"
decode decode_gfx942_q4_0_d128
