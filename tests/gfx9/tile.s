// Attention of 64 queries (two waves of 32) over tiles of 32 keys, head dims 16 and 32, fp8 (FNUZ): a small kernel
// for tests to break.
//
//# kernel tile workgroup=128 workgroup_id=x lds=512
//#   ptr q       [64, 16]
//#   ptr k       [32 * tiles, 16]
//#   ptr vt      [32, 32 * tiles], V transposed
//#   ptr out     f32 [64, 32]
//#   i32 tiles
//#   f32 scale   of the scores, times log2(e)
.text
.globl tile
.p2align 8
tile:
  s_load_dwordx8 s[8:15], s[0:1], 0
  s_load_dwordx2 s[16:17], s[0:1], 32
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshrrev_b32_e32 v1, 6, v0
  v_and_b32_e32 v2, 63, v0                      // lane
  v_readfirstlane_b32 s20, v1                   // wave
  v_and_b32_e32 v3, 31, v2                      // query or row of an operand
  v_lshrrev_b32_e32 v4, 5, v2                   // half of k
  s_waitcnt lgkmcnt(0)
  s_mov_b32 s24, s10
  s_mov_b32 s25, s11
  s_lshl_b32 s26, s16, 9
  s_mov_b32 s27, 0x20000
  v_lshlrev_b32_e32 v5, 4, v3
  v_lshl_add_u32 v5, v4, 3, v5
  s_lshl_b32 s21, s20, 9
  v_add_u32_e32 v5, s21, v5
  global_load_dwordx2 v[6:7], v5, s[8:9]
  v_lshlrev_b32_e32 v8, 4, v3
  v_lshl_add_u32 v8, v4, 3, v8
  s_lshl_b32 s22, s20, 8
  v_lshlrev_b32_e32 v9, 2, v2
  v_add_u32_e32 v9, s22, v9
  s_lshl_b32 s23, s16, 5
  v_mul_lo_u32 v10, v3, s23
  v_lshl_add_u32 v10, v4, 2, v10
  v_xor_b32_e32 v11, 32, v2
  v_lshlrev_b32_e32 v11, 2, v11
  v_mov_b32_e32 v12, 0xf149f2ca                 // highest score so far: -1e30
  v_mov_b32_e32 v13, 0                          // sum
  .set r, 24
  .rept 4
  v_mov_b32_e32 v[r], 0
  .set r, r + 1
  .endr
  .set r, 32
  .rept 16
  v_mov_b32_e32 v[r], 0
  .set r, r + 1
  .endr
  s_mov_b32 s28, 0
  s_mov_b32 s29, 0
next_tile:
  s_mov_b32 m0, s22
  s_nop 0
  buffer_load_dword v9, s[24:27], s29 offen lds
  global_load_dword v16, v10, s[12:13]
  global_load_dword v17, v10, s[12:13] offset:8
  global_load_dword v18, v10, s[12:13] offset:16
  global_load_dword v19, v10, s[12:13] offset:24
  s_waitcnt vmcnt(0)
  s_barrier                                     // K is there
  ds_read_b64 v[20:21], v8
  s_waitcnt lgkmcnt(0)
  s_barrier                                     // K is read
  v_mfma_f32_32x32x16_fp8_fp8 v[48:63], v[20:21], v[6:7], 0
  s_nop 10
  v_max_f32_e32 v14, v48, v49
  .set r, 50
  .rept 7
  v_max3_f32 v14, v14, v[r], v[r+1]
  .set r, r + 2
  .endr
  ds_bpermute_b32 v15, v11, v14
  s_waitcnt lgkmcnt(0)                          // other half
  v_max_f32_e32 v14, v14, v15
  v_mul_f32_e32 v14, s17, v14
  v_max_f32_e32 v14, v12, v14
  v_sub_f32_e32 v15, v12, v14
  v_exp_f32_e32 v15, v15
  v_mov_b32_e32 v12, v14
  v_mul_f32_e32 v13, v13, v15
  .set r, 32
  .rept 16
  v_mul_f32_e32 v[r], v15, v[r]
  .set r, r + 1
  .endr
  v_sub_f32_e32 v22, 0x40e00000, v14            // weights up to 2^7
  .set r, 48
  .rept 16
  v_fma_f32 v[r], v[r], s17, v22
  .set r, r + 1
  .endr
  .set r, 48
  .rept 16
  v_exp_f32_e32 v[r], v[r]
  .set r, r + 1
  .endr
  .set r, 48
  .rept 16
  v_add_f32_e32 v13, v13, v[r]
  .set r, r + 1
  .endr
  .set r, 0
  .rept 4
  v_cvt_pk_fp8_f32 v[24+r], v[48+4*r], v[49+4*r]
  .set r, r + 1
  .endr
  .set r, 0
  .rept 4
  v_cvt_pk_fp8_f32 v[24+r], v[50+4*r], v[51+4*r] op_sel:[0,0,1]
  .set r, r + 1
  .endr
  s_nop 1
  v_mfma_f32_32x32x16_fp8_fp8 v[32:47], v[16:17], v[24:25], v[32:47]
  v_mfma_f32_32x32x16_fp8_fp8 v[32:47], v[18:19], v[26:27], v[32:47]
  v_add_u32_e32 v10, 32, v10
  s_add_u32 s29, s29, 0x200
  s_add_u32 s28, s28, 1
  s_cmp_lt_u32 s28, s16
  s_cbranch_scc1 next_tile
  ds_bpermute_b32 v15, v11, v13
  s_waitcnt lgkmcnt(0)                          // other sum
  v_add_f32_e32 v13, v13, v15
  v_rcp_f32_e32 v13, v13
  s_nop 9
  .set r, 32
  .rept 16
  v_mul_f32_e32 v[r], v13, v[r]
  .set r, r + 1
  .endr
  v_lshlrev_b32_e32 v5, 7, v3
  v_lshl_add_u32 v5, v4, 4, v5
  s_lshl_b32 s21, s20, 12
  v_add_u32_e32 v5, s21, v5
  global_store_dwordx4 v5, v[32:35], s[14:15]
  global_store_dwordx4 v5, v[36:39], s[14:15] offset:32
  global_store_dwordx4 v5, v[40:43], s[14:15] offset:64
  global_store_dwordx4 v5, v[44:47], s[14:15] offset:96
  s_endpgm
