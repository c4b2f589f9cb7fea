#include "catalog/catalog.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/families.h"

namespace attn {
namespace {

struct Table {
  std::vector<Kernel> rows;  // composed ones first
  std::unique_ptr<std::atomic<uint64_t>[]> launches;
};

const Table& table() {
  static const Table joined = [] {
    Table t;
    for (const std::span<const Kernel> rows : {shards_rows(),
                                               prefix_rows(),
                                               lists_rows(),
                                               host_forward_rows(),
                                               sm90_dequantised_mixed_rows(),
                                               sm90_dequantised_rows(),
                                               decode_forward_rows(),
                                               mla_forward_rows(),
                                               sm90_mixed_rows(),
                                               sm90_forward_rows(),
                                               sm90_fp8_rows(),
                                               sm80_forward_rows(),
                                               gfx942_decode_rows(),
                                               gfx942_forward_rows(),
                                               host_backward_rows(),
                                               sm90_backward_rows(),
                                               sm80_backward_rows(),
                                               merge_rows(),
                                               quantize_rows(),
                                               gfx942_convert_rows(),
                                               kv_append_rows(),
                                               block_mask_rows()})
      t.rows.insert(t.rows.end(), rows.begin(), rows.end());
    t.launches = std::make_unique<std::atomic<uint64_t>[]>(t.rows.size());
    return t;
  }();
  return joined;
}

std::atomic<uint64_t>& launches_of(const Kernel& kernel) {
  return table().launches[&kernel - table().rows.data()];
}

}  // namespace

std::span<const Kernel> all_kernels() {
  return table().rows;
}
std::span<const Kernel> catalog() {
  return all_kernels().subspan(shards_rows().size() + prefix_rows().size() + lists_rows().size());
}

// Names of 0.1 that 0.2 accepts.
struct Alias {
  const char *before, *now;
};
constexpr Alias aliases[] = {
    {"merge_sm80", "merge_cuda"},         {"quantize_sm80", "quantize_cuda"},
    {"kv_append_sm80", "kv_append_cuda"}, {"kv_roll_sm80", "kv_roll_cuda"},
    {"mask_sm80", "mask_cuda"},
};

const Kernel* find_kernel(const char* name) {
  for (const Alias& alias : aliases)
    if (std::strcmp(alias.before, name) == 0) name = alias.now;
  for (const Kernel& kernel : all_kernels())
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

void count_launch(const Kernel& kernel) {
  launches_of(kernel).fetch_add(1, std::memory_order_relaxed);
}
uint64_t launch_count(const Kernel& kernel) {
  return launches_of(kernel).load(std::memory_order_relaxed);
}

}  // namespace attn
