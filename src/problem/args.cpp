// The arguments of a run: pointers, overlap, and what arrays in host memory contain.
#include <algorithm>
#include <cstring>

#include "problem/problem.h"
#include "problem/rules.h"

namespace attn {
namespace {

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

}  // namespace

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
