// What a probe asks a machine to run: launches of the kernels of one code object.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace attn::probes {

// Device memory of one launch: `from` the job's data where that is not negative, else filled with
// `fill`.
struct BufferSpec {
  size_t bytes = 0;
  int64_t from = -1;
  uint8_t fill = 0;
  bool read = false;  // what it holds after the launch is wanted
};

struct LaunchSpec {
  std::string kernel;
  uint32_t grid[3] = {1, 1, 1};   // workgroups
  uint32_t block[3] = {1, 1, 1};  // work items
  std::vector<BufferSpec> buffers;
  // In the kernel's order, each aligned to its size: a buffer's address by its index, or a number.
  struct Address {
    size_t buffer;
  };
  std::vector<std::variant<Address, uint32_t, uint64_t>> arguments;
  int repeats = 1;
};

struct Job {
  std::string object;           // a file
  std::vector<std::byte> data;  // that buffers begin with
  std::vector<LaunchSpec> launches;
};

// Reads
//   {"object": FILE, "data": FILE, "launches": [{"kernel": NAME, "grid": [x, y, z], "block": [..],
//    "buffers": [{"bytes": N, "from": OFFSET or null, "fill": BYTE, "read": BOOL}],
//    "arguments": [{"buffer": INDEX} or {"u32": N} or {"u64": N}], "repeats": N}]}
// Throws tools::InputError.
Job read_job(const std::string& path);

// The kernarg segment, with `addresses` by buffer.
std::vector<std::byte> pack(const LaunchSpec& launch, const std::vector<uint64_t>& addresses);

}  // namespace attn::probes
