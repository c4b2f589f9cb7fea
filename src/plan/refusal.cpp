#include "plan/refusal.h"

#include <algorithm>

#include "core/dtype.h"

namespace attn {
namespace {

constexpr size_t most_reasons = 4, most_names = 6;

std::string place_of(const Machine& machine) {
  return machine.device ? machine.device->arch : attn_backend_string(machine.backend);
}

std::string and_more(size_t rest, const char* what) {
  return rest > 0 ? join(" and ", rest, " more", what) : "";
}

// Each reason once, with the first kernel that gives it.
std::string reasons_of(const std::vector<Declined>& declined, const Needs& needs) {
  struct Reason {
    const Declined* first;
    size_t more;
    bool late;  // the kernel's limits take the problem
  };
  std::vector<Reason> reasons;
  for (const Declined& d : declined) {
    const auto same = std::find_if(reasons.begin(), reasons.end(),
                                   [&](const Reason& r) { return r.first->reason == d.reason; });
    if (same == reasons.end())
      reasons.push_back({&d, 0, decline(*d.kernel, needs).empty()});
    else
      ++same->more;
  }
  std::stable_partition(reasons.begin(), reasons.end(), [](const Reason& r) { return r.late; });
  std::string text;
  for (size_t i = 0; i < std::min(reasons.size(), most_reasons); ++i) {
    const Reason& r = reasons[i];
    text += join(i ? "; " : "", r.first->reason, " (", r.first->kernel->name, and_more(r.more, ""),
                 ")");
  }
  if (reasons.size() > most_reasons)
    text += join("; and ", reasons.size() - most_reasons, " other reasons, see attn_explain");
  return text;
}

// Arguments whose types may be changed together.
enum : unsigned { arg_q = 1, arg_k = 2, arg_v = 4, arg_out = 8 };

// The problem with other types, where that is one.
bool with_types(const Problem& from, unsigned args, attn_dtype type, Problem* to) {
  attn_problem in = from;
  in.struct_size = sizeof in;
  in.kernel = from.kernel_name.empty() ? nullptr : from.kernel_name.c_str();
  if (args & arg_q) in.q_type = type;
  if (args & arg_out) in.out_type = type;
  std::vector<attn_segment> segments(from.segment.begin(), from.segment.end());
  for (attn_segment& s : segments) {
    s.struct_size = sizeof s;
    // If the type is new, its scales are contiguous.
    if (args & arg_k) s.k_type = type, s.k_scale_stride = {};
    if (args & arg_v) s.v_type = type, s.v_scale_stride = {};
  }
  in.segments = segments.data();
  return make_problem(&in, to).ok();
}

std::string types_of(const Problem& p, unsigned arg) {
  uint32_t types = 0;
  if (arg & arg_q) types |= type_bit(p.q_type);
  if (arg & arg_k) types |= p.needs.k_types;
  if (arg & arg_v) types |= p.needs.v_types;
  if (arg & arg_out) types |= type_bit(p.out_type);
  return type_names(types);
}

// "k: f16; accepted: bf16, q8_0", "" if no other type of these arguments is accepted.
std::string accepted(const Problem& p, unsigned args, const char* name,
                     const std::function<bool(const Problem&)>& runs) {
  uint32_t types = 0;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t) {
    Problem other;
    if (with_types(p, args, attn_dtype(t), &other) && runs(other)) types |= type_bit(attn_dtype(t));
  }
  return types == 0 ? "" : join(name, ": ", types_of(p, args), "; accepted: ", type_names(types));
}

// Which arguments are to be of other types; "" if that alone does not help.
std::string refused_types(const Problem& p, const Machine& machine,
                          const std::function<bool(const Problem&)>& runs) {
  std::string choices;
  const auto add = [&](unsigned args, const char* name) {
    const std::string choice = accepted(p, args, name, runs);
    if (!choice.empty()) choices += (choices.empty() ? "" : "; or ") + choice;
    return !choice.empty();
  };
  const bool k = add(arg_k, "k"), v = add(arg_v, "v");
  if (!k && !v) add(arg_k | arg_v, "k and v");
  add(arg_q, "q");
  add(arg_out, "out");
  if (choices.empty()) add(arg_q | arg_k | arg_v, "q, k and v");
  if (choices.empty()) return "";
  return join("no kernel on ", place_of(machine), " takes q of ", types_of(p, arg_q), " with k of ",
              types_of(p, arg_k), ", v of ", types_of(p, arg_v), " and out of ",
              types_of(p, arg_out), "; ", choices);
}

std::string text_of(const Sizes& sizes) {
  const std::string up_to = sizes.max == INT64_MAX ? "" : join(" up to ", sizes.max);
  return sizes.multiple == 1 ? "any" + up_to : join("multiples of ", sizes.multiple, up_to);
}

// What the kernels take of both head dimensions, without what another takes too.
std::string refused_head_dims(const std::vector<Declined>& declined, const Needs& needs) {
  struct Taken {
    Sizes qk, v;
  };
  std::vector<Taken> taken;
  const auto within = [](const Sizes& a, const Sizes& b) {
    return a.multiple % b.multiple == 0 && a.max <= b.max;
  };
  for (const Declined& d : declined) {
    const Taken t = {d.kernel->limits.head_dim, d.kernel->limits.head_dim_v};
    const auto covers = [&](const Taken& a, const Taken& b) {
      return within(b.qk, a.qk) && within(b.v, a.v);
    };
    if (std::any_of(taken.begin(), taken.end(), [&](const Taken& o) { return covers(o, t); }))
      continue;
    std::erase_if(taken, [&](const Taken& o) { return covers(t, o); });
    taken.push_back(t);
  }
  std::string text;
  for (size_t i = 0; i < std::min(taken.size(), most_reasons); ++i) {
    const auto& [qk, v] = taken[i];
    text += (i ? "; " : "") + text_of(qk);
    if (v.max != qk.max || v.multiple != qk.multiple) text += " with head_dim_v " + text_of(v);
  }
  return join("head_dim is ", needs.head_dim, " and head_dim_v ", needs.head_dim_v,
              "; accepted with these types: ", text);
}

std::vector<Declined> filtered(const std::vector<Declined>& declined, const Needs& needs,
                               bool (*takes)(const Kernel&, const Needs&)) {
  std::vector<Declined> some;
  for (const Declined& d : declined)
    if (takes(*d.kernel, needs)) some.push_back(d);
  return some;
}

}  // namespace

std::string refusal(const AnyProblem& problem, const Machine& machine, const Refused& refused,
                    const std::function<bool(const Problem&)>& runs) {
  const char* op = op_name(problem.op);
  const bool demanded = !problem.kernel_name.empty();
  if (refused.present.empty() && refused.absent.empty())
    return join(op, ": no kernel of backend ", attn_backend_string(machine.backend), " yet");
  if (refused.present.empty()) {
    const Declined& first = refused.absent.front();
    if (demanded || machine.file || machine.host_memory())
      return join(op, ": ", first.reason, " (", first.kernel->name,
                  and_more(refused.absent.size() - 1, ""), ")");
    return join(op, ": ", no_code(problem.op, machine.row_backend(), machine.device->arch),
                "; backend cpu needs none");
  }
  if (demanded || problem.op != Op::forward) return reasons_of(refused.present, problem.needs);

  const auto& p = static_cast<const Problem&>(problem);
  const std::vector<Declined> of_types = filtered(refused.present, p.needs, takes_types);
  if (of_types.empty()) {
    const std::string types = refused_types(p, machine, runs);
    return types.empty() ? reasons_of(refused.present, p.needs) : types;
  }
  const std::vector<Declined> of_dims = filtered(of_types, p.needs, takes_head_dims);
  return of_dims.empty() ? refused_head_dims(of_types, p.needs) : reasons_of(of_dims, p.needs);
}

std::string similar_kernels(Op op, attn_backend backend, const std::string& name) {
  std::vector<const char*> names;
  for (const Kernel& k : catalog())
    if (k.op == op && k.backend == backend) names.push_back(k.name);
  if (names.empty()) return "none";
  const auto common = [&](const char* other) {
    size_t n = 0;
    while (n < name.size() && name[n] == other[n]) ++n;
    return n;
  };
  std::stable_sort(names.begin(), names.end(),
                   [&](const char* a, const char* b) { return common(a) > common(b); });
  std::string text;
  const size_t shown = std::min(names.size(), most_names);
  for (size_t i = 0; i < shown; ++i) text += (i ? ", " : "") + std::string(names[i]);
  return text + and_more(names.size() - shown, ", see attn_info");
}

}  // namespace attn
