// The kernels kv_append_* and kv_roll_cuda, which appends as kv_append_cuda does.
#include <algorithm>
#include <bit>
#include <limits>

#include "asm/gfx942/kv_append_args.h"
#include "core/dtype.h"
#include "cpu/kernels.h"
#include "kernels/cache/kv_append_args.h"
#include "kernels/cuda_forward.h"
#include "kernels/families.h"
#include "kernels/gfx942.h"
#include "kernels/gfx942_convert.h"
#include "kernels/limits.h"
#include "problem/operations.h"

namespace attn {
namespace {

constexpr int64_t max_int = std::numeric_limits<int>::max();
constexpr int64_t max_blocks_y = (1 << 16) - 1;  // on CUDA

const SmallFloat& small_format(attn_dtype type) {
  if (type == ATTN_F8_E4M3FN_TOKEN) return e4m3fn_format;
  return type == ATTN_F16 ? f16_format : type == ATTN_BF16 ? bf16_format : fp8_format(type);
}

// A launch that has each of these sequences in one block may write the lengths that it reads.
bool one_token_per_sequence(const KvAppendProblem& p) {
  return p.advance_seqlens && p.new_layout != ATTN_PACKED && p.seqlen_new == 1;
}

int64_t new_tokens(const KvAppendProblem& p) {
  return p.new_layout == ATTN_PACKED ? p.total_new : p.batch * p.seqlen_new;
}

// Whether what a thread has at once is whole vectors, of the tables too.
bool aligned_cache(attn_dtype type, const attn_strides& stride) {
  return dtype_is_ggml(type) || aligned_strides(type, stride);  // blocks never are
}
template <class P>
bool aligned_rows(const P& p, attn_dtype type, const attn_strides& k_stride,
                  const attn_strides& v_stride, const attn_segment& cache) {
  return p.head_dim % attn_kv_append_elements == 0 && p.head_dim_v % attn_kv_append_elements == 0 &&
         aligned_strides(type, k_stride) && aligned_strides(type, v_stride) &&
         aligned_cache(cache.k_type, cache.k_stride) && aligned_cache(cache.v_type, cache.v_stride);
}
// But for where a run's tables are.
bool all_aligned(const KvAppendProblem& p) {
  const int64_t half = p.rotary_dim / 2;
  return aligned_rows(p, p.new_type, p.k_new_stride, p.v_new_stride, p.segment) &&
         half % (p.rotary_interleaved ? 4 : attn_kv_append_elements) == 0 &&
         aligned_strides(p.new_type, p.q_stride) && aligned_strides(p.new_type, p.q_out_stride);
}
bool aligned_table(const float* at) {
  return reinterpret_cast<uintptr_t>(at) % 16 == 0;
}

attn_kv_append_tensor tensor(const attn_strides& src_stride, const attn_strides& dst_stride,
                             attn_dtype dst_type, int64_t dim) {
  attn_kv_append_tensor t{};
  set(t.src_stride, src_stride);
  set(t.dst_stride, dst_stride);
  t.format = small_format(dst_type);
  t.dst_type = dst_type;
  t.dim = int(dim);
  return t;
}

// Where tokens go: descales, and pages if there are any.
template <class Kernarg>
void set_cache(const attn_segment& s, int64_t heads_kv, Kernarg* a) {
  a->tensor[0].descale = descale(s.k_descale, heads_kv, s);
  a->tensor[1].descale = descale(s.v_descale, heads_kv, s);
  if (s.layout != ATTN_PAGED) return;
  a->num_pages = int(std::min(s.num_pages, max_int));
  a->page_size = s.page_size;
  a->max_pages = s.max_pages;
}
template <class Kernarg>
void patch_cache(const attn_segment_args& args, Kernarg* a) {
  a->tensor[0].dst = const_cast<void*>(args.k);
  a->tensor[1].dst = const_cast<void*>(args.v);
  a->tensor[0].descale.at = args.k_descale;
  a->tensor[1].descale.at = args.v_descale;
  a->block_table = args.block_table;
}

// What the arguments of kv_append_* on CUDA and gfx9 say alike.
template <class Kernarg>
void set_common(const KvAppendProblem& p, bool lengths_only, Kernarg* a) {
  set_cache(p.segment, p.heads_kv, a);
  a->batch = int(p.batch);
  a->seqlen_new = int(p.seqlen_new);
  a->new_type = p.new_type;
  a->half = int(p.rotary_dim / 2);
  a->interleaved = p.rotary_interleaved;
  a->aligned = all_aligned(p);
  a->lengths_only = lengths_only;
}
template <class Kernarg>
void patch_common(const KvAppendProblem& p, const attn_kv_append_args& args, Kernarg* a) {
  patch_cache(args.cache, a);
  a->tensor[0].src = args.k_new;
  a->tensor[1].src = args.v_new;
  a->tensor[2].src = args.q;
  a->tensor[2].dst = args.q_out;
  a->rotary_cos = args.rotary_cos;
  a->rotary_sin = args.rotary_sin;
  a->aligned &= aligned_table(args.rotary_cos) && aligned_table(args.rotary_sin);
  a->cu_seqlens_new = args.cu_seqlens_new;
  a->seqlens_out = a->lengths_only || one_token_per_sequence(p) ? args.seqlens_out : nullptr;
  if (p.has_slots) a->slot_mapping = reinterpret_cast<const long long*>(args.slot_mapping);
}

void set_scales(const attn_segment& s, attn_kv_append_kernarg* a) {
  set(a->tensor[0].scale_stride, s.k_scale_stride);
  set(a->tensor[1].scale_stride, s.v_scale_stride);
  a->row_scales = 0;
  for (const attn_dtype type : {s.k_type, s.v_type})
    if (has_row_scale(type) || type == ATTN_F8_E4M3FN_TOKEN) a->row_scales = 1;
}
void patch_scales(const attn_segment_args& args, attn_kv_append_kernarg* a) {
  a->tensor[0].scale = const_cast<void*>(args.k_scale);
  a->tensor[1].scale = const_cast<void*>(args.v_scale);
}

// Which heads a warp has, or which warps a head.
template <class P>
void set_units(const P& p, int64_t heads_q, attn_kv_append_kernarg* a) {
  constexpr int64_t log_warp = 5;
  const int64_t threads = ceil_div(std::max(p.head_dim, p.head_dim_v), attn_kv_append_elements);
  const int64_t log_head = std::max<int64_t>(2, std::bit_width(uint64_t(threads - 1)));
  const int64_t heads = int64_t{1} << std::max<int64_t>(0, log_warp - log_head);  // of a unit
  a->heads_kv = int(p.heads_kv);
  a->heads_q = int(heads_q);
  a->units_kv = int(ceil_div(p.heads_kv, heads));
  a->units = int(2 * a->units_kv + ceil_div(heads_q, heads));
  a->log_head = int(log_head);
  a->log_unit = int(std::max(log_warp, log_head));
}

attn_kv_append_kernarg constants(const KvAppendProblem& p) {
  const attn_segment& s = p.segment;
  attn_kv_append_kernarg a{};
  a.tensor[0] = tensor(p.k_new_stride, s.k_stride, s.k_type, p.head_dim);
  a.tensor[1] = tensor(p.v_new_stride, s.v_stride, s.v_type, p.head_dim_v);
  a.tensor[2] = tensor(p.q_stride, p.q_out_stride, p.new_type, p.head_dim);
  set_scales(s, &a);
  set_common(p, false, &a);
  a.total_new = p.total_new;
  a.lengths = kv_lengths(s);
  set_units(p, p.heads_q, &a);
  return a;
}
bool one_block_per_sequence(const KvAppendProblem& p, const attn_kv_append_kernarg& a) {
  return one_token_per_sequence(p) && a.units << a.log_unit <= attn_kv_append_max_threads;
}
void patch(const KvAppendProblem& p, const attn_kv_append_args& args, void*,
           attn_kv_append_kernarg& a) {
  patch_common(p, args, &a);
  if (!a.lengths_only && !one_block_per_sequence(p, a)) a.seqlens_out = nullptr;
  patch_scales(args.cache, &a);
  patch_lengths(args.cache, &a.lengths);
}

Status check_descales(const char* kernel, int64_t heads_kv, const attn_segment& s) {
  for (const auto& [type, kind] : {std::pair{s.k_type, s.k_descale}, {s.v_type, s.v_descale}})
    if (type == ATTN_F8_E4M3FN_TOKEN && kind != ATTN_DESCALE_NONE)
      return unsupported(kernel, ": a descale of kind ", int(kind), " with ", dtype_name(type),
                         "; accepted: none (0)");
  for (const attn_descale_kind kind : {s.k_descale, s.v_descale})
    if (kind == ATTN_DESCALE_BLOCK && heads_kv * ceil_div(s.seqlen, s.descale_block_keys) > max_int)
      return unsupported(kernel, ": heads_kv * ceil(seqlen_kv / ", s.descale_block_keys, ") is ",
                         heads_kv * ceil_div(s.seqlen, s.descale_block_keys),
                         "; accepted with descales per block: up to ", max_int);
  return {};
}

Status check_slots(const char* kernel, const KvAppendProblem& p) {
  const attn_segment& s = p.segment;
  if (p.has_slots && s.num_pages * s.page_size > max_int)
    return unsupported(kernel, ": num_pages * page_size is ", s.num_pages * s.page_size,
                       "; accepted with slot_mapping: up to ", max_int);
  return {};
}

// What a launch consists of.
struct Blocks {
  int64_t x, y, threads;
};
// Thread blocks of few units spread better. With many tokens a block gets several, because it loads
// the elements of one token while it converts those of another. There are then as many blocks as
// the device runs at once, or a small multiple of it. whole: a block has all units of one token.
Blocks cut(int64_t tokens, bool whole, const DeviceInfo& device, attn_kv_append_kernarg* a) {
  constexpr int64_t usual_threads = 128, most = attn_kv_append_max_tokens;
  const int64_t unit = int64_t{1} << a->log_unit;
  const int64_t units = whole ? a->units : std::clamp<int64_t>(usual_threads / unit, 1, a->units);
  const int64_t y = ceil_div(int64_t{a->units}, units);
  const int64_t at_once = device.multiprocessors * (attn_kv_append_max_threads / (units * unit));
  const int64_t times = std::max<int64_t>(1, ceil_div(tokens * y, at_once * most));
  a->tokens = int(tokens);
  a->tokens_of_block = whole ? 1 : int(std::max<int64_t>(1, ceil_div(tokens * y, at_once * times)));
  return {ceil_div(tokens, int64_t{a->tokens_of_block}), y, units * unit};
}

Step step_of(const char* image, const DeviceInfo& device, Arguments arguments,
             const Blocks& blocks) {
  return {.image = image,
          .static_shared_bytes = attn_kv_append_shared_bytes,
          .fewer_threads = true,
          .launch = {.grid = {uint32_t(blocks.x), uint32_t(blocks.y), 1},
                     .block = {uint32_t(blocks.threads), 1, 1},
                     .starts_early = device.arch == "sm_90"},
          .arguments = std::move(arguments)};
}

Status recipe_cuda(const KvAppendProblem& p, const DeviceInfo& device, Recipe* recipe) {
  const char* const kernel = "kv_append_cuda";
  const int64_t tokens = new_tokens(p), heads = 2 * p.heads_kv + p.heads_q;
  if (tokens > max_grid)
    return unsupported(kernel, ": ", tokens, " new tokens; accepted: up to ", max_grid);
  if (heads > max_blocks_y)
    return unsupported(kernel, ": 2 * heads_kv + heads_q is ", heads, "; accepted: up to ",
                       max_blocks_y);
  ATTN_TRY(check_slots(kernel, p));
  ATTN_TRY(check_descales(kernel, p.heads_kv, p.segment));
  attn_kv_append_kernarg a = constants(p);
  const bool whole = one_block_per_sequence(p, a);
  const auto step = [&](const Blocks& blocks) {
    recipe->steps.push_back(step_of(kernel, device, arguments_of<patch>(a), blocks));
  };
  step(cut(tokens, whole, device, &a));
  // Else all blocks must have read the lengths before any writes one.
  if (!p.advance_seqlens || whole) return {};
  a.lengths_only = true;
  step({ceil_div(p.batch, int64_t{128}), 1, 128});
  return {};
}

// ---- kv_roll ----

attn_kv_roll_kernarg roll_constants(const KvRollProblem& p) {
  const attn_segment &from = p.from, &s = p.to;
  attn_kv_roll_kernarg r{};
  attn_kv_append_kernarg& a = r.append;
  a.tensor[0] = tensor(from.k_stride, s.k_stride, s.k_type, p.head_dim);
  a.tensor[1] = tensor(from.v_stride, s.v_stride, s.v_type, p.head_dim_v);
  set_cache(s, p.heads_kv, &a);
  set_scales(s, &a);
  a.lengths = kv_lengths(s);
  a.batch = int(p.batch);
  a.seqlen_new = int(p.most_moved_keys());
  set_units(p, 0, &a);
  a.new_type = from.k_type;
  a.aligned = aligned_rows(p, from.k_type, from.k_stride, from.v_stride, s);
  r.recent = pages(from);
  r.recent_lengths = kv_lengths(from);
  r.keep = int(p.keep);
  return r;
}
void patch_roll(const KvRollProblem&, const KvRollArgs& args, void*, attn_kv_roll_kernarg& r) {
  attn_kv_append_kernarg& a = r.append;
  patch_cache(args.to, &a);
  patch_scales(args.to, &a);
  patch_lengths(args.to, &a.lengths);
  a.tensor[0].src = args.from.k;
  a.tensor[1].src = args.from.v;
  a.seqlens_out = a.lengths_only ? const_cast<int*>(args.to.seqlens) : nullptr;
  r.recent_table = const_cast<int*>(args.from.block_table);
  r.recent.block_table = args.from.block_table;
  patch_lengths(args.from, &r.recent_lengths);
  r.recent_seqlens_out = const_cast<int*>(args.from.seqlens);
}

Status recipe_roll(const KvRollProblem& p, const DeviceInfo& device, Recipe* recipe) {
  const int64_t tokens = p.batch * p.most_moved_keys(), heads = 2 * p.heads_kv;
  if (tokens > max_grid)
    return unsupported("kv_roll_cuda: batch * the keys that can move is ", tokens,
                       "; accepted: up to ", max_grid);
  if (heads > max_blocks_y)
    return unsupported("kv_roll_cuda: 2 * heads_kv is ", heads, "; accepted: up to ", max_blocks_y);
  ATTN_TRY(check_descales("kv_roll_cuda", p.heads_kv, p.to));
  attn_kv_roll_kernarg r = roll_constants(p);
  const Blocks blocks = cut(tokens, false, device, &r.append);
  const auto step = [&](const Blocks& of) {
    recipe->steps.push_back(step_of("kv_roll_cuda", device, arguments_of<patch_roll>(r), of));
  };
  step(blocks);
  r.append.lengths_only = true;
  step({p.batch, 1, 128});  // all have read the lengths then
  return {};
}

// ---- gfx942, gfx950 ----

static_assert(int(attn_gfx942_append_elements) == attn_kv_append_elements);

attn_gfx942_append_tensor tensor_gfx942(attn_dtype src_type, const attn_strides& src_stride,
                                        attn_dtype dst_type, const attn_strides& dst_stride,
                                        int64_t dim, int64_t heads, int64_t chunk_heads,
                                        Fp8Hardware hardware) {
  attn_gfx942_append_tensor t{};
  set_bytes(t.src_stride, src_type, src_stride);
  set_bytes(t.dst_stride, dst_type, dst_stride);
  t.dst_type = dst_type;
  t.dim = int(dim);
  t.heads = int(heads);
  t.chunks = int(ceil_div(heads, chunk_heads));
  if (dtype_is_fp8(dst_type)) t.fp8 = fp8_codes(dst_type, true, hardware);
  return t;
}

// Threads of a workgroup that a head of K, V or q has.
int64_t threads_per_head(const KvAppendProblem& p) {
  return 4 * ceil_div(std::max(p.head_dim, p.head_dim_v), 4 * attn_kv_append_elements);
}

// How a launch is cut: threads of a workgroup, heads that it has at once, workgroups of a token.
struct AppendShape {
  int64_t threads, heads, workgroups;
};
AppendShape shape_gfx942(const KvAppendProblem& p) {
  constexpr int64_t most = attn_gfx942_append_max_threads, wave = 64;
  const int64_t per_head = threads_per_head(p), heads = std::max(p.heads_kv, p.heads_q);
  const bool whole = one_token_per_sequence(p);
  // Many small workgroups spread better, but one that has a sequence has all its heads.
  const int64_t wanted = std::min(heads * per_head, whole ? most : 2 * wave);
  const int64_t threads = std::min(most, ceil_div(std::max(wanted, per_head), wave) * wave);
  const int64_t at_once = threads / per_head;
  const int64_t chunks = 2 * ceil_div(p.heads_kv, at_once) + ceil_div(p.heads_q, at_once);
  return {threads, at_once, whole ? 1 : std::min(chunks, max_blocks_y)};
}

attn_gfx942_append_kernarg constants_gfx942(const KvAppendProblem& p, const AppendShape& shape,
                                            bool lengths_only, Fp8Hardware hardware) {
  const attn_segment& s = p.segment;
  attn_gfx942_append_kernarg a{};
  a.tensor[0] = tensor_gfx942(p.new_type, p.k_new_stride, s.k_type, s.k_stride, p.head_dim,
                              p.heads_kv, shape.heads, hardware);
  a.tensor[1] = tensor_gfx942(p.new_type, p.v_new_stride, s.v_type, s.v_stride, p.head_dim_v,
                              p.heads_kv, shape.heads, hardware);
  a.tensor[2] = tensor_gfx942(p.new_type, p.q_stride, p.new_type, p.q_out_stride, p.head_dim,
                              p.heads_q, shape.heads, hardware);
  set_common(p, lengths_only, &a);
  a.total_new = int(p.total_new);
  a.by_seqlen_new = divisor(std::max<int64_t>(1, p.seqlen_new));
  a.capacity = int(s.seqlen);
  if (s.layout == ATTN_PAGED) a.by_page_size = divisor(s.page_size);
  a.chunk_heads = int(shape.heads);
  a.head_threads = int(threads_per_head(p));
  a.by_head_threads = divisor(a.head_threads);
  a.chunk_step = int(lengths_only ? shape.threads : shape.workgroups);
  return a;
}
void patch_gfx942(const KvAppendProblem& p, const attn_kv_append_args& args, void*,
                  attn_gfx942_append_kernarg& a) {
  patch_common(p, args, &a);
  a.seqlens = args.cache.seqlens;
}

template <Text name, Fp8Hardware hardware>
Status recipe_gfx9(const KvAppendProblem& p, const DeviceInfo&, Recipe* recipe) {
  constexpr const char* kernel = name_of<name>.text;
  constexpr int64_t max_items = (int64_t{1} << 32) - 1;  // of a HIP grid along x
  const int64_t tokens = new_tokens(p);
  const AppendShape shape = shape_gfx942(p);
  if (tokens > max_items / shape.threads || p.total_new > max_int)
    return unsupported(kernel, ": ", tokens, " new tokens; accepted: up to ",
                       std::min(max_int, max_items / shape.threads));
  const std::pair<const char*, int64_t> strides[] = {
      {"k_new_stride", dtype_bytes(p.new_type, p.k_new_stride.head)},
      {"v_new_stride", dtype_bytes(p.new_type, p.v_new_stride.head)},
      {"k_stride", dtype_bytes(p.segment.k_type, p.segment.k_stride.head)},
      {"v_stride", dtype_bytes(p.segment.v_type, p.segment.v_stride.head)},
      {"q_stride", dtype_bytes(p.new_type, p.q_stride.head)},
      {"q_out_stride", dtype_bytes(p.new_type, p.q_out_stride.head)}};
  for (const auto& [stride, bytes] : strides)
    if (bytes < 0 || bytes > max_items)
      return unsupported(kernel, ": ", stride, ".head is ", bytes, " bytes; accepted: 0 to ",
                         max_items);
  ATTN_TRY(check_slots(kernel, p));
  ATTN_TRY(check_descales(kernel, p.heads_kv, p.segment));
  const auto step = [&](bool lengths_only, int64_t x, int64_t y) {
    recipe->steps.push_back({.image = kernel,
                             .launch = {.grid = {uint32_t(x), uint32_t(y), 1},
                                        .block = {uint32_t(shape.threads), 1, 1}},
                             .arguments = arguments_of<patch_gfx942>(
                                 constants_gfx942(p, shape, lengths_only, hardware))});
  };
  step(false, tokens, shape.workgroups);
  // Else all workgroups must have read the lengths before any writes one.
  if (p.advance_seqlens && !one_token_per_sequence(p))
    step(true, ceil_div(p.batch, shape.threads), 1);
  return {};
}

constexpr Limits host_limits = {
    .in_types = float_types,
    .kv_types = kv_types,
    .out_types = float_types,
    .features = feature_all & ~(feature_kv_begin | feature_causal_sequences)};
constexpr int64_t max_dim = int64_t{attn_kv_append_elements} * attn_gfx942_append_max_threads;
static_assert(int(attn_gfx942_append_max_threads) <= attn_kv_append_max_threads);
constexpr Limits gfx942_limits = {
    .in_types = float_types,
    .kv_types = float_types | device_fp8_types | device_ggml_types,
    .out_types = float_types,
    .features = feature_paged_kv | feature_seqlens | feature_mixed_kv_types | kv_descale_features |
                feature_any_stride | feature_any_ggml_stride | feature_slots,
    .head_dim = {.max = max_dim},
    .head_dim_v = {.max = max_dim}};
constexpr Limits sm80_limits = [] {
  Limits limits = gfx942_limits;
  limits.kv_types |= device_scale_arrays;
  return limits;
}();
constexpr Limits roll_limits = [] {
  Limits limits = sm80_limits;
  limits.features &= ~uint32_t{feature_slots};
  return limits;
}();

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
    {.name = "kv_append_cuda",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_CUDA,
     .limits = sm80_limits,
     .recipe = recipe_of<recipe_cuda>},
    {.name = "kv_roll_reference",
     .op = Op::kv_roll,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = host_limits,
     .host = &kv_roll_reference_kernel},
    {.name = "kv_roll_cpu",
     .op = Op::kv_roll,
     .backend = ATTN_BACKEND_CPU,
     .limits = host_limits,
     .host = &kv_roll_cpu_kernel},
    {.name = "kv_roll_cuda",
     .op = Op::kv_roll,
     .backend = ATTN_BACKEND_CUDA,
     .limits = roll_limits,
     .recipe = recipe_of<recipe_roll>,
     .image = "kv_roll_cuda"},
    {.name = "kv_append_gfx942",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_HIP,
     .limits = gfx942_limits,
     .recipe = recipe_of<recipe_gfx9<"kv_append_gfx942", Fp8Hardware::fnuz>>},
    {.name = "kv_append_gfx950",
     .op = Op::kv_append,
     .backend = ATTN_BACKEND_HIP,
     .limits = gfx942_limits,
     .recipe = recipe_of<recipe_gfx9<"kv_append_gfx950", Fp8Hardware::ocp>>},
};

}  // namespace

std::span<const Kernel> kv_append_rows() {
  return rows;
}

}  // namespace attn
