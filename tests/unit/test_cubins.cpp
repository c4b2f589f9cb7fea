// What the compiler made of each CUDA kernel, held against the steps that launch it: threads of a
// block, bytes of parameters, static shared memory. The same when a module is loaded.
#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "backends.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/forward_sm90/forward_args.h"
#include "kernels/forward_sm90/tiles.h"
#include "kernels/gather.h"
#include "kernels/shards.h"
#include "masks/device_mask.h"
#include "mock_library.h"
#include "problem/backward.h"
#include "problem/operations.h"
#include "runtime/context.h"

using namespace attn;

namespace {

// Of all tests of this program.
[[maybe_unused]] const bool checked = checks_code = true;

template <class T>
T at(const std::string& file, size_t offset) {
  T value;
  REQUIRE(offset + sizeof value <= file.size());
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

// Sections of an ELF file of 64 bits by name: offset and size.
std::map<std::string, std::pair<size_t, size_t>> sections(const std::string& file) {
  std::map<std::string, std::pair<size_t, size_t>> found;
  const size_t table = at<uint64_t>(file, 40), entry = at<uint16_t>(file, 58);
  const int count = at<uint16_t>(file, 60), names = at<uint16_t>(file, 62);
  const size_t text = at<uint64_t>(file, table + names * entry + 24);
  for (int i = 0; i < count; ++i) {
    const size_t header = table + i * entry;
    const char* name = file.c_str() + text + at<uint32_t>(file, header);
    found[name] = {at<uint64_t>(file, header + 24), at<uint64_t>(file, header + 32)};
  }
  return found;
}

// .nv.info.KERNEL is a list of attributes: a byte of format, one of kind, then a value of 16 bits
// or (format 4) as many bytes as it says.
FunctionInfo read_cubin(const std::string& file, const std::string& kernel,
                        int reserved_shared_bytes) {
  constexpr int max_threads = 0x05, required_threads = 0x10, parameter = 0x17;
  constexpr int parameter_size_at = 12, parameter_size_bit = 18;
  const auto all = sections(file);
  FunctionInfo compiled{.threads = 0, .static_shared_bytes = 0, .parameter_bytes = 0};
  if (const auto shared = all.find(".nv.shared." + kernel); shared != all.end())
    compiled.static_shared_bytes = int(shared->second.second) - reserved_shared_bytes;
  const auto info = all.find(".nv.info." + kernel);
  REQUIRE(info != all.end());
  const auto [begin, size] = info->second;
  for (size_t i = begin; i < begin + size;) {
    const int format = at<uint8_t>(file, i), kind = at<uint8_t>(file, i + 1);
    const int value = at<uint16_t>(file, i + 2);
    if (kind == parameter)
      compiled.parameter_bytes +=
          int(at<uint32_t>(file, i + parameter_size_at) >> parameter_size_bit);
    if (kind == max_threads || kind == required_threads)
      compiled.threads = at<int32_t>(file, i + 4);
    i += 4 + (format == 4 ? value : 0);
  }
  return compiled;
}

// Each cubin of a kernel that the build has, with the bytes that are reserved of its static shared
// memory; how many there are.
template <class Check>
int each_file(const std::string& kernel, Check check) {
  int count = 0;
  for (const char* arch : {"sm_80", "sm_89", "sm_90", "sm_90a"}) {
    std::ifstream in(std::string(ATTN_CUBIN_DIR "/") + kernel + "." + arch + ".cubin",
                     std::ios::binary);
    if (!in) continue;
    ++count;
    INFO(kernel << " for " << arch);
    const std::string file(std::istreambuf_iterator<char>(in), {});
    check(file, std::string(arch).starts_with("sm_9") ? 1024 : 0);
  }
  return count;
}
template <class Check>
int each_cubin(const std::string& kernel, Check check) {
  return each_file(kernel, [&](const std::string& file, int reserved_shared_bytes) {
    check(read_cubin(file, kernel, reserved_shared_bytes));
  });
}

// The steps of a problem that the kernel takes, whatever else it can.
template <class Problem>
std::vector<Step> steps_of(const Kernel& kernel, const Problem& problem) {
  Recipe recipe;
  const Status made = kernel.recipe(problem, test::hopper(), &recipe);
  INFO(kernel.name << ": " << made.text);
  REQUIRE(made.ok());
  return recipe.steps;
}
template <class Problem, class In>
std::vector<Step> steps_of(const Kernel& kernel, Status (*make)(const In*, Problem*),
                           const In& in) {
  Problem problem;
  const Status made = make(&in, &problem);
  INFO(kernel.name << ": " << made.text);
  REQUIRE(made.ok());
  return steps_of(kernel, problem);
}

// A problem that the kernel takes. Its segments point to `segment`.
attn_problem problem_for(const Kernel& kernel, attn_segment* segment) {
  const Limits& can = kernel.limits;
  attn_segment& s = *segment;
  s = make<attn_segment>();
  auto p = make<attn_problem>();
  p.q_type = attn_dtype(std::countr_zero(can.in_types));
  // Not q's type, where the kernel is there for others.
  s.k_type = s.v_type = attn_dtype(std::bit_width(can.kv_types) - 1);
  s.seqlen = 256;
  s.v_in_k = (can.demanded_features & feature_v_in_k) != 0;
  p.batch = 1;
  p.heads_q = can.group.multiple;
  p.heads_kv = 1;
  p.head_dim = can.head_dim.max;
  p.head_dim_v = can.head_dim_v.max;
  p.seqlen_q = 1;
  p.flags = can.demands;
  if (p.flags & ATTN_BLOCK_MASK) p.block_q = p.block_k = 64;
  p.num_segments = 1;
  p.segments = segment;
  return p;
}

std::vector<Step> forward_steps(const Kernel& kernel) {
  attn_segment segment;
  return steps_of(kernel, make_problem, problem_for(kernel, &segment));
}

std::vector<Step> backward_steps(const Kernel& kernel) {
  attn_segment segment;
  attn_problem forward = problem_for(kernel, &segment);
  forward.flags |= ATTN_SINKS;
  auto p = make<attn_backward_problem>();
  p.forward = &forward;
  p.gradients = ATTN_GRAD_Q | ATTN_GRAD_K | ATTN_GRAD_V | ATTN_GRAD_SINKS;
  return steps_of(kernel, make_backward_problem, p);
}

attn_segment cache() {
  auto s = make<attn_segment>();
  s.k_type = s.v_type = ATTN_BF16;
  s.layout = ATTN_PAGED;
  s.has_seqlens = 1;
  s.page_size = 64;
  s.max_pages = s.num_pages = 4;
  return s;
}

std::vector<Step> steps_of(const Kernel& kernel) {
  switch (kernel.op) {
    case Op::forward:
      return forward_steps(kernel);
    case Op::backward:
      return backward_steps(kernel);
    case Op::merge: {
      auto p = make<attn_merge_problem>();
      p.batch = p.heads_q = p.seqlen_q = p.num_parts = 1;
      p.head_dim_v = 64;
      p.part_type = ATTN_F32;
      return steps_of(kernel, make_merge_problem, p);
    }
    case Op::quantize: {
      auto p = make<attn_quantize_problem>();
      p.batch = p.seqlen = p.heads = 1;
      p.head_dim = 64;
      p.src_type = ATTN_F32;
      p.dst_type = ATTN_F8_E4M3FN;
      return steps_of(kernel, make_quantize_problem, p);
    }
    case Op::kv_append: {
      auto p = make<attn_kv_append_problem>();
      p.batch = p.heads_kv = 1;
      p.seqlen_new = 2;
      p.head_dim = 64;
      p.new_type = ATTN_BF16;
      p.segment = cache();
      p.advance_seqlens = 1;
      return steps_of(kernel, make_kv_append_problem, p);
    }
    case Op::kv_roll: {
      const attn_segment recent = cache(), old = cache();
      auto p = make<attn_kv_roll_problem>();
      p.batch = p.heads_kv = 1;
      p.head_dim = 64;
      p.recent = &recent;
      p.old = &old;
      return steps_of(kernel, make_kv_roll_problem, p);
    }
    case Op::block_mask: {
      MaskShape shape;
      shape.batch = shape.heads = 1;
      shape.seqlen_q = shape.seqlen_kv = shape.block_q = shape.block_k = 64;
      return steps_of(kernel, MaskProblem(shape));
    }
  }
  return {};
}

bool built() {
  return bool(std::ifstream(ATTN_CUBIN_DIR "/merge_cuda.sm_80.cubin"));
}

// A plan on a driver that says this of every function. Null: which cannot say.
Status planned(mock::Code (*compiled)(const char*)) {
  const mock::MockLibrary library("cuda_12");
  library->compiled = compiled;
  const context device = test::device_on(library);
  auto s = make<attn_segment>();
  s.k_type = s.v_type = ATTN_BF16;
  s.seqlen = 256;
  auto p = make<attn_problem>();
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim = 128;
  p.seqlen_q = 256;
  p.q_type = ATTN_BF16;
  p.num_segments = 1;
  p.segments = &s;
  p.kernel = "fwd_sm90_bf16_d128";
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create(device.get(), &p, &plan);
  attn_plan_destroy(plan);
  return status == ATTN_OK ? Status{} : Status{status, attn_last_error()};
}

constexpr int planned_threads = sm90::tile_d128.threads();
constexpr size_t planned_parameters = sizeof(attn_sm90_forward_kernarg);

void check_planted(mock::Code (*compiled)(const char*), const std::string& sentence) {
  const Status status = planned(compiled);
  CHECK(status.code == ATTN_INTERNAL);
  CHECK(status.text == "fwd_sm90_bf16_d128: its code has " + sentence);
}

}  // namespace

TEST_CASE("cubins: steps launch what was compiled", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  DeviceInfo exact;  // read_cubin leaves out what the device reserves
  exact.arch = "sm_80";
  for (const Kernel& kernel : catalog()) {
    if (kernel.backend != ATTN_BACKEND_CUDA) continue;
    bool own = false;
    for (const Step& step : steps_of(kernel)) {
      own |= std::strcmp(step.image, image_of(kernel)) == 0;
      const int count = each_cubin(step.image, [&](const FunctionInfo& compiled) {
        CHECK(compiled.threads > 0);
        CHECK(compiled.parameter_bytes > 0);
        CHECK(check_code(step, compiled, exact).text == "");
      });
      INFO(step.image);
      CHECK(count > 0);
    }
    INFO(kernel.name);
    CHECK(own);
  }
}

// Each launches what was compiled for it.
void check_steps(const std::vector<Step>& steps, const DeviceInfo& device) {
  for (const Step& step : steps) {
    INFO(step.image);
    CHECK(each_cubin(step.image, [&](const FunctionInfo& compiled) {
            CHECK(check_code(step, compiled, device).text == "");
          }) > 0);
  }
}

TEST_CASE("cubins: the steps of lists_cuda launch what was compiled", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  DeviceInfo exact;
  exact.arch = "sm_80";
  auto s = make<attn_segment>();
  s.k_type = s.v_type = ATTN_BF16;
  s.seqlen = 256;
  s.list_size = 64;
  auto p = make<attn_problem>();
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim = 128;
  p.seqlen_q = 2;
  p.q_type = ATTN_BF16;
  p.num_segments = 1;
  p.segments = &s;
  Problem problem;
  REQUIRE(make_problem(&p, &problem).ok());
  const GatherShape shape = gather_shape(problem);
  SlotsShape slots;
  REQUIRE(make_slots(problem, &slots));
  check_steps(
      {gather_step(problem, shape, {}, 0, 2, 0), slots_step(problem, exact, slots, {{}}, 0, 2, 0),
       gather_lse_step(problem, shape, 0)},
      exact);
}

TEST_CASE("cubins: the steps of shards_cuda launch what was compiled", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  DeviceInfo exact;
  exact.arch = "sm_80";
  auto s = make<attn_segment>();
  s.k_type = s.v_type = ATTN_BF16;
  s.seqlen = 256;
  s.has_ready = 1;
  auto p = make<attn_problem>();
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim = 128;
  p.seqlen_q = 2;
  p.q_type = ATTN_BF16;
  p.out_type = ATTN_F32;
  p.flags = ATTN_ACCUMULATE;
  p.num_segments = 1;
  p.segments = &s;
  Problem problem;
  REQUIRE(make_problem(&p, &problem).ok());
  check_steps({wait_steps(problem, 0, 1).at(0), accumulate_step(problem, exact, 0, 0)}, exact);
}

// What the largest kernels have: decode_sm89_fp8_d256, which has all of its code for each type of
// fp8, the forward kernels with a bias, and backward kernels of head_dim 256, which have a loop for
// each gradient, of which a block runs one, and kv_append_cuda and kv_roll_cuda, which have a loop
// for each pair of types with rotation, without, and over fp8 with descales, of which a launch runs
// one. More is fetched again and again, and nobody notices.
TEST_CASE("cubins: instructions stay below a limit", "[catalog]") {
  if (!built()) ATTN_SKIP("this build has no CUDA kernels");
  for (const Kernel& kernel : catalog()) {
    if (kernel.backend != ATTN_BACKEND_CUDA) continue;
    const std::string image = image_of(kernel);
    const size_t most = (image.starts_with("decode_")     ? 472
                         : image.starts_with("kv_")       ? 552
                         : image.starts_with("bwd_sm80_") ? 320
                                                          : 224) *
                        1024;
    const int count = each_file(image, [&](const std::string& file, int) {
      const auto all = sections(file);
      const auto code = all.find(".text." + image);
      REQUIRE(code != all.end());
      CHECK(code->second.second > 0);
      CHECK(code->second.second <= most);
    });
    INFO(image);
    CHECK(count > 0);
  }
}

TEST_CASE("cubins: code that differs from the plan is refused when it is loaded", "[plan]") {
  CHECK(planned(nullptr).text == "");
  using Code = mock::Code;
  CHECK(planned([](const char*) -> Code {
          return {planned_threads, 0, planned_parameters};
        }).text == "");
  // What the device reserves of each block may be in it.
  CHECK(planned([](const char*) -> Code {
          return {planned_threads, 1024, planned_parameters};
        }).text == "");
  for (const auto compiled :
       {+[](const char*) -> Code { return {planned_threads - 128, 0, planned_parameters}; },
        +[](const char*) -> Code { return {planned_threads + 128, 0, planned_parameters}; }})
    check_planted(compiled,
                  join(compiled("").threads, " threads of a block, the plan ", planned_threads));
  check_planted([](const char*) -> Code { return {planned_threads, 1025, planned_parameters}; },
                "1025 bytes of static shared memory, the plan 0");
  check_planted(
      [](const char*) -> Code { return {planned_threads, 0, planned_parameters + 8}; },
      join(planned_parameters + 8, " bytes of parameters, the plan ", planned_parameters));
}

TEST_CASE("cubins: launches of fewer threads than the code takes are those that say so", "[plan]") {
  Step step;
  step.image = "kv_append_cuda";
  step.launch.block[0] = 128;
  const FunctionInfo code{.threads = 512};
  CHECK(check_code(step, code, test::hopper()).code == ATTN_INTERNAL);
  step.fewer_threads = true;
  CHECK(check_code(step, code, test::hopper()).ok());
  step.launch.block[0] = 544;
  CHECK(check_code(step, code, test::hopper()).text ==
        "kv_append_cuda: its code has 512 threads of a block, the plan 544");
}
