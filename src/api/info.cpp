// Texts about the library: attn_info and attn_explain, as JSON.
#include <algorithm>
#include <cstring>

#include "api/error.h"
#include "api/handles.h"
#include "api/json.h"
#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "plan/automatic.h"
#include "plan/composition.h"
#include "problem/rules.h"

using namespace attn;

const char* attn_version(void) {
#define ATTN_TEXT(x) #x
#define ATTN_VERSION_TEXT(a, b, c) ATTN_TEXT(a) "." ATTN_TEXT(b) "." ATTN_TEXT(c)
  return ATTN_VERSION_TEXT(ATTN_VERSION_MAJOR, ATTN_VERSION_MINOR, ATTN_VERSION_PATCH);
}

const attn_dtype_properties* attn_dtype_info(attn_dtype type) {
  const TypeInfo& info = type_info(type);
  return info.type == ATTN_DTYPE_NONE ? nullptr : &info;
}

namespace {

constexpr const char* kind_names[] = {"", "float", "fp8", "ggml", "codes", "cache"};

Status write_text(const Json& value, char* text, size_t capacity, size_t* size) {
  if (!text && capacity > 0)
    return invalid("text is NULL with capacity ", capacity, "; accepted: capacity 0");
  if (size) *size = value.text.size() + 1;
  if (capacity > 0) {
    const size_t n = std::min(value.text.size(), capacity - 1);
    std::memcpy(text, value.text.data(), n);
    text[n] = 0;
  }
  return {};
}

// Kernels that this build has code of for a device.
Json kernels_of(attn_backend backend, const DeviceInfo& device) {
  const Machine machine{.backend = backend, .device = &device};
  JsonList list;
  for (const Kernel& k : catalog())
    if (k.backend == machine.row_backend() && absent(k, machine).empty()) list.push_back(k.name);
  return list;
}

Json devices_json(attn_backend backend, const std::vector<DeviceInfo>& devices) {
  JsonList list;
  for (const DeviceInfo& d : devices) {
    const std::string passed =
        backend == ATTN_BACKEND_HIP_EMU ? "auto never takes the emulator" : passed_by(backend, d);
    list.push_back(JsonObject{{"device", d.ordinal},
                              {"name", d.name},
                              {"arch", d.arch},
                              {"multiprocessors", d.multiprocessors},
                              {"memory_bytes", d.memory_bytes},
                              {"shared_bytes_max", d.shared_bytes_max},
                              {"driver_version", d.driver_version},
                              {"passed_by", passed},
                              {"kernels", kernels_of(backend, d)}});
  }
  return list;
}

Json host_backend(attn_backend backend) {
  JsonList isas;
  for (const Kernel& k : catalog())
    if (k.backend == backend && k.op == Op::forward && k.host && k.host->runs_here())
      isas.push_back(k.host->isa);
  return JsonObject{
      {"name", attn_backend_string(backend)}, {"available", true}, {"reason", ""}, {"isa", isas}};
}

Json device_backend(attn_backend backend, const Status& status,
                    const std::vector<DeviceInfo>& devices) {
  JsonObject row = {
      {"name", attn_backend_string(backend)}, {"available", status.ok()}, {"reason", status.text}};
  if (backend == ATTN_BACKEND_HIP_EMU) row.emplace_back("emulated", true);
  row.emplace_back("devices", devices_json(backend, devices));
  return row;
}

Json type_list(uint32_t types) {
  JsonList list;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t)
    if (types & type_bit(attn_dtype(t))) list.push_back(dtype_name(attn_dtype(t)));
  return list;
}

// The table of types.
Json types_json() {
  JsonList list;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t) {
    const TypeInfo& type = type_info(attn_dtype(t));
    list.push_back(JsonObject{{"name", type.name},
                              {"kind", kind_names[type.kind]},
                              {"block_elements", type.block_elements},
                              {"block_bytes", type.block_bytes},
                              {"has_scales", type.has_scales != 0},
                              {"output_only", type.output_only != 0},
                              {"scale_bytes", type.scale_bytes},
                              {"scale_elements", type.scale_elements}});
  }
  return list;
}

JsonList flag_names_of(uint32_t flags) {
  JsonList list;
  for (uint32_t bit = 1; bit != 0; bit <<= 1)
    if (const char* name = flag_name(attn_flag(flags & bit)); *name) list.push_back(name);
  return list;
}

// Flags and features, in the words in which kernels decline.
Json taken_names(const Limits& limits) {
  JsonList list = flag_names_of(limits.flags);
  for (uint32_t bit = 1; bit < feature_all; bit <<= 1)
    if (limits.features & feature_all & bit) list.push_back(feature_name(Feature(bit)));
  return list;
}

Json sizes_json(const Sizes& sizes) {
  JsonObject object = {{"multiple", sizes.multiple}};
  if (sizes.max != INT64_MAX) object.emplace_back("max", sizes.max);
  return object;
}

Json kernel_json(const Kernel& k) {
  JsonList archs;
  bool runs = false;
  if (k.host) {
    archs.push_back(k.host->isa);
    runs = k.host->runs_here();
  }
  for (const Image& image : images())
    if (std::strcmp(image.name, image_of(k)) == 0) archs.push_back(image.arch);
  JsonObject row = {{"name", k.name},
                    {"op", op_name(k.op)},
                    {"backend", attn_backend_string(k.backend)},
                    {"arch", archs},
                    {"in_build", k.host || !archs.empty()},
                    {"in", type_list(k.limits.in_types)},
                    {"out", type_list(k.limits.out_types)}};
  const bool attends = k.op == Op::forward || k.op == Op::backward;
  if (attends || k.op == Op::kv_append || k.op == Op::kv_roll)
    row.emplace_back("kv", type_list(k.limits.kv_types));
  if (attends) {
    row.emplace_back("head_dim", sizes_json(k.limits.head_dim));
    row.emplace_back("head_dim_v", sizes_json(k.limits.head_dim_v));
    row.emplace_back("takes", taken_names(k.limits));
    row.emplace_back("demands", flag_names_of(k.limits.demands));
  }
  if (k.host) row.emplace_back("runs_here", runs);
  return row;
}

}  // namespace

attn_status attn_info(char* text, size_t capacity, size_t* size) {
  return guarded([&]() -> Status {
    JsonList backends = {host_backend(ATTN_BACKEND_REFERENCE), host_backend(ATTN_BACKEND_CPU)};
    std::vector<Shown> shown;
    for (const attn_backend backend : automatic_backends) {
      const Shown& s = shown.emplace_back(show_devices(backend));
      backends.push_back(device_backend(backend, s.status, s.devices));
    }
    const Automatic taken = automatic(shown, {});
    std::vector<DeviceInfo> devices;
    const Status emulator = list_hip(nullptr, true, &devices);
    backends.push_back(device_backend(ATTN_BACKEND_HIP_EMU, emulator, devices));
    JsonList kernels;
    for (const Kernel& k : catalog()) kernels.push_back(kernel_json(k));
    return write_text(
        JsonObject{{"version", attn_version()},
                   {"backends", backends},
                   {"auto", JsonObject{{"backend", attn_backend_string(taken.backend)},
                                       {"device", taken.device}}},
                   {"types", types_json()},
                   {"kernels", kernels}},
        text, capacity, size);
  });
}

namespace {

// What a composed kernel launches, in this order; what it launches again, once.
JsonList parts_json(const Choice& choice) {
  std::vector<std::pair<std::string, std::string>> seen;
  JsonList parts;
  const auto add = [&](const char* kernel, const char* computes, const Choice* of) {
    const std::pair<std::string, std::string> names{kernel, computes};
    if (std::find(seen.begin(), seen.end(), names) != seen.end()) return;
    seen.push_back(names);
    JsonObject part = {{"kernel", kernel}, {"computes", computes}};
    if (of && of->composition) part.emplace_back("parts", parts_json(*of));
    parts.push_back(part);
  };
  for (const Stage& stage : choice.composition->stages) {
    if (const auto* own = std::get_if<RunStep>(&stage)) {
      add(choice.recipe.steps[own->step].image, own->computes, nullptr);
      continue;
    }
    const auto* forward = std::get_if<RunForward>(&stage);
    const Part& part =
        choice.composition->parts[forward ? forward->part : std::get<RunMerge>(stage).part];
    add(part.choice.kernel->name, part.computes, &part.choice);
  }
  return parts;
}

template <class P, class In>
Status explain(const Machine& machine, Status (*make)(const In*, P*), const In* in, char* text,
               size_t capacity, size_t* size) {
  P problem;
  ATTN_TRY(make(in, &problem));
  Choice choice;
  std::vector<Declined> declined;
  const Status status = choose(problem, machine, &choice, &declined);
  if (!status.ok() && status.code != ATTN_UNSUPPORTED) return status;
  JsonList list;
  for (const Declined& d : declined)
    list.push_back(JsonObject{{"kernel", d.kernel->name}, {"reason", d.reason}});
  JsonObject answer = {{"kernel", choice.kernel ? Json(choice.kernel->name) : Json(nullptr)},
                       {"backend", attn_backend_string(machine.backend)}};
  if (choice.kernel) {
    answer.emplace_back("workspace", choice.recipe.workspace);
    if (choice.composition) answer.emplace_back("parts", parts_json(choice));
  } else {
    answer.emplace_back("reason", status.text);
  }
  answer.emplace_back("declined", list);
  return write_text(answer, text, capacity, size);
}

// The backend whose kernels an architecture runs.
Status backend_of(const std::string& arch, attn_backend* backend) {
  const bool cuda = arch_runs_on("compute_80", arch), gfx = arch.starts_with("gfx");
  if (!cuda && !gfx)
    return invalid("device.arch is \"", arch, "\"; accepted: sm_80 and later, gfx942, gfx950");
  *backend = cuda ? ATTN_BACKEND_CUDA : ATTN_BACKEND_HIP;
  return {};
}

Status describe(const attn_device* in, DeviceInfo* device) {
  attn_device d;
  ATTN_TRY(copy_versioned("device", in, &d));
  if (!d.arch) return invalid("device.arch is NULL; accepted: sm_80 and later, gfx942, gfx950");
  ATTN_TRY(in_range("device.multiprocessors", d.multiprocessors, 1, max_extent));
  ATTN_TRY(in_range("device.shared_bytes_max", d.shared_bytes_max, 1, max_extent));
  ATTN_TRY(in_range("device.l2_bytes", d.l2_bytes, 0, max_offset));
  device->name = "the described device";
  device->arch = d.arch;
  device->multiprocessors = d.multiprocessors;
  device->shared_bytes_max = d.shared_bytes_max;
  device->l2_bytes = d.l2_bytes;
  device->tensor_maps = arch_runs_on("compute_90", device->arch);
  return {};
}

}  // namespace

attn_status attn_explain(attn_context* context, const attn_problem* problem, char* text,
                         size_t capacity, size_t* size) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    return explain(context->context->machine(), make_problem, problem, text, capacity, size);
  });
}

attn_status attn_explain_backward(attn_context* context, const attn_backward_problem* problem,
                                  char* text, size_t capacity, size_t* size) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    return explain(context->context->machine(), make_backward_problem, problem, text, capacity,
                   size);
  });
}

attn_status attn_explain_device(const attn_device* in, const attn_problem* problem, char* text,
                                size_t capacity, size_t* size) {
  return guarded([&]() -> Status {
    DeviceInfo device;
    Machine machine;
    ATTN_TRY(describe(in, &device));
    ATTN_TRY(backend_of(device.arch, &machine.backend));
    machine.device = &device;
    return explain(machine, make_problem, problem, text, capacity, size);
  });
}
