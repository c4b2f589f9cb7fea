#include "problem/problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>

#include "core/dtype.h"
#include "problem/rules.h"

namespace attn {

namespace {

constexpr int32_t max_segments = 1024;
constexpr int64_t max_tree_keys = 128;

constexpr uint32_t known_flags = ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW |
                                 ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_SINKS | ATTN_OUT_SCALE |
                                 ATTN_SPLIT_INVARIANT | ATTN_KV_PREFIX_STABLE | ATTN_BIAS_SLOPES |
                                 ATTN_FP8_PRECISE | ATTN_QUERY_POSITIONS | ATTN_ACCUMULATE;

Status check_descale(const std::string& name, attn_descale_kind kind, int32_t block_keys,
                     bool blocks_allowed) {
  if (kind < ATTN_DESCALE_NONE || kind > ATTN_DESCALE_BLOCK ||
      (kind == ATTN_DESCALE_BLOCK && !blocks_allowed))
    return invalid(name, " is ", int(kind), "; accepted: none (0), tensor (1), head (2)",
                   blocks_allowed ? ", block (3)" : "");
  if (kind == ATTN_DESCALE_BLOCK && block_keys != 64 && block_keys != 128)
    return invalid("descale_block_keys is ", block_keys, "; accepted: 64, 128");
  return {};
}

// A row of `inner` elements for each token and head of a segment.
Status make_rows(const std::string& stride_name, attn_dtype type, const attn_segment& s,
                 const KvShape& p, bool written, int64_t inner, attn_strides* stride,
                 Footprint* bytes) {
  switch (s.layout) {
    case ATTN_PADDED:
      return make_tensor(stride_name, type, inner, written,
                         {{"batch", entries(s, p.batch), &stride->batch},
                          {"seq", s.seqlen, &stride->seq},
                          {"head", p.heads_kv, &stride->head}},
                         bytes);
    case ATTN_PACKED:
      stride->batch = 0;  // ignored, by what asks for alignment too
      return make_tensor(stride_name, type, inner, written,
                         {{"seq", s.total, &stride->seq}, {"head", p.heads_kv, &stride->head}},
                         bytes);
    case ATTN_PAGED:
      return make_tensor(stride_name, type, inner, written,
                         {{"batch", s.num_pages, &stride->batch},
                          {"seq", s.page_size, &stride->seq},
                          {"head", p.heads_kv, &stride->head}},
                         bytes);
  }
  return {};
}

Status make_kv(const std::string& name, attn_dtype type, const attn_segment& s, const KvShape& p,
               bool written, int64_t dim, const char* dim_name, attn_strides* stride,
               Footprint* bytes) {
  ATTN_TRY(one_of(name + "_type", type, kv_types));
  ATTN_TRY(whole_blocks(name + ": " + dim_name, type, dim));
  return make_rows(name + "_stride", type, s, p, written, dim, stride, bytes);
}

Status make_scales(const std::string& name, attn_dtype type, const attn_segment& s,
                   const KvShape& p, bool written, int64_t dim, attn_strides* stride,
                   Footprint* bytes) {
  if (dtype_has_scales(type))
    return make_rows(name + "_scale_stride", scale_element(type), s, p, written,
                     scales_of_row(type_info(type), dim), stride, bytes);
  if (stride->batch || stride->seq || stride->head)
    return invalid(name, "_scale_stride is given; accepted for ", name, "_type ", dtype_name(type),
                   ": 0 (only ", type_names(types_with_scales, " and "),
                   " have an array of scales)");
  return {};
}

bool same(const attn_strides& a, const attn_strides& b) {
  return a.batch == b.batch && a.seq == b.seq && a.head == b.head;
}

// V is in K: what the segment says of K holds for V. `given`: its strides before K's were resolved.
Status take_v_from_k(const std::string& name, const KvShape& shape, const attn_segment& given,
                     Segment* s) {
  if (s->v_type != ATTN_DTYPE_NONE && s->v_type != s->k_type)
    return invalid(name, "v_type is ", dtype_text(s->v_type), "; accepted with v_in_k: none, or ",
                   dtype_name(s->k_type), " as k_type");
  if (shape.head_dim_v > shape.head_dim)
    return invalid(name, "head_dim_v is ", shape.head_dim_v,
                   "; accepted with v_in_k: up to head_dim = ", shape.head_dim);
  const int64_t block = dtype_block(s->k_type);
  if (block < shape.head_dim && shape.head_dim_v % block != 0)
    return invalid(name, "v: head_dim_v ", shape.head_dim_v, " is not a multiple of ", block, " (",
                   dtype_name(s->k_type), ")");
  const attn_strides none{};
  for (const auto& [what, stride, of_k] :
       {std::tuple{"v_stride", given.v_stride, given.k_stride},
        {"v_scale_stride", given.v_scale_stride, given.k_scale_stride}})
    if (!same(stride, none) && !same(stride, of_k))
      return invalid(name, what, " is (", stride.batch, ", ", stride.seq, ", ", stride.head,
                     "); accepted with v_in_k: 0, or that of k");
  if (s->v_descale != ATTN_DESCALE_NONE && s->v_descale != s->k_descale)
    return invalid(name, "v_descale is ", int(s->v_descale),
                   "; accepted with v_in_k: none (0), or k_descale");
  s->v_type = s->k_type;
  s->v_stride = s->k_stride;
  s->v_scale_stride = s->k_scale_stride;
  s->v_descale = s->k_descale;
  s->v_bytes = s->v_scale_bytes = {};
  return {};
}

// The lists of a segment's keys.
Status make_lists(const std::string& name, const Problem& p, Segment* s) {
  if (s->no_positions != 0 && s->no_positions != 1)
    return invalid(name, "no_positions is ", s->no_positions, "; accepted: 0, 1");
  if (s->has_list_lengths != 0 && s->has_list_lengths != 1)
    return invalid(name, "has_list_lengths is ", s->has_list_lengths, "; accepted: 0, 1");
  if (s->list_size == 0) {
    if (s->list_block || s->list_queries || s->list_heads || s->list_of_pool || s->has_list_lengths)
      return invalid(name, "list_block is ", s->list_block, ", list_queries ", s->list_queries,
                     ", list_heads ", s->list_heads, ", list_of_pool ", s->list_of_pool,
                     ", has_list_lengths ", s->has_list_lengths, "; accepted without list_size: 0");
    return {};
  }
  if (s->layout == ATTN_PACKED)
    return invalid(name, "list_size is ", s->list_size,
                   " with layout packed (1); accepted: padded (0), paged (2)");
  if (s->list_block == 0) s->list_block = 1;
  if (s->list_queries == 0) s->list_queries = 1;
  if (s->list_heads == 0) s->list_heads = 1;
  for (const auto& [what, value] :
       {std::pair{"list_block", s->list_block}, {"list_queries", s->list_queries}})
    if (value != 1 && value != 64 && value != 128)
      return invalid(name, what, " is ", value, "; accepted: 1, 64, 128");
  ATTN_TRY(in_range(name + "list_size", s->list_size, 1, max_extent / s->list_block));
  if (p.q_layout == ATTN_PACKED && s->list_queries != 1)
    return invalid(name, "list_queries is ", s->list_queries, "; accepted with packed q: 1");
  ATTN_TRY(one_or(name + "list_heads", s->list_heads, p.heads_kv, "heads_kv"));
  if (s->list_of_pool != 0 && s->list_of_pool != 1)
    return invalid(name, "list_of_pool is ", s->list_of_pool, "; accepted: 0, 1");
  if (s->list_of_pool) {
    for (const auto& [what, value, wanted] : {std::tuple{"layout", int(s->layout), int(ATTN_PAGED)},
                                              {"no_positions", int(s->no_positions), 1},
                                              {"list_block", int(s->list_block), 1},
                                              {"has_seqlens", int(s->has_seqlens), 0},
                                              {"max_pages", int(s->max_pages), 0}})
      if (value != wanted)
        return invalid(name, what, " is ", value, "; accepted with list_of_pool: ", wanted);
    // Blocks are of a sequence's keys.
    for (const auto& [what, kind] :
         {std::pair{"k_descale", s->k_descale}, {"v_descale", s->v_descale}})
      if (kind == ATTN_DESCALE_BLOCK)
        return invalid(name, what,
                       " is block (3); accepted with list_of_pool: none (0), tensor (1), head (2)");
    ATTN_TRY(in_range(name + "num_pages * page_size", s->num_pages * s->page_size, 0, max_extent));
  }
  const int64_t queries = p.q_layout == ATTN_PACKED
                              ? p.total_q
                              : p.batch * ceil_div(p.seqlen_q, int64_t{s->list_queries});
  if (__builtin_mul_overflow(queries, s->list_heads, &s->lists) || s->lists >= max_total)
    return invalid(name, queries, " times ", s->list_heads, " lists; accepted: below 2^40");
  return {};
}

// What needs a position of every key that a query may see.
Status check_by_query(const Problem& p) {
  if (!p.by_query) return {};
  const auto segment = std::find_if(p.segment.begin(), p.segment.end(), [](const Segment& s) {
    return s.list_size > 0 || s.no_positions;
  });
  const char* why = segment->list_size > 0 ? "lists of keys" : "no_positions";
  if (p.bias_type != ATTN_DTYPE_NONE)
    return invalid("bias_type is ", dtype_name(p.bias_type), "; accepted with ", why, ": none");
  for (const auto& [name, value] :
       {std::pair{"ATTN_BLOCK_MASK", p.has(ATTN_BLOCK_MASK)}, {"ATTN_ALIBI", p.has(ATTN_ALIBI)}})
    if (value) return invalid("flags has ", name, "; accepted with ", why, ": not");
  if (p.tree_keys > 0) return invalid("tree_keys is ", p.tree_keys, "; accepted with ", why, ": 0");
  if (p.has_kv_begin) return invalid("has_kv_begin is 1; accepted with ", why, ": 0");
  if (p.key_positions()) return invalid("has_key_start is 1; accepted with ", why, ": 0");
  return {};
}

Status make_bias(Problem* p) {
  if (p->bias_type == ATTN_DTYPE_NONE) {
    if (p->has(ATTN_BIAS_SLOPES))
      return invalid("flags has ATTN_BIAS_SLOPES without a bias_type; accepted: f32, f16 or q's");
    return {};
  }
  const uint32_t as_q = p->q_type == ATTN_BF16 ? type_bit(ATTN_BF16) : 0;
  ATTN_TRY(one_of("bias_type", p->bias_type, type_bit(ATTN_F32) | type_bit(ATTN_F16) | as_q));
  if (p->q_layout == ATTN_PACKED) return unsupported("bias with packed q; accepted: padded q");
  return make_tensor("bias_stride", p->bias_type, 1, false,
                     {{"batch", p->batch, &p->bias_stride[0]},
                      {"head", p->heads_q, &p->bias_stride[1]},
                      {"q", p->seqlen_q, &p->bias_stride[2]},
                      {"kv", p->seqlen_kv, &p->bias_stride[3]}},
                     &p->bias_bytes);
}

Status make_block_mask(Problem* p) {
  if (!p->has(ATTN_BLOCK_MASK)) return {};
  ATTN_TRY(in_range("block_q", p->block_q, 1, max_extent));
  ATTN_TRY(in_range("block_k", p->block_k, 1, max_extent));
  if (p->mask_batch == 0) p->mask_batch = 1;
  if (p->mask_heads == 0) p->mask_heads = 1;
  ATTN_TRY(one_or("mask_batch", p->mask_batch, p->batch, "batch"));
  ATTN_TRY(one_or("mask_heads", p->mask_heads, p->heads_q, "heads_q"));
  return in_range("mask_partials", p->mask_partials, 0, max_extent);
}

uint32_t descale_feature(attn_descale_kind kind) {
  switch (kind) {
    case ATTN_DESCALE_TENSOR:
      return feature_descale_tensor;
    case ATTN_DESCALE_HEAD:
      return feature_descale_head;
    case ATTN_DESCALE_BLOCK:
      return feature_descale_block;
    case ATTN_DESCALE_NONE:
      break;
  }
  return 0;
}

// Of a problem with all else resolved.
Needs needs_of(const Problem& p) {
  uint32_t needed = descale_feature(p.q_descale);
  if (p.softcap > 0) needed |= feature_softcap;
  if (p.bias_type != ATTN_DTYPE_NONE) needed |= feature_bias;
  if (p.bias_type == ATTN_F16 && p.q_type != ATTN_F16) needed |= feature_f16_bias;
  if (p.q_layout == ATTN_PACKED) {
    needed |= feature_packed_q;
    if (p.has(ATTN_BLOCK_MASK)) needed |= feature_packed_mask;
  }
  if (p.num_segments > 1) needed |= feature_segments;
  if (p.fixed_split > 0) needed |= feature_fixed_split;
  if (p.tree_keys > 0) needed |= feature_tree;
  if (p.has_kv_begin) needed |= feature_kv_begin;
  if (p.has_causal_sequences) needed |= feature_causal_sequences;
  const auto standard = [](int32_t size) { return size == 64 || size == 128; };
  if (p.has(ATTN_BLOCK_MASK) && !(standard(p.block_q) && standard(p.block_k)))
    needed |= feature_any_block_size;
  const bool bias = p.bias_type != ATTN_DTYPE_NONE;
  if (is_negative(p.q_stride) || is_negative(p.out_stride) ||
      (bias && std::any_of(p.bias_stride, p.bias_stride + 4, [](int64_t s) { return s < 0; })))
    needed |= feature_negative_strides;
  if (!aligned_strides(p.q_type, p.q_stride) || !aligned_strides(p.out_type, p.out_stride))
    needed |= feature_any_stride;
  Needs needs = {.in_type = p.q_type,
                 .out_type = p.out_type,
                 .flags = p.flags,
                 .features = needed,
                 .head_dim = p.head_dim,
                 .head_dim_v = p.head_dim_v,
                 .seqlen_q = p.seqlen_q,
                 .group = p.group()};
  for (const attn_segment& s : p.segment) add_needs(s, &needs);
  return needs;
}

// What one segment says about its keys' positions and arrival.
Status make_places(const std::string& name, bool attends, attn_segment* s) {
  for (const auto& [field, value] :
       {std::pair{"has_key_start", s->has_key_start}, {"has_ready", s->has_ready}}) {
    if (value != 0 && value != 1) return invalid(name, field, " is ", value, "; accepted: 0, 1");
    if (value && !attends) return invalid(name, field, " is 1; accepted except in attention: 0");
  }
  if (!s->has_key_start) {
    if (s->key_interleave || s->key_ranks || s->key_rank)
      return invalid(name, "key_interleave is ", s->key_interleave, ", key_ranks ", s->key_ranks,
                     ", key_rank ", s->key_rank, "; accepted without has_key_start: 0");
    return {};
  }
  if (s->key_interleave == 0) s->key_interleave = 1;
  if (s->key_ranks == 0) s->key_ranks = 1;
  ATTN_TRY(in_range(name + "key_interleave", s->key_interleave, 1, max_extent));
  ATTN_TRY(in_range(name + "key_ranks", s->key_ranks, 1, max_extent));
  return in_range(name + "key_rank", s->key_rank, 0, s->key_ranks);
}

// Rules about positions and accumulation that concern more than one segment.
Status check_shards(const Problem& p) {
  if (p.has(ATTN_ACCUMULATE) && p.out_type != ATTN_F32)
    return invalid("flags has ATTN_ACCUMULATE with out_type ", dtype_name(p.out_type),
                   "; accepted: f32");
  if (p.has(ATTN_QUERY_POSITIONS) && p.has(ATTN_CAUSAL_TOP_LEFT))
    return invalid(
        "flags has ATTN_QUERY_POSITIONS and ATTN_CAUSAL_TOP_LEFT; accepted: one of them, or "
        "ATTN_CAUSAL");
  for (int32_t i = 0; i < p.num_segments; ++i)
    if (p.segment[i].has_key_start != p.segment[0].has_key_start)
      return invalid("segment ", i, ": has_key_start is ", p.segment[i].has_key_start,
                     "; accepted: that of segment 0, ", p.segment[0].has_key_start);
  if (!p.key_positions()) return {};
  if (!p.has(ATTN_QUERY_POSITIONS))
    return invalid("has_key_start is 1; accepted with ATTN_QUERY_POSITIONS in flags");
  if (p.tree_keys > 0 || p.has_kv_begin)
    return invalid("has_key_start is 1 with tree_keys ", p.tree_keys, " and has_kv_begin ",
                   p.has_kv_begin, "; accepted: 0 and 0");
  return {};
}

}  // namespace

int64_t segment_capacity(const attn_segment& s) {
  if (s.seqlen != 0 || s.layout == ATTN_PADDED) return s.seqlen;
  return s.layout == ATTN_PACKED ? s.total : int64_t{s.max_pages} * s.page_size;
}

Status make_segment(const std::string& name, const KvShape& shape, bool written, Segment* s) {
  if (s->layout < ATTN_PADDED || s->layout > ATTN_PAGED)
    return invalid(name, "layout is ", int(s->layout),
                   "; accepted: padded (0), packed (1), paged (2)");
  ATTN_TRY(in_range(name + "seqlen", s->seqlen, 0, max_extent));
  if (s->has_seqlens != 0 && s->has_seqlens != 1)
    return invalid(name, "has_seqlens is ", s->has_seqlens, "; accepted: 0, 1");
  if (s->layout != ATTN_PAGED && (s->page_size || s->num_pages || s->max_pages))
    return invalid(name, "page_size is ", s->page_size, ", num_pages ", s->num_pages,
                   ", max_pages ", s->max_pages, "; accepted for a segment that is not paged: 0");
  if (s->layout != ATTN_PACKED && s->total)
    return invalid(name, "total is ", s->total, "; accepted for a segment that is not packed: 0");
  if (s->layout == ATTN_PACKED) {
    ATTN_TRY(in_range(name + "total", s->total, 0, max_total));
    if (s->has_seqlens)
      return invalid(
          name, "has_seqlens is 1; accepted for a packed segment: 0 (cu_seqlens has the lengths)");
    if (s->seqlen == 0) ATTN_TRY(in_range(name + "total without seqlen", s->total, 0, max_extent));
  }
  if (s->shared != 0 && s->shared != 1)
    return invalid(name, "shared is ", s->shared, "; accepted: 0, 1");
  if (s->shared && s->layout == ATTN_PACKED)
    return invalid(name, "shared is 1 with layout packed (1); accepted: padded (0), paged (2)");
  if (s->shared && !shape.attends)
    return invalid(name, "shared is 1; accepted except in attention: 0");
  if (s->layout == ATTN_PAGED) {
    ATTN_TRY(in_range(name + "page_size", s->page_size, 1, max_extent));
    ATTN_TRY(in_range(name + "max_pages", s->max_pages, 0, max_extent));
    ATTN_TRY(in_range(name + "num_pages", s->num_pages, 0, max_extent));
    const int64_t capacity = int64_t{s->max_pages} * s->page_size;
    if (s->seqlen == 0) ATTN_TRY(in_range(name + "max_pages * page_size", capacity, 0, max_extent));
    if (s->seqlen > capacity)
      return invalid(name, "seqlen is ", s->seqlen,
                     "; accepted: up to max_pages * page_size = ", capacity);
  }
  s->seqlen = segment_capacity(*s);
  if (s->v_in_k != 0 && s->v_in_k != 1)
    return invalid(name, "v_in_k is ", s->v_in_k, "; accepted: 0, 1");
  if (!shape.attends && (s->list_size || s->no_positions))
    return invalid(name, "list_size is ", s->list_size, ", no_positions ", s->no_positions,
                   "; accepted except in attention: 0");
  const attn_segment given = *s;
  ATTN_TRY(make_kv(name + "k", s->k_type, *s, shape, written, shape.head_dim, "head_dim",
                   &s->k_stride, &s->k_bytes));
  ATTN_TRY(make_scales(name + "k", s->k_type, *s, shape, written, shape.head_dim,
                       &s->k_scale_stride, &s->k_scale_bytes));
  if (s->v_in_k) {
    ATTN_TRY(take_v_from_k(name, shape, given, s));
  } else {
    ATTN_TRY(make_kv(name + "v", s->v_type, *s, shape, written, shape.head_dim_v, "head_dim_v",
                     &s->v_stride, &s->v_bytes));
    ATTN_TRY(make_scales(name + "v", s->v_type, *s, shape, written, shape.head_dim_v,
                         &s->v_scale_stride, &s->v_scale_bytes));
  }
  // Whatever the entry of the batch, it is the same element.
  if (s->shared && s->layout == ATTN_PADDED)
    for (attn_strides* stride :
         {&s->k_stride, &s->v_stride, &s->k_scale_stride, &s->v_scale_stride})
      stride->batch = 0;
  ATTN_TRY(make_places(name, shape.attends, s));
  ATTN_TRY(check_descale(name + "k_descale", s->k_descale, s->descale_block_keys, true));
  return check_descale(name + "v_descale", s->v_descale, s->descale_block_keys, true);
}

bool aligned_strides(attn_dtype type, const attn_strides& stride) {
  return dtype_bytes(type, stride.batch) % 16 == 0 && dtype_bytes(type, stride.seq) % 16 == 0 &&
         (dtype_is_ggml(type) || dtype_bytes(type, stride.head) % 16 == 0);
}

void add_needs(const attn_segment& s, Needs* needs) {
  needs->k_types |= type_bit(s.k_type);
  needs->v_types |= type_bit(s.v_type);
  needs->page_size = std::gcd(needs->page_size, s.page_size);
  uint32_t needed = descale_feature(s.k_descale) | descale_feature(s.v_descale);
  if (s.layout == ATTN_PACKED) needed |= feature_packed_kv;
  if (s.layout == ATTN_PAGED) needed |= feature_paged_kv;
  if (s.has_seqlens) needed |= feature_seqlens;
  if (s.v_in_k) needed |= feature_v_in_k;
  if (s.list_size > 0) needed |= feature_lists;
  if (s.no_positions) needed |= feature_no_positions;
  if (s.has_key_start) needed |= feature_key_positions;
  if (s.has_ready) needed |= feature_ready;
  if (s.shared) {
    if (s.has_seqlens) needed |= feature_shared_lengths;
    if (s.layout == ATTN_PAGED) needed |= feature_shared_pages;
    for (const attn_descale_kind kind : {s.k_descale, s.v_descale})
      if (kind == ATTN_DESCALE_HEAD || kind == ATTN_DESCALE_BLOCK)
        needed |= feature_shared_descales;
  }
  if (std::popcount(needs->k_types | needs->v_types) > 1) needed |= feature_mixed_kv_types;
  if (is_negative(s.k_stride) || is_negative(s.v_stride) || is_negative(s.k_scale_stride) ||
      is_negative(s.v_scale_stride))
    needed |= feature_negative_strides;
  for (const auto& [type, stride] : {std::pair{s.k_type, s.k_stride}, {s.v_type, s.v_stride}})
    if (!aligned_strides(type, stride))
      needed |= dtype_is_ggml(type) ? feature_any_ggml_stride : feature_any_stride;
  needs->features |= needed;
}

int64_t Problem::keys_right() const {
  int64_t right = has(ATTN_CAUSAL) ? 0 : INT64_MAX;
  if (has(ATTN_WINDOW) && window_right >= 0) right = std::min(right, window_right);
  return right;
}

namespace {

// Sizes, and the types of q and out.
Status make_sizes(Problem* p) {
  ATTN_TRY(in_range("batch", p->batch, 0, max_extent));
  ATTN_TRY(in_range("heads_q", p->heads_q, 1, max_extent));
  ATTN_TRY(in_range("heads_kv", p->heads_kv, 1, max_extent));
  if (p->heads_q % p->heads_kv != 0)
    return invalid("heads_q is ", p->heads_q, "; accepted: multiples of heads_kv = ", p->heads_kv);
  ATTN_TRY(in_range("head_dim", p->head_dim, 1, max_extent));
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  ATTN_TRY(in_range("head_dim_v", p->head_dim_v, 1, max_extent));
  ATTN_TRY(in_range("seqlen_q", p->seqlen_q, 0, max_extent));

  if (p->q_layout != ATTN_PADDED && p->q_layout != ATTN_PACKED)
    return invalid("q_layout is ", int(p->q_layout), "; accepted: padded (0), packed (1)");
  ATTN_TRY(one_of("q_type", p->q_type, q_types));
  if (p->out_type == ATTN_DTYPE_NONE) p->out_type = dtype_is_fp8(p->q_type) ? ATTN_BF16 : p->q_type;
  ATTN_TRY(one_of("out_type", p->out_type, q_types | type_bit(ATTN_F64)));
  ATTN_TRY(check_descale("q_descale", p->q_descale, 0, false));
  return {};
}

// Flags and scalars.
Status make_options(Problem* p) {
  if (p->flags & ~known_flags)
    return invalid("flags is 0x", std::hex, p->flags, "; accepted: bits of 0x", known_flags);
  if (p->has(ATTN_CAUSAL) && p->has(ATTN_CAUSAL_TOP_LEFT))
    return invalid("flags has ATTN_CAUSAL and ATTN_CAUSAL_TOP_LEFT; accepted: one of them");
  if (p->has(ATTN_OUT_SCALE) && !dtype_is_fp8(p->out_type))
    return invalid("flags has ATTN_OUT_SCALE with out_type ", dtype_name(p->out_type),
                   "; accepted: an fp8 out_type");
  if (p->has(ATTN_FP8_PRECISE) && !dtype_is_fp8(p->q_type))
    return invalid("flags has ATTN_FP8_PRECISE with q_type ", dtype_name(p->q_type),
                   "; accepted: an fp8 q_type");
  if (p->has(ATTN_WINDOW)) {
    ATTN_TRY(window_side("window_left", &p->window_left));
    ATTN_TRY(window_side("window_right", &p->window_right));
  } else if (p->window_left || p->window_right) {
    return invalid("window_left is ", p->window_left, ", window_right ", p->window_right,
                   "; accepted without ATTN_WINDOW in flags: 0");
  }
  if (p->scale == 0) p->scale = float(1 / std::sqrt(double(p->head_dim)));
  if (!std::isfinite(p->scale)) return invalid("scale is ", p->scale, "; accepted: finite values");
  if (!std::isfinite(p->softcap) || p->softcap < 0)
    return invalid("softcap is ", p->softcap, "; accepted: 0 (none) or finite values above it");
  if (p->fixed_split < 0)
    return invalid("fixed_split is ", p->fixed_split, "; accepted: 0 or more keys");
  ATTN_TRY(in_range("tree_keys", p->tree_keys, 0, max_tree_keys + 1));
  if (p->has_kv_begin != 0 && p->has_kv_begin != 1)
    return invalid("has_kv_begin is ", p->has_kv_begin, "; accepted: 0, 1");
  if (p->has_causal_sequences != 0 && !(p->has_causal_sequences == 1 && p->has(ATTN_CAUSAL)))
    return invalid("has_causal_sequences is ", p->has_causal_sequences,
                   "; accepted: 0, and 1 with ATTN_CAUSAL in flags");
  if (p->max_sms < 0) return invalid("max_sms is ", p->max_sms, "; accepted: 0 (all) or more");
  return {};
}

// Strides of q and out.
Status make_queries(Problem* p) {
  const attn_dtype q = p->q_type, o = p->out_type;
  if (p->q_layout == ATTN_PACKED) {
    ATTN_TRY(in_range("total_q", p->total_q, 0, p->batch == 0 ? 1 : max_total));
    p->q_stride.batch = p->out_stride.batch = 0;
    ATTN_TRY(make_tensor(
        "q_stride", q, p->head_dim, false,
        {{"seq", p->total_q, &p->q_stride.seq}, {"head", p->heads_q, &p->q_stride.head}},
        &p->q_bytes));
    ATTN_TRY(make_tensor(
        "out_stride", o, p->head_dim_v, true,
        {{"seq", p->total_q, &p->out_stride.seq}, {"head", p->heads_q, &p->out_stride.head}},
        &p->out_bytes));
  } else {
    if (p->total_q) return invalid("total_q is ", p->total_q, "; accepted for padded q: 0");
    ATTN_TRY(make_tensor("q_stride", q, p->head_dim, false,
                         {{"batch", p->batch, &p->q_stride.batch},
                          {"seq", p->seqlen_q, &p->q_stride.seq},
                          {"head", p->heads_q, &p->q_stride.head}},
                         &p->q_bytes));
    ATTN_TRY(make_tensor("out_stride", o, p->head_dim_v, true,
                         {{"batch", p->batch, &p->out_stride.batch},
                          {"seq", p->seqlen_q, &p->out_stride.seq},
                          {"head", p->heads_q, &p->out_stride.head}},
                         &p->out_bytes));
  }
  return {};
}

Status make_segments(Problem* p) {
  ATTN_TRY(in_range("num_segments", p->num_segments, 1, max_segments + 1));
  if (!p->segments)
    return invalid("segments is NULL; accepted: num_segments = ", p->num_segments, " structs");
  size_t step;
  std::memcpy(&step, p->segments, sizeof step);
  p->segment.resize(p->num_segments);
  p->seqlen_kv = 0;
  for (int32_t i = 0; i < p->num_segments; ++i) {
    const auto* source = reinterpret_cast<const attn_segment*>(
        reinterpret_cast<const char*>(p->segments) + i * step);
    ATTN_TRY(copy_versioned("segments", source, static_cast<attn_segment*>(&p->segment[i])));
    const std::string prefix = segment_prefix(p->num_segments, i);
    ATTN_TRY(make_segment(prefix, p->kv_shape(), false, &p->segment[i]));
    if (i > 0 && p->segment[i].shared && !p->segment[i - 1].shared)
      return invalid(prefix,
                     "shared is 1 after a segment that is not shared; accepted: shared "
                     "segments before all others");
    ATTN_TRY(make_lists(prefix, *p, &p->segment[i]));
    const Segment& s = p->segment[i];
    if (!s.no_positions) p->seqlen_kv += s.seqlen;
    p->most_keys += s.list_size > 0 ? s.list_size * s.list_block : s.seqlen;
    p->by_query |= s.list_size > 0 || s.no_positions;
  }
  if (p->batch <= 1)
    for (Segment& s : p->segment) s.shared = 0;
  p->segments = nullptr;
  ATTN_TRY(in_range("the sum of the segments' seqlen", p->seqlen_kv, 0, max_extent));
  ATTN_TRY(in_range("the sum of the keys of lists and segments", p->most_keys, 0, max_extent));
  return {};
}

}  // namespace

Status make_problem(const attn_problem* in, Problem* p) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_problem*>(p)));
  ATTN_TRY(make_sizes(p));
  ATTN_TRY(make_options(p));
  ATTN_TRY(make_queries(p));
  ATTN_TRY(make_segments(p));
  ATTN_TRY(check_shards(*p));
  ATTN_TRY(make_bias(p));
  ATTN_TRY(make_block_mask(p));
  ATTN_TRY(check_by_query(*p));
  p->needs = needs_of(*p);
  p->no_batch = p->batch == 0;
  if (p->kernel) p->kernel_name = p->kernel;
  p->kernel = nullptr;
  return {};
}

}  // namespace attn
