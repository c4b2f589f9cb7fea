// Writes K and V of every (batch, KV head) as the forward kernels of bf16 and f16 read them. include/prepare.inc is the kernel and says how.
//
//# kernel prepare_gfx942_16bit workgroup=256
//# arguments prepare.inc
//
// SGPRs: s0..s1 kernarg, s2..s4 workgroup, s8..s45 the arguments, the rest as named in include/prepare.inc, VGPRs too. No
// LDS. Occupancy: 8 waves per SIMD.
.set bytes_log2, 1
.include "prepare.inc"

// Eight keys of four dims each in x .. x + 15: those of dim j in y + 4 j ..
.macro transpose_v
  .irp i, 0, 1, 2, 3
  v_perm_b32 v[y+\i], v[x+4*\i+2], v[x+4*\i], s[low_halves]
  v_perm_b32 v[y+4+\i], v[x+4*\i+2], v[x+4*\i], s[high_halves]
  v_perm_b32 v[y+8+\i], v[x+4*\i+3], v[x+4*\i+1], s[low_halves]
  v_perm_b32 v[y+12+\i], v[x+4*\i+3], v[x+4*\i+1], s[high_halves]
  .endr
.endm

prepare prepare_gfx942_16bit
