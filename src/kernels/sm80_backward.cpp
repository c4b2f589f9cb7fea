// The kernels bwd_sm80_*. They differ by type, by the largest head_dim they take, and by what
// scores have: _score: softcap, bias and ALiBi; _mask: a block mask as well.
#include "kernels/backward.h"
#include "kernels/backward_sm80/variants.h"
#include "kernels/cuda_forward.h"
#include "kernels/families.h"

namespace attn {
namespace {

using bwd_sm80::with_mask, bwd_sm80::with_score;

void patch(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
           attn_bwd_sm80_kernarg& a) {
  patch_sm80_backward(b, args, workspace, &a);
  patch_gradients(b, args, &a.dq, &a.dk, &a.dv);
}

template <size_t i>
Status make_recipe(const BackwardProblem& b, const DeviceInfo& device, Recipe* recipe) {
  constexpr const bwd_sm80::Variant& variant = bwd_sm80::variants[i];
  constexpr bwd_sm80::Tile of_keys = variant.tile(true), of_queries = variant.tile(false);
  constexpr bool both_sums = bwd_sm80::both_sums(variant.head_dim);
  const Problem& p = b.of;
  ATTN_TRY(check_device_gradients(b));
  constexpr int64_t max_length = 1 << 30;  // so that the ends of tiles stay within 32 bits
  if (p.seqlen_q > max_length || p.seqlen_kv > max_length)
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv), "; accepted: up to ",
                       max_length);
  const int64_t queries = p.batch * p.heads_q * ceil_div(p.seqlen_q, of_queries.rows),
                keys = p.batch * p.heads_kv * ceil_div(p.seqlen_kv, of_keys.rows);
  const bool dk = b.wants(ATTN_GRAD_K), dv = b.wants(ATTN_GRAD_V);
  const int64_t items_dv = (both_sums ? dk || dv : dv) ? keys : 0,
                items_dk = !both_sums && dk ? keys : 0,
                items_dq = b.wants(ATTN_GRAD_Q) ? queries : 0;
  if (p.batch * p.heads_q > max_grid || items_dv + items_dk + items_dq > max_grid)
    return unsupported("there are ", items_dv + items_dk + items_dq, " tiles of ", of_keys.rows,
                       " keys and ", of_queries.rows, " queries; accepted: up to ", max_grid);
  const BackwardSpace space = backward_space(b, 0);
  ATTN_TRY(add_prepare_steps(b, device, space, 0, recipe));
  recipe->workspace = space.end;
  attn_bwd_sm80_kernarg a = sm80_backward_arguments(b, space, device);
  a.dq = gradient_array(b, ATTN_GRAD_Q);
  a.dk = gradient_array(b, ATTN_GRAD_K);
  a.dv = gradient_array(b, ATTN_GRAD_V);
  a.items_dv = unsigned(items_dv);
  a.items_dk = unsigned(items_dk);
  a.items_dq = unsigned(items_dq);
  recipe->steps.push_back({
      .image = variant.name,
      .static_shared_bytes = bwd_sm80::static_shared_bytes,
      .launch = {.grid = {uint32_t(items_dv + items_dk + items_dq), 1, 1},
                 .block = {uint32_t(of_keys.threads()), 1, 1},
                 .shared_bytes =
                     bwd_sm80::shared_bytes(variant.head_dim, variant.with & with_score)},
      .arguments = arguments_of<patch>(a),
  });
  return {};
}

constexpr Limits limits(const bwd_sm80::Variant& variant) {
  Limits limits = gradient_limits(attn_dtype(variant.type), variant.head_dim);
  limits.features |= feature_negative_strides;
  if (variant.with & with_score) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap | feature_bias | feature_f16_bias;
  }
  return variant.with & with_mask ? with_block_mask(limits) : limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(bwd_sm80::variants)>([]<size_t i>() -> Kernel {
      constexpr const bwd_sm80::Variant& variant = bwd_sm80::variants[i];
      return gradient_row(variant.name, attn_dtype(variant.type), limits(variant),
                          recipe_of<make_recipe<i>>);
    });

}  // namespace

attn_bwd_sm80_kernarg sm80_backward_arguments(const BackwardProblem& b, const BackwardSpace& space,
                                              const DeviceInfo& device) {
  const Problem& p = b.of;
  attn_bwd_sm80_kernarg a{};
  a.lse2 = offset_of<const float>(space.lse2);
  a.delta = offset_of<const float>(space.delta);
  set(a.q_stride, p.q_stride);
  set(a.k_stride, b.kv().k_stride);
  set(a.v_stride, b.kv().v_stride);
  set(a.d_out_stride, b.d_out_stride);
  std::copy_n(p.bias_stride, 4, a.bias_stride);
  a.rows = backward_rows(p);
  a.kv = kv_lengths(b.kv());
  a.mask = p.range_mask();
  if (p.has(ATTN_BLOCK_MASK)) a.block_mask = mask_arrays(p);
  a.heads_q = int(p.heads_q);
  a.heads_kv = int(p.heads_kv);
  a.group = int(p.group());
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.bias_type = p.bias_type;
  a.query_chunk = pairs_in_l2(p, 24 << 20, device);
  a.key_chunk = std::max<unsigned>(1, a.query_chunk / unsigned(p.group()));
  a.scale = p.scale;
  a.log2_scale = log2_scale(p);
  a.softcap = p.softcap;
  return a;
}

void patch_sm80_backward(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
                         attn_bwd_sm80_kernarg* a) {
  const attn_segment_args kv = args.of.segment[0];
  a->q = args.of.q;
  a->k = kv.k;
  a->v = kv.v;
  a->d_out = args.d_out;
  a->cu_seqlens_q = args.of.cu_seqlens_q;
  a->bias = args.of.bias;
  a->alibi_slopes = args.of.alibi_slopes;
  patch_lengths(kv, &a->kv);
  if (b.of.has(ATTN_BLOCK_MASK)) patch_mask(b.of, args.of, &a->block_mask);
  rebase(workspace, a->lse2, a->delta);
}

std::span<const Kernel> sm80_backward_rows() {
  return all_rows;
}

}  // namespace attn
