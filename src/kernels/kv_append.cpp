// The kernels kv_append_*.
#include <algorithm>
#include <limits>

#include "core/dtype.h"
#include "cpu/kernels.h"
#include "kernels/cuda_forward.h"
#include "kernels/families.h"
#include "kernels/limits.h"
#include "kernels/sm80/kv_append_args.h"
#include "problem/operations.h"

namespace attn {
namespace {

constexpr int64_t max_int = std::numeric_limits<int>::max();

const SmallFloat& small_format(attn_dtype type) {
  return type == ATTN_F16 ? f16_format : type == ATTN_BF16 ? bf16_format : fp8_format(type);
}

// A launch that has each sequence in one block may write the lengths that it reads.
bool one_block_per_sequence(const KvAppendProblem& p) {
  return p.advance_seqlens && p.new_layout != ATTN_PACKED && p.seqlen_new == 1;
}

// Threads of a block that a head of K, V or q has.
int64_t threads_per_head(const KvAppendProblem& p) {
  return 4 * ceil_div(std::max(p.head_dim, p.head_dim_v), 4 * attn_kv_append_elements);
}

// Whether what a thread has at once is whole vectors, of the tables too.
bool all_aligned(const KvAppendProblem& p, const attn_kv_append_args& args) {
  const auto cache = [](attn_dtype type, const attn_strides& stride) {
    return dtype_is_ggml(type) || aligned_strides(type, stride);  // blocks never are
  };
  const auto table = [](const float* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const int64_t half = p.rotary_dim / 2;
  return p.head_dim % attn_kv_append_elements == 0 && p.head_dim_v % attn_kv_append_elements == 0 &&
         half % (p.rotary_interleaved ? 4 : attn_kv_append_elements) == 0 &&
         table(args.rotary_cos) && table(args.rotary_sin) &&
         aligned_strides(p.new_type, p.k_new_stride) &&
         aligned_strides(p.new_type, p.v_new_stride) && aligned_strides(p.new_type, p.q_stride) &&
         aligned_strides(p.new_type, p.q_out_stride) &&
         cache(p.segment.k_type, p.segment.k_stride) && cache(p.segment.v_type, p.segment.v_stride);
}

attn_kv_append_tensor tensor(const void* src, const attn_strides& src_stride, const void* dst,
                             const attn_strides& dst_stride, attn_dtype dst_type, int64_t dim) {
  attn_kv_append_tensor t{};
  t.src = src;
  t.dst = const_cast<void*>(dst);
  set(t.src_stride, src_stride);
  set(t.dst_stride, dst_stride);
  t.format = small_format(dst_type);
  t.dst_type = dst_type;
  t.dim = int(dim);
  return t;
}

template <bool lengths_only>
void pack(const KvAppendProblem& p, const attn_kv_append_args& args, const Target&,
          Parameters* to) {
  const attn_segment& s = p.segment;
  attn_kv_append_kernarg a{};
  a.tensor[0] = tensor(args.k_new, p.k_new_stride, args.cache.k, s.k_stride, s.k_type, p.head_dim);
  a.tensor[1] =
      tensor(args.v_new, p.v_new_stride, args.cache.v, s.v_stride, s.v_type, p.head_dim_v);
  a.tensor[2] = tensor(args.q, p.q_stride, args.q_out, p.q_out_stride, p.new_type, p.head_dim);
  a.tensor[0].descale = descale(s.k_descale, args.cache.k_descale, p.heads_kv, s);
  a.tensor[1].descale = descale(s.v_descale, args.cache.v_descale, p.heads_kv, s);
  a.rotary_cos = args.rotary_cos;
  a.rotary_sin = args.rotary_sin;
  a.cu_seqlens_new = p.new_layout == ATTN_PACKED ? args.cu_seqlens_new : nullptr;
  a.total_new = p.total_new;
  a.lengths = kv_lengths(s, args.cache);
  a.seqlens_out = lengths_only || one_block_per_sequence(p) ? args.seqlens_out : nullptr;
  if (s.layout == ATTN_PAGED) {
    a.block_table = args.cache.block_table;
    a.num_pages = int(std::min(s.num_pages, max_int));
    a.page_size = s.page_size;
    a.max_pages = s.max_pages;
  }
  a.batch = int(p.batch);
  a.seqlen_new = int(p.seqlen_new);
  a.heads_kv = int(p.heads_kv);
  a.heads = int(2 * p.heads_kv + p.heads_q);
  a.threads_per_head = int(threads_per_head(p));
  a.new_type = p.new_type;
  a.half = int(p.rotary_dim / 2);
  a.interleaved = p.rotary_interleaved;
  a.aligned = all_aligned(p, args);
  a.lengths_only = lengths_only;
  store(a, to);
}

Status recipe_sm80(const KvAppendProblem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr int64_t max_heads = 1 << 30, max_y = (1 << 16) - 1;
  const int64_t tokens = p.new_layout == ATTN_PACKED ? p.total_new : p.batch * p.seqlen_new;
  const int64_t heads = 2 * p.heads_kv + p.heads_q;
  if (tokens > max_grid)
    return unsupported("kv_append_sm80: ", tokens, " new tokens; accepted: up to ", max_grid);
  if (heads > max_heads)
    return unsupported("kv_append_sm80: 2 * heads_kv + heads_q is ", heads, "; accepted: up to ",
                       max_heads);
  for (const attn_descale_kind kind : {p.segment.k_descale, p.segment.v_descale})
    if (kind == ATTN_DESCALE_BLOCK &&
        p.heads_kv * ceil_div(p.segment.seqlen, p.segment.descale_block_keys) > max_int)
      return unsupported("kv_append_sm80: heads_kv * ceil(seqlen_kv / ",
                         p.segment.descale_block_keys, ") is ",
                         p.heads_kv * ceil_div(p.segment.seqlen, p.segment.descale_block_keys),
                         "; accepted with descales per block: up to ", max_int);
  // Many small blocks spread better, but one that has a sequence has all its heads.
  const bool whole = one_block_per_sequence(p);
  const int64_t per_head = threads_per_head(p);
  const int64_t threads = std::max(
      per_head, std::min<int64_t>(heads * per_head, whole ? attn_kv_append_max_threads : 128));
  const int64_t blocks =
      whole ? 1 : std::min(ceil_div(heads, threads / per_head), max_y);  // they go on to more heads
  const auto step = [&](const Pack pack, int64_t x, int64_t y, int64_t threads_of_block) {
    recipe->steps.push_back(
        {.image = "kv_append_sm80",
         .kernarg_bytes = sizeof(attn_kv_append_kernarg),
         .launch = {.grid = {uint32_t(x), uint32_t(y), 1},
                    .block = {uint32_t(ceil_div(threads_of_block, int64_t{32}) * 32), 1, 1},
                    .starts_early = device.arch == "sm_90"},
         .pack = pack});
  };
  step(pack_of<pack<false>>, tokens, blocks, threads);
  // Else all blocks must have read the lengths before any writes one.
  if (p.advance_seqlens && !whole)
    step(pack_of<pack<true>>, ceil_div(p.batch, int64_t{128}), 1, 128);
  return {};
}

constexpr Limits host_limits = {.in_types = float_types,
                                .kv_types = float_types | fp8_types | ggml_types,
                                .out_types = float_types,
                                .features = feature_all};
constexpr int64_t max_dim = attn_kv_append_elements * attn_kv_append_max_threads;
constexpr Limits device_limits = {.in_types = float_types,
                                  .kv_types = float_types | fp8_types | ggml_types,
                                  .out_types = float_types,
                                  .features = feature_paged_kv | feature_seqlens |
                                              feature_mixed_kv_types | feature_descale_tensor |
                                              feature_descale_head | feature_descale_block |
                                              feature_any_stride,
                                  .head_dim = {.max = max_dim},
                                  .head_dim_v = {.max = max_dim}};

constinit const Kernel rows[] = {
    {.name = "kv_append_reference",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = host_limits,
     .host = &kv_append_reference_kernel},
    {.name = "kv_append_cpu",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_CPU,
     .limits = host_limits,
     .host = &kv_append_cpu_kernel},
    {.name = "kv_append_sm80",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_CUDA,
     .limits = device_limits,
     .recipe = recipe_of<recipe_sm80>},
};

}  // namespace

std::span<const Kernel> kv_append_rows() {
  return rows;
}

}  // namespace attn
