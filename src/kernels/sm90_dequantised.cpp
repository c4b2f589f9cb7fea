// The kernels fwd_sm90_*_dequantised: dequantise_sm90 writes K and V of fp8, ggml's types, i8 and
// i4 as q's type into the workspace, where fwd_sm90_* reads them. Segments of q's type it reads
// where they are.
#include "kernels/cache/dequantise_args.h"
#include "kernels/families.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/preference.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

static_assert(int(attn_dequantise_max_segments) == int(attn_sm90_max_segments));

constexpr const char* dequantise_image = "dequantise_sm90";
constexpr uint32_t converted_types = fp8_of_cuda | ggml_types | scaled_types;
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
  return ceil_div(bytes, int64_t{256}) * 256;
}
Place place(const Problem& p, const attn_segment& s, int64_t begin) {
  const int64_t row = rows(p, s) * p.heads_kv * dtype_bytes(p.q_type);
  const int64_t v = begin + aligned(row * p.head_dim), table = v + aligned(row * p.head_dim_v);
  const int64_t pages = in_place(p, s) ? 0 : p.batch * table_pages(s);
  return {begin, v, table, table + aligned(pages * int64_t{sizeof(int)})};
}
// What fwd_sm90_* counts items in begins the workspace.
Place place_of(const Problem& p, int32_t i) {
  const size_t items = p.has(ATTN_BLOCK_MASK) ? sizeof(attn_sm90_order) : sizeof(unsigned);
  Place at = place(p, p.segment[0], aligned(int64_t(items)));
  for (int32_t n = 1; n <= i; ++n) at = place(p, p.segment[n], at.end);
  return at;
}

// Segments as fwd_sm90_* gets them.
struct DequantisedSegments {
  static attn_segment segment(const Problem& p, int32_t i) {
    attn_segment s = p.segment[i];
    if (in_place(p, s)) return s;
    s.k_type = s.v_type = p.q_type;
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
    return s;
  }
  static attn_segment_args args(const Problem& p, const Args& args, const Target& target,
                                int32_t i) {
    attn_segment_args of = args.segment[i];
    if (in_place(p, p.segment[i])) return of;
    const Place at = place_of(p, i);
    const char* workspace = static_cast<const char*>(target.workspace);
    of.k = workspace + at.k;
    of.v = workspace + at.v;
    of.block_table = reinterpret_cast<const int32_t*>(workspace + at.table);
    return of;
  }
};

// How dequantise_sm90 cuts the keys of sequences.
struct Cut {
  int64_t part_keys, parts, items;
};
Cut cut_of(const Problem& p, const DeviceInfo& device) {
  int64_t longest = 0, chunks = 0;
  for (const attn_segment& s : p.segment) {
    if (in_place(p, s)) continue;
    longest = std::max(longest, s.seqlen);
    chunks += 2 * p.batch * ceil_div(s.seqlen, int64_t{attn_dequantise_keys});
  }
  const int64_t of_item =
      std::clamp<int64_t>(chunks / (few_items * multiprocessors(p, device)), 1, most_chunks);
  Cut cut{.part_keys = of_item * attn_dequantise_keys, .parts = 0, .items = 0};
  cut.parts = ceil_div(longest, cut.part_keys);
  cut.items = 2 * p.num_segments * p.batch * cut.parts;
  return cut;
}

void pack_dequantise(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  attn_dequantise_kernarg a{};
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    const attn_segment_args of = args.segment[i];
    attn_dequantise_segment& s = a.segment[i];
    s.lengths = kv_lengths(from, of);
    if (in_place(p, from)) continue;
    const attn_segment_args dst = DequantisedSegments::args(p, args, target, i);
    const auto tensor = [&](const void* src, const void* dst, const attn_strides& stride,
                            attn_dtype type, int64_t dim, const attn_descale& descale) {
      attn_dequantise_tensor t{};
      t.src = src;
      t.dst = const_cast<void*>(dst);
      set(t.src_stride, stride);
      t.descale = descale;
      t.type = type;
      t.dim = int(dim);
      return t;
    };
    s.tensor[0] = tensor(of.k, dst.k, from.k_stride, from.k_type, p.head_dim,
                         descale(from.k_descale, of.k_descale, p.heads_kv, from));
    s.tensor[1] = tensor(of.v, dst.v, from.v_stride, from.v_type, p.head_dim_v,
                         descale(from.v_descale, of.v_descale, p.heads_kv, from));
    s.tensor[0].scale = of.k_scale;
    s.tensor[1].scale = of.v_scale;
    set(s.tensor[0].scale_stride, from.k_scale_stride);
    set(s.tensor[1].scale_stride, from.v_scale_stride);
    s.pages = pages(from, of);
    s.table = const_cast<int*>(dst.block_table);
    s.table_pages = int(table_pages(from));
    s.rows = from.layout == ATTN_PACKED ? 0 : rows_of_sequence(from);
  }
  a.cu_seqlens_q = p.q_layout == ATTN_PACKED ? args.cu_seqlens_q : nullptr;
  a.total_q = p.total_q;
  a.seqlen_q = int(p.seqlen_q);
  a.mask = p.range_mask();
  a.num_segments = p.num_segments;
  a.heads = int(p.heads_kv);
  a.dst_type = p.q_type;
  const Cut cut = cut_of(p, target.device);
  a.items = unsigned(cut.items);
  a.batch = unsigned(p.batch);
  a.parts = unsigned(cut.parts);
  a.part_keys = int(cut.part_keys);
  store(a, to);
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

Step dequantise_step(const Problem& p, const DeviceInfo& device) {
  const int64_t items = cut_of(p, device).items;
  const int64_t vectors = p.heads_kv * std::max(p.head_dim, p.head_dim_v);  // of a chunk of keys
  const int64_t threads = std::min<int64_t>(ceil_div(vectors, int64_t{32}) * 32,  //
                                            attn_dequantise_threads);
  const int64_t blocks = p.max_sms > 0 ? std::min(items, multiprocessors(p, device)) : items;
  return {.image = dequantise_image,
          .kernarg_bytes = sizeof(attn_dequantise_kernarg),
          .launch = {.grid = {uint32_t(blocks), 1, 1},
                     .block = {uint32_t(threads), 1, 1},
                     .starts_early = true},
          .pack = pack_of<pack_dequantise>};
}

template <size_t forward>
Status add_forward(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::variants[forward];
  return sm90::add_forward<variant.tile, variant.with, DequantisedSegments>(variant.name, p, device,
                                                                            recipe);
}

// The variants of its second launch, as places in sm90::variants.
struct Dequantised {
  const char* name;
  size_t plain, paged, score, score_paged, mask;
};
consteval Dequantised dequantised(const char* name, const char* plain, const char* paged,
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
    dequantised("fwd_sm90_bf16_d64_dequantised", "fwd_sm90_bf16_d64", "fwd_sm90_bf16_d64_paged",
                "fwd_sm90_bf16_d64_score", "fwd_sm90_bf16_d64_score_paged",
                "fwd_sm90_bf16_d64_mask"),
    dequantised("fwd_sm90_bf16_d128_dequantised", "fwd_sm90_bf16_d128", "fwd_sm90_bf16_d128_paged",
                "fwd_sm90_bf16_d128_score", "fwd_sm90_bf16_d128_score_paged",
                "fwd_sm90_bf16_d128_mask"),
    dequantised("fwd_sm90_bf16_d192_dv128_dequantised", "fwd_sm90_bf16_d192_dv128",
                "fwd_sm90_bf16_d256_paged", "fwd_sm90_bf16_d256_score",
                "fwd_sm90_bf16_d256_score_paged", "fwd_sm90_bf16_d256_mask"),
    dequantised("fwd_sm90_bf16_d256_dequantised", "fwd_sm90_bf16_d256", "fwd_sm90_bf16_d256_paged",
                "fwd_sm90_bf16_d256_score", "fwd_sm90_bf16_d256_score_paged",
                "fwd_sm90_bf16_d256_mask"),
    dequantised("fwd_sm90_f16_d64_dequantised", "fwd_sm90_f16_d64", "fwd_sm90_f16_d64_paged",
                "fwd_sm90_f16_d64_score", "fwd_sm90_f16_d64_score_paged", "fwd_sm90_f16_d64_mask"),
    dequantised("fwd_sm90_f16_d128_dequantised", "fwd_sm90_f16_d128", "fwd_sm90_f16_d128_paged",
                "fwd_sm90_f16_d128_score", "fwd_sm90_f16_d128_score_paged",
                "fwd_sm90_f16_d128_mask"),
    dequantised("fwd_sm90_f16_d192_dv128_dequantised", "fwd_sm90_f16_d192_dv128",
                "fwd_sm90_f16_d256_paged", "fwd_sm90_f16_d256_score",
                "fwd_sm90_f16_d256_score_paged", "fwd_sm90_f16_d256_mask"),
    dequantised("fwd_sm90_f16_d256_dequantised", "fwd_sm90_f16_d256", "fwd_sm90_f16_d256_paged",
                "fwd_sm90_f16_d256_score", "fwd_sm90_f16_d256_score_paged",
                "fwd_sm90_f16_d256_mask"),
};

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr Dequantised kernel = kernels[i];
  ATTN_TRY(check(p, device));
  recipe->passed_over = prefer_other_to_dequantised(p);
  recipe->workspace = size_t(place_of(p, p.num_segments - 1).end);
  recipe->steps.push_back(dequantise_step(p, device));
  const bool pages = p.needs.features & feature_paged_kv,
             changes = p.softcap > 0 || p.has(ATTN_ALIBI | ATTN_SPLIT_INVARIANT) || p.scale <= 0;
  if (p.has(ATTN_BLOCK_MASK)) {
    if (pages || changes)
      return unsupported(
          "a block mask with ",
          pages ? "paged K/V" : "softcap, ALiBi, split_invariant or a scale not above 0",
          "; accepted: without");
    return add_forward<kernel.mask>(p, device, recipe);
  }
  if (changes)
    return pages ? add_forward<kernel.score_paged>(p, device, recipe)
                 : add_forward<kernel.score>(p, device, recipe);
  return pages ? add_forward<kernel.paged>(p, device, recipe)
               : add_forward<kernel.plain>(p, device, recipe);
}

constinit const std::array all_rows = rows_of_variants<std::size(kernels)>([]<size_t i>()
                                                                               -> Kernel {
  constexpr Dequantised kernel = kernels[i];
  constexpr const sm90::Variant& plain = sm90::variants[kernel.plain];
  return {
      .name = kernel.name,
      .op = Op::forward,
      .backend = ATTN_BACKEND_CUDA,
      .limits = {.in_types = type_bit(attn_dtype(plain.type)),
                 .kv_types = converted_types | type_bit(attn_dtype(plain.type)),
                 .out_types = float_types,
                 .flags = forward_flags | ATTN_BLOCK_MASK | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                 .features = forward_features | feature_segments | feature_paged_kv |
                             feature_softcap | feature_mixed_kv_types | feature_descale_tensor |
                             feature_descale_head | feature_descale_block | feature_any_ggml_stride,
                 .head_dim = {.multiple = attn_dequantise_elements, .max = plain.tile.head_dim},
                 .head_dim_v = {.multiple = attn_dequantise_elements, .max = plain.tile.head_dim_v},
                 .page_size = {.multiple = attn_dequantise_keys}},
      .numerics = {.weights = attn_dtype(plain.type),
                   .rows = 16,
                   .keys = plain.tile.keys,
                   .largest_score = sm90::largest_score(plain),
                   .rounds_kv = true},
      .recipe = recipe_of<make_recipe<i>>,
      .first_images = {dequantise_image},
      .image = plain.name};
});

}  // namespace

std::span<const Kernel> sm90_dequantised_rows() {
  return all_rows;
}

}  // namespace attn
