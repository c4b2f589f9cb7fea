// What the kernels fwd_sm90_*_dequantised get from their host side: two launches, the second of
// which reads what the first has written into the workspace.
#include <cstring>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/dequantise_args.h"
#include "kernels/forward_sm90/forward_args.h"
#include "problem/problem.h"

using namespace attn;
using test::hopper;

namespace {

// 8 query heads on 2 of K and V, 100 queries; segments of e4m3 with 1000 keys.
struct Input {
  std::vector<attn_segment> segment;
  attn_problem problem{};

  explicit Input(size_t segments = 1, attn_dtype type = ATTN_BF16, int64_t head_dim = 128) {
    segment.resize(segments);
    for (attn_segment& s : segment) {
      s.struct_size = sizeof s;
      s.k_type = s.v_type = ATTN_F8_E4M3FN;
      s.seqlen = 1000;
    }
    problem.struct_size = sizeof problem;
    problem.batch = 3, problem.heads_q = 8, problem.heads_kv = 2;
    problem.head_dim = head_dim, problem.seqlen_q = 100;
    problem.q_type = type;
  }
  void make(Problem* p) {
    problem.num_segments = int32_t(segment.size());
    problem.segments = segment.data();
    REQUIRE(make_problem(&problem, p).ok());
  }
  Status recipe(const char* kernel, Recipe* to) {
    Problem p;
    make(&p);
    return find_kernel(kernel)->recipe(p, hopper(), to);
  }
  // The first step's image is dequantise_sm90's.
  std::string second_image(const char* kernel) {
    Recipe recipe;
    const Status made = this->recipe(kernel, &recipe);
    INFO(made.text);
    REQUIRE(made.ok());
    REQUIRE(recipe.steps.size() == 2);
    CHECK(recipe.steps[0].image == std::string("dequantise_sm90"));
    for (const Step& step : recipe.steps) CHECK(step.launch.starts_early);
    return recipe.steps[1].image;
  }
  std::string declined(const char* kernel) {
    Recipe recipe;
    const Status made = this->recipe(kernel, &recipe);
    CHECK(made.code == ATTN_UNSUPPORTED);
    return made.text;
  }
  std::string passed_over(const char* kernel) {
    Recipe recipe;
    REQUIRE(this->recipe(kernel, &recipe).ok());
    return recipe.passed_over;
  }
};

template <class Kernarg>
Kernarg packed(const Step& step, const Problem& p, const Args& args, void* workspace,
               Parameters* parameters) {
  REQUIRE(step.arguments.bytes.size() == sizeof(Kernarg));
  pack(step, p, &args, workspace, parameters);
  Kernarg kernarg;
  std::memcpy(&kernarg, parameters->kernarg, sizeof kernarg);
  return kernarg;
}

constexpr const char* kernel = "fwd_sm90_bf16_d128_dequantised";

}  // namespace

TEST_CASE("sm90 dequantised: the second launch reads what the first writes", "[plan]") {
  Input in(3);
  in.segment[0].layout = ATTN_PAGED;  // of 48 keys: 21 pages for 1000
  in.segment[0].page_size = 48;
  in.segment[0].max_pages = 30;
  in.segment[0].num_pages = 500;
  in.segment[0].k_descale = ATTN_DESCALE_BLOCK;
  in.segment[0].v_descale = ATTN_DESCALE_TENSOR;
  in.segment[0].descale_block_keys = 64;
  in.segment[1].layout = ATTN_PACKED;
  in.segment[1].total = 1700;
  in.segment[1].v_type = ATTN_F8_E5M2;
  in.segment[2].has_seqlens = 1;
  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
  REQUIRE(recipe.steps.size() == 2);
  CHECK(recipe.steps[1].image == std::string("fwd_sm90_bf16_d128_paged"));

  const int64_t rows[] = {3 * 21 * 48, 1700, 3 * 1000};
  constexpr int64_t row_bytes = 2 * 128 * 2;
  const size_t table_bytes = 256;  // of 3 * 21 entries
  CHECK(recipe.workspace ==
        size_t(256 + 2 * (rows[0] + rows[1] + rows[2]) * row_bytes) + table_bytes);

  alignas(256) static char workspace[256], data[3][2];
  static const int32_t table[3 * 30] = {}, lengths[4] = {};
  const float descale[1] = {};
  attn_segment_args given[3]{};
  for (int n = 0; n < 3; ++n) {
    given[n].struct_size = sizeof given[n];
    given[n].k = &data[n][0], given[n].v = &data[n][1];
  }
  given[0].block_table = table;
  given[0].k_descale = given[0].v_descale = descale;
  given[1].cu_seqlens = lengths;
  given[2].seqlens = lengths;
  Args args{};
  args.segment = given;
  Parameters parameters;
  const auto first =
      packed<attn_dequantise_kernarg>(recipe.steps[0], p, args, workspace, &parameters);
  const auto second =
      packed<attn_sm90_paged_kernarg>(recipe.steps[1], p, args, workspace, &parameters);
  CHECK(second.taken == static_cast<void*>(workspace));
  // A run leaves the step as it was: another one is for its own workspace.
  alignas(256) static char other[256];
  const auto again = packed<attn_sm90_paged_kernarg>(recipe.steps[1], p, args, other, &parameters);
  CHECK(reinterpret_cast<const char*>(again.pages[0].block_table) - other ==
        reinterpret_cast<const char*>(second.pages[0].block_table) - workspace);
  CHECK(again.taken == static_cast<void*>(other));
  packed<attn_sm90_paged_kernarg>(recipe.steps[1], p, args, workspace, &parameters);

  CHECK(first.num_segments == 3);
  CHECK(first.heads == 2);
  CHECK(first.items == 2 * 3 * 3 * first.parts);
  CHECK(int(first.parts) * first.part_keys >= 1000);
  CHECK(first.part_keys % attn_dequantise_keys == 0);
  CHECK(recipe.steps[0].launch.grid[0] == first.items);
  const char* end = workspace + 256;
  const auto address = [](const void* at) { return at; };  // a char* would be printed as text
  for (int n = 0; n < 3; ++n) {
    INFO(n);
    const attn_dequantise_segment& s = first.segment[n];
    const void* const* base = &parameters.map_base[1 + 2 * n];
    const auto& maps = recipe.steps[1].maps;
    for (int v = 0; v < 2; ++v) {
      CHECK(s.tensor[v].src == address(&data[n][v]));
      CHECK(s.tensor[v].dst == address(end));
      CHECK(base[v] == address(end));
      CHECK(s.tensor[v].dim == 128);
      CHECK(s.tensor[v].type == (n == 1 && v == 1 ? ATTN_F8_E5M2 : ATTN_F8_E4M3FN));
      const TensorMap& map = maps[size_t(1 + 2 * n + v)];
      CHECK(map.element_bytes == 2);
      CHECK(map.size[1] * map.size[3] == rows[n]);
      CHECK(map.stride[0] == row_bytes);
      CHECK(map.stride[1] == 2 * 128);
      if (map.size[3] > 1) CHECK(map.stride[2] == map.size[1] * row_bytes);
      end += rows[n] * row_bytes;
    }
    CHECK(s.rows == (n == 1 ? 0 : rows[n] / 3));
    CHECK((s.pages.block_table != nullptr) == (n == 0));
    CHECK(second.segment[n].cu_seqlens == (n == 1 ? lengths : nullptr));
    CHECK(second.segment[n].seqlens == (n == 2 ? lengths : nullptr));
    CHECK(second.segment[n].capacity == 1000);
    if (n > 0) {
      CHECK(second.pages[n].block_table == nullptr);
      continue;
    }
    CHECK(s.pages.block_table == table);
    CHECK(s.pages.max_pages == 30);
    CHECK(s.pages.num_pages == 500);
    CHECK(address(s.table) == address(end));
    CHECK(s.table_pages == 21);
    CHECK(second.pages[0].block_table == s.table);
    CHECK(second.pages[0].num_pages == 3 * 21);
    CHECK(second.pages[0].page_size == 48);
    CHECK(second.pages[0].max_pages == 21);
    CHECK(s.tensor[0].descale.block_keys == 64);
    CHECK(s.tensor[0].descale.head == 16);
    CHECK(s.tensor[1].descale.at == descale);
    CHECK(s.tensor[1].descale.batch == 0);
    end += table_bytes;
  }
  CHECK(size_t(end - workspace) == recipe.workspace);
}

TEST_CASE("sm90 dequantised: segments of q's type are read where they are", "[plan]") {
  Input in(3);
  in.segment[0].k_type = in.segment[0].v_type = ATTN_Q8_0;
  in.segment[1].k_type = ATTN_Q4_0, in.segment[1].v_type = ATTN_BF16;
  in.segment[2].k_type = in.segment[2].v_type = ATTN_BF16;
  in.segment[2].layout = ATTN_PAGED;
  in.segment[2].page_size = 64;
  in.segment[2].max_pages = 1000;
  in.segment[2].num_pages = 500;
  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
  CHECK(recipe.workspace == size_t(256 + 2 * 2 * 3 * 1000 * 512));  // of the first two
  CHECK(recipe.steps[1].image == std::string("fwd_sm90_bf16_d128_paged"));
  CHECK(recipe.steps[1].maps[5].size[3] == 500);

  alignas(256) static char workspace[256], data[3][2];
  static const int32_t table[3000] = {};
  attn_segment_args given[3]{};
  for (int n = 0; n < 3; ++n) given[n].k = &data[n][0], given[n].v = &data[n][1];
  given[2].block_table = table;
  Args args{};
  args.segment = given;
  Parameters parameters;
  const auto first =
      packed<attn_dequantise_kernarg>(recipe.steps[0], p, args, workspace, &parameters);
  CHECK(first.segment[0].tensor[0].type == ATTN_Q8_0);
  CHECK(first.segment[0].tensor[0].src_stride[2] == 128);
  CHECK(first.segment[1].tensor[0].type == ATTN_Q4_0);
  CHECK(first.segment[1].tensor[1].type == ATTN_BF16);
  for (const attn_dequantise_tensor& t : first.segment[2].tensor) CHECK(t.dst == nullptr);
  CHECK(int(first.parts) * first.part_keys < 2000);  // of 1000 keys
  const auto second =
      packed<attn_sm90_paged_kernarg>(recipe.steps[1], p, args, workspace, &parameters);
  CHECK(second.pages[2].block_table == table);
  CHECK(parameters.map_base[5] == static_cast<const void*>(data[2]));

  for (attn_segment& s : in.segment) s.k_type = s.v_type = ATTN_BF16;
  CHECK(in.declined(kernel) == "all K and V are of bf16 as q");
}

TEST_CASE("sm90 dequantised: which kernel reads the workspace", "[plan]") {
  CHECK(Input().second_image(kernel) == "fwd_sm90_bf16_d128");
  CHECK(Input(2, ATTN_F16, 64).second_image("fwd_sm90_f16_d64_dequantised") == "fwd_sm90_f16_d64");
  CHECK(Input(1, ATTN_F16, 256).second_image("fwd_sm90_f16_d256_dequantised") ==
        "fwd_sm90_f16_d256");
  Input in;
  in.problem.scale = -1;
  CHECK(in.second_image(kernel) == "fwd_sm90_bf16_d128_score");
  for (const uint32_t flag : {ATTN_ALIBI, ATTN_SPLIT_INVARIANT}) {
    Input with;
    with.problem.flags = flag;
    CHECK(with.second_image(kernel) == "fwd_sm90_bf16_d128_score");
  }
  Input pages;
  pages.segment[0].layout = ATTN_PAGED;
  pages.segment[0].page_size = 16;
  pages.segment[0].max_pages = 63;
  pages.segment[0].num_pages = 200;
  CHECK(pages.second_image(kernel) == "fwd_sm90_bf16_d128_paged");
  pages.problem.softcap = 3;
  CHECK(pages.second_image(kernel) == "fwd_sm90_bf16_d128_score_paged");
  Input mask;
  mask.problem.flags = ATTN_BLOCK_MASK | ATTN_CAUSAL;
  mask.problem.block_q = mask.problem.block_k = 64;
  CHECK(mask.second_image(kernel) == "fwd_sm90_bf16_d128_mask");
  Recipe sorted;
  REQUIRE(mask.recipe(kernel, &sorted).ok());
  CHECK(sorted.workspace == (sizeof(attn_sm90_order) + 255) / 256 * 256 + 2 * 3000 * 512);
  mask.problem.softcap = 3;
  CHECK(mask.declined(kernel) ==
        "a block mask with softcap, ALiBi, split_invariant or a scale not above 0; accepted: "
        "without");
  pages.problem = mask.problem;
  CHECK(pages.declined(kernel) == "a block mask with paged K/V; accepted: without");
  Input wide(1, ATTN_BF16, 192);
  wide.problem.head_dim_v = 128;
  CHECK(wide.second_image("fwd_sm90_bf16_d192_dv128_dequantised") == "fwd_sm90_bf16_d192_dv128");
  wide.problem.softcap = 3;
  CHECK(wide.second_image("fwd_sm90_bf16_d192_dv128_dequantised") == "fwd_sm90_bf16_d256_score");
}

TEST_CASE("sm90 dequantised: what is declined", "[plan]") {
  Input in;
  in.problem.batch = 1;
  in.segment[0].seqlen = 1 << 22;  // 1024 bytes a key
  CHECK(in.second_image(kernel) == "fwd_sm90_bf16_d128");
  in.segment[0].seqlen += 1;
  CHECK(in.declined(kernel).find("bytes; accepted: up to 4294967296") != std::string::npos);
  for (const attn_descale_kind kind :
       {ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD, ATTN_DESCALE_BLOCK}) {
    Input with(1, ATTN_F16);
    with.segment[0].descale_block_keys = 128;
    with.segment[0].v_descale = kind;
    CHECK(with.declined("fwd_sm90_f16_d128_dequantised") ==
          "segments[0]: v_descale is " + std::to_string(int(kind)) +
              " with q of f16, whose range the product may leave; accepted: none (0)");
    with.problem.q_type = ATTN_BF16;
    CHECK(with.second_image(kernel) == "fwd_sm90_bf16_d128");
  }
  Input q;
  q.problem.q_descale = ATTN_DESCALE_TENSOR;
  CHECK(q.declined(kernel) == "q_descale is 1; accepted: none (0)");
  CHECK(Input(9).declined(kernel) == "num_segments is 9; accepted: up to 8");
}

TEST_CASE("sm90 dequantised: few rows go to the kernels of decode", "[plan]") {
  Input in;
  in.problem.seqlen_q = 32;  // of 4 heads: 128 rows
  CHECK(in.passed_over(kernel) == "for 128 rows, seqlen_q * heads_q / heads_kv, up to 128");
  in.segment[0].v_type = ATTN_F8_E5M2;  // which they do not take
  CHECK(in.passed_over(kernel) == "");
  in.segment[0].v_type = ATTN_F8_E4M3FN;
  in.problem.seqlen_q = 33;
  CHECK(in.passed_over(kernel) == "");
  Input wide(1, ATTN_BF16, 256);
  wide.problem.seqlen_q = 4;
  CHECK(wide.passed_over("fwd_sm90_bf16_d256_dequantised") != "");
  wide.problem.seqlen_q = 5;
  CHECK(wide.passed_over("fwd_sm90_bf16_d256_dequantised") == "");
}

// Those of blocks take 16 rows. Of what they do not take a plan gives it the few rows too.
TEST_CASE("sm90 dequantised: ggml's blocks", "[plan]") {
  const auto input = [](attn_dtype type, int64_t seqlen_q, int64_t head_dim = 128) {
    Input in(1, ATTN_BF16, head_dim);
    in.segment[0].k_type = in.segment[0].v_type = type;
    in.problem.seqlen_q = seqlen_q;  // of 4 heads
    return in;
  };
  const auto chosen = [](Input in) {
    Problem p;
    in.make(&p);
    return test::chosen(p);
  };
  for (const attn_dtype type : {ATTN_Q8_0, ATTN_Q4_0}) {
    CHECK(chosen(input(type, 2)) == "decode_sm90_blocks_d128");
    CHECK(chosen(input(type, 4)) == "decode_sm90_blocks_d128_r16");
    CHECK(chosen(input(type, 5)) == kernel);
    CHECK(chosen(input(type, 2048, 256)) == "fwd_sm90_bf16_d256_dequantised");
    CHECK(chosen(input(type, 1, 96)) == kernel);
    Input odd = input(type, 1);  // tokens of 3 heads of 136 or 72 bytes
    odd.problem.heads_q = 12, odd.problem.heads_kv = 3;
    CHECK(chosen(odd) == kernel);
    Input fp8 = input(type, 1);
    fp8.segment[0].v_type = ATTN_F8_E4M3FN;
    CHECK(chosen(fp8) == kernel);
    Input mixed = input(type, 100);
    mixed.segment.push_back(mixed.segment[0]);
    mixed.segment[1].k_type = mixed.segment[1].v_type = ATTN_BF16;
    CHECK(chosen(mixed) == kernel);
    mixed.segment[1].k_type = ATTN_F16;
    CHECK(chosen(mixed).find("; k: f16, ") != std::string::npos);
    Input mask = input(type, 100);
    mask.problem.flags = ATTN_BLOCK_MASK;
    mask.problem.block_q = mask.problem.block_k = 128;
    CHECK(chosen(mask) == kernel);
    // The rule of 16 bytes holds for what are no blocks.
    mixed.segment[1].k_type = ATTN_BF16;
    mixed.segment[1].k_stride = {1000 * 2 * 129, 2 * 129, 129};
    CHECK(chosen(mixed).find("strides that are not multiples of 16 bytes (" +
                             std::string(kernel)) != std::string::npos);
  }
}

TEST_CASE("sm90 dequantised: scales of i8 and i4", "[plan]") {
  Input in;
  in.segment[0].k_type = ATTN_I8, in.segment[0].v_type = ATTN_I4;
  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
  alignas(256) static char workspace[256];
  static const uint16_t scales[2] = {};
  attn_segment_args given{};
  given.k_scale = &scales[0], given.v_scale = &scales[1];
  Args args{};
  args.segment = &given;
  Parameters parameters;
  const auto a = packed<attn_dequantise_kernarg>(recipe.steps[0], p, args, workspace, &parameters);
  for (int v = 0; v < 2; ++v) {
    const attn_dequantise_tensor& t = a.segment[0].tensor[v];
    CHECK(t.type == (v ? ATTN_I4 : ATTN_I8));
    CHECK(t.scale == &scales[v]);
    CHECK(t.scale_stride[0] == 2000);
    CHECK(t.scale_stride[1] == 2);
    CHECK(t.scale_stride[2] == 1);
  }
}

TEST_CASE("sm90 dequantised: max_sms is the number of blocks at most", "[plan]") {
  Input in;
  in.problem.max_sms = 7;
  Recipe recipe;
  REQUIRE(in.recipe(kernel, &recipe).ok());
  for (const Step& step : recipe.steps) CHECK(step.launch.grid[0] == 7);
}

TEST_CASE("sm90 dequantised: where there is no key the first launch is empty", "[plan]") {
  for (const attn_layout layout : {ATTN_PADDED, ATTN_PACKED, ATTN_PAGED}) {
    Input in(2);
    for (attn_segment& s : in.segment) {
      s.layout = layout;
      s.seqlen = 0;
      s.page_size = layout == ATTN_PAGED ? 16 : 0;
    }
    Recipe recipe;
    REQUIRE(in.recipe(kernel, &recipe).ok());
    CHECK(is_empty(recipe.steps[0].launch));
    CHECK(!is_empty(recipe.steps[1].launch));
  }
}

TEST_CASE("sm90 dequantised: which problems the plan gives it", "[plan]") {
  const auto chosen = [](Input in) {
    Problem p;
    in.make(&p);
    return test::chosen(p);
  };
  const auto queries = [](int64_t seqlen_q, Input in = Input()) {
    in.problem.seqlen_q = seqlen_q;  // of 4 heads
    return in;
  };
  CHECK(chosen(queries(1)) == "decode_sm90_fp8_d128_r8");
  CHECK(chosen(queries(32)) == "decode_sm90_fp8_d128_r64");
  CHECK(chosen(queries(33)) == kernel);
  CHECK(chosen(queries(100, Input(8))) == kernel);
  CHECK(chosen(queries(4, Input(1, ATTN_F16, 256))) == "decode_sm90_fp8_d256_r16");
  CHECK(chosen(queries(5, Input(1, ATTN_F16, 256))) == "fwd_sm90_f16_d256_dequantised");
  CHECK(chosen(queries(100, Input(1, ATTN_BF16, 64))) == "fwd_sm90_bf16_d64_dequantised");
  Input large;
  large.segment[0].seqlen = 1 << 22;
  CHECK(chosen(large) == "decode_sm90_fp8_d128_r64");
  Input scaled(1, ATTN_F16);
  scaled.segment[0].k_descale = ATTN_DESCALE_HEAD;
  CHECK(chosen(scaled) == "decode_sm90_fp8_d128_r64");
  Input wide(1, ATTN_BF16, 192);
  wide.problem.head_dim_v = 128;
  CHECK(chosen(wide) == "fwd_sm90_bf16_d192_dv128_dequantised");
  // K and V of q's type have no codes.
  Input same;
  same.segment[0].k_type = same.segment[0].v_type = ATTN_BF16;
  CHECK(chosen(same) == "fwd_sm90_bf16_d128");
}
