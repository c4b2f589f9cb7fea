// libggml-attn.so: a backend that ggml loads at run time. It has one device, of the kind that
// accelerates some operations next to ggml's CPU backend and in its memory, and computes one
// operation there: attention.
#include <ggml-backend-impl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>

#include "attention.h"

namespace attn::ggml {
namespace {

std::atomic<std::int64_t> calls{0};

void log(ggml_log_level level, const std::string& text) {
  ggml_log_callback write = nullptr;
  void* user = nullptr;
  ggml_log_get(&write, &user);
  if (write) write(level, ("ggml-attn: " + text + "\n").c_str(), user);
}

// Whether ggml's CPU backend computes on the threads of the OpenMP runtime that this library uses.
bool openmp_is_ggmls() {
#if defined(_OPENMP) && defined(ATTN_GGML_REGISTRY)
  const ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
  const auto features = reinterpret_cast<ggml_backend_get_features_t>(
      cpu ? ggml_backend_reg_get_proc_address(cpu, "ggml_backend_get_features") : nullptr);
  for (auto* f = features ? features(cpu) : nullptr; f && f->name; ++f) {
    if (std::strcmp(f->name, "OPENMP") == 0) return true;
  }
#endif
  return false;
}

// Engines use one number of threads for prompts and another for tokens, by turns.
struct Backend {
  int threads = 0;
  std::map<int, Attention> attention;  // by threads
};
Backend& of(ggml_backend_t backend) {
  return *static_cast<Backend*>(backend->context);
}

void set_n_threads(ggml_backend_t backend, int threads) {
  of(backend).threads = threads;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  Backend& b = of(backend);
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* op = ggml_graph_node(graph, i);
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !(op->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;
    try {
      static const bool ggml_threads = openmp_is_ggmls();
      b.attention.try_emplace(b.threads, b.threads, ggml_threads).first->second.run(op);
      ++calls;
    } catch (const std::exception& e) {
      log(GGML_LOG_LEVEL_ERROR, std::string(op->name) + ": " + e.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

ggml_guid_t guid() {
  static ggml_guid id = {0x6c, 0x69, 0x62, 0x61, 0x74, 0x74, 0x6e, 0x2d,
                         0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x63, 0x70, 0x75};
  return &id;
}

const char* name_of_device(ggml_backend_dev_t) {
  return "ATTN";
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char*) {
  ggml_backend_i functions{};
  functions.get_name = [](ggml_backend_t) { return "ATTN"; };
  functions.free = [](ggml_backend_t backend) {
    delete &of(backend);
    delete backend;
  };
  functions.graph_compute = compute;
  return new ggml_backend{guid(), functions, device, new Backend};
}

// Those that compute nothing belong to the graphs that a device is given.
bool supports(ggml_backend_dev_t, const ggml_tensor* op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    case GGML_OP_FLASH_ATTN_EXT:
      return serves(op) && (!is_small(op) || std::getenv("GGML_ATTN_ALL"));
    default:
      return false;
  }
}

ggml_backend_device make_device(ggml_backend_reg_t registry) {
  ggml_backend_device device{};
  device.reg = registry;
  auto& f = device.iface;
  f.get_name = name_of_device;
  f.get_description = [](ggml_backend_dev_t) { return "libattn, attention on the CPU"; };
  f.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
    *free = *total = 0;  // it has none of its own
  };
  f.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
  f.get_props = [](ggml_backend_dev_t d, ggml_backend_dev_props* props) {
    *props = {};
    props->name = d->iface.get_name(d);
    props->description = d->iface.get_description(d);
    props->type = d->iface.get_type(d);
    props->caps.buffer_from_host_ptr = true;
  };
  f.init_backend = make_backend;
  f.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
  f.buffer_from_host_ptr = [](ggml_backend_dev_t, void* memory, std::size_t bytes, std::size_t) {
    return ggml_backend_cpu_buffer_from_ptr(memory, bytes);
  };
  f.supports_op = supports;
  f.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return ggml_backend_buft_is_host(type);
  };
  return device;
}

ggml_backend_reg make_registry() {
  ggml_backend_reg registry{};
  registry.api_version = GGML_BACKEND_API_VERSION;
  auto& f = registry.iface;
  f.get_name = [](ggml_backend_reg_t) { return "ATTN"; };
  f.get_device_count = [](ggml_backend_reg_t) { return std::size_t{1}; };
  f.get_device = [](ggml_backend_reg_t r, std::size_t) {
    static ggml_backend_device device = make_device(r);
    return &device;
  };
  f.get_proc_address = [](ggml_backend_reg_t, const char* name) -> void* {
    const std::string function = name;
    if (function == "ggml_backend_set_n_threads") return reinterpret_cast<void*>(set_n_threads);
    // int64_t (void): the operations that this backend has computed in this process.
    if (function == "ggml_backend_attn_calls")
      return reinterpret_cast<void*>(+[]() -> std::int64_t { return calls; });
    return nullptr;
  };
  return registry;
}

}  // namespace
}  // namespace attn::ggml

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  static ggml_backend_reg registry = attn::ggml::make_registry();
  return &registry;
}
