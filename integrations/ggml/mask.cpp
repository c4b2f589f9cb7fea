#include "mask.h"

#include <algorithm>
#include <cstring>

namespace attn::ggml {
namespace {

constexpr std::uint64_t hidden = 0xfc00fc00fc00fc00;        // four times -inf
constexpr std::uint64_t without_sign = 0x7fff7fff7fff7fff;  // 0 and -0 are the same

// The first of keys [from, to) with other bits than four times `code` has, among those of `bits`.
std::int64_t end_of_run(const std::uint16_t* row, std::int64_t from, std::int64_t to,
                        std::uint64_t code, std::uint64_t bits) {
  constexpr std::int64_t at_once = 4;
  for (; from + at_once <= to; from += at_once) {
    std::uint64_t four;
    std::memcpy(&four, row + from, sizeof four);
    if ((four ^ code) & bits) break;
  }
  while (from < to && ((row[from] ^ code) & bits & 0xffff) == 0) ++from;
  return from;
}

struct Range {
  std::int64_t begin, end;
};

// The row's visible keys, if they are one run and their mask is 0.
std::optional<Range> range_of(const std::uint16_t* row, std::int64_t keys) {
  const std::int64_t begin = end_of_run(row, 0, keys, hidden, ~std::uint64_t{0});
  const std::int64_t end = end_of_run(row, begin, keys, 0, without_sign);
  if (begin == end || end_of_run(row, end, keys, hidden, ~std::uint64_t{0}) != keys) return {};
  return Range{begin, end};
}

// Of one batch entry.
struct Rule {
  bool causal;
  std::int64_t window_left;
  Range all;
};
std::optional<Rule> rule_of(const std::uint16_t* first_row, const Mask& mask) {
  const auto row = [&](std::int64_t i) {
    return range_of(first_row + i * mask.row_stride, mask.keys);
  };
  const auto first = row(0), last = row(mask.rows - 1);
  if (!first || !last) return {};
  Rule rule{first->end != last->end, -1, {first->begin, last->end}};
  if (first->begin != last->begin) rule.window_left = last->end - 1 - last->begin;
  for (std::int64_t i = 0; i < mask.rows; ++i) {
    const std::int64_t end = rule.all.end - (rule.causal ? mask.rows - 1 - i : 0);
    const std::int64_t begin = rule.window_left < 0
                                   ? rule.all.begin
                                   : std::max(rule.all.begin, end - 1 - rule.window_left);
    const auto range = row(i);
    if (!range || range->begin != begin || range->end != end) return {};
  }
  return rule;
}

}  // namespace

std::optional<Ranges> ranges_of(const Mask& mask) {
  Ranges ranges;
  for (std::int64_t b = 0; b < mask.batch; ++b) {
    const auto rule = rule_of(mask.data + b * mask.batch_stride, mask);
    if (!rule) return {};
    if (b == 0) {
      ranges.causal = rule->causal;
      ranges.window_left = rule->window_left;
    }
    if (rule->causal != ranges.causal || rule->window_left != ranges.window_left) return {};
    ranges.begin.push_back(std::int32_t(rule->all.begin));
    ranges.end.push_back(std::int32_t(rule->all.end));
  }
  return ranges;
}

}  // namespace attn::ggml
