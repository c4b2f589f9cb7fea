// Device memory between waves: each row of the table "Memory Model gfx942" in LLVM's AMDGPUUsage
// that is about global memory. The sequence that the table prescribes runs; with a part of it left
// out or weakened it is reported. llc makes the same sequences of LLVM's atomics.
#include <optional>

#include "gfx9/assemble.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

// A part of a sequence, and what must be reported in its place; "": left out.
struct Part {
  std::string text;
  std::vector<std::string> wrong;
};
struct Row {
  std::string name;
  Scope scope;
  std::vector<Part> producer, consumer;
};

// s[4:5] out: data of 64 dwords, then at 256 a flag, all 0. v0 the lane's offset, v1 0, v2 1,
// s9 the wave.
const std::string begin =
    "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_and_b32 v0, 0x3ff, v0\n v_readfirstlane_b32 s9, v0\n"
    "s_lshr_b32 s9, s9, 6\n v_and_b32 v0, 63, v0\n v_lshlrev_b32 v0, 2, v0\n v_mov_b32 v1, 0\n"
    "v_mov_b32 v2, 1\n s_waitcnt lgkmcnt(0)\n";
const Part store_data{"global_store_dword v0, v2, s[4:5]", {}};
const Part load_data{"global_load_dword v4, v0, s[4:5]\n s_waitcnt vmcnt(0)", {}};
const Part wait_for_flag{"v_readfirstlane_b32 s8, v5\n s_cmp_eq_u32 s8, 0\n s_cbranch_scc1 AGAIN",
                         {}};

// `before` with sc bits: all lesser sets of them are wrong.
Part with_bits(const std::string& before, const std::string& bits) {
  Part p{before + bits, {}};
  if (!bits.empty()) p.wrong.push_back(before);
  if (bits == " sc0 sc1") p.wrong.insert(p.wrong.end(), {before + " sc0", before + " sc1"});
  return p;
}
Part right(Part p) {
  p.wrong.clear();
  return p;
}
std::vector<Part> operator+(std::vector<Part> a, const std::vector<Part>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
std::vector<Part> right(std::vector<Part> parts) {
  for (Part& p : parts) p.wrong.clear();
  return parts;
}

std::vector<Row> rows_of(Scope scope, const std::string& name, const std::string& bits) {
  const bool mates = scope == Scope::Workgroup;
  const std::string atomic_bits = scope == Scope::System ? " sc1" : "";
  const Part store = with_bits("global_store_dword v1, v2, s[4:5] offset:256", bits);
  const Part load = with_bits("AGAIN: global_load_dword v5, v1, s[4:5] offset:256", bits);
  const Part add = with_bits("global_atomic_add v1, v2, s[4:5] offset:256", atomic_bits);
  const Part add_0 = scope == Scope::System
                         ? Part{"AGAIN: global_atomic_add v5, v1, v1, s[4:5] offset:256 sc0 sc1",
                                {"AGAIN: global_atomic_add v5, v1, v1, s[4:5] offset:256 sc0"}}
                         : Part{"AGAIN: global_atomic_add v5, v1, v1, s[4:5] offset:256 sc0", {}};
  const Part wait{"s_waitcnt vmcnt(0)", {}};

  // Waves of a workgroup share their caches: only waits are left of it.
  std::vector<Part> release{{"s_waitcnt vmcnt(0)", {""}}}, acquire{wait};
  if (!mates) {
    Part write_back = with_bits("buffer_wbl2", bits);
    write_back.wrong.push_back("");
    if (bits == " sc1") write_back.wrong.push_back("buffer_wbl2 sc0");
    release = {write_back, {"s_waitcnt vmcnt(0)", {"", "s_waitcnt vmcnt(1)"}}};
    Part invalidate = with_bits("s_waitcnt vmcnt(0)\n buffer_inv", bits);
    if (bits == " sc1") invalidate.wrong.push_back("s_waitcnt vmcnt(0)\n buffer_inv sc0");
    invalidate.wrong.push_back("s_waitcnt vmcnt(0)");
    invalidate.wrong.push_back("buffer_inv" + bits);
    invalidate.wrong.push_back("buffer_inv" + bits + "\n s_waitcnt vmcnt(0)");
    acquire = {invalidate};
  }
  const auto row = [&](const std::string& what, std::vector<Part> producer,
                       std::vector<Part> consumer) {
    return Row{what + "_" + name, scope, std::move(producer), std::move(consumer)};
  };
  const std::vector<Part> released = std::vector{store_data} + right(release),
                          loaded{wait_for_flag, load_data};
  return {
      row("load_monotonic", {right(store)}, {load, wait, wait_for_flag}),
      row("store_monotonic", {store}, {right(load), wait, wait_for_flag}),
      row("atomicrmw_monotonic", {add}, {add_0, wait, wait_for_flag}),
      row("load_acquire", released + std::vector{right(store)},
          std::vector{load} + acquire + loaded),
      row("atomicrmw_acquire", released + std::vector{right(store)},
          std::vector{add_0} + acquire + loaded),
      row("store_release", std::vector{store_data} + release + std::vector{store},
          std::vector{right(load)} + right(acquire) + loaded),
      row("atomicrmw_release", std::vector{store_data} + release + std::vector{add},
          std::vector{right(load)} + right(acquire) + loaded),
      row("atomicrmw_acq_rel", std::vector{store_data} + release + std::vector{add},
          std::vector{add_0} + acquire + loaded),
      // As fences they are next to monotonic accesses, which have the same bits.
      row("fence_acquire", released + std::vector{right(store)},
          std::vector{right(load)} + acquire + loaded),
      row("fence_release", std::vector{store_data} + release + std::vector{right(store)},
          std::vector{right(load)} + right(acquire) + loaded),
      row("fence_acq_rel", std::vector{store_data} + release + std::vector{right(add)},
          std::vector{right(add_0)} + acquire + loaded),
  };
}

std::string text_of(const std::vector<Part>& parts, const Part* replaced, const std::string& by) {
  std::string text;
  for (const Part& p : parts) text += (&p == replaced ? by : p.text) + "\n";
  return text;
}

struct Variant {
  const Row* row;
  std::string name, change;  // change "": as prescribed
};

void add_variants(const Row& row, std::vector<Source>* sources, std::vector<Variant>* variants) {
  const auto add = [&](const Part* replaced, const std::string& by) {
    const std::string name = row.name + "_" + std::to_string(sources->size());
    std::string body = begin;
    body += row.scope == Scope::Workgroup ? "s_cmp_lg_u32 s9, 0\n" : "s_cmp_lg_u32 s2, 0\n";
    body += "s_cbranch_scc1 CONSUMER\n" + text_of(row.producer, replaced, by) +
            "s_endpgm\nCONSUMER:\n" + text_of(row.consumer, replaced, by);
    for (const std::string label : {"AGAIN", "CONSUMER"}) {
      for (size_t at; (at = body.find(label)) != body.npos;)
        body.replace(at, label.size(), (label[0] == 'A' ? "again_" : "consumer_") + name);
    }
    sources->push_back({name, body, ""});
    variants->push_back({&row, name, replaced ? "`" + replaced->text + "` -> `" + by + "`" : ""});
  };
  add(nullptr, "");
  for (const auto* parts : {&row.producer, &row.consumer}) {
    for (const Part& p : *parts) {
      for (const std::string& wrong : p.wrong) add(&p, wrong);
    }
  }
}

bool is_of_memory(const Fault& f) {
  return f.has_earlier && (f.kind == FaultKind::MemoryRace || f.kind == FaultKind::Incoherent ||
                           f.kind == FaultKind::MissingWaitcnt);
}

// With out and in zeroed.
Report run(const CodeObject& object, Memory& memory, const std::string& name, uint32_t groups,
           uint32_t block, Options options) {
  const uint64_t out = memory.allocate(1024, "out"), in = memory.allocate(1024, "in");
  memory.fill(out, 0, 1024);
  memory.fill(in, 0, 1024);
  const uint64_t kernarg[] = {out, in};
  options.instruction_budget = 1 << 20;
  options.hazards = false;
  const Report report = launch(memory, *object.kernel(name), {groups}, {block},
                               std::as_bytes(std::span(kernarg)), 0, options);
  memory.free(out);
  memory.free(in);
  return report;
}

}  // namespace

TEST_CASE("memory model: rows of LLVM's table", "[gfx9][memory-model]") {
  if (!can_assemble()) ATTN_SKIP("llvm-mc and ld.lld not found in " ATTN_LLVM_BIN_DIR);
  std::vector<Row> rows = rows_of(Scope::Workgroup, "workgroup", " sc0");
  for (const Row& r : rows_of(Scope::Agent, "agent", " sc1")) rows.push_back(r);
  for (const Row& r : rows_of(Scope::System, "system", " sc0 sc1")) rows.push_back(r);
  std::vector<Source> sources;
  std::vector<Variant> variants;
  for (const Row& row : rows) add_variants(row, &sources, &variants);
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble(sources), &memory, &error);
  REQUIRE(error == "");
  int wrong = 0;
  for (const Variant& v : variants) {
    INFO(v.name << " " << v.change);
    const bool mates = v.row->scope == Scope::Workgroup;
    Options options;
    options.apart = mates ? Scope::Agent : v.row->scope;
    const uint32_t groups = mates ? 1 : 2, block = mates ? 128 : 64;
    if (!v.change.empty()) {
      const Report report = run(*object, memory, v.name, groups, block, options);
      INFO(faults_of(report));
      ++wrong;
      REQUIRE_FALSE(report.ok());
      CHECK(is_of_memory(report.faults[0]));
      continue;
    }
    for (const uint64_t seed : {0, 1, 2, 3, 4, 5}) {
      options.seed = seed;
      const Report report = run(*object, memory, v.name, groups, block, options);
      INFO("seed " << seed << "\n" << faults_of(report));
      CHECK(report.faults.empty());
    }
  }
  CHECK(rows.size() == 33);
  CHECK(wrong > 100);
}

namespace {

struct Case {
  std::string name;
  std::optional<FaultKind> expected;  // none: runs
  std::string body;
  uint32_t groups = 1, block = 128;
  Level level = Level::Strict;
};

// Only wave `n` runs `body`.
std::string wave(int n, const std::string& body, const std::string& label) {
  return "s_cmp_lg_u32 s9, " + std::to_string(n) + "\n s_cbranch_scc1 end_" + label + "\n" + body +
         "end_" + label + ":\n";
}
std::string group(int n, const std::string& body, const std::string& label) {
  return "s_cmp_lg_u32 s2, " + std::to_string(n) + "\n s_cbranch_scc1 end_" + label + "\n" + body +
         "end_" + label + ":\n";
}

const std::string put = "global_store_dword v0, v2, s[4:5]\n";
const std::string get = "global_load_dword v4, v0, s[4:5]\n";
const std::string done = "s_waitcnt vmcnt(0)\n", barrier = "s_barrier\n";
const std::string get_scalar = "s_load_dword s12, s[4:5], 0x0\n s_waitcnt lgkmcnt(0)\n";
const std::string release_flag =
    "buffer_wbl2 sc1\n s_waitcnt vmcnt(0)\n"
    "global_store_dword v1, v2, s[4:5] offset:256 sc1\n";
const std::string acquire_flag =
    "global_load_dword v5, v1, s[4:5] offset:256 sc1\n"
    "s_waitcnt vmcnt(0)\n buffer_inv sc1\n";

const std::vector<Case> cases = {
    {"barrier", {}, wave(0, put + done, "A1") + barrier + wave(1, get, "A2")},
    {"no_barrier", FaultKind::MemoryRace, wave(0, put + done, "B1") + wave(1, get, "B2")},
    {"no_wait", FaultKind::MissingWaitcnt, wave(0, put, "C1") + barrier + wave(1, get, "C2")},
    // The L1 that waves of a workgroup share keeps their order.
    {"no_wait_isa", {}, wave(0, put, "D1") + barrier + wave(1, get, "D2"), 1, 128, Level::Isa},
    {"wait_for_another", FaultKind::MissingWaitcnt,
     wave(0, "global_load_dword v6, v0, s[6:7]\n" + put + "s_waitcnt vmcnt(1)\n", "E1") + barrier +
         wave(1, get, "E2")},
    {"overwritten", FaultKind::MemoryRace,
     wave(0, put + done, "F1") + wave(1, "v_mov_b32 v2, 2\n" + put, "F2")},
    {"overwritten_later",
     {},
     wave(0, put + done, "G1") + barrier + wave(1, "v_mov_b32 v2, 2\n" + put, "G2")},
    {"overwritten_before_read", FaultKind::MemoryRace,
     wave(0, get + done, "H1") + wave(1, put, "H2")},
    {"overwritten_after_read", {}, wave(0, get + done, "I1") + barrier + wave(1, put, "I2")},
    {"overwritten_while_read", FaultKind::MissingWaitcnt,
     wave(0, get, "J1") + barrier + wave(1, put, "J2")},
    {"own_store", {}, put + "global_load_dword v4, v0, s[4:5]\n s_waitcnt vmcnt(0)\n", 1, 64},
    {"other_bytes",
     {},
     wave(0, "global_store_byte v0, v2, s[4:5]\n", "K1") +
         wave(1, "global_store_byte v0, v2, s[4:5] offset:1\n", "K2") +
         "global_load_ubyte v4, v0, s[6:7]\n"},
    {"same_byte", FaultKind::MemoryRace,
     wave(0, "v_mov_b32 v2, 0x300\n global_store_short v0, v2, s[4:5]\n", "L1") +
         wave(1, "global_store_byte v0, v2, s[4:5] offset:1\n", "L2")},
    {"atomics", {}, "global_atomic_add v1, v2, s[4:5]\n", 3, 128},
    {"atomic_and_store", FaultKind::MemoryRace,
     group(0, "global_atomic_add v1, v2, s[4:5]\n", "M1") + group(1, put, "M2"), 2, 64},

    {"groups", FaultKind::MemoryRace, "v_mov_b32 v2, s2\n" + put, 2, 64},
    {"groups_same_value", {}, put, 2, 64},
    {"groups_elsewhere", {}, "s_lshl_b32 s10, s2, 8\n v_add_u32 v0, s10, v0\n" + put, 2, 64},
    {"groups_flag",
     {},
     group(0, put + release_flag, "N1") + group(1, acquire_flag + get, "N2"),
     2,
     64},
    {"groups_flag_overwritten",
     {},
     group(0, put + release_flag, "O1") + group(1, acquire_flag + "v_mov_b32 v2, 2\n" + put, "O2"),
     2,
     64},
    {"groups_flag_overwritten_not_written_back", FaultKind::Incoherent,
     group(0, put + done + "global_store_dword v1, v2, s[4:5] offset:256 sc1\n", "P1") +
         group(1, acquire_flag + "v_mov_b32 v2, 2\n" + put, "P2"),
     2, 64},
    // A third workgroup learns of the first through the second.
    {"groups_chain",
     {},
     group(0, put + release_flag, "Q1") +
         group(1,
               acquire_flag + "buffer_wbl2 sc1\n s_waitcnt vmcnt(0)\n"
                              "global_store_dword v1, v2, s[4:5] offset:260 sc1\n",
               "Q2") +
         group(2,
               "global_load_dword v5, v1, s[4:5] offset:260 sc1\n s_waitcnt vmcnt(0)\n"
               "buffer_inv sc1\n" +
                   get,
               "Q3"),
     3,
     64},
    // One wave writes back and invalidates for all of its workgroup.
    {"groups_barrier",
     {},
     group(0, wave(1, put + done, "R1") + barrier + wave(0, release_flag, "R2"), "R3") +
         group(1, wave(0, acquire_flag, "R4") + barrier + wave(1, get, "R5"), "R6"),
     2},
    {"groups_barrier_no_wait", FaultKind::MissingWaitcnt,
     group(0, wave(1, put, "S1") + barrier + wave(0, release_flag, "S2"), "S3") +
         group(1, wave(0, acquire_flag, "S4") + barrier + wave(1, get, "S5"), "S6"),
     2},
    // What is stored and loaded through the caches needs neither write-back nor invalidation.
    {"groups_through",
     {},
     group(0,
           "global_store_dword v0, v2, s[4:5] sc1\n s_waitcnt vmcnt(0)\n"
           "global_store_dword v1, v2, s[4:5] offset:256 sc1\n",
           "T1") +
         group(1,
               "global_load_dword v5, v1, s[4:5] offset:256 sc1\n s_waitcnt vmcnt(0)\n"
               "global_load_dword v4, v0, s[4:5] sc1\n",
               "T2"),
     2,
     64},

    {"scalar_own", {}, put + done + "s_dcache_inv\n" + get_scalar, 1, 64},
    {"scalar_own_stale", FaultKind::Incoherent, put + done + get_scalar, 1, 64},
    {"scalar_own_outstanding", FaultKind::Incoherent, put + "s_dcache_inv\n" + get_scalar, 1, 64},
    {"scalar_barrier",
     {},
     wave(0, put + done, "U1") + barrier + wave(1, "s_dcache_inv\n" + get_scalar, "U2")},
    {"scalar_barrier_stale", FaultKind::Incoherent,
     wave(0, put + done, "V1") + barrier + wave(1, get_scalar, "V2")},
    {"scalar_groups",
     {},
     group(0, put + release_flag, "W1") +
         group(1, acquire_flag + "s_dcache_inv\n" + get_scalar, "W2"),
     2,
     64},
    {"scalar_groups_stale", FaultKind::Incoherent,
     group(0, put + release_flag, "X1") + group(1, acquire_flag + get_scalar, "X2"), 2, 64},
};

}  // namespace

TEST_CASE("memory model: waves, workgroups, scalar caches", "[gfx9][memory-model]") {
  if (!can_assemble()) ATTN_SKIP("llvm-mc and ld.lld not found in " ATTN_LLVM_BIN_DIR);
  std::vector<Source> sources;
  for (const Case& c : cases) sources.push_back({c.name, begin + c.body, ""});
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble(sources), &memory, &error);
  REQUIRE(error == "");
  for (const Case& c : cases) {
    INFO(c.name);
    Options options;
    options.level = c.level;
    const Report report = run(*object, memory, c.name, c.groups, c.block, options);
    INFO(faults_of(report));
    if (!c.expected) {
      CHECK(report.faults.empty());
      continue;
    }
    REQUIRE_FALSE(report.ok());
    CHECK(fault_name(report.faults[0].kind) == std::string(fault_name(*c.expected)));
    CHECK(report.faults[0].has_earlier);
    options.memory_model = false;
    CHECK(run(*object, memory, c.name, c.groups, c.block, options).ok());
  }
}

TEST_CASE("memory model: a launch sees all that the one before it wrote", "[gfx9][memory-model]") {
  if (!can_assemble()) ATTN_SKIP("llvm-mc and ld.lld not found in " ATTN_LLVM_BIN_DIR);
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(
      assemble({{"writer", begin + put, ""}, {"reader", begin + get_scalar + get, ""}}), &memory,
      &error);
  REQUIRE(error == "");
  const uint64_t out = memory.allocate(1024);
  const uint64_t kernarg[] = {out, out};
  for (const char* name : {"writer", "reader", "writer"}) {
    const Report report = launch(memory, *object->kernel(name), {name[0] == 'r' ? 3u : 1u}, {64},
                                 std::as_bytes(std::span(kernarg)), 0, {.hazards = false});
    INFO(faults_of(report));
    CHECK(report.faults.empty());
  }
}

TEST_CASE("memory model: reports name both instructions and waves", "[gfx9][memory-model]") {
  if (!can_assemble()) ATTN_SKIP("llvm-mc and ld.lld not found in " ATTN_LLVM_BIN_DIR);
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(
      assemble({{"k", begin + group(0, put, "A") + group(1, get, "B"), ""}}), &memory, &error);
  REQUIRE(error == "");
  const Report report = run(*object, memory, "k", 2, 64, {});
  REQUIRE_FALSE(report.ok());
  const std::string text = report.faults[0].to_string();
  CHECK(text.find("memory race: k+0x") == 0);
  for (const char* part :
       {"`global_load_dword v4, v0, s[4:5]`",
        "workgroup 1,0,0 wave 0: dword 0 of out of 1024 bytes",
        "was written by wave 0 of workgroup 0,0,0 with no barrier or atomic in between; earlier: ",
        "`global_store_dword v0, v2, s[4:5]`"}) {
    INFO(part << " in " << text);
    CHECK(text.find(part) != text.npos);
  }
}
