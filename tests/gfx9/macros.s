// One kernel per group of macros of asm/include, for test_macros.cpp. One wave each.
//
//# kernel reduce workgroup=64
//#   ptr in      [64] 32 bits
//#   ptr out     [5]: max_f32, min_f32, add_f32, max_u32, add_u32
//# kernel partner workgroup=64
//#   ptr in      [64] 32 bits
//#   ptr out     [64]
//# kernel fp8 workgroup=64
//#   ptr in      [64, 8] f32
//#   ptr out     [64, 2] codes
//#   ptr values  [64, 4] f32 of the first codes
//# kernel ocp workgroup=64
//#   ptr in      [64] four e4m3fn codes
//#   ptr out     [64] the FNUZ codes of half their values
//# kernel mad workgroup=64
//#   ptr out     u64: sum + index * stride
//#   u64 sum
//#   i64 stride
//#   u32 index
//# kernel dma workgroup=64 lds=512
//#   ptr in      [64] 32 bits, of which `bytes` count
//#   ptr out     [64] the same backwards
//#   u32 bytes
//# kernel quotient workgroup=64
//#   ptr in      [2] n, d
//#   ptr out     [2] n / d, n % d
.include "registers.inc"
.include "wave.inc"
.include "reduce.inc"
.include "convert.inc"
.include "decode_work.inc"

// s[in], s[out] are the first two arguments; v[lane] and v[offset] = 4 * lane.
.macro begin kernel
registers_from 5, 0
sgpr in, 4, 4
.set out, in + 2
sgpr wave
sgpr result, 5
sgpr c, 3
sgpr srd, 4, 4
sgpr t, 2, 2
sgpr bytes
vgpr lane
vgpr offset
vgpr x, 8, 2
vgpr y, 4, 2
vgpr codes, 2, 2
vgpr u
.globl \kernel
.p2align 8
\kernel:
  kernarg in, 4, 0
  wave_and_lane wave, lane
  v_lshlrev_b32_e32 v[offset], 2, v[lane]
  wait_scalar
.endm

.text
begin reduce
  global_load_dword v[x], v[offset], s[in:in+1]
  wait_memory
  .set i, 0
  .irp op, max_f32, min_f32, add_f32, max_u32, add_u32
  v_mov_b32_e32 v[x+1], v[x]
  wave_reduce \op, result+i, x+1
  .set i, i + 1
  .endr
  wait_states 2
  s_mov_b64 exec, 1
  .irp i, 0, 1, 2, 3, 4
  v_mov_b32_e32 v[x], s[result+\i]
  global_store_dword v[offset], v[x], s[out:out+1] offset:4*\i
  .endr
  s_endpgm

begin partner
  global_load_dword v[x], v[offset], s[in:in+1]
  partner_address u, lane
  wait_memory
  from_partner y, x, u
  wait_lds
  global_store_dword v[offset], v[y], s[out:out+1]
  s_endpgm

begin fp8
  v_lshlrev_b32_e32 v[u], 5, v[lane]
  global_load_dwordx4 v[x:x+3], v[u], s[in:in+1]
  global_load_dwordx4 v[x+4:x+7], v[u], s[in:in+1] offset:16
  kernarg t, 2, fp8.values
  v_mov_b32_e32 v[codes], 0
  v_mov_b32_e32 v[codes+1], 0
  wait_memory
  pack_8_fp8 codes, x
  wait_scalar
  v_lshlrev_b32_e32 v[offset], 3, v[lane]
  global_store_dwordx2 v[offset], v[codes:codes+1], s[out:out+1]
  unpack_4_fp8 y, codes, u
  v_lshlrev_b32_e32 v[offset], 4, v[lane]
  global_store_dwordx4 v[offset], v[y:y+3], s[t:t+1]
  s_endpgm

begin ocp
  s_mov_b32 s[c], 0x7f7f7f7f
  s_mov_b32 s[c+1], 0x01010101
  s_mov_b32 s[c+2], 0x80808080
  global_load_dword v[codes], v[offset], s[in:in+1]
  wait_memory
  fnuz_half_of_e4m3fn codes, x, y, c
  global_store_dword v[offset], v[codes], s[out:out+1]
  s_endpgm

begin mad
  kernarg srd, 2, mad.stride
  kernarg bytes, 1, mad.index
  wait_scalar
  s_mad_u64 in + 2, bytes, srd, t
  v_mov_b32_e32 v[x], s[in+2]
  v_mov_b32_e32 v[x+1], s[in+3]
  v_mov_b32_e32 v[u], 0
  s_mov_b64 exec, 1
  global_store_dwordx2 v[u], v[x:x+1], s[in:in+1]
  s_endpgm

begin dma
  kernarg bytes, 1, dma.bytes
  wait_scalar
  buffer_base srd, in
  buffer_bytes srd, bytes
  s_mov_b32 s[c], 0
  s_mov_b32 s[result], 256
  buffer_to_lds srd, offset, c, 0, result
  v_sub_u32_e32 v[u], 252, v[offset]
  wait_memory
  barrier_after_lds
  ds_read_b32 v[x], v[u] offset:256
  wait_lds
  global_store_dword v[offset], v[x], s[out:out+1]
  s_endpgm

begin quotient
  s_load_dwordx2 s[srd:srd+1], s[in:in+1], 0
  wait_scalar
  divide result, result+1, srd, srd+1
  v_mov_b32_e32 v[x], s[result]
  v_mov_b32_e32 v[x+1], s[result+1]
  v_mov_b32_e32 v[u], 0
  s_mov_b64 exec, 1
  global_store_dwordx2 v[u], v[x:x+1], s[out:out+1]
  s_endpgm
