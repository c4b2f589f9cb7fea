#include "plans.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <list>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>

namespace attn::python {
namespace {

constexpr size_t most_plans = 256, most_workspaces = 64;

template <class T>
void append(std::string* key, const T& value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}

// All of it is used with the GIL held alone. It outlives the interpreter: a driver may be gone by
// then.
struct State {
  int32_t threads = 0;  // num_threads(), 0 = not known yet
  // By backend, device, threads.
  std::map<std::tuple<int, int32_t, int32_t>, std::shared_ptr<context>> contexts;
  std::list<std::shared_ptr<Compiled>> plans;  // the last used one first
  std::unordered_map<std::string_view, std::list<std::shared_ptr<Compiled>>::iterator> by_key;
  std::list<Workspace> workspaces;  // that no run is using, the last used one first
  size_t hits = 0, misses = 0;
};
State* state = new State;
int times_forked = 0;
unsigned long main_thread = 0;
// What a signal's handler raised in this thread's call.
thread_local std::unique_ptr<nb::python_error> signalled;

// Python runs signals' handlers on its main thread only.
int32_t check_signals(void*) {
  if (PyThread_get_thread_ident() != main_thread) return 0;
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return 0;
  signalled = std::make_unique<nb::python_error>();
  return 1;
}

attn_context_options options_for(int32_t device, int32_t threads) {
  auto options = make<attn_context_options>();
  options.device = device;
  options.has_device = 1;
  options.cpu_threads = threads;
  options.interrupted = check_signals;
  return options;
}

template <class Problem>
std::shared_ptr<Compiled> find_or_make(const std::shared_ptr<context>& owner,
                                       const Problem& problem, const std::string& known) {
  if (const auto found = state->by_key.find(known); found != state->by_key.end()) {
    ++state->hits;
    state->plans.splice(state->plans.begin(), state->plans, found->second);
    return *found->second;
  }
  ++state->misses;
  auto make_plan = [&, key = known]() mutable {  // `known` may change without the GIL
    return std::make_shared<Compiled>(owner, plan(*owner, problem), std::move(key));
  };
  std::shared_ptr<Compiled> made;
  if (owner->threads() > 0) {
    made = make_plan();
  } else {
    nb::gil_scoped_release release;  // a module may be loaded
    made = make_plan();
  }
  const auto [at, is_new] = state->by_key.try_emplace(made->key, state->plans.end());
  if (!is_new) return *at->second;  // another thread's
  state->plans.push_front(made);
  at->second = state->plans.begin();
  if (state->plans.size() > most_plans) {
    state->by_key.erase(state->plans.back()->key);
    state->plans.pop_back();
  }
  return made;
}

// A plan of another operation, whose problem has `kernel` for its only pointer.
template <class Problem>
std::string simple_key(const char* what, const context& owner, const Problem& problem) {
  std::string key = what;
  append(&key, owner.get());
  append(&key, problem);
  return key;
}

}  // namespace

Compiled::Compiled(std::shared_ptr<context> context, plan plan, std::string name)
    : owner(std::move(context)), made(std::move(plan)), key(std::move(name)) {
  static std::atomic<uint64_t> plans{0};
  number = ++plans;
}

std::shared_ptr<context> context_for(nb::handle name, Device device, int32_t threads) {
  return context_for(text(name, "backend", "auto, reference, cpu, cuda, hip"), device, threads);
}

std::shared_ptr<context> context_for(const std::string& name, Device device, int32_t threads) {
  attn_backend backend = device.backend;
  if (name != "auto") {
    int b = ATTN_BACKEND_REFERENCE;
    while (b <= ATTN_BACKEND_HIP_EMU && name != attn_backend_string(attn_backend(b))) ++b;
    if (b > ATTN_BACKEND_HIP_EMU)
      refuse("backend is " + name + "; accepted: auto, reference, cpu, cuda, hip");
    backend = attn_backend(b);
    if (backend == ATTN_BACKEND_HIP_EMU)
      refuse(
          "backend is hip-emu; accepted from Python: auto, reference, cpu, cuda, hip (the emulator "
          "has "
          "memory of its own)");
    const bool fits = device.host()
                          ? backend == ATTN_BACKEND_REFERENCE || backend == ATTN_BACKEND_CPU
                          : backend == device.backend;
    if (!fits)
      refuse("backend is " + name + "; accepted for arrays in " + device.text() + ": auto, " +
             (device.host() ? "reference, cpu" : attn_backend_string(device.backend)));
  }
  if (!device.host())
    threads = 0;
  else if (threads == 0)
    threads = num_threads();
  auto& slot = state->contexts[{int(backend), device.index, threads}];
  if (slot) return slot;
  const attn_context_options options = options_for(device.index, threads);
  std::shared_ptr<context> made;
  std::exception_ptr failed;
  // A new thread has no current context of CUDA, so this takes the device's primary one, as
  // frameworks do, even where the caller's current one is another of this device.
  std::thread([&] {
    try {
      made = std::make_shared<context>(backend, &options);
    } catch (...) {
      failed = std::current_exception();
    }
  }).join();
  if (failed) std::rethrow_exception(failed);
  return slot = made;
}

int32_t num_threads() {
  if (state->threads == 0) {
    const attn_context_options options = options_for(0, 0);
    auto made = std::make_shared<context>(ATTN_BACKEND_CPU, &options);
    state->threads = made->threads();
    // A context that is there stays: plans were made from it.
    auto& slot = state->contexts[{int(ATTN_BACKEND_CPU), 0, state->threads}];
    if (!slot) slot = std::move(made);
  }
  return state->threads;
}

// What only the caches hold goes, and its threads with it.
void set_num_threads(int32_t threads) {
  if (threads < 0 || threads > 4096)
    refuse("threads is " + std::to_string(threads) + "; accepted: 1 to 4096, or 0 for the default");
  state->threads = threads;
  const auto of_host = [](const context& c) { return c.threads() > 0; };
  for (auto it = state->plans.begin(); it != state->plans.end();) {
    if (!of_host(*(*it)->owner)) {
      ++it;
      continue;
    }
    state->by_key.erase((*it)->key);
    it = state->plans.erase(it);
  }
  std::erase_if(state->workspaces, [&](const Workspace& w) { return of_host(*w.owner); });
  std::erase_if(state->contexts, [&](const auto& entry) {
    return entry.second && of_host(*entry.second) && entry.second.use_count() == 1;
  });
}

bool raise_of_signal() {
  if (!signalled) return false;
  std::exchange(signalled, nullptr)->restore();
  return true;
}

CacheCounts cache_counts() {
  size_t bytes = 0;
  for (const Workspace& w : state->workspaces) bytes += w.memory.bytes();
  return {state->plans.size(), state->hits, state->misses, state->workspaces.size(), bytes};
}

void cache_clear() {
  state->by_key.clear();
  state->plans.clear();
  state->workspaces.clear();
  state->hits = state->misses = 0;
}

void forget_everything() {
  const int32_t threads = state->threads;
  state = new State;
  state->threads = threads;
  ++times_forked;
  main_thread = PyThread_get_thread_ident();
}

void set_main_thread(unsigned long thread) {
  main_thread = thread;
}

int forks() {
  return times_forked;
}

const std::string& key_of(const context& owner, const attn_problem& problem) {
  static std::string& key = *new std::string;  // whose memory is kept from call to call
  attn_problem plain;
  std::memcpy(static_cast<void*>(&plain), &problem, sizeof plain);
  plain.segments = nullptr;
  plain.kernel = nullptr;
  key = "forward";
  append(&key, owner.get());
  append(&key, plain);
  key.append(reinterpret_cast<const char*>(problem.segments),
             size_t(problem.num_segments) * sizeof(attn_segment));
  if (problem.kernel) key += problem.kernel;
  return key;
}

std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_problem& problem) {
  return find_or_make(owner, problem, key_of(*owner, problem));
}
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_backward_problem& problem) {
  attn_backward_problem plain;
  std::memcpy(static_cast<void*>(&plain), &problem, sizeof plain);
  plain.forward = nullptr;
  std::string key = simple_key("backward", *owner, plain);
  key += key_of(*owner, *problem.forward);
  return find_or_make(owner, problem, std::move(key));
}
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_merge_problem& problem) {
  return find_or_make(owner, problem, simple_key("merge", *owner, problem));
}
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_quantize_problem& problem) {
  return find_or_make(owner, problem, simple_key("quantize", *owner, problem));
}
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_kv_append_problem& problem) {
  return find_or_make(owner, problem, simple_key("kv_append", *owner, problem));
}
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_kv_roll_problem& problem) {
  attn_kv_roll_problem plain;
  std::memcpy(static_cast<void*>(&plain), &problem, sizeof plain);
  plain.recent = plain.old = nullptr;
  std::string key = simple_key("kv_roll", *owner, plain);
  append(&key, *problem.recent);
  append(&key, *problem.old);
  return find_or_make(owner, problem, std::move(key));
}

Workspace take_workspace(const std::shared_ptr<context>& owner, void* stream) {
  auto& all = state->workspaces;
  for (auto it = all.begin(); it != all.end(); ++it) {
    if (it->owner != owner || it->stream != stream) continue;
    Workspace taken = std::move(*it);
    all.erase(it);
    return taken;
  }
  return {owner, stream, 0, buffer()};
}

void keep_workspace(Workspace workspace) {
  auto& all = state->workspaces;
  all.push_front(std::move(workspace));
  if (all.size() > most_workspaces) all.pop_back();
}

size_t stepped(size_t size, size_t least) {
  const size_t step = std::max(least, std::bit_floor(size) / 8);
  return (size + step - 1) / step * step;
}

}  // namespace attn::python
