#include "gfx9emu/model.h"

#include <algorithm>
#include <charconv>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>

#include "gfx9emu/emu.h"

namespace gfx9emu {
namespace {

constexpr uint64_t never = ~0ull;

bool on_port(Class c) {
  return c == Class::Valu || c == Class::Trans || c == Class::PackedF32 || c == Class::Mfma;
}
bool is_memory(Class c) {
  return c == Class::Buffer || c == Class::Global || c == Class::Flat || c == Class::Scratch;
}

struct WaveState {
  size_t next = 0;
  uint64_t ready = 0;  // the previous instruction has issued
  uint64_t last_issue = 0;
  int priority = 0;
  bool at_barrier = false;
  bool is_fetched = false;  // `next`, by clock `ready`
  void advance() {
    ++next;
    is_fetched = false;
  }
  // When each outstanding operation is done, in the order of issue.
  std::deque<uint64_t> vm, lgkm;
};

struct Simd {
  uint64_t port_free = 0, mfma_free = 0;
};

// The clock from which at most `most` are outstanding. Those of vmcnt and of LDS retire in order.
uint64_t drained(const std::deque<uint64_t>& queue, uint8_t most) {
  if (most == 255 || queue.size() <= most) return 0;
  return *std::max_element(queue.begin(), queue.end() - most);
}

}  // namespace

ModelResult run_model(const ModelWaves& waves, const ModelSettings& t) {
  ModelResult result;
  std::vector<WaveState> state(waves.size());
  std::vector<Simd> simds(t.simds);
  uint64_t lds_free = 0, memory_free = 0;
  InstructionCache code(t.instruction_cache);
  result.simds = int(std::min<size_t>(waves.size(), t.simds));
  result.clock_reads.resize(waves.size());

  const auto port_clocks = [&](Class c) {
    return uint64_t(c == Class::Trans ? t.trans : c == Class::PackedF32 ? t.packed_f32 : t.valu);
  };
  // Opens the barrier of a wave's workgroup if all that are left of it have arrived.
  const auto open_barrier = [&](size_t wave) {
    const size_t size = t.workgroup > 0 ? size_t(t.workgroup) : waves.size();
    const size_t first = wave / size * size, end = std::min(first + size, waves.size());
    uint64_t last = 0;
    for (size_t w = first; w < end; ++w) {
      if (state[w].next == waves[w].size()) continue;
      if (!state[w].at_barrier) return;
      last = std::max(last, state[w].ready);
    }
    for (size_t w = first; w < end; ++w) {
      WaveState& s = state[w];
      if (!s.at_barrier) continue;
      result.held_by_barrier += last - s.ready;
      s.at_barrier = false;
      s.ready = last + t.barrier;
      s.advance();
      result.clocks = std::max(result.clocks, s.ready);
    }
  };
  for (;;) {
    // The wave that can issue first.
    size_t chosen = waves.size();
    uint64_t at = never;
    for (size_t w = 0; w < waves.size(); ++w) {
      WaveState& s = state[w];
      if (s.next == waves[w].size()) continue;
      if (s.at_barrier) continue;
      const ModelInst& i = waves[w][s.next];
      const Simd& simd = simds[w % t.simds];
      if (!s.is_fetched && i.code_bytes > 0) {
        const uint64_t there = code.fetch(i.code_at, i.code_at + i.code_bytes - 1, s.ready);
        result.held_by_fetch += there - s.ready;
        s.ready = there;
        s.is_fetched = true;
      }
      uint64_t when = s.ready;
      if (on_port(i.cls)) when = std::max(when, simd.port_free);
      if (i.cls == Class::Mfma) when = std::max(when, simd.mfma_free);
      if (i.cls == Class::Wait) {
        when = std::max({when, drained(s.vm, i.vmcnt), drained(s.lgkm, i.lgkmcnt)});
      }
      const auto before = [&](const WaveState& o) {
        return s.priority != o.priority ? s.priority > o.priority : s.last_issue < o.last_issue;
      };
      if (when < at || (when == at && before(state[chosen]))) {
        at = when;
        chosen = w;
      }
    }
    if (chosen == waves.size()) break;

    WaveState& s = state[chosen];
    Simd& simd = simds[chosen % t.simds];
    const ModelInst& i = waves[chosen][s.next];
    ++result.instructions[int(i.cls)];
    if (i.cls == Class::Wait) {
      result.held_by_wait += at - s.ready;
    } else if (at > s.ready) {
      const bool by_mfma = i.cls == Class::Mfma && simd.mfma_free > simd.port_free;
      (by_mfma ? result.held_by_mfma : result.held_by_port) += at - s.ready;
    }
    s.last_issue = at;
    s.ready = at + t.issue;
    if (i.reads_clock) result.clock_reads[chosen].push_back(at);
    uint64_t done = s.ready;
    if (i.cls == Class::Barrier) {
      s.at_barrier = true;
      s.ready = at;
      open_barrier(chosen);
      continue;  // `next` moves when it opens
    }
    if (i.sets_priority) s.priority = i.imm;
    if (i.cls == Class::Nop) s.ready = at + uint64_t(i.imm + 1) * t.issue;
    if (on_port(i.cls)) {
      const bool alone = i.cls == Class::Mfma && !t.overlap;
      const uint64_t busy = alone ? uint64_t(i.passes) * t.pass : port_clocks(i.cls);
      simd.port_free = at + busy;
      result.port_clocks += busy;
      done = at + busy;
    }
    if (i.cls == Class::Mfma) {
      simd.mfma_free = at + uint64_t(i.passes) * t.pass;
      result.mfma_clocks += uint64_t(i.passes) * t.pass;
      done = simd.mfma_free;
    }
    if (i.cls == Class::Lds) {
      lds_free = std::max(lds_free, at) + i.lds_clocks;
      result.lds_clocks += i.lds_clocks;
      s.lgkm.push_back(lds_free + t.lds_latency);
    }
    if (i.cls == Class::Smem) s.lgkm.push_back(at + t.scalar_latency);
    if (is_memory(i.cls)) {
      memory_free = std::max(memory_free, at) +
                    (i.bytes + t.memory_bytes_per_clock - 1) / t.memory_bytes_per_clock;
      s.vm.push_back(memory_free + t.memory_latency);
    }
    // What has arrived need not be looked at again.
    while (!s.vm.empty() && s.vm.front() <= at) s.vm.pop_front();
    while (!s.lgkm.empty() && s.lgkm.front() <= at) s.lgkm.pop_front();
    s.advance();
    result.clocks = std::max(result.clocks, done);
    if (s.next == waves[chosen].size()) open_barrier(chosen);
  }
  result.fetch_misses = code.misses();
  result.code_lines = code.lines();
  return result;
}

ModelWaves model_waves(const Program& program, std::span<const std::vector<TraceEntry>> traces) {
  ModelWaves waves(traces.size());
  for (size_t w = 0; w < traces.size(); ++w) {
    for (const TraceEntry& e : traces[w]) {
      const Inst& i = program.insts[e.inst];
      ModelInst m;
      m.cls = i.cls;
      m.passes = i.passes;
      m.vmcnt = i.vmcnt;
      m.lgkmcnt = i.lgkmcnt;
      m.imm = int32_t(i.imm);
      m.sets_priority = i.name == "s_setprio";
      m.reads_clock = i.name == "s_memtime";
      m.lds_clocks = e.lds_cycles;
      m.bytes = e.bytes;
      m.code_at = uint32_t(i.offset);
      m.code_bytes = i.size;
      waves[w].push_back(m);
    }
  }
  return waves;
}

// ---- mixes -------------------------------------------------------------------------------------

namespace {

bool parse_number(std::string_view s, int& n) {
  const auto [end, code] = std::from_chars(s.data(), s.data() + s.size(), n);
  return code == std::errc() && end == s.data() + s.size() && n >= 0;
}

std::vector<std::string_view> words_of(std::string_view line) {
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  while (true) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == line.npos) return words;
    const size_t end = std::min(line.find_first_of(" \t\r", begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    line.remove_prefix(end);
  }
}

// "" or what is wrong with the word.
std::string parse_mix_inst(std::string_view word, ModelInst& i) {
  const size_t colon = word.find(':');
  const std::string_view name = word.substr(0, colon);
  const std::string_view value = colon == word.npos ? "" : word.substr(colon + 1);
  static const std::map<std::string_view, Class> plain = {
      {"valu", Class::Valu}, {"trans", Class::Trans},     {"packed", Class::PackedF32},
      {"salu", Class::Salu}, {"barrier", Class::Barrier}, {"smem", Class::Smem}};
  static const std::map<std::string_view, Class> with_number = {{"mfma", Class::Mfma},
                                                                {"nop", Class::Nop},
                                                                {"prio", Class::Control},
                                                                {"lds", Class::Lds},
                                                                {"vmem", Class::Buffer}};
  if (const auto p = plain.find(name); p != plain.end() && colon == word.npos) {
    i.cls = p->second;
    return "";
  }
  int n = 0;
  if (const auto p = with_number.find(name); p != with_number.end() && parse_number(value, n)) {
    i.cls = p->second;
    if (i.cls == Class::Mfma) {
      if (n < 1 || n > 16) return "has not 1 to 16 passes";
      i.passes = uint8_t(n);
    }
    if (i.cls == Class::Lds) i.lds_clocks = uint32_t(n + 127) / 128;
    if (i.cls == Class::Buffer) i.bytes = uint32_t(n);
    i.sets_priority = name == "prio";
    i.imm = n;
    return "";
  }
  if (name == "wait" && !value.empty()) {
    i.cls = Class::Wait;
    for (std::string_view rest = value; !rest.empty();) {
      const size_t comma = std::min(rest.find(','), rest.size());
      const std::string_view part = rest.substr(0, comma);
      const bool vm = part.starts_with("vm="), lgkm = part.starts_with("lgkm=");
      if (!(vm || lgkm) || !parse_number(part.substr(vm ? 3 : 5), n) || n > 63) return "is no wait";
      (vm ? i.vmcnt : i.lgkmcnt) = uint8_t(n);
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
    return "";
  }
  return "is no instruction";
}

}  // namespace

std::string parse_mix(std::string_view text, ModelWaves& waves) {
  waves.clear();
  // The body of each open repeat, and how often it is wanted.
  struct Block {
    std::vector<ModelInst> body;
    int times;
  };
  std::vector<Block> open{{{}, 1}};
  int first = 0, last = -1, line_number = 0;
  const auto flush = [&] {
    for (int w = first; w <= last; ++w) {
      waves[w].insert(waves[w].end(), open[0].body.begin(), open[0].body.end());
    }
    open[0].body.clear();
  };
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const auto words = words_of(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    const auto error = [&](std::string_view what, std::string_view why) {
      return "line " + std::to_string(line_number) + ": " + std::string(what) + " " +
             std::string(why);
    };
    if (words.empty()) continue;
    int n = 0;
    if (words[0] == "waves") {
      if (!waves.empty()) return error("waves", "is given twice");
      if (words.size() != 2 || !parse_number(words[1], n) || n < 1 || n > 64) {
        return error("waves", "needs a number from 1 to 64");
      }
      waves.resize(n);
      last = n - 1;
      continue;
    }
    if (waves.empty()) return error(words[0], "stands before waves");
    if (words[0] == "group") {
      if (open.size() > 1) return error("group", "stands inside repeat");
      flush();
      const size_t dash = words.size() == 2 ? words[1].find('-') : std::string_view::npos;
      if (dash == std::string_view::npos || !parse_number(words[1].substr(0, dash), first) ||
          !parse_number(words[1].substr(dash + 1), last) || last < first ||
          last >= int(waves.size())) {
        return error("group", "needs waves FIRST-LAST of those there are");
      }
      continue;
    }
    if (words[0] == "repeat") {
      if (words.size() != 2 || !parse_number(words[1], n)) return error("repeat", "needs a number");
      open.push_back({{}, n});
      continue;
    }
    if (words[0] == "end") {
      if (open.size() == 1) return error("end", "has no repeat");
      const Block block = std::move(open.back());
      open.pop_back();
      if (uint64_t(block.times) * block.body.size() > 10'000'000) {
        return error("end", "closes more than 10 million instructions");
      }
      for (int k = 0; k < block.times; ++k) {
        open.back().body.insert(open.back().body.end(), block.body.begin(), block.body.end());
      }
      continue;
    }
    int count = 1;
    for (const std::string_view word : words) {
      if (parse_number(word, n)) {
        if (n < 1 || n > 100'000) return error(word, "is not from 1 to 100000");
        count = n;
        continue;
      }
      ModelInst i;
      const std::string why = parse_mix_inst(word, i);
      if (!why.empty()) return error(word, why);
      open.back().body.insert(open.back().body.end(), count, i);
      count = 1;
    }
  }
  if (open.size() > 1) return "repeat without end";
  if (waves.empty()) return "waves is missing";
  flush();
  return "";
}

// ---- constants ---------------------------------------------------------------------------------

std::span<const ModelConstant> model_constants() {
  static constexpr ModelConstant all[] = {
      {"simds", &ModelSettings::simds},
      {"issue_clocks", &ModelSettings::issue},
      {"valu_clocks", &ModelSettings::valu},
      {"trans_clocks", &ModelSettings::trans},
      {"packed_f32_clocks", &ModelSettings::packed_f32},
      {"clocks_per_pass", &ModelSettings::pass},
      {"lds_latency", &ModelSettings::lds_latency},
      {"memory_latency", &ModelSettings::memory_latency},
      {"scalar_latency", &ModelSettings::scalar_latency},
      {"memory_bytes_per_clock", &ModelSettings::memory_bytes_per_clock},
      {"barrier_clocks", &ModelSettings::barrier},
  };
  return all;
}

std::string load_constants(std::string_view text, ModelSettings& settings,
                           std::vector<std::string>& taken) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return "it is no JSON object";
  if (json.contains("emulated") && json["emulated"] == true) {
    return "it is a report of the emulator, in which nothing was measured";
  }
  const auto constants = json.find("constants");
  if (constants == json.end() || !constants->is_object()) return "it has no object \"constants\"";
  // Null: that constant was not measured.
  const auto value_of = [&](const char* name) {
    const auto found = constants->find(name);
    if (found == constants->end() || !found->is_object()) return nlohmann::json();
    return found->value("value", nlohmann::json());
  };
  ModelSettings read = settings;
  for (const ModelConstant& c : model_constants()) {
    const nlohmann::json value = value_of(c.name);
    if (value.is_null()) continue;
    const double number = value.is_number() ? value.get<double>() : 0;
    if (!(number >= 0.5 && number < 1e6)) {
      return std::string(c.name) + " is " + value.dump() +
             "; a number from 1 to 1000000 is accepted";
    }
    read.*c.setting = int(number + 0.5);
    taken.push_back(c.name);
  }
  if (const nlohmann::json value = value_of("overlap"); !value.is_null()) {
    if (!value.is_boolean()) return "overlap is " + value.dump() + "; true or false is accepted";
    read.overlap = value.get<bool>();
    taken.push_back("overlap");
  }
  settings = read;
  return "";
}

std::string model_json(const ModelWaves& waves, ModelSettings settings,
                       const std::vector<std::string>& measured) {
  nlohmann::ordered_json json;
  json["waves"] = waves.size();
  for (const ModelConstant& c : model_constants()) json["settings"][c.name] = settings.*c.setting;
  json["settings"]["overlap"] = settings.overlap;
  json["settings"]["lds_bytes_per_clock"] = 128;
  if (!measured.empty()) json["measured"] = measured;
  const auto add = [&](const std::string& name) {
    const ModelResult r = run_model(waves, settings);
    if (!json.contains("instructions")) {
      for (int c = 0; c < class_count; ++c) {
        if (r.instructions[c]) json["instructions"][class_name(Class(c))] = r.instructions[c];
      }
    }
    json[name] = {{"clocks", r.clocks},
                  {"mfma_clocks", r.mfma_clocks},
                  {"mfma_share", r.mfma_share()},
                  {"vector_port_share", r.port_share()},
                  {"lds_share", r.lds_share()},
                  {"held_by_port", r.held_by_port},
                  {"held_by_mfma", r.held_by_mfma},
                  {"held_by_wait", r.held_by_wait},
                  {"held_by_barrier", r.held_by_barrier}};
  };
  if (!measured.empty()) {
    add("result");
    return json.dump(2);
  }
  settings.packed_f32 = 4;
  add("packed_f32_4");
  settings.packed_f32 = 8;
  add("packed_f32_8");
  settings.packed_f32 = 4;
  settings.overlap = false;
  add("no_overlap");
  return json.dump(2);
}

// ---- LDS banks ---------------------------------------------------------------------------------

LdsClocks lds_clocks(int bytes, bool is_store, uint64_t exec,
                     std::span<const uint32_t, 64> addresses) {
  constexpr uint32_t banks = 32;
  const int lanes = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  // The first lanes of the two halves of each group of wide reads.
  static constexpr int wide[8][2] = {{0, 20},  {4, 16},  {8, 28},  {12, 24},
                                     {32, 52}, {36, 48}, {40, 60}, {44, 56}};
  LdsClocks total;
  for (int g = 0; g < 64 / lanes; ++g) {
    std::array<std::array<uint32_t, 64>, banks> words;  // that the group wants of each bank
    std::array<uint32_t, banks> count{};
    bool active = false;
    for (int l = 0; l < lanes; ++l) {
      const int lane = lanes == 8 && !is_store ? wide[g][l / 4] + l % 4 : g * lanes + l;
      if (!(exec >> lane & 1)) continue;
      active = true;
      const uint32_t first = addresses[lane] / 4;
      const uint32_t last = (addresses[lane] + uint32_t(bytes) - 1) / 4;
      for (uint32_t word = first; word <= last; ++word) {
        auto& of_bank = words[word % banks];
        uint32_t& n = count[word % banks];
        if (std::find(of_bank.begin(), of_bank.begin() + n, word) == of_bank.begin() + n) {
          of_bank[n++] = word;
        }
      }
    }
    if (!active) continue;
    const uint32_t clocks = *std::max_element(count.begin(), count.end());
    total.clocks += clocks;
    total.conflicts += clocks - 1;
  }
  return total;
}

}  // namespace gfx9emu
