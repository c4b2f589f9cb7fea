// Runs of plans: their arguments are checked, then the parameters of each step are completed and
// launched.
#include <algorithm>

#include "cpu/host_kernel.h"
#include "plan/composition.h"
#include "plan/plan.h"

namespace attn {
namespace {

Status check_workspace(const Plan& plan, const void* workspace, size_t bytes) {
  const size_t needed = plan.choice.recipe.workspace;
  if (needed == 0) return {};
  if (bytes < needed)
    return {ATTN_WORKSPACE_TOO_SMALL, join("workspace has ", bytes, " bytes; accepted: ", needed,
                                           " or more (", plan.choice.kernel->name, ")")};
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    return invalid("workspace is at ", workspace, "; accepted: 256-byte aligned addresses");
  return {};
}

Status check_run(const Plan& plan, Op op, const void* stream) {
  if (plan.problem->op != op)
    return invalid("plan is for ", op_name(plan.problem->op), "; accepted by this call: plans for ",
                   op_name(op));
  if (plan.context->host_memory() && stream)
    return invalid("stream is ", stream, "; accepted on ",
                   attn_backend_string(plan.context->backend), ": NULL");
  return {};
}

template <class P>
const P& problem_of(const Plan& plan) {
  return static_cast<const P&>(*plan.problem);
}

Status launch(const Context& context, const AnyProblem& problem, const Step& step, const void* args,
              void* workspace, void* stream) {
  if (is_empty(step.launch)) return {};
  Parameters parameters;
  void* const own = workspace ? static_cast<char*>(workspace) + step.workspace_at : nullptr;
  pack(step, problem, args, own, &parameters);
  if (step.maps_packed_q) {  // its last tile must not reach beyond the tokens of this run
    TensorMap map = step.maps[0];
    const int64_t planned = map.size[1];
    map.size[1] = std::max<int64_t>(
        1, total_q(static_cast<const Problem&>(problem), *static_cast<const Args*>(args)));
    if (map.size[1] != planned) ATTN_TRY(context.driver->encode(map, parameters.kernarg));
  }
  Launch launch = step.launch;
  launch.kernarg = parameters.kernarg;
  launch.kernarg_bytes = step.arguments.bytes.size();
  launch.map_base = {parameters.map_base, step.maps.size()};
  return context.driver->launch(launch, stream);
}

// Runs a host kernel, or the steps of a device kernel.
template <class Host>
Status execute(const Context& context, const AnyProblem& problem, const Choice& choice,
               const void* args, void* workspace, void* stream, Host&& host) {
  if (choice.kernel->host) {
    Interrupt interrupt = context.interrupt();
    host(*choice.kernel->host, *context.pool, interrupt);
    ATTN_TRY(interrupt.status());
  }
  for (const Step& step : choice.recipe.steps)
    ATTN_TRY(launch(context, problem, step, args, workspace, stream));
  count_launch(*choice.kernel);
  return {};
}
template <class Host>
Status execute(const Plan& plan, const void* args, void* workspace, void* stream, Host&& host) {
  return execute(*plan.context, *plan.problem, plan.choice, args, workspace, stream, host);
}

Status execute_merge(const Context& context, const MergeProblem& problem, const Choice& choice,
                     const attn_merge_args& args, void* stream) {
  return execute(context, problem, choice, &args, nullptr, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.merge(problem, args, pool, interrupt);
                 });
}

Status execute_forward(const Context& context, const Problem& problem, const Choice& choice,
                       const Args& args, void* workspace, void* stream);

// A run of a composed kernel.
struct ComposedRun {
  const Context& context;
  const Problem& problem;
  const Choice& choice;
  const Args& args;
  void* workspace;
  void* stream;

  template <class T>
  T* at(const Place& place, T* caller) const {
    using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
    if (place.from == Place::workspace)
      return reinterpret_cast<T*>(static_cast<char*>(workspace) + place.bytes);
    if (place.from == Place::nowhere || !caller) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<Bytes*>(caller) + place.bytes);
  }
  const Part& part(size_t n) const { return choice.composition->parts[n]; }

  Status operator()(const RunStep& s) const {
    if (s.for_lse && !args.lse) return {};
    return launch(context, problem, choice.recipe.steps[s.step], &args, workspace, stream);
  }
  Status operator()(const RunForward& s) const {
    const auto& of = static_cast<const Problem&>(*part(s.part).problem);
    Args mine = args;
    mine.num_segments = of.num_segments;
    mine.segment = args.segment.from(s.first_segment);
    attn_segment_args keys[most_keys];
    for (size_t i = 0; i < s.keys.size(); ++i) {
      const attn_segment_args from = args.segment[i];
      keys[i] = {};
      keys[i].struct_size = sizeof keys[i];
      keys[i].k = at(s.keys[i].k, from.k);
      keys[i].v = at(s.keys[i].v, from.v ? from.v : from.k);
      keys[i].seqlens = at(s.keys[i].seqlens, from.seqlens);
      keys[i].block_table = at(s.keys[i].block_table, from.block_table);
      keys[i].k_scale = at(s.keys[i].k_scale, from.k_scale);
      keys[i].k_descale = at(s.keys[i].k_descale, from.k_descale);
    }
    if (!s.keys.empty()) mine.segment = keys;
    mine.q = at(s.q, args.q);
    mine.out = at(s.out, args.out);
    mine.lse = at(s.lse, args.lse);
    mine.cu_seqlens_q = at(s.cu_seqlens_q, args.cu_seqlens_q);
    mine.sinks = at(s.sinks, args.sinks);
    return execute_forward(context, of, part(s.part).choice, mine,
                           static_cast<char*>(workspace) + part(s.part).workspace_at, stream);
  }
  Status operator()(const RunMerge& s) const {
    const void* outs[most_merged];
    const float* lses[most_merged];
    for (size_t i = 0; i < s.outs.size(); ++i) {
      outs[i] = at<const void>(s.outs[i], nullptr);
      lses[i] = at<const float>(s.lses[i], nullptr);
    }
    const attn_merge_args merged = {sizeof(attn_merge_args), int32_t(s.outs.size()), outs, lses,
                                    at(s.out, args.out),     at(s.lse, args.lse)};
    return execute_merge(context, static_cast<const MergeProblem&>(*part(s.part).problem),
                         part(s.part).choice, merged, stream);
  }
};

Status execute_forward(const Context& context, const Problem& problem, const Choice& choice,
                       const Args& args, void* workspace, void* stream) {
  if (!choice.composition)
    return execute(context, problem, choice, &args, workspace, stream,
                   [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                     kernel.forward(problem, args, workspace, pool, interrupt);
                   });
  const ComposedRun run{context, problem, choice, args, workspace, stream};
  for (const Stage& stage : choice.composition->stages) ATTN_TRY(std::visit(run, stage));
  count_launch(*choice.kernel);
  return {};
}

}  // namespace

Status init_workspace(const Plan& plan, void* workspace, size_t bytes, void* stream) {
  ATTN_TRY(check_run(plan, plan.problem->op, stream));
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  if (plan.context->host_memory() || plan.choice.recipe.workspace == 0) return {};
  const Recipe& recipe = plan.choice.recipe;
  return plan.context->driver->fill(workspace, 0, std::min(recipe.workspace, recipe.cleared),
                                    stream);
}

namespace {

// Parts of kernels that consist of others are planned for the problem's tokens.
Status check_total_q(const Plan& plan, Args* args) {
  const auto& problem = problem_of<Problem>(plan);
  if (!plan.choice.composition) return {};
  if (total_q(problem, *args) != problem.total_q)
    return invalid("args.total_q is ", args->total_q, "; accepted by ", plan.choice.kernel->name,
                   ": the problem's ", problem.total_q);
  args->total_q = 0;
  return {};
}

}  // namespace

Status run_forward(const Plan& plan, const attn_args* in, void* workspace, size_t bytes,
                   void* stream) {
  ATTN_TRY(check_run(plan, Op::forward, stream));
  const auto& problem = problem_of<Problem>(plan);
  Args args;
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  ATTN_TRY(check_args(problem, in, workspace, plan.choice.recipe.workspace,
                      plan.context->host_memory(), &args));
  ATTN_TRY(check_total_q(plan, &args));
  return execute_forward(*plan.context, problem, plan.choice, args, workspace, stream);
}

Status run_backward(const Plan& plan, const attn_backward_args* in, void* workspace, size_t bytes,
                    void* stream) {
  ATTN_TRY(check_run(plan, Op::backward, stream));
  const auto& problem = problem_of<BackwardProblem>(plan);
  BackwardArgs args;
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  ATTN_TRY(check_backward_args(problem, in, workspace, plan.choice.recipe.workspace,
                               plan.context->host_memory(), &args));
  return execute(plan, &args, workspace, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   if (!problem.no_batch)
                     kernel.backward(problem, args, workspace, pool, interrupt);
                 });
}

Status run_merge(const Plan& plan, const attn_merge_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::merge, stream));
  const auto& problem = problem_of<MergeProblem>(plan);
  attn_merge_args args;
  ATTN_TRY(check_merge_args(problem, in, plan.context->host_memory(), &args));
  return execute_merge(*plan.context, problem, plan.choice, args, stream);
}

Status run_quantize(const Plan& plan, const attn_quantize_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::quantize, stream));
  const auto& problem = problem_of<QuantizeProblem>(plan);
  attn_quantize_args args;
  ATTN_TRY(check_quantize_args(problem, in, plan.context->host_memory(), &args));
  return execute(plan, &args, nullptr, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.quantize(problem, args, pool, interrupt);
                 });
}

Status run_kv_append(const Plan& plan, const attn_kv_append_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::kv_append, stream));
  const auto& problem = problem_of<KvAppendProblem>(plan);
  attn_kv_append_args args;
  ATTN_TRY(check_kv_append_args(problem, in, plan.context->host_memory(), &args));
  return execute(plan, &args, nullptr, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.kv_append(problem, args, pool, interrupt);
                 });
}

Status run_kv_roll(const Plan& plan, const attn_kv_roll_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::kv_roll, stream));
  const auto& problem = problem_of<KvRollProblem>(plan);
  KvRollArgs args;
  ATTN_TRY(check_kv_roll_args(problem, in, plan.context->host_memory(), &args));
  return execute(plan, &args, nullptr, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.kv_roll(problem, args, pool, interrupt);
                 });
}

Status run_block_mask(const Plan& plan, const MaskArgs& args, void* stream) {
  ATTN_TRY(init_workspace(plan, args.memory, plan.choice.recipe.workspace, stream));
  return execute(plan, &args, args.memory, stream,
                 [](const HostKernel&, ThreadPool&, Interrupt&) {});
}

namespace {

// Host copies of the small arrays of a device run.
class HostCopies {
 public:
  HostCopies(Driver& driver, void* stream) : driver_(driver), stream_(stream) {}
  template <class T>
  Status fetch(const T** array, int64_t count) {
    if (!*array || count <= 0) return {};
    auto& copy = copies_.emplace_back(count * sizeof(T));
    ATTN_TRY(driver_.copy_out(copy.data(), *array, copy.size(), stream_));
    *array = reinterpret_cast<const T*>(copy.data());
    return {};
  }

 private:
  Driver& driver_;
  void* stream_;
  std::vector<std::vector<unsigned char>> copies_;
};

}  // namespace

Status check_forward(const Plan& plan, const attn_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::forward, stream));
  const auto& p = problem_of<Problem>(plan);
  Args args;
  ATTN_TRY(check_args(p, in, nullptr, 0, plan.context->host_memory(), &args));
  ATTN_TRY(check_total_q(plan, &args));
  if (p.batch == 0) return {};  // nothing of a mask is used
  if (plan.context->host_memory()) return check_contents(p, args);

  HostCopies copies(*plan.context->driver, stream);
  ATTN_TRY(copies.fetch(&args.cu_seqlens_q, p.batch + 1));
  ATTN_TRY(copies.fetch(&args.kv_begin, p.batch));
  ATTN_TRY(copies.fetch(&args.query_start, p.batch));
  std::vector<attn_segment_args> segments(p.num_segments);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    segments[i] = args.segment[i];
    const int64_t batch = entries(p.segment[i], p.batch);
    ATTN_TRY(copies.fetch(&segments[i].seqlens, batch));
    ATTN_TRY(copies.fetch(&segments[i].cu_seqlens, batch + 1));
    ATTN_TRY(copies.fetch(&segments[i].block_table, batch * p.segment[i].max_pages));
    ATTN_TRY(copies.fetch(&segments[i].list_lengths, p.segment[i].lists));
    ATTN_TRY(copies.fetch(&segments[i].key_start, batch));
  }
  args.segment = segments.data();
  if (p.has(ATTN_BLOCK_MASK)) {
    const int64_t blocks = p.mask_batch * p.mask_heads * p.mask_rows() * p.mask_columns();
    ATTN_TRY(copies.fetch(&args.block_kinds, blocks));
    ATTN_TRY(copies.fetch(&args.block_index, blocks));
  }
  return check_contents(p, args);
}

}  // namespace attn
