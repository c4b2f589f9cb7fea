// The shipped kernels with something left out or wrong: the emulator reports it, or the result
// differs.
#include <algorithm>
#include <functional>
#include <iostream>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "catch.h"
#include "gfx9/shipped.h"
#include "gfx9emu/decode.h"

using namespace gfx9emu;
using namespace attn::test;

namespace {

Program& program_of(CodeObject& object) {
  return const_cast<Program&>(object.program());
}
Descriptor& descriptor_of(CodeObject& object, const std::string& kernel) {
  return const_cast<Kernel*>(object.kernel(kernel))->descriptor;
}

// As if it had never been written: the next instruction follows at once.
void drop(Program& p, int index) {
  p.insts.erase(p.insts.begin() + index);
  for (int32_t& at : p.at) {
    if (at > index) --at;
  }
}

struct Mutation {
  std::string kind, text;
  std::function<void(CodeObject&)> apply;
};

// Another register of the same kind and size in place of one named in the text. "" if there is
// none.
std::string swap_register(const std::string& text, const Kernel& kernel, std::mt19937& rng) {
  static const std::regex one(R"(\b([sv])(?:(\d+)|\[(\d+):(\d+)\]))");
  const std::vector<std::smatch> found(std::sregex_iterator(text.begin(), text.end(), one), {});
  if (found.empty()) return "";
  const std::smatch& m = found[rng() % found.size()];
  const bool vector = m[1] == "v", single = m[2].matched;
  const int first = std::stoi(single ? m[2] : m[3]),
            count = single ? 1 : std::stoi(m[4]) - first + 1;
  const int step = count == 1 ? 1 : vector ? 2 : std::min(count, 4);
  const int limit = int(vector ? kernel.vgpr_count : kernel.sgpr_count - 6);
  const int choices = (limit - count) / step + 1;
  if (choices < 2) return "";
  int other = first;
  while (other == first) other = int(rng() % choices) * step;
  std::string name = m[1].str() + std::to_string(other);
  if (!single) {
    name = m[1].str() + "[" + std::to_string(other) + ":" + std::to_string(other + count - 1) + "]";
  }
  return text.substr(0, m.position()) + name + text.substr(m.position() + m.length());
}

std::vector<Mutation> mutations_of(const std::string& kernel, const CodeObject& object,
                                   const std::set<uint32_t>& executed) {
  std::vector<Mutation> all;
  const auto& insts = object.program().insts;
  for (size_t i = 0; i < insts.size(); ++i) {
    const Class c = insts[i].cls;
    if (c != Class::Wait && c != Class::Nop && c != Class::Barrier) continue;
    if (c == Class::Nop && !executed.count(uint32_t(i))) continue;  // padding behind the end
    const std::string kind = c == Class::Wait  ? "s_waitcnt"
                             : c == Class::Nop ? "s_nop"
                                               : "s_barrier";
    all.push_back({kind, "+" + std::to_string(insts[i].offset) + " " + insts[i].text,
                   [i](CodeObject& o) { drop(program_of(o), int(i)); }});
  }

  const auto field = [&](const std::string& text, auto change) {
    all.push_back({"descriptor", text,
                   [kernel, change](CodeObject& o) { change(descriptor_of(o, kernel)); }});
  };
  const Descriptor& d = object.kernel(kernel)->descriptor;
  field("vgprs - 8",
        [](Descriptor& x) { x.vgprs -= 8, x.accum_offset = std::min(x.accum_offset, x.vgprs); });
  field("accum_offset - 4", [](Descriptor& x) { x.accum_offset -= 4; });
  field("sgprs - 16", [](Descriptor& x) { x.sgprs -= 16; });
  field("user_sgprs - 1", [](Descriptor& x) { --x.user_sgprs; });
  field("kernarg_bytes - 8", [](Descriptor& x) { x.kernarg_bytes -= 8; });
  field("no kernarg_ptr", [](Descriptor& x) { x.kernarg_ptr = false; });
  field("no workgroup_id_x", [](Descriptor& x) { x.workgroup_id_x = false; });
  if (d.workgroup_id_y) field("no workgroup_id_y", [](Descriptor& x) { x.workgroup_id_y = false; });
  if (d.workgroup_id_z) field("no workgroup_id_z", [](Descriptor& x) { x.workgroup_id_z = false; });
  if (d.lds_bytes) field("lds_bytes - 4", [](Descriptor& x) { x.lds_bytes -= 4; });

  std::mt19937 rng(2026);
  const std::vector<uint32_t> reached(executed.begin(), executed.end());
  for (int n = 0; n < 30;) {
    const uint32_t i = reached[rng() % reached.size()];
    const std::string text = swap_register(insts[i].text, *object.kernel(kernel), rng);
    Inst changed;
    if (text.empty() || parse_instruction(text, changed) != "") continue;
    ++n;
    all.push_back({"register", insts[i].text + " -> " + text, [i, text](CodeObject& o) {
                     Inst& inst = program_of(o).insts[i];
                     Inst made;
                     parse_instruction(text, made);
                     made.offset = inst.offset;
                     made.size = inst.size;
                     if (inst.name == "ds_swizzle_b32") made.imm = inst.imm;
                     inst = made;
                   }});
  }
  return all;
}

// What is wrong with a run, or "".
std::string judge(const ShippedRun& run, const ShippedRun& right) {
  if (!run.fault.empty()) return run.fault;
  return run.outputs == right.outputs ? "" : "the result differs";
}

}  // namespace

TEST_CASE("mutations of the shipped kernels are noticed", "[gfx9][mutations]") {
  for (const std::string& name : shipped_kernels()) {
    Memory memory;
    auto object = load_shipped(name, &memory);
    if (!object) ATTN_SKIP("no code object of " + name);
    const ShippedRun right = run_shipped(name, *object, memory, {.trace = true});
    REQUIRE(right.fault == "");
    // Neither the order of waves nor when loads return changes anything.
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      REQUIRE(judge(run_shipped(name, *object, memory, {.seed = seed}), right) == "");
    }

    // All of the code is reached.
    int unreached = 0;
    for (size_t i = 0; i < object->program().insts.size(); ++i) {
      const Inst& inst = object->program().insts[i];
      const bool padding = inst.name == "s_nop" || inst.name == "s_code_end" || !inst.run;
      if (right.executed.count(uint32_t(i)) || padding) continue;
      ++unreached;
      UNSCOPED_INFO("not reached: " << inst.text);
    }
    CHECK(unreached == 0);
    int noticed = 0, total = 0;
    for (const Mutation& mutation : mutations_of(name, *object, right.executed)) {
      std::string found;
      // The checks, then only the result, by other orders of waves and loads.
      for (uint64_t seed = 0; seed < 4 && found.empty(); ++seed) {
        Memory own;
        auto mutant = load_shipped(name, &own);
        mutation.apply(*mutant);
        Options options;
        options.seed = seed;
        options.instruction_budget = 1 << 20;
        found = judge(run_shipped(name, *mutant, own, options), right);
      }
      ++total;
      noticed += !found.empty();
      if (found.empty()) {
        std::cout << name << ": survived: " << mutation.kind << ": " << mutation.text << std::endl;
      }
    }
    std::cout << name << ": " << noticed << " of " << total << " mutations noticed" << std::endl;
    CHECK(noticed >= 0.95 * total);
  }
}
