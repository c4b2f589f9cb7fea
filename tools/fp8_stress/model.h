// What a kernel that rounds P to fp8 must come out with: float64 everywhere but for the weights,
// which are rounded and summed by the rule of the kernel's row (Numerics). docs/numerics.md, "FP8
// weights".
#pragma once

#include "cpu/pool.h"
#include "fp8_stress/cases.h"
#include "kernels/kernel.h"

namespace attn::tools {

// What a kernel may do wrong and bounds must show; none: what it must do.
enum class Bug {
  none,
  dropped_key,    // key 5 of each tile has no weight
  swapped_keys,   // keys 0 and 1 of each tile have each other's
  tile_maximum,   // weights are relative to a tile's maximum, what is summed to the running one
  small_weights,  // an offset of 3
  late_sum,       // the row sum has P unrounded, that of a tile after the next one's scaling
  ocp_codes,      // FNUZ read as OCP: each code means twice its value
};
struct PlantedBug {
  Bug bug;
  const char* name;
};
inline constexpr PlantedBug planted_bugs[] = {
    {Bug::dropped_key, "one key dropped per tile"},
    {Bug::swapped_keys, "two keys swapped"},
    {Bug::tile_maximum, "tile max instead of running max"},
    {Bug::small_weights, "P scale 2^3"},
    {Bug::late_sum, "row sum of unrounded P, one step late"},
    {Bug::ocp_codes, "FNUZ read as OCP"},
};

// P as stored, as an exact value.
double rounded_weight(const Numerics& rule, double exact);

// out [seqlen_q, heads, head_dim], rounded to out_type.
std::vector<double> model_output(const Numerics& rule, const StressInputs& inputs,
                                 attn_dtype out_type, ThreadPool& pool, Bug bug = Bug::none);

}  // namespace attn::tools
