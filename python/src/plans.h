// What is kept between calls: contexts, plans and workspaces.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "arrays.h"

namespace attn::python {

// The context of a device, made on first use and kept. `backend` is "auto" or a name of attn.h that
// `device` serves; `threads` are those of a host backend, 0 = num_threads().
std::shared_ptr<context> context_for(nb::handle backend, Device device, int32_t threads = 0);
std::shared_ptr<context> context_for(const std::string& backend, Device device,
                                     int32_t threads = 0);
// Threads of calls on the host that say nothing else. 0 sets the library's default.
int32_t num_threads();
void set_num_threads(int32_t threads);
// Whether a signal's handler has raised in this thread's call, which ended for it; that is Python's
// error then.
bool raise_of_signal();

// A plan with its key.
struct Compiled {
  Compiled(std::shared_ptr<context> context, plan made, std::string key);
  std::shared_ptr<context> owner;
  plan made;
  std::string key;
  uint64_t number;  // no other plan of this process has or had it
};

// Plans by key, the longest unused one dropped when there are too many. Workspaces that no run is
// using belong to a stream, whose plans share them.
struct CacheCounts {
  size_t plans, hits, misses, workspaces, workspace_bytes;
};
CacheCounts cache_counts();
void cache_clear();
// In the child of a fork: threads and devices of the parent are not there.
void forget_everything();
int forks();
void set_main_thread(unsigned long thread);  // by Python's number

// The bytes that tell one problem from another, until the next call.
const std::string& key_of(const context& owner, const attn_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_backward_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_merge_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_quantize_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_kv_append_problem& problem);
std::shared_ptr<Compiled> cached(const std::shared_ptr<context>& owner,
                                 const attn_kv_roll_problem& problem);

// Memory of a stream for the plans that run in it, one after the other.
struct Workspace {
  std::shared_ptr<context> owner;
  void* stream = nullptr;
  uint64_t plan = 0;  // whose runs it is initialised for
  buffer memory;
};
// The stream's, which the caller then has alone; one without memory if there is none.
Workspace take_workspace(const std::shared_ptr<context>& owner, void* stream);
void keep_workspace(Workspace workspace);
// Eight steps from a power of two to the next, each of `least` or more, so that growing sizes
// seldom need new memory or a new plan.
size_t stepped(size_t size, size_t least);

}  // namespace attn::python
