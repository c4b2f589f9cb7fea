#include "gfx9emu/ops.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {

namespace baseline {
const Op* valu_table();
int valu_count();
}  // namespace baseline
#if GFX9EMU_X86
namespace avx2 {
const Op* valu_table();
int valu_count();
}  // namespace avx2
namespace avx512 {
const Op* valu_table();
int valu_count();
}  // namespace avx512
#endif

namespace {

std::span<const Op> widest_table() {
  const auto table = [](const Op* ops, int count) {
    return std::span<const Op>(ops, static_cast<size_t>(count));
  };
#if GFX9EMU_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return table(avx512::valu_table(), avx512::valu_count());
  }
  if (avx2) return table(avx2::valu_table(), avx2::valu_count());
#endif
  return table(baseline::valu_table(), baseline::valu_count());
}

void run_lanes(Wave& w, const Inst& in) {
  in.lanes(w, in);
}

}  // namespace

std::span<const Op> valu_ops() {
  static const auto table = [] {
    const auto ops = widest_table();
    std::vector<Op> all(ops.begin(), ops.end());
    for (Op& op : all) op.run = run_lanes;
    return all;
  }();
  return table;
}

}  // namespace gfx9emu
