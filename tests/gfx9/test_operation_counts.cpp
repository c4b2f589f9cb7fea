// What the kernels beside the loops issue for the bytes that they move: merge, convert, prepare and
// append. docs/gfx942.md has the table.
#include <functional>
#include <iostream>

#include "catch.h"
#include "gfx9/segments.h"
#include "gfx9/shipped.h"
#include "gfx9emu/model.h"
#include "problem/operations.h"

namespace attn::test {
namespace {

using namespace gfx9emu;

constexpr int64_t tokens = 64, heads = 8, dim = 128, elements = tokens * heads * dim;
constexpr attn_strides contiguous = {tokens * heads * dim, heads* dim, dim};

ShippedProblem merged(Maker& m) {
  MergeProblem p;
  p.batch = 1, p.heads_q = heads, p.seqlen_q = tokens, p.head_dim_v = dim;
  p.num_parts = 4;
  p.part_type = ATTN_F32, p.out_type = ATTN_BF16;
  p.part_stride = p.out_stride = contiguous;
  std::vector<const void*> outs;
  std::vector<const float*> lses;
  for (int n = 0; n < p.num_parts; ++n) {
    outs.push_back(m.input(m.alike(ATTN_F32, elements, 1)));
    lses.push_back(static_cast<float*>(m.input(m.alike(ATTN_F32, tokens * heads, 1))));
  }
  attn_merge_args args{};
  args.num_parts = p.num_parts;
  args.outs = outs.data(), args.lses = lses.data();
  args.out = m.output(2 * elements);
  fill(recipe_of("merge_gfx942", p).steps[0], p, &args, nullptr, &m.problem);
  return std::move(m.problem);
}

ShippedProblem converted(Maker& m) {
  QuantizeProblem p;
  p.batch = 1, p.heads = heads, p.seqlen = tokens, p.head_dim = dim;
  p.src_type = ATTN_BF16, p.dst_type = ATTN_F8_E4M3FN;
  p.src_stride = p.dst_stride = contiguous;
  p.kind = ATTN_DESCALE_TENSOR;
  p.scale = ATTN_SCALE_GIVEN;
  p.saturate = true;
  attn_quantize_args args{};
  args.src = m.input(m.alike(p.src_type, elements, 1));
  args.dst = m.output(elements);
  args.descale = static_cast<float*>(m.input(m.alike(ATTN_F32, 1, 1)));
  fill(recipe_of("convert_gfx942", p).steps[0], p, &args, nullptr, &m.problem);
  return std::move(m.problem);
}

// K and V of 64 keys of `heads` heads, for a forward kernel.
ShippedProblem prepared(Maker& m, const std::string& kernel, attn_dtype type, const Keys& keys) {
  Types types{};
  types.k = types.v = type;
  attn_segment segment{};
  attn_segment_args segment_args{};
  add_segment(m, 1, heads, types, keys, &segment, &segment_args, dim, dim);
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = 1, in.heads_q = in.heads_kv = heads, in.head_dim = dim, in.seqlen_q = tokens;
  in.q_type = type, in.out_type = ATTN_F32;
  in.num_segments = 1, in.segments = &segment;
  Problem p;
  require(make_problem(&in, &p));
  const Recipe recipe = recipe_of(kernel, p);
  Args args{};
  args.segment = &segment_args;
  fill(recipe.steps[0], p, &args, m.output(recipe.workspace), &m.problem);
  return std::move(m.problem);
}

// 64 tokens of bf16, k rotated.
ShippedProblem appended(Maker& m, attn_dtype to) {
  attn_kv_append_problem in{};
  in.struct_size = sizeof in;
  in.batch = 1, in.heads_kv = heads, in.head_dim = dim;
  in.seqlen_new = tokens;
  in.new_type = ATTN_BF16;
  attn_segment& s = in.segment;
  s.struct_size = sizeof s;
  s.k_type = s.v_type = to;
  s.seqlen = tokens;
  s.has_seqlens = 1;
  in.rotary_dim = dim, in.rotary_positions = tokens;
  KvAppendProblem p;
  require(make_kv_append_problem(&in, &p));
  attn_kv_append_args args{};
  args.struct_size = sizeof args;
  args.cache.struct_size = sizeof args.cache;
  args.k_new = m.input(m.alike(ATTN_BF16, elements, 1));
  args.v_new = m.input(m.alike(ATTN_BF16, elements, 1));
  args.cache.k = m.output(uint64_t(dtype_bytes(to, elements)));
  args.cache.v = m.output(uint64_t(dtype_bytes(to, elements)));
  args.cache.seqlens = static_cast<int32_t*>(m.input(bytes_of({0})));
  args.rotary_cos = static_cast<float*>(m.input(m.alike(ATTN_F32, tokens * dim / 2, 1)));
  args.rotary_sin = static_cast<float*>(m.input(m.alike(ATTN_F32, tokens * dim / 2, 1)));
  fill(recipe_of("kv_append_gfx942", p).steps[0], p, &args, nullptr, &m.problem);
  return std::move(m.problem);
}

struct Operation {
  const char* kernel;
  const char* what;
  std::function<ShippedProblem(Maker&)> make;
};

}  // namespace

TEST_CASE("operations: what they issue for what they move", "[gfx9][model]") {
  const Keys padded = {.capacity = tokens},
             paged = {.capacity = tokens, .layout = ATTN_PAGED, .page_size = 16};
  const Operation operations[] = {
      {"merge_gfx942", "four parts of f32 to bf16", merged},
      {"convert_gfx942", "bf16 to f8_e4m3fn", converted},
      {"prepare_gfx942_fp8", "f8_e4m3fnuz",
       [&](Maker& m) { return prepared(m, "fwd_gfx942_fp8_d128", ATTN_F8_E4M3FNUZ, padded); }},
      {"prepare_gfx942_16bit", "bf16",
       [&](Maker& m) { return prepared(m, "fwd_gfx942_bf16_d128", ATTN_BF16, padded); }},
      {"prepare_gfx942_fp8_segments", "f8_e4m3fnuz, pages of 16",
       [&](Maker& m) { return prepared(m, "fwd_gfx942_fp8_d128", ATTN_F8_E4M3FNUZ, paged); }},
      {"prepare_gfx942_fp8_descaled", "f8_e4m3fnuz, pages of 16",
       [&](Maker& m) {
         return prepared(m, "fwd_gfx942_fp8_d128_descaled", ATTN_F8_E4M3FNUZ, paged);
       }},
      {"prepare_gfx942_16bit_segments", "bf16, pages of 16",
       [&](Maker& m) { return prepared(m, "fwd_gfx942_bf16_d128_score", ATTN_BF16, paged); }},
      {"kv_append_gfx942", "bf16 to bf16", [](Maker& m) { return appended(m, ATTN_BF16); }},
      {"kv_append_gfx942", "bf16 to f8_e4m3fn",
       [](Maker& m) { return appended(m, ATTN_F8_E4M3FN); }},
      {"kv_append_gfx942", "bf16 to q8_0", [](Maker& m) { return appended(m, ATTN_Q8_0); }},
  };
  for (const Operation& operation : operations) {
    INFO(operation.kernel << ", " << operation.what);
    Memory memory;
    const auto object = load_shipped(operation.kernel, &memory);
    if (!object) ATTN_SKIP(std::string("no code object of ") + operation.kernel);
    Maker m(memory, 42);
    const ShippedProblem problem = operation.make(m);
    Options options;
    options.trace = true;
    const auto dim3 = [](const uint32_t(&x)[3]) { return Dim3{x[0], x[1], x[2]}; };
    const Report report =
        launch(memory, *object->kernel(operation.kernel), dim3(problem.launch.grid),
               dim3(problem.launch.block), problem.kernarg, 0, options);
    for (const Fault& f : report.faults) UNSCOPED_INFO(f.to_string());
    REQUIRE(report.ok());
    const Counters& all = report.counters;
    const double kib = double(all.global_read_bytes + all.global_written_bytes) / 1024;
    const auto issues = [&](Class c) { return double(all.instructions[int(c)]) / kib; };
    // Workgroup 0 alone, with memory that is always there.
    ModelSettings settings;
    settings.memory_latency = settings.scalar_latency = 0;
    settings.memory_bytes_per_clock = 1 << 20;
    Counters first;
    for (const Counters& wave : report.waves) first += wave;
    const double clocks =
        double(run_model(model_waves(object->program(), report.traces), settings).clocks);
    const double beside_copy = double(all.total()) / kib;
    std::cout << operation.kernel << ", " << operation.what << ": " << kib
              << " KiB read and written; for each, a copy's one instruction: memory "
              << issues(Class::Buffer) + issues(Class::Global) << ", transcendental "
              << issues(Class::Trans) << ", packed " << issues(Class::PackedF32) << ", other VALU "
              << issues(Class::Valu) << ", SALU and jumps "
              << issues(Class::Salu) + issues(Class::Branch) + issues(Class::Smem) << ", LDS "
              << issues(Class::Lds) << ", waits " << issues(Class::Wait) + issues(Class::Nop)
              << ", in all " << beside_copy << "; conflicts " << all.lds_conflict_cycles
              << "; of a workgroup "
              << double(first.global_read_bytes + first.global_written_bytes) / clocks
              << " bytes a clock\n";
    CHECK(all.lds_conflict_cycles == 0);
    CHECK(all.scratch_bytes == 0);
  }
  std::cout << std::flush;
}

}  // namespace attn::test
