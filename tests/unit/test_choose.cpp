// Which kernel a plan gets, on devices that are described and need not be here.
#include <cstring>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "hopper.h"
#include "plan/choose.h"

using namespace attn;

namespace {

attn_device device(const char* arch, int multiprocessors, int64_t shared_bytes, int64_t l2_bytes) {
  auto d = attn::make<attn_device>();
  d.arch = arch;
  d.multiprocessors = multiprocessors;
  d.shared_bytes_max = shared_bytes;
  d.l2_bytes = l2_bytes;
  return d;
}
const attn_device h200 = device("sm_90", 132, 227 << 10, 60 << 20);
const attn_device h100_pcie = device("sm_90", 114, 227 << 10, 50 << 20);
const attn_device a100 = device("sm_80", 108, 163 << 10, 40 << 20);
const attn_device l4 = device("sm_89", 58, 99 << 10, 48 << 20);
const attn_device b200 = device("sm_100", 148, 227 << 10, 126 << 20);
const attn_device mi300x = device("gfx942", 304, 64 << 10, 0);

struct Shape {
  int64_t heads = 8, seqlen = 1024, dim = 64;
  uint32_t flags = 0;
  int32_t max_sms = 0;
  attn_dtype type = ATTN_BF16;
  float softcap = 0;
  int64_t seqlen_q = 0, heads_kv = 0;    // 0: seqlen, heads
  attn_dtype kv_type = ATTN_DTYPE_NONE;  // NONE: type
  attn_dtype v_type = ATTN_DTYPE_NONE;   // NONE: kv_type
  int32_t page_size = 0;                 // 0: padded
  int64_t tree_keys = 0;
};

std::string explained(const attn_device& on, const Shape& s) {
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = s.kv_type == ATTN_DTYPE_NONE ? s.type : s.kv_type;
  if (s.v_type != ATTN_DTYPE_NONE) segment.v_type = s.v_type;
  segment.seqlen = s.seqlen;
  if (s.page_size > 0) {
    segment.layout = ATTN_PAGED;
    segment.page_size = s.page_size;
    segment.max_pages = int32_t((s.seqlen + s.page_size - 1) / s.page_size);
    segment.num_pages = 2 * segment.max_pages;
  }
  auto p = attn::make<attn_problem>();
  p.batch = 1, p.heads_q = s.heads, p.heads_kv = s.heads_kv > 0 ? s.heads_kv : s.heads;
  p.head_dim = s.dim, p.seqlen_q = s.seqlen_q > 0 ? s.seqlen_q : s.seqlen;
  p.q_type = s.type;
  p.tree_keys = s.tree_keys;
  p.flags = s.flags, p.max_sms = s.max_sms, p.softcap = s.softcap;
  p.num_segments = 1, p.segments = &segment;
  size_t size = 0;
  std::string text(1 << 17, 0);
  const attn_status status = attn_explain_device(&on, &p, text.data(), text.size(), &size);
  if (status != ATTN_OK) return attn_last_error();
  text.resize(size - 1);
  return text;
}

// The value behind a key of the text's outermost object.
std::string value(const std::string& text, const std::string& key) {
  const size_t at = text.find("\"" + key + "\":");
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size() + 3;
  return text.substr(begin, text.find_first_of(",}", begin) - begin);
}
std::string chosen(const attn_device& on, const Shape& s) {
  return value(explained(on, s), "kernel");
}

// Why the kernel declines; "": it does not, or nobody asked it.
std::string reason(const attn_device& on, const Shape& s, const std::string& kernel) {
  const std::string text = explained(on, s);
  const std::string before = "{\"kernel\":\"" + kernel + "\",\"reason\":\"";
  const size_t at = text.find(before);
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size();
  return text.substr(begin, text.find('"', begin) - begin);
}

bool in_build(const char* kernel, const char* arch) {
  const Image* image;
  return find_image(kernel, arch, &image).ok();
}

// Of reasons that are asked for, as attn_explain does, and of none.
void check_same_choice(const Problem& p) {
  struct All : CodeFile {
    std::string without(const char*) const override { return ""; }
  } const all;
  const DeviceInfo device = test::hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &all};
  Choice asked, silent;
  std::vector<Declined> declined;
  const Status first = choose(p, machine, &asked, &declined), second = choose(p, machine, &silent);
  CHECK(first.code == second.code);
  CHECK(first.text == second.text);
  CHECK(asked.kernel == silent.kernel);
  CHECK(asked.recipe.workspace == silent.recipe.workspace);
  for (const Declined& d : declined) CHECK(d.reason != "");
}

}  // namespace

TEST_CASE("choose: a kernel is the same where nobody asks for reasons", "[plan]") {
  int chosen = 0, refused = 0;
  for (const attn_dtype type : {ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F32})
    for (const attn_dtype kv_type : {type, ATTN_Q8_0, ATTN_IQ4_NL})
      for (const int64_t dim : {64, 72, 128, 320})
        for (const int64_t queries : {1, 4096})
          for (const uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_ALIBI)}) {
            auto s = attn::make<attn_segment>();
            s.k_type = s.v_type = kv_type;
            s.seqlen = 8192;
            auto in = attn::make<attn_problem>();
            in.batch = 1, in.heads_q = 8, in.heads_kv = 4;
            in.head_dim = dim, in.seqlen_q = queries;
            in.q_type = type;
            in.flags = flags;
            in.num_segments = 1, in.segments = &s;
            Problem p;
            if (!make_problem(&in, &p).ok()) continue;
            INFO(dtype_name(type) << ' ' << dtype_name(kv_type) << ' ' << dim << ' ' << queries
                                  << ' ' << flags);
            check_same_choice(p);
            (test::chosen(p).find(' ') == std::string::npos ? chosen : refused) += 1;
          }
  CHECK(chosen > 20);
  CHECK(refused > 20);
}

TEST_CASE("choose: short tiles where each multiprocessor of the device gets one at most",
          "[plan]") {
  if (!in_build("fwd_sm90_bf16_d64", "sm_90")) ATTN_SKIP("this build has no CUDA kernels");
  const std::string small = "\"fwd_sm90_bf16_d64_short\"", other = "\"fwd_sm90_bf16_d64\"";
  for (const attn_device& on : {h200, h100_pcie}) {
    const int64_t most = on.multiprocessors;
    INFO(most);
    CHECK(chosen(on, {.heads = most, .seqlen = 64}) == small);
    CHECK(chosen(on, {.heads = most + 1, .seqlen = 64}) == other);
    CHECK(chosen(on, {.heads = 50, .seqlen = 64, .max_sms = 50}) == small);
    CHECK(chosen(on, {.heads = 51, .seqlen = 64, .max_sms = 50}) == other);
    CHECK(chosen(on, {.heads = most, .seqlen = 64, .max_sms = 1000}) == small);
    // Who takes items as they come needs their number.
    CHECK(value(explained(on, {.heads = most, .seqlen = 192}), "workspace") == "0");
    CHECK(value(explained(on, {.heads = most + 1, .seqlen = 192}), "workspace") == "4");
  }
  CHECK(chosen(h100_pcie, {.heads = 120, .seqlen = 64}) == other);
  CHECK(chosen(h200, {.heads = 120, .seqlen = 64}) == small);
}

TEST_CASE("choose: a kernel that is passed over names the one that is preferred", "[plan]") {
  if (!in_build("fwd_sm90_bf16_d64", "sm_90")) ATTN_SKIP("this build has no CUDA kernels");
  CHECK(reason(h200, {.heads = 133, .seqlen = 64}, "fwd_sm90_bf16_d64_short") ==
        "for 133 tiles of 64 queries, more than 132; fwd_sm90_bf16_d64 is preferred");
  const Shape causal{.seqlen = 8192, .dim = 128, .flags = ATTN_CAUSAL};
  CHECK(chosen(h200, causal) == "\"fwd_sm90_bf16_d128_long\"");
  CHECK(reason(h200, causal, "fwd_sm90_bf16_d128_pair") ==
        "for causal masks; fwd_sm90_bf16_d128_long is preferred");
  CHECK(reason(h200, {.dim = 128}, "fwd_sm90_bf16_d128_long") ==
        "without a causal mask; fwd_sm90_bf16_d128 is preferred");
}

TEST_CASE("choose: former names of kernels are accepted", "[plan]") {
  CHECK(find_kernel("merge_sm80") == find_kernel("merge_cuda"));
  CHECK(find_kernel("kv_roll_sm80") == find_kernel("kv_roll_cuda"));
  CHECK(find_kernel("merge_sm90") == nullptr);
}

TEST_CASE("choose: fp8 on Hopper says what it declines", "[plan]") {
  if (!in_build("fwd_sm90_fp8_d128", "sm_90")) ATTN_SKIP("this build has no CUDA kernels");
  const std::string e4m3 = "fwd_sm90_fp8_d128", e5m2 = "fwd_sm90_fp8_d128_e5m2";
  const Shape plain{.dim = 128, .type = ATTN_F8_E4M3FN};
  CHECK(chosen(h200, plain) == "\"" + e4m3 + "\"");
  Shape s = plain;
  s.kv_type = ATTN_F8_E5M2;
  CHECK(chosen(h200, s) == "\"" + e5m2 + "\"");
  s.v_type = ATTN_F8_E4M3FN;  // unlike k
  CHECK(reason(h200, s, e5m2) == "v type f8_e4m3fn");
  CHECK(reason(h200, s, e4m3) == "k type f8_e5m2");
  s = plain;
  s.type = ATTN_F8_E4M3FNUZ;
  CHECK(reason(h200, s, e4m3) == "q type f8_e4m3fnuz");
  s.type = ATTN_F8_E5M2;
  CHECK(reason(h200, s, e5m2) == "q type f8_e5m2");
  s = plain;
  s.dim = 120;
  CHECK(reason(h200, s, e4m3) == "head_dim 120 is not a multiple of 16");
  s.dim = 256;
  CHECK(reason(h200, s, e4m3) == "head_dim 256 is above 128");
  s = plain;
  s.softcap = 30;
  CHECK(reason(h200, s, e4m3) == "softcap");
  for (const int64_t dim : {64, 128, 256}) {
    const std::string name = "\"fwd_sm90_fp8_d" + std::to_string(dim);
    s.dim = dim;
    s.softcap = 0;
    CHECK(chosen(h200, s) == name + (dim == 64 ? "_short\"" : "\""));  // few queries
    s.softcap = 30;
    CHECK(chosen(h200, s) == name + "_score\"");
  }
  s = plain;
  s.page_size = 64;
  CHECK(!reason(h200, s, e4m3).empty());
  s = plain;
  CHECK(reason(h200, s, e4m3 + "_precise") == "no fp8_precise");
  s.flags = ATTN_FP8_PRECISE;
  CHECK(reason(h200, s, e4m3) == "fp8_precise");
  CHECK(chosen(h200, s) == "\"" + e4m3 + "_precise\"");
}

TEST_CASE("choose: each architecture gets its kernels", "[plan]") {
  if (in_build("fwd_sm80_bf16_d64", "sm_80")) {
    for (const attn_device& on : {a100, l4})
      for (const int64_t dim : {64, 128, 256}) {
        const std::string name = "fwd_sm80_bf16_d" + std::to_string(dim);
        CHECK(chosen(on, {.dim = dim}) == "\"" + name + "\"");
        CHECK(chosen(on, {.dim = dim, .softcap = 3}) == "\"" + name + "_score\"");
      }
    for (const attn_device& on : {a100, l4, h100_pcie, h200})
      for (const int64_t dim : {64, 96, 256})
        for (const int32_t page_size : {1, 8, 16, 48, 64, 100, 256}) {
          const int64_t most = dim == 96 ? 128 : dim;
          // The copy engine's boxes each lie in one page.
          const bool boxes = on.arch == h200.arch && page_size % 16 == 0;
          const std::string name =
              std::string("\"fwd_") + (boxes ? "sm90" : "sm80") + "_bf16_d" + std::to_string(most);
          INFO(on.arch << " " << dim << " " << page_size);
          CHECK(chosen(on, {.dim = dim, .flags = ATTN_CAUSAL, .page_size = page_size}) ==
                name + "_paged\"");
          CHECK(chosen(on, {.dim = dim, .softcap = 3, .page_size = page_size}) ==
                name + "_score_paged\"");
        }
    CHECK(explained(h200, {.dim = 128, .page_size = 8})
              .find("\"page_size 8 is not a multiple of 16\"") != std::string::npos);
    CHECK(chosen(h200, {.dim = 128}) == "\"fwd_sm90_bf16_d128\"");
    CHECK(chosen(h200, {.seqlen = 8192, .dim = 128, .flags = ATTN_CAUSAL}) ==
          "\"fwd_sm90_bf16_d128_long\"");
    CHECK(chosen(h200, {.dim = 64, .type = ATTN_F8_E4M3FN}) == "\"fwd_sm90_fp8_d64_short\"");
    CHECK(chosen(h200, {.dim = 128, .type = ATTN_F8_E4M3FN}) == "\"fwd_sm90_fp8_d128\"");
    CHECK(chosen(h200, {.dim = 128, .type = ATTN_F8_E4M3FNUZ}) == "null");
    CHECK(chosen(a100, {.dim = 128, .type = ATTN_F8_E4M3FN}) == "null");
    // Shared memory decides too.
    const attn_device little = device("sm_90", 132, 40 << 10, 0);
    CHECK(explained(little, {.dim = 256}).find("bytes of shared memory") != std::string::npos);
  }
  if (in_build("fwd_gfx942_fp8_d64", "gfx942")) {
    CHECK(chosen(mi300x, {.type = ATTN_F8_E4M3FNUZ}) == "\"fwd_gfx942_fp8_d64\"");
    CHECK(chosen(mi300x, {.dim = 128, .type = ATTN_F8_E4M3FN}) == "\"fwd_gfx942_fp8_d128\"");
    CHECK(value(explained(mi300x, {.type = ATTN_F8_E4M3FNUZ}), "backend") == "\"hip\"");
  }
  if (images().empty()) ATTN_SKIP("this build has no device code");
}

TEST_CASE("choose: AMD's devices, with any number of compute units", "[plan]") {
  // A slot: 16 rows of 128 sums, four waves' statistics of 16 rows, and two counters of each wave.
  constexpr int64_t slot = 16 * 128 * 4 + 4 * 16 * 16 + 2 * 4 * 4;
  const Shape token = {.heads = 32, .seqlen = 1 << 17, .dim = 128, .seqlen_q = 1, .heads_kv = 8};
  int seen = 0;
  // Partitions of MI300X, MI300A, MI300X; MI355X.
  for (const attn_device& on :
       {device("gfx942", 38, 64 << 10, 0), device("gfx942", 80, 64 << 10, 0),
        device("gfx942", 228, 64 << 10, 0), mi300x, device("gfx950", 256, 160 << 10, 0)}) {
    const std::string decode = join("decode_", on.arch, "_bf16_d128");
    INFO(decode << ", " << on.multiprocessors);
    if (!in_build(decode.c_str(), on.arch)) continue;
    ++seen;
    CHECK(chosen(on, token) == join('"', decode, '"'));
    // Two workgroups of two slots on each unit, less what does not divide.
    const int64_t workspace = std::stoll(value(explained(on, token), "workspace"));
    CHECK(workspace % (4 * slot) == 0);
    CHECK(workspace <= 4 * slot * on.multiprocessors);
    CHECK(workspace > 2 * slot * on.multiprocessors);
    CHECK(chosen(on, {.dim = 128}) == join("\"fwd_", on.arch, "_bf16_d128\""));
    CHECK(chosen(on, {.dim = 64, .softcap = 30}) == join("\"fwd_", on.arch, "_bf16_d64_score\""));
    const bool fnuz = on.arch == std::string("gfx942");
    Shape s = token;
    s.kv_type = ATTN_F8_E4M3FN;
    CHECK(chosen(on, s) == join("\"decode_", on.arch, "_fp8_d128\""));
    s.kv_type = ATTN_F8_E4M3FNUZ;
    CHECK(chosen(on, s) == (fnuz ? "\"decode_gfx942_fp8_d128\"" : "null"));
    CHECK(chosen(on, {.type = ATTN_F8_E4M3FN}) == join("\"fwd_", on.arch, "_fp8_d64\""));
    CHECK(chosen(on, {.type = ATTN_F8_E4M3FNUZ}) == (fnuz ? "\"fwd_gfx942_fp8_d64\"" : "null"));
  }
  if (seen < 5) ATTN_SKIP("this build lacks kernels of gfx942 or gfx950");
}

TEST_CASE("choose: few queries go to the decode kernels", "[plan]") {
  if (!in_build("decode_sm90_bf16_d128_r8", "sm_90a")) ATTN_SKIP("this build has no CUDA kernels");
  const Shape token = {.heads = 32, .seqlen = 8192, .dim = 128, .seqlen_q = 1, .heads_kv = 8};
  CHECK(chosen(h200, token) == "\"decode_sm90_bf16_d128_r8\"");
  CHECK(chosen(a100, token) == "\"decode_sm80_bf16_d128\"");
  CHECK(chosen(l4, token) == "\"decode_sm80_bf16_d128\"");
  Shape s = token;
  s.kv_type = ATTN_F8_E4M3FN;
  CHECK(chosen(h200, s) == "\"decode_sm90_fp8_d128_r8\"");
  CHECK(chosen(l4, s) == "\"decode_sm89_fp8_d128\"");
  CHECK(chosen(a100, s) == "null");
  s.seqlen_q = 128;  // in tiles of 16 rows
  CHECK(chosen(l4, s) == "\"decode_sm89_fp8_d128\"");
  s = token;
  for (const int page_size : {1, 24, 48, 64}) {
    s.page_size = page_size;
    CHECK(chosen(h200, s) == "\"decode_sm90_bf16_d128_r8\"");
    CHECK(chosen(l4, s) == "\"decode_sm80_bf16_d128\"");
  }
  s = token;
  s.seqlen_q = 4;  // 16 rows
  CHECK(chosen(h200, s) == "\"decode_sm90_bf16_d128_r16\"");
  s.seqlen_q = 5;
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d128\"");
  s.seqlen = 1 << 17;  // K and V are more than L2 holds
  CHECK(chosen(h200, s) == "\"decode_sm90_bf16_d128_r32\"");
  s.heads_kv = s.heads;
  s.seqlen_q = 17;
  CHECK(chosen(h200, s).find("fwd_sm90_bf16_d128") != std::string::npos);
  s = token;
  s.kv_type = ATTN_F8_E4M3FN;
  s.seqlen_q = 32;  // 128 rows
  CHECK(chosen(h200, s) == "\"decode_sm90_fp8_d128_r64\"");
  s.seqlen_q = 33;
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d128_dequantised\"");
  s.page_size = 16;
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d128_dequantised\"");
  s.type = ATTN_F16;
  CHECK(chosen(h200, s) == "\"fwd_sm90_f16_d128_dequantised\"");
  s.seqlen_q = 16;  // 64 rows, of which tiles of 16 would read K and V four times
  CHECK(chosen(h200, s) == "\"decode_sm90_fp8_d128_r64\"");
  CHECK(reason(h200, s, "decode_sm89_fp8_d128")
            .starts_with("for 64 rows, seqlen_q * heads_q / heads_kv, more than 16"));
  s.page_size = 8;  // there is no other
  CHECK(chosen(h200, s) == "\"decode_sm89_fp8_d128\"");
  s.seqlen_q = 33;
  s.page_size = 16;
  s.seqlen = 1 << 23;  // K and V of 8 heads would be more than 4 GiB
  CHECK(chosen(h200, s) == "\"decode_sm90_fp8_d128_r64\"");
}

TEST_CASE("choose: heads of 512") {
  if (!in_build("fwd_sm90_bf16_d512", "sm_90a")) ATTN_SKIP("this build has no CUDA kernels");
  Shape s = {.heads = 32, .seqlen = 8192, .dim = 512, .seqlen_q = 8192, .heads_kv = 4};
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d512\"");
  CHECK(chosen(a100, s) == "\"fwd_sm80_bf16_d512\"");
  CHECK(chosen(l4, s) == "\"fwd_sm80_bf16_d512\"");  // which has 99 KB of shared memory
  s.page_size = 16;
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d512_paged\"");
  CHECK(chosen(l4, s) == "\"fwd_sm80_bf16_d512_paged\"");
  s.seqlen_q = 1;
  CHECK(chosen(h200, s) == "\"decode_sm90_bf16_d512_r8\"");
  CHECK(chosen(a100, s) == "\"decode_sm80_bf16_d512\"");
  CHECK(chosen(l4, s) == "\"fwd_sm80_bf16_d512_paged\"");  // which needs less shared memory
  s.kv_type = ATTN_F8_E4M3FN;
  CHECK(chosen(h200, s) == "\"decode_sm90_fp8_d512_r8\"");
  s.seqlen_q = 3;  // 24 rows
  CHECK(chosen(h200, s) == "\"fwd_sm90_bf16_d512_dequantised\"");
  s.dim = 520;
  CHECK(chosen(h200, s) == "null");
}

// The wgmma of sm_90a is sm_90's alone: other devices run the kernels of sm_80 and sm_89, after
// sm_90 from PTX.
TEST_CASE("choose: devices after sm_90 decode by PTX of sm_80 and sm_89", "[plan]") {
  if (!in_build("decode_sm90_bf16_d128_r8", "sm_90a")) ATTN_SKIP("this build has no CUDA kernels");
  const Image* image;
  REQUIRE(find_image("decode_sm89_fp8_d128", "sm_100", &image).ok());
  CHECK(image->arch == std::string("compute_89"));
  REQUIRE(find_image("decode_sm80_bf16_d128", "sm_100", &image).ok());
  CHECK(image->arch == std::string("compute_80"));
  const Shape token = {.heads = 32, .seqlen = 8192, .dim = 128, .seqlen_q = 1, .heads_kv = 8};
  const struct {
    attn_dtype kv_type;
    int64_t tree_keys, queries;
    const char* kernel;
  } rows[] = {{ATTN_BF16, 0, 1, "decode_sm80_bf16_d128"},
              {ATTN_BF16, 64, 64, "decode_sm80_bf16_d128"},
              {ATTN_F8_E4M3FN, 0, 1, "decode_sm89_fp8_d128"},
              {ATTN_F8_E4M3FN, 0, 64, "decode_sm89_fp8_d128"},
              {ATTN_F8_E5M2, 64, 64, "decode_sm89_fp8_d128"},
              {ATTN_Q8_0, 0, 1, "decode_sm90_blocks_d128"}};
  for (const auto& r : rows)
    for (const int page_size : {0, 1, 16, 64}) {
      if (r.kv_type == ATTN_Q8_0 && page_size == 1) continue;
      Shape s = token;
      s.kv_type = r.kv_type, s.tree_keys = r.tree_keys, s.seqlen_q = r.queries;
      s.page_size = page_size;
      if (r.tree_keys > 0) s.flags = ATTN_CAUSAL;
      INFO(dtype_name(r.kv_type) << ", " << r.queries << " queries, pages of " << page_size);
      CHECK(chosen(b200, s) == join("\"", r.kernel, "\""));
      CHECK(reason(b200, s, "decode_sm90_bf16_d128_r64").find("sm_100") != std::string::npos);
    }
  Shape prompt = token;
  prompt.seqlen_q = 64;
  CHECK(chosen(b200, prompt) == "\"fwd_sm80_bf16_d128\"");
}

// Boxes of fewer than 32 keys, of fp8 64, each of which is in one page, are too many for the one
// lane that asks for them.
TEST_CASE("choose: decode loads small pages row by row, by two warps", "[plan]") {
  struct Row {
    const char* kernel;
    attn_dtype kv_type;
    int32_t page_size;  // 0: padded
    uint32_t threads;
  };
  for (const Row& r : {Row{"decode_sm90_bf16_d128_r8", ATTN_BF16, 0, 160},
                       Row{"decode_sm90_bf16_d128_r8", ATTN_BF16, 32, 160},
                       Row{"decode_sm90_bf16_d128_r8", ATTN_BF16, 48, 192},
                       Row{"decode_sm90_bf16_d128_r16", ATTN_BF16, 16, 192},
                       Row{"decode_sm90_bf16_d128_r16", ATTN_BF16, 1, 192},
                       Row{"decode_sm90_bf16_d256_r8", ATTN_BF16, 32, 160},
                       Row{"decode_sm90_fp8_d128_r8", ATTN_F8_E4M3FN, 64, 160},
                       Row{"decode_sm90_fp8_d128_r8", ATTN_F8_E4M3FN, 32, 192},
                       Row{"decode_sm90_fp8_d128_r8", ATTN_F8_E4M3FN, 16, 192},
                       Row{"decode_sm90_fp8_d128_r8", ATTN_F8_E4M3FN, 24, 192},
                       Row{"decode_sm90_bf16_d128_r32", ATTN_BF16, 16, 160}}) {
    INFO(r.kernel << ", pages of " << r.page_size);
    auto segment = attn::make<attn_segment>();
    segment.k_type = segment.v_type = r.kv_type;
    segment.seqlen = 960;
    if (r.page_size > 0) {
      segment.layout = ATTN_PAGED;
      segment.page_size = r.page_size;
      segment.max_pages = segment.num_pages = 960 / r.page_size;
    }
    auto in = attn::make<attn_problem>();
    in.batch = in.seqlen_q = in.num_segments = 1;
    in.heads_q = 8, in.heads_kv = 2, in.head_dim = 128;
    in.q_type = ATTN_BF16;
    in.segments = &segment;
    Problem p;
    REQUIRE(make_problem(&in, &p).ok());
    Recipe recipe;
    REQUIRE(find_kernel(r.kernel)->recipe(p, test::hopper(), &recipe).ok());
    REQUIRE(recipe.steps.size() == 1);
    CHECK(recipe.steps[0].launch.block[0] == r.threads);
    CHECK(recipe.steps[0].fewer_threads == (r.threads == 160 && !std::strstr(r.kernel, "_r32")));
  }
  if (!in_build("decode_sm90_bf16_d128_r32", "sm_90a")) ATTN_SKIP("this build has no CUDA kernels");
  const Shape s = {
      .heads = 32, .seqlen = 8192, .dim = 128, .seqlen_q = 8, .heads_kv = 8, .page_size = 24};
  CHECK(reason(h200, s, "decode_sm90_bf16_d128_r32") == "page_size 24 is not a multiple of 16");
}

TEST_CASE("choose: trees go to the decode kernels, of any number of rows", "[plan]") {
  if (!in_build("decode_sm90_bf16_d128_r8", "sm_90a")) ATTN_SKIP("this build has no CUDA kernels");
  Shape s = {.heads = 32,
             .seqlen = 8192,
             .dim = 128,
             .flags = ATTN_CAUSAL,
             .seqlen_q = 4,
             .heads_kv = 8,
             .tree_keys = 4};
  CHECK(chosen(h200, s) == "\"decode_sm90_bf16_d128_r16\"");
  for (const int64_t queries : {4, 5, 13, 64}) {
    s.seqlen_q = s.tree_keys = queries;
    CHECK(chosen(a100, s) == "\"decode_sm80_bf16_d128\"");
  }
  for (const int64_t queries : {5, 13, 64}) {
    s.seqlen_q = s.tree_keys = queries;
    CHECK(chosen(h200, s) ==
          (queries <= 8 ? "\"decode_sm90_bf16_d128_r32\"" : "\"decode_sm90_bf16_d128_r64\""));
  }
}

TEST_CASE("choose: a description that is none is refused", "[plan]") {
  CHECK(explained(device("sm_75", 40, 64 << 10, 0), {}).find("sm_75") != std::string::npos);
  CHECK(explained(device("", 40, 64 << 10, 0), {}).find("device.arch") != std::string::npos);
  CHECK(explained(device(nullptr, 40, 64 << 10, 0), {}).find("NULL") != std::string::npos);
  CHECK(explained(device("sm_90", 0, 64 << 10, 0), {}).find("multiprocessors is 0") !=
        std::string::npos);
  CHECK(explained(device("sm_90", 1, 0, 0), {}).find("shared_bytes_max is 0") != std::string::npos);
  CHECK(explained(device("sm_90", 1, 1, -1), {}).find("l2_bytes is -1") != std::string::npos);
}

// A row that was tried leaves nothing behind: the recipe is that of the kernel demanded by name.
TEST_CASE("choose: rows that decline leave nothing in the recipe", "[plan]") {
  if (!in_build("fwd_sm80_bf16_d64", "sm_80")) ATTN_SKIP("this build has no CUDA kernels");
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_BF16;
  segment.seqlen = 1000;
  auto in = attn::make<attn_problem>();
  in.batch = 1, in.heads_q = in.heads_kv = 200;
  in.head_dim = 128, in.seqlen_q = 1000;
  in.q_type = ATTN_BF16;
  in.num_segments = 1, in.segments = &segment;
  in.scale = -1;  // fwd_sm90_*_d128 declines after its limits, _score takes it
  const DeviceInfo hopper = test::hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &hopper};
  Problem p;
  REQUIRE(make_problem(&in, &p).ok());
  Choice choice;
  std::vector<Declined> declined;
  REQUIRE(choose(p, machine, &choice, &declined).ok());
  CHECK(choice.kernel->name == std::string("fwd_sm90_bf16_d128_score"));
  REQUIRE(choice.recipe.steps.size() == 1);
  CHECK(choice.recipe.steps[0].image == std::string(choice.kernel->name));
  CHECK(choice.recipe.steps[0].maps.size() == 3);
  CHECK(choice.recipe.workspace == sizeof(unsigned));
  CHECK(declined.size() > 10);

  in.kernel = "fwd_sm80_bf16_d128";
  Problem demanded;
  REQUIRE(make_problem(&in, &demanded).ok());
  REQUIRE(choose(demanded, machine, &choice).ok());
  CHECK(choice.kernel->name == std::string(in.kernel));
  CHECK(choice.recipe.workspace == 0);
  CHECK(choice.recipe.steps[0].maps.empty());
}
