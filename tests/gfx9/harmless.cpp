// Why a mutation is harmless; see mutations.h.
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "gfx9/mutations.h"
#include "gfx9/shipped.h"
#include "gfx9emu/decode.h"
#include "gfx9emu/wave.h"

namespace attn::test {
namespace {

using namespace gfx9emu;

// Not those that mutations are noticed by.
constexpr uint32_t data_first = 1000, data_last = 1001;
constexpr uint64_t schedule_first = 1000, schedule_last = 1031;

// ---- s_nop -------------------------------------------------------------------------------------

// Whether LLVM's hazard recognizer puts the s_nop back; none if it cannot be asked.
std::optional<bool> nop_is_needed(const std::string& kernel, uint64_t offset) {
  const std::string command =
      "'" ATTN_PYTHON "' '" ATTN_AMDHSA "' hazards --s-nops --json --llvm '" ATTN_LLVM_BIN_DIR
      "' '" ATTN_GFX9_IMAGES_DIR "/" +
      kernel.substr(kernel.find("gfx9"), 6) + "/" + kernel + ".hsaco' 2>/dev/null";
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return {};
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
  if (pclose(pipe) != 0) return {};
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) return {};
  for (const auto& k : json.at("kernels")) {
    if (k.at("kernel") != kernel) continue;
    for (const auto& nop : k.at("s_nops"))
      if (nop.at("offset") == offset) return nop.at("needed").get<bool>();
  }
  return {};
}

uint64_t offset_of(const Mutation& mutation) {
  return std::stoull(mutation.text.substr(1));
}

// ---- s_waitcnt, s_barrier ----------------------------------------------------------------------

// The kernel as it is on these data.
const ShippedRun& right_run(const std::string& kernel, uint32_t data) {
  static std::map<std::pair<std::string, uint32_t>, ShippedRun> all;
  ShippedRun& run = all[{kernel, data}];
  if (run.problems.empty()) {
    Memory memory;
    run = run_shipped(kernel, *load_shipped(kernel, &memory), memory, {}, data);
  }
  return run;
}

// Numbers of the problems in which some wave executes the instruction.
std::vector<size_t> problems_that_execute(const std::string& kernel, int index) {
  static thread_local bool executed;
  static thread_local decltype(Inst::run) original;
  std::vector<size_t> all;
  const size_t count = right_run(kernel, data_first).problems.size();
  for (size_t n = 0; n < count; ++n) {
    Memory memory;
    const auto object = load_shipped(kernel, &memory);
    Inst& inst = const_cast<Program&>(object->program()).insts[index];
    original = inst.run;
    inst.run = [](Wave& w, const Inst& i) {
      executed = true;
      original(w, i);
    };
    executed = false;
    run_shipped_problem(kernel, n, *object, memory, {.checks = false}, data_first);
    if (executed) all.push_back(n);
  }
  return all;
}

std::string right_in_any_order(const std::string& kernel, const Mutation& mutation) {
  const std::vector<size_t> problems = problems_that_execute(kernel, mutation.index);
  for (uint32_t data = data_first; data <= data_last; ++data) {
    const ShippedRun& right = right_run(kernel, data);
    for (uint64_t seed = schedule_first; seed <= schedule_last; ++seed) {
      for (const size_t n : problems) {
        Memory own;
        const auto mutant = load_shipped(kernel, &own);
        mutation.apply(*mutant);
        const ShippedRun run = run_shipped_problem(kernel, n, *mutant, own, {.seed = seed}, data);
        if (!run.fault.empty() || run.outputs != right.problems[n].outputs) return "";
      }
    }
  }
  return "right in " + std::to_string(schedule_last - schedule_first + 1) + " random schedules";
}

// ---- registers ---------------------------------------------------------------------------------

// What a wave's registers hold.
struct State {
  std::vector<Row> rows;
  std::vector<uint32_t> scalars;
  uint32_t mode = 0;
};
State state_of(Wave& w) {
  return {std::vector<Row>(w.v, w.v + w.context.kernel->descriptor.vgprs),
          std::vector<uint32_t>(w.s, w.s + std::size(w.s)), w.mode};
}
void set_state(Wave& w, const State& state) {
  std::copy(state.rows.begin(), state.rows.end(), w.v);
  std::copy(state.scalars.begin(), state.scalars.end(), w.s);
  w.set_mode(state.mode);
}

// The instruction as it is and as it is mutated, side by side. After it has run, what the mutant
// would have left otherwise counts as never written, so that the checks report who reads it.
struct Comparison {
  Inst original, mutant;
  bool differs = false;  // at least once
  std::string unsound;   // what cannot be followed
  struct Difference {
    std::vector<std::pair<int, uint64_t>> rows;  // register, lanes
    std::vector<int> scalars;
  };
  std::map<Wave*, Difference> pending;

  bool is_memory() const { return original.is_load || original.is_store || original.is_lds_dma; }

  Difference compare(const State& a, const State& b) {
    Difference d;
    for (size_t r = 0; r < a.rows.size(); ++r) {
      uint64_t lanes = 0;
      for (int l = 0; l < wave_lanes; ++l) {
        lanes |= uint64_t{a.rows[r].lane[l] != b.rows[r].lane[l]} << l;
      }
      if (lanes) d.rows.emplace_back(int(r), lanes);
    }
    for (size_t r = 0; r < a.scalars.size(); ++r) {
      if (a.scalars[r] != b.scalars[r]) d.scalars.push_back(int(r));
    }
    if (a.mode != b.mode) unsound = "MODE differs";
    for (const int r : d.scalars) {
      if (r == scalar::exec || r == scalar::exec + 1) unsound = "EXEC differs";
    }
    return d;
  }

  void run(Wave& w) {
    const State before = state_of(w);
    if (!is_memory()) {
      mutant.run(w, mutant);
      const State other = state_of(w);
      set_state(w, before);
      original.run(w, original);
      pending[&w] = compare(state_of(w), other);
      return;
    }
    // An access is made once: its operands hold the same, or its result goes elsewhere.
    for (int i = original.dst_count; i < original.op_count; ++i) {
      if (!original.op[i].is_register() || original.op[i].reg == mutant.op[i].reg) continue;
      const RegRange &a = original.op[i].reg, &b = mutant.op[i].reg;
      for (int n = 0; n < a.count; ++n) {
        if (a.file == RegFile::Scalar) {
          if (w.s[a.first + n] != w.s[b.first + n]) unsound = "operands of an access differ";
          continue;
        }
        for (int l = 0; l < wave_lanes; ++l) {
          const bool same = w.row(a, n).lane[l] == w.row(b, n).lane[l];
          if (w.exec() >> l & 1 && !same) unsound = "operands of an access differ";
        }
      }
    }
    original.run(w, original);
    if (original.dst_count == 0 || original.op[0].reg == mutant.op[0].reg) return;
    State other = before;
    const RegRange &a = original.op[0].reg, &b = mutant.op[0].reg;
    for (int n = 0; n < a.count; ++n) {
      if (a.file == RegFile::Scalar) {
        other.scalars[b.first + n] = w.s[a.first + n];
      } else {
        for (int l = 0; l < wave_lanes; ++l) {
          if (w.exec() >> l & 1) {
            other.rows[w.physical(b) + n].lane[l] = w.row(a, n).lane[l];
          }
        }
      }
    }
    pending[&w] = compare(state_of(w), other);
  }

  void forget(Wave& w) {
    const Difference d = std::move(pending[&w]);
    pending.erase(&w);
    for (const auto& [r, lanes] : d.rows) {
      for (uint64_t& half : w.defined[r].half) half &= ~lanes;
    }
    for (const int r : d.scalars) w.scalar_defined[r] = 0;
    differs |= !d.rows.empty() || !d.scalars.empty();
  }
};
thread_local Comparison* comparison;

std::string never_matters(const std::string& kernel, const Mutation& mutation) {
  Memory memory;
  const auto watched = load_shipped(kernel, &memory);
  Comparison c;
  auto& program = const_cast<Program&>(watched->program());
  Inst& inst = program.insts[mutation.index];
  c.original = inst;
  if (parse_instruction(mutation.replaced, c.mutant) != "") return "";
  c.mutant.imm = c.original.imm;
  inst.run = [](Wave& w, const Inst&) { comparison->run(w); };
  inst.lanes = nullptr;
  // Behind it, out of the reach of branches.
  Inst after;
  parse_instruction("s_sleep 0", after);
  after.offset = inst.offset;
  after.run = [](Wave& w, const Inst&) { comparison->forget(w); };
  program.insts.insert(program.insts.begin() + mutation.index + 1, after);
  for (int32_t& at : program.at) {
    if (at > mutation.index) ++at;
  }

  comparison = &c;
  for (uint32_t data = data_first; data <= data_last; ++data) {
    const ShippedRun& right = right_run(kernel, data);
    const ShippedRun run = run_shipped(kernel, *watched, memory, {.hazards = false}, data);
    if (!c.unsound.empty() || !run.fault.empty() || run.outputs != right.outputs) return "";
  }
  return c.differs ? "what it leaves otherwise is never read" : "it leaves the same values";
}

}  // namespace

bool is_reported_by_llvm(const std::string& kernel, const Mutation& mutation) {
  return mutation.kind == MutationKind::Nop && nop_is_needed(kernel, offset_of(mutation)) == true;
}

std::string why_harmless(const std::string& kernel, const Mutation& mutation) {
  switch (mutation.kind) {
    case MutationKind::Nop:
      return nop_is_needed(kernel, offset_of(mutation)) == false ? "LLVM does not put it back" : "";
    case MutationKind::Cache:
      break;
    case MutationKind::Wait:
    case MutationKind::Barrier:
      return right_in_any_order(kernel, mutation);
    case MutationKind::Register:
      return never_matters(kernel, mutation);
    case MutationKind::Descriptor:
      // A read of them would be a fault. Kernels that share a table need not all of it.
      if (mutation.text.find("kernarg_bytes") != mutation.text.npos)
        return "no problem reads the last bytes of the arguments";
      break;
  }
  return "";
}

}  // namespace attn::test
