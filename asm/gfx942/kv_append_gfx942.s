//# architectures gfx942 gfx950
// Appends new tokens to a KV cache: rotates K and q, divides by descales, converts to the cache's types. A workgroup has one
// token, a lane 8 neighbouring elements of a head, head_threads lanes a head, chunk_heads heads at a time of K, V or q.
//
// Grid: (tokens, so many that share a token's chunks); with lengths_only (sequences / threads).
//
//# kernel kv_append_gfx942 workgroup=512 workgroup_id=xy
//# arguments append_tensor.inc
//#   i64[16] v_tensor        the same of V
//#   i64[16] q_tensor        and of q
//#   ptr    rotary_cos       f32 [positions, half]
//#   ptr    rotary_sin
//#   ptr    cu_seqlens_new   0: padded
//#   ptr    seqlens          of the cache
//#   ptr    seqlens_out      0: not written by this launch
//#   ptr    block_table      [batch, max_pages]; 0: not paged
//#   i32    total_new        packed: tokens
//#   i32    seqlen_new       padded: tokens of a sequence; packed: the most
//#   i32    seqlen_magic     of by_seqlen_new
//#   i32    seqlen_shift
//#   i32    batch
//#   i32    capacity
//#   i32    num_pages
//#   i32    page_size
//#   i32    page_magic
//#   i32    page_shift
//#   i32    max_pages
//#   i32    chunk_heads
//#   i32    head_magic       of by_head_threads
//#   i32    head_shift
//#   i32    head_threads     a multiple of 4, so that ggml blocks are those of a quad
//#   i32    chunk_step       workgroups of a token; with lengths_only threads of a workgroup
//#   i32    new_type         1 f32, 2 f16, 3 bf16
//#   i32    half             pairs to rotate
//#   i32    interleaved      1: neighbours are pairs; 0: elements `half` apart
//#   i32    aligned          all that a lane has at once can be moved by 8 or 16 bytes
//#   i32    lengths_only     the launch writes seqlens_out, nothing else
//#   i32    reserved_end
//#   ptr    slot_mapping     i64 [batch, seqlen_new]: page * page_size + row, negative: nowhere; 0: by seqlens and block_table
//
// SGPRs: s0..s1 kernarg, s2, s3 workgroup, the rest as named below. VGPRs: as named below. No LDS. Occupancy: 8 waves per SIMD.
.include "registers.inc"
.include "wave.inc"
.include "convert.inc"
.include "lengths.inc"

.set type_f32, 1
.set type_f16, 2
.set type_bf16, 3
.set type_e5m2, 5
.set type_q8_0, 7
.set type_q4_0, 8
.set tensor_bytes, 128

registers_from 2, 1
sgpr token                              // then the row of it in k_new
sgpr chunk
sgpr args, 34, 4
.set rotary_cos, args
.set rotary_sin, args + 2
.set cu_seqlens_new, args + 4
.set seqlens, args + 6
.set seqlens_out, args + 8
.set block_table, args + 10
.set total_new, args + 12
.set seqlen_new, args + 13
.set by_seqlen_new, args + 14
.set batch, args + 16
.set capacity, args + 17
.set num_pages, args + 18
.set page_size, args + 19
.set by_page_size, args + 20
.set max_pages, args + 22
.set chunk_heads, args + 23
.set by_head_threads, args + 24
.set head_threads, args + 26
.set chunk_step, args + 27
.set new_type, args + 28
.set half, args + 29
.set interleaved, args + 30
.set aligned, args + 31
.set lengths_only, args + 32
sgpr tensor, 32, 4
.set src, tensor
.set dst, tensor + 2
.set src_stride, tensor + 4
.set dst_stride, tensor + 10
.set descale, tensor + 16               // its address, and what it is per
.set dst_type, tensor + 22
.set dim, tensor + 23
.set heads, tensor + 24
.set chunks, tensor + 25
.set fp8, tensor + 26                   // attn_gfx942_fp8_codes
sgpr sequence
sgpr entry                              // of the token in k_new
sgpr first
sgpr length
sgpr position
sgpr cache_entry
sgpr cache_row
sgpr which                              // 0 K, 1 V, 2 q
sgpr rest                               // of the chunks, from this tensor's on
sgpr index
sgpr gather, 2                          // v_perm selectors of encode_4_fp8
sgpr class_finite                       // of v_cmp_class: all but NaN and infinities
sgpr magnitude
sgpr at, 2, 2                           // the tensor's arguments
sgpr there, 2, 2                        // lanes with something to do
sgpr t, 2, 2
sgpr mask, 8, 2

.set thread, 0
vgpr own                                // which of the chunk's heads
vgpr d                                  // first element
vgpr left                               // elements from it on, 8 at most count
vgpr head
vgpr from, 2, 2
vgpr to, 2, 2
vgpr x, 8, 2
vgpr y, 8, 2
vgpr cosine, 8, 2
vgpr sine, 8, 2
vgpr u, 6, 2
vgpr w, 4, 2
.set by, cosine                         // the descale

// EXEC = lanes of s[there] that have element k; all with `aligned`, where lanes have 8 or none.
.macro lanes_of_element k
  v_cmp_lt_u32_e32 vcc, \k, v[left]
  s_and_b64 exec, vcc, s[there:there+1]
.endm

// Eight elements of 16 bits, as new_type has them, become f32.
.macro widen x
  s_cmp_eq_u32 s[new_type], type_f16
  s_cbranch_scc0 from_bf16_\@
  .set i, 0
  .rept 8
  v_cvt_f32_f16_e32 v[\x+i], v[\x+i]
  .set i, i + 1
  .endr
  s_branch widened_\@
from_bf16_\@:
  .set i, 0
  .rept 8
  v_lshlrev_b32_e32 v[\x+i], 16, v[\x+i]
  .set i, i + 1
  .endr
widened_\@:
.endm

// v[to ..] = 8 elements of new_type at v[at:at+1], as f32; 0 where there are none.
.macro load_elements to, at
  .set i, 0
  .rept 8
  v_mov_b32_e32 v[\to+i], 0
  .set i, i + 1
  .endr
  s_cmp_eq_u32 s[aligned], 0
  s_cbranch_scc1 one_by_one_\@
  s_cmp_eq_u32 s[new_type], type_f32
  s_cbranch_scc0 of_16_bits_\@
  global_load_dwordx4 v[\to:\to+3], v[\at:\at+1], off
  global_load_dwordx4 v[\to+4:\to+7], v[\at:\at+1], off offset:16
  wait_memory
  s_branch loaded_\@
of_16_bits_\@:
  global_load_dwordx4 v[w:w+3], v[\at:\at+1], off
  wait_memory
  .set i, 0
  .rept 4
  v_and_b32_e32 v[\to+2*i], 0xffff, v[w+i]
  v_lshrrev_b32_e32 v[\to+2*i+1], 16, v[w+i]
  .set i, i + 1
  .endr
  s_branch widen_\@
one_by_one_\@:
  s_cmp_eq_u32 s[new_type], type_f32
  s_cbranch_scc0 shorts_\@
  .set i, 0
  .rept 8
  lanes_of_element i
  global_load_dword v[\to+i], v[\at:\at+1], off offset:4*i
  .set i, i + 1
  .endr
  s_mov_b64 exec, s[there:there+1]
  wait_memory
  s_branch loaded_\@
shorts_\@:
  .set i, 0
  .rept 8
  lanes_of_element i
  global_load_ushort v[\to+i], v[\at:\at+1], off offset:2*i
  .set i, i + 1
  .endr
  s_mov_b64 exec, s[there:there+1]
  wait_memory
widen_\@:
  widen \to
loaded_\@:
.endm

// v[y ..] = the partners of the elements, `bytes` each: of those below half from v[u:u+1], of the others from v[u+2:u+3].
.macro load_partners width, bytes
  .set i, 0
  .rept 8
  s_sub_i32 s[t], s[half], i
  v_cmp_gt_i32_e64 s[mask+2:mask+3], s[t], v[d]
  lanes_of_element i
  v_cndmask_b32_e64 v[w], v[u+2], v[u], s[mask+2:mask+3]
  v_cndmask_b32_e64 v[w+1], v[u+3], v[u+1], s[mask+2:mask+3]
  global_load_\width v[y+i], v[w:w+1], off offset:\bytes*i
  s_mov_b64 exec, s[there:there+1]
  .set i, i + 1
  .endr
.endm

// v[to ..] = floats of a rotary table, whose row of the position begins at s[table:table+1], of the pairs that the lane's
// elements belong to. v[u]: 4 * the first pair, for `interleaved`; without that they are on their way.
.macro load_table to, table
  .set i, 0
  .rept 8
  v_mov_b32_e32 v[\to+i], 0
  .set i, i + 1
  .endr
  s_cmp_eq_u32 s[interleaved], 0
  s_cbranch_scc1 halves_\@
  .set i, 0
  .rept 4
  lanes_of_element 2*i
  global_load_dword v[\to+2*i], v[u], s[\table:\table+1] offset:4*i
  .set i, i + 1
  .endr
  s_mov_b64 exec, s[there:there+1]
  wait_memory
  .irp j, 1, 3, 5, 7
  v_mov_b32_e32 v[\to+\j], v[\to+\j-1]
  .endr
  s_branch table_loaded_\@
halves_\@:
  .set i, 0
  .rept 8
  lanes_of_element i
  v_add_u32_e32 v[u+2], i, v[d]
  v_cmp_gt_u32_e32 vcc, s[half], v[u+2]
  v_subrev_u32_e32 v[u+3], s[half], v[u+2]
  v_nop                                 // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e32 v[u+2], v[u+3], v[u+2], vcc
  v_lshlrev_b32_e32 v[u+2], 2, v[u+2]
  global_load_dword v[\to+i], v[u+2], s[\table:\table+1]
  .set i, i + 1
  .endr
  s_mov_b64 exec, s[there:there+1]
table_loaded_\@:
.endm

// v[result] = v[n] / v[by], rounded to nearest. Clobbers v[u] .. v[u+4], VCC.
.macro divide_f32 result, n, by
  v_div_scale_f32 v[u], s[t:t+1], v[\by], v[\by], v[\n]
  v_div_scale_f32 v[u+1], vcc, v[\n], v[\by], v[\n]
  v_rcp_f32_e32 v[u+2], v[u]
  wait_states 1                         // trans -> VALU
  v_fma_f32 v[u+3], -v[u], v[u+2], 1.0
  v_fma_f32 v[u+2], v[u+3], v[u+2], v[u+2]
  v_mul_f32_e32 v[u+3], v[u+1], v[u+2]
  v_fma_f32 v[u+4], -v[u], v[u+3], v[u+1]
  v_fma_f32 v[u+3], v[u+4], v[u+2], v[u+3]
  v_fma_f32 v[u], -v[u], v[u+3], v[u+1]
  v_div_fmas_f32 v[u], v[u], v[u+2], v[u+3]
  v_div_fixup_f32 v[\result], v[u], v[\by], v[\n]
.endm

// v[q] = the quotient v[n] / v[by] of it, nearest, towards zero, with a last bit of 1 where it is not exact.
.macro round_to_odd q, n, by
  v_fma_f32 v[u], -v[\q], v[\by], v[\n]               // the remainder, of the sign of v[n] but beyond it
  v_xor_b32_e32 v[u+1], v[u], v[\n]
  v_ashrrev_i32_e32 v[u+1], 31, v[u+1]                  // -1: beyond
  v_cmp_lg_f32_e32 vcc, 0, v[u]                         // neither 0 nor NaN
  v_add_u32_e32 v[u+1], v[\q], v[u+1]
  v_or_b32_e32 v[u+1], 1, v[u+1]
  v_cndmask_b32_e32 v[\q], v[\q], v[u+1], vcc
.endm

// v[x] = op of v[x] and that of another lane of the quad. VALU writes VGPR -> DPP: 2 wait states.
.macro with_lane_of_quad op, x, lanes:vararg
  v_\op\()_dpp v[\x], v[\x], v[\x] quad_perm:[\lanes] row_mask:0xf bank_mask:0xf
.endm

kernel_entry kv_append_gfx942
  kernarg args, 16, kv_append_gfx942.rotary_cos
  kernarg args + 16, 16, kv_append_gfx942.batch
  kernarg lengths_only, 1, kv_append_gfx942.lengths_only
  v_and_b32_e32 v[thread], 0x3ff, v0
  s_mov_b32 s[gather], 0x0c0c0703
  s_mov_b32 s[gather+1], 0x07030c0c
  s_mov_b32 s[class_finite], 0x1f8
  s_mov_b32 s[magnitude], 0x7fffffff
  wait_scalar
  s_cmp_eq_u32 s[lengths_only], 0
  s_cbranch_scc0 advance_all

  // The token: token `first` .. of its sequence.
  s_cmp_eq_u64 s[cu_seqlens_new:cu_seqlens_new+1], 0
  s_cbranch_scc0 find_sequence
  s_lshl_b32 s[t], s[token], 1
  s_mul_hi_u32 s[t], s[t], s[by_seqlen_new]
  s_lshr_b32 s[sequence], s[t], s[by_seqlen_new+1]
  s_mov_b32 s[entry], s[sequence]
  s_mul_i32 s[t], s[sequence], s[seqlen_new]
  s_sub_u32 s[token], s[token], s[t]
  s_mov_b32 s[first], s[token]
  s_mov_b32 s[rest], s[seqlen_new]      // tokens that the sequence gets
  kernarg at, 2, kv_append_gfx942.slot_mapping
  wait_scalar
  s_cmp_eq_u64 s[at:at+1], 0
  s_cbranch_scc1 token_found
  // The token's slot, which is its position in one long row of pages.
  s_add_u32 s[t], s[t], s[token]
  s_mov_b32 s[t+1], 0
  s_lshl_b64 s[t:t+1], s[t:t+1], 3
  s_add_u32 s[at], s[at], s[t]
  s_addc_u32 s[at+1], s[at+1], s[t+1]
  s_load_dwordx2 s[at:at+1], s[at:at+1], 0
  wait_scalar
  s_mov_b32 s[position], s[at]
  s_cmp_lg_u32 s[at+1], 0
  s_cbranch_scc1 done                   // negative, or beyond all pages
  s_cmp_lt_i32 s[position], 0
  s_cbranch_scc1 done                   // the same
  s_mov_b64 s[block_table:block_table+1], 0
  s_branch find_page
find_sequence:                          // the first whose end is behind the token, among 64 of equal parts at a time
  v_mbcnt_lo_u32_b32 v[u], -1, 0
  v_mbcnt_hi_u32_b32 v[u], -1, v[u]
  v_add_u32_e32 v[u], 1, v[u]
  s_mov_b32 s[sequence], 0
  s_mov_b32 s[rest], s[batch]
narrow_down:
  s_cmp_lt_u32 s[sequence], s[rest]
  s_cbranch_scc0 sequence_found
  s_sub_u32 s[index], s[rest], s[sequence]
  s_add_u32 s[index], s[index], 63
  s_lshr_b32 s[index], s[index], 6      // sequences of a part
  v_mul_lo_u32 v[u+1], v[u], s[index]
  v_add_u32_e32 v[u+1], s[sequence], v[u+1]
  v_min_u32_e32 v[u+1], s[rest], v[u+1]
  v_subrev_u32_e32 v[u+1], 1, v[u+1]    // the last of the lane's part
  v_lshlrev_b32_e32 v[u+2], 2, v[u+1]
  global_load_dword v[u+2], v[u+2], s[cu_seqlens_new:cu_seqlens_new+1] offset:4
  wait_memory
  v_cmp_lt_i32_e32 vcc, s[token], v[u+2]
  s_cmp_eq_u64 vcc, 0
  s_cbranch_scc1 done                   // the token is nobody's
  s_ff1_i32_b64 s[t], vcc
  v_readlane_b32 s[rest], v[u+1], s[t]
  s_mul_i32 s[t], s[t], s[index]
  s_add_u32 s[sequence], s[sequence], s[t]
  s_branch narrow_down
sequence_found:
  s_lshl_b32 s[index], s[sequence], 2
  packed_span first, rest, cu_seqlens_new, total_new, seqlen_new, index, t
  s_sub_i32 s[first], s[token], s[first]
  s_cmp_lt_u32 s[first], s[rest]        // behind its beginning, too
  s_cbranch_scc0 done
  s_mov_b32 s[entry], 0
token_found:
  s_lshl_b32 s[index], s[sequence], 2
  s_mov_b32 s[length], s[capacity]
  padded_length length, seqlens, index, t
  s_cmp_eq_u64 s[seqlens_out:seqlens_out+1], 0
  s_cbranch_scc1 advanced
  // Which may be where the lengths are; no other workgroup reads this one.
  s_barrier
  s_add_u32 s[t], s[length], s[rest]
  s_min_u32 s[t], s[t], s[capacity]
  v_mov_b32_e32 v[u], s[index]
  v_mov_b32_e32 v[u+1], s[t]
  v_cmp_eq_u32_e32 vcc, 0, v[thread]
  s_mov_b64 exec, vcc
  global_store_dword v[u], v[u+1], s[seqlens_out:seqlens_out+1]
  s_mov_b64 exec, -1
advanced:
  s_sub_u32 s[t], s[capacity], s[length]
  s_cmp_lt_u32 s[first], s[t]
  s_cbranch_scc0 done                   // no room
  s_add_u32 s[position], s[length], s[first]
  s_mov_b32 s[cache_entry], s[sequence]
  s_mov_b32 s[cache_row], s[position]
  s_cmp_eq_u64 s[block_table:block_table+1], 0
  s_cbranch_scc1 place_found
find_page:
  s_lshl_b32 s[t], s[position], 1
  s_mul_hi_u32 s[t], s[t], s[by_page_size]
  s_lshr_b32 s[index], s[t], s[by_page_size+1]
  s_mul_i32 s[t], s[index], s[page_size]
  s_sub_u32 s[cache_row], s[position], s[t]
  s_mov_b32 s[cache_entry], s[index]
  s_cmp_eq_u64 s[block_table:block_table+1], 0
  s_cbranch_scc1 page_found
  s_mul_i32 s[t], s[sequence], s[max_pages]
  s_mul_hi_u32 s[t+1], s[sequence], s[max_pages]
  s_add_u32 s[t], s[t], s[index]
  s_addc_u32 s[t+1], s[t+1], 0
  s_lshl_b64 s[t:t+1], s[t:t+1], 2
  s_add_u32 s[t], s[t], s[block_table]
  s_addc_u32 s[t+1], s[t+1], s[block_table+1]
  s_load_dword s[cache_entry], s[t:t+1], 0
  wait_scalar
page_found:
  s_cmp_lt_u32 s[cache_entry], s[num_pages]
  s_cselect_b32 s[cache_entry], s[cache_entry], -1      // nowhere
place_found:
  // The position's rows of the tables.
  s_mul_i32 s[t], s[position], s[half]
  s_mul_hi_u32 s[t+1], s[position], s[half]
  s_lshl_b64 s[t:t+1], s[t:t+1], 2
  .irp table, rotary_cos, rotary_sin
  s_add_u32 s[\table], s[\table], s[t]
  s_addc_u32 s[\table+1], s[\table+1], s[t+1]
  .endr
  v_lshlrev_b32_e32 v[own], 1, v[thread]
  v_mul_hi_u32 v[own], v[own], s[by_head_threads]
  v_lshrrev_b32_e32 v[own], s[by_head_threads+1], v[own]
  v_mul_lo_u32 v[d], v[own], s[head_threads]
  v_sub_u32_e32 v[d], v[thread], v[d]
  v_lshlrev_b32_e32 v[d], 3, v[d]
  s_mov_b32 s[which], 0
  s_mov_b64 s[at:at+1], s[0:1]

next_tensor:
  s_load_dwordx16 s[tensor:tensor+15], s[at:at+1], 0
  s_load_dwordx8 s[tensor+16:tensor+23], s[at:at+1], 64
  s_load_dwordx8 s[tensor+24:tensor+31], s[at:at+1], 96
  wait_scalar
next_chunk:
  s_cmp_lt_u32 s[chunk], s[chunks]
  s_cbranch_scc1 chunk_found
  s_sub_u32 s[chunk], s[chunk], s[chunks]
  s_add_u32 s[which], s[which], 1
  s_add_u32 s[at], s[at], tensor_bytes
  s_addc_u32 s[at+1], s[at+1], 0
  s_cmp_lt_u32 s[which], 3
  s_cbranch_scc1 next_tensor
done:
  s_endpgm
chunk_found:
  s_mul_i32 s[t], s[chunk], s[chunk_heads]
  v_add_u32_e32 v[head], s[t], v[own]
  v_sub_u32_e32 v[left], s[dim], v[d]
  v_cmp_gt_u32_e32 vcc, s[chunk_heads], v[own]
  v_cmp_gt_u32_e64 s[there:there+1], s[heads], v[head]
  s_and_b64 s[there:there+1], vcc, s[there:there+1]
  v_cmp_gt_u32_e32 vcc, s[dim], v[d]
  s_and_b64 s[there:there+1], vcc, s[there:there+1]
  // q goes where it came from; K and V nowhere, if the page is none.
  s_cmp_eq_u32 s[which], 2
  s_cselect_b32 s[index], s[entry], s[cache_entry]
  s_cselect_b32 s[rest], s[token], s[cache_row]
  s_cselect_b32 s[t], 0, s[cache_entry]
  s_cmp_eq_u32 s[t], -1
  s_cselect_b32 s[t], 0, -1
  s_mov_b32 s[t+1], s[t]
  s_and_b64 s[there:there+1], s[there:there+1], s[t:t+1]
  s_mad_u64 src, entry, src_stride, t
  s_mad_u64 src, token, src_stride + 2, t
  s_mad_u64 dst, index, dst_stride, t
  s_mad_u64 dst, rest, dst_stride + 2, t
  s_mov_b64 exec, s[there:there+1]
  v_mov_b32_e32 v[from], s[src]
  v_mov_b32_e32 v[from+1], s[src+1]
  v_mov_b32_e32 v[to], s[dst]
  v_mov_b32_e32 v[to+1], s[dst+1]
  v_mad_u64_u32 v[from:from+1], s[t:t+1], v[head], s[src_stride+4], v[from:from+1]
  v_mad_u64_u32 v[to:to+1], s[t:t+1], v[head], s[dst_stride+4], v[to:to+1]
  s_cmp_eq_u32 s[new_type], type_f32
  s_cselect_b32 s[index], 2, 1          // log2 of an element's bytes
  v_lshlrev_b32_e32 v[w], s[index], v[d]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[from:from+1], v[from:from+1], 0, v[w:w+1]
  load_elements x, from

  // Rotation of the elements below 2 half.
  s_cmp_eq_u32 s[which], 1
  s_cbranch_scc1 rotated
  s_cmp_eq_u32 s[half], 0
  s_cbranch_scc1 rotated
  s_mov_b64 s[mask:mask+1], s[there:there+1]
  v_mov_b32_e32 v[head], v[left]        // no more needed
  s_lshl_b32 s[rest], s[half], 1
  v_sub_u32_e32 v[left], s[rest], v[d]
  v_cmp_gt_u32_e32 vcc, s[rest], v[d]
  s_and_b64 s[there:there+1], vcc, s[there:there+1]
  s_mov_b64 exec, s[there:there+1]
  s_cbranch_execz not_rotated
  v_lshlrev_b32_e32 v[u], 1, v[d]       // interleaved: 4 * d / 2
  load_table cosine, rotary_cos
  load_table sine, rotary_sin
  s_cmp_eq_u32 s[interleaved], 0
  s_cbranch_scc1 find_partners
  .irp i, 0, 2, 4, 6
  v_xor_b32_e32 v[y+\i], 0x80000000, v[x+\i+1]
  v_mov_b32_e32 v[y+\i+1], v[x+\i]
  .endr
  s_branch partners_found
find_partners:
  // Elements below half have theirs half an element row further on, the others before.
  s_lshl_b32 s[t], s[half], s[index]
  v_mov_b32_e32 v[w], s[t]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[u:u+1], v[w:w+1], 0, v[from:from+1]
  v_sub_u32_e32 v[w], 0, v[w]           // below 0
  v_mov_b32_e32 v[w+1], -1
  v_lshl_add_u64 v[u+2:u+3], v[w:w+1], 0, v[from:from+1]
  .set i, 0
  .rept 8
  v_mov_b32_e32 v[y+i], 0
  .set i, i + 1
  .endr
  s_cmp_eq_u32 s[new_type], type_f32
  s_cbranch_scc0 partners_of_16_bits
  load_partners dword, 4
  wait_memory
  s_branch signs_of_partners
partners_of_16_bits:
  load_partners ushort, 2
  wait_memory
  widen y
signs_of_partners:
  .set i, 0
  .rept 8
  s_sub_i32 s[t], s[half], i
  v_cmp_gt_i32_e32 vcc, s[t], v[d]
  v_xor_b32_e32 v[u], 0x80000000, v[y+i]
  v_nop                                 // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e32 v[y+i], v[y+i], v[u], vcc
  .set i, i + 1
  .endr
partners_found:
  .set i, 0
  .rept 8
  lanes_of_element i
  v_mul_f32_e32 v[y+i], v[y+i], v[sine+i]
  v_fma_f32 v[x+i], v[x+i], v[cosine+i], v[y+i]
  .set i, i + 1
  .endr
not_rotated:
  s_mov_b64 s[there:there+1], s[mask:mask+1]
  s_mov_b64 exec, s[there:there+1]
  v_mov_b32_e32 v[left], v[head]
  s_mul_i32 s[t], s[chunk], s[chunk_heads]
  v_add_u32_e32 v[head], s[t], v[own]
rotated:
  s_mov_b64 exec, -1
  s_barrier                             // q_out may be q
  s_mov_b64 exec, s[there:there+1]

  // Quotients. For types of few bits they are rounded to odd: then rounding is as if it were the first.
  s_cmp_eq_u64 s[descale:descale+1], 0
  s_cbranch_scc1 divided
  v_mov_b32_e32 v[w], s[descale+3]
  v_mul_lo_u32 v[w], v[head], v[w]
  s_mul_i32 s[t], s[sequence], s[descale+2]
  s_cmp_eq_u32 s[descale+4], 0
  s_cbranch_scc1 one_descale
  s_ff1_i32_b32 s[index], s[descale+4]
  s_lshr_b32 s[index], s[position], s[index]
  s_add_u32 s[t], s[t], s[index]
one_descale:
  v_add_u32_e32 v[w], s[t], v[w]
  v_mov_b32_e32 v[w+1], 0
  v_lshlrev_b64 v[w:w+1], 2, v[w:w+1]
  v_lshl_add_u64 v[w:w+1], v[w:w+1], 0, s[descale:descale+1]
  global_load_dword v[by], v[w:w+1], off
  wait_memory
  .set i, 0
  .rept 8
  divide_f32 y+i, x+i, by
  .set i, i + 1
  .endr
  s_cmp_eq_u32 s[dst_type], type_f32
  s_cbranch_scc1 quotients_found
  s_cmp_ge_u32 s[dst_type], type_q8_0
  s_cbranch_scc1 quotients_found
  .set i, 0
  .rept 8
  round_to_odd y+i, x+i, by
  .set i, i + 1
  .endr
quotients_found:
  .set i, 0
  .rept 8
  v_mov_b32_e32 v[x+i], v[y+i]
  .set i, i + 1
  .endr
divided:

  // To v[to:to+1], the row, and there element d.
  s_cmp_ge_u32 s[dst_type], type_q8_0
  s_cbranch_scc1 store_blocks
  s_mov_b32 s[index], 0                 // log2 of an element's bytes
  s_cmp_le_u32 s[dst_type], type_bf16
  s_cselect_b32 s[index], 1, s[index]
  s_cmp_eq_u32 s[dst_type], type_f32
  s_cselect_b32 s[index], 2, s[index]
  v_lshlrev_b32_e32 v[w], s[index], v[d]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[to:to+1], v[to:to+1], 0, v[w:w+1]
  s_cmp_gt_u32 s[dst_type], type_bf16
  s_cbranch_scc1 store_fp8
  s_cmp_eq_u32 s[dst_type], type_f32
  s_cbranch_scc1 store_f32
  s_cmp_eq_u32 s[dst_type], type_f16
  s_cbranch_scc0 to_bf16
  .set i, 0
  .rept 8
  v_cvt_f16_f32_e32 v[x+i], v[x+i]
  .set i, i + 1
  .endr
  s_branch store_16_bits
to_bf16:
  s_mov_b32 s[t], 0x7fff
  .set i, 0
  .rept 8
  bf16_of_f32 y+i, x+i, t
  v_mov_b32_e32 v[x+i], v[y+i]
  .set i, i + 1
  .endr
store_16_bits:
  s_cmp_eq_u32 s[aligned], 0
  s_cbranch_scc1 store_shorts
  .set i, 0
  .rept 4
  v_lshl_or_b32 v[w+i], v[x+2*i+1], 16, v[x+2*i]
  .set i, i + 1
  .endr
  global_store_dwordx4 v[to:to+1], v[w:w+3], off
  s_branch stored
store_shorts:
  .set i, 0
  .rept 8
  lanes_of_element i
  global_store_short v[to:to+1], v[x+i], off offset:2*i
  .set i, i + 1
  .endr
  s_branch stored
store_f32:
  s_cmp_eq_u32 s[aligned], 0
  s_cbranch_scc1 store_dwords
  global_store_dwordx4 v[to:to+1], v[x:x+3], off
  global_store_dwordx4 v[to:to+1], v[x+4:x+7], off offset:16
  s_branch stored
store_dwords:
  .set i, 0
  .rept 8
  lanes_of_element i
  global_store_dword v[to:to+1], v[x+i], off offset:4*i
  .set i, i + 1
  .endr
  s_branch stored
store_fp8:
  s_cmp_eq_u32 s[dst_type], type_e5m2
  s_cbranch_scc1 encode_e5m2
  .irp i, 0, 1
  encode_4_fp8 w+2+\i, x+4*\i, u, w, mask, fp8, gather, fp8
  .endr
  s_branch encoded
encode_e5m2:
  .irp i, 0, 1
  encode_4_fp8 w+2+\i, x+4*\i, u, w, mask, fp8, gather, bf8
  .endr
encoded:
  s_cmp_eq_u32 s[aligned], 0
  s_cbranch_scc1 store_bytes
  global_store_dwordx2 v[to:to+1], v[w+2:w+3], off
  s_branch stored
store_bytes:
  .set i, 0
  .rept 8
  lanes_of_element i
  v_lshrrev_b32_e32 v[u], 8*(i%4), v[w+2+i/4]
  global_store_byte v[to:to+1], v[u], off offset:i
  .set i, i + 1
  .endr
  s_branch stored

// ggml blocks of 32 elements: the four lanes of a quad have one.
store_blocks:
  v_and_b32_e32 v[sine], 3, v[thread]   // which of the four
  v_lshrrev_b32_e32 v[w], 5, v[d]
  s_cmp_eq_u32 s[dst_type], type_q8_0
  s_cselect_b32 s[index], 34, 18
  v_mul_lo_u32 v[w], v[w], s[index]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[to:to+1], v[to:to+1], 0, v[w:w+1]    // the block
  // v[w]: the largest |x|; v[w+1]: whether there is a NaN.
  v_mov_b32_e32 v[w], 0
  v_mov_b32_e32 v[w+1], 0
  .set i, 0
  .rept 8
  v_max_f32_e64 v[w], v[w], |v[x+i]|    // drops NaN
  v_cmp_u_f32_e32 vcc, v[x+i], v[x+i]
  v_nop
  v_nop                                 // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e64 v[w+1], v[w+1], 1, vcc
  .set i, i + 1
  .endr
  with_lane_of_quad max_f32, w, 1,0,3,2
  wait_states 1
  with_lane_of_quad or_b32, w+1, 1,0,3,2
  with_lane_of_quad max_f32, w, 2,3,0,1
  wait_states 1
  with_lane_of_quad or_b32, w+1, 2,3,0,1
  s_cmp_eq_u32 s[dst_type], type_q8_0
  s_cbranch_scc0 scale_of_q4
  v_mov_b32_e32 v[by], 0x42fe0000       // 127
  v_mov_b32_e32 v[y], v[w]
  s_branch find_scale
scale_of_q4:
  // The sign of the first of the largest: twice its number, and the sign.
  v_mov_b32_e32 v[w+2], 64
  .set i, 7
  .rept 8
  v_lshrrev_b32_e32 v[u], 31, v[x+i]
  v_lshl_add_u32 v[u], v[sine], 4, v[u]
  v_cmp_eq_f32_e64 vcc, |v[x+i]|, v[w]
  v_add_u32_e32 v[u], 2*i, v[u]
  v_nop                                 // v_cmp -> v_cndmask: 2
  v_cndmask_b32_e32 v[w+2], v[w+2], v[u], vcc
  .set i, i - 1
  .endr
  wait_states 2
  with_lane_of_quad min_u32, w+2, 1,0,3,2
  wait_states 2
  with_lane_of_quad min_u32, w+2, 2,3,0,1
  v_lshlrev_b32_e32 v[w+2], 31, v[w+2]
  v_cmp_eq_f32_e32 vcc, 0, v[w]
  v_or_b32_e32 v[y], v[w], v[w+2]
  v_mov_b32_e32 v[by], 0xc1000000       // -8
  v_cndmask_b32_e32 v[y], v[y], v[w], vcc
find_scale:
  divide_f32 y, y, by
  v_mov_b32_e32 v[u], 0x477fe000        // 65504
  v_min_f32_e32 v[y], v[y], v[u]
  v_max_f32_e64 v[y], v[y], -v[u]
  v_mov_b32_e32 v[y+1], 1.0
  divide_f32 y+1, y+1, y
  v_cmp_class_f32_e64 vcc, v[y+1], s[class_finite]
  v_cvt_f16_f32_e32 v[y+2], v[y]
  v_cmp_eq_u32_e64 s[mask:mask+1], 0, v[w+1]
  s_and_b64 vcc, vcc, s[mask:mask+1]
  v_mov_b32_e32 v[u], 0x7e00            // NaN
  v_cndmask_b32_e32 v[y+1], 0, v[y+1], vcc              // what takes values to codes
  v_cndmask_b32_e64 v[y+2], v[u], v[y+2], s[mask:mask+1]
  v_cmp_eq_u32_e32 vcc, 0, v[sine]
  s_and_b64 exec, vcc, s[there:there+1]
  global_store_short v[to:to+1], v[y+2], off
  s_mov_b64 exec, s[there:there+1]
  v_cmp_eq_f32_e64 s[mask:mask+1], 0, v[y+1]
  s_cmp_eq_u32 s[dst_type], type_q8_0
  s_cbranch_scc0 codes_of_q4
  v_mov_b32_e32 v[u+4], 0x42fe0000      // 127
  .set i, 0
  .rept 8
  // Halves away from zero.
  v_mul_f32_e32 v[u], v[x+i], v[y+1]
  v_trunc_f32_e32 v[u+1], v[u]
  v_sub_f32_e32 v[u+2], v[u], v[u+1]
  v_cmp_le_f32_e64 vcc, 0.5, |v[u+2]|
  v_mov_b32_e32 v[u+3], 1.0
  v_bfi_b32 v[u+3], s[magnitude], v[u+3], v[u]
  v_cndmask_b32_e32 v[u+3], 0, v[u+3], vcc
  v_add_f32_e32 v[u+1], v[u+1], v[u+3]
  v_cndmask_b32_e64 v[u+1], v[u+1], 0, s[mask:mask+1]
  v_min_f32_e32 v[u+1], v[u+1], v[u+4]
  v_max_f32_e64 v[u+1], v[u+1], -v[u+4]
  v_cvt_i32_f32_e32 v[x+i], v[u+1]
  .set i, i + 1
  .endr
  v_lshlrev_b32_e32 v[w], 3, v[sine]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[to:to+1], v[to:to+1], 0, v[w:w+1]
  .set i, 0
  .rept 4
  v_and_b32_e32 v[u], 0xff, v[x+2*i]
  v_lshl_or_b32 v[u], v[x+2*i+1], 8, v[u]
  global_store_short v[to:to+1], v[u], off offset:2+2*i
  .set i, i + 1
  .endr
  s_branch stored
codes_of_q4:
  .set i, 0
  .rept 8
  v_mul_f32_e32 v[u], v[x+i], v[y+1]
  v_add_f32_e32 v[u], 0x41080000, v[u]  // 8.5
  v_mov_b32_e32 v[u+1], 0x41000000      // 8
  v_cndmask_b32_e64 v[u], v[u], v[u+1], s[mask:mask+1]
  v_max_f32_e32 v[u], 0, v[u]
  v_min_f32_e32 v[u], 0x41700000, v[u]  // 15
  v_cvt_i32_f32_e32 v[x+i], v[u]
  .set i, i + 1
  .endr
  .set i, 0                             // VALU writes VGPR -> DPP: 2 wait states, 7 others
  .rept 8
  v_mov_b32_dpp v[y+i], v[x+i] quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf
  .set i, i + 1
  .endr
  .set i, 0
  .rept 8
  v_lshl_or_b32 v[x+i], v[y+i], 4, v[x+i]
  .set i, i + 1
  .endr
  v_lshlrev_b32_e32 v[w], 3, v[sine]
  v_mov_b32_e32 v[w+1], 0
  v_lshl_add_u64 v[to:to+1], v[to:to+1], 0, v[w:w+1]
  v_cmp_gt_u32_e32 vcc, 2, v[sine]
  s_and_b64 exec, vcc, s[there:there+1]
  .set i, 0
  .rept 4
  v_lshl_or_b32 v[u], v[x+2*i+1], 8, v[x+2*i]
  global_store_short v[to:to+1], v[u], off offset:2+2*i
  .set i, i + 1
  .endr
stored:
  s_mov_b64 exec, -1
  s_add_u32 s[chunk], s[chunk], s[chunk_step]
  s_branch next_tensor

// seqlens_out of sequence threads * workgroup + thread.
advance_all:
  s_mul_i32 s[t], s[chunk_step], s[token]
  v_add_u32_e32 v[d], s[t], v[thread]
  v_cmp_gt_u32_e32 vcc, s[batch], v[d]
  s_mov_b64 exec, vcc
  s_cbranch_execz done
  v_lshlrev_b32_e32 v[d], 2, v[d]
  global_load_dword v[x], v[d], s[seqlens:seqlens+1]
  v_mov_b32_e32 v[u], s[seqlen_new]
  v_mov_b32_e32 v[w], s[capacity]
  s_cmp_eq_u64 s[cu_seqlens_new:cu_seqlens_new+1], 0
  s_cbranch_scc1 new_tokens_known
  global_load_dwordx2 v[y:y+1], v[d], s[cu_seqlens_new:cu_seqlens_new+1]
  v_mov_b32_e32 v[w+1], s[total_new]
  wait_memory
  v_med3_i32 v[y], v[y], 0, v[w+1]
  v_med3_i32 v[y+1], v[y+1], v[y], v[w+1]
  v_sub_u32_e32 v[y], v[y+1], v[y]
  v_min_i32_e32 v[u], v[y], v[u]
new_tokens_known:
  wait_memory
  v_med3_i32 v[x], v[x], 0, v[w]
  v_add_u32_e32 v[x], v[x], v[u]
  v_min_u32_e32 v[x], v[x], v[w]
  global_store_dword v[d], v[x], s[seqlens_out:seqlens_out+1]
  s_endpgm
