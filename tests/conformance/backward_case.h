// A backward problem and its data, its gradients by the formula, and kernels that compute them. As
// in forward_case.h everything that a kernel must not use is NaN, every buffer has guards, and one
// line (describe) reproduces a failure.
#pragma once
#include <optional>

#include "backend.h"

namespace attn::test {

struct BackwardCase {
  Case c;
  uint32_t gradients = ATTN_GRAD_Q | ATTN_GRAD_K | ATTN_GRAD_V;
  uint32_t accumulate = 0;
  attn_dtype d_out_type = ATTN_DTYPE_NONE, gradient_type = ATTN_DTYPE_NONE,
             d_bias_type = ATTN_DTYPE_NONE;
  Arrange d_out_arrange = Arrange::contiguous, gradient_arrange = Arrange::contiguous;
  bool d_lse = false;
  // Dimensions of d_bias that are sums; none: those that bias repeats.
  std::optional<std::array<bool, 4>> sums;

  bool wants(uint32_t gradient) const { return (gradients & gradient) != 0; }
  bool adds(uint32_t gradient) const { return (accumulate & gradient) != 0; }
};
std::string describe(const BackwardCase& bc);

// All gradients that the case's options have.
BackwardCase backward_of(Case c);

// Rows [b, h, i], those of the forward data; a row that sees no key is NaN in memory.
struct BackwardData {
  Data forward;  // with NaN in the rows of q that see no key
  View d_out_view;
  Buffer d_out, d_lse;
  std::vector<std::vector<double>> d_out_real;
  std::vector<double> d_lse_real;
  std::vector<bool> sees;  // rows that see a key
};
BackwardData make_backward_data(const BackwardCase& bc);

// dq: [B, Hq, Sq, D]; dk, dv: [B, Hkv, most_keys, D]; d_bias: [B, Hq, Sq, capacity], 1 in summed
// dimensions. Rows that do not exist are 0.
struct Gradients {
  std::string error;
  attn_status status = ATTN_OK;
  std::vector<double> dq, dk, dv, d_sinks, d_bias;
  std::vector<unsigned char> bits;  // of all arrays
};
struct BackwardTruth {
  Gradients exact;
  // The same sums over the absolute values of all their terms, and how many terms those are.
  Gradients magnitude;
  double most_terms = 0;
  double largest_lse = 0;
};
// In float64, of forward's out and lse as given; as `formula`, no code of the library.
BackwardTruth formula_backward(const BackwardCase& bc, const BackwardData& data,
                               const Outputs& forward);
// <d_out, out> + <d_lse, lse> in float64.
double formula_loss(const BackwardCase& bc, const BackwardData& data);

// Forward, then the named backward kernel, or with null the one that is chosen. Fails as
// run_forward does, and if a row that must be 0 or keep what it had is something else.
struct BackwardRun {
  std::string kernel;  // that ran
  Outputs forward;
  Gradients got;
};
// garbage: what backward gets of forward's arrays instead; only memory is checked then.
BackwardRun run_backward(Backend& backend, const BackwardCase& bc, const BackwardData& data,
                         const char* kernel, attn_dtype out_type, const Data* garbage = nullptr);
inline BackwardRun run_backward(Backend& backend, const BackwardCase& bc, const BackwardData& data,
                                const char* kernel) {
  return run_backward(backend, bc, data, kernel, bc.c.out_type);
}

// "" or what differs first.
std::string compare(const BackwardCase& bc, const BackwardData& data, const Kernel& kernel,
                    const Gradients& got, const BackwardTruth& want);

// FlashAttention's rule: dq, dk and dv are off by at most twice as much as those that plain
// operators of q's type compute, each of which rounds what it returns, and a rounding. They are
// also right if that is true of the exact gradients for the out that forward has rounded: of a
// query that sees one key plain operators have exact ones, and nobody has who takes delta from out.
// "" or what breaks it. Not for gradients that are added.
std::string compare_with_plain_operators(const BackwardCase& bc, const BackwardData& data,
                                         const BackwardRun& run);

// Whether the kernel, or all forward kernels, have declined the case, which hosts never may.
bool declined(const Kernel& kernel, const BackwardRun& run);

// Runs the case on those of the kernels that take it.
void check_backward(const BackwardCase& bc, const std::vector<const Kernel*>& kernels);
inline void check_backward(const BackwardCase& bc, bool with_reference = true) {
  check_backward(bc, kernels_here(Op::backward, with_reference));
}

}  // namespace attn::test
