// Head dimensions of cases, from the limits of the catalog's rows, so that a kernel with others
// than its siblings needs no other generator.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "catalog/catalog.h"
#include "forward_case.h"

namespace attn::test {

// What a kernel takes, in multiples that each type of K and V has too.
struct HeadDims {
  Sizes qk, v;
};

// Of the forward kernels without demanded features that take q of one of q_types and K and V of one
// of kv_types (type_bit), each pair of limits once; kernels without a limit, which are the hosts',
// have none. `step`: all are multiples of it.
std::vector<HeadDims> head_dims(uint32_t q_types, uint32_t kv_types = ~0u, int64_t step = 1,
                                std::span<const Kernel> rows = catalog());

// The largest head_dim of each, in ascending order: where a loop over tiles needs one case of each.
std::vector<int64_t> largest_head_dims(uint32_t q_types, std::span<const Kernel> rows = catalog());

// The largest, the smallest, or any multiple.
int64_t draw_size(Draw& draw, const Sizes& sizes);

// head_dim and head_dim_v of one of them, the same for both unless only head_dim may be as large or
// `apart` is set.
void draw_head_dims(Draw& draw, const std::vector<HeadDims>& of, bool apart, Case* c);

}  // namespace attn::test
