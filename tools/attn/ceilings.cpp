#include "attn/ceilings.h"

#include <algorithm>
#include <cmath>

#include "attn/bench_case.h"
#include "core/dtype.h"
#include "driver/library.h"
#include "kernels/shared/read_args.h"

#ifdef ATTN_READ_KERNEL
extern "C" __attribute__((visibility("hidden")))
const unsigned char attn_image_read_cuda_compute_80_begin[],
    attn_image_read_cuda_compute_80_end[];
#endif

namespace attn::tools {
namespace {

constexpr int64_t l2_unknown = 256 << 20;
constexpr int64_t buffer_in_l2s = 16;  // so large that what L2 keeps does not count

class DeviceMemory {
 public:
  DeviceMemory(Driver& driver, size_t bytes) : driver_(driver) {
    need_ok(driver.alloc(bytes, &memory_));
  }
  ~DeviceMemory() { (void)driver_.free(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  void* get() const { return memory_; }

 private:
  Driver& driver_;
  void* memory_ = nullptr;
};

size_t buffer_bytes(const Driver& driver) {
  const int64_t l2 = driver.device().l2_bytes;
  const size_t granule = 16 * attn_read_threads * attn_read_unroll;
  return static_cast<size_t>(buffer_in_l2s * (l2 > 0 ? l2 : l2_unknown)) / granule * granule;
}

// cublas_api.h and library_types.h. The library is opened at run time: nothing but this ceiling
// needs it.
enum { op_n = 0, op_t = 1, r_16f = 2, r_16bf = 14, compute_32f = 68, gemm_default = -1 };

struct Cublas {
  Call<void**> create;
  Call<void*> destroy;
  Call<void*, void*> set_stream;
  Call<void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
       const void*, void*, int, int, int, int>
      gemm;

  attn::Status open() {
    const char* const names[] = {"libcublas.so.13", "libcublas.so.12",
                                 "/usr/local/cuda/lib64/libcublas.so.13",
                                 "/usr/local/cuda/lib64/libcublas.so.12"};
    void* library = nullptr;
    std::string why;
    for (const char* name : names) {
      const attn::Status opened = open_library(name, &library);
      if (opened.ok()) break;
      why += (why.empty() ? "" : "; ") + opened.text;
    }
    if (!library) return unsupported(why);
    const Symbol symbols[] = {{create, "cublasCreate_v2"},
                              {destroy, "cublasDestroy_v2"},
                              {set_stream, "cublasSetStream_v2"},
                              {gemm, "cublasGemmEx"}};
    for (const Symbol& symbol : symbols) {
      *symbol.pointer = find_symbol(library, symbol.name);
      if (!*symbol.pointer) return unsupported("cuBLAS has no ", symbol.name);
    }
    return {};
  }
};

attn::Status cublas_status(int code, const char* function) {
  return code == 0 ? attn::Status{} : unsupported(function, ": cublasStatus_t ", code);
}

void fill_random(Driver& driver, const DeviceMemory& memory, attn_dtype type, int64_t elements,
                 uint64_t seed) {
  const Tensor tensor = random_tensor(type, {elements}, seed);
  need_ok(driver.copy_in(memory.get(), tensor.data.get(), tensor.bytes, nullptr));
}

// C = A^T B, both with k contiguous, as q and k have it.
Ceiling matmul(Driver& driver, attn_dtype type, int repeats) {
  Cublas cublas;
  if (const attn::Status opened = cublas.open(); !opened.ok()) return {0, opened.text};
  struct {
    int m, n, k;
  } const shapes[] = {{8192, 8192, 8192},
                      {8192, 8192, 4096},
                      {4096, 4096, 16384},
                      {16384, 8192, 4096},
                      {16384, 16384, 2048}};
  int64_t a = 0, b = 0, c = 0;
  for (const auto& s : shapes) {
    a = std::max(a, int64_t{s.m} * s.k);
    b = std::max(b, int64_t{s.n} * s.k);
    c = std::max(c, int64_t{s.m} * s.n);
  }
  const auto bytes = [](int64_t elements) { return static_cast<size_t>(elements) * 2; };
  const DeviceMemory left(driver, bytes(a)), right(driver, bytes(b)), product(driver, bytes(c));
  fill_random(driver, left, type, a, 1);
  fill_random(driver, right, type, b, 2);

  void* handle = nullptr;
  const attn::Status created = driver.timing().with_device(
      [&] { return cublas_status(cublas.create(&handle), cublas.create.name); });
  if (!created.ok()) return {0, created.text};
  const float one = 1, zero = 0;
  const int kind = type == ATTN_BF16 ? r_16bf : r_16f;
  DeviceTimer timer(driver);
  Ceiling best;
  for (const auto& s : shapes) {
    const auto launch = [&](int, void* stream) {
      return driver.timing().with_device([&]() -> attn::Status {
        ATTN_TRY(cublas_status(cublas.set_stream(handle, stream), cublas.set_stream.name));
        return cublas_status(
            cublas.gemm(handle, op_t, op_n, s.m, s.n, s.k, &one, left.get(), kind, s.k, right.get(),
                        kind, s.k, &zero, product.get(), kind, s.m, compute_32f, gemm_default),
            cublas.gemm.name);
      });
    };
    try {
      const Timing timing = timer.time(launch, 1, repeats);
      const double rate = 2.0 * s.m * s.n * s.k / timing.median_us * 1e6;
      if (rate > best.rate) best = {rate, join(s.m, "x", s.n, "x", s.k)};
    } catch (const attn::error& error) {
      if (best.rate == 0) best.detail = error.what();
    }
  }
  (void)driver.timing().with_device(
      [&] { return cublas_status(cublas.destroy(handle), cublas.destroy.name); });
  return best;
}

Ceiling copy(Driver& driver, int repeats) {
  const size_t bytes = buffer_bytes(driver);
  const DeviceMemory from(driver, bytes), to(driver, bytes);
  need_ok(driver.fill(from.get(), 1, bytes, nullptr));
  need_ok(driver.synchronize(nullptr));
  const auto launch = [&](int, void* stream) {
    return driver.copy(to.get(), from.get(), bytes, stream);
  };
  const Timing timing = DeviceTimer(driver).time(launch, 1, repeats);
  return {2.0 * static_cast<double>(bytes) / timing.median_us * 1e6, join(bytes, " bytes")};
}

#ifdef ATTN_READ_KERNEL
Ceiling read(Driver& driver, int repeats) {
  if (driver.device().arch.rfind("sm_", 0) != 0) return {0, "read_cuda is for NVIDIA devices"};
  const std::span<const unsigned char> image(attn_image_read_cuda_compute_80_begin,
                                             attn_image_read_cuda_compute_80_end);
  Module module = nullptr;
  need_ok(driver.load(image, &module));
  const std::shared_ptr<void> unload(module, [&](void*) { driver.unload(module); });
  const size_t bytes = buffer_bytes(driver);
  const DeviceMemory data(driver, bytes), sum(driver, sizeof(unsigned));
  need_ok(driver.fill(data.get(), 1, bytes, nullptr));
  need_ok(driver.fill(sum.get(), 0, sizeof(unsigned), nullptr));

  attn_read_kernarg kernarg{data.get(), static_cast<long long>(bytes / 16),
                            static_cast<unsigned*>(sum.get())};
  Launch launch;
  need_ok(driver.function(module, "read_cuda", 0, &launch.function));
  launch.grid[0] = static_cast<uint32_t>(driver.device().multiprocessors * attn_read_blocks_per_sm);
  launch.block[0] = attn_read_threads;
  launch.kernarg = &kernarg;
  launch.kernarg_bytes = sizeof kernarg;

  need_ok(driver.launch(launch, nullptr));
  unsigned got = 0;
  need_ok(driver.copy_out(&got, sum.get(), sizeof got, nullptr));
  const auto expected = static_cast<unsigned>(bytes / 4 * 0x01010101ull);
  if (got != expected)
    return {0, join("read_cuda summed its buffer to ", got, " instead of ", expected)};
  const Timing timing = DeviceTimer(driver).time(
      [&](int, void* stream) { return driver.launch(launch, stream); }, 1, repeats);
  return {static_cast<double>(bytes) / timing.median_us * 1e6, join(bytes, " bytes")};
}
#else
Ceiling read(Driver&, int) {
  return {0, "this build has no CUDA kernels"};
}
#endif

Json ceiling_json(const Ceiling& ceiling, const char* unit, double scale) {
  if (ceiling.rate == 0) return {{unit, nullptr}, {"missing", ceiling.detail}};
  return {{unit, ceiling.rate / scale}, {"of", ceiling.detail}};
}

}  // namespace

Json Ceilings::json() const {
  return {{"matmul", ceiling_json(matmul, "tflops", 1e12)},
          {"copy", ceiling_json(copy, "gbytes_per_s", 1e9)},
          {"read", ceiling_json(read, "gbytes_per_s", 1e9)}};
}

Ceilings measure_ceilings(Driver& driver, attn_dtype type, int repeats) {
  return {matmul(driver, type, repeats), copy(driver, repeats), read(driver, repeats)};
}

}  // namespace attn::tools
