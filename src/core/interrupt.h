// Calls on the host that end before their work is done, because their caller wants it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/status.h"

namespace attn {

// One call's. The thread that called asks attn_context_options.interrupted from time to time; all
// threads of the call see the answer.
class Interrupt {
 public:
  using Callback = int32_t (*)(void* user);
  static constexpr std::chrono::milliseconds interval{50};

  explicit Interrupt(Callback callback = nullptr, void* user = nullptr)
      : callback_(callback), user_(user) {}
  Interrupt(const Interrupt&) = delete;

  bool possible() const { return callback_ != nullptr; }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  // True: leave the rest undone. `thread` 0 is the one that called; `operations` were done since it
  // came here last, of about a nanosecond or less.
  bool stop(int thread, int64_t operations) {
    if (thread != 0 || !callback_) return stopped();
    pending_ += operations;
    if (pending_ >= operations_between_looks) ask();
    return stopped();
  }
  // Of the thread that called: asks if the interval is over.
  void ask() {
    pending_ = 0;
    const auto now = std::chrono::steady_clock::now();
    if (asked_ == decltype(asked_){}) asked_ = now;
    if (!callback_ || stopped() || now - asked_ < interval) return;
    asked_ = now;
    if (callback_(user_) != 0) stopped_.store(true, std::memory_order_relaxed);
  }
  Status status() const {
    if (!stopped()) return {};
    return {ATTN_INTERRUPTED,
            "options.interrupted of the context ended the call; nothing that it writes is defined"};
  }

 private:
  static constexpr int64_t operations_between_looks =
      1 << 20;  // the clock costs as much as a thousand
  const Callback callback_;
  void* const user_;
  std::atomic<bool> stopped_{false};
  int64_t pending_ = 0;
  std::chrono::steady_clock::time_point asked_{};
};

}  // namespace attn
