// Plans: everything decided before the first run.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "core/interrupt.h"
#include "cpu/pool.h"
#include "driver/driver.h"
#include "problem/operations.h"
#include "problem/problem.h"

namespace attn {

struct FirstKernel;  // plan/device_kernel.h

struct Context {
  attn_backend backend = ATTN_BACKEND_AUTO;
  std::shared_ptr<Driver> driver;    // cuda, hip, hip-emu
  std::unique_ptr<ThreadPool> pool;  // reference, cpu
  Interrupt::Callback interrupted = nullptr;
  void* interrupted_user = nullptr;
  // Device code from a file. If there is one, kernels come from it alone.
  std::string kernel_file;
  Module kernel_file_module = nullptr;

  ~Context();
  bool host_memory() const { return !driver; }
  // Of one call.
  Interrupt interrupt() const { return Interrupt(interrupted, interrupted_user); }
  // An entry point on this device, its module loaded on first use and kept. shared_bytes: dynamic.
  Status function(const Kernel& kernel, uint32_t shared_bytes, Function* function);
  Status function(const FirstKernel& kernel, Function* function);
  Status use_file(const char* path);
  // Why there is no code of the kernel for this device; "" if there is.
  std::string without_code(const Kernel& kernel) const;

 private:
  Status function(const char* name, uint32_t kernarg_bytes, uint32_t static_shared_bytes,
                  uint32_t shared_bytes, Function* function);
  std::mutex mutex_;
  std::map<const Image*, Module> modules_;
};

struct Plan {
  std::shared_ptr<Context> context;
  const Kernel* kernel = nullptr;
  Problem problem;             // Op::forward
  MergeProblem merge{};        // Op::merge
  QuantizeProblem quantize{};  // Op::quantize
  size_t workspace = 0;
  Launch launch;                            // device kernels; kernarg is filled by each run
  Launch first;                             // that of DeviceKernel::first
  std::vector<unsigned char> encoded_maps;  // the tensor maps with which kernarg begins
};

// Why a kernel that the context's backend has does not run a problem.
struct Declined {
  const Kernel* kernel;
  std::string reason;
};

// Chooses the first row of the catalog that takes the problem; `declined` (may be null) gets the
// rows of the backend that did not run it, those behind the chosen one included.
Status plan_forward(const std::shared_ptr<Context>& context, const attn_problem* problem,
                    std::unique_ptr<Plan>* plan, std::vector<Declined>* declined = nullptr);
Status plan_merge(const std::shared_ptr<Context>& context, const attn_merge_problem* problem,
                  std::unique_ptr<Plan>* plan);
Status plan_quantize(const std::shared_ptr<Context>& context, const attn_quantize_problem* problem,
                     std::unique_ptr<Plan>* plan);

Status init_workspace(const Plan& plan, void* workspace, size_t bytes, void* stream);
Status run_forward(const Plan& plan, const attn_args* args, void* workspace, size_t bytes,
                   void* stream);
Status run_merge(const Plan& plan, const attn_merge_args* args, void* stream);
Status run_quantize(const Plan& plan, const attn_quantize_args* args, void* stream);
Status check_forward(const Plan& plan, const attn_args* args, void* stream);

}  // namespace attn
