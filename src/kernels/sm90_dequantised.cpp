// The kernels fwd_sm90_*_dequantised: dequantise_sm90 writes K and V of fp8, ggml's types, i8, i4,
// f8_e4m3fn_token and nvfp4 as q's type into the workspace, where fwd_sm90_* reads them. Segments
// of q's type it reads where they are.
#include "kernels/sm90_dequantised.h"

#include "kernels/cache/dequantise_args.h"
#include "kernels/families.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/preference.h"

namespace attn {
namespace dequantised {
namespace {

static_assert(int(attn_dequantise_max_segments) == int(attn_sm90_max_segments));

constexpr uint32_t converted_types = fp8_of_cuda | device_ggml_types | type_bit(ATTN_Q4_1) |
                                     type_bit(ATTN_Q5_0) | type_bit(ATTN_Q5_1) |
                                     type_bit(ATTN_IQ4_NL) | device_scale_arrays;
constexpr int64_t max_workspace = int64_t{4} << 30;
constexpr int64_t most_chunks = 8;  // of keys, of an item of dequantise_sm90
constexpr int64_t few_items = 16;   // of a multiprocessor

bool in_place(const Problem& p, const attn_segment& s) {
  return s.k_type == p.q_type && s.v_type == p.q_type;
}

int64_t table_pages(const attn_segment& s) {
  return s.layout == ATTN_PAGED ? ceil_div(s.seqlen, s.page_size) : 0;
}
// Keys in the workspace: all tokens of a packed segment, else this many for each sequence.
int64_t rows_of_sequence(const attn_segment& s) {
  return s.layout == ATTN_PAGED ? table_pages(s) * s.page_size : s.seqlen;
}
int64_t rows(const Problem& p, const attn_segment& s) {
  if (in_place(p, s)) return 0;
  return s.layout == ATTN_PACKED ? s.total : p.batch * rows_of_sequence(s);
}

// Byte offsets in the workspace of a segment's K, V and table of pages.
struct Place {
  int64_t k, v, table, end;
};
constexpr int64_t aligned(int64_t bytes) {
  return int64_t(aligned_bytes(size_t(bytes)));
}
Place place(const Problem& p, const attn_segment& s, int64_t begin) {
  const int64_t row = rows(p, s) * p.heads_kv * dtype_bytes(p.q_type);
  const int64_t v = begin + aligned(row * p.head_dim), table = v + aligned(row * p.head_dim_v);
  const int64_t pages = in_place(p, s) ? 0 : p.batch * table_pages(s);
  return {begin, v, table, table + aligned(pages * int64_t{sizeof(int)})};
}
// What fwd_sm90_* counts items in begins the workspace.
Place place_of(const Problem& p, int32_t i) {
  Place at = place(p, p.segment[0], aligned(int64_t(cleared_bytes(p))));
  for (int32_t n = 1; n <= i; ++n) at = place(p, p.segment[n], at.end);
  return at;
}

// How dequantise_sm90 cuts the keys of sequences.
struct Cut {
  int64_t part_keys, parts, items;
};
// least_queries above 0: only sequences with at least this many queries are converted. The host
// does not know how many there are, so items are small.
Cut cut_of(const Problem& p, const DeviceInfo& device, int least_queries = 0) {
  int64_t longest = 0, chunks = 0;
  for (const attn_segment& s : p.segment) {
    if (in_place(p, s)) continue;
    longest = std::max(longest, s.seqlen);
    chunks += 2 * p.batch * ceil_div(s.seqlen, int64_t{attn_dequantise_keys});
  }
  const int64_t of_item =
      least_queries > 0
          ? 1
          : std::clamp<int64_t>(chunks / (few_items * multiprocessors(p, device)), 1, most_chunks);
  Cut cut{.part_keys = of_item * attn_dequantise_keys, .parts = 0, .items = 0};
  cut.parts = ceil_div(longest, cut.part_keys);
  cut.items = 2 * p.num_segments * p.batch * cut.parts;
  return cut;
}

attn_dequantise_tensor tensor(size_t dst, const attn_strides& stride, attn_dtype type, int64_t dim,
                              const attn_descale& descale, const attn_strides& scale_stride) {
  attn_dequantise_tensor t{};
  t.dst = offset_of<void>(dst);
  set(t.src_stride, stride);
  t.descale = descale;
  t.type = type;
  set(t.scale_stride, scale_stride);
  t.dim = int(dim);
  return t;
}

attn_dequantise_kernarg constants(const Problem& p, const Cut& cut, int least_queries) {
  attn_dequantise_kernarg a{};
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    attn_dequantise_segment& s = a.segment[i];
    s.lengths = kv_lengths(from);
    if (in_place(p, from)) continue;
    const Place at = place_of(p, i);
    s.tensor[0] = tensor(at.k, from.k_stride, from.k_type, p.head_dim,
                         descale(from.k_descale, p.heads_kv, from), from.k_scale_stride);
    s.tensor[1] = tensor(at.v, from.v_stride, from.v_type, p.head_dim_v,
                         descale(from.v_descale, p.heads_kv, from), from.v_scale_stride);
    s.pages = pages(from);
    s.table = offset_of<int>(at.table);
    s.table_pages = int(table_pages(from));
    s.rows = from.layout == ATTN_PACKED ? 0 : rows_of_sequence(from);
  }
  a.total_q = p.total_q;
  a.seqlen_q = int(p.seqlen_q);
  a.mask = p.range_mask();
  a.num_segments = p.num_segments;
  a.heads = int(p.heads_kv);
  a.dst_type = p.q_type;
  a.items = unsigned(cut.items);
  a.batch = unsigned(p.batch);
  a.parts = unsigned(cut.parts);
  a.part_keys = int(cut.part_keys);
  a.least_queries = least_queries;
  return a;
}

void patch(const Problem& p, const Args& args, void* workspace, attn_dequantise_kernarg& a) {
  a.cu_seqlens_q = args.cu_seqlens_q;
  if (args.total_q > 0) a.total_q = args.total_q;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    attn_dequantise_segment& s = a.segment[i];
    patch_lengths(of, &s.lengths);
    if (in_place(p, p.segment[i])) continue;
    attn_dequantise_tensor &k = s.tensor[0], &v = s.tensor[1];
    k.src = of.k, v.src = of.v;
    k.descale.at = of.k_descale, v.descale.at = of.v_descale;
    k.scale = of.k_scale, v.scale = of.v_scale;
    s.pages.block_table = of.block_table;
    rebase(workspace, k.dst, v.dst, s.table);
  }
}

}  // namespace

bool Segments::in_workspace(const Problem& p, int32_t i) {
  return !in_place(p, p.segment[i]);
}

sm90::ReadSegment Segments::segment(const Problem& p, int32_t i) {
  if (!in_workspace(p, i)) return {p.segment[i]};
  const Place at = place_of(p, i);
  sm90::ReadSegment s = {p.segment[i], true, size_t(at.k), size_t(at.v), size_t(at.table)};
  s.k_type = s.v_type = p.q_type;
  s.shared = 0;  // each sequence has a copy
  s.k_descale = s.v_descale = ATTN_DESCALE_NONE;
  const bool paged = s.layout == ATTN_PAGED;
  const auto contiguous = [&](int64_t dim) {
    const int64_t row = p.heads_kv * dim;
    return attn_strides{std::max<int64_t>(1, paged ? s.page_size : s.seqlen) * row, row, dim};
  };
  s.k_stride = contiguous(p.head_dim);
  s.v_stride = contiguous(p.head_dim_v);
  s.max_pages = int32_t(table_pages(s));
  s.num_pages = p.batch * s.max_pages;
  if (!paged) s.table_at = 0;
  return s;
}

size_t cleared_bytes(const Problem& p) {
  return p.has(ATTN_BLOCK_MASK) ? sizeof(attn_sm90_order) : sizeof(unsigned);
}
size_t workspace_bytes(const Problem& p) {
  return size_t(place_of(p, p.num_segments - 1).end);
}

Status check(const Problem& p, const DeviceInfo& device) {
  if (!((p.needs.k_types | p.needs.v_types) & converted_types))
    return unsupported("all K and V are of ", dtype_name(p.q_type), " as q");
  if (p.q_descale != ATTN_DESCALE_NONE)
    return unsupported("q_descale is ", int(p.q_descale), "; accepted: none (0)");
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = p.segment[i];
    for (const auto& [name, kind] :
         {std::pair{"k_descale", s.k_descale}, {"v_descale", s.v_descale}}) {
      if (kind == ATTN_DESCALE_NONE) continue;
      if (p.q_type == ATTN_F16)
        return unsupported("segments[", i, "]: ", name, " is ", int(kind),
                           " with q of f16, whose range the product may leave; accepted: none (0)");
      if (kind != ATTN_DESCALE_BLOCK) continue;
      const int64_t descales = p.heads_kv * ceil_div(s.seqlen, s.descale_block_keys);
      if (descales > INT32_MAX)
        return unsupported("heads_kv * ceil(seqlen / ", s.descale_block_keys, ") is ", descales,
                           "; accepted with descales per block: up to ", int64_t{INT32_MAX});
    }
    if (s.layout == ATTN_PAGED && s.num_pages > INT32_MAX)
      return unsupported("num_pages is ", s.num_pages, "; accepted: up to ", int64_t{INT32_MAX});
  }
  double bytes = 0;  // which integers may not hold
  for (const attn_segment& s : p.segment) {
    if (in_place(p, s)) continue;
    bytes += double(s.layout == ATTN_PACKED ? s.total : p.batch) *
             double(s.layout == ATTN_PACKED ? 1 : rows_of_sequence(s)) * double(p.heads_kv) *
             double(dtype_bytes(p.q_type, p.head_dim + p.head_dim_v));
  }
  if (bytes > double(max_workspace))
    return unsupported("k and v as ", dtype_name(p.q_type), " take a workspace of ", bytes,
                       " bytes; accepted: up to ", max_workspace);
  const Cut cut = cut_of(p, device);
  if (cut.items > max_grid)
    return unsupported("2 * num_segments * batch * ceil(seqlen / ", cut.part_keys, ") is ",
                       cut.items, "; accepted: up to ", max_grid);
  return {};
}

Step step(const Problem& p, const DeviceInfo& device, int least_queries, bool concurrent) {
  if (p.q_layout != ATTN_PACKED) least_queries = 0;
  const Cut cut = cut_of(p, device, least_queries);
  const int64_t vectors = p.heads_kv * std::max(p.head_dim, p.head_dim_v);  // of a chunk of keys
  const int64_t threads = std::min<int64_t>(ceil_div(vectors, int64_t{32}) * 32,  //
                                            attn_dequantise_threads);
  int64_t blocks = cut.items;
  if (p.max_sms > 0 || least_queries > 0) {
    const int of_multiprocessor = p.max_sms > 0 ? 1
                                  : concurrent  ? attn_dequantise_beside
                                                : attn_dequantise_blocks;
    blocks = std::min(blocks, multiprocessors(p, device) * of_multiprocessor);
  }
  attn_dequantise_kernarg kernarg = constants(p, cut, least_queries);
  kernarg.concurrent = concurrent;
  return {.image = image,
          .fewer_threads = true,
          .launch = {.grid = {uint32_t(blocks), 1, 1},
                     .block = {uint32_t(threads), 1, 1},
                     .starts_early = true},
          .arguments = arguments_of<patch>(kernarg)};
}

}  // namespace dequantised

namespace {

// Both launches. The second one's check is of the number of segments, too.
template <size_t forward>
Status add_launches(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::variants[forward];
  ATTN_TRY(sm90::check<dequantised::Segments>(p, device, variant.tile, variant.with));
  recipe->steps = {dequantised::step(p, device),
                   sm90::forward_step<variant.tile, variant.with, dequantised::Segments>(
                       variant.name, p, device)};
  return {};
}

// The variants of its second launch, as places in sm90::variants.
struct Dequantised {
  const char* name;
  size_t plain, paged, score, score_paged, mask;
};
consteval Dequantised with_variants(const char* name, const char* plain, const char* paged,
                                    const char* score, const char* score_paged, const char* mask) {
  constexpr auto& in = sm90::variants;
  return {name,
          find_variant(in, plain),
          find_variant(in, paged),
          find_variant(in, score),
          find_variant(in, score_paged),
          find_variant(in, mask)};
}
constexpr Dequantised kernels[] = {
    with_variants("fwd_sm90_bf16_d64_dequantised", "fwd_sm90_bf16_d64", "fwd_sm90_bf16_d64_paged",
                  "fwd_sm90_bf16_d64_score", "fwd_sm90_bf16_d64_score_paged",
                  "fwd_sm90_bf16_d64_mask"),
    with_variants("fwd_sm90_bf16_d128_dequantised", "fwd_sm90_bf16_d128",
                  "fwd_sm90_bf16_d128_paged", "fwd_sm90_bf16_d128_score",
                  "fwd_sm90_bf16_d128_score_paged", "fwd_sm90_bf16_d128_mask"),
    with_variants("fwd_sm90_bf16_d192_dv128_dequantised", "fwd_sm90_bf16_d192_dv128",
                  "fwd_sm90_bf16_d256_paged", "fwd_sm90_bf16_d256_score",
                  "fwd_sm90_bf16_d256_score_paged", "fwd_sm90_bf16_d256_mask"),
    with_variants("fwd_sm90_bf16_d256_dequantised", "fwd_sm90_bf16_d256",
                  "fwd_sm90_bf16_d256_paged", "fwd_sm90_bf16_d256_score",
                  "fwd_sm90_bf16_d256_score_paged", "fwd_sm90_bf16_d256_mask"),
    with_variants("fwd_sm90_bf16_d320_dv256_dequantised", "fwd_sm90_bf16_d320_dv256",
                  "fwd_sm90_bf16_d320_dv256_paged", "fwd_sm90_bf16_d320_dv256_score",
                  "fwd_sm90_bf16_d320_dv256_score_paged", "fwd_sm90_bf16_d320_dv256_mask"),
    with_variants("fwd_sm90_bf16_d512_dequantised", "fwd_sm90_bf16_d512",
                  "fwd_sm90_bf16_d512_paged", "fwd_sm90_bf16_d512_score",
                  "fwd_sm90_bf16_d512_score_paged", "fwd_sm90_bf16_d512_mask"),
    with_variants("fwd_sm90_f16_d64_dequantised", "fwd_sm90_f16_d64", "fwd_sm90_f16_d64_paged",
                  "fwd_sm90_f16_d64_score", "fwd_sm90_f16_d64_score_paged",
                  "fwd_sm90_f16_d64_mask"),
    with_variants("fwd_sm90_f16_d128_dequantised", "fwd_sm90_f16_d128", "fwd_sm90_f16_d128_paged",
                  "fwd_sm90_f16_d128_score", "fwd_sm90_f16_d128_score_paged",
                  "fwd_sm90_f16_d128_mask"),
    with_variants("fwd_sm90_f16_d192_dv128_dequantised", "fwd_sm90_f16_d192_dv128",
                  "fwd_sm90_f16_d256_paged", "fwd_sm90_f16_d256_score",
                  "fwd_sm90_f16_d256_score_paged", "fwd_sm90_f16_d256_mask"),
    with_variants("fwd_sm90_f16_d256_dequantised", "fwd_sm90_f16_d256", "fwd_sm90_f16_d256_paged",
                  "fwd_sm90_f16_d256_score", "fwd_sm90_f16_d256_score_paged",
                  "fwd_sm90_f16_d256_mask"),
    with_variants("fwd_sm90_f16_d320_dv256_dequantised", "fwd_sm90_f16_d320_dv256",
                  "fwd_sm90_f16_d320_dv256_paged", "fwd_sm90_f16_d320_dv256_score",
                  "fwd_sm90_f16_d320_dv256_score_paged", "fwd_sm90_f16_d320_dv256_mask"),
    with_variants("fwd_sm90_f16_d512_dequantised", "fwd_sm90_f16_d512", "fwd_sm90_f16_d512_paged",
                  "fwd_sm90_f16_d512_score", "fwd_sm90_f16_d512_score_paged",
                  "fwd_sm90_f16_d512_mask"),
};

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr Dequantised kernel = kernels[i];
  ATTN_TRY(dequantised::check(p, device));
  recipe->passed_over = prefer_other_to_dequantised(p);
  recipe->workspace = dequantised::workspace_bytes(p);
  recipe->cleared = dequantised::cleared_bytes(p);
  const bool pages = p.needs.features & feature_paged_kv,
             changes = p.softcap > 0 || p.has(ATTN_ALIBI | ATTN_SPLIT_INVARIANT) || p.scale <= 0;
  if (p.has(ATTN_BLOCK_MASK)) {
    if (pages || changes)
      return unsupported(
          "a block mask with ",
          pages ? "paged K/V" : "softcap, ALiBi, split_invariant or a scale not above 0",
          "; accepted: without");
    return add_launches<kernel.mask>(p, device, recipe);
  }
  if (changes)
    return pages ? add_launches<kernel.score_paged>(p, device, recipe)
                 : add_launches<kernel.score>(p, device, recipe);
  return pages ? add_launches<kernel.paged>(p, device, recipe)
               : add_launches<kernel.plain>(p, device, recipe);
}

constinit const std::array all_rows =
    rows_of_variants<std::size(kernels)>([]<size_t i>() -> Kernel {
      constexpr Dequantised kernel = kernels[i];
      constexpr const sm90::Variant& plain = sm90::variants[kernel.plain];
      return {
          .name = kernel.name,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = {.in_types = type_bit(attn_dtype(plain.type)),
                     .kv_types = dequantised::converted_types | type_bit(attn_dtype(plain.type)),
                     .out_types = float_types,
                     .flags = forward_flags | ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                     .features = forward_features | feature_segments | feature_paged_kv |
                                 feature_softcap | feature_mixed_kv_types | kv_descale_features |
                                 feature_any_ggml_stride | feature_shared_pages |
                                 feature_shared_descales | feature_key_parts | feature_kv_begin,
                     .head_dim = {.multiple = attn_dequantise_elements, .max = plain.tile.head_dim},
                     .head_dim_v = {.multiple = attn_dequantise_elements,
                                    .max = plain.tile.head_dim_v},
                     .page_size = {.multiple = attn_dequantise_keys}},
          .numerics = {.weights = attn_dtype(plain.type),
                       .lag = 8,
                       .keys = plain.tile.keys,
                       .causal_last_first = true,
                       .rounded_largest = true,
                       .largest_score = sm90::largest_score(plain),
                       .rounds_kv = true},
          .recipe = recipe_of<make_recipe<i>>,
          .first_images = {dequantised::image},
          .image = plain.name};
    });

}  // namespace

std::span<const Kernel> sm90_dequantised_rows() {
  return all_rows;
}

}  // namespace attn
