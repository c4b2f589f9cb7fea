//# architectures gfx942 gfx950
// Merges partial attention results by their log-sum-exp: m = max lse, w = exp(lse - m),
// out = sum(w out) / sum(w), lse = m + log(sum(w)). Parts with lse -inf are not read.
// One wave per row of head_dim elements; four queries of one head and batch entry per workgroup.
// Grid: (ceil(seqlen_q / 4), heads, batch).
//
//# kernel merge_gfx942 workgroup=256
//#   ptr[16] outs         [batch, seqlen_q, heads, head_dim] each
//#   ptr[16] lses         float32 [batch, heads, seqlen_q]
//#   ptr     out
//#   ptr     lse          0: not wanted
//#   i64[3]  part_stride  elements: batch, seq, head
//#   i64[3]  out_stride
//#   i64     rows         unused: batch * heads * seqlen_q
//#   i32     heads
//#   i32     seqlen_q
//#   i32     head_dim
//#   i32     num_parts
//#   i32     part_type    1 f32, 2 f16, 3 bf16
//#   i32     out_type
//
// SGPRs: s0..s1 kernarg, s2..s4 workgroup, s8..s31 the arguments from `out` on, s32..s65 as named below.
// VGPRs: v0..v15 as named below. LDS: none. Occupancy: 8 waves per SIMD.
.include "registers.inc"
.include "wave.inc"
.include "reduce.inc"
.include "convert.inc"

.set type_f32, 1
.set type_f16, 2
.set minus_infinity, 0xff800000

registers_at_entry query_block, head, batch
sgpr arguments, 24, 4
.set out, arguments + (merge_gfx942.out - merge_gfx942.out) / 4
.set lse, arguments + (merge_gfx942.lse - merge_gfx942.out) / 4
.set part_stride, arguments + (merge_gfx942.part_stride - merge_gfx942.out) / 4
.set out_stride, arguments + (merge_gfx942.out_stride - merge_gfx942.out) / 4
.set heads, arguments + (merge_gfx942.heads - merge_gfx942.out) / 4
.set seqlen_q, arguments + (merge_gfx942.seqlen_q - merge_gfx942.out) / 4
.set head_dim, arguments + (merge_gfx942.head_dim - merge_gfx942.out) / 4
.set num_parts, arguments + (merge_gfx942.num_parts - merge_gfx942.out) / 4
.set part_type, arguments + (merge_gfx942.part_type - merge_gfx942.out) / 4
.set out_type, arguments + (merge_gfx942.out_type - merge_gfx942.out) / 4
sgpr part_srd, 4, 4
sgpr out_srd, 4, 4
sgpr query
sgpr part_shift                         // log2 of bytes per element
sgpr out_shift
sgpr highest
sgpr weight_sum
sgpr inverse_sum
sgpr weight_of_part
sgpr column                             // first of the 256 in work
sgpr bytes
sgpr infinity
sgpr rounding
sgpr lse_row, 2, 2
sgpr part_row, 2, 2                     // byte offset of the row in a part
sgpr out_row, 2, 2
sgpr present, 2, 2                      // bit s: part s contributes
sgpr left, 2, 2                         // of these, the parts still to add
sgpr t, 2, 2
sgpr saved_exec, 2, 2

.set lane, 0
vgpr weight                             // of part `lane`
vgpr part_lse
vgpr offset
vgpr address, 2, 2
vgpr row_base, 2, 2                     // address of the row in part `lane`
vgpr sum, 4, 2                          // of columns lane, lane + 64, ...
vgpr x, 4, 2

// v[x .. x+3] = columns of the row behind the descriptor; `width` is dword or ushort.
.macro load_columns width, log2
  v_lshlrev_b32_e32 v[offset], \log2, v[offset]
  buffer_load_\width v[x], v[offset], s[part_srd:part_srd+3], 0 offen
  buffer_load_\width v[x+1], v[offset], s[part_srd:part_srd+3], 0 offen offset:64 << \log2
  buffer_load_\width v[x+2], v[offset], s[part_srd:part_srd+3], 0 offen offset:128 << \log2
  buffer_load_\width v[x+3], v[offset], s[part_srd:part_srd+3], 0 offen offset:192 << \log2
  wait_memory
.endm

.macro store_columns width, from, log2
  v_lshlrev_b32_e32 v[offset], \log2, v[offset]
  buffer_store_\width v[\from], v[offset], s[out_srd:out_srd+3], 0 offen
  buffer_store_\width v[\from+1], v[offset], s[out_srd:out_srd+3], 0 offen offset:64 << \log2
  buffer_store_\width v[\from+2], v[offset], s[out_srd:out_srd+3], 0 offen offset:128 << \log2
  buffer_store_\width v[\from+3], v[offset], s[out_srd:out_srd+3], 0 offen offset:192 << \log2
.endm

kernel_entry merge_gfx942
  kernarg arguments, 16, merge_gfx942.out
  kernarg arguments + 16, 8, merge_gfx942.rows
  wave_and_lane query, lane
  wait_scalar
  s_lshl_b32 s[query_block], s[query_block], 2
  s_add_u32 s[query], s[query], s[query_block]
  s_cmp_lt_u32 s[query], s[seqlen_q]
  s_cbranch_scc0 done

  s_cmp_eq_u32 s[part_type], type_f32
  s_cselect_b32 s[part_shift], 2, 1
  s_cmp_eq_u32 s[out_type], type_f32
  s_cselect_b32 s[out_shift], 2, 1

  // Where the row is: in lse, in a part, in out.
  s_mul_i32 s[lse_row], s[batch], s[heads]
  s_add_u32 s[lse_row], s[lse_row], s[head]
  s_mul_hi_u32 s[lse_row+1], s[lse_row], s[seqlen_q]
  s_mul_i32 s[lse_row], s[lse_row], s[seqlen_q]
  s_add_u32 s[lse_row], s[lse_row], s[query]
  s_addc_u32 s[lse_row+1], s[lse_row+1], 0
  s_lshl_b64 s[lse_row:lse_row+1], s[lse_row:lse_row+1], 2
  s_mov_b64 s[part_row:part_row+1], 0
  s_mad_u64 part_row, batch, part_stride, t
  s_mad_u64 part_row, query, part_stride + 2, t
  s_mad_u64 part_row, head, part_stride + 4, t
  s_lshl_b64 s[part_row:part_row+1], s[part_row:part_row+1], s[part_shift]
  s_mov_b64 s[out_row:out_row+1], 0
  s_mad_u64 out_row, batch, out_stride, t
  s_mad_u64 out_row, query, out_stride + 2, t
  s_mad_u64 out_row, head, out_stride + 4, t
  s_lshl_b64 s[out_row:out_row+1], s[out_row:out_row+1], s[out_shift]

  // Lane s fetches the pointers and the lse of part s.
  s_mov_b32 s[infinity], minus_infinity
  s_mov_b32 s[rounding], 0x7fff
  v_mov_b32_e32 v[part_lse], s[infinity]
  v_mov_b32_e32 v[row_base], 0
  v_mov_b32_e32 v[row_base+1], 0
  v_cmp_gt_u32_e32 vcc, s[num_parts], v[lane]
  s_and_saveexec_b64 s[saved_exec:saved_exec+1], vcc
  v_lshlrev_b32_e32 v[offset], 3, v[lane]
  global_load_dwordx2 v[address:address+1], v[offset], s[0:1] offset:merge_gfx942.lses
  global_load_dwordx2 v[row_base:row_base+1], v[offset], s[0:1] offset:merge_gfx942.outs
  wait_memory 1
  v_lshl_add_u64 v[address:address+1], v[address:address+1], 0, s[lse_row:lse_row+1]
  global_load_dword v[part_lse], v[address:address+1], off
  wait_memory 1
  v_lshl_add_u64 v[row_base:row_base+1], v[row_base:row_base+1], 0, s[part_row:part_row+1]
  wait_memory
  s_mov_b64 exec, s[saved_exec:saved_exec+1]

  // weight = exp2((lse - highest) * log2(e)), 0 where lse is -inf.
  v_mov_b32_e32 v[x], v[part_lse]
  wave_reduce max_f32, highest, x
  v_cmp_neq_f32_e64 s[present:present+1], s[infinity], v[part_lse]
  wait_states 1                         // v_readlane, v_cmp -> VALU reads s[highest]: 2
  v_subrev_f32_e32 v[weight], s[highest], v[part_lse]
  v_mul_f32_e32 v[weight], 0x3fb8aa3b, v[weight]
  v_exp_f32_e32 v[weight], v[weight]
  wait_states 1                         // trans -> VALU
  v_cndmask_b32_e64 v[weight], 0, v[weight], s[present:present+1]
  v_mov_b32_e32 v[x], v[weight]
  wave_reduce add_f32, weight_sum, x

  // lse = highest + log2(sum) * ln(2); both are -inf if no part contributes.
  wait_states 2                         // v_readlane -> VALU reads s[weight_sum]
  v_log_f32_e32 v[x], s[weight_sum]
  v_rcp_f32_e32 v[x+1], s[weight_sum]
  v_mov_b32_e32 v[x+2], s[highest]
  v_fmac_f32_e32 v[x+2], 0x3f317218, v[x]
  s_cmp_eq_u64 s[lse:lse+1], 0
  s_cbranch_scc1 lse_stored
  s_mov_b64 exec, 1
  s_add_u32 s[lse], s[lse], s[lse_row]
  s_addc_u32 s[lse+1], s[lse+1], s[lse_row+1]
  v_mov_b32_e32 v[offset], 0
  global_store_dword v[offset], v[x+2], s[lse:lse+1]
  s_mov_b64 exec, s[saved_exec:saved_exec+1]
lse_stored:
  v_readfirstlane_b32 s[inverse_sum], v[x+1]
  s_cmp_eq_u64 s[present:present+1], 0
  s_cselect_b32 s[inverse_sum], 0, s[inverse_sum]

  s_lshl_b32 s[bytes], s[head_dim], s[part_shift]
  buffer_bytes part_srd, bytes
  s_lshl_b32 s[bytes], s[head_dim], s[out_shift]
  buffer_bytes out_srd, bytes
  s_add_u32 s[out_row], s[out], s[out_row]
  s_addc_u32 s[out_row+1], s[out+1], s[out_row+1]
  buffer_base out_srd, out_row
  s_mov_b32 s[column], 0

next_columns:
  v_mov_b32_e32 v[sum], 0
  v_mov_b32_e32 v[sum+1], 0
  v_mov_b32_e32 v[sum+2], 0
  v_mov_b32_e32 v[sum+3], 0
  s_mov_b64 s[left:left+1], s[present:present+1]
  s_cmp_eq_u64 s[left:left+1], 0
  s_cbranch_scc1 parts_added

next_part:
  s_ff1_i32_b64 s[t], s[left:left+1]
  s_bitset0_b64 s[left:left+1], s[t]
  v_readlane_b32 s[weight_of_part], v[weight], s[t]
  v_readlane_b32 s[part_row], v[row_base], s[t]
  v_readlane_b32 s[part_row+1], v[row_base+1], s[t]
  buffer_base part_srd, part_row
  v_add_u32_e32 v[offset], s[column], v[lane]
  s_cmp_eq_u32 s[part_type], type_f32
  s_cbranch_scc0 part_of_16_bits
  load_columns dword, 2
  s_branch add_part
part_of_16_bits:
  load_columns ushort, 1
  s_cmp_eq_u32 s[part_type], type_f16
  s_cbranch_scc0 part_of_bf16
  .irp i, 0, 1, 2, 3
  v_cvt_f32_f16_e32 v[x+\i], v[x+\i]
  .endr
  s_branch add_part
part_of_bf16:
  .irp i, 0, 1, 2, 3
  v_lshlrev_b32_e32 v[x+\i], 16, v[x+\i]
  .endr
add_part:
  .irp i, 0, 1, 2, 3
  v_fmac_f32_e32 v[sum+\i], s[weight_of_part], v[x+\i]
  .endr
  s_cmp_eq_u64 s[left:left+1], 0
  s_cbranch_scc0 next_part

parts_added:
  .irp i, 0, 1, 2, 3
  v_mul_f32_e32 v[sum+\i], s[inverse_sum], v[sum+\i]
  .endr
  v_add_u32_e32 v[offset], s[column], v[lane]
  s_cmp_eq_u32 s[out_type], type_f32
  s_cbranch_scc0 out_of_16_bits
  store_columns dword, sum, 2
  s_branch columns_stored
out_of_16_bits:
  s_cmp_eq_u32 s[out_type], type_f16
  s_cbranch_scc0 out_of_bf16
  .irp i, 0, 1, 2, 3
  v_cvt_f16_f32_e32 v[x+\i], v[sum+\i]
  .endr
  s_branch store_16_bits
out_of_bf16:
  .irp i, 0, 1, 2, 3
  bf16_of_f32 x+\i, sum+\i, rounding
  .endr
store_16_bits:
  store_columns short, x, 1
columns_stored:
  s_add_u32 s[column], s[column], 256
  s_cmp_lt_u32 s[column], s[head_dim]
  s_cbranch_scc1 next_columns
done:
  s_endpgm
