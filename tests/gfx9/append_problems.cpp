// Problems that reach every instruction of kv_append_gfx942, by workgroup 0.
#include <algorithm>
#include <numeric>

#include "gfx9/maker.h"
#include "problem/operations.h"

namespace attn::test {
namespace {

struct Append {
  attn_dtype from, k_to, v_to;
  int64_t batch = 2, heads_kv = 3, heads_q = 2, dim = 64, dim_v = 64;
  int64_t rotary_dim = 0;
  bool interleaved = false;
  attn_descale_kind descale = ATTN_DESCALE_NONE;
  std::vector<int32_t> lengths = {5, 0};
  std::vector<int32_t> cu_seqlens = {};  // given: packed, 4 tokens
  int32_t page_size = 0;                 // 0: not paged
  bool bad_page = false;
  int64_t seqlen_new = 1;
  bool lengths_launch = false;  // the launch that advances lengths
  unsigned special = 16;        // one value of so many is NaN, infinite or large
  double size = 1;
  bool alike = false;               // values of N(0, size)
  bool ties = false;                // f32 whose quotients are ties of the cache's types
  bool in_place = false;            // q_out is q, seqlens_out seqlens
  std::vector<int64_t> slots = {};  // given: of each token, in pages
};

ShippedProblem append_problem(gfx9emu::Memory& memory, uint32_t data, const Append& c) {
  constexpr int64_t capacity = 20;
  constexpr float descale = -0.7f;  // of `ties`
  Maker m(memory, data);
  attn_kv_append_problem in{};
  in.struct_size = sizeof in;
  in.batch = c.batch, in.heads_kv = c.heads_kv, in.head_dim = c.dim, in.head_dim_v = c.dim_v;
  in.seqlen_new = c.seqlen_new;
  in.new_type = c.from;
  const bool packed = !c.cu_seqlens.empty(), paged = c.page_size > 0;
  const int64_t tokens = packed ? 4 : c.batch * c.seqlen_new;
  if (packed) in.new_layout = ATTN_PACKED, in.total_new = tokens;
  attn_segment& s = in.segment;
  s.struct_size = sizeof s;
  s.k_type = c.k_to, s.v_type = c.v_to;
  s.k_descale = s.v_descale = c.descale;
  s.descale_block_keys = 64;
  s.seqlen = capacity;
  in.has_slots = !c.slots.empty();
  s.has_seqlens = in.advance_seqlens = !in.has_slots;
  attn_kv_append_args args{};
  args.struct_size = sizeof args;
  args.cache.struct_size = sizeof args.cache;
  const auto ints = [&](const std::vector<int32_t>& values) {
    std::vector<uint8_t> bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return static_cast<int32_t*>(m.input(bytes));
  };
  int64_t rows = c.batch * capacity;
  if (paged) {
    s.layout = ATTN_PAGED;
    s.page_size = c.page_size;
    s.max_pages = int32_t((capacity + c.page_size - 1) / c.page_size);
    s.num_pages = c.batch * s.max_pages + 1;
    rows = s.num_pages * c.page_size;
    std::vector<int32_t> table(size_t(c.batch * s.max_pages));
    std::iota(table.rbegin(), table.rend(), 1);
    if (c.bad_page) std::fill(table.begin(), table.end(), -7);
    args.cache.block_table = ints(table);
  }
  if (packed) args.cu_seqlens_new = ints(c.cu_seqlens);
  in.rotary_dim = c.rotary_dim, in.rotary_interleaved = c.interleaved;
  if (c.rotary_dim > 0) in.rotary_positions = capacity, in.heads_q = c.heads_q;
  KvAppendProblem p;
  require(make_kv_append_problem(&in, &p));
  const auto values = [&](int64_t heads, int64_t dim, attn_dtype to) {
    const auto count = size_t(tokens * heads * dim);
    return m.input(c.ties    ? m.near_ties(to, count, descale)
                   : c.alike ? m.alike(c.from, count, c.size)
                             : m.values(c.from, count, c.special, c.size));
  };
  const auto floats = [&](int64_t count) {
    std::vector<uint8_t> bytes(size_t(count) * 4);
    for (size_t i = 0; i < size_t(count); ++i) {
      const float x = float(1 + m.rng()() % 255) / (m.rng()() % 2 ? 128 : -128);
      std::memcpy(&bytes[4 * i], &x, 4);
    }
    return static_cast<float*>(m.input(bytes));
  };
  const auto one_float = [&](float x) {
    std::vector<uint8_t> bytes(4);
    std::memcpy(bytes.data(), &x, 4);
    return static_cast<float*>(m.input(bytes));
  };
  const auto also_output = [&](const void* at, uint64_t bytes) {
    m.problem.outputs.emplace_back(reinterpret_cast<uint64_t>(at), bytes);
    return const_cast<void*>(at);
  };
  args.k_new = values(c.heads_kv, c.dim, c.k_to);
  args.v_new = values(c.heads_kv, c.dim_v, c.v_to);
  args.cache.k = m.output(uint64_t(dtype_bytes(c.k_to, rows * c.heads_kv * c.dim)));
  args.cache.v = m.output(uint64_t(dtype_bytes(c.v_to, rows * c.heads_kv * c.dim_v)));
  if (in.has_slots) {
    std::vector<uint8_t> bytes(c.slots.size() * 8);
    std::memcpy(bytes.data(), c.slots.data(), bytes.size());
    args.slot_mapping = static_cast<int64_t*>(m.input(bytes));
  } else {
    args.cache.seqlens = ints(c.lengths);
    const uint64_t seqlens_bytes = uint64_t(c.batch) * 4;
    args.seqlens_out = static_cast<int32_t*>(
        c.in_place ? also_output(args.cache.seqlens, seqlens_bytes) : m.output(seqlens_bytes));
  }
  if (c.descale != ATTN_DESCALE_NONE) {
    args.cache.k_descale = c.ties ? one_float(descale) : floats(c.batch * c.heads_kv);
    args.cache.v_descale = c.ties ? one_float(descale) : floats(c.batch * c.heads_kv);
  }
  if (c.rotary_dim > 0) {
    args.rotary_cos = floats(capacity * c.rotary_dim / 2);
    args.rotary_sin = floats(capacity * c.rotary_dim / 2);
    args.q = values(c.heads_q, c.dim, c.from);
    const auto bytes = uint64_t(dtype_bytes(c.from, tokens * c.heads_q * c.dim));
    args.q_out = c.in_place ? also_output(args.q, bytes) : m.output(bytes);
  }
  const Recipe recipe = recipe_of("kv_append_gfx942", p);
  fill(recipe.steps[c.lengths_launch ? 1 : 0], p, &args, nullptr, &m.problem);
  return std::move(m.problem);
}

}  // namespace

std::vector<MakeProblem> append_problems(const std::string&) {
  constexpr attn_dtype f32 = ATTN_F32, f16 = ATTN_F16, bf16 = ATTN_BF16, e4m3 = ATTN_F8_E4M3FN,
                       e5m2 = ATTN_F8_E5M2, fnuz = ATTN_F8_E4M3FNUZ, q8 = ATTN_Q8_0, q4 = ATTN_Q4_0;
  constexpr auto tensor = ATTN_DESCALE_TENSOR, head = ATTN_DESCALE_HEAD, block = ATTN_DESCALE_BLOCK;
  std::vector<int32_t> many(141);  // cumulative: 4 tokens among 140 sequences
  for (size_t b = 0; b < many.size(); ++b)
    many[b] = int32_t(b > 70) + int32_t(b > 90) + int32_t(b > 91) + int32_t(b > 139);
  std::vector<MakeProblem> all;
  const auto add = [&](const Append& c) {
    all.push_back(
        [c](gfx9emu::Memory& memory, uint32_t data) { return append_problem(memory, data, c); });
  };
  for (const Append& c : std::initializer_list<Append>{
           {.from = f32, .k_to = f32, .v_to = bf16, .rotary_dim = 64},
           {.from = f16, .k_to = f16, .v_to = e4m3, .rotary_dim = 32, .interleaved = true},
           {.from = bf16, .k_to = e5m2, .v_to = f32, .dim_v = 40, .rotary_dim = 48},
           {.from = f32, .k_to = fnuz, .v_to = f16, .dim = 7, .dim_v = 11, .rotary_dim = 6},
           {.from = bf16,
            .k_to = bf16,
            .v_to = e4m3,
            .dim = 9,
            .dim_v = 13,
            .rotary_dim = 4,
            .interleaved = true},
           {.from = f16, .k_to = f32, .v_to = e5m2, .dim = 21, .dim_v = 3, .rotary_dim = 20},
           {.from = f32, .k_to = e4m3, .v_to = f32, .descale = tensor},
           {.from = f16, .k_to = bf16, .v_to = fnuz, .rotary_dim = 64, .descale = head},
           {.from = bf16, .k_to = f16, .v_to = e5m2, .descale = block, .size = 100},
           {.from = f32, .k_to = e4m3, .v_to = fnuz, .descale = tensor, .ties = true},
           {.from = f32, .k_to = e5m2, .v_to = e4m3, .descale = tensor, .ties = true},
           {.from = f32, .k_to = q8, .v_to = q4, .dim = 96, .dim_v = 160, .alike = true},
           {.from = f16, .k_to = q4, .v_to = q8, .rotary_dim = 64, .descale = head, .alike = true},
           {.from = f32, .k_to = q4, .v_to = q8, .dim = 96, .dim_v = 160, .special = 0},
           // Several waves: lengths and q are overwritten when all have read them.
           {.from = f32,
            .k_to = f32,
            .v_to = f32,
            .heads_kv = 1,
            .heads_q = 1,
            .dim = 1040,
            .rotary_dim = 1032,
            .in_place = true},
           {.from = f32, .k_to = q8, .v_to = q4, .special = 100, .size = 1e7},
           {.from = f32, .k_to = q4, .v_to = q8, .special = 200, .size = 1e-41},
           {.from = f32, .k_to = f32, .v_to = f32, .rotary_dim = 64, .page_size = 3},
           {.from = bf16,
            .k_to = bf16,
            .v_to = bf16,
            .rotary_dim = 64,
            .page_size = 8,
            .bad_page = true},
           // Slots of every token: some negative, some beyond the 15 pages, also with 64 bits.
           {.from = f32,
            .k_to = f16,
            .v_to = f16,
            .page_size = 3,
            .seqlen_new = 3,
            .slots = {44, 7, -1, 45, 0, 31}},
           {.from = f32,
            .k_to = f16,
            .v_to = f16,
            .page_size = 3,
            .seqlen_new = 3,
            .slots = {INT64_C(1) << 33 | 2, 5, INT64_C(1) << 31 | 4, -40, 13, 9}},
           {.from = f32, .k_to = f16, .v_to = f16, .lengths = {20, 3}},
           {.from = f32, .k_to = f16, .v_to = f16, .lengths = {-3, 1000}, .seqlen_new = 2},
           {.from = f32, .k_to = f16, .v_to = f16, .seqlen_new = 2, .lengths_launch = true},
           {.from = f32, .k_to = f16, .v_to = f16, .cu_seqlens = {0, 1, 4}, .seqlen_new = 3},
           {.from = f32,
            .k_to = f16,
            .v_to = f16,
            .cu_seqlens = {-2, 1, 9},
            .seqlen_new = 3,
            .lengths_launch = true},
           // Ends before the begin, and behind the tokens by less than seqlen_new.
           {.from = f32,
            .k_to = f16,
            .v_to = f16,
            .cu_seqlens = {3, 2, 9},
            .seqlen_new = 3,
            .lengths_launch = true},
           {.from = f32, .k_to = f16, .v_to = f16, .cu_seqlens = {1, 2, 4}, .seqlen_new = 3},
           {.from = f32, .k_to = f16, .v_to = f16, .cu_seqlens = {0, 0, 0}, .seqlen_new = 3},
           {.from = f32,
            .k_to = f16,
            .v_to = f16,
            .batch = 140,
            .lengths = std::vector<int32_t>(140, 7),
            .cu_seqlens = many,
            .seqlen_new = 3},
       })
    add(c);
  // Halves that end at each of a lane's elements.
  for (int64_t half = 9; half <= 16; ++half)
    add({.from = half % 2 ? f32 : f16,
         .k_to = f32,
         .v_to = f32,
         .dim = 2 * half + 1,
         .rotary_dim = 2 * half});
  return all;
}

}  // namespace attn::test
