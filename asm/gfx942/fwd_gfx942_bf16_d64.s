//# architectures gfx942 gfx950
// Attention forward in bf16 with head dimensions up to 64. A workgroup has 256 queries of a head, a wave 64 of them, and
// walks the tiles of 64 keys that prepare_gfx942_16bit has written, from the last that it sees to the first.
// include/forward_16bit.inc is the kernel, docs/gfx942.md describes it.
//
// Grid: (8, items of a portion, portions of an XCD): workgroup i runs on XCD i % 8.
//
//# kernel fwd_gfx942_bf16_d64 workgroup=256 lds=lds_bytes
//# arguments forward.inc
//
// Registers and LDS: include/forward_16bit.inc. Occupancy: 2 waves per SIMD.
.set dim, 64
.set bf16, 1
.include "forward_16bit.inc"
forward_16bit fwd_gfx942_bf16_d64
