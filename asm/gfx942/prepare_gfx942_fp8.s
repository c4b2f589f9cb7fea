// Writes K and V of every (batch, KV head) as the FP8 forward kernels read them, OCP codes as the FNUZ codes of half
// their values. include/prepare.inc is the kernel and says how.
//
//# kernel prepare_gfx942_fp8 workgroup=128
//# arguments prepare.inc
//
// SGPRs: s0..s1 kernarg, s2..s4 workgroup, s8..s45 the arguments, the rest as named in include/prepare.inc, VGPRs too. No
// LDS. Occupancy: 8 waves per SIMD.
.set bytes_log2, 0
.include "prepare.inc"

// Keys of four dims each in x .. x + 15: 16 keys of dim j in y + 4 j ..
.macro transpose_v
  .irp i, 0, 1, 2, 3
  transpose_4 x+4*\i, y+\i
  .endr
.endm
// Bytes 0..3 of the four registers from x: register j of y, y+4, y+8, y+12 = the bytes j, in order.
.macro transpose_4 x, y
  v_perm_b32 v[a], v[\x+1], v[\x], s[low_pairs]
  v_perm_b32 v[b], v[\x+3], v[\x+2], s[low_pairs]
  v_perm_b32 v[\y], v[b], v[a], s[low_halves]
  v_perm_b32 v[\y+4], v[b], v[a], s[high_halves]
  v_perm_b32 v[a], v[\x+1], v[\x], s[high_pairs]
  v_perm_b32 v[b], v[\x+3], v[\x+2], s[high_pairs]
  v_perm_b32 v[\y+8], v[b], v[a], s[low_halves]
  v_perm_b32 v[\y+12], v[b], v[a], s[high_halves]
.endm

prepare prepare_gfx942_fp8
