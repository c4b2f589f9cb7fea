// What a kernel that rounds P to fp8 must come out with: float64 everywhere but for the weights,
// which are rounded and summed by the kernel's rule. docs/numerics.md, "FP8 weights".
#pragma once

#include <string_view>

#include "cpu/pool.h"
#include "fp8_stress/cases.h"

namespace attn::tools {

// Scores x are in the log2 domain; m is what a row's weights are relative to.
struct WeightRule {
  const char* kernel;  // how the names of its kernels begin
  attn_dtype type;     // P = round(2^(x - m + offset)) in this type; NONE: not rounded
  int offset;
  double lag;         // m moves where a row's maximum is more than this above it, to that maximum;
  int64_t rows;       // and then for all of so many query rows, which one wave has
  int64_t tile_keys;  // a tile's maximum is known before its first weight
  bool last_tile_first;  // the order of tiles
  bool sum_rounded;      // the row sum has P as rounded
};

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

// nullptr if no rule is known for the kernel.
const WeightRule* weight_rule(std::string_view kernel);

// P as stored, as an exact value.
double rounded_weight(const WeightRule& rule, double exact);

// out [seqlen_q, heads, head_dim], rounded to out_type.
std::vector<double> model_output(const WeightRule& rule, const StressInputs& inputs,
                                 attn_dtype out_type, ThreadPool& pool, Bug bug = Bug::none);

}  // namespace attn::tools
