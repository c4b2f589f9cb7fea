// A pool of threads that sleep between jobs. One job at a time: a second caller runs its job alone.
// Or threads of the program's, as many jobs at a time as it makes.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "attn/attn.h"

namespace attn {

class Interrupt;  // core/interrupt.h

constexpr int max_threads = 4096;

class ThreadPool {
 public:
  // attn_context_options.run_threads.
  struct Callers {
    void (*run)(void* user, int32_t threads, attn_work work, void* data);
    void* user;
  };
  // `threads` counts the caller of run(); 0 = the default below. With `callers` the pool has no
  // threads of its own.
  explicit ThreadPool(int threads, Callers callers = {});
  ~ThreadPool();
  int threads() const;
  // How many of `threads` pay for a job that takes one thread about so long: waking one costs, too.
  static int worth(double nanoseconds, int threads);
  int worth(double nanoseconds) const { return worth(nanoseconds, threads()); }

  // Calls task(context, item, thread) for each item in [0, items), thread in [0, threads());
  // returns when all are done, or none is begun any more since `interrupt` (may be null) stops. At
  // most `most` threads take part. Does not allocate. One item, one thread, a busy pool or the
  // child of a fork, which has none of the pool's threads: runs on the caller with thread 0.
  using Task = void (*)(void* context, int64_t item, int thread);
  void run(int64_t items, Task task, void* context, Interrupt* interrupt, int most);

  template <class F>
  void for_each(int64_t items, F&& f, Interrupt* interrupt = nullptr,
                int most = std::numeric_limits<int>::max()) {
    using Body = std::remove_reference_t<F>;
    run(
        items, [](void* c, int64_t item, int thread) { (*static_cast<Body*>(c))(item, thread); },
        &f, interrupt, most);
  }

 private:
  struct State;
  const Callers callers_;
  int threads_;
  std::unique_ptr<State> state_;  // null with `callers_`
};

// What OMP_NUM_THREADS said when this was called first, else the cores that this process may use.
int default_threads();

}  // namespace attn
