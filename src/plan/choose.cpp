#include "plan/choose.h"

#include "cpu/host_kernel.h"
#include "plan/gather.h"
#include "plan/prefix.h"
#include "plan/refusal.h"
#include "plan/shards.h"

namespace attn {
namespace {

// The kernel that a problem demands by name.
Status find_demanded(const Machine& machine, Op op, const std::string& name, const Kernel** to) {
  const char* backend = attn_backend_string(machine.backend);
  const Kernel* kernel = *to = find_kernel(name.c_str());
  if (!kernel || kernel->op != op) {
    return invalid("kernel \"", name, "\" is not a ", op_name(op), " kernel; accepted on ", backend,
                   ": ", similar_kernels(op, machine.row_backend(), name));
  }
  if (kernel->backend != machine.row_backend())
    return invalid("kernel ", name, " belongs to backend ", attn_backend_string(kernel->backend),
                   "; the context is ", backend);
  return {};
}

// What holds for the steps of any kernel.
Status check_step(const Step& step, const Machine& machine) {
  const int64_t shared_total = int64_t{step.launch.shared_bytes} + step.static_shared_bytes;
  if (shared_total > machine.device->shared_bytes_max)
    return unsupported(step.image, ": needs ", shared_total, " bytes of shared memory; ",
                       machine.device->name, " has ", machine.device->shared_bytes_max);
  const std::string reason = without_code(step.image, machine);
  return reason.empty() ? Status{} : unsupported(reason);
}

Status check_steps(const Recipe& recipe, const Machine& machine) {
  for (const Step& step : recipe.steps) ATTN_TRY(check_step(step, machine));
  return {};
}

// How a kernel is composed, and whether it is of any use for a problem that does not demand it.
struct Way {
  bool (*concerns)(const AnyProblem& problem);
  Status (*compose)(const Problem& problem, const Machine& machine, const ChoosePart& choose,
                    Choice* choice);
};
Way way_of(const Kernel& kernel) {
  switch (kernel.composed) {
    case Composed::lists:
      return {gathers, compose_lists};
    case Composed::shards:
      return {has_shards, compose_shards};
    default:
      return {shares_segments, compose_prefix};
  }
}

Status look(const AnyProblem& problem, const Machine& machine, Choice* choice,
            std::vector<Declined>* declined, Refused* refused);

// An ATTN_UNSUPPORTED is a reason to go on, any other failure is final. `read`: its sentence is.
Status make_choice(const Kernel& kernel, const AnyProblem& problem, const Machine& machine,
                   bool read, Choice* choice) {
  choice->kernel = &kernel;
  if (problem.no_batch) return {};
  if (kernel.composed != Composed::no) {
    const auto choose_part = [&](const AnyProblem& part, Choice* of) {
      if (read) return choose(part, machine, of);
      ATTN_TRY(look(part, machine, of, nullptr, nullptr));
      return of->kernel ? Status{} : unsupported("no kernel");
    };
    const auto& p = static_cast<const Problem&>(problem);
    ATTN_TRY(way_of(kernel).compose(p, machine, choose_part, choice));
    return check_steps(choice->recipe, machine);
  }
  Recipe* const recipe = &choice->recipe;
  if (kernel.host) {
    if (kernel.host->workspace)
      recipe->workspace = kernel.host->workspace(problem, machine.threads);
    return {};
  }
  ATTN_TRY(kernel.recipe(problem, *machine.device, recipe));
  return check_steps(*recipe, machine);
}

// choose() but for the sentence where there is no kernel: then choice->kernel is null, and
// `refused` (may be null) gets those that may run it.
Status look(const AnyProblem& problem, const Machine& machine, Choice* choice,
            std::vector<Declined>* declined, Refused* refused) {
  const Kernel* demanded = nullptr;
  if (!problem.kernel_name.empty())
    ATTN_TRY(find_demanded(machine, problem.op, problem.kernel_name, &demanded));
  choice->kernel = nullptr;
  Choice passed_over;  // the first that has left the problem to later ones
  // Places in `declined` of those whose reason lacks the name of the preferred kernel.
  std::vector<size_t> lacks_name;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.op != problem.op || kernel.backend != machine.row_backend()) continue;
    const bool composed = kernel.composed != Composed::no;
    if (composed && demanded != &kernel && !way_of(kernel).concerns(problem)) continue;
    // Reasons are not written if no caller asks for them.
    if (!declined && !refused && !(takes(kernel, problem.needs) && present(kernel, machine)))
      continue;
    // Other kernels than those that shards are made of do not take them. They may be named.
    const bool made_of_others = kernel.composed == Composed::shards && has_shards(problem);
    std::string reason;
    if (demanded && demanded != &kernel && !made_of_others) {
      reason = join("the problem demands ", demanded->name);
    } else {
      Choice made;
      reason = absent(kernel, machine);
      const bool present = reason.empty();
      if (reason.empty()) reason = decline(kernel, problem.needs);
      if (reason.empty()) {
        const Status status = make_choice(kernel, problem, machine, declined || refused, &made);
        if (!status.ok() && status.code != ATTN_UNSUPPORTED) return status;
        reason = status.text;
      }
      if (reason.empty() && !demanded && !made.recipe.passed_over.empty()) {
        reason = made.recipe.passed_over;
        if (!passed_over.kernel) passed_over = std::move(made);
        if (declined) lacks_name.push_back(declined->size());
      }
      if (reason.empty() && choice->kernel) reason = join(choice->kernel->name, " comes first");
      if (reason.empty()) {
        *choice = std::move(made);
        if (!declined) return {};
        continue;
      }
      // What its parts lack, other kernels lack as well.
      if (refused && (demanded || !composed || made_of_others))
        (present ? refused->present : refused->absent).push_back({&kernel, reason});
    }
    if (declined) declined->push_back({&kernel, reason});
  }
  if (!choice->kernel && passed_over.kernel) *choice = std::move(passed_over);
  if (!declined || !choice->kernel) return {};
  for (const size_t i : lacks_name)
    (*declined)[i].reason += join("; ", choice->kernel->name, " is preferred");
  std::erase_if(*declined, [&](const Declined& d) { return d.kernel == choice->kernel; });
  return {};
}

}  // namespace

Status choose(const AnyProblem& problem, const Machine& machine, Choice* choice,
              std::vector<Declined>* declined) {
  // Silently first: sentences about kernels cost more than all else of a plan.
  if (!declined) {
    ATTN_TRY(look(problem, machine, choice, nullptr, nullptr));
    if (choice->kernel) return {};
  }
  Refused refused;
  ATTN_TRY(look(problem, machine, choice, declined, &refused));
  if (choice->kernel) return {};
  return unsupported(refusal(problem, machine, refused, [&](const Problem& other) {
    Choice of;
    return look(other, machine, &of, nullptr, nullptr).ok() && of.kernel;
  }));
}

}  // namespace attn
