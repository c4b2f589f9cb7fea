//# architectures gfx942 gfx950
// Converts between f32, f16, bf16 and the fp8 types. Towards fp8, real values are divided by a descale
// that is 1, given, or found here (the largest finite |x| over the type's largest value); from fp8 they are
// multiplied by one. Codes are those of the exact quotient, rounded once to nearest even.
//
// Grid: boxes of box_batch x box_seqs x box_heads rows: (along seq, along heads, along batch), one
// workgroup each, whose eight waves take every eighth row of a sequence. A lane takes four neighbouring
// elements of a row at a time, or one where they are not aligned for that. With `scale` 2 a box is what has one descale.
//
//# kernel convert_gfx942 workgroup=512 lds=32
//#   ptr    src             [batch, seqlen, heads, head_dim]
//#   ptr    dst
//#   i64[3] src_stride      bytes: batch, seq, head
//#   i64[3] dst_stride
//#   ptr    descale         f32; 0: not wanted (scale 0)
//#   i32[3] descale_stride  elements per step of the grid: batch, seq, head
//#   i32    seqlen
//#   i32    head_dim
//#   i32    scale           0 descale 1, which is written; 1 divide by descale; 2 find, write, divide;
//                           3 multiply by descale
//#   i32[3] box             rows: batch, seq, head
//#   i32    src_type        1 f32, 2 f16, 3 bf16, 4 f8_e4m3fn, 5 f8_e5m2, 6 f8_e4m3fnuz
//#   i32    dst_type
//#   i32    src_row_bytes   of head_dim elements
//#   i32    dst_row_bytes
//#   i32    nan_shift       towards fp8: attn_gfx942_fp8_codes, see encode_4_fp8
//#   f32    to_hardware     factor: 1/2 for OCP types, 1 for FNUZ; on gfx950 1 and 2
//#   f32    limit           largest |x * to_hardware|; infinity: none
//#   i32    nan_mask
//#   i32    sign_always     0x80808080: codes 0 and NaN carry a sign; 0: they do not
//#   f32    max_mantissa    the type's largest finite value is max_mantissa * 2^max_exponent
//#   f32    max_inverse     1 / max_mantissa, rounded
//#   i32    max_exponent
//#   f32    from_hardware   from fp8: factor 2 for OCP types, 1 for FNUZ; on gfx950 1 and 1/2
//#   i32    code_mask       from fp8: 0x7f7f7f7f for OCP types, -1 for FNUZ; on gfx950 for all 0x7f7f7f7f
//#   f32    inf_value       from e5m2: what stands for an infinity; from fp8: from where on for NaN; infinity: nothing
//#   f32    nan_value       on gfx950, from e4m3: what codes 0x80 (inf_value) and 0x7f (nan_value) mean
//#   i32    log2_per_lane   elements that a lane takes at a time: 2 four, for which head_dim is a multiple
//                             of 4, and src, dst, strides of what 4 elements take, up to 16; 0 one
//
// SGPRs: s0..s1 kernarg, s2..s4 workgroup, s8..s51 the arguments, s52..s87 (gfx950: s89) as named below.
// VGPRs: v0..v20 as named below. LDS: byte 4w: the largest |x| that wave w saw. Occupancy: 8 waves per SIMD.
.include "registers.inc"
.include "wave.inc"
.include "reduce.inc"
.include "convert.inc"

.set type_f32, 1
.set type_f16, 2
.set type_e4m3fn, 4
.set type_e5m2, 5
.set waves, 8

registers_at_entry seq_block, head_block, batch_block
sgpr arguments, 44, 8
.set src, arguments + convert_gfx942.src / 4
.set dst, arguments + convert_gfx942.dst / 4
.set src_stride, arguments + convert_gfx942.src_stride / 4
.set dst_stride, arguments + convert_gfx942.dst_stride / 4
.set descale, arguments + convert_gfx942.descale / 4
.set descale_stride, arguments + convert_gfx942.descale_stride / 4
.set seqlen, arguments + convert_gfx942.seqlen / 4
.set head_dim, arguments + convert_gfx942.head_dim / 4
.set scale, arguments + convert_gfx942.scale / 4
.set box, arguments + convert_gfx942.box / 4
.set src_type, arguments + convert_gfx942.src_type / 4
.set dst_type, arguments + convert_gfx942.dst_type / 4
.set src_row_bytes, arguments + convert_gfx942.src_row_bytes / 4
.set dst_row_bytes, arguments + convert_gfx942.dst_row_bytes / 4
.set nan_shift, arguments + convert_gfx942.nan_shift / 4
.set to_hardware, arguments + convert_gfx942.to_hardware / 4
.set limit, arguments + convert_gfx942.limit / 4
.set nan_mask, arguments + convert_gfx942.nan_mask / 4
.set sign_always, arguments + convert_gfx942.sign_always / 4
.set max_mantissa, arguments + convert_gfx942.max_mantissa / 4
.set max_inverse, arguments + convert_gfx942.max_inverse / 4
.set max_exponent, arguments + convert_gfx942.max_exponent / 4
.set from_hardware, arguments + convert_gfx942.from_hardware / 4
.set code_mask, arguments + convert_gfx942.code_mask / 4
.set inf_value, arguments + convert_gfx942.inf_value / 4
.set nan_value, arguments + convert_gfx942.nan_value / 4
.set log2_per_lane, arguments + convert_gfx942.log2_per_lane / 4
sgpr src_srd, 4, 4
sgpr dst_srd, 4, 4
sgpr wave
sgpr searching                          // 1: the largest |x| is being looked for; 0: converting
// Of the box; in the registers of the workgroup's id, which the box is found from.
.set row_in_seq, seq_block
.set row_in_batch, batch_block
.set row_in_head, head_block
sgpr rows                               // of the box along the sequence
sgpr columns                            // of a row, one for a lane: four elements or one
sgpr first_column                       // of the 64 in work
sgpr highest
sgpr abs_mask
sgpr rounding
sgpr quiet_nan
sgpr infinity
.if gfx950
sgpr above                              // see encode_4_fp8
.endif
sgpr gather, 2                          // v_perm selectors of encode_4_fp8
sgpr src_box, 2, 2
sgpr dst_box, 2, 2
sgpr row, 2, 2
sgpr t, 2, 2
sgpr mask, 8, 2                         // four lane masks

.set lane, 0
vgpr column
vgpr offset
vgpr x, 4, 2
vgpr codes
vgpr u, 4, 2
vgpr w, 2, 2
vgpr largest                            // |x| bits
vgpr divisor                            // the descale
vgpr divisor_mantissa                   // |divisor| = divisor_mantissa * 2^-divisor_exponent
vgpr divisor_exponent
vgpr divisor_inverse                    // about 1 / divisor_mantissa

// v[x] = v[x] / descale, such that rounding v[x] to fewer than 22 bits gives the rounded quotient: where the
// division is not exact, the last bit is 1 ("round to odd"). Quotients of 2^40 and more or 2^-40 and less,
// which every fp8 format rounds to its ends, are only about right.
.macro divide x
  v_ldexp_f32 v[w], |v[\x]|, v[divisor_exponent]
  v_mul_f32_e32 v[w+1], v[w], v[divisor_inverse]
  v_fma_f32 v[u], -v[w+1], v[divisor_mantissa], v[w]
  v_fma_f32 v[u], v[u], v[divisor_inverse], v[w+1]          // within 1 ulp
  v_fma_f32 v[w], -v[u], v[divisor_mantissa], v[w]          // the remainder, exact
  v_ashrrev_i32_e32 v[u+1], 31, v[w]
  v_add_u32_e32 v[u], v[u], v[u+1]                          // towards zero
  v_min_u32_e32 v[w], 1, v[w]
  v_or_b32_e32 v[u], v[u], v[w]
  v_add_u32_e32 v[w], 0xd4800000, v[w+1]                    // from the bits of 2^-40 on
  v_cmp_gt_u32_e32 vcc, 0x28000000, v[w]                    // to those of 2^40
  v_xor_b32_e32 v[w], v[\x], v[divisor]
  wait_states 1                                             // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e32 v[u], v[w+1], v[u], vcc
  v_bfi_b32 v[\x], s[abs_mask], v[u], v[w]
.endm

// v[x .. x+3] = the values of v[codes]. FNUZ codes are read as they are, NaN included; of OCP codes the
// magnitude, which is never the NaN of FNUZ. Only e5m2 has an infinity. gfx950 reads magnitudes as OCP's; those of FNUZ are half of
// that, but for the largest, and 0x80 is NaN.
.macro decode format
  v_and_b32_e32 v[u], s[code_mask], v[codes]
  unpack_4_fp8 x, u, w, \format
  v_lshlrev_b32_e32 v[u], 24, v[codes]
  v_lshlrev_b32_e32 v[u+1], 16, v[codes]
  v_lshlrev_b32_e32 v[u+2], 8, v[codes]
  v_mov_b32_e32 v[u+3], v[codes]
  .if gfx950
  v_mov_b32_e32 v[w], s[inf_value]
  v_mov_b32_e32 v[w+1], s[nan_value]
  // Instruction by instruction for all four, so that nothing waits for its lane mask.
  .ifc \format, fp8
  .irp i, 0, 1, 2, 3
  v_mul_f32_e32 v[x+\i], s[from_hardware], v[x+\i]
  .endr
  .irp i, 0, 1, 2, 3
  v_cmp_u_f32_e64 s[mask+2*\i:mask+2*\i+1], v[x+\i], v[x+\i]
  .endr
  .irp i, 0, 1, 2, 3
  v_cndmask_b32_e64 v[x+\i], v[x+\i], v[w+1], s[mask+2*\i:mask+2*\i+1]
  .endr
  .endif
  .irp i, 0, 1, 2, 3
  v_bfi_b32 v[x+\i], s[abs_mask], v[x+\i], v[u+\i]
  .endr
  .ifc \format, fp8
  .irp i, 0, 1, 2, 3
  v_cmp_class_f32_e64 s[mask+2*\i:mask+2*\i+1], v[x+\i], 32  // -0
  .endr
  .irp i, 0, 1, 2, 3
  v_cndmask_b32_e64 v[x+\i], v[x+\i], v[w], s[mask+2*\i:mask+2*\i+1]
  .endr
  .endif
  .else
  .ifc \format, bf8
  v_mov_b32_e32 v[w], s[infinity]
  .endif
  v_mov_b32_e32 v[w+1], s[quiet_nan]
  .irp i, 0, 1, 2, 3
  v_mul_f32_e32 v[x+\i], s[from_hardware], v[x+\i]
  .ifc \format, bf8
  v_cmp_eq_f32_e64 s[mask:mask+1], |v[x+\i]|, s[inf_value]
  .endif
  v_cmp_ge_f32_e64 s[mask+2:mask+3], |v[x+\i]|, s[nan_value]
  wait_states 2                                             // v_cmp -> v_cndmask
  .ifc \format, bf8
  v_cndmask_b32_e64 v[x+\i], v[x+\i], v[w], s[mask:mask+1]
  .endif
  v_cndmask_b32_e64 v[x+\i], v[x+\i], v[w+1], s[mask+2:mask+3]
  v_bfi_b32 v[x+\i], s[abs_mask], v[x+\i], v[u+\i]
  .endr
  .endif
.endm

kernel_entry convert_gfx942
  kernarg arguments, 16, convert_gfx942.src
  kernarg arguments + 16, 16, convert_gfx942.descale
  kernarg arguments + 32, 8, convert_gfx942.to_hardware
  kernarg arguments + 40, 4, convert_gfx942.code_mask
  wave_and_lane wave, lane
  s_mov_b32 s[abs_mask], 0x7fffffff
  s_mov_b32 s[rounding], 0x7fff
  s_mov_b32 s[quiet_nan], 0x7fc00000
  s_mov_b32 s[infinity], 0x7f800000
  s_mov_b32 s[gather], 0x0c0c0703
  s_mov_b32 s[gather+1], 0x07030c0c
  v_mov_b32_e32 v[largest], 0
  wait_scalar
  buffer_bytes src_srd, src_row_bytes
  buffer_bytes dst_srd, dst_row_bytes
  s_lshr_b32 s[columns], s[head_dim], s[log2_per_lane]
  .if gfx950
  s_cmp_eq_u32 s[limit], s[infinity]
  s_cselect_b32 s[above], 0x43f7ffff, s[infinity]           // below 496, twice 248, which FNUZ rounds to NaN
  .endif

  // The box: its first row, and how many rows of the sequence are left for it.
  s_mul_i32 s[row], s[seq_block], s[box+1]
  s_sub_u32 s[rows], s[seqlen], s[row]
  s_min_u32 s[rows], s[rows], s[box+1]
  s_mov_b64 s[src_box:src_box+1], s[src:src+1]
  s_mov_b64 s[dst_box:dst_box+1], s[dst:dst+1]
  s_mad_u64 src_box, row, src_stride + 2, t
  s_mad_u64 dst_box, row, dst_stride + 2, t
  s_mul_i32 s[row], s[batch_block], s[box]
  s_mad_u64 src_box, row, src_stride, t
  s_mad_u64 dst_box, row, dst_stride, t
  s_mul_i32 s[row], s[head_block], s[box+2]
  s_mad_u64 src_box, row, src_stride + 4, t
  s_mad_u64 dst_box, row, dst_stride + 4, t

  // Its descale. From here on s[descale:descale+1] is that one's address, or 0.
  s_cmp_eq_u64 s[descale:descale+1], 0
  s_cbranch_scc1 descale_found
  s_mul_i32 s[row], s[batch_block], s[descale_stride]
  s_mul_i32 s[t], s[seq_block], s[descale_stride+1]
  s_add_u32 s[row], s[row], s[t]
  s_mul_i32 s[t], s[head_block], s[descale_stride+2]
  s_add_u32 s[row], s[row], s[t]
  s_mov_b32 s[row+1], 0
  s_lshl_b64 s[row:row+1], s[row:row+1], 2
  s_add_u32 s[descale], s[descale], s[row]
  s_addc_u32 s[descale+1], s[descale+1], s[row+1]
descale_found:
  s_mov_b32 s[searching], 0
  s_cmp_eq_u32 s[scale], 2
  s_cbranch_scc1 search
  s_cmp_eq_u32 s[scale], 0
  s_cbranch_scc1 descale_is_one
  s_load_dword s[t], s[descale:descale+1], 0
  wait_scalar
  v_mov_b32_e32 v[divisor], s[t]
  s_branch descale_known
descale_is_one:
  v_mov_b32_e32 v[divisor], 1.0
  s_cmp_eq_u64 s[descale:descale+1], 0
  s_cbranch_scc1 visit_rows
  s_branch store_descale
search:
  s_mov_b32 s[searching], 1

// Visits the rows of the box, a first time to search, then to convert.
visit_rows:
  s_mov_b32 s[row_in_batch], 0
next_batch:
  s_mov_b32 s[row_in_head], 0
next_head:
  s_mov_b32 s[row_in_seq], s[wave]
  s_cmp_lt_u32 s[row_in_seq], s[rows]
  s_cbranch_scc0 seq_visited
next_row:
  s_mov_b64 s[row:row+1], s[src_box:src_box+1]
  s_mad_u64 row, row_in_batch, src_stride, t
  s_mad_u64 row, row_in_seq, src_stride + 2, t
  s_mad_u64 row, row_in_head, src_stride + 4, t
  buffer_base src_srd, row
  s_mov_b64 s[row:row+1], s[dst_box:dst_box+1]
  s_mad_u64 row, row_in_batch, dst_stride, t
  s_mad_u64 row, row_in_seq, dst_stride + 2, t
  s_mad_u64 row, row_in_head, dst_stride + 4, t
  buffer_base dst_srd, row
  s_mov_b32 s[first_column], 0

next_columns:
  v_add_u32_e32 v[column], s[first_column], v[lane]
  s_cmp_eq_u32 s[log2_per_lane], 0
  s_cbranch_scc1 load_one
  s_cmp_ge_u32 s[src_type], type_e4m3fn
  s_cbranch_scc1 load_fp8
  s_cmp_eq_u32 s[src_type], type_f32
  s_cbranch_scc0 load_16_bits
  v_lshlrev_b32_e32 v[offset], 4, v[column]
  buffer_load_dwordx4 v[x:x+3], v[offset], s[src_srd:src_srd+3], 0 offen
  wait_memory
  s_branch loaded
load_16_bits:
  v_lshlrev_b32_e32 v[offset], 3, v[column]
  buffer_load_dwordx2 v[u:u+1], v[offset], s[src_srd:src_srd+3], 0 offen
  wait_memory
from_16_bits:
  s_cmp_eq_u32 s[src_type], type_f16
  s_cbranch_scc0 load_bf16
  v_lshrrev_b32_e32 v[w], 16, v[u]
  v_lshrrev_b32_e32 v[w+1], 16, v[u+1]
  v_cvt_f32_f16_e32 v[x], v[u]
  v_cvt_f32_f16_e32 v[x+1], v[w]
  v_cvt_f32_f16_e32 v[x+2], v[u+1]
  v_cvt_f32_f16_e32 v[x+3], v[w+1]
  // A NaN of f16 has no sign.
  .irp i, 0, 1, 2, 3
  v_cmp_u_f32_e64 s[mask+2*\i:mask+2*\i+1], v[x+\i], v[x+\i]
  .endr
  v_mov_b32_e32 v[w], s[quiet_nan]
  .irp i, 0, 1, 2, 3
  v_cndmask_b32_e64 v[x+\i], v[x+\i], v[w], s[mask+2*\i:mask+2*\i+1]
  .endr
  s_branch loaded
load_bf16:
  v_lshlrev_b32_e32 v[x], 16, v[u]
  v_and_b32_e32 v[x+1], 0xffff0000, v[u]
  v_lshlrev_b32_e32 v[x+2], 16, v[u+1]
  v_and_b32_e32 v[x+3], 0xffff0000, v[u+1]
  s_branch loaded
load_fp8:
  v_lshlrev_b32_e32 v[offset], 2, v[column]
  buffer_load_dword v[codes], v[offset], s[src_srd:src_srd+3], 0 offen
  wait_memory
from_fp8:
  s_cmp_eq_u32 s[src_type], type_e5m2
  s_cbranch_scc1 decode_e5m2
  decode fp8
  s_branch loaded
decode_e5m2:
  decode bf8
  s_branch loaded

// One element; the other three of the lane are 0.
load_one:
  s_cmp_ge_u32 s[src_type], type_e4m3fn
  s_cbranch_scc1 load_one_fp8
  s_cmp_eq_u32 s[src_type], type_f32
  s_cbranch_scc0 load_one_16_bits
  v_lshlrev_b32_e32 v[offset], 2, v[column]
  buffer_load_dword v[x], v[offset], s[src_srd:src_srd+3], 0 offen
  .irp i, 1, 2, 3
  v_mov_b32_e32 v[x+\i], 0
  .endr
  wait_memory
  s_branch loaded
load_one_16_bits:
  v_lshlrev_b32_e32 v[offset], 1, v[column]
  buffer_load_ushort v[u], v[offset], s[src_srd:src_srd+3], 0 offen
  v_mov_b32_e32 v[u+1], 0
  wait_memory
  s_branch from_16_bits
load_one_fp8:
  buffer_load_ubyte v[codes], v[column], s[src_srd:src_srd+3], 0 offen
  wait_memory
  s_branch from_fp8
loaded:

  s_cmp_eq_u32 s[searching], 1
  s_cbranch_scc0 convert
  .irp i, 0, 1, 2, 3
  v_and_b32_e32 v[u+\i], s[abs_mask], v[x+\i]
  .endr
  .irp i, 0, 1, 2, 3
  v_cmp_gt_u32_e64 s[mask+2*\i:mask+2*\i+1], s[infinity], v[u+\i]     // finite
  .endr
  .irp i, 0, 1, 2, 3
  v_cndmask_b32_e64 v[u+\i], 0, v[u+\i], s[mask+2*\i:mask+2*\i+1]
  v_max_u32_e32 v[largest], v[largest], v[u+\i]
  .endr
  s_branch columns_done

convert:
  s_cmp_eq_u32 s[scale], 0
  s_cbranch_scc1 scaled
  s_cmp_eq_u32 s[scale], 3
  s_cbranch_scc1 multiply
  divide x
  divide x+1
  divide x+2
  divide x+3
  s_branch scaled
multiply:
  .irp i, 0, 1, 2, 3
  v_mul_f32_e32 v[x+\i], v[divisor], v[x+\i]
  .endr
scaled:
  s_cmp_ge_u32 s[dst_type], type_e4m3fn
  s_cbranch_scc1 store_fp8
  s_cmp_eq_u32 s[dst_type], type_f32
  s_cbranch_scc0 store_16_bits
  s_cmp_eq_u32 s[log2_per_lane], 0
  s_cbranch_scc1 store_one_f32
  v_lshlrev_b32_e32 v[offset], 4, v[column]
  buffer_store_dwordx4 v[x:x+3], v[offset], s[dst_srd:dst_srd+3], 0 offen
  s_branch columns_done
store_16_bits:
  s_cmp_eq_u32 s[dst_type], type_f16
  s_cbranch_scc0 store_bf16
  .irp i, 0, 1, 2, 3
  v_cvt_f16_f32_e32 v[u+\i], v[x+\i]
  .endr
  s_branch pack_16_bits
store_bf16:
  .irp i, 0, 1, 2, 3
  bf16_of_f32 u+\i, x+\i, rounding
  .endr
pack_16_bits:
  s_cmp_eq_u32 s[log2_per_lane], 0
  s_cbranch_scc1 store_one_16_bits
  v_lshl_or_b32 v[u], v[u+1], 16, v[u]
  v_lshl_or_b32 v[u+1], v[u+3], 16, v[u+2]
  v_lshlrev_b32_e32 v[offset], 3, v[column]
  buffer_store_dwordx2 v[u:u+1], v[offset], s[dst_srd:dst_srd+3], 0 offen
  s_branch columns_done
store_fp8:
  s_cmp_eq_u32 s[dst_type], type_e5m2
  s_cbranch_scc1 encode_e5m2
  .if gfx950
  encode_4_fp8 codes, x, u, w, mask, nan_shift, gather, fp8, above
  .else
  encode_4_fp8 codes, x, u, w, mask, nan_shift, gather, fp8
  .endif
  s_branch encoded
encode_e5m2:
  encode_4_fp8 codes, x, u, w, mask, nan_shift, gather, bf8
encoded:
  s_cmp_eq_u32 s[log2_per_lane], 0
  s_cbranch_scc1 store_one_fp8
  v_lshlrev_b32_e32 v[offset], 2, v[column]
  buffer_store_dword v[codes], v[offset], s[dst_srd:dst_srd+3], 0 offen
  s_branch columns_done

store_one_f32:
  v_lshlrev_b32_e32 v[offset], 2, v[column]
  buffer_store_dword v[x], v[offset], s[dst_srd:dst_srd+3], 0 offen
  s_branch columns_done
store_one_16_bits:
  v_lshlrev_b32_e32 v[offset], 1, v[column]
  buffer_store_short v[u], v[offset], s[dst_srd:dst_srd+3], 0 offen
  s_branch columns_done
store_one_fp8:
  buffer_store_byte v[codes], v[column], s[dst_srd:dst_srd+3], 0 offen

columns_done:
  s_add_u32 s[first_column], s[first_column], 64
  s_cmp_lt_u32 s[first_column], s[columns]
  s_cbranch_scc1 next_columns
  s_add_u32 s[row_in_seq], s[row_in_seq], waves
  s_cmp_lt_u32 s[row_in_seq], s[rows]
  s_cbranch_scc1 next_row
seq_visited:
  s_add_u32 s[row_in_head], s[row_in_head], 1
  s_cmp_lt_u32 s[row_in_head], s[box+2]
  s_cbranch_scc1 next_head
  s_add_u32 s[row_in_batch], s[row_in_batch], 1
  s_cmp_lt_u32 s[row_in_batch], s[box]
  s_cbranch_scc1 next_batch
  s_cmp_eq_u32 s[searching], 1
  s_cbranch_scc0 done
  s_mov_b32 s[searching], 0

  // The largest |x| of all waves, in every lane.
  wave_reduce max_u32, highest, largest
  wait_states 2                         // v_readlane -> VALU reads s[highest]
  v_mov_b32_e32 v[w], s[highest]
  s_lshl_b32 s[t], s[wave], 2
  v_mov_b32_e32 v[offset], s[t]
  s_mov_b64 exec, 1
  ds_write_b32 v[offset], v[w]
  s_mov_b64 exec, -1
  barrier_after_lds
  v_mov_b32_e32 v[offset], 0
  ds_read_b128 v[x:x+3], v[offset]
  ds_read_b128 v[u:u+3], v[offset] offset:16
  wait_lds 1
  v_max_u32_e32 v[largest], v[x], v[x+1]
  v_max3_u32 v[largest], v[largest], v[x+2], v[x+3]
  wait_lds
  v_max3_u32 v[largest], v[largest], v[u], v[u+1]
  v_max3_u32 v[largest], v[largest], v[u+2], v[u+3]

  // descale = largest / max, rounded once; at least the smallest positive float; 1 for a largest of 0.
  // The quotient of the mantissas is rounded to nearest, or to odd where 2^exponent makes it subnormal.
  v_frexp_mant_f32_e32 v[x], v[largest]
  v_frexp_exp_i32_f32_e32 v[x+1], v[largest]
  v_mov_b32_e32 v[u], s[max_mantissa]
  v_mov_b32_e32 v[u+1], s[max_inverse]
  v_subrev_u32_e32 v[x+1], s[max_exponent], v[x+1]
  v_mul_f32_e32 v[w], v[x], v[u+1]
  v_fma_f32 v[w+1], -v[w], v[u], v[x]
  v_fma_f32 v[w], v[w+1], v[u+1], v[w]                      // nearest: max_inverse is
  v_fma_f32 v[w+1], -v[w], v[u], v[x]                       // the remainder, exact
  v_cmp_gt_i32_e32 vcc, -124, v[x+1]
  v_ashrrev_i32_e32 v[x+2], 31, v[w+1]
  v_add_u32_e32 v[x+2], v[w], v[x+2]
  v_min_u32_e32 v[w+1], 1, v[w+1]
  v_or_b32_e32 v[x+2], v[x+2], v[w+1]
  v_cndmask_b32_e32 v[w], v[w], v[x+2], vcc
  v_ldexp_f32 v[divisor], v[w], v[x+1]
  v_cmp_eq_u32_e32 vcc, 0, v[largest]
  v_max_u32_e32 v[divisor], 1, v[divisor]
  wait_states 1                                             // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e64 v[divisor], v[divisor], 1.0, vcc

store_descale:
  s_cmp_eq_u32 s[wave], 0
  s_cbranch_scc0 descale_known
  s_mov_b64 exec, 1
  v_mov_b32_e32 v[offset], 0
  global_store_dword v[offset], v[divisor], s[descale:descale+1]
  s_mov_b64 exec, -1
descale_known:
  v_frexp_exp_i32_f32_e32 v[divisor_exponent], v[divisor]
  v_frexp_mant_f32_e64 v[divisor_mantissa], |v[divisor]|
  v_sub_u32_e32 v[divisor_exponent], 0, v[divisor_exponent]
  v_rcp_f32_e32 v[divisor_inverse], v[divisor_mantissa]
  s_branch visit_rows
done:
  s_endpgm
