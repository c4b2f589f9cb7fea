#include "problem/backward.h"

#include "core/dtype.h"
#include "problem/rules.h"

namespace attn {
namespace {

constexpr uint32_t known_gradients =
    ATTN_GRAD_Q | ATTN_GRAD_K | ATTN_GRAD_V | ATTN_GRAD_SINKS | ATTN_GRAD_BIAS;

// Forward problems whose gradients nothing here computes.
Status check_differentiable(const Problem& p) {
  if (p.num_segments != 1)
    return unsupported("num_segments is ", p.num_segments, "; accepted for backward: 1");
  if (!(type_bit(p.q_type) & float_types))
    return unsupported("q_type is ", dtype_name(p.q_type),
                       "; accepted for backward: ", type_names(float_types));
  const Segment& s = p.segment[0];
  for (const auto& [name, type] : {std::pair{"k_type", s.k_type}, {"v_type", s.v_type}})
    if (type != p.q_type)
      return unsupported(name, " is ", dtype_name(type), "; accepted for backward: q's type, ",
                         dtype_name(p.q_type));
  constexpr uint32_t out_types = float_types | type_bit(ATTN_F64);
  if (!(type_bit(p.out_type) & out_types))
    return unsupported("out_type is ", dtype_name(p.out_type),
                       "; accepted for backward: ", type_names(out_types));
  if (s.layout == ATTN_PAGED)
    return unsupported("layout is paged (2); accepted for backward: padded (0), packed (1)");
  if (s.shared)
    return unsupported("shared is 1; accepted for backward: 0 (a segment of each sequence)");
  for (const auto& [name, kind] : {std::pair{"q_descale", p.q_descale},
                                   {"k_descale", s.k_descale},
                                   {"v_descale", s.v_descale}})
    if (kind != ATTN_DESCALE_NONE)
      return unsupported(name, " is ", int(kind), "; accepted for backward: none (0)");
  for (const auto& [name, value] : {std::pair{"v_in_k", int64_t{s.v_in_k}},
                                    {"list_size", s.list_size},
                                    {"no_positions", int64_t{s.no_positions}},
                                    {"has_key_start", int64_t{s.has_key_start}},
                                    {"has_ready", int64_t{s.has_ready}}})
    if (value != 0) return unsupported(name, " is ", value, "; accepted for backward: 0");
  for (const auto& [name, flag] : {std::pair{"ATTN_QUERY_POSITIONS", ATTN_QUERY_POSITIONS},
                                   {"ATTN_ACCUMULATE", ATTN_ACCUMULATE}})
    if (p.has(flag)) return unsupported("flags has ", name, "; accepted for backward: not");
  if (p.tree_keys > 0)
    return unsupported("tree_keys is ", p.tree_keys, "; accepted for backward: 0");
  return {};
}

Status one_type(const char* name, attn_dtype* type, attn_dtype usual, uint32_t others) {
  if (*type == ATTN_DTYPE_NONE) *type = usual;
  return one_of(name, *type, type_bit(usual) | others | type_bit(ATTN_F64));
}

// A tensor with the rows of q or out.
Status make_query_rows(const std::string& name, attn_dtype type, int64_t dim, const Problem& p,
                       bool written, attn_strides* stride, Footprint* bytes) {
  if (p.q_layout == ATTN_PACKED) {
    stride->batch = 0;
    return make_tensor(name, type, dim, written,
                       {{"seq", p.total_q, &stride->seq}, {"head", p.heads_q, &stride->head}},
                       bytes);
  }
  return make_tensor(name, type, dim, written,
                     {{"batch", p.batch, &stride->batch},
                      {"seq", p.seqlen_q, &stride->seq},
                      {"head", p.heads_q, &stride->head}},
                     bytes);
}

// A tensor with the rows of k or v.
Status make_key_rows(const std::string& name, attn_dtype type, int64_t dim, const Problem& p,
                     attn_strides* stride, Footprint* bytes) {
  const Segment& s = p.segment[0];
  if (s.layout == ATTN_PACKED) {
    stride->batch = 0;
    return make_tensor(name, type, dim, true,
                       {{"seq", s.total, &stride->seq}, {"head", p.heads_kv, &stride->head}},
                       bytes);
  }
  return make_tensor(name, type, dim, true,
                     {{"batch", p.batch, &stride->batch},
                      {"seq", s.seqlen, &stride->seq},
                      {"head", p.heads_kv, &stride->head}},
                     bytes);
}

Status make_d_bias(BackwardProblem* b) {
  const Problem& p = b->of;
  ATTN_TRY(one_type("d_bias_type", &b->d_bias_type, p.bias_type, type_bit(ATTN_F32)));
  const int64_t sizes[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv};
  int64_t* const stride = b->d_bias_stride;
  const bool unset = !(stride[0] || stride[1] || stride[2] || stride[3]);
  int64_t extents[4];
  for (int n = 0; n < 4; ++n)
    extents[n] =
        (unset ? p.bias_stride : stride)[n] == 0 ? std::min<int64_t>(1, sizes[n]) : sizes[n];
  ATTN_TRY(make_tensor("d_bias_stride", b->d_bias_type, 1, true,
                       {{"batch", extents[0], &stride[0]},
                        {"head", extents[1], &stride[1]},
                        {"q", extents[2], &stride[2]},
                        {"kv", extents[3], &stride[3]}},
                       &b->d_bias_bytes));
  for (int n = 0; n < 4; ++n)
    if (extents[n] <= 1) stride[n] = 0;
  return {};
}

// In the types of gradients, and whatever else forward's rows do not say.
Needs needs_of(const BackwardProblem& b) {
  Needs needs = b.of.needs;
  needs.flags &= ~(ATTN_SPLIT_INVARIANT | ATTN_KV_PREFIX_STABLE);
  needs.features &= ~feature_fixed_split;
  for (const attn_strides& stride : {b.d_out_stride, b.dq_stride, b.dk_stride, b.dv_stride})
    if (is_negative(stride)) needs.features |= feature_negative_strides;
  for (const auto& [type, stride] : {std::pair{b.d_out_type, b.d_out_stride},
                                     {b.dq_type, b.dq_stride},
                                     {b.dk_type, b.dk_stride},
                                     {b.dv_type, b.dv_stride}})
    if (!aligned_strides(type, stride)) needs.features |= feature_any_stride;
  for (const int64_t stride : b.d_bias_stride)
    if (stride < 0) needs.features |= feature_negative_strides;
  const bool exact = b.of.out_type == ATTN_F64 || b.d_out_type == ATTN_F64 ||
                     (b.wants(ATTN_GRAD_Q) && b.dq_type == ATTN_F64) ||
                     (b.wants(ATTN_GRAD_K) && b.dk_type == ATTN_F64) ||
                     (b.wants(ATTN_GRAD_V) && b.dv_type == ATTN_F64) ||
                     (b.wants(ATTN_GRAD_BIAS) && b.d_bias_type == ATTN_F64);
  needs.out_type = exact ? ATTN_F64 : b.of.out_type;
  return needs;
}

}  // namespace

Status make_backward_problem(const attn_backward_problem* in, BackwardProblem* b) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_backward_problem*>(b)));
  if (!b->forward)
    return invalid("problem.forward is NULL; accepted: the problem of the forward run");
  Problem& p = b->of;
  ATTN_TRY(make_problem(b->forward, &p));
  b->forward = nullptr;
  ATTN_TRY(check_differentiable(p));

  if (b->gradients & ~known_gradients)
    return invalid("gradients is 0x", std::hex, b->gradients, "; accepted: bits of 0x",
                   known_gradients);
  if (b->gradients == 0) b->gradients = ATTN_GRAD_Q | ATTN_GRAD_K | ATTN_GRAD_V;
  if (b->accumulate & ~b->gradients)
    return invalid("accumulate is 0x", std::hex, b->accumulate, "; accepted: bits of gradients, 0x",
                   b->gradients);
  if (b->wants(ATTN_GRAD_SINKS) && !p.has(ATTN_SINKS))
    return invalid(
        "gradients has ATTN_GRAD_SINKS; accepted with ATTN_SINKS in the flags of the forward "
        "problem");
  if (b->wants(ATTN_GRAD_BIAS) && p.bias_type == ATTN_DTYPE_NONE)
    return invalid(
        "gradients has ATTN_GRAD_BIAS; accepted with a bias_type in the forward problem");

  ATTN_TRY(one_type("d_out_type", &b->d_out_type, p.out_type, float_types));
  ATTN_TRY(one_type("dq_type", &b->dq_type, p.q_type, type_bit(ATTN_F32)));
  ATTN_TRY(one_type("dk_type", &b->dk_type, p.q_type, type_bit(ATTN_F32)));
  ATTN_TRY(one_type("dv_type", &b->dv_type, p.q_type, type_bit(ATTN_F32)));
  ATTN_TRY(make_query_rows("d_out_stride", b->d_out_type, p.head_dim_v, p, false, &b->d_out_stride,
                           &b->d_out_bytes));
  ATTN_TRY(
      make_query_rows("dq_stride", b->dq_type, p.head_dim, p, true, &b->dq_stride, &b->dq_bytes));
  ATTN_TRY(make_key_rows("dk_stride", b->dk_type, p.head_dim, p, &b->dk_stride, &b->dk_bytes));
  ATTN_TRY(make_key_rows("dv_stride", b->dv_type, p.head_dim_v, p, &b->dv_stride, &b->dv_bytes));
  if (p.bias_type != ATTN_DTYPE_NONE) ATTN_TRY(make_d_bias(b));

  b->needs = needs_of(*b);
  b->no_batch = p.batch == 0;
  if (b->kernel) b->kernel_name = b->kernel;
  b->kernel = nullptr;
  return {};
}

Status check_backward_args(const BackwardProblem& b, const attn_backward_args* in,
                           const void* workspace, size_t workspace_bytes, bool host_memory,
                           BackwardArgs* args) {
  const Problem& p = b.of;
  ATTN_TRY(copy_versioned("args", in, static_cast<attn_backward_args*>(args)));
  if (!args->forward)
    return invalid("args.forward is NULL; accepted: the arguments of the forward run");
  ATTN_TRY(check_args(p, args->forward, nullptr, 0, host_memory, &args->of));
  if (total_q(p, args->of) != p.total_q)
    return invalid("forward.total_q is ", args->of.total_q, "; accepted: the problem's ",
                   p.total_q);
  args->forward = &args->of;

  if (p.out_bytes.width > 0 && !args->of.lse)
    return invalid("lse is NULL; accepted for backward: the lse of the forward run");
  if (p.out_bytes.width > 0 || args->d_out)
    ATTN_TRY(pointer({"d_out"}, args->d_out, true, data_alignment(b.d_out_type, host_memory),
                     "the gradient of out"));
  if (args->d_lse) ATTN_TRY(pointer({"d_lse"}, args->d_lse, true, 4, ""));

  const Footprint sinks(4, {p.batch == 0 ? 0 : p.heads_q}), work(int64_t(workspace_bytes), {});
  struct Written {
    const char* name;
    void* address;
    const Footprint* bytes;
    uint32_t gradient;
    attn_dtype type;
    const char* why;
  };
  const Written all[] = {
      {"dq", args->dq, &b.dq_bytes, ATTN_GRAD_Q, b.dq_type, "ATTN_GRAD_Q in gradients"},
      {"dk", args->dk, &b.dk_bytes, ATTN_GRAD_K, b.dk_type, "ATTN_GRAD_K in gradients"},
      {"dv", args->dv, &b.dv_bytes, ATTN_GRAD_V, b.dv_type, "ATTN_GRAD_V in gradients"},
      {"d_sinks", args->d_sinks, &sinks, ATTN_GRAD_SINKS, ATTN_F32, "ATTN_GRAD_SINKS in gradients"},
      {"d_bias", args->d_bias, &b.d_bias_bytes, ATTN_GRAD_BIAS, b.d_bias_type,
       "ATTN_GRAD_BIAS in gradients"}};
  Placed written[6];
  size_t count = 0;
  for (const Written& w : all) {
    const bool wanted = b.wants(w.gradient);
    const bool small = w.gradient == ATTN_GRAD_SINKS || w.gradient == ATTN_GRAD_BIAS;
    if (!wanted || w.bytes->width > 0 || w.address)
      ATTN_TRY(pointer({w.name}, w.address, wanted,
                       !wanted ? 1
                       : small ? size_t(dtype_bytes(w.type))
                               : data_alignment(w.type, host_memory),
                       w.why));
    if (wanted) written[count++] = {{w.name}, w.address, w.bytes};
  }
  written[count++] = {{"workspace"}, workspace, &work};

  ATTN_TRY(keep_apart_from_inputs(written, count, p, args->of));
  const int64_t rows = p.q_layout == ATTN_PACKED ? p.total_q : p.batch * p.seqlen_q;
  const Footprint lse(4, {p.heads_q, rows});
  return keep_all_apart(written, count, [&](auto&& visit) {
    visit({"out"}, args->of.out, p.out_bytes);
    visit({"lse"}, args->of.lse, lse);
    visit({"d_out"}, args->d_out, b.d_out_bytes);
    visit({"d_lse"}, args->d_lse, lse);
  });
}

}  // namespace attn
