#include "probes/job.h"

#include <cstring>
#include <fstream>
#include <iterator>

#include "attn/common.h"

namespace attn::probes {
namespace {

using tools::InputError;
using tools::Json;

std::vector<std::byte> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw InputError(path + ": cannot be read");
  const auto* begin = reinterpret_cast<const std::byte*>(chars.data());
  return {begin, begin + chars.size()};
}

void read_sizes(const Json& list, uint32_t (&to)[3]) {
  if (!list.is_array() || list.size() > 3) throw InputError("sizes are a list of up to 3 numbers");
  for (size_t i = 0; i < list.size(); ++i) to[i] = list[i].get<uint32_t>();
}

LaunchSpec read_launch(const Json& json, size_t data_bytes) {
  LaunchSpec launch;
  launch.kernel = json.at("kernel");
  read_sizes(json.at("grid"), launch.grid);
  read_sizes(json.at("block"), launch.block);
  launch.repeats = json.value("repeats", 1);
  for (const Json& b : json.at("buffers")) {
    BufferSpec buffer;
    buffer.bytes = b.at("bytes");
    if (b.contains("from") && !b.at("from").is_null()) buffer.from = b.at("from");
    buffer.fill = b.value("fill", uint8_t{0});
    buffer.read = b.value("read", false);
    if (buffer.from >= 0 && static_cast<size_t>(buffer.from) + buffer.bytes > data_bytes)
      throw InputError(launch.kernel + ": a buffer begins with more than there is data");
    launch.buffers.push_back(buffer);
  }
  for (const Json& a : json.at("arguments")) {
    if (a.contains("buffer")) {
      const size_t index = a.at("buffer");
      if (index >= launch.buffers.size())
        throw InputError(launch.kernel + ": an argument is buffer " + std::to_string(index) +
                         " of " + std::to_string(launch.buffers.size()));
      launch.arguments.emplace_back(LaunchSpec::Address{index});
    } else if (a.contains("u32")) {
      launch.arguments.emplace_back(a.at("u32").get<uint32_t>());
    } else {
      launch.arguments.emplace_back(a.at("u64").get<uint64_t>());
    }
  }
  return launch;
}

template <class T>
void append(std::vector<std::byte>& to, T value) {
  to.resize((to.size() + sizeof value - 1) / sizeof value * sizeof value);
  const size_t at = to.size();
  to.resize(at + sizeof value);
  std::memcpy(to.data() + at, &value, sizeof value);
}

}  // namespace

Job read_job(const std::string& path) {
  Job job;
  try {
    std::ifstream in(path);
    const Json json = Json::parse(in);
    job.object = json.at("object");
    if (json.contains("data")) job.data = read_bytes(json.at("data"));
    for (const Json& l : json.at("launches")) {
      job.launches.push_back(read_launch(l, job.data.size()));
    }
  } catch (const nlohmann::json::exception& error) {
    throw InputError(path + ": " + error.what());
  }
  return job;
}

std::vector<std::byte> pack(const LaunchSpec& launch, const std::vector<uint64_t>& addresses) {
  std::vector<std::byte> bytes;
  for (const auto& argument : launch.arguments) {
    if (const auto* address = std::get_if<LaunchSpec::Address>(&argument))
      append(bytes, addresses[address->buffer]);
    else if (const auto* word = std::get_if<uint32_t>(&argument))
      append(bytes, *word);
    else
      append(bytes, std::get<uint64_t>(argument));
  }
  bytes.resize((bytes.size() + 7) / 8 * 8);  // as tools/amdhsa declares the segment
  return bytes;
}

}  // namespace attn::probes
