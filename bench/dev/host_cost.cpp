// What a plan and a run cost the host: c++ -O2 -std=c++20 -Iinclude bench/dev/host_cost.cpp
// -o host_cost -ldl; host_cost DRIVER LIBATTN.so... has builds of the library take turns on a
// driver, "-" for the system's CUDA driver, and prints the medians of a call in microseconds. On
// tests/mock's cuda_12.so no kernel runs, and what its launch costs is in each run.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "attn/attn.h"

namespace {

constexpr int rounds = 301, plans_of_round = 10, runs_of_round = 200;

template <class T>
T make() {
  T t{};
  t.struct_size = sizeof(T);
  return t;
}

struct Library {
  std::string path;
  decltype(&attn_context_create) context_create;
  decltype(&attn_plan_create) plan_create;
  decltype(&attn_plan_kernel) plan_kernel;
  decltype(&attn_plan_workspace) plan_workspace;
  decltype(&attn_plan_destroy) plan_destroy;
  decltype(&attn_alloc) alloc;
  decltype(&attn_copy_in) copy_in;
  decltype(&attn_run) run;
  decltype(&attn_synchronize) synchronize;
  decltype(&attn_last_error) last_error;
  attn_context* context = nullptr;

  Library(const char* file, const char* driver) : path(file) {
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
    const auto find = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(library, name));
    };
    find(context_create, "attn_context_create");
    find(plan_create, "attn_plan_create");
    find(plan_kernel, "attn_plan_kernel");
    find(plan_workspace, "attn_plan_workspace");
    find(plan_destroy, "attn_plan_destroy");
    find(alloc, "attn_alloc");
    find(copy_in, "attn_copy_in");
    find(run, "attn_run");
    find(synchronize, "attn_synchronize");
    find(last_error, "attn_last_error");
    auto options = make<attn_context_options>();
    if (std::strcmp(driver, "-") != 0) options.driver_path = driver;
    check(context_create(ATTN_BACKEND_CUDA, &options, &context));
  }
  void check(attn_status status) const {
    if (status != ATTN_OK) std::fprintf(stderr, "%s\n", last_error()), std::exit(1);
  }
  template <class T>
  T* zeros(size_t bytes) const {
    const std::vector<char> host(std::max<size_t>(bytes, 256));
    void* at = nullptr;
    check(alloc(context, host.size(), &at));
    check(copy_in(context, at, host.data(), host.size(), nullptr));
    return static_cast<T*>(at);
  }
};

struct Case {
  const char* name;
  attn_dtype q, kv;
  int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  bool packed;  // q, with paged K and V
};
constexpr Case cases[] = {
    {"forward bf16 d128", ATTN_BF16, ATTN_BF16, 1, 16, 16, 1024, 1024, false},
    {"decode bf16 d128", ATTN_BF16, ATTN_BF16, 4, 32, 8, 1, 4096, false},
    {"mixed bf16 d128, 2 launches", ATTN_BF16, ATTN_BF16, 16, 32, 8, 512, 1024, true},
    {"dequantised q8_0 d128, 2 launches", ATTN_BF16, ATTN_Q8_0, 1, 16, 16, 1024, 1024, false},
    {"forward f8_e4m3fn d128", ATTN_F8_E4M3FN, ATTN_F8_E4M3FN, 1, 16, 16, 1024, 1024, false},
};

// A problem with its plan and arguments on one library.
struct Work {
  const Library& library;
  attn_problem problem = make<attn_problem>();
  attn_segment segment = make<attn_segment>();
  attn_segment_args segment_args = make<attn_segment_args>();
  attn_args args = make<attn_args>();
  attn_plan* plan = nullptr;
  void* workspace = nullptr;
  size_t bytes = 0;
  std::vector<double> plan_us = {}, run_us = {};

  Work(const Work&) = delete;  // which points into itself
  Work(const Library& of, const Case& c) : library(of) {
    constexpr int64_t dim = 128, element = 2;
    problem.batch = c.batch;
    problem.heads_q = c.heads_q;
    problem.heads_kv = c.heads_kv;
    problem.head_dim = dim;
    problem.seqlen_q = c.seqlen_q;
    problem.q_type = c.q;
    problem.out_type = ATTN_BF16;
    problem.flags = ATTN_CAUSAL;
    problem.num_segments = args.num_segments = 1;
    problem.segments = &segment;
    segment.k_type = segment.v_type = c.kv;
    segment.seqlen = c.seqlen_kv;
    args.segments = &segment_args;
    const size_t offsets = size_t(c.batch + 1) * sizeof(int32_t);
    if (c.packed) {
      problem.q_layout = segment.layout = ATTN_PACKED;
      problem.total_q = c.batch + c.seqlen_q - 1;  // one long sequence
      segment.layout = ATTN_PAGED;
      segment.page_size = 64;
      segment.max_pages = int32_t(c.seqlen_kv / 64);
      segment.num_pages = c.batch * segment.max_pages;
      args.cu_seqlens_q = library.zeros<int32_t>(offsets);
      segment_args.block_table =
          library.zeros<int32_t>(size_t(segment.num_pages) * sizeof(int32_t));
    }
    const size_t q = size_t(c.batch * c.seqlen_q * c.heads_q * dim * element),
                 kv = size_t(c.batch * c.seqlen_kv * c.heads_kv * dim * element);
    args.q = library.zeros<void>(q);
    args.out = library.zeros<void>(q);
    segment_args.k = library.zeros<void>(kv);
    segment_args.v = library.zeros<void>(kv);
    make_plan();
    bytes = library.plan_workspace(plan);
    workspace = library.zeros<void>(bytes);
  }
  void make_plan() { library.check(library.plan_create(library.context, &problem, &plan)); }
  void time_plans() {
    plan_us.push_back(each(plans_of_round, [&] {
      library.plan_destroy(plan);
      make_plan();
    }));
  }
  void time_runs() {
    library.check(library.synchronize(library.context, nullptr));
    run_us.push_back(each(runs_of_round, [&] {
      library.check(library.run(plan, &args, workspace, bytes, nullptr));
    }));
  }
  template <class F>
  static double each(int times, F&& call) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) call();
    const std::chrono::duration<double, std::micro> all = std::chrono::steady_clock::now() - start;
    return all.count() / times;
  }
};

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "host_cost DRIVER LIBATTN.so...\n"), 2;
  std::vector<Library> libraries;
  for (int i = 2; i < argc; ++i) libraries.emplace_back(argv[i], argv[1]);
  for (const Case& c : cases) {
    std::deque<Work> works;
    for (const Library& library : libraries) works.emplace_back(library, c);
    for (int round = 0; round < rounds; ++round) {
      for (Work& work : works) work.time_plans();
      for (Work& work : works) work.time_runs();
    }
    std::printf("%s: %s\n", c.name, libraries[0].plan_kernel(works[0].plan));
    for (const Work& work : works)
      std::printf("  plan %7.2f us, run %6.3f us  %s\n", median(work.plan_us), median(work.run_us),
                  work.library.path.c_str());
  }
}
