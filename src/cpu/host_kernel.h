// The interface of kernels that run on the host: plain functions in a row of the catalog.
#pragma once
#include <cstddef>

#include "problem/problem.h"

namespace attn {

class Interrupt;      // core/interrupt.h
class ThreadPool;     // cpu/pool.h
struct MergeProblem;  // problem/operations.h
struct KvRollProblem;
struct KvRollArgs;
struct BackwardProblem;  // problem/backward.h
struct BackwardArgs;

// Nothing here allocates; scratch is the caller's workspace (256-byte aligned, sized by
// `workspace`).
struct HostKernel {
  bool (*runs_here)();  // cpuid
  const char* isa;      // "any", "avx2", "avx512"
  size_t (*workspace)(const AnyProblem& problem, int threads) = nullptr;
  // Each ends early where the interrupt stops it, and looks there every millisecond or so.
  void (*forward)(const Problem& problem, const Args& args, void* workspace, ThreadPool& pool,
                  Interrupt& interrupt) = nullptr;
  void (*backward)(const BackwardProblem& problem, const BackwardArgs& args, void* workspace,
                   ThreadPool& pool, Interrupt& interrupt) = nullptr;
  void (*merge)(const MergeProblem& problem, const attn_merge_args& args, ThreadPool& pool,
                Interrupt& interrupt) = nullptr;
  void (*quantize)(const attn_quantize_problem& problem, const attn_quantize_args& args,
                   ThreadPool& pool, Interrupt& interrupt) = nullptr;
  void (*kv_append)(const attn_kv_append_problem& problem, const attn_kv_append_args& args,
                    ThreadPool& pool, Interrupt& interrupt) = nullptr;
  void (*kv_roll)(const KvRollProblem& problem, const KvRollArgs& args, ThreadPool& pool,
                  Interrupt& interrupt) = nullptr;
  // Float operations per second of fused multiply-adds on registers, by all threads: the ceiling
  // that `attn bench` compares forward with.
  double (*fma_rate)(ThreadPool& pool) = nullptr;
};

}  // namespace attn
