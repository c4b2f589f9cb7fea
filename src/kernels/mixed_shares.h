// How the launches of fwd_sm90_*_mixed share the multiprocessors of a device: a model of the time
// that a step takes.
#pragma once
#include <algorithm>
#include <cstdint>

namespace attn {

struct MixedWork {
  int64_t multiprocessors;
  int64_t items;       // query tiles of chunks, each with one head
  double item_us;      // that one takes on a multiprocessor
  double token_bytes;  // K and V that the other sequences read
};

// An H200's. An H100's memory is slower, so its chunks need fewer multiprocessors. More do no harm:
// tokens take those that chunks leave.
constexpr double memory_bytes_per_us = 4.5e6;
constexpr double multiprocessor_bytes_per_us = 75e3;  // measured: one reads no more
// Measured: items take this much longer while tokens read all that memory gives. If they read less,
// items are slowed in proportion.
constexpr double slowed_by_tokens = 0.3;

constexpr double memory_rate(int64_t multiprocessors) {
  return std::min(memory_bytes_per_us, double(multiprocessors) * multiprocessor_bytes_per_us);
}
// Microseconds if chunks have `blocks` multiprocessors at first, and tokens the others. When one of
// both ends, the other gets its multiprocessors.
constexpr double mixed_us(const MixedWork& work, int64_t blocks) {
  const int64_t all = work.multiprocessors;
  int64_t items = work.items;
  double bytes = work.token_bytes, us = 0;
  while (items > 0) {
    // Rounds of items while tokens are read.
    const int64_t busy = std::min(items, blocks);
    const double rate = memory_rate(all - busy),
                 slower = 1 + slowed_by_tokens * rate / memory_bytes_per_us,
                 round = work.item_us * slower, rounds = bytes / (rate * round);
    if (rounds < 1) {
      // All multiprocessors take items from here on, the busy ones when theirs end.
      const double tokens = bytes / rate, left = (round - tokens) / slower;
      const int64_t others = items - busy;
      for (int64_t n = others / all;; ++n) {
        if (n * all - busy >= others) return us + tokens + double(n) * work.item_us;
        if (n * all >= others) return us + tokens + left + double(n) * work.item_us;
      }
    }
    const int64_t count = std::min(items / busy, int64_t(std::min(rounds, 1e9)));
    items -= count * busy;
    bytes -= double(count) * rate * round;
    us += double(count) * round;
  }
  return us + bytes / memory_rate(all);
}

// Blocks of the chunks' first launch, if chunks and tokens run at the same time; 0: one after the
// other, since both at once would gain less than 5 % or 10 us. The largest number within 1 % of the
// best time, because the host may know only capacities and tokens may be shorter.
constexpr int64_t concurrent_blocks(const MixedWork& work) {
  if (work.items <= 0 || work.token_bytes <= 0) return 0;
  const int64_t all = work.multiprocessors;
  const double apart =
      double((work.items + all - 1) / all) * work.item_us + work.token_bytes / memory_rate(all);
  double best = apart;
  for (int64_t n = 1; n < all; ++n) best = std::min(best, mixed_us(work, n));
  if (best > std::min(0.95 * apart, apart - 10)) return 0;
  int64_t blocks = std::min(all - 1, work.items);
  while (mixed_us(work, blocks) > 1.01 * best) --blocks;
  return blocks;
}

}  // namespace attn
