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

std::string segment_prefix(int64_t count, int64_t i) {
  return count == 1 ? "" : join("segment ", i, ": ");
}

// Distances of positions fit 32 bits.
Status check_starts(Name name, const int64_t* values, int64_t count) {
  constexpr int64_t limit = int64_t{1} << 30;
  for (int64_t b = 0; b < count; ++b)
    if (values[b] <= -limit || values[b] >= limit)
      return invalid(name, "[", b, "] is ", values[b], "; accepted: ", 1 - limit, " to ",
                     limit - 1);
  return {};
}

// Of the words in which the segment's arrival is counted. What was written before it is seen after.
Status check_ready(Name name, const uint32_t* words) {
  const uint32_t there = __atomic_load_n(&words[0], __ATOMIC_ACQUIRE), wanted = words[1];
  if (int32_t(there - wanted) >= 0) return {};
  return invalid(name, "[0] is ", there, " and ", name, "[1] ", wanted,
                 "; accepted on reference and cpu, which do not wait: a segment that is there, "
                 "[0] not below [1]");
}

// O(batch): what attn_run checks on host backends.
Status check_host_lengths(const Problem& p, const Args& args) {
  if (p.has(ATTN_QUERY_POSITIONS))
    ATTN_TRY(check_starts({"query_start"}, args.query_start, p.batch));
  if (p.q_layout == ATTN_PACKED)
    ATTN_TRY(
        check_offsets({"cu_seqlens_q"}, args.cu_seqlens_q, p.batch, p.seqlen_q, total_q(p, args)));
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = p.segment[i];
    const attn_segment_args a = args.segment[i];
    const int32_t n = p.num_segments > 1 ? i : -1;
    if (s.has_seqlens)
      ATTN_TRY(check_lengths({"seqlens", n}, a.seqlens, entries(s, p.batch), s.seqlen));
    if (s.layout == ATTN_PACKED)
      ATTN_TRY(check_offsets({"cu_seqlens", n}, a.cu_seqlens, p.batch, s.seqlen, s.total));
    if (s.has_list_lengths)
      ATTN_TRY(check_lengths({"list_lengths", n}, a.list_lengths, p.segment[i].lists, s.list_size));
    if (s.has_key_start) ATTN_TRY(check_starts({"key_start", n}, a.key_start, entries(s, p.batch)));
  }
  if (p.has_kv_begin) return check_lengths({"kv_begin"}, args.kv_begin, p.batch, max_extent - 1);
  return {};
}

// The bytes of q or out in a run.
Footprint tokens_of_run(const Problem& p, const Args& args, const Footprint& whole, attn_dtype type,
                        int64_t dim, attn_strides stride) {
  const int64_t tokens = total_q(p, args);
  if (tokens == p.total_q) return whole;
  return Footprint(type, dim, {{"seq", tokens, &stride.seq}, {"head", p.heads_q, &stride.head}});
}

// Calls visit(name, address, bytes) for each array that a run only reads.
template <class Visit>
void for_each_input(const Problem& p, const Args& args, Visit&& visit) {
  const auto array = [&](Name name, const void* address, int64_t bytes,
                         std::initializer_list<int64_t> extents) {
    visit(name, address, Footprint(bytes, extents));
  };
  visit(Name{"q"}, args.q, tokens_of_run(p, args, p.q_bytes, p.q_type, p.head_dim, p.q_stride));
  if (args.cu_seqlens_q) array({"cu_seqlens_q"}, args.cu_seqlens_q, 4, {p.batch + 1});
  if (args.q_descale) {
    const bool one = p.q_descale == ATTN_DESCALE_TENSOR;
    array({"q_descale"}, args.q_descale, 4, {one ? 1 : p.batch, one ? 1 : p.heads_kv});
  }
  if (args.bias) visit(Name{"bias"}, args.bias, p.bias_bytes);
  if (args.bias_slopes) array({"bias_slopes"}, args.bias_slopes, 4, {p.heads_q});
  if (args.alibi_slopes) array({"alibi_slopes"}, args.alibi_slopes, 4, {p.heads_q});
  if (args.sinks) array({"sinks"}, args.sinks, 4, {p.heads_q});
  if (args.tree)
    array({"tree"}, args.tree, 16,
          {p.q_layout == ATTN_PACKED ? total_q(p, args) : p.batch * p.seqlen_q});
  if (args.out_scale) array({"out_scale"}, args.out_scale, 4, {1});
  if (args.kv_begin) array({"kv_begin"}, args.kv_begin, 4, {p.batch});
  if (args.causal_sequences) array({"causal_sequences"}, args.causal_sequences, 4, {p.batch});
  if (args.query_start) array({"query_start"}, args.query_start, 8, {p.batch});
  if (p.has(ATTN_BLOCK_MASK)) {
    const auto grid = [&](Name name, const void* address, int64_t bytes) {
      array(name, address, bytes, {p.mask_batch, p.mask_heads, p.mask_rows(), p.mask_columns()});
    };
    grid({"block_kinds"}, args.block_kinds, 1);
    if (p.mask_partials > 0) {
      grid({"block_index"}, args.block_index, 4);
      array({"block_bits"}, args.block_bits, 4,
            {p.mask_partials, p.block_q, ceil_div(p.block_k, 32)});
    }
  }
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const Segment& s = p.segment[i];
    const attn_segment_args a = args.segment[i];
    const int32_t n = p.num_segments > 1 ? i : -1;
    for_each_large_array(s, a, n, visit);
    for_each_small_array(s, a, p.kv_shape(), n, visit);
  }
}

// Nothing that a run writes, the workspace included, shares memory with its other arrays.
Status check_overlap(const Problem& p, const Args& args, const void* workspace,
                     size_t workspace_bytes) {
  const int64_t rows = p.q_layout == ATTN_PACKED ? total_q(p, args) : p.batch * p.seqlen_q;
  const Footprint lse_bytes(4, {p.heads_q, rows}), work_bytes(int64_t(workspace_bytes), {}),
      out_bytes = tokens_of_run(p, args, p.out_bytes, p.out_type, p.head_dim_v, p.out_stride);
  const Range out_range(args.out, out_bytes), lse_range(args.lse, lse_bytes),
      work_range(workspace, work_bytes);
  bool meet =
      out_range.meets(lse_range) || work_range.meets(out_range) || work_range.meets(lse_range);
  for_each_input(p, args, [&](Name, const void* address, const Footprint& bytes) {
    const Range input(address, bytes);
    meet |= out_range.meets(input) || lse_range.meets(input) || work_range.meets(input);
  });
  if (!meet) return {};
  const Placed out{{"out"}, args.out, &out_bytes}, lse{{"lse"}, args.lse, &lse_bytes},
      work{{"workspace"}, workspace, &work_bytes};
  ATTN_TRY(keep_apart(out, lse));
  ATTN_TRY(keep_apart(work, out));
  ATTN_TRY(keep_apart(work, lse));
  Status status;
  for_each_input(p, args, [&](Name name, const void* address, const Footprint& bytes) {
    for (const Placed& written : {out, lse, work})
      if (status.ok()) status = keep_apart(written, {name, address, &bytes});
  });
  return status;
}

// A struct of `given` bytes whose bytes from `begin` on this library, whose struct has `size`, does
// not know.
Status check_unknown(const char* name, const void* in, size_t begin, size_t given, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(in);
  for (size_t i = begin; i < given; ++i)
    if (bytes[i] != 0)
      return invalid(name, ".struct_size is ", given, " and byte ", i,
                     " is set; this library knows ", size, " bytes");
  return {};
}

}  // namespace

Status copy_holding(const char* name, const void* in, void* out, size_t size, const Held& held) {
  size_t given = 0, inner = 0;
  if (in) std::memcpy(&given, in, sizeof given);
  if (given < held.at + sizeof inner || given > (size_t{1} << 16))
    return copy_versioned(name, in, out, size);
  const auto* from = static_cast<const char*>(in);
  std::memcpy(&inner, from + held.at, sizeof inner);
  if (inner == held.size) return copy_versioned(name, in, out, size);
  if (inner < held.least)
    return invalid(held.name, ".struct_size is ", inner, "; accepted: sizeof the struct (",
                   held.size, " here)");
  if (inner > given - held.at)
    return invalid(held.name, ".struct_size is ", inner, "; accepted: up to ", given - held.at,
                   ", for ", name, ".struct_size is ", given);
  auto* to = static_cast<char*>(out);
  ATTN_TRY(copy_versioned(held.name, from + held.at, to + held.at, held.size));
  std::memcpy(to, from, held.at);
  std::memcpy(to, &size, sizeof size);
  // The fields after it.
  const size_t at = held.at + held.size, room = size - at, begin = held.at + inner,
               rest = given - begin;
  std::memset(to + at, 0, room);
  std::memcpy(to + at, from + begin, std::min(rest, room));
  return check_unknown(name, in, begin + room, given, size);
}

Status copy_versioned(const char* name, const void* in, void* out, size_t size) {
  if (!in) return invalid(name, " is NULL; accepted: a pointer to its struct");
  size_t given;
  std::memcpy(&given, in, sizeof given);
  // A size that no struct can have would cut a pointer in two.
  if (given < sizeof(size_t) || given > (size_t{1} << 16) || given % alignof(size_t) != 0)
    return invalid(name, ".struct_size is ", given, "; accepted: sizeof the struct (", size,
                   " here)");
  std::memset(out, 0, size);
  std::memcpy(out, in, std::min(given, size));
  std::memcpy(out, &size, sizeof size);
  return check_unknown(name, in, size, given, size);
}

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

Status check_segment_pointers(const Segment& s, const attn_segment_args& a, int32_t n,
                              bool host_memory, bool wants_table) {
  const bool any = s.k_bytes.width > 0;
  if (any || a.k)
    ATTN_TRY(pointer({"k", n}, a.k, true, data_alignment(s.k_type, host_memory), "the keys"));
  if (s.v_in_k) {
    for (const auto& [name, address] :
         {std::pair{"v", a.v}, {"v_scale", a.v_scale}, {"v_descale", (const void*)a.v_descale}})
      if (address) return invalid(Name{name, n}, " is given; accepted with v_in_k: NULL");
  } else if (any || a.v) {
    ATTN_TRY(pointer({"v", n}, a.v, true, data_alignment(s.v_type, host_memory), "the values"));
  }
  const auto scale = [&](const char* name, const void* address, attn_dtype type, const char* why) {
    const size_t alignment = type == ATTN_NVFP4 && !host_memory
                                 ? data_alignment(type, host_memory)
                                 : std::max<size_t>(1, size_t(type_info(type).scale_bytes));
    return pointer({name, n}, address, dtype_has_scales(type), alignment, why);
  };
  if (any || a.k_scale)
    ATTN_TRY(scale("k_scale", a.k_scale, s.k_type, "the scales of keys of a type that has scales"));
  if (!s.v_in_k && (any || a.v_scale))
    ATTN_TRY(
        scale("v_scale", a.v_scale, s.v_type, "the scales of values of a type that has scales"));
  if (s.lists > 0 || a.list)
    ATTN_TRY(pointer({"list", n}, a.list, s.list_size > 0, 4, "list_size"));
  if (s.lists > 0 || a.list_lengths)
    ATTN_TRY(
        pointer({"list_lengths", n}, a.list_lengths, s.has_list_lengths, 4, "has_list_lengths"));
  ATTN_TRY(pointer({"seqlens", n}, a.seqlens, s.has_seqlens, 4, "has_seqlens"));
  ATTN_TRY(
      pointer({"cu_seqlens", n}, a.cu_seqlens, s.layout == ATTN_PACKED, 4, "a packed segment"));
  if (wants_table || s.layout != ATTN_PAGED)
    ATTN_TRY(pointer({"block_table", n}, a.block_table, s.layout == ATTN_PAGED && !s.list_of_pool,
                     4, s.list_of_pool ? "a segment without list_of_pool" : "a paged segment"));
  ATTN_TRY(pointer({"key_start", n}, a.key_start, s.has_key_start, 8, "has_key_start"));
  ATTN_TRY(pointer({"ready", n}, a.ready, s.has_ready, 4, "has_ready"));
  ATTN_TRY(
      pointer({"k_descale", n}, a.k_descale, s.k_descale != ATTN_DESCALE_NONE, 4, "k_descale"));
  return pointer({"v_descale", n}, a.v_descale, s.v_descale != ATTN_DESCALE_NONE && !s.v_in_k, 4,
                 "v_descale");
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

Status check_lengths(Name name, const int32_t* values, int64_t count, int64_t capacity) {
  for (int64_t b = 0; b < count; ++b)
    if (values[b] < 0 || values[b] > capacity)
      return invalid(name, "[", b, "] is ", values[b], "; accepted: 0 to ", capacity);
  return {};
}

Status check_offsets(Name name, const int32_t* values, int64_t batch, int64_t capacity,
                     int64_t total) {
  if (values[0] != 0) return invalid(name, "[0] is ", values[0], "; accepted: 0");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{values[b + 1]} - values[b];
    if (length < 0)
      return invalid(name, "[", b + 1, "] is ", values[b + 1], " after ", values[b],
                     "; accepted: values that do not decrease");
    if (length > capacity)
      return invalid(name, "[", b + 1, "] - ", name, "[", b, "] is ", length, "; accepted: up to ",
                     capacity);
  }
  if (values[batch] > total)
    return invalid(name, "[", batch, "] is ", values[batch], "; accepted: up to ", total,
                   " tokens in the buffer");
  return {};
}

Status check_pages(const std::string& prefix, const attn_segment& s, const int32_t* block_table,
                   int64_t b, int64_t begin, int64_t end) {
  for (int64_t page = begin; page < end; ++page) {
    const int32_t id = block_table[b * s.max_pages + page];
    if (s.num_pages == 0)
      return invalid(prefix, "block_table[", b, ", ", page, "] is ", id,
                     "; accepted: no page, since num_pages is 0");
    if (id < 0 || id >= s.num_pages)
      return invalid(prefix, "block_table[", b, ", ", page, "] is ", id, "; accepted: 0 to ",
                     s.num_pages - 1);
  }
  return {};
}

Status WrittenPages::add(const std::string& prefix, const attn_segment& s,
                         const int32_t* block_table, int64_t b, int64_t begin, int64_t end) {
  ATTN_TRY(check_pages(prefix, s, block_table, b, begin, end));
  for (int64_t n = begin; n < end; ++n) add(block_table[b * s.max_pages + n]);
  return {};
}

Status WrittenPages::check() {
  std::sort(pages_.begin(), pages_.end());
  for (const int64_t page : pages_)
    if (std::binary_search(pages_.begin(), pages_.end(), page + apart_))
      return invalid("page ", page, " of ", k_.name, " and page ", page + apart_, " of ", v_.name,
                     ", both written, are the same memory; accepted: pages of one pool that are "
                     "either keys or values");
  return {};
}

int64_t Problem::keys_right() const {
  int64_t right = has(ATTN_CAUSAL) ? 0 : INT64_MAX;
  if (has(ATTN_WINDOW) && window_right >= 0) right = std::min(right, window_right);
  return right;
}

Status make_problem(const attn_problem* in, Problem* p) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_problem*>(p)));

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

Status check_args(const Problem& p, const attn_args* in, const void* workspace,
                  size_t workspace_bytes, bool host_memory, Args* args) {
  ATTN_TRY(copy_versioned("args", in, static_cast<attn_args*>(args)));
  if (args->num_segments != p.num_segments)
    return invalid("args.num_segments is ", args->num_segments, "; accepted: the problem's ",
                   p.num_segments);
  if (!args->segments)
    return invalid("args.segments is NULL; accepted: num_segments = ", p.num_segments, " structs");
  ATTN_TRY(in_range("args.total_q", args->total_q, 0, p.total_q + 1));
  if (total_q(p, *args) != p.total_q)
    for (const Segment& s : p.segment)
      if (s.list_size > 0)
        return invalid("args.total_q is ", args->total_q,
                       "; accepted with lists of keys: the problem's ", p.total_q);

  const bool any_q = p.out_bytes.width > 0;
  if (any_q || args->q)
    ATTN_TRY(pointer({"q"}, args->q, true, data_alignment(p.q_type, host_memory), "the queries"));
  if (any_q || args->out)
    ATTN_TRY(pointer({"out"}, args->out, true, data_alignment(p.out_type, host_memory),
                     "room for the result"));
  if (args->lse || (any_q && p.has(ATTN_ACCUMULATE)))
    ATTN_TRY(pointer({"lse"}, args->lse, true, 4, "ATTN_ACCUMULATE in flags"));
  ATTN_TRY(pointer({"query_start"}, args->query_start, p.has(ATTN_QUERY_POSITIONS), 8,
                   "ATTN_QUERY_POSITIONS in flags"));
  ATTN_TRY(pointer({"cu_seqlens_q"}, args->cu_seqlens_q, p.q_layout == ATTN_PACKED, 4, "packed q"));
  ATTN_TRY(
      pointer({"q_descale"}, args->q_descale, p.q_descale != ATTN_DESCALE_NONE, 4, "q_descale"));
  ATTN_TRY(pointer({"bias"}, args->bias, p.bias_type != ATTN_DTYPE_NONE,
                   p.bias_type == ATTN_DTYPE_NONE ? 1 : dtype_bytes(p.bias_type), "bias_type"));
  ATTN_TRY(pointer({"bias_slopes"}, args->bias_slopes, p.has(ATTN_BIAS_SLOPES), 4,
                   "ATTN_BIAS_SLOPES in flags"));
  ATTN_TRY(
      pointer({"alibi_slopes"}, args->alibi_slopes, p.has(ATTN_ALIBI), 4, "ATTN_ALIBI in flags"));
  ATTN_TRY(pointer({"sinks"}, args->sinks, p.has(ATTN_SINKS), 4, "ATTN_SINKS in flags"));
  ATTN_TRY(
      pointer({"out_scale"}, args->out_scale, p.has(ATTN_OUT_SCALE), 4, "ATTN_OUT_SCALE in flags"));
  ATTN_TRY(pointer({"block_kinds"}, args->block_kinds, p.has(ATTN_BLOCK_MASK), 1,
                   "ATTN_BLOCK_MASK in flags"));
  if (any_q || args->tree)
    ATTN_TRY(pointer({"tree"}, args->tree, p.tree_keys > 0, 8, "tree_keys above 0"));
  ATTN_TRY(pointer({"kv_begin"}, args->kv_begin, p.has_kv_begin, 4, "has_kv_begin"));
  ATTN_TRY(pointer({"causal_sequences"}, args->causal_sequences, p.has_causal_sequences, 4,
                   "has_causal_sequences"));
  const bool partials = p.has(ATTN_BLOCK_MASK) && p.mask_partials > 0;
  if (partials || !p.has(ATTN_BLOCK_MASK)) {
    ATTN_TRY(pointer({"block_index"}, args->block_index, partials, 4,
                     "ATTN_BLOCK_MASK in flags with mask_partials"));
    ATTN_TRY(pointer({"block_bits"}, args->block_bits, partials, 4,
                     "ATTN_BLOCK_MASK in flags with mask_partials"));
  }

  size_t step;
  std::memcpy(&step, args->segments, sizeof step);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    attn_segment_args a;
    const auto* source = reinterpret_cast<const attn_segment_args*>(
        reinterpret_cast<const char*>(args->segments) + i * step);
    ATTN_TRY(copy_versioned("args.segments", source, &a));
    if (source->struct_size != step)
      return invalid("args.segments[", i, "].struct_size is ", source->struct_size,
                     "; accepted: that of element 0, ", step);
    const int32_t n = p.num_segments > 1 ? i : -1;
    ATTN_TRY(check_segment_pointers(p.segment[i], a, n, host_memory));
  }
  args->segment = {args->segments, step};
  ATTN_TRY(check_overlap(p, *args, workspace, workspace_bytes));
  if (!host_memory) return {};
  for (int32_t i = 0; i < p.num_segments; ++i)
    if (p.segment[i].has_ready)
      ATTN_TRY(check_ready({"ready", p.num_segments > 1 ? i : -1}, args->segment[i].ready));
  return check_host_lengths(p, *args);
}

Status keep_apart_from_inputs(const Placed* written, size_t count, const Problem& p,
                              const Args& args) {
  return keep_all_apart(written, count, [&](auto&& visit) { for_each_input(p, args, visit); });
}

Status check_contents(const Problem& p, const Args& args) {
  ATTN_TRY(check_host_lengths(p, args));
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = p.segment[i];
    const attn_segment_args a = args.segment[i];
    if (s.layout != ATTN_PAGED || s.list_of_pool) continue;
    const std::string prefix = segment_prefix(p.num_segments, i);
    for (int64_t b = 0; b < entries(s, p.batch); ++b) {
      const int64_t length = s.has_seqlens ? a.seqlens[b] : s.seqlen;
      ATTN_TRY(check_pages(prefix, s, a.block_table, b, 0, ceil_div(length, s.page_size)));
    }
  }
  if (p.has(ATTN_BLOCK_MASK)) {
    const int64_t rows = p.mask_rows(), columns = p.mask_columns();
    const int64_t count = p.mask_batch * p.mask_heads * rows * columns;
    for (int64_t n = 0; n < count; ++n) {
      const int kind = args.block_kinds[n];
      const int64_t row = n / columns % rows, column = n % columns;
      if (kind > ATTN_BLOCK_PARTIAL)
        return invalid("block_kinds at block row ", row, ", column ", column, " is ", kind,
                       "; accepted: empty (0), causal (1), full (2), partial (3)");
      if (kind != ATTN_BLOCK_PARTIAL) continue;
      const int32_t index = args.block_index ? args.block_index[n] : -1;
      if (index < 0 || index >= p.mask_partials)
        return invalid("block_index at block row ", row, ", column ", column, " is ", index,
                       "; accepted: 0 to ", p.mask_partials - 1, " for a partial block");
    }
  }
  return {};
}

}  // namespace attn
