// The inputs of the stress test. Each has shown errors of FP8 kernels that random inputs and loose
// bounds let pass: structured rows and columns show operands in the wrong order or place, sinks a P
// that has run out of the format's range, concentrated softmax a wrong running maximum.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.h"

namespace attn::tools {

struct StressOptions {
  int64_t seqlen = 512, heads = 4, head_dim = 128;
  uint64_t seed = 1;
};

// An element of q, k or v and the tensor it lies in.
struct Place {
  int64_t head, row, column, rows, columns;
  uint64_t random;  // differs for every element, tensor and seed
};
using Fill = std::function<double(const Place&)>;

struct StressCase {
  std::string name;  // words from general to special, "sink/10/4096"
  int64_t seqlen_q, seqlen_kv;
  Fill q, k, v;
};

// In order of running: the single cases, sinks, the matrix q x k x v.
std::vector<StressCase> stress_cases(const StressOptions& options);

// Whether `selection` is the case's name or its first words; "" selects all.
bool selected(const StressCase& c, const std::string& selection);

// Codes of one fp8 type, [seqlen, heads, head_dim] each: batch 1.
struct StressInputs {
  attn_dtype type;
  int64_t seqlen_q, seqlen_kv, heads, head_dim;
  std::vector<uint8_t> q, k, v;
};
// float32 values, rounded to the type once; std::logic_error if one is out of its range.
StressInputs make_inputs(const StressCase& c, const StressOptions& options, attn_dtype type);

}  // namespace attn::tools
