// Clocks of m64nNk16 products of one warpgroup, N = 8 to 64, as a decode kernel would have them
// whose rows are N: A from shared memory, from shared memory transposed, and from registers; alone
// and several in a row; clusters of 8 and 16 blocks that a device holds at once.
//   nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -O3 -o swapped_wgmma
//   bench/dev/swapped_wgmma.cu -lcuda
#include <cstdio>

#include "../../kernels/ptx/wgmma.h"

namespace {

enum Operand { shared, shared_transposed, registers };

template <Operand from, int registers_of_d>
__device__ void multiply(float (&d)[registers_of_d], const unsigned (&fragment)[4],
                         unsigned long long a, unsigned long long b) {
  if constexpr (from == registers)
    attn::ptx::wgmma<true, false>(d, fragment, b, true);
  else if constexpr (from == shared)
    attn::ptx::wgmma<true>(d, a, b, true);
  else
    attn::ptx::wgmma_transposed_a<true>(d, a, b, true);
}

template <int N, Operand from, int in_a_row>
__global__ void __launch_bounds__(128) product_clocks(long long* clocks, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 32768 / 4; i += 128) reinterpret_cast<unsigned*>(memory)[i] = 0;
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  const unsigned base = unsigned(__cvta_generic_to_shared(memory));
  const unsigned long long a = attn::ptx::wgmma_descriptor(base / 16, 16),
                           b = attn::ptx::wgmma_descriptor((base + 16384) / 16, 16);
  const unsigned fragment[4] = {0, 0, 0, 0};
  float d[N / 2] = {};
  long long best = 1 << 30;
  for (int turn = 0; turn < 20; ++turn) {
    __syncthreads();
    const long long begin = clock64();
    attn::ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < in_a_row; ++i)
      multiply<from>(d, fragment, a + 2 * (i % 4), b + 2 * (i % 4));
    attn::ptx::wgmma_commit();
    attn::ptx::wgmma_wait<0>();
    const long long took = clock64() - begin;
    if (took < best) best = took;
  }
  float sum = 0;
  for (float x : d) sum += x;
  if (sum != 0) *sink = sum;
  if (threadIdx.x == 0) *clocks = best;
}

template <int N, Operand from, int in_a_row>
long long clocks_of() {
  long long *clocks, took = 0;
  float* sink;
  cudaMalloc(&clocks, sizeof *clocks);
  cudaMalloc(&sink, sizeof *sink);
  product_clocks<N, from, in_a_row><<<1, 128, 32768>>>(clocks, sink);
  const cudaError_t status = cudaMemcpy(&took, clocks, sizeof took, cudaMemcpyDeviceToHost);
  if (status != cudaSuccess) std::printf("%s\n", cudaGetErrorString(status));
  cudaFree(clocks);
  cudaFree(sink);
  return took;
}

template <int N, Operand from>
void print(const char* name) {
  std::printf(
      "{\"n\":%d,\"a\":\"%s\",\"clocks_1\":%lld,\"clocks_4\":%lld,\"clocks_8\":%lld,\"clocks_16\":%"
      "lld}\n",
      N, name, clocks_of<N, from, 1>(), clocks_of<N, from, 4>(), clocks_of<N, from, 8>(),
      clocks_of<N, from, 16>());
}
template <int N>
void print_all() {
  print<N, shared>("shared");
  print<N, shared_transposed>("shared_transposed");
  print<N, registers>("registers");
}

__global__ void in_a_cluster() {}

void print_clusters(int blocks, int shared_bytes) {
  cudaFuncSetAttribute(in_a_cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaFuncSetAttribute(in_a_cluster, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(160);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, in_a_cluster, &config);
  std::printf("{\"cluster_blocks\":%d,\"shared_bytes\":%d,\"clusters\":%d,\"status\":\"%s\"}\n",
              blocks, shared_bytes, clusters, cudaGetErrorName(status));
}

}  // namespace

int main() {
  print_all<8>();
  print_all<16>();
  print_all<32>();
  print_all<64>();
  for (int blocks : {8, 16})
    for (int bytes : {40 << 10, 113 << 10, 200 << 10}) print_clusters(blocks, bytes);
}
