// The kernels of tests/gfx9/kernels on the emulator against the same C on this machine.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "gfx9/assemble.h"
#include "gfx9/kernel_list.h"

// What the kernels need on the host (device.h).
struct attn_item {
  int local_id, group_id;
};
extern "C" {
__thread struct attn_item attn_item;

namespace {
std::mutex barrier_mutex;
std::condition_variable barrier_passed;
int barrier_arrived = 0, barrier_number = 0;
}  // namespace

void attn_barrier() {
  std::unique_lock lock(barrier_mutex);
  const int number = barrier_number;
  if (++barrier_arrived == 128) {
    barrier_arrived = 0;
    ++barrier_number;
    barrier_passed.notify_all();
    return;
  }
  barrier_passed.wait(lock, [&] { return barrier_number != number; });
}
}

namespace gfx9emu::test {
namespace {

constexpr int n = 256;

std::vector<float> input() {
  std::vector<float> in(16 * n);
  for (size_t i = 0; i < in.size(); ++i) {
    in[i] = static_cast<float>(static_cast<int>((i * 2654435761u >> 7) % 1025) - 512) / 8.0f;
  }
  return in;
}

std::vector<uint32_t> on_host(const HostKernel& kernel) {
  std::vector<float> in = input();
  std::vector<uint32_t> out(16 * n);
  for (int group = 0; group < n / 128; ++group) {
    std::vector<std::thread> items;
    for (int i = 0; i < 128; ++i) {
      items.emplace_back([&, i] {
        attn_item = {i, group};
        kernel.run(out.data(), in.data(), n);
      });
    }
    for (std::thread& t : items) t.join();
  }
  return out;
}

struct Run {
  Report report;
  std::vector<uint32_t> out;
};
Run on_emulator(const std::string& path, const std::string& name, const Options& options) {
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(read_file(path), &memory, &error);
  INFO(error);
  REQUIRE(object);
  const Kernel* kernel = object->kernel(name);
  REQUIRE(kernel);
  const std::vector<float> in = input();
  struct {
    uint64_t out, in;
    int32_t n;
  } args{memory.allocate(64 * n, "out"), memory.allocate(64 * n, "in"), n};
  REQUIRE(memory.write(args.in, std::as_bytes(std::span(in))).empty());
  REQUIRE(memory.fill(args.out, 0, 64 * n).empty());
  Run run;
  run.report = launch(memory, *kernel, {n / 128}, {128},
                      std::as_bytes(std::span(&args, 1)).first(20), 0, options);
  run.out.resize(16 * n);
  REQUIRE(memory.read(args.out, std::as_writable_bytes(std::span(run.out))).empty());
  return run;
}

std::vector<uint32_t> checked(const std::string& name, const Options& options) {
  const Run run =
      on_emulator(std::string(ATTN_GFX9_KERNELS_DIR) + "/" + name + ".co", name, options);
  CHECK(faults_of(run.report) == "");
  return run.out;
}

}  // namespace

TEST_CASE("compiled kernels give what the same C gives on the host") {
  if (host_kernels().empty()) ATTN_SKIP("no clang that compiles for gfx942");
  for (const HostKernel& kernel : host_kernels()) {
    DYNAMIC_SECTION(kernel.name) {
      const std::vector<uint32_t> expected = on_host(kernel);
      CHECK(checked(kernel.name, {}) == expected);
      // Without checks, and with waves and loads in another order.
      CHECK(checked(kernel.name, {.checks = false}) == expected);
      CHECK(checked(kernel.name, {.seed = 7}) == expected);
      CHECK(checked(kernel.name, {.checks = false, .seed = 8}) == expected);
    }
  }
}

// For tests/foreign: a line of JSON for each NAME.COMPILER.OPTIMISATION.co of a folder.
TEST_CASE("kernels of other compilers", "[.][foreign]") {
  const char* folder = std::getenv("ATTN_FOREIGN_KERNELS");
  if (!folder) ATTN_SKIP("ATTN_FOREIGN_KERNELS names no folder");
  std::map<std::string, std::vector<uint32_t>> expected;
  for (const HostKernel& kernel : host_kernels()) expected[kernel.name] = on_host(kernel);
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".co") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    const std::string file = path.stem().string(), name = file.substr(0, file.find('.'));
    nlohmann::ordered_json line = {{"file", file}};
    const Run plain = on_emulator(path, name, {.checks = false});
    line["right"] = plain.report.ok() && plain.out == expected.at(name);
    if (!plain.report.ok()) line["unchecked"] = faults_of(plain.report);
    const Run run = on_emulator(path, name, {});
    line["strict"] = run.report.ok() ? "" : run.report.faults.back().to_string();
    std::cout << line.dump() << std::endl;
  }
}

}  // namespace gfx9emu::test
