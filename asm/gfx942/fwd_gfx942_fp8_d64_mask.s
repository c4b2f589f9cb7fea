//# architectures gfx942 gfx950
// Attention forward in FP8 (e4m3) with head dimensions up to 64. A workgroup has 256 queries of a head, a
// wave 32 of them, and walks the tiles of 64 keys that prepare_gfx942_fp8 has written, from the last that it sees
// to the first, of those that a block mask shows. include/forward_fp8.inc and block_mask.inc are the kernel,
// docs/gfx942.md describes it.
//
// Grid: (8, items of a portion, portions of an XCD): workgroup i runs on XCD i % 8.
//
//# kernel fwd_gfx942_fp8_d64_mask workgroup=512 lds=lds_bytes
//# arguments forward.inc
//# arguments block_mask.inc
//
// Registers and LDS: include/forward_fp8.inc. Occupancy: 2 waves per SIMD.
.set dim, 64
.set block_masks, 1
.include "forward_fp8.inc"
forward_fp8 fwd_gfx942_fp8_d64_mask
