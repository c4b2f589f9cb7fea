// Problems that reach every instruction of prepare_gfx942_*_segments and _descaled, by workgroup 0:
// the first 64 keys of the first sequence and K/V head. Everything that must not be read is NaN.
#include <cstring>

#include "gfx9/segments.h"

namespace attn::test {
namespace {

struct Gathered {
  int64_t dim, dim_v, seqlen_q = 40;
  std::vector<Keys> segments;
  uint32_t flags = 0;
  int64_t left = -1;
  bool packed_q = false;
  std::vector<int32_t> kv_begins = {};
  attn_dtype type = ATTN_F8_E4M3FNUZ;  // of fp8 kernels
  bool descaled = false;   // every segment otherwise, in turn of this type and of e4m3fn
  bool no_values = false;  // descales of V are 0
};

ShippedProblem prepare_problem(gfx9emu::Memory& memory, uint32_t data, const std::string& kernel,
                               const Gathered& g) {
  Maker m(memory, data);
  const int64_t batch = 2, heads_kv = 2;
  Types types{};
  types.k = types.v = g.type;
  types.special = true;
  std::vector<attn_segment> segments(g.segments.size());
  std::vector<attn_segment_args> segment_args(g.segments.size());
  for (size_t n = 0; n < segments.size(); ++n) {
    if (g.descaled) {
      types.k_descale = attn_descale_kind(n % 4);
      types.v_descale = attn_descale_kind(g.no_values ? int(ATTN_DESCALE_HEAD) : int(n + 3) % 4);
      types.v = n % 2 == 0 ? g.type : ATTN_F8_E4M3FN;
      types.k = n % 3 == 0 ? g.type : ATTN_F8_E4M3FN;
    }
    add_segment(m, batch, heads_kv, types, g.segments[n], &segments[n], &segment_args[n], g.dim,
                g.dim_v);
    if (g.no_values)
      segment_args[n].v_descale = static_cast<float*>(m.input(std::vector<uint8_t>(64)));
  }
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = batch, in.heads_q = in.heads_kv = heads_kv;
  in.head_dim = g.dim, in.head_dim_v = g.dim_v;
  in.seqlen_q = g.seqlen_q;
  in.q_type = g.type, in.out_type = ATTN_F32;
  in.flags = g.flags;
  if (g.descaled) in.q_descale = attn_descale_kind(g.segments.size() % 3);
  if (g.flags & ATTN_WINDOW) in.window_left = g.left, in.window_right = 0;
  Args args{};
  args.segment = segment_args.data();
  if (in.q_descale != ATTN_DESCALE_NONE) {
    const std::vector<float> descales = {0.5f, 1.25f, 3, 0.75f};  // [batch, KV head]
    std::vector<uint8_t> bytes(descales.size() * sizeof(float));
    std::memcpy(bytes.data(), descales.data(), bytes.size());
    args.q_descale = static_cast<const float*>(m.input(bytes));
  }
  if (g.packed_q) {
    in.q_layout = ATTN_PACKED;
    in.total_q = g.seqlen_q + 7;
    args.cu_seqlens_q =
        static_cast<int32_t*>(m.input(bytes_of({-3, int32_t(g.seqlen_q), INT32_MAX})));
  }
  if (!g.kv_begins.empty()) {
    in.has_kv_begin = 1;
    args.kv_begin = static_cast<int32_t*>(m.input(bytes_of(g.kv_begins)));
  }
  in.num_segments = int32_t(segments.size()), in.segments = segments.data();
  attn::Problem p;
  require(make_problem(&in, &p));
  const Recipe recipe = recipe_of(kernel, p);
  keep_wanted(p, &args, &segment_args);
  fill(recipe.steps[0], p, &args, m.output(recipe.workspace), &m.problem);
  return std::move(m.problem);
}

}  // namespace

std::vector<MakeProblem> segment_problems(const std::string& prepare) {
  const bool fp8 = prepare != "prepare_gfx942_16bit_segments";
  const bool descaled = prepare == "prepare_gfx942_fp8_descaled";
  const Keys padded = {.capacity = 20, .lengths = {13, 20}},
             packed = {.capacity = 30, .layout = ATTN_PACKED, .lengths = {9, 30}},
             paged = {.capacity = 300, .layout = ATTN_PAGED, .lengths = {250, 3}, .page_size = 5},
             all_full = {.capacity = 40}, none = {.capacity = 24, .lengths = {0, 24}},
             bad = {.capacity = 70, .layout = ATTN_PAGED, .page_size = 16, .bad_page = 2};
  std::vector<Gathered> list = {
      {.dim = 128, .dim_v = 128, .segments = {padded, packed, paged}},
      {.dim = 112,
       .dim_v = 48,
       .segments = {paged},
       .flags = ATTN_CAUSAL | ATTN_WINDOW,
       .left = 170},
      {.dim = 48, .dim_v = 64, .segments = {none, bad, all_full}, .packed_q = true},
      {.dim = 64,
       .dim_v = 16,
       .segments = {all_full, packed, padded, none, paged, packed, padded, all_full}},
      // Keys behind the last that a query sees.
      {.dim = 64,
       .dim_v = 64,
       .seqlen_q = 20,
       .segments = {packed, all_full},
       .flags = ATTN_CAUSAL_TOP_LEFT},
      // Nothing of the tile is seen; no key at all.
      {.dim = 64, .dim_v = 64, .seqlen_q = 1, .segments = {paged}, .flags = ATTN_WINDOW, .left = 9},
      {.dim = 64, .dim_v = 64, .segments = {none, none}},
      // Hidden first keys: a part of a tile and all; less than none and whole tiles.
      {.dim = 64, .dim_v = 64, .segments = {padded, paged}, .kv_begins = {9, 1000}},
      {.dim = 64, .dim_v = 64, .segments = {paged, all_full}, .kv_begins = {-5, 30}},
  };
  // Sequences that end in each of the 16 keys of a thread.
  for (int32_t keys = 1; keys < 16; ++keys)
    list.push_back(
        {.dim = 128, .dim_v = 128, .segments = {{.capacity = 16, .lengths = {keys, 1}}, none}});
  if (fp8) {
    const size_t count = list.size();
    for (size_t n = 0; n < 4 && n < count; ++n) {
      list.push_back(list[n]);
      list.back().type = ATTN_F8_E4M3FN;
    }
  }
  if (descaled) {
    // The first segment's descales are of V; of keys 128 and more; of K too.
    list.push_back({.dim = 64, .dim_v = 64, .segments = {paged, packed}});
    list.push_back({.dim = 64, .dim_v = 64, .segments = {none, paged, packed, all_full}});
    list.push_back({.dim = 64, .dim_v = 64, .segments = {none, none, none, paged}});
    list.push_back({.dim = 64, .dim_v = 64, .segments = {all_full}});
    list.back().no_values = true;
    // Fewer queries than all may be.
    list.push_back({.dim = 64,
                    .dim_v = 64,
                    .seqlen_q = 20,
                    .segments = {packed, all_full},
                    .flags = ATTN_CAUSAL_TOP_LEFT,
                    .packed_q = true});
  }
  std::vector<MakeProblem> all;
  for (Gathered& g : list) {
    if (!fp8) g.type = ATTN_BF16;
    g.descaled = descaled;
    const std::string kernel = std::string("fwd_gfx942_") + (fp8 ? "fp8" : "bf16") +
                               (std::max(g.dim, g.dim_v) > 64 ? "_d128" : "_d64") +
                               (descaled ? "_descaled" : "");
    all.push_back([kernel, g](gfx9emu::Memory& memory, uint32_t data) {
      return prepare_problem(memory, data, kernel, g);
    });
  }
  return all;
}

}  // namespace attn::test
