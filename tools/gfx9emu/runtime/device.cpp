#include "gfx9emu/runtime/device.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <nlohmann/json.hpp>

namespace gfx9emu::runtime {

thread_local LastCall last_call;

namespace {

struct ErrorText {
  Error code;
  const char *name, *text;
};
constexpr ErrorText error_texts[] = {
    {success, "hipSuccess", "no error"},
    {invalid_value, "hipErrorInvalidValue", "invalid argument"},
    {out_of_memory, "hipErrorOutOfMemory", "out of memory"},
    {invalid_configuration, "hipErrorInvalidConfiguration", "invalid launch configuration"},
    {invalid_device_function, "hipErrorInvalidDeviceFunction", "invalid device function"},
    {no_device, "hipErrorNoDevice", "no device"},
    {invalid_device, "hipErrorInvalidDevice", "invalid device ordinal"},
    {invalid_image, "hipErrorInvalidImage", "not a code object"},
    {no_binary_for_gpu, "hipErrorNoBinaryForGpu", "no code for this device"},
    {file_not_found, "hipErrorFileNotFound", "file not found"},
    {invalid_handle, "hipErrorInvalidHandle", "invalid handle"},
    {not_found, "hipErrorNotFound", "symbol not found"},
    {not_ready, "hipErrorNotReady", "not ready"},
    {launch_failure, "hipErrorLaunchFailure", "the kernel failed"},
    {not_supported, "hipErrorNotSupported", "not supported"},
};

// As much of the text as there is room for.
template <size_t capacity>
void keep(const std::string& text, char (&to)[capacity]) {
  const size_t bytes = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), bytes);
  to[bytes] = 0;
}

uint64_t number(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The offsets of Elf64_Ehdr, Elf64_Phdr and Elf64_Shdr that say where a file ends.
constexpr size_t elf_header = 64;
constexpr uint64_t max_image = uint64_t{1} << 30;

// The size of a file that only an address is given of. 0: no ELF file.
uint64_t elf_bytes(const std::byte* file) {
  if (std::memcmp(file, "\177ELF\2\1", 6) != 0) return 0;
  const auto segments = read<uint64_t>(file + 32), sections = read<uint64_t>(file + 40);
  const unsigned segment_bytes = read<uint16_t>(file + 54),
                 num_segments = read<uint16_t>(file + 56);
  const unsigned section_bytes = read<uint16_t>(file + 58),
                 num_sections = read<uint16_t>(file + 60);
  uint64_t end = elf_header;
  const auto reach = [&](uint64_t from, uint64_t bytes) {
    end = std::max(end, from > max_image || bytes > max_image ? max_image : from + bytes);
  };
  reach(segments, uint64_t{segment_bytes} * num_segments);
  reach(sections, uint64_t{section_bytes} * num_sections);
  if (end >= max_image) return 0;
  if (segment_bytes == 56) {
    for (unsigned i = 0; i < num_segments; ++i) {
      const std::byte* p = file + segments + i * 56;
      reach(read<uint64_t>(p + 8), read<uint64_t>(p + 32));
    }
  }
  return end < max_image ? end : 0;
}

bool for_another_device(const std::vector<std::byte>& file, Arch arch) {
  constexpr unsigned em_amdgpu = 224;
  return file.size() >= elf_header && read<uint16_t>(file.data() + 18) == em_amdgpu &&
         (read<uint32_t>(file.data() + 48) & 0xff) != facts_of(arch).mach;
}

std::string text(const Dim3& d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

// Where the arguments that the caller gives end: hidden ones follow.
uint32_t explicit_bytes(const Kernel& kernel) {
  uint32_t end = 0;
  for (const KernelArg& arg : kernel.args)
    if (!arg.value_kind.starts_with("hidden_")) end = std::max(end, arg.offset + arg.size);
  return end;
}

std::string counters_json(const Kernel& kernel, const LaunchShape& shape, const Report& report) {
  const Counters& c = report.counters;
  nlohmann::ordered_json json = {{"kernel", kernel.name},
                                 {"grid", text(shape.grid)},
                                 {"block", text(shape.block)},
                                 {"emulated", true},
                                 {"total", c.total()}};
  for (int i = 0; i < class_count; ++i)
    if (c.instructions[size_t(i)] != 0)
      json["instructions"][class_name(Class(i))] = c.instructions[size_t(i)];
  json["mfma_passes"] = c.mfma_passes;
  json["wait_states"] = c.wait_states;
  json["lds_bytes"] = c.lds_bytes;
  json["lds_conflict_cycles"] = c.lds_conflict_cycles;
  json["global_read_bytes"] = c.global_read_bytes;
  json["global_written_bytes"] = c.global_written_bytes;
  json["barriers"] = c.barriers;
  return json.dump();
}

}  // namespace

const char* error_name(int code) {
  for (const ErrorText& e : error_texts)
    if (e.code == code) return e.name;
  return "hipErrorUnknown";
}
const char* error_text(int code) {
  for (const ErrorText& e : error_texts)
    if (e.code == code) return e.text;
  return "unknown error";
}

Error fail(Error code, const std::string& sentence) {
  keep(sentence, last_call.fault);
  return code;
}

Device& device() {
  static Device& only = *new Device;
  return only;
}

// ---- memory ------------------------------------------------------------------------------------

Error Device::allocate(void** out, size_t bytes) {
  if (!out) return fail(invalid_value, "the address of the pointer is null");
  if (bytes == 0) {
    *out = nullptr;
    return success;
  }
  const size_t in_use = memory.bytes_in_use();
  const uint64_t address =
      bytes <= memory_bytes - std::min(in_use, memory_bytes) ? memory.allocate(bytes) : 0;
  if (address == 0)
    return fail(out_of_memory,
                std::to_string(bytes) + " bytes asked for, " + std::to_string(in_use) + " in use");
  *out = reinterpret_cast<void*>(address);
  return success;
}

Error Device::allocate_host(void** out, size_t bytes) {
  if (!out) return fail(invalid_value, "the address of the pointer is null");
  if (bytes == 0) {
    *out = nullptr;
    return success;
  }
  std::unique_ptr<std::byte[]> fresh(new (std::nothrow) std::byte[bytes]());
  if (!fresh) return fail(out_of_memory, std::to_string(bytes) + " bytes of host memory");
  if (std::string error = memory.map_host(fresh.get(), bytes, "hipHostMalloc"); !error.empty())
    return fail(out_of_memory, error);
  std::lock_guard lock(mutex_);
  *out = fresh.get();
  host_memory_.emplace(*out, std::move(fresh));
  return success;
}

Error Device::free(void* address) {
  if (!address) return success;
  {
    std::lock_guard lock(mutex_);
    if (host_memory_.count(address))
      return fail(invalid_value, "memory of hipHostMalloc is freed by hipHostFree");
  }
  std::string error = memory.free(number(address));
  return error.empty() ? success : fail(invalid_value, error);
}

Error Device::free_host(void* address) {
  if (!address) return success;
  std::lock_guard lock(mutex_);
  const auto found = host_memory_.find(address);
  if (found == host_memory_.end())
    return fail(invalid_value, "hipHostMalloc did not give this memory out");
  (void)memory.free(number(address));
  host_memory_.erase(found);
  return success;
}

Error Device::copy(void* to, const void* from, size_t bytes, bool to_host, bool from_host) {
  if (bytes == 0) return success;
  if (!to || !from) return fail(invalid_value, to ? "the source is null" : "the target is null");
  std::string error;
  if (to_host && from_host) {
    std::memmove(to, from, bytes);
  } else if (to_host) {
    error = memory.read(number(from), {static_cast<std::byte*>(to), bytes});
  } else if (from_host) {
    error = memory.write(number(to), {static_cast<const std::byte*>(from), bytes});
  } else {
    error = memory.copy(number(to), number(from), bytes);
  }
  return error.empty() ? success : fail(invalid_value, error);
}

Error Device::copy_by_address(void* to, const void* from, size_t bytes) {
  return copy(to, from, bytes, !memory.find(number(to)), !memory.find(number(from)));
}

Error Device::fill(void* to, const void* pattern, size_t pattern_bytes, size_t count) {
  if (count == 0) return success;
  if (count > memory_bytes / pattern_bytes)
    return fail(invalid_value, "more than the device's memory is to be set");
  std::string error;
  if (pattern_bytes == 1) {
    error = memory.fill(number(to), *static_cast<const uint8_t*>(pattern), count);
  } else {
    std::vector<std::byte> bytes(pattern_bytes * count);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(&bytes[i * pattern_bytes], pattern, pattern_bytes);
    error = memory.write(number(to), bytes);
  }
  return error.empty() ? success : fail(invalid_value, error);
}

// ---- modules -----------------------------------------------------------------------------------

Error Device::load_bytes(std::vector<std::byte> file, void** out) {
  auto module = std::make_shared<Module>();
  module->file = std::move(file);
  std::string error;
  module->object = CodeObject::load(module->file, &memory, &error);
  if (!module->object)
    return fail(for_another_device(module->file, arch()) ? no_binary_for_gpu : invalid_image,
                error);
  if (module->object->arch() != arch())
    return fail(no_binary_for_gpu, std::string("code object: made for ") +
                                       facts_of(module->object->arch()).name + ", this device is " +
                                       facts_of(arch()).name);
  // This device is sramecc+:xnack-.
  if (module->object->xnack() == Setting::On)
    return fail(no_binary_for_gpu, "code object: needs xnack on, this device has it off");
  if (module->object->sramecc() == Setting::Off)
    return fail(no_binary_for_gpu, "code object: needs sramecc off, this device has it on");
  std::lock_guard lock(mutex_);
  *out = module.get();
  modules_.emplace(*out, std::move(module));
  return success;
}

Error Device::load(const void* image, void** out) {
  if (!image || !out)
    return fail(invalid_value, image ? "the module is null" : "the image is null");
  const auto* bytes = static_cast<const std::byte*>(image);
  const uint64_t size = elf_bytes(bytes);
  if (size == 0) return fail(invalid_image, "the image is no 64-bit little-endian ELF file");
  return load_bytes({bytes, bytes + size}, out);
}

Error Device::load_file(const char* path, void** out) {
  if (!path || !out) return fail(invalid_value, path ? "the module is null" : "the path is null");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return fail(file_not_found, std::string(path) + ": " + std::strerror(errno));
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (stream.bad()) return fail(file_not_found, std::string(path) + ": cannot be read");
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  return load_bytes({bytes, bytes + text.size()}, out);
}

Error Device::unload(void* module) {
  std::lock_guard lock(mutex_);
  if (modules_.erase(module) == 0)
    return fail(invalid_handle, "no module with this handle is loaded");
  std::erase_if(functions_, [&](const auto& f) { return f.second->module.get() == module; });
  std::erase_if(functions_by_name_, [&](const auto& f) { return f.first.first == module; });
  return success;
}

Error Device::function(void* module, const char* name, void** out) {
  if (!name || !out) return fail(invalid_value, name ? "the function is null" : "the name is null");
  std::lock_guard lock(mutex_);
  const auto found = modules_.find(module);
  if (found == modules_.end()) return fail(invalid_handle, "no module with this handle is loaded");
  void*& known = functions_by_name_[{module, name}];
  if (!known) {
    auto function = std::make_shared<Function>();
    function->module = found->second;
    function->kernel = found->second->object->kernel(name);
    if (!function->kernel) {
      std::string names;
      for (const Kernel& k : found->second->object->kernels())
        names += (names.empty() ? "" : ", ") + k.name;
      functions_by_name_.erase({module, name});
      return fail(not_found, std::string("the code object has no kernel ") + name + ", only " +
                                 (names.empty() ? "none" : names));
    }
    known = function.get();
    functions_.emplace(known, std::move(function));
  }
  *out = known;
  return success;
}

Error Device::variable(void* module, const char* name, void** address, size_t* bytes) {
  if (!name) return fail(invalid_value, "the name is null");
  std::lock_guard lock(mutex_);
  const auto found = modules_.find(module);
  if (found == modules_.end()) return fail(invalid_handle, "no module with this handle is loaded");
  const CodeObject& object = *found->second->object;
  for (const Symbol& symbol : object.variables()) {
    if (symbol.name != name) continue;
    if (address) *address = reinterpret_cast<void*>(object.address() + symbol.offset);
    if (bytes) *bytes = symbol.bytes;
    return success;
  }
  return fail(not_found, std::string("the code object has no variable ") + name);
}

// ---- launches ----------------------------------------------------------------------------------

namespace {

// HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
Error read_extra(void** extra, std::vector<std::byte>* kernarg) {
  const std::byte* buffer = nullptr;
  const size_t* size = nullptr;
  for (; number(*extra) != 3; extra += 2) {
    if (number(*extra) == 1)
      buffer = static_cast<const std::byte*>(extra[1]);
    else if (number(*extra) == 2)
      size = static_cast<const size_t*>(extra[1]);
    else
      return fail(invalid_value, "extra: key " + std::to_string(number(*extra)) +
                                     "; accepted: buffer pointer (1), buffer size (2), end (3)");
  }
  if (!buffer || !size) return fail(invalid_value, "extra: a buffer pointer and a size are needed");
  kernarg->assign(buffer, buffer + *size);
  return success;
}

}  // namespace

Error Device::launch(void* handle, const LaunchShape& shape, void** parameters, void** extra) {
  std::shared_ptr<Function> function;
  Options options;
  {
    std::lock_guard lock(mutex_);
    const auto found = functions_.find(handle);
    if (found == functions_.end())
      return fail(invalid_handle, "no function with this handle is loaded");
    function = found->second;
    options = options_;
  }
  const Kernel& kernel = *function->kernel;
  const uint32_t given = explicit_bytes(kernel);

  std::vector<std::byte> kernarg;
  if (extra) {
    if (parameters) return fail(invalid_value, "both parameters and extra are given");
    if (const Error error = read_extra(extra, &kernarg); error != success) return error;
    // As HIP does: what lies behind the arguments is not looked at.
    if (kernarg.size() < given)
      return fail(invalid_value, kernel.name + ": the kernarg buffer has " +
                                     std::to_string(kernarg.size()) + " bytes; its metadata says " +
                                     std::to_string(given));
  } else {
    kernarg.resize(given);
    size_t index = 0;
    for (const KernelArg& arg : kernel.args) {
      if (arg.value_kind.starts_with("hidden_")) continue;
      if (!parameters || !parameters[index])
        return fail(invalid_value, kernel.name + ": argument " + std::to_string(index) + ", " +
                                       arg.name + ", is missing");
      std::memcpy(&kernarg[arg.offset], parameters[index++], arg.size);
    }
  }

  const auto bad_shape = [&](const std::string& what) {
    return fail(invalid_configuration, kernel.name + ": grid " + text(shape.grid) + ", block " +
                                           text(shape.block) + ": " + what);
  };
  const uint64_t threads = uint64_t{shape.block.x} * shape.block.y * shape.block.z;
  if (threads == 0 || shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0)
    return bad_shape("a dimension is 0");
  if (threads > std::min(max_threads, kernel.max_workgroup_size))
    return bad_shape("a block has at most " +
                     std::to_string(std::min(max_threads, kernel.max_workgroup_size)) + " threads");
  if (shape.grid.y > max_grid_yz || shape.grid.z > max_grid_yz ||
      uint64_t{shape.grid.x} * shape.block.x >= uint64_t{1} << 32)
    return bad_shape("accepted: less than 2^32 threads along x, 2^16 blocks along y and z");

  const Report report =
      gfx9emu::launch(memory, kernel, shape.grid, shape.block, kernarg, shape.dynamic_lds, options);
  keep(counters_json(kernel, shape, report), last_call.counters);
  if (report.ok()) return success;
  const auto first = std::find_if(report.faults.begin(), report.faults.end(),
                                  [](const Fault& f) { return !f.warning; });
  const auto errors = std::count_if(report.faults.begin(), report.faults.end(),
                                    [](const Fault& f) { return !f.warning; });
  std::string sentence = first->to_string();
  if (errors > 1) sentence += " (and " + std::to_string(errors - 1) + " more)";
  return fail(first->kind == FaultKind::BadLaunch ? invalid_configuration : launch_failure,
              sentence);
}

void Device::configure(const attn_emu_options& o) {
  Options options;
  options.checks = o.checks_off == 0;
  options.hazards = o.hazards_off == 0;
  options.memory_model = o.memory_model_off == 0;
  options.level = o.level == 1 ? Level::Isa : Level::Strict;
  options.seed = o.seed;
  if (o.instruction_budget != 0) options.instruction_budget = o.instruction_budget;
  options.threads = o.threads;
  std::lock_guard lock(mutex_);
  options_ = options;
  compute_units_ = o.compute_units;
  gfx_ = o.gfx;
}

int Device::compute_units() {
  // MI355X, MI300X; or another number from 1 on, for programs that have no other way to say it.
  static const int told = [] {
    const char* text = std::getenv("ATTN_EMU_COMPUTE_UNITS");
    return text ? std::atoi(text) : 0;
  }();
  const int usual = arch() == Arch::Gfx950 ? 256 : 304;
  std::lock_guard lock(mutex_);
  return compute_units_ > 0 ? compute_units_ : told > 0 ? told : usual;
}

Arch Device::arch() {
  static const int usual = [] {
    const char* text = std::getenv("ATTN_EMU_ARCH");
    return text && std::string_view(text) == "gfx950" ? 950 : 942;
  }();
  std::lock_guard lock(mutex_);
  return (gfx_ != 0 ? gfx_ : usual) == 950 ? Arch::Gfx950 : Arch::Gfx942;
}

// ---- streams and events ------------------------------------------------------------------------

Error Device::create_stream(void** stream) {
  if (!stream) return fail(invalid_value, "the stream is null");
  std::lock_guard lock(mutex_);
  auto fresh = std::make_unique<Stream>();
  *stream = fresh.get();
  streams_.emplace(*stream, std::move(fresh));
  return success;
}

Error Device::destroy_stream(void* stream) {
  std::lock_guard lock(mutex_);
  return streams_.erase(stream) ? success : fail(invalid_handle, "no stream with this handle");
}

Error Device::check_stream(void* stream) {
  // hipStreamLegacy and hipStreamPerThread are 1 and 2.
  if (number(stream) <= 2) return success;
  std::lock_guard lock(mutex_);
  return streams_.count(stream) ? success : fail(invalid_handle, "no stream with this handle");
}

Error Device::create_event(void** event) {
  if (!event) return fail(invalid_value, "the event is null");
  std::lock_guard lock(mutex_);
  auto fresh = std::make_unique<Event>();
  *event = fresh.get();
  events_.emplace(*event, std::move(fresh));
  return success;
}

Error Device::destroy_event(void* event) {
  std::lock_guard lock(mutex_);
  return events_.erase(event) ? success : fail(invalid_handle, "no event with this handle");
}

Error Device::record(void* event, void* stream) {
  if (const Error error = check_stream(stream); error != success) return error;
  std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return fail(invalid_handle, "no event with this handle");
  *found->second = {std::chrono::steady_clock::now(), true};
  return success;
}

Error Device::check_event(void* event, bool recorded) {
  std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return fail(invalid_handle, "no event with this handle");
  if (recorded && !found->second->recorded)
    return fail(invalid_handle, "the event was not recorded");
  return success;
}

Error Device::elapsed(float* milliseconds, void* start, void* stop) {
  for (void* event : {start, stop})
    if (const Error error = check_event(event, true); error != success) return error;
  if (!milliseconds) return fail(invalid_value, "the time is null");
  std::lock_guard lock(mutex_);
  using Milliseconds = std::chrono::duration<float, std::milli>;
  *milliseconds = Milliseconds(events_[stop]->time - events_[start]->time).count();
  return success;
}

}  // namespace gfx9emu::runtime
