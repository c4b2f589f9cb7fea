// What the kernels bwd_* of CUDA have in common: statistics of the query rows in the workspace, and
// the parameter structs of the kernels that run before the main one.
#ifndef ATTN_KERNELS_BACKWARD_PREPARE_ARGS_H
#define ATTN_KERNELS_BACKWARD_PREPARE_ARGS_H

#include "../shared/forward_args.h"
#include "../shared/host_device.h"
#include "../shared/mask.h"

enum { attn_backward_tile = 64, attn_backward_threads = 256 };

namespace attn {

// Rows of statistics come in tiles of 64 queries. Sequence b has those from tile first_tile(b) on:
// query i is row 64 * first_tile(b) + i. Packed sequences begin in a tile of their own, so that
// there are no more tiles than this. begin: the sequence's first row in q.
struct BackwardRows {
  bool packed;
  int batch, seqlen_q;
  long long total_q;  // packed

  ATTN_HOST_DEVICE constexpr long long tiles_of_sequence() const {
    return (seqlen_q + attn_backward_tile - 1) / attn_backward_tile;  // at most
  }
  ATTN_HOST_DEVICE constexpr long long tiles() const {
    return packed ? total_q / attn_backward_tile + batch : batch * tiles_of_sequence();
  }
  ATTN_HOST_DEVICE constexpr long long first_tile(int b, long long begin) const {
    return packed ? b + begin / attn_backward_tile : b * tiles_of_sequence();
  }
  // Row 0 of a head.
  ATTN_HOST_DEVICE constexpr long long first_row(int head) const {
    return attn_backward_tile * (head * tiles());
  }
};

}  // namespace attn

// A gradient: rows [batch, seq, head] or packed [total, head].
struct attn_gradient_array {
  void* at;             // null: not wanted
  long long stride[3];  // elements: batch, seq, head
  int type;             // shared/types.h
  int add;              // to what is there
};

// Of bwd_prepare_cuda: a block for each head of each tile of each sequence.
struct attn_backward_prepare_kernarg {
  const void* out;
  const void* d_out;
  const float* lse;
  const float* d_lse;                        // null: 0
  const float* sinks;                        // null: none
  const int* cu_seqlens_q;                   // null: padded q
  attn_gradient_array dq, dk, dv;            // their rows that belong to no sequence become 0
  long long out_stride[3], d_out_stride[3];  // elements: batch, seq, head
  // What it writes. Rows that do not exist, that no mask of ranges lets see a key, and those whose
  // lse is -inf have an lse2 of +inf, so that all their P are 0.
  float* lse2;        // [heads_q][64 tiles()]: lse * log2(e)
  float* delta;       // the same: sum(out * d_out) - d_lse
  float* sink_parts;  // [heads_q][batch][tiles_of_sequence()] of d_sinks; null: not wanted
  unsigned* clear;    // becomes 0
  long long clear_words;
  attn::BackwardRows rows;
  attn_kv_lengths kv;
  attn::RangeMask mask;
  int batch, heads_q, heads_kv, seqlen_q;
  int head_dim, head_dim_v;
  int out_type, d_out_type;
};

// Of bwd_sinks_cuda: a block for each head.
struct attn_backward_sinks_kernarg {
  const float* parts;  // [heads_q][num_parts]
  float* d_sinks;      // [heads_q]
  long long num_parts;
  int add;
};

#endif
