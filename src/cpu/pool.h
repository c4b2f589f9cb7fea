// A pool of threads that sleep between jobs. One job at a time: a second caller runs its job alone.
#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

namespace attn {

class ThreadPool {
 public:
  // `threads` counts the caller of run(); 0 = all cores this process may use.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  int threads() const;

  // Calls task(context, item, thread) for each item in [0, items), thread in [0, threads()); returns when
  // all are done. Does not allocate. One item, one thread or a busy pool: runs on the caller with thread 0.
  using Task = void (*)(void* context, int64_t item, int thread);
  void run(int64_t items, Task task, void* context);

  template <class F>
  void for_each(int64_t items, F&& f) {
    using Body = std::remove_reference_t<F>;
    run(items, [](void* c, int64_t item, int thread) { (*static_cast<Body*>(c))(item, thread); }, &f);
  }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace attn
