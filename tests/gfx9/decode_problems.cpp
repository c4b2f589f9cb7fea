// Problems that reach every instruction of decode_gfx942_*, by workgroup 0. Everything that must
// not be read is NaN.
#include "asm/gfx942/decode_args.h"
#include "gfx9/maker.h"
#include "gfx9/segments.h"

namespace attn::test {
namespace {

struct Decode {
  int64_t batch = 1, heads_kv = 1, group = 1, seqlen_q = 1;
  int64_t dim = INT64_MAX, dim_v = INT64_MAX;  // at most the largest that the kernel takes
  std::vector<Keys> segments = {};
  uint32_t flags = 0;
  int64_t left = -1, right = -1;
  attn_dtype out_type = ATTN_F32;
  float scale = 0, softcap = 0;
  std::vector<int32_t> cu_seqlens_q = {};  // given: packed q of 40 tokens
  std::vector<int32_t> kv_begins = {};
  int64_t total_q = 40;
  bool want_lse = true;
  int compute_units = 0;  // 0: by the problem's number
  // All but workgroup 0 are there already, so that it adds up what they have left.
  bool alone = false;
  double sigma = 1;
  bool peaks = false;  // one element of each row of q in bf16 is 2^18, another one in each
  bool zeros = false;  // every other row of q in bf16
  // NaN codes of e4m3fn in a register of their own: those of each row of q, or of each sequence.
  enum { none, in_q, in_k, in_v } nan = none;
};

void put_nan(gfx9emu::Memory& memory, const void* rows, int64_t row, int64_t dim, int64_t d) {
  const uint8_t code = row % 2 ? 0x7f : 0xff;
  memory.write(reinterpret_cast<uint64_t>(rows) + uint64_t(row * dim + d % dim),
               std::as_bytes(std::span(&code, 1)));
}

bool several_types(const Kernel& row) {
  return (row.limits.kv_types & type_bit(ATTN_F8_E4M3FN)) != 0;
}
Types types_of(const Kernel& row, size_t number) {
  for (const attn_dtype blocks : {ATTN_Q8_0, ATTN_Q4_0})
    if (row.limits.kv_types & type_bit(blocks))
      return {number % 2 ? ATTN_F16 : ATTN_BF16,
              blocks,
              blocks,
              ATTN_DESCALE_NONE,
              ATTN_DESCALE_NONE,
              ATTN_DESCALE_NONE};
  if (!several_types(row)) {
    const attn_dtype type = row.limits.in_types & type_bit(ATTN_BF16) ? ATTN_BF16 : ATTN_F16;
    return {type, type, type, ATTN_DESCALE_NONE, ATTN_DESCALE_NONE, ATTN_DESCALE_NONE};
  }
  constexpr attn_dtype q[] = {ATTN_BF16, ATTN_F16, ATTN_F8_E4M3FN, ATTN_F8_E4M3FNUZ},
                       kv[] = {ATTN_F8_E4M3FNUZ, ATTN_F8_E4M3FN};
  constexpr attn_descale_kind kinds[] = {ATTN_DESCALE_NONE, ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD,
                                         ATTN_DESCALE_BLOCK};
  return {q[number % 4],      kv[number / 2 % 2],
          kv[number / 3 % 2], number % 4 >= 2 ? kinds[number / 4 % 3] : ATTN_DESCALE_NONE,
          kinds[number % 4],  kinds[number / 4 % 4]};
}

ShippedProblem decode_problem(gfx9emu::Memory& memory, uint32_t data, const std::string& kernel,
                              const Decode& d, size_t number) {
  Maker m(memory, data);
  const Kernel& row = *find_kernel(kernel.c_str());
  Types types = types_of(row, number);
  if ((d.peaks || d.zeros) && row.limits.in_types & type_bit(ATTN_BF16)) types.q = ATTN_BF16;
  const int64_t most = row.limits.head_dim.max;
  std::vector<attn_segment> segments(d.segments.size());
  std::vector<attn_segment_args> segment_args(d.segments.size());
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = d.batch, in.heads_kv = d.heads_kv, in.heads_q = d.group * d.heads_kv;
  const auto head_dim = [&](int64_t dim) {
    const int64_t multiple = row.limits.head_dim.multiple;
    return (std::min(dim, most) + multiple - 1) / multiple * multiple;
  };
  in.head_dim = head_dim(d.dim), in.head_dim_v = head_dim(d.dim_v);
  in.seqlen_q = d.seqlen_q;
  in.q_type = types.q, in.out_type = d.out_type, in.q_descale = types.q_descale;
  in.flags = d.flags;
  if (d.flags & ATTN_WINDOW) in.window_left = d.left, in.window_right = d.right;
  in.scale = d.scale, in.softcap = d.softcap;
  Args args{};
  int64_t rows_q = d.batch * d.seqlen_q;
  if (!d.cu_seqlens_q.empty()) {
    in.q_layout = ATTN_PACKED;
    in.total_q = rows_q = d.total_q;
    args.cu_seqlens_q = static_cast<int32_t*>(m.input(bytes_of(d.cu_seqlens_q)));
  }
  if (!d.kv_begins.empty()) {
    in.has_kv_begin = 1;
    args.kv_begin = static_cast<int32_t*>(m.input(bytes_of(d.kv_begins)));
  }
  for (size_t n = 0; n < segments.size(); ++n)
    add_segment(m, d.batch, d.heads_kv, types, d.segments[n], &segments[n], &segment_args[n],
                in.head_dim, in.head_dim_v, d.sigma);
  in.num_segments = int32_t(segments.size()), in.segments = segments.data();
  args.segment = segment_args.data();
  attn::Problem p;
  require(make_problem(&in, &p));
  const auto all = [](int64_t) { return true; };
  args.q_descale = static_cast<float*>(m.input(floats(m, d.batch * d.heads_kv, 1)));
  std::vector<uint8_t> q = rows(m, types.q, rows_q * in.heads_q, in.head_dim, d.sigma, false, all);
  for (int64_t r = 0; d.peaks && types.q == ATTN_BF16 && r < rows_q * in.heads_q; ++r) {
    const uint32_t peak = code_of(ATTN_BF16, 0x1p18);
    put(&q, size_t(r * in.head_dim + r % in.head_dim) * 2, &peak, 2);
  }
  const size_t row_bytes = size_t(dtype_bytes(types.q, in.head_dim));
  for (size_t at = 0; d.zeros && at < q.size(); at += 2 * row_bytes)
    std::fill_n(q.begin() + ptrdiff_t(at), row_bytes, uint8_t{0});
  args.q = m.input(q);
  for (int64_t r = 0; d.nan == Decode::in_q && r < rows_q * in.heads_q; ++r)
    put_nan(memory, args.q, r, in.head_dim, r / 4 * 64 + r % 4 * 4);
  for (int64_t b = 0; d.nan == Decode::in_k && b < d.batch; ++b)
    put_nan(memory, segment_args[0].k, b * segments[0].seqlen + b % 4 * 17, in.head_dim,
            b / 16 * 64 + b / 4 % 4 * 4);
  for (int64_t b = 0; d.nan == Decode::in_v && b < d.batch; ++b)
    for (int64_t word = 0; word < 4; ++word)
      put_nan(memory, segment_args[0].v, b * segments[0].seqlen + b, in.head_dim_v,
              b * 16 + word * 4);
  args.alibi_slopes = static_cast<float*>(m.input(floats(m, in.heads_q, 0.1f)));
  args.sinks = static_cast<float*>(m.input(floats(m, in.heads_q, 4)));
  keep_wanted(p, &args, &segment_args);
  args.out = m.output(uint64_t(dtype_bytes(d.out_type, rows_q * in.heads_q * in.head_dim_v)));
  args.lse =
      d.want_lse ? static_cast<float*>(m.output(uint64_t(rows_q * in.heads_q) * 4)) : nullptr;

  DeviceInfo device;
  constexpr int units[] = {1, 2, 5, 13};
  device.multiprocessors = d.compute_units > 0 ? d.compute_units : units[number % 4];
  const Recipe recipe = recipe_of(kernel, p, device);
  std::vector<uint8_t> workspace(recipe.workspace);
  char* at = static_cast<char*>(m.input(workspace));
  fill(recipe.steps[0], p, &args, at, &m.problem);
  if (d.alone) {
    // What the other workgroups have left: one row tile, of which each has a unit.
    attn_gfx942_decode_kernarg a;
    std::memcpy(&a, m.problem.kernarg.data(), sizeof a);
    const auto parts = unsigned(m.problem.launch.grid[0]);
    std::normal_distribution<float> normal;
    const size_t stats_at = size_t(reinterpret_cast<char*>(a.stats) - at),
                 arrived_at = size_t(reinterpret_cast<char*>(a.arrived) - at);
    for (size_t n = 0; n < stats_at; n += 4) {
      const float x = normal(m.rng());
      put(&workspace, n, &x, 4);
    }
    for (size_t n = stats_at; n < arrived_at; n += 16) {
      const float x[] = {float(int(m.rng()() % 9)) - 4, 1 + float(m.rng()() % 16),
                         1 + float(m.rng()() % 16), 0};
      put(&workspace, n, x, 16);
    }
    const unsigned merged = attn_gfx942_decode_merged_parts, in_group = std::min(parts, merged) - 1,
                   groups = (parts + merged - 1) / merged - 1;
    for (size_t wave = 0; wave < attn_gfx942_decode_waves; ++wave) {
      const size_t slot = 1 * attn_gfx942_decode_waves + wave;
      put(&workspace, arrived_at + 4 * slot, &in_group, 4);
      put(&workspace, arrived_at + 4 * (a.slots * attn_gfx942_decode_waves + slot), &groups, 4);
    }
    memory.write(reinterpret_cast<uint64_t>(at), std::as_bytes(std::span(workspace)));
    m.problem.launch.grid[0] = 1;
  }
  m.problem.outputs.emplace_back(reinterpret_cast<uint64_t>(at), workspace.size());
  return std::move(m.problem);
}

std::vector<Decode> decodes() {
  std::vector<Decode> all;
  const auto add = [&](Decode d, auto... segments) -> Decode& {
    d.segments = {segments...};
    all.push_back(d);
    return all.back();
  };
  // Plain tiles, with and without lse; the maximum moves; several workgroups.
  add({.group = 4, .flags = ATTN_CAUSAL | ATTN_SINKS}, Keys{.capacity = 1100});
  add({.heads_kv = 2,
       .group = 2,
       .seqlen_q = 3,
       .out_type = ATTN_BF16,
       .want_lse = false,
       .sigma = 2},
      Keys{.capacity = 1400});
  add({.group = 8, .flags = ATTN_CAUSAL, .out_type = ATTN_F16, .compute_units = 5},
      Keys{.capacity = 1000});
  // Lengths that are clamped, a sequence without keys, row tiles.
  add({.batch = 4,
       .heads_kv = 2,
       .group = 3,
       .seqlen_q = 9,
       .dim = 64,
       .dim_v = 64,
       .flags = ATTN_CAUSAL,
       .out_type = ATTN_F16},
      Keys{.capacity = 300, .lengths = {-1, 1000, 0, 77}});
  // Masks and scores of all kinds.
  add({.batch = 2,
       .group = 2,
       .seqlen_q = 6,
       .dim = 120,
       .dim_v = 40,
       .flags = ATTN_WINDOW,
       .left = 70,
       .right = 3,
       .out_type = ATTN_BF16,
       .scale = -0.1f},
      Keys{.capacity = 200, .lengths = {200, 130}});
  add({.group = 5,
       .seqlen_q = 2,
       .dim = 40,
       .dim_v = 120,
       .flags = ATTN_CAUSAL_TOP_LEFT | ATTN_ALIBI | ATTN_SINKS,
       .softcap = 2},
      Keys{.capacity = 500});
  add({.group = 2, .flags = ATTN_ALIBI}, Keys{.capacity = 600});
  add({.group = 2, .softcap = 1, .sigma = 3}, Keys{.capacity = 600});
  // All scores below where softcap takes the series, whose errors are a cap's.
  add({.group = 16, .softcap = 1e4f, .sigma = 3}, Keys{.capacity = 130});
  // Each element of a row of q decides once what power of two makes it f16.
  add({.batch = 2, .heads_kv = 2, .group = 16, .seqlen_q = 2, .scale = 0x1p-18f, .peaks = true},
      Keys{.capacity = 40});
  // Scores so large that products are rounded before the maximum is taken off; in plain tiles.
  add({.group = 3, .scale = 3e7f, .compute_units = 1}, Keys{.capacity = 900});
  // Segments: packed ones, pages that hold whole tiles and pages that do not, one out of range.
  add({.batch = 3, .group = 2, .seqlen_q = 2, .flags = ATTN_CAUSAL},
      Keys{.capacity = 100, .layout = ATTN_PACKED, .lengths = {100, 0, 51}},
      Keys{.capacity = 256, .layout = ATTN_PAGED, .lengths = {256, 100, 3}, .page_size = 128},
      Keys{.capacity = 90, .layout = ATTN_PAGED, .lengths = {90, 0, 33}, .page_size = 5});
  add({.batch = 2, .group = 2},
      Keys{.capacity = 300, .layout = ATTN_PAGED, .page_size = 100, .bad_page = 1});
  add({.batch = 2, .group = 2},
      Keys{.capacity = 256, .layout = ATTN_PAGED, .page_size = 64, .bad_page = 2});
  // A window that leaves out the first segment, and ends in a unit that it began in.
  add({.group = 2, .seqlen_q = 8, .flags = ATTN_CAUSAL | ATTN_WINDOW, .left = 27},
      Keys{.capacity = 75}, Keys{.capacity = 48});
  // Packed q: sequences out of order, longer than they may be, rows of nobody.
  for (const attn_dtype out_type : {ATTN_F32, ATTN_F16})
    add({.batch = 4,
         .group = 2,
         .seqlen_q = 7,
         .flags = ATTN_CAUSAL,
         .out_type = out_type,
         .cu_seqlens_q = {3, 9, 20, 31, 25},
         .want_lse = out_type == ATTN_F32},
        Keys{.capacity = 130, .lengths = {130, 1, 64, 65}});
  // More sequences than a wave has lanes, some of them without queries.
  std::vector<int32_t> cu(141);
  for (size_t b = 0; b < 140; ++b) cu[b + 1] = cu[b] + int32_t(b % 3 != 1 && b != 63);
  add({.batch = 140,
       .heads_kv = 2,
       .dim = 16,
       .dim_v = 16,
       .cu_seqlens_q = cu,
       .total_q = cu.back()},
      Keys{.capacity = 20});
  // Parts of others: a few, and more than one group of them.
  for (const int parts : {2, 7, 31, 32, 33, 70})
    add({.group = 3,
         .out_type = parts % 2 ? ATTN_F32 : ATTN_BF16,
         .compute_units = parts,
         .alone = true},
        Keys{.capacity = 64 * parts});
  // Two columns of groups of parts, of which no workgroup is there already.
  add({.heads_kv = 2, .group = 3, .compute_units = 80}, Keys{.capacity = 64 * 40});
  // As many segments as there may be.
  add({.group = 2, .flags = ATTN_CAUSAL}, Keys{.capacity = 40}, Keys{.capacity = 64},
      Keys{.capacity = 9}, Keys{.capacity = 20}, Keys{.capacity = 65}, Keys{.capacity = 1},
      Keys{.capacity = 30}, Keys{.capacity = 100});
  // A row of zeros in bf16 has no power of two to make it f16. 2^127, which the exponents' bias
  // would be, times this scale is infinite.
  add({.group = 4, .scale = 8, .zeros = true}, Keys{.capacity = 70});
  // Hidden first keys: of a tile, of whole ones and segments, less than none, and all.
  for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL | ATTN_WINDOW)})
    add({.batch = 5,
         .group = 3,
         .seqlen_q = 7,
         .flags = flags,
         .left = 90,
         .kv_begins = {70, 9, -5, 1000, 150}},
        Keys{.capacity = 130}, Keys{.capacity = 90});
  // The last sequence has queries, and rows of nobody are behind it.
  add({.batch = 3, .group = 2, .seqlen_q = 7, .cu_seqlens_q = {2, 5, 5, 10}, .total_q = 13},
      Keys{.capacity = 70});
  // Plain tiles of two segments, with scores so large that products are rounded first.
  add({.group = 3, .scale = 3e7f, .compute_units = 1}, Keys{.capacity = 300},
      Keys{.capacity = 900});
  // Workgroups that have four heads each, or two or three.
  for (const int units : {3, 5})
    add({.heads_kv = 12, .group = 2, .compute_units = units}, Keys{.capacity = 70});
  return all;
}

}  // namespace

std::vector<MakeProblem> decode_problems(const std::string& kernel) {
  std::vector<MakeProblem> all;
  const auto add = [&](const Decode& d, size_t number) {
    all.push_back([kernel, d, number](gfx9emu::Memory& memory, uint32_t data) {
      return decode_problem(memory, data, kernel, d, number);
    });
  };
  for (const Decode& d : decodes()) add(d, all.size());
  if (!several_types(*find_kernel(kernel.c_str()))) return all;
  for (size_t number = 0; number < 12; ++number)
    add({.group = 2, .segments = {{.capacity = 600}}}, number);
  constexpr size_t all_e4m3fn = 10;
  add({.group = 8, .segments = {{.capacity = 70}}, .nan = Decode::in_q}, all_e4m3fn);
  // Of tiles that are the last of a wave, and of those that another one follows.
  for (const int64_t keys : {64, 320}) {
    add({.batch = 32, .segments = {{.capacity = keys}}, .nan = Decode::in_k}, all_e4m3fn);
    add({.batch = 64, .segments = {{.capacity = keys}}, .nan = Decode::in_v}, all_e4m3fn);
  }
  return all;
}

}  // namespace attn::test
