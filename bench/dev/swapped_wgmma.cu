// Clocks of m64nNk16 products of one warpgroup, N = 8 to 64, as a decode kernel would have them
// whose rows are N: A from shared memory, from shared memory transposed, and from registers; alone
// and several in a row; clusters of 8 and 16 blocks that a device holds at once.
//   nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -O3 -o swapped_wgmma
//   bench/dev/swapped_wgmma.cu -lcuda
#include <cstdio>

namespace {

enum Operand { shared, shared_transposed, registers };

template <int N, Operand from>
struct Product;

template <Operand from>
struct Product<8, from> {
  static __device__ void run(float (&d)[4], const unsigned (&fragment)[4], unsigned long long a,
                             unsigned long long b) {
    if constexpr (from == registers)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "%8, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(b));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, "
          "%6, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "l"(a), "l"(b), "n"(from == shared_transposed));
  }
};

template <Operand from>
struct Product<16, from> {
  static __device__ void run(float (&d)[8], const unsigned (&fragment)[4], unsigned long long a,
                             unsigned long long b) {
    if constexpr (from == registers)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
          "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7])
          : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(b));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
          "%8, %9, 1, 1, 1, %10, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7])
          : "l"(a), "l"(b), "n"(from == shared_transposed));
  }
};

template <Operand from>
struct Product<32, from> {
  static __device__ void run(float (&d)[16], const unsigned (&fragment)[4], unsigned long long a,
                             unsigned long long b) {
    if constexpr (from == registers)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15])
          : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(b));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, %18, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15])
          : "l"(a), "l"(b), "n"(from == shared_transposed));
  }
};

template <Operand from>
struct Product<64, from> {
  static __device__ void run(float (&d)[32], const unsigned (&fragment)[4], unsigned long long a,
                             unsigned long long b) {
    if constexpr (from == registers)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
          "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(b));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
          "%26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, %34, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(a), "l"(b), "n"(from == shared_transposed));
  }
};

// A tile of 64 rows of 128 bytes, swizzled by 128 bytes.
__device__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

template <int N, Operand from, int in_a_row>
__global__ void __launch_bounds__(128) product_clocks(long long* clocks, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 32768 / 4; i += 128) reinterpret_cast<unsigned*>(memory)[i] = 0;
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  const unsigned base = unsigned(__cvta_generic_to_shared(memory));
  const unsigned long long a = descriptor(base), b = descriptor(base + 16384);
  const unsigned fragment[4] = {0, 0, 0, 0};
  float d[N / 2] = {};
  long long best = 1 << 30;
  for (int turn = 0; turn < 20; ++turn) {
    __syncthreads();
    const long long begin = clock64();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < in_a_row; ++i)
      Product<N, from>::run(d, fragment, a + 2 * (i % 4), b + 2 * (i % 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
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
