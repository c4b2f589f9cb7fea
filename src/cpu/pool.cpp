#include "cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/interrupt.h"

#ifdef __linux__
#include <sched.h>
#endif
#ifdef __unix__
#include <pthread.h>
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

// The first of "4" or "4,2", OpenMP's levels; 0 if there is none.
int omp_num_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (!text) return 0;
  char* end;
  errno = 0;
  const long threads = std::strtol(text, &end, 10);
  const bool good = end != text && errno == 0 && threads > 0;
  end += std::strspn(end, " ");
  return good && (*end == 0 || *end == ',') ? int(std::min(threads, long{max_threads})) : 0;
}

// Forks that led to this process since it made its first pool.
std::atomic<int> forks{0};
int count_forks() {
#ifdef __unix__
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)registered;
#endif
  return forks.load(std::memory_order_relaxed);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A caller without items left looks so often, about 20 us, whether the workers are done before it
// sleeps.
constexpr int looks_before_sleep = 500;
// Below two shares of so much work a second thread does not pay.
constexpr double share = 20e3;  // ns

}  // namespace

int default_threads() {
  static const int threads = [] {
    const int wanted = omp_num_threads();
    return wanted > 0 ? wanted : usable_cores();
  }();
  return threads;
}

namespace {

struct Job {
  const int64_t items;
  const ThreadPool::Task task;
  void* const context;
  Interrupt* const interrupt;
  std::atomic<int64_t> next{0};

  void take_items(int thread) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      if (interrupt && interrupt->stopped()) return;
      task(context, item, thread);
    }
  }
};

}  // namespace

// A worker joins a job while it is open and leaves when no item is left. The caller closes the job
// when it finds no item left and waits for those who joined, so a thread that is slow to
// wake delays no job.
struct ThreadPool::State {
  const int made_at = count_forks();
  std::vector<std::thread> workers;
  std::atomic<bool> busy{false};

  std::mutex mutex;
  std::condition_variable work, done;
  bool stop = false;
  Job* open = nullptr;         // the job that workers may join
  uint64_t number = 0;         // of the latest job
  int64_t room = 0;            // workers that may still join it
  std::atomic<int> joined{0};  // workers inside it; changed under the mutex

  void worker(int thread) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stop || (open && number != seen && room > 0); });
      if (stop) return;
      Job& job = *open;
      seen = number;
      --room;
      joined.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job.take_items(thread);
      lock.lock();
      if (joined.fetch_sub(1, std::memory_order_release) == 1) done.notify_one();
    }
  }

  void start(Job& job, int64_t helpers) {
    {
      std::lock_guard lock(mutex);
      open = &job;
      room = helpers;
      ++number;
    }
    if (helpers == int64_t(workers.size())) {
      work.notify_all();
    } else {
      for (int64_t i = 0; i < helpers; ++i) work.notify_one();
    }
  }

  // Closes the job and returns when no worker is inside it.
  void close(Interrupt* interrupt) {
    std::unique_lock lock(mutex);
    open = nullptr;
    const auto all_left = [&] { return joined.load(std::memory_order_acquire) == 0; };
    if (all_left()) return;
    lock.unlock();
    for (int look = 0; look < looks_before_sleep; ++look) {
      if (all_left()) return;
      pause();
    }
    lock.lock();
    if (!interrupt || !interrupt->possible()) return done.wait(lock, all_left);
    while (!done.wait_for(lock, Interrupt::interval, all_left)) {
      lock.unlock();
      interrupt->ask();
      lock.lock();
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

ThreadPool::ThreadPool(int threads, Callers callers)
    : callers_(callers), threads_(threads > 0 ? threads : default_threads()) {
  if (callers_.run) return;
  state_ = std::make_unique<State>();
  state_->workers.reserve(size_t(threads_) - 1);
  try {
    for (int t = 1; t < threads_; ++t) {
      state_->workers.emplace_back([s = state_.get(), t] { s->worker(t); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: `threads` is a limit, those that started suffice.
    threads_ = int(state_->workers.size()) + 1;
  }
}

ThreadPool::~ThreadPool() {
  if (!state_) return;
  if (state_->made_at == count_forks())
    state_->finish();
  else
    (void)state_.release();  // its threads are the parent's, and its mutex may be held by one
}

int ThreadPool::threads() const {
  return threads_;
}

int ThreadPool::worth(double nanoseconds, int threads) {
  return int(std::clamp(nanoseconds / share, 1.0, double(threads)));
}

void ThreadPool::run(int64_t items, Task task, void* context, Interrupt* interrupt, int most) {
  Job job{items, task, context, interrupt};
  const int64_t threads = std::min({items, int64_t{most}, int64_t{threads_}});
  if (threads <= 1) return job.take_items(0);
  if (callers_.run) {
    callers_.run(
        callers_.user, int32_t(threads),
        [](void* data, int32_t thread) { static_cast<Job*>(data)->take_items(thread); }, &job);
    return;
  }
  State& s = *state_;
  if (s.made_at != count_forks() || s.busy.exchange(true, std::memory_order_acquire))
    return job.take_items(0);
  s.start(job, threads - 1);
  job.take_items(0);
  s.close(interrupt);
  s.busy.store(false, std::memory_order_release);
}

}  // namespace attn
