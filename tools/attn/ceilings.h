// What a device does at best, measured in the same run as the kernels that are held against it.
#pragma once

#include "attn/timing.h"

namespace attn::tools {

struct Ceiling {
  double rate = 0;     // operations or bytes per second; 0: not measured
  std::string detail;  // the shape that was best; or why there is none
};

struct Ceilings {
  Ceiling matmul;  // best of five shapes through cuBLAS, 16-bit inputs, float32 accumulation
  Ceiling copy;    // within device memory; bytes read plus bytes written
  Ceiling read;    // read_cuda, device memory

  Json json() const;
};

// `type`: of the matmul, f16 or bf16. Driver errors throw; what is absent is left out with its
// reason.
Ceilings measure_ceilings(Driver& driver, attn_dtype type, int repeats);

}  // namespace attn::tools
