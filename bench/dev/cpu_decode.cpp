// Decode on the cpu backend next to a plain sum over the same keys and values by as many threads:
//   g++ -O3 -march=native -std=c++20 -Iinclude -Isrc -I. bench/dev/cpu_decode.cpp -o cpu_decode
//   -ldl -pthread cpu_decode LIBATTN.so... [--only f32,paged] [--batch 4] [--heads 32/8] [--keys
//   4096]
//              [--dim 128] [--queries 1] [--threads N] [--rounds 15]
//              [--cpu-time 1: the time on all cores, where other work runs]
//              [--least 1: the least time in place of the median]
// Contenders take turns in every round; medians. "share" is the sum's time over the library's.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/types.h"

namespace {

struct Options {
  std::vector<std::string> libraries;
  std::string only;
  int64_t batch = 4, heads = 32, heads_kv = 8, keys = 4096, dim = 128, queries = 1;
  int threads = int(std::thread::hardware_concurrency()), rounds = 15;
};

template <class T>
T make() {
  T t{};
  t.struct_size = sizeof(T);
  return t;
}

uint32_t random_bits() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 33);
}

// Finite values of moderate size.
std::vector<char> random_rows(const attn::TypeInfo& t, int64_t elements) {
  std::vector<char> rows(size_t(elements / t.block_elements * t.block_bytes));
  char* at = rows.data();
  for (int64_t i = 0; i < elements; i += t.block_elements, at += t.block_bytes) {
    const float x = float(int32_t(random_bits() % 2001) - 1000) / 500;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (t.type == ATTN_F32) {
      std::memcpy(at, &bits, 4);
    } else if (t.type == ATTN_BF16) {
      std::memcpy(at, reinterpret_cast<char*>(&bits) + 2, 2);
    } else if (t.type == ATTN_F16) {
      const uint16_t code = uint16_t(random_bits() & 0xbfff);  // below 2
      std::memcpy(at, &code, 2);
    } else if (t.has_scales) {
      *at = char(random_bits());
    } else if (t.block_elements == 1) {
      *at = char(random_bits() & 0xbf);
    } else {
      const uint16_t scale = 0x2000;
      std::memcpy(at, &scale, 2);
      std::memcpy(at + 2, &scale, 2);  // of those that have a minimum
      for (int64_t n = 4; n < t.block_bytes; ++n) at[n] = char(random_bits());
    }
  }
  return rows;
}

struct Library {
  decltype(&attn_context_create) context_create;
  decltype(&attn_plan_create) plan_create;
  decltype(&attn_plan_workspace) plan_workspace;
  decltype(&attn_plan_destroy) plan_destroy;
  decltype(&attn_run) run;
  decltype(&attn_last_error) last_error;
  attn_context* context = nullptr;

  explicit Library(const std::string& path, int threads) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
    const auto find = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(library, name));
    };
    find(context_create, "attn_context_create");
    find(plan_create, "attn_plan_create");
    find(plan_workspace, "attn_plan_workspace");
    find(plan_destroy, "attn_plan_destroy");
    find(run, "attn_run");
    find(last_error, "attn_last_error");
    auto options = make<attn_context_options>();
    options.cpu_threads = threads;
    check(context_create(ATTN_BACKEND_CPU, &options, &context));
  }
  void check(attn_status status) const {
    if (status != ATTN_OK) std::fprintf(stderr, "%s\n", last_error()), std::exit(1);
  }
};

double sum(const std::vector<char>& rows, int part, int parts) {
  const int64_t words = int64_t(rows.size() / 4), begin = words * part / parts;
  const auto* at = reinterpret_cast<const uint32_t*>(rows.data());
  uint32_t total = 0;
  for (int64_t i = begin; i < words * (part + 1) / parts; ++i) total += at[i];
  return total;
}

bool cpu_time = false, least = false;

template <class F>
double milliseconds(F&& f) {
  const auto now = [] {
    timespec t;
    clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
  };
  const double start = now();
  f();
  return now() - start;
}

double median(std::vector<double> x) {
  if (least) return *std::min_element(x.begin(), x.end());
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

volatile double sink;

void measure(const Options& o, const std::vector<Library>& libraries, const attn::TypeInfo& t,
             bool paged) {
  constexpr int64_t page = 16;
  const int64_t elements = o.batch * o.keys * o.heads_kv * o.dim;
  const std::vector<char> k = random_rows(t, elements), v = random_rows(t, elements);
  const int64_t q_elements = o.batch * o.queries * o.heads * o.dim;
  const std::vector<char> q = random_rows(attn::type_info(ATTN_F32), q_elements);
  std::vector<float> out(size_t(q_elements), 0);
  // Pages in an order of their own, as a cache that has been in use has them.
  std::vector<int32_t> table(size_t(o.batch * o.keys / page), 0);
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i);
  for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random_bits() % i]);

  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = t.type;
  segment.seqlen = o.keys;
  auto data = make<attn_segment_args>();
  data.k = k.data();
  data.v = v.data();
  const std::vector<uint16_t> scales(size_t(o.batch * o.keys * o.heads_kv), 0x2000);
  if (t.has_scales) data.k_scale = data.v_scale = scales.data();
  if (paged) {
    segment.layout = ATTN_PAGED;
    segment.num_pages = int64_t(table.size());
    segment.page_size = page;
    segment.max_pages = int32_t(o.keys / page);
    data.block_table = table.data();
  }
  auto problem = make<attn_problem>();
  problem.batch = o.batch;
  problem.heads_q = o.heads;
  problem.heads_kv = o.heads_kv;
  problem.head_dim = o.dim;
  problem.seqlen_q = o.queries;
  problem.q_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  auto args = make<attn_args>();
  args.q = q.data();
  args.out = out.data();
  args.num_segments = 1;
  args.segments = &data;

  struct Ready {
    attn_plan* plan;
    std::vector<char> memory;
    void* workspace;
    size_t bytes;
  };
  std::vector<Ready> ready;
  for (const Library& library : libraries) {
    Ready r{};
    library.check(library.plan_create(library.context, &problem, &r.plan));
    r.bytes = library.plan_workspace(r.plan);
    r.memory.resize(r.bytes + 256);
    r.workspace = r.memory.data() + (256 - reinterpret_cast<uintptr_t>(r.memory.data()) % 256);
    ready.push_back(std::move(r));
  }

  std::vector<double> sums;
  std::vector<std::vector<double>> times(libraries.size());
  for (int round = 0; round < o.rounds; ++round) {
    sums.push_back(milliseconds([&] {
      std::vector<std::thread> threads;
      for (int n = 0; n < o.threads; ++n)
        threads.emplace_back([&, n] { sink = sum(k, n, o.threads) + sum(v, n, o.threads); });
      for (std::thread& thread : threads) thread.join();
    }));
    for (size_t i = 0; i < libraries.size(); ++i) {
      times[i].push_back(milliseconds([&] {
        libraries[i].check(
            libraries[i].run(ready[i].plan, &args, ready[i].workspace, ready[i].bytes, nullptr));
      }));
    }
  }
  const double gigabytes = double(k.size() + v.size()) / 1e9;
  std::printf("%-12s %-9s sum %7.3f ms %6.1f GB/s", t.name, paged ? "paged" : "padded",
              median(sums), gigabytes / median(sums) * 1e3);
  for (size_t i = 0; i < libraries.size(); ++i) {
    std::vector<double> shares;
    for (size_t n = 0; n < sums.size(); ++n) shares.push_back(sums[n] / times[i][n]);
    std::printf("  | %7.3f ms %6.1f GB/s share %.2f", median(times[i]),
                gigabytes / median(times[i]) * 1e3, median(shares));
    libraries[i].plan_destroy(ready[i].plan);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      o.libraries.push_back(name);
      continue;
    }
    const std::string value = ++i < argc ? argv[i] : "";
    const int64_t number = std::atoll(value.c_str());
    if (name == "--only") o.only = "," + value + ",";
    if (name == "--batch") o.batch = number;
    if (name == "--heads") {
      o.heads = number;
      const size_t slash = value.find('/');
      o.heads_kv = slash == value.npos ? number : std::atoll(value.c_str() + slash + 1);
    }
    if (name == "--keys") o.keys = number;
    if (name == "--dim") o.dim = number;
    if (name == "--queries") o.queries = number;
    if (name == "--threads") o.threads = int(number);
    if (name == "--cpu-time") cpu_time = number != 0;
    if (name == "--least") least = number != 0;
    if (name == "--rounds") o.rounds = int(number);
  }
  std::vector<Library> libraries;
  for (const std::string& path : o.libraries) libraries.emplace_back(path, o.threads);
  const auto wanted = [&](const char* name) {
    return o.only.find("," + std::string(name) + ",") != o.only.npos;
  };
  bool any_type = false, any_layout = wanted("padded") || wanted("paged");
  for (const attn::TypeInfo& t : attn::detail::types) any_type |= wanted(t.name);
  for (const attn::TypeInfo& t : attn::detail::types) {
    if (!(attn::kv_types & attn::type_bit(t.type))) continue;
    if (any_type && !wanted(t.name)) continue;
    for (const bool paged : {false, true}) {
      if (any_layout && !wanted(paged ? "paged" : "padded")) continue;
      measure(o, libraries, t, paged);
    }
  }
}
