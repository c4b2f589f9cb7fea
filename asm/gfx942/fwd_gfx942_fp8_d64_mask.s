// Attention forward in FP8 (FNUZ e4m3) with head dimensions up to 64. A workgroup has 256 queries of a head, a
// wave 32 of them, and walks the tiles of 64 keys that prepare_gfx942_fp8 has written, from the last that it sees
// to the first, of those that a block mask shows. include/forward_fp8.inc and block_mask.inc are the kernel,
// docs/gfx942.md describes it.
//
// Grid: (8, items of an XCD's unit, units of an XCD): workgroup i runs on XCD i % 8.
//
//# kernel fwd_gfx942_fp8_d64_mask workgroup=512 lds=lds_bytes
//#   ptr    q              padded [batch, seq, head, dim] or packed [total, head, dim]
//#   ptr    prepared       of prepare_gfx942_fp8
//#   ptr    out            in q's layout
//#   ptr    lse            f32 [batch, head, seq] or [head, total]; 0: not wanted
//#   ptr    cu_seqlens_q   0: padded
//#   ptr    seqlens_kv     0: all are seqlen_kv long
//#   ptr    cu_seqlens_kv  0: padded
//#   ptr    q_descale      f32 [1] or [batch, KV head]; 0: 1
//#   ptr    k_descale
//#   ptr    v_descale
//#   ptr    sinks          f32 [head]; 0: none
//#   i64[3] q_stride       bytes: batch, seq, head
//#   i64[3] out_stride
//#   i32    seqlen_q       capacities and totals
//#   i32    total_q
//#   i32    seqlen_kv
//#   i32    total_kv
//#   i32    left           forward_args.h: attn_gfx942_band
//#   i32    right
//#   i32    top
//#   i32    tiles          of a KV head in `prepared`
//#   i32    heads_kv
//#   i32    group          query heads of a KV head
//#   i32    q_tiles        ceil(seqlen_q / 256)
//#   i32    pairs          batch * heads_kv
//#   i32    parts_log2     2^parts_log2 units of work a pair
//#   i32    group_magic    ceil(2^32 / group), 0 for 1
//#   i32    heads_magic    ceil(2^32 / heads_kv), 0 for 1
//#   i32    per_head       bits 0, 1, 2: descales of q, k, v are [batch, KV head]
//#   f32    scale          of dot products of FNUZ codes, times log2(e)
//#   f32    out_factor     2 for an OCP v, else 1
//#   i32    convert_q      1: from OCP
//#   i32    out_type       1 f32, 2 f16, 3 bf16
//#   i32    head_dim       of the tensors: multiples of 16
//#   i32    head_dim_v
//#   i32    items          of the grid
//#   i32    workgroups     that store rows of nobody
//#   ptr    kinds          kernels/shared/block_mask.h
//#   ptr    index
//#   ptr    bits
//#   i64    batch_stride
//#   i64    head_stride
//#   i32    rows
//#   i32    columns
//#   i32    block_q_log2
//#   i32    block_k_log2
//#   i32    partials
//#   i32    reserved
//
// Registers and LDS: include/forward_fp8.inc. Occupancy: 2 waves per SIMD.
.set dim, 64
.set block_masks, 1
.include "forward_fp8.inc"
forward_fp8 fwd_gfx942_fp8_d64_mask
