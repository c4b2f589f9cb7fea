// Appending to a KV cache: the problem and its arguments.
#include <algorithm>
#include <cstddef>

#include "core/dtype.h"
#include "problem/operations.h"
#include "problem/rules.h"

namespace attn {
namespace {

// A tensor with a row for each new token.
Status make_rows(const char* stride_name, const attn_kv_append_problem& p, int64_t heads,
                 int64_t dim, bool written, attn_strides* stride, Footprint* bytes) {
  if (p.new_layout == ATTN_PACKED) {
    stride->batch = 0;
    return make_tensor(stride_name, p.new_type, dim, written,
                       {{"seq", p.total_new, &stride->seq}, {"head", heads, &stride->head}}, bytes);
  }
  return make_tensor(stride_name, p.new_type, dim, written,
                     {{"batch", p.batch, &stride->batch},
                      {"seq", p.seqlen_new, &stride->seq},
                      {"head", heads, &stride->head}},
                     bytes);
}

Status make_new(KvAppendProblem* p) {
  if (p->new_layout != ATTN_PADDED && p->new_layout != ATTN_PACKED)
    return invalid("new_layout is ", int(p->new_layout), "; accepted: padded (0), packed (1)");
  ATTN_TRY(one_of("new_type", p->new_type, float_types));
  if (p->new_layout == ATTN_PACKED)
    ATTN_TRY(in_range("total_new", p->total_new, 0, p->batch == 0 ? 1 : max_total));
  else if (p->total_new)
    return invalid("total_new is ", p->total_new, "; accepted for padded new tokens: 0");
  ATTN_TRY(in_range("heads_q", p->heads_q, 0, max_extent));
  // Strides of 0 make rows of no memory.
  const int64_t tokens = p->new_layout == ATTN_PACKED ? p->total_new : p->batch * p->seqlen_new;
  int64_t rows;
  if (__builtin_mul_overflow(tokens, p->heads_kv + p->heads_q, &rows) || rows >= max_offset)
    return invalid(tokens, " new tokens of ", p->heads_kv + p->heads_q,
                   " heads; accepted: below 2^60 rows");
  ATTN_TRY(make_rows("k_new_stride", *p, p->heads_kv, p->head_dim, false, &p->k_new_stride,
                     &p->k_new_bytes));
  if (p->segment.v_in_k) return {};
  return make_rows("v_new_stride", *p, p->heads_kv, p->head_dim_v, false, &p->v_new_stride,
                   &p->v_new_bytes);
}

// Of has_slots: tokens have no position in a sequence.
Status check_slots(const attn_kv_append_problem& p) {
  const attn_segment& s = p.segment;
  if (p.new_layout != ATTN_PADDED)
    return invalid("new_layout is ", int(p.new_layout),
                   "; accepted with has_slots: padded (0), [1, T, Hkv, D] for all tokens");
  if (s.layout != ATTN_PAGED)
    return invalid("layout is ", int(s.layout), "; accepted with has_slots: paged (2)");
  for (const auto& [name, value] : {std::pair{"has_seqlens", int64_t{s.has_seqlens}},
                                    {"advance_seqlens", int64_t{p.advance_seqlens}},
                                    {"rotary_dim", p.rotary_dim}})
    if (value != 0) return invalid(name, " is ", value, "; accepted with has_slots: 0");
  for (const auto& [name, kind] : {std::pair{"k_descale", s.k_descale}, {"v_descale", s.v_descale}})
    if (kind == ATTN_DESCALE_BLOCK)
      return invalid(name,
                     " is block (3); accepted with has_slots: none (0), tensor (1), head (2)");
  return {};
}

Status make_cache(KvAppendProblem* p) {
  static_cast<attn_segment&>(p->cache) = p->segment;
  if (p->segment.layout == ATTN_PACKED)
    return invalid("layout is packed (1); accepted for a cache: padded (0), paged (2)");
  if (p->has_slots)
    ATTN_TRY(check_slots(*p));
  else if (p->segment.has_seqlens == 0)
    return invalid("has_seqlens is 0; accepted for a cache: 1, new tokens go after its lengths");
  ATTN_TRY(make_segment("", p->kv_shape(), true, &p->cache));
  p->segment = p->cache;
  return {};
}

Status make_rotary(KvAppendProblem* p) {
  if (p->rotary_dim < 0 || p->rotary_dim > p->head_dim || p->rotary_dim % 2 != 0)
    return invalid("rotary_dim is ", p->rotary_dim,
                   "; accepted: even numbers from 0 to head_dim = ", p->head_dim);
  if (p->rotary_interleaved != 0 && p->rotary_interleaved != 1)
    return invalid("rotary_interleaved is ", p->rotary_interleaved, "; accepted: 0, 1");
  if (p->rotary_dim == 0) {
    if (p->rotary_positions || p->rotary_interleaved || p->heads_q)
      return invalid("rotary_positions is ", p->rotary_positions, ", rotary_interleaved ",
                     p->rotary_interleaved, ", heads_q ", p->heads_q,
                     "; accepted without rotary_dim: 0");
    return {};
  }
  ATTN_TRY(in_range("rotary_positions", p->rotary_positions, 0, max_extent));
  if (p->rotary_positions < p->segment.seqlen)
    return invalid("rotary_positions is ", p->rotary_positions,
                   "; accepted: the segment's capacity ", p->segment.seqlen, " or more");
  if (p->heads_q == 0) return {};
  ATTN_TRY(make_rows("q_stride", *p, p->heads_q, p->head_dim, false, &p->q_stride, &p->q_bytes));
  return make_rows("q_out_stride", *p, p->heads_q, p->head_dim, true, &p->q_out_stride,
                   &p->q_out_bytes);
}

Needs needs_of(const KvAppendProblem& p) {
  Needs needs = {.in_type = p.new_type,
                 .out_type = p.heads_q ? p.new_type : ATTN_DTYPE_NONE,
                 .head_dim = p.head_dim,
                 .head_dim_v = p.head_dim_v};
  add_needs(p.segment, &needs);
  if (p.has_slots) needs.features |= feature_slots;
  const auto row = [&](const attn_strides& stride) {
    if (is_negative(stride)) needs.features |= feature_negative_strides;
    if (!aligned_strides(p.new_type, stride)) needs.features |= feature_any_stride;
  };
  row(p.k_new_stride);
  if (!p.segment.v_in_k) row(p.v_new_stride);
  if (p.heads_q) {
    row(p.q_stride);
    row(p.q_out_stride);
  }
  return needs;
}

// Whether element for element q_out is where q is, if their addresses are equal.
bool same_places(const KvAppendProblem& p) {
  const auto same = [](int64_t size, int64_t a, int64_t b) { return size <= 1 || a == b; };
  const bool packed = p.new_layout == ATTN_PACKED;
  const attn_strides &a = p.q_stride, &b = p.q_out_stride;
  return same(packed ? 1 : p.batch, a.batch, b.batch) &&
         same(packed ? p.total_new : p.seqlen_new, a.seq, b.seq) && same(p.heads_q, a.head, b.head);
}

// Calls visit(name, address, bytes) for each array that a run only reads.
template <class Visit>
void for_each_input(const KvAppendProblem& p, const attn_kv_append_args& args, Visit&& visit) {
  visit(Name{"k_new"}, args.k_new, p.k_new_bytes);
  if (!p.segment.v_in_k) visit(Name{"v_new"}, args.v_new, p.v_new_bytes);
  if (args.cu_seqlens_new)
    visit(Name{"cu_seqlens_new"}, args.cu_seqlens_new, Footprint(4, {p.batch + 1}));
  const Footprint table(4, {p.rotary_positions, p.rotary_dim / 2});
  if (args.rotary_cos) visit(Name{"rotary_cos"}, args.rotary_cos, table);
  if (args.rotary_sin) visit(Name{"rotary_sin"}, args.rotary_sin, table);
  if (args.slot_mapping)
    visit(Name{"slot_mapping"}, args.slot_mapping, Footprint(8, {p.batch, p.seqlen_new}));
  visit(Name{"q"}, args.q, p.q_bytes);
  for_each_small_array(p.cache, args.cache, p.kv_shape(), -1, visit);
}

Status check_overlap(const KvAppendProblem& p, const attn_kv_append_args& args) {
  const Footprint lengths(4, {p.batch});
  const Placed written[] = {placed_k("k", p.cache, args.cache),
                            placed_v("v", p.cache, args.cache),
                            {{"k_scale"}, args.cache.k_scale, &p.cache.k_scale_bytes},
                            {{"v_scale"}, args.cache.v_scale, &p.cache.v_scale_bytes},
                            {{"q_out"}, args.q_out, &p.q_out_bytes},
                            {{"seqlens_out"}, args.seqlens_out, &lengths}};
  // What is read where it is written is compared with the others as that.
  attn_kv_append_args read = args;
  if (args.seqlens_out == args.cache.seqlens) read.cache.seqlens = nullptr;
  if (args.q_out == args.q && same_places(p)) read.q = nullptr;
  return keep_all_apart(written, [&](const auto& visit) { for_each_input(p, read, visit); });
}

// The new tokens of a sequence.
int64_t num_new(const KvAppendProblem& p, const attn_kv_append_args& args, int64_t b) {
  if (p.new_layout != ATTN_PACKED) return p.seqlen_new;
  return int64_t{args.cu_seqlens_new[b + 1]} - args.cu_seqlens_new[b];
}

Status check_host_arrays(const KvAppendProblem& p, const attn_kv_append_args& args) {
  const attn_segment& s = p.segment;
  WrittenPages pages(placed_k("k", p.cache, args.cache), placed_v("v", p.cache, args.cache));
  if (p.has_slots) {
    const int64_t slots = s.num_pages * s.page_size;
    for (int64_t n = 0; n < p.batch * p.seqlen_new; ++n) {
      const int64_t slot = args.slot_mapping[n];
      if (slot >= slots)
        return invalid("slot_mapping[", n / p.seqlen_new, ", ", n % p.seqlen_new, "] is ", slot,
                       "; accepted: up to ", slots - 1, ", negative to skip the token");
      if (slot >= 0) pages.add(slot / s.page_size);
    }
    return pages.check();
  }
  if (p.new_layout == ATTN_PACKED)
    ATTN_TRY(
        check_offsets({"cu_seqlens_new"}, args.cu_seqlens_new, p.batch, p.seqlen_new, p.total_new));
  ATTN_TRY(check_lengths({"seqlens"}, args.cache.seqlens, p.batch, s.seqlen));
  if (s.layout != ATTN_PAGED) return {};
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = args.cache.seqlens[b];
    const int64_t end = std::min(begin + num_new(p, args, b), s.seqlen);
    if (begin < end)
      ATTN_TRY(pages.add("", s, args.cache.block_table, b, begin / s.page_size,
                         ceil_div(end, s.page_size)));
  }
  return pages.check();
}

}  // namespace

Status make_kv_append_problem(const attn_kv_append_problem* in, KvAppendProblem* p) {
  ATTN_TRY(copy_holding("problem", in, static_cast<attn_kv_append_problem*>(p),
                        {"segment", offsetof(attn_kv_append_problem, segment), sizeof(attn_segment),
                         offsetof(attn_segment, k_scale_stride)}));
  ATTN_TRY(in_range("batch", p->batch, 0, max_extent));
  ATTN_TRY(in_range("heads_kv", p->heads_kv, 1, max_extent));
  ATTN_TRY(in_range("head_dim", p->head_dim, 1, max_extent));
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  ATTN_TRY(in_range("head_dim_v", p->head_dim_v, 1, max_extent));
  ATTN_TRY(in_range("seqlen_new", p->seqlen_new, 0, max_extent));
  if (p->advance_seqlens != 0 && p->advance_seqlens != 1)
    return invalid("advance_seqlens is ", p->advance_seqlens, "; accepted: 0, 1");
  if (p->has_slots != 0 && p->has_slots != 1)
    return invalid("has_slots is ", p->has_slots, "; accepted: 0, 1");
  ATTN_TRY(make_new(p));
  ATTN_TRY(make_cache(p));
  ATTN_TRY(make_rotary(p));
  p->needs = needs_of(*p);
  p->no_batch = p->batch == 0;
  if (p->kernel) p->kernel_name = p->kernel;
  p->kernel = nullptr;
  return {};
}

Status check_kv_append_args(const KvAppendProblem& p, const attn_kv_append_args* in,
                            bool host_memory, attn_kv_append_args* args) {
  if (p.no_batch) return copy_versioned("args", in, args);
  ATTN_TRY(copy_holding("args", in, args,
                        {"args.cache", offsetof(attn_kv_append_args, cache),
                         sizeof(attn_segment_args), offsetof(attn_segment_args, k_scale)}));
  const size_t alignment = data_alignment(p.new_type, host_memory);
  if (p.k_new_bytes.width > 0) {
    ATTN_TRY(pointer({"k_new"}, args->k_new, true, alignment, "the new keys"));
    if (!p.segment.v_in_k)
      ATTN_TRY(pointer({"v_new"}, args->v_new, true, alignment, "the new values"));
  }
  if (p.segment.v_in_k && args->v_new) return invalid("v_new is given; accepted with v_in_k: NULL");
  ATTN_TRY(pointer({"cu_seqlens_new"}, args->cu_seqlens_new, p.new_layout == ATTN_PACKED, 4,
                   "packed new tokens"));
  ATTN_TRY(check_segment_pointers(p.cache, args->cache, -1, host_memory, !p.has_slots));
  if (!p.has_slots || p.k_new_bytes.width > 0)
    ATTN_TRY(pointer({"slot_mapping"}, args->slot_mapping, p.has_slots, 8, "has_slots"));
  const bool rotary = p.rotary_dim > 0;
  if (!rotary || p.rotary_positions > 0) {
    ATTN_TRY(pointer({"rotary_cos"}, args->rotary_cos, rotary, 4, "rotary_dim"));
    ATTN_TRY(pointer({"rotary_sin"}, args->rotary_sin, rotary, 4, "rotary_dim"));
  }
  const bool queries = p.heads_q > 0;
  if (!queries || p.q_bytes.width > 0) {
    ATTN_TRY(pointer({"q"}, args->q, queries, alignment, "heads_q"));
    ATTN_TRY(pointer({"q_out"}, args->q_out, queries, alignment, "heads_q"));
  }
  ATTN_TRY(pointer({"seqlens_out"}, args->seqlens_out, p.advance_seqlens, 4, "advance_seqlens"));
  ATTN_TRY(check_overlap(p, *args));
  return host_memory ? check_host_arrays(p, *args) : Status{};
}

}  // namespace attn
