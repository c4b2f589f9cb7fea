// Runs on every backend, GPUs on stand-ins: they allocate nothing, and nothing is done where there
// is nothing to do.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../conformance/backend.h"
#include "asm/gfx942/kv_segment_args.h"
#include "backends.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "kernels/decode/decode_args.h"
#include "kernels/forward_sm80/forward_args.h"
#include "kernels/forward_sm90/forward_args.h"
#include "kernels/shared/merge_args.h"

// ---- a counter of allocations ------------------------------------------------------------------

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
[[maybe_unused]] void count_allocation() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

// Every allocation of the process comes by here, operator new's too. A sanitizer has an allocator
// of its own, by which it allocates for itself too: there nothing is counted.
#ifndef __SANITIZE_ADDRESS__
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  count_allocation();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  count_allocation();
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  count_allocation();
  return __libc_realloc(memory, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  count_allocation();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  count_allocation();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  count_allocation();
  *memory = __libc_memalign(alignment, bytes);
  return *memory ? 0 : ENOMEM;
}
}
#endif

using namespace attn;
using namespace attn::test;

namespace {

// The allocations of the second run: the first may set up what belongs to the thread.
template <class Run>
int allocations_of(Run&& run) {
  REQUIRE(run() == ATTN_OK);
  allocations = 0;
  counting = true;
  const attn_status status = run();
  counting = false;
  INFO(attn_last_error());
  REQUIRE(status == ATTN_OK);
  return allocations;
}

// Zeros, in which every array of a call may lie that is only read: lengths, offsets, pages, kinds.
struct Memory {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  // Zeros, without a write to each page.
  std::unique_ptr<void, Free> bytes;
  explicit Memory(size_t size = 1 << 22) : bytes(std::calloc(size, 1)) {}
  char* at(size_t place) {
    char* const first = static_cast<char*>(bytes.get());
    return first + (256 - reinterpret_cast<uintptr_t>(first) % 256) % 256 + place;
  }
};

// What of a problem no two of which every kernel takes together.
struct Variant {
  const char* name;
  int segments;
  uint32_t flags = 0;
  bool packed = false, paged = false, seqlens = false, bias = false, descale = false;
  float softcap = 0;
  attn_dtype out_type = ATTN_DTYPE_NONE;
  int64_t seqlen_q = 3, seqlen = 2, tree_keys = 0;
};
const Variant variants[] = {
    {.name = "plain", .segments = 1},
    {.name = "sinks and a window", .segments = 1, .flags = ATTN_SINKS | ATTN_WINDOW | ATTN_CAUSAL},
    {.name = "8 segments", .segments = 8},
    {.name = "9 segments", .segments = 9},
    {.name = "24 segments", .segments = 24},
    {.name = "1024 segments", .segments = 1024},
    {.name = "24 packed segments", .segments = 24, .packed = true},
    {.name = "packed", .segments = 1, .packed = true},
    {.name = "lengths", .segments = 1, .seqlens = true},
    {.name = "paged", .segments = 2, .paged = true},
    {.name = "scores", .segments = 1, .flags = ATTN_ALIBI, .bias = true, .softcap = 2},
    {.name = "block mask", .segments = 1, .flags = ATTN_BLOCK_MASK},
    {.name = "tree", .segments = 1, .tree_keys = 3},
    {.name = "descales", .segments = 1, .descale = true},
    {.name = "fp8 out", .segments = 1, .flags = ATTN_OUT_SCALE, .out_type = ATTN_F8_E5M2},
    {.name = "many threads", .segments = 1, .seqlen_q = 300, .seqlen = 300},
    {.name = "decode", .segments = 1, .seqlen_q = 1, .seqlen = 1024},
};

attn_dtype q_type_of(const Kernel& kernel) {
  const attn_dtype type = float_type_of(kernel);
  return type == ATTN_DTYPE_NONE ? ATTN_F8_E4M3FN : type;
}
// q's type if the kernel takes it for all K and V too.
attn_dtype kv_type_of(const Kernel& kernel) {
  for (const attn_dtype type : {test::kv_type_of(kernel, q_type_of(kernel)), ATTN_F8_E4M3FN,
                                ATTN_F8_E5M2, ATTN_Q8_0, ATTN_MLA_656})
    if (kernel.limits.kv_types & type_bit(type)) return type;
  return ATTN_Q4_0;
}

// A head dimension that the kernel takes.
int64_t head_dim_of(const Kernel& kernel) {
  return std::max<int64_t>(64, kernel.limits.head_dim.multiple);
}

// The variant on one kernel: -1 if it declines, else what a run allocates.
int allocations_of_forward(attn_context* context, const Kernel& kernel, const Variant& v) {
  constexpr int64_t batch = 2, heads = 4;  // whose blocks are multiples of 16 bytes
  std::vector<attn_segment> segments(size_t(v.segments), make<attn_segment>());
  std::vector<attn_segment_args> kv(size_t(v.segments), make<attn_segment_args>());
  const bool v_in_k = kernel.limits.demanded_features & feature_v_in_k;
  const bool paged = v.paged || kernel.limits.demanded_features & feature_paged_kv;
  const size_t size = v_in_k ? 1 << 24 : 1 << 22;  // rows of latent caches are large
  Memory in(size), out(size);
  auto p = make<attn_problem>();
  auto args = make<attn_args>();
  p.batch = batch;
  p.heads_q = heads;
  p.heads_kv = heads / kernel.limits.group.multiple;
  p.head_dim = head_dim_of(kernel);
  if (v_in_k) p.head_dim_v = kernel.limits.head_dim_v.max;
  p.seqlen_q = v.seqlen_q;
  p.q_type = q_type_of(kernel);
  p.out_type = v.out_type;
  p.flags = v.flags | kernel.limits.demands;
  p.softcap = v.softcap;
  p.kernel = kernel.name;
  p.num_segments = args.num_segments = v.segments;
  p.segments = segments.data();
  args.segments = kv.data();
  const auto zeros = [&](auto& pointer) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(in.at(0));
  };
  zeros(args.q);
  args.out = out.at(0);
  args.lse = reinterpret_cast<float*>(out.at(size / 4));
  if (p.flags & ATTN_ALIBI) zeros(args.alibi_slopes);
  if (p.flags & ATTN_SINKS) zeros(args.sinks);
  if (v.tree_keys > 0) {
    p.tree_keys = v.tree_keys;
    zeros(args.tree);
  }
  if (p.flags & ATTN_OUT_SCALE) zeros(args.out_scale);
  if (v.bias) {
    p.bias_type = ATTN_F32;
    zeros(args.bias);
  }
  if (p.flags & ATTN_BLOCK_MASK) {
    p.block_q = p.block_k = 64;
    zeros(args.block_kinds);
  }
  if (v.descale && dtype_is_fp8(p.q_type)) {
    p.q_descale = ATTN_DESCALE_HEAD;
    zeros(args.q_descale);
  }
  if (v.packed) {
    p.q_layout = ATTN_PACKED;
    p.total_q = batch * p.seqlen_q;
    zeros(args.cu_seqlens_q);
  }
  for (size_t n = 0; n < segments.size(); ++n) {
    attn_segment& s = segments[n];
    s.k_type = s.v_type = kv_type_of(kernel);
    s.seqlen = v.seqlen;
    s.v_in_k = v_in_k;
    zeros(kv[n].k);
    if (!v_in_k) zeros(kv[n].v);
    if (v.packed && !paged) {
      s.layout = ATTN_PACKED;
      s.total = batch * s.seqlen;
      zeros(kv[n].cu_seqlens);
    }
    if (v.seqlens) {
      s.has_seqlens = 1;
      zeros(kv[n].seqlens);
    }
    if (paged) {
      s.layout = ATTN_PAGED;
      s.page_size = 16;
      s.max_pages = s.num_pages = int32_t(ceil_div(v.seqlen, 16)) + 1;
      zeros(kv[n].block_table);
    }
    if (v.descale) {
      s.k_descale = s.v_descale = ATTN_DESCALE_HEAD;
      zeros(kv[n].k_descale);
      if (!v_in_k) zeros(kv[n].v_descale);
    }
  }
  Plan plan;
  const attn_status status = attn_plan_create(context, &p, &plan.plan);
  if (status == ATTN_UNSUPPORTED) return -1;
  INFO(attn_last_error());
  REQUIRE(status == ATTN_OK);
  const size_t bytes = attn_plan_workspace(plan.plan);
  Memory room(bytes + 256);
  return allocations_of([&] { return attn_run(plan.plan, &args, room.at(0), bytes, nullptr); });
}

// The most segments that the rows of a backend take.
int most_segments(const Kernel& kernel) {
  if (kernel.host) return 1024;
  if (!(kernel.limits.features & feature_segments)) return 1;
  if (kernel.backend == ATTN_BACKEND_HIP) return int(attn_gfx942_kv_segments);
  for (const char* family : {"decode_", "mla_"})
    if (std::string(kernel.name).starts_with(family)) return int(attn_decode_max_segments);
  return std::string(kernel.name).find("sm90") != std::string::npos ? int(attn_sm90_max_segments)
                                                                    : int(attn_sm80_max_segments);
}

template <class Visit>
void for_each_kernel(attn_context* context, Op op, Visit&& visit) {
  for (const Kernel& kernel : catalog()) {
    if (kernel.op != op || kernel.backend != attn_context_backend(context)) continue;
    if (kernel.host && !kernel.host->runs_here()) continue;
    INFO(kernel.name);
    visit(kernel);
  }
}

}  // namespace

TEST_CASE("runs: forward allocates nothing") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for_each_kernel(context, Op::forward, [&](const Kernel& kernel) {
      int ran = 0, most = 0;
      for (const Variant& v : variants) {
        INFO(v.name);
        const int count = allocations_of_forward(context, kernel, v);
        if (count < 0) continue;
        CHECK(count == 0);
        ++ran;
        most = std::max(most, v.segments);
      }
      CHECK(most == most_segments(kernel));
      CHECK(ran >= 3);
    });
  });
}

TEST_CASE("runs: merge allocates nothing") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for_each_kernel(context, Op::merge, [&](const Kernel& kernel) {
      for (int parts : {1, kernel.host ? 65535 : int(attn_merge_max_parts)}) {
        auto p = make<attn_merge_problem>();
        p.batch = p.heads_q = 2;
        p.seqlen_q = 5;
        p.head_dim_v = 40;
        p.num_parts = parts;
        p.part_type = ATTN_F32;
        p.kernel = kernel.name;
        Plan plan;
        REQUIRE(attn_plan_create_merge(context, &p, &plan.plan) == ATTN_OK);
        Memory in, out;
        const std::vector<const void*> outs(size_t(parts), in.at(0));
        const std::vector<const float*> lses(size_t(parts), reinterpret_cast<float*>(in.at(0)));
        auto args = make<attn_merge_args>();
        args.num_parts = parts;
        args.outs = outs.data();
        args.lses = lses.data();
        args.out = out.at(0);
        args.lse = reinterpret_cast<float*>(out.at(8192));
        CHECK(allocations_of([&] { return attn_run_merge(plan.plan, &args, nullptr); }) == 0);
      }
    });
  });
}

TEST_CASE("runs: quantize allocates nothing") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for_each_kernel(context, Op::quantize, [&](const Kernel& kernel) {
      for (int type = ATTN_F8_E4M3FN; type < end_of_dtypes; ++type) {
        if (!(kernel.limits.out_types & ~cache_types & type_bit(attn_dtype(type)))) continue;
        for (attn_scale_source scale : {ATTN_SCALE_ONE, ATTN_SCALE_GIVEN, ATTN_SCALE_AMAX}) {
          const bool scales = dtype_has_scales(attn_dtype(type));
          if ((dtype_is_ggml(attn_dtype(type)) || scales) && scale != ATTN_SCALE_ONE) continue;
          auto p = make<attn_quantize_problem>();
          p.batch = p.heads = 2;
          p.seqlen = 130;
          p.head_dim = 64;
          p.src_type = ATTN_F32;
          p.dst_type = attn_dtype(type);
          p.kind = ATTN_DESCALE_BLOCK;
          p.descale_block_keys = 64;
          p.scale = scale;
          p.kernel = kernel.name;
          Plan plan;
          REQUIRE(attn_plan_create_quantize(context, &p, &plan.plan) == ATTN_OK);
          Memory in, out;
          auto args = make<attn_quantize_args>();
          args.src = in.at(0);
          args.dst = out.at(0);
          args.descale = reinterpret_cast<float*>(out.at(1000000));
          if (scales) args.scale = out.at(900000);
          CHECK(allocations_of([&] { return attn_run_quantize(plan.plan, &args, nullptr); }) == 0);
        }
      }
    });
  });
}

TEST_CASE("runs: kv_append allocates nothing") {
  on_every_backend([](attn_context* context, const mock::MockLibrary*) {
    for_each_kernel(context, Op::kv_append, [&](const Kernel& kernel) {
      for (int type = ATTN_F32; type < end_of_dtypes; ++type) {
        if (!(kernel.limits.kv_types & type_bit(attn_dtype(type)))) continue;
        if (64 % dtype_block(attn_dtype(type)) != 0) continue;  // mla_*
        auto p = make<attn_kv_append_problem>();
        p.batch = p.heads_kv = p.heads_q = 2;
        p.head_dim = 64;
        p.seqlen_new = 20;
        p.new_type = ATTN_F16;
        p.segment = make<attn_segment>();
        p.segment.layout = ATTN_PAGED;
        p.segment.k_type = p.segment.v_type = attn_dtype(type);
        p.segment.has_seqlens = 1;
        p.segment.page_size = 16;
        p.segment.max_pages = p.segment.num_pages = 2;
        p.rotary_dim = p.rotary_positions = 32;
        p.advance_seqlens = 1;
        p.kernel = kernel.name;
        Plan plan;
        REQUIRE(attn_plan_create_kv_append(context, &p, &plan.plan) == ATTN_OK);
        Memory in, out;
        auto args = make<attn_kv_append_args>();
        args.cache = make<attn_segment_args>();
        args.k_new = args.v_new = args.q = in.at(0);
        args.rotary_cos = args.rotary_sin = reinterpret_cast<const float*>(in.at(500000));
        args.cache.block_table = reinterpret_cast<const int32_t*>(in.at(600000));
        args.cache.k = out.at(0);
        args.cache.v = out.at(300000);
        if (dtype_has_scales(attn_dtype(type))) {
          args.cache.k_scale = out.at(200000);
          args.cache.v_scale = out.at(500000);
        }
        args.q_out = out.at(600000);
        args.cache.seqlens = args.seqlens_out = reinterpret_cast<int32_t*>(out.at(900000));
        CHECK(allocations_of([&] { return attn_run_kv_append(plan.plan, &args, nullptr); }) == 0);
      }
    });
  });
}

TEST_CASE("runs: launches of kv_append on a device") {
  const mock::MockLibrary library("cuda_12");
  const context device = device_on(library);
  auto p = make<attn_kv_append_problem>();
  p.batch = 64;
  p.heads_kv = 8;
  p.head_dim = 128;
  p.seqlen_new = 1;
  p.new_type = ATTN_BF16;
  p.segment = make<attn_segment>();
  p.segment.k_type = p.segment.v_type = ATTN_F8_E4M3FN;
  p.segment.has_seqlens = 1;
  p.segment.seqlen = 4096;
  Memory in;
  const auto launches = [&](const attn_kv_append_problem& problem) {
    Plan plan;
    REQUIRE(attn_plan_create_kv_append(device.get(), &problem, &plan.plan) == ATTN_OK);
    auto args = make<attn_kv_append_args>();
    args.cache = make<attn_segment_args>();
    // Nothing reads or writes here, but tensors are kept apart.
    char* const far = reinterpret_cast<char*>(uintptr_t{1} << 40);
    args.k_new = args.v_new = far;
    args.cache.k = far + (int64_t{1} << 36);
    args.cache.v = far + (int64_t{1} << 37);
    args.cache.seqlens = reinterpret_cast<int32_t*>(in.at(0));
    if (problem.advance_seqlens) args.seqlens_out = reinterpret_cast<int32_t*>(in.at(0));
    const int before = library->launches;
    CHECK(attn_run_kv_append(plan.plan, &args, nullptr) == ATTN_OK);
    CHECK(std::string(library->last.symbol) == "kv_append_cuda");
    return library->launches - before;
  };
  CHECK(launches(p) == 1);
  p.advance_seqlens = 1;
  CHECK(launches(p) == 1);  // a block per sequence, which writes its length
  CHECK(library->last.grid[0] == 64);
  CHECK(library->last.grid[1] == 1);
  CHECK(library->last.block[0] == 256);
  p.seqlen_new = 2;
  CHECK(launches(p) == 2);
  CHECK(library->last.grid[0] == 1);
  p.advance_seqlens = 0;
  CHECK(launches(p) == 1);
  CHECK(library->last.grid[0] == 128);

  const auto refused = [&](const attn_kv_append_problem& problem, const char* words) {
    attn_plan* made = nullptr;
    CHECK(attn_plan_create_kv_append(device.get(), &problem, &made) == ATTN_UNSUPPORTED);
    CHECK(std::string(attn_last_error()).find(words) != std::string::npos);
  };
  auto wide = p;
  wide.head_dim = 4128;
  refused(wide, "head_dim");
  auto reversed = p;
  reversed.k_new_stride = {-2048, 1024, 128};
  refused(reversed, "negative strides");
  auto many = p;
  many.batch = int64_t{1} << 30;
  refused(many, "new tokens");
  auto scaled = p;
  scaled.segment.k_descale = ATTN_DESCALE_BLOCK;
  scaled.segment.descale_block_keys = 64;
  scaled.segment.seqlen = int64_t{1} << 30;
  scaled.heads_kv = 1 << 10;
  refused(scaled,
          "heads_kv * ceil(seqlen_kv / 64) is 17179869184; accepted with descales per block: up to "
          "2147483647");
}

TEST_CASE("runs: decode kernels say how many descales of blocks they take") {
  const mock::MockLibrary library("cuda_12");
  const context device = device_on(library);
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F8_E4M3FN;
  segment.seqlen = int64_t{1} << 30;
  segment.k_descale = ATTN_DESCALE_BLOCK;
  segment.descale_block_keys = 64;
  auto decode = make<attn_problem>();
  decode.batch = decode.seqlen_q = decode.num_segments = 1;
  decode.heads_q = decode.heads_kv = 96;
  decode.head_dim = 128;
  decode.q_type = ATTN_BF16;
  decode.segments = &segment;
  decode.kernel = "decode_sm89_fp8_d128";
  attn_plan* made = nullptr;
  CHECK(attn_plan_create(device.get(), &decode, &made) == ATTN_UNSUPPORTED);
  INFO(attn_last_error());
  CHECK(std::string(attn_last_error())
            .find("batch * heads_kv * (ceil(seqlen_kv / 64) + num_segments) is 1610612832; "
                  "accepted with descales per block: up to 1073741823") != std::string::npos);
}

TEST_CASE("runs: decode kernels take trees, of 16 bits more rows than without") {
  const mock::MockLibrary library("cuda_12");
  const context device = device_on(library);
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_BF16;
  segment.seqlen = 1000;
  auto p = make<attn_problem>();
  p.batch = p.num_segments = 1;
  p.heads_q = 32;
  p.heads_kv = 8;
  p.head_dim = 128;
  p.q_type = ATTN_BF16;
  p.flags = ATTN_CAUSAL;
  p.segments = &segment;
  const auto chosen = [&](int64_t queries, int64_t tree_keys, const char* kernel) {
    p.seqlen_q = queries;
    p.tree_keys = tree_keys;
    p.kernel = kernel;
    attn_plan* made = nullptr;
    const attn_status status = attn_plan_create(device.get(), &p, &made);
    const Plan plan{made};
    return std::string(status == ATTN_OK ? attn_plan_kernel(made) : attn_last_error());
  };
  CHECK(chosen(4, 4, nullptr) == "decode_sm90_bf16_d128_r16");
  CHECK(chosen(5, 128, nullptr) == "decode_sm90_bf16_d128_r32");
  for (const int64_t queries : {12, 13, 128})
    CHECK(chosen(queries, 128, nullptr) == "decode_sm90_bf16_d128_r64");
  CHECK(chosen(17, 0, "decode_sm90_bf16_d128_r64") ==
        "heads_q / heads_kv * seqlen_q is 4 * 17; accepted: up to 64 (decode_sm90_bf16_d128_r64)");
  CHECK(chosen(5, 1, "fwd_sm90_bf16_d128") == "tree mask (fwd_sm90_bf16_d128)");

  p.seqlen_q = 4;
  p.tree_keys = 70;
  p.kernel = "decode_sm80_bf16_d128";
  const attn::plan plan(device, p);
  const attn::buffer workspace = plan.make_workspace(device);
  Memory in, out;
  auto kv = make<attn_segment_args>();
  auto args = make<attn_args>();
  args.num_segments = 1;
  args.segments = &kv;
  args.q = kv.k = kv.v = in.at(0);
  args.out = out.at(0);
  args.tree = reinterpret_cast<const uint64_t*>(in.at(512));
  plan.run(args, workspace);
  attn_decode_kernarg got;
  REQUIRE(library->last.kernarg_bytes == sizeof got);
  std::memcpy(&got, library->last.kernarg, sizeof got);
  CHECK(static_cast<const void*>(got.tree) == args.tree);
  CHECK(got.tree_mask.keys == 70);
}

// Without arrays: there is nothing in them.
TEST_CASE("runs: a batch of 0 has nothing to do") {
  on_every_backend([](attn_context* context, const mock::MockLibrary* library) {
    for_each_kernel(context, Op::forward, [&](const Kernel& kernel) {
      for (const bool packed : {false, true}) {
        auto segment = make<attn_segment>();
        segment.seqlen = 70;
        auto p = make<attn_problem>();
        p.heads_kv = 4;  // whose blocks are multiples of 16 bytes
        p.heads_q = 4 * kernel.limits.group.multiple;
        p.head_dim = head_dim_of(kernel);
        if (kernel.limits.demanded_features & feature_v_in_k) {
          p.head_dim_v = kernel.limits.head_dim_v.max;
          segment.v_in_k = 1;
        }
        p.seqlen_q = std::min<int64_t>(65, kernel.limits.seqlen_q.max);
        p.q_type = q_type_of(kernel);
        segment.k_type = segment.v_type = kv_type_of(kernel);
        p.num_segments = 1;
        p.segments = &segment;
        p.kernel = kernel.name;
        p.flags = kernel.limits.demands;
        if (p.flags & ATTN_BLOCK_MASK) p.block_q = p.block_k = 64;
        if (packed) {
          p.q_layout = segment.layout = ATTN_PACKED;
          segment.total = 300;
        }
        if (kernel.limits.demanded_features & feature_paged_kv) {
          if (packed) continue;
          segment.layout = ATTN_PAGED;
          segment.page_size = 16;
          segment.max_pages = 5;
        }
        Plan plan;
        const attn_status status = attn_plan_create(context, &p, &plan.plan);
        INFO(attn_last_error());
        const bool takes_packed =
            kernel.limits.features & feature_packed_q && !(p.flags & ATTN_BLOCK_MASK);
        if (status == ATTN_UNSUPPORTED && packed && !takes_packed) continue;
        REQUIRE(status == ATTN_OK);
        CHECK(attn_plan_workspace(plan.plan) == 0);
        CHECK(attn_workspace_init(plan.plan, nullptr, 0, nullptr) == ATTN_OK);
        const int32_t offset = 0;
        const uint8_t kind = 0;
        const std::vector<char> keys(packed ? size_t(300 * 4 * p.head_dim * 8) : 0);
        auto kv = make<attn_segment_args>();
        auto args = make<attn_args>();
        args.num_segments = 1;
        args.segments = &kv;
        if (p.flags & ATTN_BLOCK_MASK) args.block_kinds = &kind;
        if (segment.layout == ATTN_PAGED) kv.block_table = &offset;
        if (packed) {
          args.cu_seqlens_q = kv.cu_seqlens = &offset;
          kv.k = keys.data();
          if (!segment.v_in_k) kv.v = keys.data();
        }
        const attn_status ran = attn_run(plan.plan, &args, nullptr, 0, nullptr);
        INFO(attn_last_error());
        CHECK(ran == ATTN_OK);
        CHECK(attn_check(plan.plan, &args, nullptr) == ATTN_OK);
      }
    });
    for (const bool nothing : {false, true}) {
      auto p = make<attn_merge_problem>();
      p.heads_q = 2;
      p.seqlen_q = 5;
      p.head_dim_v = 40;
      p.num_parts = 1;
      p.part_type = ATTN_F32;
      Plan plan;
      REQUIRE(attn_plan_create_merge(context, &p, &plan.plan) == ATTN_OK);
      const void* out = nullptr;
      const float* lse = nullptr;
      auto args = make<attn_merge_args>();
      args.num_parts = 1;
      args.outs = &out;
      args.lses = &lse;
      CHECK(attn_run_merge(plan.plan, &args, nullptr) == ATTN_OK);

      auto q = make<attn_quantize_problem>();
      q.heads = 2;
      q.seqlen = nothing ? 0 : 70;
      q.head_dim = 64;
      q.src_type = ATTN_F32;
      q.dst_type = ATTN_F8_E4M3FN;
      q.kind = nothing ? ATTN_DESCALE_HEAD : ATTN_DESCALE_BLOCK;
      q.descale_block_keys = nothing ? 0 : 64;
      q.scale = ATTN_SCALE_AMAX;
      Plan quantize;
      REQUIRE(attn_plan_create_quantize(context, &q, &quantize.plan) == ATTN_OK);
      auto quantize_args = make<attn_quantize_args>();
      CHECK(attn_run_quantize(quantize.plan, &quantize_args, nullptr) == ATTN_OK);

      auto a = make<attn_kv_append_problem>();
      a.heads_kv = a.heads_q = 2;
      a.head_dim = 64;
      a.seqlen_new = 3;
      a.new_layout = nothing ? ATTN_PADDED : ATTN_PACKED;
      a.new_type = ATTN_F16;
      a.segment = make<attn_segment>();
      a.segment.k_type = a.segment.v_type = ATTN_F16;
      a.segment.has_seqlens = 1;
      a.segment.seqlen = a.rotary_positions = 70;
      a.rotary_dim = 64;
      a.advance_seqlens = 1;
      Plan append;
      const attn_status made = attn_plan_create_kv_append(context, &a, &append.plan);
      if (made == ATTN_UNSUPPORTED && library) continue;
      REQUIRE(made == ATTN_OK);
      const auto append_args = make<attn_kv_append_args>();
      CHECK(attn_run_kv_append(append.plan, &append_args, nullptr) == ATTN_OK);
    }
    if (library) CHECK((*library)->launches == 0);
  });
}
