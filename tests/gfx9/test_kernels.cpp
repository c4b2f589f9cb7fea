// The kernels of tests/gfx9/kernels on the emulator against the same C on this machine.
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
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

std::vector<uint32_t> on_emulator(const std::string& name, const Options& options) {
  Memory memory;
  std::string error;
  const auto file = read_file(std::string(ATTN_GFX9_KERNELS_DIR) + "/" + name + ".co");
  const auto object = CodeObject::load(file, &memory, &error);
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
  const Report report = launch(memory, *kernel, {n / 128}, {128},
                               std::as_bytes(std::span(&args, 1)).first(20), 0, options);
  CHECK(faults_of(report) == "");
  std::vector<uint32_t> out(16 * n);
  REQUIRE(memory.read(args.out, std::as_writable_bytes(std::span(out))).empty());
  return out;
}

}  // namespace

TEST_CASE("compiled kernels give what the same C gives on the host") {
  if (host_kernels().empty()) ATTN_SKIP("no clang that compiles for gfx942");
  for (const HostKernel& kernel : host_kernels()) {
    DYNAMIC_SECTION(kernel.name) {
      const std::vector<uint32_t> expected = on_host(kernel);
      CHECK(on_emulator(kernel.name, {}) == expected);
      // Without checks, and with waves and loads in another order.
      CHECK(on_emulator(kernel.name, {.checks = false}) == expected);
      CHECK(on_emulator(kernel.name, {.seed = 7}) == expected);
      CHECK(on_emulator(kernel.name, {.checks = false, .seed = 8}) == expected);
    }
  }
}

}  // namespace gfx9emu::test
