// One GGML_OP_FLASH_ATTN_EXT as a problem of libattn.
#pragma once
#include <ggml.h>

#include <attn/attn.hpp>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "mask.h"

namespace attn::ggml {

// Whether Attention computes this operation, judged by types, shapes and strides alone.
bool serves(const ggml_tensor* op);
// Whether it has so little work that handing it over costs more than it saves.
bool is_small(const ggml_tensor* op);

// Computes operations, one at a time, and keeps their plans.
class Attention {
 public:
  // threads 0: libattn's default. ggml_threads: those of ggml's CPU backend compute, not others.
  Attention(int threads, bool ggml_threads);
  Attention(const Attention&) = delete;  // the context knows where threads_ is
  // op->data and those of its sources are in host memory. Throws attn::error.
  void run(const ggml_tensor* op);

 private:
  struct Call;  // an operation's problem and arguments
  const plan& plan_of(const Call& call);

  const int threads_;
  context context_;
  std::unordered_map<std::string, plan> plans_;  // by the bytes of the problem
  buffer workspace_;
};

}  // namespace attn::ggml
