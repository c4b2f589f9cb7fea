// Where a job's launches run: a device behind a HIP library, or the emulator inside this program.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "attn/common.h"
#include "gfx9emu/model.h"
#include "probes/job.h"

namespace attn::probes {

struct Outcome {
  std::string error;                         // why nothing came back
  std::vector<std::vector<std::byte>> read;  // of each buffer that was wanted
  double milliseconds = 0;                   // all repeats, by events around them
  // The emulator inside alone: what it found, by workgroup, and for each wave of workgroup 0 when,
  // by the issue model, its s_memtime were issued.
  struct Found {
    uint32_t workgroup[3];
    std::string kind, message, instruction;
    bool warning;
  };
  std::vector<Found> found;
  std::vector<std::vector<uint64_t>> clock_reads;
};

class Machine {
 public:
  virtual ~Machine() = default;
  // Name, architecture, compute units, driver.
  virtual tools::Json describe() const = 0;
  virtual Outcome launch(const LaunchSpec& launch, const std::vector<std::byte>& data) = 0;
};

// What is loaded. Both throw attn::error.
std::unique_ptr<Machine> open_device(const std::string& object, bool emulator,
                                     const std::string& library, int ordinal);
std::unique_ptr<Machine> open_emulator(const std::string& object,
                                       const gfx9emu::ModelSettings& settings);

}  // namespace attn::probes
