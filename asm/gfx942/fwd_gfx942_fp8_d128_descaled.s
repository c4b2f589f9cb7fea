//# architectures gfx942 gfx950
// Attention forward in FP8 (e4m3) with head dimensions up to 128. A workgroup has 256 queries of a head, a
// wave 32 of them, and walks the tiles of 64 keys that prepare_gfx942_fp8_descaled has written, from the last that it sees
// to the first, each with descales of its own. include/forward_fp8.inc and descaled.inc are the kernel, docs/gfx942.md describes it.
//
// Grid: (8, items of a portion, portions of an XCD): workgroup i runs on XCD i % 8.
//
//# kernel fwd_gfx942_fp8_d128_descaled workgroup=512 lds=lds_bytes
//# arguments forward.inc
//# arguments descaled.inc
//
// Registers and LDS: include/forward_fp8.inc. Occupancy: 2 waves per SIMD.
.set dim, 128
.set descaled, 1
.include "forward_fp8.inc"
forward_fp8 fwd_gfx942_fp8_d128_descaled
