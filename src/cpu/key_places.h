// Positions of a segment's keys.
#pragma once
#include <cstdint>

namespace attn {

// Where the keys of a segment are whose sequence is spread over `ranks` in runs of `interleave`.
struct KeyPlaces {
  int64_t start, interleave, ranks, rank;

  // The position of key c.
  constexpr int64_t at(int64_t c) const {
    return start + (c / interleave * ranks + rank) * interleave + c % interleave;
  }
  // How many keys are before a position. Positions increase, so a band of them is a range of keys.
  constexpr int64_t before(int64_t position) const {
    const int64_t x = position - start;
    if (x <= 0) return 0;
    const int64_t of_all = interleave * ranks;
    const int64_t rest = x % of_all - rank * interleave;
    return x / of_all * interleave + (rest < 0 ? 0 : rest < interleave ? rest : interleave);
  }
};

}  // namespace attn
