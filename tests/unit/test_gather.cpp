// What lists_cuda makes of a problem on a Hopper, which need not be here: copies and the kernel
// that attends to them.
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/gather_args.h"
#include "plan/gather.h"

using namespace attn;

namespace {

// Lists of 2048 of 65536 keys of a latent cache.
struct Setup {
  attn_segment segment = make<attn_segment>();
  attn_problem problem = make<attn_problem>();

  Setup(int64_t batch, int64_t queries, int64_t heads) {
    segment.k_type = ATTN_BF16;
    segment.layout = ATTN_PAGED;
    segment.page_size = 64;
    segment.num_pages = batch * 1024;
    segment.max_pages = 1024;
    segment.v_in_k = 1;
    segment.list_size = 2048;
    problem.batch = batch, problem.heads_q = heads, problem.heads_kv = 1;
    problem.head_dim = 576, problem.head_dim_v = 512, problem.seqlen_q = queries;
    problem.q_type = ATTN_BF16;
    problem.flags = ATTN_CAUSAL;
    problem.num_segments = 1;
  }
};

struct Chosen {
  Status status;
  Choice choice;
  std::string name() const { return status.ok() ? choice.kernel->name : status.text; }
  // Of all passes but the last.
  const Part& part() const { return choice.composition->parts.at(0); }
  const Problem& attends() const { return static_cast<const Problem&>(*part().problem); }
  std::string attends_by() const { return part().choice.kernel->name; }
  // Of each pass, in their order.
  std::vector<RunForward> runs() const {
    std::vector<RunForward> all;
    for (const Stage& stage : choice.composition->stages)
      if (const auto* run = std::get_if<RunForward>(&stage)) all.push_back(*run);
    return all;
  }
  bool copies() const { return runs().at(0).keys.at(0).block_table.from == Place::nowhere; }
  // Of copies and of slots, which both begin with it.
  const attn_visits& visits(size_t step) const {
    return *reinterpret_cast<const attn_visits*>(
        choice.recipe.steps.at(step).arguments.bytes.data());
  }
  const attn_list_slots_kernarg& slots(size_t step) const {
    CHECK(choice.recipe.steps.at(step).image == std::string("list_slots_cuda"));
    return *reinterpret_cast<const attn_list_slots_kernarg*>(
        choice.recipe.steps.at(step).arguments.bytes.data());
  }
};
// As if each image were there.
Chosen on_hopper(Setup s, const char* kernel = nullptr) {
  struct All : CodeFile {
    std::string without(const char*) const override { return ""; }
  } const all;
  const DeviceInfo device = test::hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &all};
  Chosen chosen;
  s.problem.segments = &s.segment;
  s.problem.kernel = kernel;
  Problem p;
  chosen.status = make_problem(&s.problem, &p);
  if (chosen.status.ok()) chosen.status = choose(p, machine, &chosen.choice);
  return chosen;
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE("gather: each query is a sequence whose pages are its listed keys") {
  const Chosen c = on_hopper(Setup(64, 1, 64));
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.attends_by() == "mla_sm90_bf16_d576_r64_pages");
  CHECK(c.attends().batch == 64);
  CHECK(c.attends().seqlen_q == 1);
  CHECK(c.attends().flags == 0);
  const Segment& s = c.attends().segment[0];
  CHECK(s.seqlen == 2048);
  CHECK(s.has_seqlens == 1);
  CHECK(s.layout == ATTN_PAGED);
  CHECK(s.page_size == 1);
  CHECK(s.max_pages == 2048);
  CHECK(s.num_pages == 64 * 1024 * 64);
  CHECK(s.k_stride.batch == 576);
  // One pass; the lse has its order already.
  REQUIRE(c.choice.recipe.steps.size() == 1);
  CHECK(c.choice.recipe.steps[0].launch.grid[0] == 64);
  CHECK(c.slots(0).segment[0].capacity == 2048);
  CHECK(c.slots(0).segment[0].entry_slots == 64);
  CHECK(c.choice.recipe.workspace < size_t(64 * 2048 * 576 * 2));  // no copies
}

TEST_CASE("gather: many queries in one pass") {
  const Chosen c = on_hopper(Setup(1, 4096, 128));
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.attends_by() == "mla_sm90_bf16_d576_r64_pages");
  REQUIRE(c.runs().size() == 1);
  CHECK(c.attends().batch == 4096);
  CHECK(c.choice.recipe.steps.size() == 2);  // and the order of lse
  CHECK(c.choice.recipe.workspace < size_t{256} << 20);
}

// A pass would clear the rows of the sequences of the others.
TEST_CASE("gather: packed queries without lists take one pass") {
  Setup s(32, 2, 16);
  s.segment.list_size = 0;
  s.segment.k_type = ATTN_MLA_656;
  s.problem.q_layout = ATTN_PACKED;
  s.problem.total_q = 64;
  const Chosen c = on_hopper(s);
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.copies());
  CHECK(c.runs().size() == 1);
  CHECK(c.attends().batch == 32);
  Setup more(64, 2, 16);
  more.segment.list_size = 0;
  more.segment.k_type = ATTN_MLA_656;
  more.problem.q_layout = ATTN_PACKED;
  more.problem.total_q = 128;
  CHECK(has(on_hopper(more, "lists_cuda").name(), "the keys of all sequences take a workspace of"));
}

TEST_CASE("gather: copies of many queries in passes of a GiB") {
  Setup s(1, 4096, 128);
  s.segment.k_type = ATTN_F8_E4M3FN;
  s.problem.q_type = ATTN_F16;
  const Chosen c = on_hopper(s);
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.copies());
  CHECK(c.attends_by() == "mla_sm90_f16_d576_r64");
  const std::vector<RunForward> passes = c.runs();
  REQUIRE(passes.size() == 10);  // of 455 queries
  CHECK(c.attends().batch == 455);
  CHECK(c.visits(9).first == 9 * 455);
  REQUIRE(c.choice.composition->parts.size() == 2);
  CHECK(passes[8].part == 0);
  CHECK(passes[9].part == 1);
  CHECK(static_cast<const Problem&>(*c.choice.composition->parts[1].problem).batch == 1);
  CHECK(passes[9].q.bytes == int64_t{9} * 455 * 128 * 576 * 2);
  CHECK(passes[9].out.bytes == int64_t{9} * 455 * 128 * 512 * 2);
  CHECK(passes[9].lse.from == Place::workspace);
  CHECK(c.choice.recipe.steps.size() == 11);  // and the order of lse
  CHECK(c.choice.recipe.workspace < (size_t{1} << 30) + (size_t{256} << 20));
}

// What keeps keys from being read where they are.
TEST_CASE("gather: when keys are copied") {
  const auto copies = [](const Setup& s) {
    const Chosen c = on_hopper(s);
    REQUIRE(c.name() == "lists_cuda");
    return c.copies();
  };
  Setup s(2, 1, 64);
  CHECK(!copies(s));
  s.segment.k_type = ATTN_MLA_656;
  CHECK(!copies(s));
  CHECK(on_hopper(s).attends_by() == "mla_sm90_bf16_d576_r64_656");
  s.problem.softcap = 1;
  CHECK(copies(s));
  s.problem.softcap = 0;
  s.segment.k_type = ATTN_F8_E4M3FN;
  s.segment.k_descale = ATTN_DESCALE_TENSOR;
  CHECK(!copies(s));
  CHECK(on_hopper(s).attends_by() == "mla_sm90_bf16_d576_r64_e4m3");
  // A list is a sequence of its own.
  s.segment.k_descale = ATTN_DESCALE_HEAD;
  CHECK(copies(s));
  s.segment.k_descale = ATTN_DESCALE_NONE;
  s.segment.k_type = ATTN_F8_E4M3FN_TOKEN;
  CHECK(!copies(s));
  s.segment.k_scale_stride = {64 + 8, 1, 1};  // other places than those of keys
  CHECK(copies(s));
  // Pages that are no whole number of rows apart.
  s = Setup(2, 1, 64);
  s.segment.k_stride = {64 * 576 + 8, 576, 576};
  CHECK(copies(s));
  s.segment.k_stride = {65 * 576, 576, 576};
  CHECK(!copies(s));
  CHECK(on_hopper(s).slots(0).segment[0].entry_slots == 65);
  // No kernel of few queries reads pages of one key with so many rows.
  s = Setup(2, 1, 64);
  s.problem.head_dim = s.problem.head_dim_v = 128;
  CHECK(copies(s));
  s.problem.heads_q = 16;
  CHECK(!copies(s));
}

TEST_CASE("gather: sequences of padded keys are one pool") {
  Setup s(3, 1, 64);
  s.segment.layout = ATTN_PADDED;
  s.segment.page_size = s.segment.max_pages = s.segment.num_pages = 0;
  s.segment.seqlen = 4096;
  const Chosen c = on_hopper(s);
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.attends().segment[0].num_pages == 3 * 4096);
  CHECK(c.slots(0).segment[0].entry_slots == 4096);
}

TEST_CASE("gather: lists of K/V heads are passes of their own") {
  Setup s(2, 3, 8);
  s.problem.heads_kv = 2;
  s.problem.head_dim = s.problem.head_dim_v = 128;
  s.segment.v_in_k = 0;
  s.segment.v_type = ATTN_BF16;
  s.segment.list_heads = 2;
  const Chosen c = on_hopper(s);
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.attends_by() == "decode_sm90_bf16_d128_r8");
  const std::vector<RunForward> passes = c.runs();
  REQUIRE(passes.size() == 2);
  CHECK(passes[1].q.bytes == 4 * 128 * 2);  // the second K/V head's queries
  CHECK(passes[1].sinks.bytes == 4 * 4);
  CHECK(passes[1].keys.at(0).k.from == Place::caller);
  CHECK(passes[1].keys.at(0).k.bytes == 128 * 2);
  CHECK(passes[1].keys.at(0).v.bytes == 128 * 2);
  CHECK(c.slots(1).visits.first_head == 1);
  CHECK(c.attends().heads_q == 4);
  CHECK(c.attends().batch == 6);
}

TEST_CASE("gather: without lists sequences are copied once for all their queries") {
  Setup s(4, 2, 16);
  s.segment.list_size = 0;
  CHECK(on_hopper(s).name() == "mla_sm90_bf16_d576_r64");  // which needs no copy
  s.segment.k_type = ATTN_MLA_656;
  CHECK(on_hopper(s).name() == "mla_sm90_bf16_d576_r64_656");  // nor this
  s.segment.k_type = ATTN_F8_E4M3FN;
  CHECK(on_hopper(s).name() == "mla_sm90_bf16_d576_r64_e4m3");
  s.problem.softcap = 1;  // which neither of these takes
  const Chosen c = on_hopper(s);
  REQUIRE(c.name() == "lists_cuda");
  CHECK(c.attends().batch == 4);
  CHECK(c.attends().seqlen_q == 2);
  CHECK(c.attends().flags == ATTN_CAUSAL);
  CHECK(c.attends().segment[0].seqlen == 65536);
}

TEST_CASE("gather: a window bounds the keys of a segment without a list") {
  Setup s(8, 1, 64);
  s.segment.list_size = 0;
  s.segment.no_positions = 0;
  s.problem.flags |= ATTN_WINDOW;
  s.problem.window_left = 127;
  s.problem.window_right = 0;
  attn_segment both[] = {s.segment, s.segment};
  both[0].list_size = 512;
  both[0].no_positions = 1;
  s.problem.num_segments = 2;
  s.problem.segments = both;
  Problem p;
  REQUIRE(make_problem(&s.problem, &p).ok());
  CHECK(gather_shape(p).rows == 512 + 128);
  // Not to the right: a query of ATTN_CAUSAL_TOP_LEFT sees more keys the fewer the sequence has.
  s.problem.flags = ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW;
  s.problem.window_right = -1;
  REQUIRE(make_problem(&s.problem, &p).ok());
  CHECK(gather_shape(p).rows == 512 + 65536);
}

TEST_CASE("gather: what is declined") {
  Setup s(1, 1, 16);
  s.segment.k_type = ATTN_MLA_656;
  s.problem.q_type = ATTN_F16;
  CHECK(has(on_hopper(s, "lists_cuda").name(), "has scales with q of f16"));
  s = Setup(2, 2, 16);
  s.problem.q_stride = {4 * 16 * 576, 16 * 576, 576};
  CHECK(has(on_hopper(s, "lists_cuda").name(), "q_stride.batch is 36864"));
  s = Setup(1, 1, 16);
  s.segment.list_size = 4 << 20;
  CHECK(on_hopper(s).name() == "lists_cuda");  // tables of them are small
  s.segment.k_type = ATTN_F8_E4M3FN;
  s.problem.q_type = ATTN_F16;
  CHECK(has(on_hopper(s, "lists_cuda").name(), "the keys of a query take a workspace of"));
  s = Setup(2, 1, 16);
  s.segment.layout = ATTN_PADDED;
  s.segment.page_size = s.segment.max_pages = s.segment.num_pages = 0;
  s.segment.seqlen = 4096;
  s.segment.shared = 1;
  CHECK(has(on_hopper(s, "lists_cuda").name(), "segments[0].shared is 1"));
  s = Setup(1, 1, 16);
  s.problem.head_dim = 640, s.problem.head_dim_v = 512;
  CHECK(has(on_hopper(s, "lists_cuda").name(), "attention to the copied keys: "));
}

TEST_CASE("gather: attn_explain names the parts") {
  if (!image_for("gather_cuda", "sm_90")) ATTN_SKIP("this build has no CUDA kernels");
  Setup s(64, 1, 64);
  s.problem.segments = &s.segment;
  auto device = make<attn_device>();
  device.arch = "sm_90";
  device.multiprocessors = 132;
  device.shared_bytes_max = 227 << 10;
  std::vector<char> text(1 << 20);
  size_t size;
  REQUIRE(attn_explain_device(&device, &s.problem, text.data(), text.size(), &size) == ATTN_OK);
  CHECK(has(text.data(),
            R"("parts":[{"kernel":"list_slots_cuda","computes":"places of keys"},)"
            R"({"kernel":"mla_sm90_bf16_d576_r64_pages","computes":"attention to the keys where )"
            R"(they are"})"));
  s.segment.k_type = ATTN_F8_E4M3FN;
  s.problem.q_type = ATTN_F16;
  REQUIRE(attn_explain_device(&device, &s.problem, text.data(), text.size(), &size) == ATTN_OK);
  CHECK(has(text.data(), R"("parts":[{"kernel":"gather_cuda","computes":"copies of keys"},)"
                         R"({"kernel":"mla_sm90_f16_d576_r64",)"));
}
