// Runs of plans: their arguments are checked, then the parameters of each step are completed and
// launched.
#include <algorithm>

#include "cpu/host_kernel.h"
#include "kernels/preference.h"
#include "plan/plan.h"

namespace attn {
namespace {

Status check_workspace(const Plan& plan, const void* workspace, size_t bytes) {
  if (plan.workspace == 0) return {};
  if (bytes < plan.workspace)
    return {ATTN_WORKSPACE_TOO_SMALL, join("workspace has ", bytes, " bytes; accepted: ",
                                           plan.workspace, " or more (", plan.kernel->name, ")")};
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

Status launch(const Plan& plan, const AnyProblem& problem, const Step& step, const void* args,
              void* workspace, void* stream) {
  if (is_empty(step.launch)) return {};
  Parameters parameters;
  void* const own = workspace ? static_cast<char*>(workspace) + step.workspace_at : nullptr;
  pack(step, problem, args, own, &parameters);
  Launch launch = step.launch;
  launch.kernarg = parameters.kernarg;
  launch.kernarg_bytes = step.arguments.bytes.size();
  launch.map_base = {parameters.map_base, step.maps.size()};
  return plan.context->driver->launch(launch, stream);
}

// Runs a host kernel, or the steps of a device kernel.
template <class Host>
Status execute(const Plan& plan, const AnyProblem& problem, const Kernel& kernel,
               const std::vector<Step>& steps, const void* args, void* workspace, void* stream,
               Host&& host) {
  if (kernel.host) {
    Interrupt interrupt = plan.context->interrupt();
    host(*kernel.host, *plan.context->pool, interrupt);
    ATTN_TRY(interrupt.status());
  }
  for (const Step& step : steps) ATTN_TRY(launch(plan, problem, step, args, workspace, stream));
  count_launch(kernel);
  return {};
}
template <class Host>
Status execute(const Plan& plan, const void* args, void* workspace, void* stream, Host&& host) {
  return execute(plan, *plan.problem, *plan.kernel, plan.steps, args, workspace, stream, host);
}

Status run_part(const Plan& plan, const ComposedPart& part, const Args& args, void* workspace,
                void* stream) {
  const auto& problem = static_cast<const Problem&>(*part.problem);
  void* const own = static_cast<char*>(workspace) + part.workspace_at;
  return execute(plan, problem, *part.choice.kernel, part.choice.recipe.steps, &args, own, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.forward(problem, args, own, pool, interrupt);
                 });
}
Status run_part(const Plan& plan, const ComposedPart& part, const attn_merge_args& args,
                void* stream) {
  const auto& problem = static_cast<const MergeProblem&>(*part.problem);
  return execute(plan, problem, *part.choice.kernel, part.choice.recipe.steps, &args, nullptr,
                 stream, [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.merge(problem, args, pool, interrupt);
                 });
}

Status run_composed(const Plan& plan, const Args& args, void* workspace, void* stream) {
  const Composed& c = *plan.composed;
  const auto at = [&](size_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  };
  Args part = args;
  part.num_segments = c.num_shared;
  part.sinks = nullptr;  // they are in `own`
  part.out = at(c.shared_out);
  part.lse = at(c.shared_lse);
  ATTN_TRY(run_part(plan, c.shared, part, workspace, stream));
  part.num_segments = args.num_segments - c.num_shared;
  part.segment = args.segment.from(c.num_shared);
  part.sinks = args.sinks;
  part.out = at(c.own_out);
  part.lse = at(c.own_lse);
  ATTN_TRY(run_part(plan, c.own, part, workspace, stream));

  // The parts of `shared`, then `own`.
  const auto& merge = static_cast<const MergeProblem&>(*c.merge.problem);
  const int32_t parts = merge.num_parts - 1;
  const void* outs[most_prefix_parts + 1];
  const float* lses[most_prefix_parts + 1];
  for (int32_t i = 0; i < parts; ++i) {
    outs[i] = at(c.shared_out) + size_t(i) * c.rows * size_t(merge.head_dim_v);
    lses[i] = at(c.ordered_lse) + size_t(i) * c.rows;
  }
  outs[parts] = at(c.own_out);
  lses[parts] = at(c.own_lse);
  if (c.order.problem) {
    const void* const values[] = {at(c.shared_lse)};
    const float* const weights[] = {at(c.zeros)};
    if (plan.context->host_memory()) std::fill_n(at(c.zeros), c.rows, 0.0f);
    ATTN_TRY(run_part(plan, c.order,
                      {sizeof(attn_merge_args), 1, values, weights, at(c.ordered_lse), nullptr},
                      stream));
  }
  return run_part(plan, c.merge,
                  {sizeof(attn_merge_args), merge.num_parts, outs, lses, args.out, args.lse},
                  stream);
}

Status run_gathered(const Plan& plan, const Args& args, void* workspace, void* stream) {
  const Gathered& g = *plan.gathered;
  const auto& p = problem_of<Problem>(plan);
  const auto at = [&](size_t offset) { return static_cast<char*>(workspace) + offset; };
  const auto run_step = [&](const Step& step) {
    return launch(plan, p, step, &args, workspace, stream);
  };
  const bool packed_sequences = g.shape.by_sequence && p.q_layout == ATTN_PACKED;
  attn_segment_args copies{};
  copies.struct_size = sizeof copies;
  copies.k = at(g.place.k);
  if (g.passes.empty()) return {};
  const auto& attend = static_cast<const Problem&>(*g.attend.problem);
  copies.seqlens = reinterpret_cast<const int32_t*>(at(g.place.lengths));
  for (size_t i = 0; i < g.passes.size(); ++i) {
    const int64_t first = g.passes[i].first, count = g.passes[i].count, head = g.passes[i].head;
    ATTN_TRY(run_step(plan.steps[i]));
    const int64_t first_head = head * p.group();
    const ComposedPart& with = count == attend.batch ? g.attend : g.attend_last;
    const bool v_in_k = static_cast<const Problem&>(*with.problem).segment[0].v_in_k;
    copies.v = v_in_k ? nullptr : at(g.place.v);
    Args part = args;
    part.num_segments = 1;
    part.segment = &copies;
    const auto moved = [&](auto* data, attn_dtype type, int64_t row, const attn_strides& stride) {
      using Bytes = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>,
                                       const char, char>;
      return static_cast<Bytes*>(data) + (packed_sequences ? 0 : first * row) +
             dtype_bytes(type, first_head * stride.head);
    };
    part.q = moved(args.q, p.q_type, g.q_row, p.q_stride);
    part.out = moved(args.out, p.out_type, g.out_row, p.out_stride);
    part.cu_seqlens_q = packed_sequences ? args.cu_seqlens_q + first : nullptr;
    if (args.sinks) part.sinks = args.sinks + first_head;
    if (args.lse && g.orders_lse)
      part.lse =
          reinterpret_cast<float*>(at(g.lse)) + (head * g.shape.items + first) * attend.heads_q;
    else if (args.lse && !packed_sequences)
      part.lse = args.lse + first * attend.heads_q * attend.seqlen_q;
    ATTN_TRY(run_part(plan, with, part, workspace, stream));
  }
  if (args.lse && g.orders_lse) ATTN_TRY(run_step(plan.steps.back()));
  count_launch(*plan.kernel);
  return {};
}

}  // namespace

Status init_workspace(const Plan& plan, void* workspace, size_t bytes, void* stream) {
  ATTN_TRY(check_run(plan, plan.problem->op, stream));
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  if (plan.context->host_memory() || plan.workspace == 0) return {};
  return plan.context->driver->fill(workspace, 0, plan.workspace, stream);
}

Status run_forward(const Plan& plan, const attn_args* in, void* workspace, size_t bytes,
                   void* stream) {
  ATTN_TRY(check_run(plan, Op::forward, stream));
  const auto& problem = problem_of<Problem>(plan);
  Args args;
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  ATTN_TRY(check_args(problem, in, workspace, plan.workspace, plan.context->host_memory(), &args));
  if (plan.gathered) return run_gathered(plan, args, workspace, stream);
  if (plan.composed) ATTN_TRY(run_composed(plan, args, workspace, stream));
  return execute(plan, &args, workspace, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.forward(problem, args, workspace, pool, interrupt);
                 });
}

Status run_backward(const Plan& plan, const attn_backward_args* in, void* workspace, size_t bytes,
                    void* stream) {
  ATTN_TRY(check_run(plan, Op::backward, stream));
  const auto& problem = problem_of<BackwardProblem>(plan);
  BackwardArgs args;
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  ATTN_TRY(check_backward_args(problem, in, workspace, plan.workspace, plan.context->host_memory(),
                               &args));
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
  return execute(plan, &args, nullptr, stream,
                 [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
                   kernel.merge(problem, args, pool, interrupt);
                 });
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
  ATTN_TRY(init_workspace(plan, args.memory, plan.workspace, stream));
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
