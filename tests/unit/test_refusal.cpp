// What is said where no kernel runs a problem.
#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "catch.h"
#include "core/dtype.h"
#include "hopper.h"
#include "mock/mock_library.h"
#include "plan/choose.h"
#include "types.h"

using namespace attn;

namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

constexpr size_t longest_sentence = 700;

DeviceInfo of_arch(const char* arch) {
  DeviceInfo device = test::hopper();
  device.arch = arch;
  device.tensor_maps = arch == std::string("sm_90");
  return device;
}

// Code as a build with all toolkits has it, told by names: no image need be here.
struct Everything : CodeFile {
  bool hopper;
  explicit Everything(bool hopper) : hopper(hopper) {}
  std::string without(const char* image) const override {
    const bool newer = std::strstr(image, "sm90") || std::strstr(image, "sm89");
    return newer && !hopper ? "not for this device" : "";
  }
};

struct Types {
  attn_dtype q, k, v;
};
struct Answer {
  std::string kernel, reason;
};
struct Shape {
  int64_t queries = 1, head_dim = 128;
  attn_dtype out = ATTN_DTYPE_NONE;
  float softcap = 0;
};

Status made(const Types& t, const Shape& shape, Problem* p) {
  auto segment = attn::make<attn_segment>();
  segment.k_type = t.k, segment.v_type = t.v;
  segment.seqlen = 1024;
  auto in = attn::make<attn_problem>();
  in.batch = 2, in.heads_q = 32, in.heads_kv = 8;
  in.head_dim = shape.head_dim, in.seqlen_q = shape.queries;
  in.q_type = t.q, in.out_type = shape.out, in.softcap = shape.softcap;
  in.num_segments = 1, in.segments = &segment;
  return make_problem(&in, p);
}

Answer answer(const char* arch, const Types& t, const Shape& shape = {}) {
  const DeviceInfo device = of_arch(arch);
  const Everything code(arch == std::string("sm_90"));
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &code};
  Problem p;
  REQUIRE(made(t, shape, &p).ok());
  Choice choice;
  const Status status = choose(p, machine, &choice);
  return status.ok() ? Answer{choice.kernel->name, ""} : Answer{"", status.text};
}

// "k: f16; accepted: bf16, q8_0; or q: ..." as the arguments and what each is said to accept.
std::map<std::string, std::vector<attn_dtype>> accepted_of(const std::string& sentence) {
  std::map<std::string, std::vector<attn_dtype>> found;
  constexpr const char* word = "; accepted: ";
  for (size_t at = 0; (at = sentence.find(word, at)) != std::string::npos; ++at) {
    size_t begin = sentence.rfind("; ", at - 1) + 2;
    if (sentence.compare(begin, 3, "or ") == 0) begin += 3;
    const std::string argument = sentence.substr(begin, sentence.find(':', begin) - begin);
    const size_t types = at + std::strlen(word);
    std::istringstream list(sentence.substr(types, sentence.find(';', types) - types));
    for (std::string name; std::getline(list, name, ',');) {
      name.erase(0, name.find_first_not_of(' '));
      const attn_dtype type = dtype_from_name(name);
      INFO(sentence << ": " << name);
      REQUIRE(type != ATTN_DTYPE_NONE);
      found[argument].push_back(type);
    }
  }
  return found;
}

bool is(attn_dtype type, std::initializer_list<attn_dtype> among) {
  return std::find(among.begin(), among.end(), type) != among.end();
}

// As docs/support.md has it.
bool documented(const std::string& arch, const Types& t) {
  const auto converted = [](attn_dtype type) {
    return is(type, {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_Q8_0, ATTN_Q4_0, ATTN_Q4_1, ATTN_Q5_0,
                     ATTN_Q5_1, ATTN_IQ4_NL, ATTN_I8, ATTN_I4});
  };
  const bool half = is(t.q, {ATTN_F16, ATTN_BF16});
  if (arch == "sm_80") return half && t.k == t.q && t.v == t.q;
  if (t.q == ATTN_F8_E4M3FN) return t.k == t.v && is(t.k, {ATTN_F8_E4M3FN, ATTN_F8_E5M2});
  return half && (t.k == t.q || converted(t.k)) && (t.v == t.q || converted(t.v));
}

}  // namespace

TEST_CASE("refusal: types of q, k and v, each combination on sm_80 and sm_90", "[plan]") {
  int declined = 0;
  for (const char* arch : {"sm_80", "sm_90"})
    for (const int64_t queries : {1, 1000})
      for (const attn_dtype q : test::list_of(q_types))
        for (const attn_dtype k : test::list_of(kv_types & ~cache_types))
          for (const attn_dtype v : test::list_of(kv_types & ~cache_types)) {
            const Types types = {q, k, v};
            const Shape shape = {.queries = queries};
            const Answer got = answer(arch, types, shape);
            INFO(arch << ", " << queries << " queries, q " << dtype_name(q) << ", k "
                      << dtype_name(k) << ", v " << dtype_name(v) << ": " << got.kernel
                      << got.reason);
            CHECK(got.kernel.empty() != documented(arch, types));
            if (!got.kernel.empty()) continue;
            ++declined;
            CHECK(got.reason.size() < longest_sentence);
            CHECK(has(got.reason, arch));
            CHECK(has(got.reason, join("q of ", dtype_name(q))));
            CHECK(has(got.reason, join("k of ", dtype_name(k))));
            CHECK(has(got.reason, join("v of ", dtype_name(v))));
            const auto accepted = accepted_of(got.reason);
            CHECK(!accepted.empty());
            for (const auto& [argument, names] : accepted) {
              INFO(argument);
              REQUIRE((argument == "q" || argument == "k" || argument == "v" ||
                       argument == "k and v" || argument == "q, k and v"));
              for (const attn_dtype type : names) {
                Types other = types;
                if (has(argument, "q")) other.q = type;
                if (has(argument, "k")) other.k = type;
                if (has(argument, "v")) other.v = type;
                // What is not set is as it was: out is q's type, bf16 for fp8.
                Shape as_it_was = shape;
                as_it_was.out = is(q, {ATTN_F32, ATTN_F16, ATTN_BF16}) ? q : ATTN_BF16;
                INFO(dtype_name(type));
                CHECK(!answer(arch, other, as_it_was).kernel.empty());
              }
            }
            // None is left out: each type of k that would do is named, where k alone may change.
            const auto k_named = accepted.find("k");
            for (const attn_dtype type : test::list_of(kv_types & ~cache_types)) {
              const bool would_do = documented(arch, {q, type, v});
              const bool named = k_named != accepted.end() &&
                                 std::find(k_named->second.begin(), k_named->second.end(), type) !=
                                     k_named->second.end();
              INFO(dtype_name(type));
              CHECK(would_do == named);
            }
          }
  CHECK(declined > 1000);
}

TEST_CASE("refusal: K of 16 bits that is not q's type beside quantised V", "[plan]") {
  CHECK(answer("sm_90", {ATTN_BF16, ATTN_F16, ATTN_Q8_0}).reason ==
        "no kernel on sm_90 takes q of bf16 with k of f16, v of q8_0 and out of bf16; k: f16; "
        "accepted: bf16, f8_e4m3fn, f8_e5m2, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, i8, i4, "
        "f8_e4m3fn_token, nvfp4; or q: bf16; accepted: f16");
  CHECK(answer("sm_80", {ATTN_BF16, ATTN_Q8_0, ATTN_Q8_0}).reason ==
        "no kernel on sm_80 takes q of bf16 with k of q8_0, v of q8_0 and out of bf16; k and v: "
        "q8_0; accepted: bf16, f8_e4m3fn_token");
}

TEST_CASE("refusal: sizes and features, in a sentence of bounded length", "[plan]") {
  const Types bf16 = {ATTN_BF16, ATTN_BF16, ATTN_BF16};
  CHECK(answer("sm_90", bf16, {.head_dim = 640}).reason ==
        "head_dim is 640 and head_dim_v 640; accepted with these types: multiples of 8 up to 512");
  CHECK(answer("sm_90", bf16, {.out = ATTN_F8_E4M3FN}).reason ==
        "no kernel on sm_90 takes q of bf16 with k of bf16, v of bf16 and out of f8_e4m3fn; out: "
        "f8_e4m3fn; accepted: f32, f16, bf16");
  // Types of kernels that take others, with what else stands in the way.
  const std::string both =
      answer("sm_80", {ATTN_F32, ATTN_F32, ATTN_F32}, {.head_dim = 640}).reason;
  INFO(both);
  CHECK(both.size() < longest_sentence);
  CHECK(has(both, "q type f32"));
}

TEST_CASE("refusal: a device that no kernel has code for, in every operation", "[plan]") {
  struct Vendor {
    attn_backend backend;
    const char *library, *arch, *made_for, *tool;
  };
  for (const Vendor& v : {Vendor{ATTN_BACKEND_HIP, "hip", "gfx1103", "gfx942", "LLVM"},
                          Vendor{ATTN_BACKEND_CUDA, "cuda", "sm_75", "sm_80", "CUDA toolkit"}}) {
    mock::MockLibrary library(v.library);
    mock::set_text(library->gcn_arch, "gfx1103");
    library->compute_capability[0] = 75;
    auto options = attn::make<attn_context_options>();
    options.driver_path = library.path();
    const attn::context context(v.backend, &options);
    const bool built = std::any_of(images().begin(), images().end(), [&](const Image& i) {
      return (v.backend == ATTN_BACKEND_HIP) == (i.arch[0] == 'g');
    });
    const auto check = [&](const char* op, attn_status status) {
      const std::string text = attn_last_error();
      INFO(op << ": " << text);
      CHECK(status == ATTN_UNSUPPORTED);
      CHECK(has(text, op));
      CHECK(has(text, attn_backend_string(v.backend)));
      if (built) CHECK(has(text, join("has code for ", v.arch, "; accepted: ", v.made_for)));
      if (!built) CHECK(has(text, v.tool));
      CHECK(text.size() < 200);
    };
    attn_plan* plan = nullptr;
    auto segment = attn::make<attn_segment>();
    segment.k_type = segment.v_type = ATTN_BF16;
    segment.seqlen = 64;
    auto forward = attn::make<attn_problem>();
    forward.batch = forward.heads_q = forward.heads_kv = 1;
    forward.head_dim = forward.seqlen_q = 64;
    forward.q_type = ATTN_BF16;
    forward.num_segments = 1, forward.segments = &segment;
    check("forward", attn_plan_create(context.get(), &forward, &plan));
    auto merge = attn::make<attn_merge_problem>();
    merge.batch = merge.heads_q = merge.seqlen_q = 1, merge.head_dim_v = 8, merge.num_parts = 2;
    merge.part_type = ATTN_F32;
    check("merge", attn_plan_create_merge(context.get(), &merge, &plan));
    auto append = attn::make<attn_kv_append_problem>();
    append.batch = append.heads_kv = 1, append.head_dim = 64;
    append.seqlen_new = 1;
    append.new_type = ATTN_BF16;
    append.segment = segment;
    append.segment.has_seqlens = 1;
    check("kv_append", attn_plan_create_kv_append(context.get(), &append, &plan));

    // The explanation has the same sentence, and each kernel's own beside it.
    size_t size = 0;
    std::string text(1 << 17, 0);
    REQUIRE(attn_explain(context.get(), &forward, text.data(), text.size(), &size) == ATTN_OK);
    text.resize(size - 1);
    CHECK(has(text, "\"kernel\":null"));
    CHECK(has(text, built ? join("has code for ", v.arch) : v.tool));
    // A file that has no kernel: the first one's error alone.
    mock::set_text(library->failing,
                   v.backend == ATTN_BACKEND_HIP ? "hipModuleGetFunction" : "cuModuleGetFunction");
    library->code = 500;
    options.kernel_file = "some.hsaco";
    const attn::context from_file(v.backend, &options);
    CHECK(attn_plan_create(from_file.get(), &forward, &plan) == ATTN_UNSUPPORTED);
    const std::string of_file = attn_last_error();
    INFO(of_file);
    CHECK(has(of_file, "some.hsaco"));
    CHECK(has(of_file, "more)"));
    CHECK(of_file.size() < longest_sentence);
    library.recover();
  }
}

TEST_CASE("refusal: names like the one that is none", "[plan]") {
  mock::MockLibrary library("cuda");
  auto options = attn::make<attn_context_options>();
  options.driver_path = library.path();
  const attn::context context(ATTN_BACKEND_CUDA, &options);
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_BF16;
  segment.seqlen = 64;
  auto p = attn::make<attn_problem>();
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim = p.seqlen_q = 64;
  p.q_type = ATTN_BF16;
  p.num_segments = 1, p.segments = &segment;
  p.kernel = "fwd_sm90_bf16_d12";
  attn_plan* plan = nullptr;
  CHECK(attn_plan_create(context.get(), &p, &plan) == ATTN_INVALID_ARGUMENT);
  const std::string text = attn_last_error();
  INFO(text);
  CHECK(has(text, "accepted on cuda: fwd_sm90_bf16_d128"));
  CHECK(has(text, "attn_info"));
  CHECK(text.size() < 400);
}
