// A kernel as the catalog lists it: what it takes, how it computes, and what a plan launches for
// it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "driver/device.h"
#include "driver/launch.h"
#include "problem/problem.h"

namespace attn {

constexpr int max_tensor_maps = 17;
constexpr size_t max_kernarg_bytes = 4096;  // CUDA's limit before 12.1 drivers; HIP's is the same

// Sizes that a kernel takes.
struct Sizes {
  int64_t multiple = 1, max = INT64_MAX;
};

// What a kernel takes, for each member of Needs (problem/any_problem.h).
struct Limits {
  uint32_t in_types = 0, kv_types = 0, out_types = 0;  // type_bit
  uint32_t flags = 0;                                  // attn_flag
  uint32_t demands = 0;                                // the flags that a problem must have
  uint32_t features = 0;                               // Feature
  uint32_t demanded_features = 0;                      // those that a problem must have
  Sizes head_dim = {}, head_dim_v = {}, seqlen_q = {}, group = {}, page_size = {};
  bool floats_as_q = false;  // takes f32, f16 and bf16 of kv_types only if q has the same type
};

// How a forward kernel computes. Error bounds and the model of FP8 weights follow from it. Scores x
// are in the log2 domain; m is the row maximum, which a row's weights are relative to.
struct Numerics {
  attn_dtype weights =
      ATTN_DTYPE_NONE;  // P = round(2^(x - m + offset)) in this type; NONE: as computed
  int offset = 0;
  double lag = 0;  // m becomes the row's maximum where that is more than this above m,
  int rows = 1;    // and then for all rows of a group of this many
  int keys = 64;   // keys of a tile; its maximum is known before its first weight
  bool last_tile_first = false;    // the order of tiles
  bool causal_last_first = false;  // the same, of problems with a causal mask
  bool rounded_sums = false;       // the row sum that out is divided by has P as rounded
  bool rounded_largest = false;    // and here it has each tile's largest P so, the others exactly
  int sum_bits = 0;  // the matrix unit truncates each product this many bits below the largest one
                     // that an instruction adds; 0: it sums in float32
  int score_part = 0;    // with sum_bits: scores are added in float32 from sums over this many
                         // columns of head_dim; 0: over all
  int weight_parts = 1;  // P is the sum of this many values of `weights`; the first is P rounded
  bool always_split_invariant = false;  // m is an integer, with ATTN_SPLIT_INVARIANT or without
  int largest_score = 127;              // results are defined for scores up to this power of 2
  bool rounds_kv = false;       // K and V times their scales are rounded to the weights' type
  bool scaled_weights = false;  // P times the scale of V's block or key is rounded to f16
};

// What one launch reads.
struct Parameters {
  alignas(64) unsigned char kernarg[max_kernarg_bytes];
  const void* map_base[max_tensor_maps];  // of Step::maps
};

// Completes the parameters of a launch with what a run brings: addresses, and what follows from
// them. Neither allocates nor locks. `args`: those of the problem's operation.
using Patch = void (*)(const AnyProblem& problem, const void* args, void* workspace,
                       Parameters* to);

// The parameters of a step's launches as far as the problem says them. Pointers into the step's
// workspace are offsets in it until patch() adds its address (rebase, kernarg.h); other pointers
// are null until patch() sets them. Made by arguments_of().
struct Arguments {
  std::vector<unsigned char> bytes;  // the parameter struct; at most max_kernarg_bytes
  Patch patch = nullptr;
};

// One launch of a plan.
struct Step {
  const char* image = "";            // device code: its file and its entry point
  uint32_t static_shared_bytes = 0;  // shared memory or LDS that the kernel declares, at most
  bool fewer_threads = false;        // a launch may have fewer than the code takes
  Launch launch = {};  // grid, block, dynamic shared memory; an empty grid: not launched
  Arguments arguments = {};
  std::vector<TensorMap> maps = {};        // with which the parameter struct begins
  std::vector<const void*> map_base = {};  // their addresses, pointers as those in arguments
  bool maps_packed_q = false;  // the first is of packed q, with total_q tokens in its dimension 1
  size_t workspace_at = 0;     // bytes of the recipe's workspace before the step's
};

// The parameters of a launch: the step's, completed.
inline void pack(const Step& step, const AnyProblem& problem, const void* args, void* workspace,
                 Parameters* to) {
  std::copy(step.arguments.bytes.begin(), step.arguments.bytes.end(), to->kernarg);
  std::copy(step.map_base.begin(), step.map_base.end(), to->map_base);
  step.arguments.patch(problem, args, workspace, to);
}

// What a plan launches for a problem, one step after the other in one stream.
struct Recipe {
  size_t workspace = 0;       // bytes
  size_t cleared = SIZE_MAX;  // of these, from the first on, that are 0 before the first run
  std::vector<Step> steps;
  std::string passed_over;  // why a later kernel serves the problem better, preference.h; "": none
};

// A function of its arguments alone. What the kernel cannot take beyond its Limits is an
// ATTN_UNSUPPORTED with the reason.
using MakeRecipe = Status (*)(const AnyProblem& problem, const DeviceInfo& device, Recipe* recipe);

struct HostKernel;  // cpu/host_kernel.h

// How a kernel consists of others; src/plan/ has a file for each way.
enum class Composed : uint8_t { no, prefix, lists, shards };

// One row. Rows of one operation and backend are in order of preference.
struct Kernel {
  const char* name;  // symbol, file name, name in logs and tests
  Op op;
  attn_backend backend;
  Limits limits = {};
  Numerics numerics = {};
  const HostKernel* host = nullptr;  // reference and cpu; nullptr if this build leaves it out
  MakeRecipe recipe = nullptr;       // cuda and hip
  // Of steps other than that with the kernel's own image, one or the other.
  const char* first_images[3] = {};
  const char* image = nullptr;  // the kernel's own; nullptr: of its name
  Composed composed = Composed::no;
};
constexpr const char* image_of(const Kernel& kernel) {
  return kernel.image ? kernel.image : kernel.name;
}

namespace detail {

template <class T>
struct Typed;
template <class P>
struct Typed<Status (*)(const P&, const DeviceInfo&, Recipe*)> {
  template <auto make>
  static Status recipe(const AnyProblem& problem, const DeviceInfo& device, Recipe* to) {
    return make(static_cast<const P&>(problem), device, to);
  }
};
template <class P, class A, class K>
struct Typed<void (*)(const P&, const A&, void*, K&)> {
  using Kernarg = K;
  template <auto fill>
  static void patch(const AnyProblem& problem, const void* args, void* workspace, Parameters* to) {
    fill(static_cast<const P&>(problem), *static_cast<const A*>(args), workspace,
         *reinterpret_cast<K*>(to->kernarg));
  }
};
template <class P, class A, class K>
struct Typed<void (*)(const P&, const A&, void*, K&, const void**)> {
  using Kernarg = K;
  template <auto fill>
  static void patch(const AnyProblem& problem, const void* args, void* workspace, Parameters* to) {
    fill(static_cast<const P&>(problem), *static_cast<const A*>(args), workspace,
         *reinterpret_cast<K*>(to->kernarg), to->map_base);
  }
};

}  // namespace detail

// Functions of an operation's own problem and arguments, for rows and steps, which have any.
template <auto make>
constexpr MakeRecipe recipe_of = detail::Typed<decltype(make)>::template recipe<make>;
// `fill` takes (problem, args, workspace, parameter struct) and, of steps with maps, their
// addresses.
template <auto fill>
Arguments arguments_of(const typename detail::Typed<decltype(fill)>::Kernarg& kernarg) {
  static_assert(sizeof kernarg <= max_kernarg_bytes);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&kernarg);
  return {{bytes, bytes + sizeof kernarg}, detail::Typed<decltype(fill)>::template patch<fill>};
}

}  // namespace attn
