// What the kernels decode_sm90_blocks_* get from their host side: tensor maps in which heads of
// blocks are places in a token's row, and places in shared memory for the largest of the segments.
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/decode.h"
#include "kernels/decode/decode_args.h"
#include "problem/problem.h"
#include "types.h"

using namespace attn;
using decode::own_place;
using decode::row_place;
using test::hopper;

namespace {

// One query of 32 heads on 8 of K and V; segments of 1000 keys.
struct Input {
  std::vector<attn_segment> segment;
  attn_problem problem{};

  explicit Input(std::vector<attn_dtype> types = {ATTN_Q8_0}, int64_t head_dim = 128) {
    for (const attn_dtype type : types) {
      attn_segment s{};
      s.struct_size = sizeof s;
      s.k_type = s.v_type = type;
      s.seqlen = 1000;
      segment.push_back(s);
    }
    problem.struct_size = sizeof problem;
    problem.batch = 3, problem.heads_q = 32, problem.heads_kv = 8;
    problem.head_dim = head_dim, problem.seqlen_q = 1;
    problem.q_type = ATTN_F16;
  }
  void make(Problem* p) {
    problem.num_segments = int32_t(segment.size());
    problem.segments = segment.data();
    REQUIRE(make_problem(&problem, p).ok());
  }
  // "" or why the kernel does not take it.
  std::string reason(const char* kernel) {
    Problem p;
    make(&p);
    const std::string why = decline(*find_kernel(kernel), p.needs);
    Recipe recipe;
    return why.empty() ? find_kernel(kernel)->recipe(p, hopper(), &recipe).text : why;
  }
  std::string chosen() {
    Problem p;
    make(&p);
    return test::chosen(p);
  }
};

constexpr const char* kernel = "decode_sm90_blocks_d128";

attn_decode_kernarg packed(Input in, Step* step) {
  Problem p;
  in.make(&p);
  Recipe recipe;
  const Status made = find_kernel(kernel)->recipe(p, hopper(), &recipe);
  INFO(made.text);
  REQUIRE(made.ok());
  REQUIRE(recipe.steps.size() == 1);
  *step = recipe.steps[0];
  const std::vector<attn_segment_args> given(in.segment.size());
  Args args{};
  args.segment = given.data();
  alignas(256) static char workspace[256];
  Parameters parameters;
  pack(*step, p, &args, workspace, &parameters);
  attn_decode_sm90_kernarg kernarg;
  REQUIRE(step->arguments.bytes.size() == sizeof kernarg);
  std::memcpy(&kernarg, parameters.kernarg, sizeof kernarg);
  return kernarg.a;
}

}  // namespace

TEST_CASE("decode blocks: tensor maps and places of each segment's types", "[plan]") {
  Input in({ATTN_F16, ATTN_Q8_0, ATTN_Q8_0});
  in.segment[2].v_type = ATTN_Q4_0;
  in.segment[2].layout = ATTN_PAGED;
  in.segment[2].page_size = 32;
  in.segment[2].max_pages = 32;
  in.segment[2].num_pages = 500;
  Step step;
  const attn_decode_kernarg a = packed(in, &step);

  REQUIRE(step.maps.size() == 6);
  CHECK(step.maps[0].swizzled);
  CHECK(step.maps[0].box[0] == 64);
  // 8 heads of 136 bytes in units of 2; a box has 144 bytes.
  const TensorMap& q8_0 = step.maps[2];
  CHECK_FALSE(q8_0.swizzled);
  CHECK(q8_0.element_bytes == 2);
  CHECK(std::vector<int64_t>(q8_0.size, q8_0.size + 4) == std::vector<int64_t>{544, 1000, 1, 3});
  CHECK(std::vector<int>(q8_0.box, q8_0.box + 4) == std::vector<int>{72, 64, 1, 1});
  CHECK(q8_0.stride[0] == 1088);
  CHECK(q8_0.stride[2] == 1088 * 1000);
  // Of 72 and 80.
  const TensorMap& q4_0 = step.maps[5];
  CHECK(std::vector<int64_t>(q4_0.size, q4_0.size + 4) == std::vector<int64_t>{288, 32, 1, 500});
  CHECK(std::vector<int>(q4_0.box, q4_0.box + 4) == std::vector<int>{40, 32, 1, 1});
  CHECK(q4_0.stride[2] == 576 * 32);

  CHECK(a.segment[0].k_type == ATTN_F16);
  CHECK(a.segment[2].k_type == ATTN_Q8_0);
  CHECK(a.segment[2].v_type == ATTN_Q4_0);
  CHECK(a.segment[2].k_head == 68);
  CHECK(a.segment[2].v_head == 36);
  // The f16 segment's.
  CHECK(a.k_bytes == 64 * 256);
  CHECK(a.stage_bytes == 2 * 64 * 256);

  const attn_decode_kernarg small = packed(Input({ATTN_Q4_0}), &step);
  CHECK(small.k_bytes == 64 * 80);
  CHECK(small.stage_bytes == 2 * 64 * 80);
  // Four blocks of a multiprocessor fit.
  CHECK(small.stages == 5);
  // Q of 8 rows, and two numbers for each row and block, and for each row.
  CHECK(step.launch.shared_bytes ==
        8 * 128 * 2 + 8 * 4 * 8 + 8 * 8 + uint32_t(5 * small.stage_bytes));
  CHECK(small.heads_log2 == 0);
  CHECK(small.heads_kv == 8);
}

// Rows in shared memory are odd multiples of 16 bytes, with room for what is before a head.
TEST_CASE("decode blocks: rows of each type", "[plan]") {
  const auto pitches = [](attn_dtype type) {
    return std::vector<int>{row_place(type, 64).pitch, row_place(type, 128).pitch,
                            row_place(type, 256).pitch};
  };
  CHECK(pitches(ATTN_Q8_0) == std::vector<int>{80, 144, 272});  // heads of 68, 136, 272
  CHECK(pitches(ATTN_Q4_0) == std::vector<int>{48, 80, 144});   // 36, 72, 144
  CHECK(pitches(ATTN_Q4_1) == std::vector<int>{48, 80, 176});   // 40, 80, 160
  CHECK(pitches(ATTN_Q5_0) == std::vector<int>{80, 112, 176});  // 44, 88, 176
  CHECK(pitches(ATTN_Q5_1) == std::vector<int>{48, 112, 208});  // 48, 96, 192
  CHECK(pitches(ATTN_IQ4_NL) == std::vector<int>{48, 80, 144});
  for (const attn_dtype type : test::list_of(ggml_types)) {
    Input in({type});
    Step step;
    packed(in, &step);
    INFO(dtype_name(type));
    CHECK(step.maps[0].box[0] * 2 == row_place(type, 128).pitch);
    CHECK(step.maps[0].size[0] * 2 == 8 * dtype_bytes(type, 128));
  }
}

// With many units of each block, it has 2 or 4 heads at once, whose rows are multiples of 16 bytes.
TEST_CASE("decode blocks: several heads at once", "[plan]") {
  Input in({ATTN_Q8_0});
  in.problem.max_sms = 1;
  Step step;
  const attn_decode_kernarg a = packed(in, &step);
  CHECK(a.heads_log2 == 2);
  CHECK(a.heads_kv == 2);
  const TensorMap& map = step.maps[0];
  CHECK(std::vector<int64_t>(map.size, map.size + 3) == std::vector<int64_t>{136, 1000, 4});
  CHECK(std::vector<int>(map.box, map.box + 4) == std::vector<int>{136, 16, 2, 1});
  CHECK(map.stride[1] == 272);

  // A box is wider than two heads of 88 bytes by none, than one of 96 by 16 that are zeros.
  for (const auto& [type, size, box] :
       {std::tuple(ATTN_Q5_0, 88, 88), {ATTN_Q5_1, 48, 56}, {ATTN_Q4_1, 40, 40}}) {
    Input other({type});
    other.problem.max_sms = 1;
    INFO(dtype_name(type));
    CHECK(packed(other, &step).heads_log2 == 2);
    CHECK(step.maps[0].size[0] == size);
    CHECK(step.maps[0].box[0] == box);
  }
  // What "blocks: several heads at once" has: of 4 or 8 heads four, of 6 two where two of a type
  // make a multiple of 16 bytes.
  for (const attn_dtype type : test::list_of(ggml_types | device_scale_arrays))
    for (const int64_t dim : {64, 128, 256})
      for (const int64_t heads : {4, 6, 8}) {
        Input test({type, type, type}, dim);
        for (attn_segment& s : test.segment) s.seqlen = 900;
        test.problem.batch = 2, test.problem.heads_q = test.problem.heads_kv = heads;
        test.problem.max_sms = 1;
        Problem p;
        test.make(&p);
        if (p.needs.features & feature_any_ggml_stride) continue;
        INFO(dtype_name(type) << " head_dim " << dim << ", " << heads << " heads");
        const int at_once = heads % 4 == 0 ? 4 : 2;
        const bool together = !dtype_is_ggml(type) || own_place(type, int(dim), 4).heads <= at_once;
        CHECK(decode::heads_at_once(p, 2 * heads * 45 / 4) == (together ? at_once : 1));
      }
}

TEST_CASE("decode blocks: tensor maps and places of i8 and i4", "[plan]") {
  Input in({ATTN_I8, ATTN_I4});
  in.segment[1].layout = ATTN_PAGED;
  in.segment[1].page_size = 16;
  in.segment[1].max_pages = 63;
  in.segment[1].num_pages = 500;
  Step step;
  const attn_decode_kernarg a = packed(in, &step);
  // Bytes, heads apart; a box's row is as wide as its swizzle.
  const TensorMap &i8 = step.maps[0], &i4 = step.maps[2];
  CHECK(i8.swizzled);
  CHECK(i8.element_bytes == 1);
  CHECK(std::vector<int64_t>(i8.size, i8.size + 4) == std::vector<int64_t>{128, 1000, 8, 3});
  CHECK(std::vector<int64_t>(i8.stride, i8.stride + 3) ==
        std::vector<int64_t>{1024, 128, 1024 * 1000});
  CHECK(std::vector<int>(i8.box, i8.box + 4) == std::vector<int>{128, 64, 1, 1});
  CHECK(std::vector<int64_t>(i4.size, i4.size + 4) == std::vector<int64_t>{64, 16, 8, 500});
  CHECK(std::vector<int>(i4.box, i4.box + 4) == std::vector<int>{64, 16, 1, 1});
  CHECK(a.k_bytes == 64 * 128);
  CHECK(a.scales_at == 2 * 64 * 128);
  CHECK(a.stage_bytes == 2 * 64 * 128 + 1024);
  CHECK(a.v_scales_at == a.scales_at + 256);
  CHECK(a.segment[0].k_scales.batch == 2 * 8 * 1000);
  CHECK(a.segment[0].k_scales.seq == 2 * 8);
  CHECK(a.segment[0].k_scales.head == 2);
  const attn_decode_kernarg blocks = packed(Input(), &step);
  CHECK(blocks.scales_at == 0);
}

TEST_CASE("decode blocks: tensor maps, scales and descales of nvfp4", "[plan]") {
  Input in({ATTN_NVFP4, ATTN_I8});
  in.segment[0].k_descale = ATTN_DESCALE_HEAD;
  Step step;
  const attn_decode_kernarg a = packed(in, &step);
  const TensorMap& map = step.maps[0];
  CHECK(map.swizzled);
  CHECK(map.element_bytes == 1);
  CHECK(std::vector<int64_t>(map.size, map.size + 4) == std::vector<int64_t>{64, 1000, 8, 3});
  CHECK(std::vector<int>(map.box, map.box + 4) == std::vector<int>{64, 64, 1, 1});
  CHECK(a.scales_at == 2 * 64 * 128);  // i8's K and V
  CHECK(a.v_scales_at == a.scales_at + 64 * 8);
  CHECK(a.stage_bytes == 2 * 64 * 128 + 1024);
  CHECK(a.segment[0].k_scales.batch == 8 * 8 * 1000);
  CHECK(a.segment[0].k_scales.seq == 8 * 8);
  CHECK(a.segment[0].k_scales.head == 8);
  CHECK(a.segment[0].k_nvfp4_descale.batch == 8);
  CHECK(a.segment[0].k_nvfp4_descale.head == 1);
}

// Of nvfp4, if heads are adjacent, a row has as many as make 128 bytes; of V where all V has codes
// of 4 bits.
TEST_CASE("decode blocks: rows of several heads", "[plan]") {
  const auto box = [](const TensorMap& map) { return std::vector<int>(map.box, map.box + 3); };
  Input in({ATTN_NVFP4, ATTN_I4});
  in.problem.max_sms = 1;
  Step step;
  const attn_decode_kernarg a = packed(in, &step);
  CHECK(a.heads_log2 == 2);
  CHECK(a.v_by_fours);
  for (const TensorMap& map : {step.maps[0], step.maps[1]}) {
    CHECK(std::vector<int64_t>(map.size, map.size + 3) == std::vector<int64_t>{128, 1000, 4});
    CHECK(map.stride[1] == 128);
    CHECK(box(map) == std::vector<int>{128, 16, 2});
  }
  CHECK(a.segment[0].k_head * 2 == 64);
  for (const TensorMap& map : {step.maps[2], step.maps[3]})
    CHECK(box(map) == std::vector<int>{64, 16, 4});
  CHECK(a.segment[1].k_head == 0);

  Input other({ATTN_NVFP4, ATTN_I8});
  other.problem.max_sms = 1;
  const attn_decode_kernarg gathered = packed(other, &step);
  CHECK(!gathered.v_by_fours);
  CHECK(box(step.maps[0]) == std::vector<int>{128, 16, 2});
  CHECK(box(step.maps[1]) == std::vector<int>{64, 16, 4});
  CHECK(gathered.segment[0].v_head == 0);

  Input four({ATTN_NVFP4}, 64);
  four.problem.max_sms = 1;
  packed(four, &step);
  CHECK(box(step.maps[0]) == std::vector<int>{128, 16, 1});

  Input apart({ATTN_NVFP4});
  apart.problem.max_sms = 1;
  apart.segment[0].k_stride = {2 * 8 * 128 * 1000, 2 * 8 * 128, 2 * 128};
  packed(apart, &step);
  CHECK(box(step.maps[0]) == std::vector<int>{64, 16, 4});
  CHECK(box(step.maps[1]) == std::vector<int>{128, 16, 2});
}

TEST_CASE("decode blocks: which problems the plan gives them", "[plan]") {
  CHECK(Input({ATTN_NVFP4, ATTN_BF16, ATTN_F16}).chosen() != kernel);
  CHECK(Input({ATTN_NVFP4}).chosen() == kernel);
  for (const attn_dtype q : {ATTN_F16, ATTN_BF16}) {  // lists_cuda, which copies, takes bf16 too
    Input token({ATTN_F8_E4M3FN_TOKEN, ATTN_F8_E4M3FN_TOKEN});
    token.problem.q_type = q;
    CHECK(token.chosen() == kernel);
    token.problem.seqlen_q = 512;
    CHECK(token.chosen() == "fwd_sm90_" + std::string(dtype_name(q)) + "_d128_dequantised");
  }
  CHECK(Input({ATTN_NVFP4, ATTN_F16}, 256).chosen() == "decode_sm90_blocks_d256");
  CHECK(Input({ATTN_I8, ATTN_F16}).chosen() == kernel);
  CHECK(Input({ATTN_I4}, 64).chosen() == "decode_sm90_blocks_d64");
  CHECK(Input().chosen() == kernel);
  CHECK(Input({ATTN_Q4_0}, 64).chosen() == "decode_sm90_blocks_d64");
  CHECK(Input({ATTN_F16, ATTN_Q4_0}, 256).chosen() == "decode_sm90_blocks_d256");
  for (const attn_dtype type : test::list_of(ggml_types)) CHECK(Input({type}).chosen() == kernel);
  Input pair({ATTN_Q4_1});
  pair.segment[0].v_type = ATTN_IQ4_NL;
  CHECK(pair.chosen() == kernel);
  CHECK(Input({ATTN_F16, ATTN_F16}).chosen() == "decode_sm90_f16_d128_r8");
  Input rows;
  rows.problem.seqlen_q = 3;
  CHECK(rows.chosen() == "decode_sm90_blocks_d128_r16");
}

TEST_CASE("decode blocks: what they do not take, in a sentence", "[plan]") {
  CHECK(Input({ATTN_BF16, ATTN_Q8_0}).reason(kernel) == "k type bf16 next to q of f16");
  CHECK(Input({ATTN_Q8_0, ATTN_F8_E4M3FN}).reason(kernel) == "k type f8_e4m3fn");
  CHECK(Input({ATTN_Q8_0}, 96).reason(kernel) == "head_dim 96 is not a multiple of 128");
  // Tokens of 3 heads, 3 * 136 bytes.
  Input odd;
  odd.problem.heads_q = 12, odd.problem.heads_kv = 3;
  CHECK(odd.reason(kernel) == "strides of ggml's blocks that are not multiples of 16 bytes");
  Input apart;
  apart.segment[0].k_stride = {8 * 1000 * 160, 8 * 160, 160};
  CHECK(apart.reason(kernel) ==
        "heads of q8_0 are 160 elements, 170 bytes, apart; accepted: 128 elements, or multiples "
        "of 16 bytes");
  Input pages;
  pages.segment[0].layout = ATTN_PAGED;
  pages.segment[0].page_size = 8;
  pages.segment[0].max_pages = 125;
  pages.segment[0].num_pages = 500;
  CHECK(pages.reason(kernel) == "page_size 8 is not a multiple of 16");
  Input scales({ATTN_I8});
  scales.segment[0].k_scale_stride = {3, int64_t{1} << 33, 1};
  CHECK(scales.reason(kernel) ==
        "scales of tokens and heads are 8589934592 and 1 apart; accepted: up to 1073741823");
  Input nvfp4({ATTN_NVFP4});
  nvfp4.segment[0].k_scale_stride = {8 * 1000 * 12, 8 * 12, 12};
  CHECK(nvfp4.reason(kernel) ==
        "scales of nvfp4 are 96000, 96 and 12 apart; accepted: multiples of 8, those of a row");
  Input descaled({ATTN_Q8_0});
  descaled.segment[0].v_descale = ATTN_DESCALE_TENSOR;
  CHECK(
      descaled.reason(kernel) ==
      "a descale of kind 1 with q8_0; accepted: none (0), and with nvfp4 tensor (1) and head (2)");
  Input odd_pages({ATTN_I8});
  odd_pages.segment[0].layout = ATTN_PAGED;
  odd_pages.segment[0].page_size = 16;
  odd_pages.segment[0].max_pages = 125;
  odd_pages.segment[0].num_pages = 500;
  odd_pages.segment[0].v_scale_stride = {129, 8, 1};
  CHECK(odd_pages.reason(kernel) == "scales of pages are 129 apart; accepted: even numbers");
  Input rows;
  rows.problem.seqlen_q = 5;
  CHECK(rows.reason(kernel) == "heads_q / heads_kv * seqlen_q is 4 * 5; accepted: up to 8");
  CHECK(rows.reason("decode_sm90_blocks_d128_r16") ==
        "heads_q / heads_kv * seqlen_q is 4 * 5; accepted: up to 16");
}
