// How the matrix unit of sm_90 adds up fp8 products (docs/numerics.md, "FP8 sums"): prints the
// relative error of sums of positive products by their number, added up by the unit alone and 128
// at a time with float32 between, and fails where it is not what the kernels count on. Exit code
// 77: no such device.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "../../kernels/ptx/tma.h"
#include "../../kernels/ptx/wgmma.h"

namespace {

constexpr int rows = 64, at_once = 128;  // of A and of B; columns, a row of shared memory

// out[64][64] = A B^T for A, B [64][length] of e4m3. promoted: the sums of each 128 columns are
// found for themselves and added up in float32.
__global__ void __launch_bounds__(128)
    add_up(const unsigned char* a, const unsigned char* b, int length, bool promoted, float* out) {
  __shared__ alignas(1024) unsigned char tile[2][rows * at_once];
  float total[32], sum[32];
  for (int i = 0; i < 32; ++i) total[i] = sum[i] = 0;
  for (int first = 0; first < length; first += at_once) {
    for (int i = threadIdx.x; i < 2 * rows * at_once; i += 128) {
      const int matrix = i / (rows * at_once), row = i / at_once % rows, column = i % at_once;
      const int swizzled = column ^ (row % 8 << 4);
      tile[matrix][row * at_once + swizzled] = (matrix ? b : a)[row * length + first + column];
    }
    attn::ptx::fence_async_shared();
    __syncthreads();
    attn::ptx::wgmma_fence();
    for (int step = 0; step < at_once / 32; ++step) {
      const auto descriptor = [&](int matrix) {
        const unsigned at = unsigned(__cvta_generic_to_shared(tile[matrix]));
        return attn::ptx::wgmma_descriptor((at + 32 * step) / 16, 0);
      };
      attn::ptx::wgmma_fp8<false>(sum, descriptor(0), descriptor(1),
                                  step > 0 || (!promoted && first > 0));
    }
    attn::ptx::wgmma_commit();
    attn::ptx::wgmma_wait<0>();
    attn::ptx::pin(sum);
    for (int i = 0; i < 32; ++i) total[i] = promoted ? total[i] + sum[i] : sum[i];
    __syncthreads();
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 32; ++i)
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * rows + 8 * (i / 4) + 2 * (lane % 4) + i % 2] =
        total[i];
}

bool failed(cudaError_t error) {
  if (error != cudaSuccess) std::fprintf(stderr, "matrix sums: %s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}

// The mean relative error of all sums; NaN if the device fails.
double error_of(int length, bool promoted) {
  const size_t count = size_t(rows) * length;
  std::mt19937 random{unsigned(length)};
  std::normal_distribution<float> normal;
  std::vector<unsigned char> codes[2];
  std::vector<double> real[2];
  unsigned char* on_device[2] = {};
  float* out = nullptr;
  for (int matrix = 0; matrix < 2; ++matrix) {
    for (size_t n = 0; n < count; ++n) {
      __nv_fp8_e4m3 x(std::fabs(normal(random)));
      codes[matrix].push_back(x.__x);
      real[matrix].push_back(float(x));
    }
    if (failed(cudaMalloc(&on_device[matrix], count)) ||
        failed(cudaMemcpy(on_device[matrix], codes[matrix].data(), count, cudaMemcpyDefault)))
      return NAN;
  }
  std::vector<float> got(rows * rows);
  if (failed(cudaMalloc(&out, got.size() * sizeof(float)))) return NAN;
  add_up<<<1, 128>>>(on_device[0], on_device[1], length, promoted, out);
  if (failed(cudaMemcpy(got.data(), out, got.size() * sizeof(float), cudaMemcpyDefault)))
    return NAN;
  for (unsigned char* memory : on_device) cudaFree(memory);
  cudaFree(out);
  double error = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < rows; ++j) {
      double exact = 0;
      for (int n = 0; n < length; ++n)
        exact += real[0][size_t(i) * length + n] * real[1][size_t(j) * length + n];
      error += (got[size_t(i) * rows + j] / exact - 1) / (rows * rows);
    }
  }
  return error;
}

}  // namespace

int main() {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
    std::puts("SKIP: no device of sm_90");
    return 77;
  }
  int wrong = 0;
  for (int length : {128, 256, 512, 1024, 2048, 4096}) {
    const double alone = error_of(length, false), promoted = error_of(length, true);
    std::printf(
        "matrix sums: of %d products: %+.2e by the unit alone, %+.2e in float32 behind each %d\n",
        length, alone, promoted, at_once);
    // It cuts off, so the more there is in the sum, the more is lost.
    wrong += !(std::fabs(promoted) < 1e-3) || !(length < 1024 || alone < -5e-3);
  }
  std::puts(wrong ? "matrix sums: FAILED" : "matrix sums: passed");
  return wrong ? 1 : 0;
}
