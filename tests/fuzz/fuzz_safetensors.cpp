// libFuzzer target: any bytes as a safetensors file. Accepted files must hold what they promise.
#include <cstdlib>
#include <cstring>

#include "../../tools/common/safetensors.h"

using namespace attn::tools;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto check = [](bool good) {
    if (!good) std::abort();
  };
  // Half of the runs take the input as the file, half as the header, so that the length field is no
  // gate that the fuzzer must first learn to pass.
  std::string file;
  if (size > 2 && data[0] & 1) {
    const uint64_t header = size - 2;
    file.assign(reinterpret_cast<const char*>(&header), 8);
    file.append(reinterpret_cast<const char*>(data + 2), size - 2);
    file.append(data[1], '\0');
  } else if (size > 0) {
    file.assign(reinterpret_cast<const char*>(data + 1), size - 1);
  }
  const auto parsed = parse_tensors(std::as_bytes(std::span(file.data(), file.size())), "in");
  if (!parsed) {
    check(!parsed.error().empty() && parsed.error().size() < 600 &&
          parsed.error().find('\n') == std::string::npos);
    return 0;
  }
  size_t total = 0;
  volatile unsigned sum = 0;
  for (const auto& [name, tensor] : parsed->tensors) {
    const auto count = element_count(tensor.shape);
    check(count && static_cast<size_t>(*count) * dtype_bytes(tensor.dtype) == tensor.bytes);
    for (size_t i = 0; i < tensor.bytes; ++i) sum = sum + tensor.as<uint8_t>()[i];
    total += tensor.bytes;
  }
  check(total < file.size());
  return 0;
}
