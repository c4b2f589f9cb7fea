// The instruction cache in the issue model: sets of lines, of which the least recently used one
// goes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace gfx9emu {

class InstructionCache {
 public:
  struct Shape {
    int bytes = 65536, line_bytes = 128, ways = 8;
    int miss = 500;  // clocks from the fetch to the line
    // Also what was never used before is missing. Otherwise workgroups before these have brought
    // it, as far as there is room.
    bool cold = false;
  };
  explicit InstructionCache(const Shape& shape)
      : shape_(shape), sets_(size_t(shape.bytes / shape.line_bytes / shape.ways)) {}

  // When instruction bytes `first` .. `last` of the code are there, if asked for at clock `now`.
  uint64_t fetch(uint64_t first, uint64_t last, uint64_t now) {
    uint64_t there = now;
    const uint64_t bytes = uint64_t(shape_.line_bytes);
    for (uint64_t line = first / bytes; line <= last / bytes; ++line)
      there = std::max(there, fetch_line(line, now));
    return there;
  }
  uint64_t misses() const { return misses_; }
  size_t lines() const { return used_.size(); }  // of the code that were ever asked for

 private:
  struct Line {
    uint64_t number, there;
  };

  uint64_t fetch_line(uint64_t number, uint64_t now) {
    std::vector<Line>& set = sets_[number % sets_.size()];  // the last one was used last
    const auto found = std::find_if(set.begin(), set.end(),
                                    [&](const Line& line) { return line.number == number; });
    Line line{number, now};
    if (found != set.end()) {
      line = *found;
      set.erase(found);
    } else {
      if (!used_.insert(number).second || shape_.cold) {
        ++misses_;
        line.there += uint64_t(shape_.miss);
      }
      if (set.size() == size_t(shape_.ways)) set.erase(set.begin());
    }
    set.push_back(line);
    return line.there;
  }

  Shape shape_;
  std::vector<std::vector<Line>> sets_;
  std::set<uint64_t> used_;
  uint64_t misses_ = 0;
};

}  // namespace gfx9emu
