#include "plan/plan.h"

#include <algorithm>

#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "kernels/device_kernel.h"
#include "problem/rules.h"

namespace attn {
namespace {

// hip-emu runs the rows of hip.
attn_backend row_backend(const Context& context) {
  return context.backend == ATTN_BACKEND_HIP_EMU ? ATTN_BACKEND_HIP : context.backend;
}

// Why a row cannot run on this machine at all; "" if it can.
std::string absent(const Kernel& kernel, const Context& context) {
  if (context.host_memory()) {
    if (!kernel.host) return "not in this build";
    if (!kernel.host->runs_here()) return join("this processor has no ", kernel.host->isa);
    return "";
  }
  return context.without_code(kernel);
}

Status check_demand(const Context& context, Op op, const std::string& name) {
  const char* backend = attn_backend_string(context.backend);
  const Kernel* kernel = find_kernel(name.c_str());
  if (!kernel || kernel->op != op) {
    std::string names;
    for (const Kernel& k : catalog())
      if (k.op == op && k.backend == row_backend(context))
        names += (names.empty() ? "" : ", ") + std::string(k.name);
    return invalid("kernel \"", name, "\" is not a ", op_name(op), " kernel; accepted on ", backend,
                   ": ", names.empty() ? "none" : names);
  }
  if (kernel->backend != row_backend(context))
    return invalid("kernel ", name, " belongs to backend ", attn_backend_string(kernel->backend),
                   "; the context is ", backend);
  return {};
}

// Finds the first row of an operation that `reject` has nothing against and `build` can make a plan
// of. An unsupported problem is a reason to go on, any other failure is final.
template <class Reject, class Build>
Status choose(const Context& context, Op op, const std::string& demanded,
              std::vector<Declined>* declined, Reject&& reject, Build&& build) {
  if (!demanded.empty()) ATTN_TRY(check_demand(context, op, demanded));
  const Kernel* chosen = nullptr;
  std::string reasons;
  for (const Kernel& kernel : catalog()) {
    if (kernel.op != op || kernel.backend != row_backend(context)) continue;
    std::string reason;
    if (!demanded.empty() && demanded != kernel.name) {
      reason = join("the problem demands ", demanded);
    } else {
      reason = absent(kernel, context);
      if (reason.empty()) reason = reject(kernel);
      if (reason.empty() && chosen) reason = join(chosen->name, " comes first");
      if (reason.empty()) {
        Status status = build(kernel);
        if (status.ok()) {
          chosen = &kernel;
          if (!declined) return {};
          continue;
        }
        if (status.code != ATTN_UNSUPPORTED) return status;
        reason = status.text;
      }
      reasons += (reasons.empty() ? "" : "; ") + reason + " (" + kernel.name + ")";
    }
    if (declined) declined->push_back({&kernel, reason});
  }
  if (chosen) return {};
  if (reasons.empty())
    return unsupported(op_name(op), ": no kernel of backend ", attn_backend_string(context.backend),
                       " yet");
  return unsupported(reasons);
}

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
  if (plan.kernel->op != op)
    return invalid("plan is for ", op_name(plan.kernel->op), "; accepted by this call: plans for ",
                   op_name(op));
  if (plan.context->host_memory() && stream)
    return invalid("stream is ", stream, "; accepted on ",
                   attn_backend_string(plan.context->backend), ": NULL");
  return {};
}

bool is_empty(const Launch& launch) {
  return launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0;
}

// Runs a host kernel, or packs a device kernel's parameters on the stack and launches it. `pack`
// returns how many tensor maps there are.
template <class Host, class Pack>
Status execute(const Plan& plan, void* stream, Host&& host, Pack&& pack) {
  if (plan.kernel->host) {
    Interrupt interrupt = plan.context->interrupt();
    host(*plan.kernel->host, *plan.context->pool, interrupt);
    ATTN_TRY(interrupt.status());
    count_launch(*plan.kernel);
    return {};
  }
  Launch launch = plan.launch;
  if (!is_empty(launch)) {
    alignas(64) unsigned char kernarg[max_kernarg_bytes];
    TensorMap maps[max_tensor_maps];
    const int count = pack(*plan.kernel->device, kernarg, maps);
    std::copy(plan.encoded_maps.begin(), plan.encoded_maps.end(), kernarg);
    launch.kernarg = launch.encoded_maps = kernarg;
    launch.maps = {maps, size_t(count)};
    launch.kernarg_bytes = plan.kernel->device->kernarg_bytes;
    ATTN_TRY(plan.context->driver->launch(launch, stream));
  }
  count_launch(*plan.kernel);
  return {};
}

Status finish_device_plan(Plan* plan) {
  return plan->context->function(*plan->kernel, plan->launch.shared_bytes, &plan->launch.function);
}

// A call without batch entries has nothing to do, whatever the kernel's limits are.
Status launch_nothing(Plan* plan) {
  plan->launch.grid[0] = 0;
  return {};
}

// Only the addresses of a forward kernel's tensor maps are left to its runs.
Status encode_maps(Plan* plan) {
  plan->encoded_maps.clear();
  const DeviceKernel& kernel = *plan->kernel->device;
  if (!kernel.maps_forward) return {};
  Args args{};
  const std::vector<attn_segment_args> segments(plan->problem.num_segments);
  args.segment = segments.data();
  TensorMap maps[max_tensor_maps];
  const int count = kernel.maps_forward(plan->problem, args, maps);
  plan->encoded_maps.resize(count * tensor_map_bytes);
  alignas(64) unsigned char encoded[tensor_map_bytes];
  for (int i = 0; i < count; ++i) {
    ATTN_TRY(plan->context->driver->encode(maps[i], encoded));
    std::copy_n(encoded, tensor_map_bytes, plan->encoded_maps.begin() + i * tensor_map_bytes);
  }
  return {};
}

// A plan of an operation whose kernels differ in the types and strides that they take.
template <class Shape>
Status plan_operation(const std::shared_ptr<Context>& context, Op op, const char* demanded,
                      int64_t batch, std::pair<attn_dtype, attn_dtype> types,
                      std::pair<attn_strides, attn_strides> strides, Plan* plan, Shape&& shape) {
  plan->context = context;
  const attn_dtype in = types.first, out = types.second;
  const bool negative = is_negative(strides.first) || is_negative(strides.second);
  return choose(
      *context, op, demanded ? demanded : "", nullptr,
      [&](const Kernel& kernel) -> std::string {
        if (!(kernel.limits.q_types & type_bit(in))) return join("input type ", dtype_name(in));
        if (!(kernel.limits.out_types & type_bit(out)))
          return join("output type ", dtype_name(out));
        if (negative && !(kernel.limits.features & feature_negative_strides))
          return "negative strides";
        return "";
      },
      [&](const Kernel& kernel) -> Status {
        plan->kernel = &kernel;
        if (batch == 0) return launch_nothing(plan);
        if (kernel.host) return {};
        ATTN_TRY(shape(*kernel.device));
        return finish_device_plan(plan);
      });
}

}  // namespace

Status plan_forward(const std::shared_ptr<Context>& context, const attn_problem* problem,
                    std::unique_ptr<Plan>* out, std::vector<Declined>* declined) {
  auto plan = std::make_unique<Plan>();
  plan->context = context;
  ATTN_TRY(make_problem(problem, &plan->problem));
  ATTN_TRY(choose(
      *context, Op::forward, plan->problem.kernel_name, declined,
      [&](const Kernel& kernel) -> std::string {
        const std::string reason = decline(kernel, plan->problem);
        const bool demanded = !plan->problem.kernel_name.empty();
        if (!reason.empty() || demanded || !kernel.device || !kernel.device->passed_over)
          return reason;
        return kernel.device->passed_over(plan->problem);
      },
      [&](const Kernel& kernel) -> Status {
        plan->kernel = &kernel;
        if (plan->problem.batch == 0) return launch_nothing(plan.get());
        if (kernel.host) {
          plan->workspace = kernel.host->workspace(plan->problem, context->pool->threads());
          return {};
        }
        ATTN_TRY(kernel.device->shape_forward(plan->problem, context->driver->device(),
                                              &plan->launch, &plan->workspace));
        if (const FirstKernel* first = kernel.device->first) {
          first->shape(plan->problem, &plan->first);
          ATTN_TRY(context->function(*first, &plan->first.function));
        }
        ATTN_TRY(encode_maps(plan.get()));
        return finish_device_plan(plan.get());
      }));
  *out = std::move(plan);
  return {};
}

Status plan_merge(const std::shared_ptr<Context>& context, const attn_merge_problem* problem,
                  std::unique_ptr<Plan>* out) {
  auto plan = std::make_unique<Plan>();
  ATTN_TRY(make_merge_problem(problem, &plan->merge));
  const MergeProblem& p = plan->merge;
  ATTN_TRY(plan_operation(context, Op::merge, p.kernel, p.batch, {p.part_type, p.out_type},
                          {p.part_stride, p.out_stride}, plan.get(),
                          [&](const DeviceKernel& kernel) {
                            return kernel.shape_merge(p, context->driver->device(), &plan->launch);
                          }));
  *out = std::move(plan);
  return {};
}

Status plan_quantize(const std::shared_ptr<Context>& context, const attn_quantize_problem* problem,
                     std::unique_ptr<Plan>* out) {
  auto plan = std::make_unique<Plan>();
  ATTN_TRY(make_quantize_problem(problem, &plan->quantize));
  const QuantizeProblem& p = plan->quantize;
  ATTN_TRY(
      plan_operation(context, Op::quantize, p.kernel, p.batch, {p.src_type, p.dst_type},
                     {p.src_stride, p.dst_stride}, plan.get(), [&](const DeviceKernel& kernel) {
                       return kernel.shape_quantize(p, context->driver->device(), &plan->launch);
                     }));
  *out = std::move(plan);
  return {};
}

Status init_workspace(const Plan& plan, void* workspace, size_t bytes, void* stream) {
  ATTN_TRY(check_run(plan, plan.kernel->op, stream));
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  if (plan.context->host_memory() || plan.workspace == 0) return {};
  return plan.context->driver->fill(workspace, 0, plan.workspace, stream);
}

namespace {

Status launch_first(const Plan& plan, const FirstKernel& kernel, const Args& args, void* workspace,
                    void* stream) {
  Launch launch = plan.first;
  if (is_empty(launch) || is_empty(plan.launch)) return {};
  alignas(64) unsigned char kernarg[max_kernarg_bytes];
  kernel.pack(plan.problem, args, workspace, kernarg);
  launch.kernarg = kernarg;
  launch.kernarg_bytes = kernel.kernarg_bytes;
  return plan.context->driver->launch(launch, stream);
}

}  // namespace

Status run_forward(const Plan& plan, const attn_args* in, void* workspace, size_t bytes,
                   void* stream) {
  ATTN_TRY(check_run(plan, Op::forward, stream));
  Args args;
  ATTN_TRY(check_workspace(plan, workspace, bytes));
  ATTN_TRY(
      check_args(plan.problem, in, workspace, plan.workspace, plan.context->host_memory(), &args));
  if (plan.kernel->device && plan.kernel->device->first)
    ATTN_TRY(launch_first(plan, *plan.kernel->device->first, args, workspace, stream));
  return execute(
      plan, stream,
      [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
        kernel.forward(plan.problem, args, workspace, pool, interrupt);
      },
      [&](const DeviceKernel& kernel, void* kernarg, TensorMap(&maps)[max_tensor_maps]) {
        kernel.pack_forward(plan.problem, args, workspace, kernarg);
        return kernel.maps_forward ? kernel.maps_forward(plan.problem, args, maps) : 0;
      });
}

Status run_merge(const Plan& plan, const attn_merge_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::merge, stream));
  attn_merge_args args;
  ATTN_TRY(check_merge_args(plan.merge, in, plan.context->host_memory(), &args));
  return execute(
      plan, stream,
      [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
        kernel.merge(plan.merge, args, pool, interrupt);
      },
      [&](const DeviceKernel& kernel, void* kernarg, auto&) {
        kernel.pack_merge(plan.merge, args, kernarg);
        return 0;
      });
}

Status run_quantize(const Plan& plan, const attn_quantize_args* in, void* stream) {
  ATTN_TRY(check_run(plan, Op::quantize, stream));
  attn_quantize_args args;
  ATTN_TRY(check_quantize_args(plan.quantize, in, plan.context->host_memory(), &args));
  return execute(
      plan, stream,
      [&](const HostKernel& kernel, ThreadPool& pool, Interrupt& interrupt) {
        kernel.quantize(plan.quantize, args, pool, interrupt);
      },
      [&](const DeviceKernel& kernel, void* kernarg, auto&) {
        kernel.pack_quantize(plan.quantize, args, kernarg);
        return 0;
      });
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
  const Problem& p = plan.problem;
  Args args;
  ATTN_TRY(check_args(p, in, nullptr, 0, plan.context->host_memory(), &args));
  if (p.batch == 0) return {};  // nothing of a mask is used
  if (plan.context->host_memory()) return check_contents(p, args);

  HostCopies copies(*plan.context->driver, stream);
  ATTN_TRY(copies.fetch(&args.cu_seqlens_q, p.batch + 1));
  std::vector<attn_segment_args> segments(p.num_segments);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    segments[i] = args.segment[i];
    ATTN_TRY(copies.fetch(&segments[i].seqlens, p.batch));
    ATTN_TRY(copies.fetch(&segments[i].cu_seqlens, p.batch + 1));
    ATTN_TRY(copies.fetch(&segments[i].block_table, p.batch * p.segment[i].max_pages));
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
