// Where the gradients of one batch entry are in host memory, and rows of no sequence.
#pragma once
#include "cpu/kv_view.h"
#include "problem/backward.h"

namespace attn {

// The keys of batch entry b. Offsets count elements.
struct KeyView {
  int64_t length;        // Skv[b]
  int64_t k, v, dk, dv;  // key 0, head 0
};
KeyView key_view(const BackwardProblem& problem, const BackwardArgs& args, int64_t b);

// Elements of d_out and dq: query 0, head 0 of batch entry b, whose queries are `query`.
struct QueryGradients {
  int64_t d_out, dq;
};
QueryGradients query_gradients(const BackwardProblem& problem, const BackwardArgs& args, int64_t b);

// The sum of a gradient's element and what is there, if that counts.
void store_gradient(attn_dtype type, void* base, int64_t index, double x, bool add);

// Zeros in rows of dq, dk and dv that belong to no sequence, unless they keep what they hold.
void clear_rows_of_nobody(const BackwardProblem& problem, const BackwardArgs& args);

}  // namespace attn
