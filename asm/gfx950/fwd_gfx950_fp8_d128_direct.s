// Attention forward in FP8 (e4m3fn) with head dimensions of 128, of which K and V are contiguous rows: read from the caller's memory, without a
// prepare launch. A workgroup has 256 queries of a head, a wave 32 of them, and walks the tiles of 64 keys from the last that it
// sees to the first. include/forward_fp8.inc and direct.inc are the kernel, docs/gfx950.md describes it.
//
// Grid: (8, items of a portion, portions of an XCD): workgroup i runs on XCD i % 8.
//
//# kernel fwd_gfx950_fp8_d128_direct workgroup=512 lds=lds_bytes
//# arguments forward.inc
//# arguments direct.inc
//
// Registers and LDS: include/forward_fp8.inc. Occupancy: 2 waves per SIMD.
.set dim, 128
.set direct, 1
.include "forward_fp8.inc"
forward_fp8 fwd_gfx950_fp8_d128_direct
