// The shipped kernels with something left out or wrong: the emulator reports it, the result
// differs, or the kernel does other work for it.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "gfx9/mutations.h"
#include "gfx9/shipped.h"

using namespace gfx9emu;
using namespace attn::test;

namespace {

constexpr int swaps = 30;
constexpr uint32_t sample_seed = 2026;

// What is wrong with a run, or "".
std::string judge(const ShippedRun& run, const ShippedRun& right) {
  if (!run.fault.empty()) return run.fault;
  if (run.outputs != right.outputs) return "the result differs";
  return run.work == right.work ? "" : "it issues more or fewer instructions";
}

struct Subject {
  std::string name;
  Memory memory;
  std::unique_ptr<CodeObject> object;
  ShippedRun right;

  explicit Subject(const std::string& name_) : name(name_), object(load_shipped(name, &memory)) {
    if (object) right = run_shipped(name, *object, memory, {.trace = true});
  }
};

// Numbers of the problems whose workgroup 0 reaches the mutation, those of least work first.
std::vector<size_t> problems_that_reach(const Subject& kernel, const Mutation& mutation) {
  std::vector<size_t> all;
  const auto& problems = kernel.right.problems;
  for (size_t n = 0; n < problems.size(); ++n)
    if (problems[n].executed.count(uint32_t(mutation.index))) all.push_back(n);
  std::sort(all.begin(), all.end(),
            [&](size_t a, size_t b) { return problems[a].work < problems[b].work; });
  return all;
}

// In the order of the hardware, or in another one of waves and loads. A few problems that reach the
// mutation come first, since one of them nearly always notices it.
bool is_noticed(const Subject& kernel, const Mutation& mutation) {
  const auto run = [&](uint64_t seed, auto how) {
    Memory own;
    const auto mutant = load_shipped(kernel.name, &own);
    mutation.apply(*mutant);
    return how(*mutant, own, Options{.seed = seed, .instruction_budget = 1 << 20});
  };
  std::vector<size_t> first = problems_that_reach(kernel, mutation);
  first.resize(std::min<size_t>(first.size(), 6));
  for (const size_t n : first) {
    const ShippedRun one = run(0, [&](auto& mutant, Memory& memory, const Options& options) {
      return run_shipped_problem(kernel.name, n, mutant, memory, options);
    });
    if (judge(one, kernel.right.problems[n]) != "") return true;
  }
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const ShippedRun all = run(seed, [&](auto& mutant, Memory& memory, const Options& options) {
      return run_shipped(kernel.name, mutant, memory, options, 42, &kernel.right);
    });
    if (judge(all, kernel.right) != "") return true;
  }
  return false;
}

struct Count {
  int noticed = 0, total = 0, unconfirmed = 0;
  Count& operator+=(const Count& o) {
    noticed += o.noticed, total += o.total, unconfirmed += o.unconfirmed;
    return *this;
  }
};

// ATTN_MUTATION_TEXT: only mutations that have this in their text. ATTN_MUTATION_SAMPLE=N: N of
// them at random, the same in each run; ATTN_MUTATION_SKIP=M leaves out the first M of these.
// ATTN_MUTATION_QUICK: survivors are listed, not examined, which takes longer than all others.
Count try_all(const Subject& kernel, std::vector<Mutation> mutations) {
  const char *text = std::getenv("ATTN_MUTATION_TEXT"),
             *sample = std::getenv("ATTN_MUTATION_SAMPLE");
  const bool quick = std::getenv("ATTN_MUTATION_QUICK");
  if (sample) {
    std::shuffle(mutations.begin(), mutations.end(), std::mt19937(sample_seed));
    mutations.resize(std::min(mutations.size(), size_t(std::atoi(sample))));
    const char* skipped = std::getenv("ATTN_MUTATION_SKIP");
    const size_t skip = skipped ? size_t(std::atoi(skipped)) : 0;
    mutations.erase(mutations.begin(), mutations.begin() + std::min(mutations.size(), skip));
  }
  Count count;
  for (const Mutation& mutation : mutations) {
    if (text && mutation.text.find(text) == mutation.text.npos) continue;
    if (sample && count.total > 0 && count.total % 10 == 0)  // a run may be stopped early
      std::cout << kernel.name << ": of " << count.total << " " << count.noticed << std::endl;
    ++count.total;
    if (is_noticed(kernel, mutation) || is_reported_by_llvm(kernel.name, mutation)) {
      ++count.noticed;
      continue;
    }
    const std::string why = quick ? "not examined" : why_harmless(kernel.name, mutation);
    count.unconfirmed += why.empty();
    std::cout << kernel.name << ": survived: " << kind_name(mutation.kind) << " " << mutation.text
              << ": " << (why.empty() ? "NOT SHOWN TO BE HARMLESS" : why) << std::endl;
  }
  return count;
}

// Neither the order of waves nor when loads return changes anything, and problems reach all code.
void check_unchanged(const Subject& kernel, uint64_t orders = 2) {
  REQUIRE(kernel.right.fault == "");
  for (uint64_t seed = 1; seed <= orders; ++seed) {
    Memory own;
    const auto object = load_shipped(kernel.name, &own);
    const ShippedRun run = run_shipped(kernel.name, *object, own, {.seed = seed});
    REQUIRE(judge(run, kernel.right) == "");
  }
  int unreached = 0;
  const auto& insts = kernel.object->program().insts;
  for (size_t i = 0; i < insts.size(); ++i) {
    const bool padding = insts[i].name == "s_nop" || insts[i].name == "s_code_end" || !insts[i].run;
    if (kernel.right.executed.count(uint32_t(i)) || padding) continue;
    ++unreached;
    UNSCOPED_INFO("not reached: +" << insts[i].offset << " " << insts[i].text);
  }
  CHECK(unreached == 0);
}

void print(const std::string& what, const Count& count) {
  std::cout << what << ": " << count.noticed << " of " << count.total << " mutations noticed, "
            << count.total - count.noticed - count.unconfirmed
            << (std::getenv("ATTN_MUTATION_QUICK") ? " not examined" : " shown to be harmless")
            << std::endl;
}
void check_count(const Count& count) {
  CHECK(count.noticed >= 0.95 * count.total);
  CHECK(count.unconfirmed == 0);
}

void mutate(const std::string& name, Count* all) {
  const Subject kernel(name);
  if (!kernel.object) ATTN_SKIP("no code object of " + name);
  check_unchanged(kernel, std::getenv("ATTN_MUTATION_SAMPLE") ? 0 : 2);
  const auto& executed = kernel.right.executed;
  std::vector<Mutation> all_of_it = dropped_and_lowered(name, *kernel.object, executed);
  for (auto&& more : {weakened_atomics(name, *kernel.object),
                      swapped_registers(name, *kernel.object, executed, swaps, 2026)})
    all_of_it.insert(all_of_it.end(), more.begin(), more.end());
  const Count count = try_all(kernel, all_of_it);
  print(name, count);
  *all += count;
}

std::vector<std::string> all_shipped_kernels() {
  std::vector<std::string> names = shipped_kernels();
  for (const std::string& name : shipped_kernels(true)) names.push_back(name);
  return names;
}

void mutate_slow(const std::vector<std::string>& names, auto&& wanted) {
  Count count;
  const char* only = std::getenv("ATTN_MUTATION_KERNEL");
  for (const std::string& name : names)
    if (wanted(name) && (!only || name == only)) mutate(name, &count);
  check_count(count);
}

}  // namespace

TEST_CASE("mutations of the shipped kernels are noticed", "[gfx9][mutations]") {
  Count count;
  for (const std::string& name : shipped_kernels()) mutate(name, &count);
  check_count(count);
}

TEST_CASE("the decode kernels: all code is reached, in any order of waves", "[gfx9]") {
  for (const std::string& name : shipped_kernels(true)) {
    if (!name.starts_with("decode_")) continue;
    INFO(name);
    const Subject kernel(name);
    if (!kernel.object) ATTN_SKIP("no code object of " + name);
    check_unchanged(kernel);
  }
}

// Where workgroups merge their parts (arrive in asm/include/decode_merge.inc): what each
// write-back, invalidation and wait is for.
TEST_CASE("mutations of the merge between workgroups are noticed", "[gfx9][mutation-merge]") {
  for (const std::string name :
       {"decode_gfx942_bf16_d64", "decode_gfx942_fp8_d128", "decode_gfx950_fp8_d128"}) {
    const Subject kernel(name);
    if (!kernel.object) ATTN_SKIP("no code object of " + name);
    REQUIRE(kernel.right.fault == "");
    const std::vector<Mutation> all = weakened_atomics(name, *kernel.object);
    CHECK(all.size() == 10);
    for (const Mutation& mutation : all) {
      INFO(name << " " << mutation.text);
      // Every order of waves shows it.
      for (const uint64_t seed : {0, 7}) {
        Memory own;
        const auto mutant = load_shipped(name, &own);
        mutation.apply(*mutant);
        const ShippedRun run = run_shipped(name, *mutant, own, {.seed = seed}, 42, &kernel.right);
        INFO("seed " << seed << ": " << run.fault);
        CHECK(run.fault != "");
      }
    }
  }
}

// attn-gfx9-tests "[mutation-forward]", "[mutation-decode]", "[mutation-gfx950]": hours;
// ATTN_MUTATION_KERNEL=NAME for one kernel.
TEST_CASE("mutations of the forward kernels are noticed", "[.][gfx9][mutation-forward]") {
  mutate_slow(shipped_kernels(true), [](auto& name) { return name.starts_with("fwd_"); });
}
TEST_CASE("mutations of the decode kernels are noticed", "[.][gfx9][mutation-decode]") {
  mutate_slow(shipped_kernels(true), [](auto& name) { return name.starts_with("decode_"); });
}
TEST_CASE("mutations of gfx950's kernels are noticed", "[.][gfx9][mutation-gfx950]") {
  mutate_slow(shipped_on_gfx950(), [](auto&) { return true; });
}

// attn-gfx9-tests "[mutation-seeds]"; ATTN_MUTATION_SEEDS=N for another number of seeds than 6.
TEST_CASE("mutations of the shipped kernels, other registers swapped",
          "[.][gfx9][mutation-seeds]") {
  const char* wanted = std::getenv("ATTN_MUTATION_SEEDS");
  const int seeds = wanted ? std::atoi(wanted) : 6;
  const char* only = std::getenv("ATTN_MUTATION_KERNEL");
  for (const std::string& name : only ? std::vector<std::string>{only} : all_shipped_kernels()) {
    const Subject kernel(name);
    if (!kernel.object) ATTN_SKIP("no code object of " + name);
    REQUIRE(kernel.right.fault == "");
    const auto& executed = kernel.right.executed;
    Count pooled = try_all(kernel, dropped_and_lowered(name, *kernel.object, executed));
    for (int seed = 1; seed <= seeds; ++seed)
      pooled += try_all(kernel, swapped_registers(name, *kernel.object, executed, swaps, seed));
    print(name + ", " + std::to_string(seeds) + " seeds", pooled);
    check_count(pooled);
  }
}
