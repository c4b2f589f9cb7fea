// An issue model of one compute unit of gfx942 or gfx950, for the order and mix of instructions,
// not for exact times. All clocks below that the ISA manual does not state are settings.
//
// Each wave issues in order, one instruction per 4 clocks at most; wave w is on SIMD w % 4. A SIMD
// has one vector port: VALU holds it for 4 clocks, transcendentals 16 (gfx950: 8), packed f32 4 or
// 8, MFMA 4; the matrix unit is then busy for 4 clocks per pass. Scalar, LDS and memory
// instructions need no port. LDS serves 128 bytes per clock, longer with bank conflicts, for all
// waves of the unit in turn; memory has a fixed latency and a bandwidth. s_waitcnt and s_barrier
// hold a wave. Of two waves that could issue at the same clock, the one of higher s_setprio goes
// first, then the one that issued longer ago. Registers are not looked at: s_nop and s_waitcnt are
// taken to be right. An instruction of a trace waits for its line of the instruction cache, which
// nothing asks for before. Another compute unit shares the cache; it runs the same code, and takes
// no room of it.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gfx9emu/inst.h"
#include "gfx9emu/instruction_cache.h"

namespace gfx9emu {

struct TraceEntry;

struct ModelInst {
  Class cls = Class::Valu;
  uint8_t passes = 0;                  // MFMA
  uint8_t vmcnt = 255, lgkmcnt = 255;  // s_waitcnt: the most left outstanding; 255 where unsaid
  int32_t imm = 0;                     // s_nop: wait states less 1; s_setprio: the priority
  bool sets_priority = false;
  bool reads_clock = false;              // s_memtime
  uint32_t lds_clocks = 0;               // of the LDS, bank conflicts included
  uint32_t bytes = 0;                    // moved by memory instructions
  uint32_t code_at = 0, code_bytes = 0;  // where it is in the code; 0 bytes: always there
};

struct ModelSettings {
  ModelSettings() = default;
  // gfx950 has transcendentals at twice the rate.
  explicit ModelSettings(Arch arch) : trans(arch == Arch::Gfx950 ? 8 : 16) {}
  int simds = 4;
  int workgroup = 0;  // waves that a barrier is for, one workgroup after the other; 0: all
  int issue = 4, valu = 4, trans = 16, packed_f32 = 4, pass = 4;
  int lds_latency = 64;      // from the end of service to the counter
  int memory_latency = 800;  // the same, of buffer, global, flat, scratch
  int scalar_latency = 200;
  int memory_bytes_per_clock = 64;
  int barrier = 4;  // from the last arrival to the release
  // The vector port is free again behind the issue of an MFMA; otherwise when that is done.
  bool overlap = true;
  InstructionCache::Shape instruction_cache = {};
};

// A setting as JSON has it: tools/silicon measures those that can be measured on a device.
struct ModelConstant {
  const char* name;  // "trans_clocks"
  int ModelSettings::* setting;
};
std::span<const ModelConstant> model_constants();
// The settings that a report of tools/silicon has values for, rounded, in the place of those in
// `settings`; their names go to `taken`, "overlap" among them. Returns "" or what is wrong.
std::string load_constants(std::string_view json, ModelSettings& settings,
                           std::vector<std::string>& taken);

struct ModelResult {
  uint64_t clocks = 0;       // until the last wave ends
  uint64_t mfma_clocks = 0;  // matrix units busy, summed over SIMDs
  uint64_t port_clocks = 0;  // vector ports busy, summed over SIMDs
  uint64_t lds_clocks = 0;
  int simds = 0;  // those that had waves
  std::array<uint64_t, class_count> instructions{};
  // Clocks that waves stood ready and did not issue, by what held them.
  uint64_t held_by_port = 0, held_by_mfma = 0, held_by_wait = 0, held_by_barrier = 0;
  uint64_t held_by_fetch = 0;
  uint64_t fetch_misses = 0;                       // of the instruction cache
  uint64_t code_lines = 0;                         // of it that were used
  std::vector<std::vector<uint64_t>> clock_reads;  // by wave: when its s_memtime were issued

  double mfma_share() const { return share(mfma_clocks, clocks * simds); }
  double port_share() const { return share(port_clocks, clocks * simds); }
  double lds_share() const { return share(lds_clocks, clocks); }

 private:
  static double share(uint64_t part, uint64_t all) { return all ? double(part) / double(all) : 0; }
};

using ModelWaves = std::vector<std::vector<ModelInst>>;
// All waves start at clock 0. Waves that have ended count as arrived at every barrier.
ModelResult run_model(const ModelWaves& waves, const ModelSettings& settings);

// A trace as launch() records it, one list per wave.
ModelWaves model_waves(const Program& program, std::span<const std::vector<TraceEntry>> traces);

// A mix written by hand. Lines, `#` starts a comment:
//   waves 8                the number of waves; before all else
//   group 0-3              the lines that follow are for these waves, until the next `group`
//   repeat 16              the lines up to `end` so many times; nests
//   32 mfma:8 trans 2 valu counts may stand before an instruction
// Instructions: mfma:PASSES valu trans packed salu nop:N barrier prio:N lds:BYTES vmem:BYTES smem
// wait:vm=N,lgkm=N. lds and vmem bytes are those of the whole wave. Returns "" or an error that
// names the line.
std::string parse_mix(std::string_view text, ModelWaves& waves);

// The settings, the counts by class, and the results: with packed f32 at 4 and at 8 clocks and
// without overlap; or, where `measured` names constants of a device, the one with these.
std::string model_json(const ModelWaves& waves, ModelSettings settings,
                       const std::vector<std::string>& measured = {});

// LDS clocks of one instruction: its lanes go in groups, each group takes as many clocks as the
// most different 4-byte words that it wants of one bank; 32 banks. `addresses` in bytes, of the
// active lanes of `exec` only. Groups, as published for MI300X (ROCm, "LDS bank conflicts"), the
// rest assumed:
//   up to 4 bytes  lanes 0-31, 32-63
//   8 bytes        16 consecutive lanes
//   12, 16 bytes   reads 0-3,20-23  4-7,16-19  8-11,28-31  12-15,24-27 and the same from 32;
//                  writes 8 consecutive lanes
// A pair access (ds_read2) is two.
struct LdsClocks {
  uint32_t clocks = 0;
  uint32_t conflicts = 0;  // of them more than without conflicts
};
LdsClocks lds_clocks(int bytes, bool is_store, uint64_t exec,
                     std::span<const uint32_t, 64> addresses);

}  // namespace gfx9emu
