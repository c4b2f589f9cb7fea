#include "gfx9/mutations.h"

#include <algorithm>
#include <random>
#include <regex>
#include <set>

#include "gfx9emu/decode.h"

namespace attn::test {
namespace {

using namespace gfx9emu;

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

}  // namespace

const char* kind_name(MutationKind kind) {
  static const char* const names[] = {"s_waitcnt",  "s_nop",    "s_barrier",
                                      "descriptor", "register", "cache"};
  return names[int(kind)];
}

std::vector<Mutation> dropped_and_lowered(const std::string& kernel, const CodeObject& object,
                                          const std::set<uint32_t>& executed) {
  std::vector<Mutation> all;
  const auto& insts = object.program().insts;
  for (size_t i = 0; i < insts.size(); ++i) {
    const Class c = insts[i].cls;
    if (c != Class::Wait && c != Class::Nop && c != Class::Barrier) continue;
    if (c == Class::Nop && !executed.count(uint32_t(i))) continue;  // padding behind the end
    const MutationKind kind = c == Class::Wait  ? MutationKind::Wait
                              : c == Class::Nop ? MutationKind::Nop
                                                : MutationKind::Barrier;
    const uint64_t offset = insts[i].offset - object.kernel(kernel)->entry;
    all.push_back({kind, "+" + std::to_string(offset) + " " + insts[i].text, int(i), "",
                   [i](CodeObject& o) { drop(program_of(o), int(i)); }});
  }

  const auto field = [&](const std::string& text, auto change) {
    all.push_back({MutationKind::Descriptor, text, -1, "",
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
  return all;
}

std::vector<Mutation> weakened_atomics(const std::string& kernel, const CodeObject& object) {
  std::vector<Mutation> all;
  const auto& insts = object.program().insts;
  const auto is_control = [&](size_t i) {
    return insts[i].name == "buffer_wbl2" || insts[i].name == "buffer_inv";
  };
  const auto add = [&](size_t i, const std::string& by) {
    const uint64_t offset = insts[i].offset - object.kernel(kernel)->entry;
    all.push_back({MutationKind::Cache,
                   "+" + std::to_string(offset) + " " + insts[i].text + " -> " + by, int(i), by,
                   [i, by](CodeObject& o) {
                     if (by.empty()) return drop(program_of(o), int(i));
                     Inst& inst = program_of(o).insts[i];
                     Inst made;
                     parse_instruction(by, made);
                     made.offset = inst.offset;
                     made.size = inst.size;
                     inst = made;
                   }});
  };
  for (size_t i = 0; i < insts.size(); ++i) {
    if (is_control(i)) {
      add(i, "");
      add(i, insts[i].name);
      add(i, insts[i].name + " sc0");
    } else if (insts[i].cls == Class::Wait && insts[i].vmcnt == 0 &&
               (is_control(i - 1) || is_control(i + 1))) {
      add(i, "");
      add(i, "s_waitcnt vmcnt(1)");
    }
  }
  return all;
}

std::vector<Mutation> swapped_registers(const std::string& kernel, const CodeObject& object,
                                        const std::set<uint32_t>& executed, int count,
                                        uint32_t seed) {
  std::vector<Mutation> all;
  const auto& insts = object.program().insts;
  std::mt19937 rng(seed);
  const std::vector<uint32_t> reached(executed.begin(), executed.end());
  while (int(all.size()) < count) {
    const uint32_t i = reached[rng() % reached.size()];
    const std::string text = swap_register(insts[i].text, *object.kernel(kernel), rng);
    Inst changed;
    if (text.empty() || parse_instruction(text, changed) != "") continue;
    const uint64_t offset = insts[i].offset - object.kernel(kernel)->entry;
    all.push_back({MutationKind::Register,
                   "+" + std::to_string(offset) + " " + insts[i].text + " -> " + text, int(i), text,
                   [i, text](CodeObject& o) {
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

}  // namespace attn::test
