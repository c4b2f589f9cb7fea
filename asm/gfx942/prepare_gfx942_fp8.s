// Writes K and V of every (batch, KV head) as the FP8 forward kernels read them: tiles of 64 keys, each as the
// bytes of LDS. OCP codes become the FNUZ codes of half their values; keys that no query sees and head dims
// beyond the tensor's become 0, so that unused memory ends here.
//
// A tile of D = padded_dim is K, then V, 64 D bytes each, both made of 16-byte units:
//   K  [block of 32 keys][unit of 32 dims][half h][row i]: key 32 block + pi(i), dims 32 unit + 16 h ..
//   V  [block of 32 keys][tile of 32 dims][half h][row i]: keys 32 block + 16 h .., dim 32 tile + pi(i)
// pi(i) = 16 (i / 4 % 2) + 4 (i / 8) + i % 4: register r of a lane of half h in a 32 x 32 accumulator is
// then row 16 h + r.
// Packed sequences begin at tile cu_seqlens / 64 + b, which leaves each one room.
//
// Grid: (tiles of the longest sequence, KV heads, batch), one workgroup of D threads per tile. A thread writes
// four units of K, and V for 16 keys and 4 dims.
//
//# kernel prepare_gfx942_fp8 workgroup=128
//#   ptr    k              padded [batch, seq, head, dim] or packed [total, head, dim]
//#   ptr    v
//#   ptr    prepared       [KV head][tile][K, V]
//#   ptr    cu_seqlens_q   0: padded
//#   ptr    seqlens_kv     0: all are seqlen_kv long
//#   ptr    cu_seqlens_kv  0: padded
//#   i64[3] k_stride       bytes: batch, seq, head
//#   i64[3] v_stride
//#   i32    seqlen_q       capacities and totals
//#   i32    total_q
//#   i32    seqlen_kv
//#   i32    total_kv
//#   i32    left           forward_args.h: attn_gfx942_band
//#   i32    right
//#   i32    top
//#   i32    tiles          of a KV head
//#   i32    head_dim       multiples of 16
//#   i32    head_dim_v
//#   i32    padded_dim     64 or 128
//#   i32    convert_k      1: from OCP
//#   i32    convert_v
//#   i32    reserved
//
// SGPRs: s0..s1 kernarg, s2..s4 workgroup, s8..s45 the arguments, the rest as named below. VGPRs: as named
// below. No LDS. Occupancy: 8 waves per SIMD.
.include "registers.inc"
.include "wave.inc"
.include "convert.inc"
.include "lengths.inc"

registers_at_entry tile, head, batch
sgpr arguments, 38, 8
.set k, arguments + prepare_gfx942_fp8.k / 4
.set v, arguments + prepare_gfx942_fp8.v / 4
.set prepared, arguments + prepare_gfx942_fp8.prepared / 4
.set cu_seqlens_q, arguments + prepare_gfx942_fp8.cu_seqlens_q / 4
.set seqlens_kv, arguments + prepare_gfx942_fp8.seqlens_kv / 4
.set cu_seqlens_kv, arguments + prepare_gfx942_fp8.cu_seqlens_kv / 4
.set k_stride, arguments + prepare_gfx942_fp8.k_stride / 4
.set v_stride, arguments + prepare_gfx942_fp8.v_stride / 4
.set seqlen_q, arguments + prepare_gfx942_fp8.seqlen_q / 4
.set total_q, arguments + prepare_gfx942_fp8.total_q / 4
.set seqlen_kv, arguments + prepare_gfx942_fp8.seqlen_kv / 4
.set total_kv, arguments + prepare_gfx942_fp8.total_kv / 4
.set left, arguments + prepare_gfx942_fp8.left / 4
.set right, arguments + prepare_gfx942_fp8.right / 4
.set top, arguments + prepare_gfx942_fp8.top / 4
.set tiles, arguments + prepare_gfx942_fp8.tiles / 4
.set head_dim, arguments + prepare_gfx942_fp8.head_dim / 4
.set head_dim_v, arguments + prepare_gfx942_fp8.head_dim_v / 4
.set padded_dim, arguments + prepare_gfx942_fp8.padded_dim / 4
.set convert_k, arguments + prepare_gfx942_fp8.convert_k / 4
.set convert_v, arguments + prepare_gfx942_fp8.convert_v / 4
sgpr q_begin
sgpr q_length
sgpr kv_begin
sgpr kv_length
sgpr index
sgpr lower
sgpr upper
sgpr low                                // keys that some query sees, from the tile's first: low .. low + width - 1
sgpr width
sgpr first
sgpr dim_log2
sgpr codes, 3                           // of fnuz_half_of_e4m3fn
sgpr low_pairs                          // v_perm selectors
sgpr high_pairs
sgpr low_halves
sgpr high_halves
sgpr t, 2, 2
sgpr base, 2, 2
sgpr dst, 2, 2
sgpr in_dims, 2, 2

.set thread, 0
vgpr key
vgpr dim
vgpr offset
vgpr to
vgpr a
vgpr b
vgpr x, 16, 2
vgpr y, 16, 2

// s[base:base+1] = tensor + batch, head and first key of the tile.
.macro tile_base tensor, stride
  s_mov_b64 s[base:base+1], s[\tensor:\tensor+1]
  s_cmp_eq_u64 s[cu_seqlens_kv:cu_seqlens_kv+1], 0
  s_cselect_b32 s[index], s[batch], 0
  s_mad_u64 base, index, \stride, t
  s_mad_u64 base, head, \stride+4, t
  s_mad_u64 base, first, \stride+2, t
.endm

// Lanes whose key v[key] some query sees, and whose dims there are.
.macro lanes_in_use
  v_subrev_u32_e32 v[a], s[low], v[key]
  v_cmp_gt_u32_e32 vcc, s[width], v[a]
  s_and_b64 exec, vcc, s[in_dims:in_dims+1]
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

kernel_entry prepare_gfx942_fp8
  kernarg arguments, 16, prepare_gfx942_fp8.k
  kernarg arguments + 16, 16, prepare_gfx942_fp8.k_stride + 16
  kernarg arguments + 32, 4, prepare_gfx942_fp8.head_dim
  kernarg arguments + 36, 2, prepare_gfx942_fp8.convert_v
  v_and_b32_e32 v[thread], 0x3ff, v0
  s_mov_b32 s[codes], 0x7f7f7f7f
  s_mov_b32 s[codes+1], 0x01010101
  s_mov_b32 s[codes+2], 0x80808080
  s_mov_b32 s[low_pairs], 0x05010400
  s_mov_b32 s[high_pairs], 0x07030602
  s_mov_b32 s[low_halves], 0x05040100
  s_mov_b32 s[high_halves], 0x07060302
  s_lshl_b32 s[index], s[batch], 2
  wait_scalar
  s_ff1_i32_b32 s[dim_log2], s[padded_dim]

  // Keys that some query sees.
  packed_span q_begin, q_length, cu_seqlens_q, total_q, seqlen_q, index, t
  packed_span kv_begin, kv_length, cu_seqlens_kv, total_kv, seqlen_kv, index, t
  padded_length kv_length, seqlens_kv, index, t
  key_band lower, upper, q_length, kv_length, left, right, top
  s_max_i32 s[low], s[lower], 0
  s_add_i32 s[upper], s[upper], s[q_length]
  s_sub_i32 s[upper], s[upper], 1
  s_min_i32 s[upper], s[upper], s[kv_length]
  s_lshl_b32 s[first], s[tile], 6
  s_cmp_ge_i32 s[first], s[upper]
  s_cbranch_scc1 done
  s_add_i32 s[t], s[first], 64
  s_cmp_le_i32 s[t], s[low]
  s_cbranch_scc1 done
  s_cmp_eq_u32 s[q_length], 0
  s_cbranch_scc1 done
  s_sub_i32 s[width], s[upper], s[low]
  s_max_i32 s[width], s[width], 0
  s_sub_i32 s[low], s[low], s[first]

  // The tile's address in the workspace.
  s_cmp_eq_u64 s[cu_seqlens_kv:cu_seqlens_kv+1], 0
  s_cselect_b32 s[t], s[batch], 0
  s_add_u32 s[index], s[seqlen_kv], 63
  s_lshr_b32 s[index], s[index], 6
  s_mul_i32 s[index], s[index], s[t]
  s_cmp_eq_u64 s[cu_seqlens_kv:cu_seqlens_kv+1], 0
  s_cselect_b32 s[t], 0, s[batch]
  s_add_u32 s[index], s[index], s[t]
  s_lshr_b32 s[t], s[kv_begin], 6
  s_add_u32 s[index], s[index], s[t]
  s_add_u32 s[index], s[index], s[tile]
  s_mul_i32 s[t], s[head], s[tiles]
  s_mul_hi_u32 s[t+1], s[head], s[tiles]
  s_add_u32 s[dst], s[t], s[index]
  s_addc_u32 s[dst+1], s[t+1], 0
  s_add_u32 s[t], s[dim_log2], 7
  s_lshl_b64 s[dst:dst+1], s[dst:dst+1], s[t]
  s_add_u32 s[dst], s[dst], s[prepared]
  s_addc_u32 s[dst+1], s[dst+1], s[prepared+1]
  s_add_u32 s[first], s[first], s[kv_begin]

  // K: four rounds of D units. Round r: block r / 2, units r % 2 * D / 64 ..
  tile_base k, k_stride
  v_lshrrev_b32_e32 v[dim], 6, v[thread]
  v_lshlrev_b32_e32 v[dim], 5, v[dim]
  v_bfe_u32 v[a], v[thread], 5, 1
  v_lshl_add_u32 v[dim], v[a], 4, v[dim]
  v_bfe_u32 v[key], v[thread], 2, 1
  v_lshlrev_b32_e32 v[key], 4, v[key]
  v_bfe_u32 v[a], v[thread], 3, 2
  v_lshl_add_u32 v[key], v[a], 2, v[key]
  v_and_b32_e32 v[a], 3, v[thread]
  v_add_u32_e32 v[key], v[key], v[a]
  s_lshr_b32 s[index], s[padded_dim], 1
  .set r, 0
  .rept 4
  .irp i, 0, 1, 2, 3
  v_mov_b32_e32 v[x+4*r+\i], 0
  .endr
  v_cmp_gt_u32_e64 s[in_dims:in_dims+1], s[head_dim], v[dim]
  v_mul_lo_u32 v[offset], v[key], s[k_stride+2]
  v_add_u32_e32 v[offset], v[offset], v[dim]
  lanes_in_use
  global_load_dwordx4 v[x+4*r:x+4*r+3], v[offset], s[base:base+1]
  s_mov_b64 exec, -1
  .if r == 1
  v_add_u32_e32 v[key], 32, v[key]
  .endif
  .if r % 2 == 0
  v_add_u32_e32 v[dim], s[index], v[dim]
  .elseif r == 1
  v_subrev_u32_e32 v[dim], s[index], v[dim]
  .endif
  .set r, r + 1
  .endr
  wait_memory
  s_cmp_eq_u32 s[convert_k], 0
  s_cbranch_scc1 k_converted
  .set r, 0
  .rept 16
  fnuz_half_of_e4m3fn x + r, a, b, codes
  .set r, r + 1
  .endr
k_converted:
  v_lshlrev_b32_e32 v[to], 4, v[thread]
  s_lshl_b32 s[index], s[padded_dim], 4
  .set r, 0
  .rept 4
  global_store_dwordx4 v[to], v[x+4*r:x+4*r+3], s[dst:dst+1]
  .if r < 3
  v_add_u32_e32 v[to], s[index], v[to]
  .endif
  .set r, r + 1
  .endr

  // V: keys 16 kg .. and dims 4 quad .. of thread kg * D / 4 + quad. v[to]: behind K, block kg / 2, half kg % 2,
  // tile quad / 8, and the four rows from quad / 4 % 2 * 4 + quad % 4 * 8.
  tile_base v, v_stride
  s_sub_u32 s[index], s[dim_log2], 2
  v_lshrrev_b32_e32 v[key], s[index], v[thread]
  v_lshlrev_b32_e32 v[dim], s[index], v[key]
  v_sub_u32_e32 v[dim], v[thread], v[dim]
  v_lshrrev_b32_e32 v[to], 1, v[key]
  v_add_u32_e32 v[to], 2, v[to]
  s_add_u32 s[index], s[dim_log2], 5
  v_lshlrev_b32_e32 v[to], s[index], v[to]
  v_and_b32_e32 v[a], 1, v[key]
  v_lshl_add_u32 v[to], v[a], 9, v[to]
  v_lshrrev_b32_e32 v[a], 3, v[dim]
  v_lshl_add_u32 v[to], v[a], 10, v[to]
  v_bfe_u32 v[a], v[dim], 2, 1
  v_lshl_add_u32 v[to], v[a], 6, v[to]
  v_and_b32_e32 v[a], 3, v[dim]
  v_lshl_add_u32 v[to], v[a], 7, v[to]
  v_lshlrev_b32_e32 v[key], 4, v[key]
  v_lshlrev_b32_e32 v[dim], 2, v[dim]
  v_cmp_gt_u32_e64 s[in_dims:in_dims+1], s[head_dim_v], v[dim]
  .set r, 0
  .rept 16
  v_mov_b32_e32 v[x+r], 0
  v_mul_lo_u32 v[offset], v[key], s[v_stride+2]
  v_add_u32_e32 v[offset], v[offset], v[dim]
  lanes_in_use
  global_load_dword v[x+r], v[offset], s[base:base+1]
  s_mov_b64 exec, -1
  .if r < 15
  v_add_u32_e32 v[key], 1, v[key]
  .endif
  .set r, r + 1
  .endr
  wait_memory
  s_cmp_eq_u32 s[convert_v], 0
  s_cbranch_scc1 v_converted
  .set r, 0
  .rept 16
  fnuz_half_of_e4m3fn x + r, a, b, codes
  .set r, r + 1
  .endr
v_converted:
  .irp i, 0, 1, 2, 3
  transpose_4 x+4*\i, y+\i
  .endr
  .irp i, 0, 1, 2, 3
  global_store_dwordx4 v[to], v[y+4*\i:y+4*\i+3], s[dst:dst+1] offset:16*\i
  .endr
done:
  s_endpgm
