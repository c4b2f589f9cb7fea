#include "head_dims.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

namespace attn::test {
namespace {

bool takes(const Kernel& kernel, uint32_t q_types, uint32_t kv_types) {
  const Limits& limits = kernel.limits;
  return kernel.op == Op::forward && !kernel.host && !limits.demanded_features &&
         limits.head_dim.max < INT64_MAX && limits.in_types & q_types && limits.kv_types & kv_types;
}

Sizes in_steps_of(int64_t step, const Sizes& sizes) {
  const int64_t multiple = std::lcm(step, sizes.multiple);
  return {multiple, sizes.max / multiple * multiple};
}

}  // namespace

std::vector<HeadDims> head_dims(uint32_t q_types, uint32_t kv_types, int64_t step,
                                std::span<const Kernel> rows) {
  std::vector<HeadDims> found;
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> known;
  for (const Kernel& kernel : rows) {
    if (!takes(kernel, q_types, kv_types)) continue;
    const HeadDims dims = {in_steps_of(step, kernel.limits.head_dim),
                           in_steps_of(step, kernel.limits.head_dim_v)};
    const bool any = dims.qk.max > 0 && dims.v.max > 0;
    if (any && known.emplace(dims.qk.multiple, dims.qk.max, dims.v.multiple, dims.v.max).second)
      found.push_back(dims);
  }
  return found;
}

std::vector<int64_t> largest_head_dims(uint32_t q_types, std::span<const Kernel> rows) {
  std::set<int64_t> found;
  for (const HeadDims& dims : head_dims(q_types, ~0u, 1, rows))
    found.insert(std::min(dims.qk.max, dims.v.max));
  return {found.begin(), found.end()};
}

int64_t draw_size(Draw& draw, const Sizes& sizes) {
  if (draw.chance(3)) return sizes.max;
  if (draw.chance(8)) return sizes.multiple;
  return sizes.multiple * (1 + draw(uint64_t(sizes.max / sizes.multiple)));
}

void draw_head_dims(Draw& draw, const std::vector<HeadDims>& of, bool apart, Case* c) {
  const HeadDims dims = draw.pick(of);
  c->head_dim = draw_size(draw, dims.qk);
  const int64_t v = draw_size(draw, dims.v), same = std::min(c->head_dim, dims.v.max);
  c->head_dim_v = apart || same % dims.v.multiple != 0 ? v : same;
}

}  // namespace attn::test
