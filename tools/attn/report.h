// The page of `attn bench --report`.
#pragma once

#include <string>
#include <vector>

#include "attn/common.h"

namespace attn::tools {

// A run's JSON, and what the page calls it.
struct MeasuredRun {
  std::string name;
  Json json;
};

// Reads `path`, JSON as `attn bench --json`, `attn-fp8-stress --json` and bench/ write it.
MeasuredRun read_run(const std::string& path);

// Writes one HTML page that draws the runs and needs no network.
void write_report(const std::string& path, const std::vector<MeasuredRun>& runs);

}  // namespace attn::tools
