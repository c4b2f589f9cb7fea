#include "cpu/pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace attn {
namespace {

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : int(cores);
}

}  // namespace

// A worker joins a job while it is open and leaves when no item is left. The caller closes the job when
// it finds no item left and waits for those who joined, so a thread slow to wake delays nobody.
struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::atomic<bool> busy{false};

  std::mutex mutex;
  std::condition_variable work, done;
  bool stop = false;
  bool open = false;
  uint64_t job = 0;  // number of the latest job
  int joined = 0;    // workers inside it

  Task task = nullptr;
  void* context = nullptr;
  int64_t items = 0;
  std::atomic<int64_t> next{0};

  void take_items(int thread) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      task(context, item, thread);
    }
  }

  void worker(int thread) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stop || (open && job != seen); });
      if (stop) return;
      seen = job;
      ++joined;
      lock.unlock();
      take_items(thread);
      lock.lock();
      if (--joined == 0) done.notify_one();
    }
  }

  void finish() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (std::thread& w : workers) w.join();
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads <= 0) threads = usable_cores();
  state_->workers.reserve(size_t(threads) - 1);
  try {
    for (int t = 1; t < threads; ++t) {
      state_->workers.emplace_back([s = state_.get(), t] { s->worker(t); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: `threads` is a limit, those that started suffice.
  }
}

ThreadPool::~ThreadPool() { state_->finish(); }

int ThreadPool::threads() const { return int(state_->workers.size()) + 1; }

void ThreadPool::run(int64_t items, Task task, void* context) {
  State& s = *state_;
  if (items <= 1 || s.workers.empty() || s.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < items; ++item) task(context, item, 0);
    return;
  }
  {
    std::lock_guard lock(s.mutex);
    s.task = task;
    s.context = context;
    s.items = items;
    s.next.store(0, std::memory_order_relaxed);
    s.open = true;
    ++s.job;
  }
  if (items > int64_t(s.workers.size())) {
    s.work.notify_all();
  } else {
    for (int64_t i = 1; i < items; ++i) s.work.notify_one();
  }
  s.take_items(0);
  {
    std::unique_lock lock(s.mutex);
    s.open = false;
    s.done.wait(lock, [&] { return s.joined == 0; });
  }
  s.busy.store(false, std::memory_order_release);
}

}  // namespace attn
