// Times the block shapes that kernels/forward_sm80/tiles.h could choose, for bf16, and compares
// their results with those of the chosen one.
//   nvcc -O3 -std=c++20 -arch=sm_90 -DHEAD_DIM=128 -Xptxas -v -o sm80_tiles bench/dev/sm80_tiles.cu
//   && ./sm80_tiles
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../kernels/forward_sm80/forward.cuh"

using attn::sm80::Tile;

// nvcc 13.0 cannot name a kernel whose template argument is a struct.
template <int head_dim, int rows, int keys, int warps, int stages, bool q_in_registers, int blocks>
__global__ void __launch_bounds__(32 * warps, blocks)
    kernel(const __grid_constant__ attn_sm80_forward_kernarg a) {
  attn::sm80::forward<attn::sm80::Shape<attn::device::BF16, head_dim, 0,
                                        Tile{rows, keys, warps, stages, q_in_registers, blocks}>>(
      a);
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

__global__ void fill(__nv_bfloat16* p, size_t count, unsigned seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    unsigned x = unsigned(i) * 2654435761u + seed;
    float sum = 0;  // of 4 uniform numbers: near enough to a normal one
    for (int k = 0; k < 4; ++k) {
      x ^= x << 13, x ^= x >> 17, x ^= x << 5;
      sum += float(x >> 8) / 16777216.0f - 0.5f;
    }
    p[i] = __float2bfloat16(sum * 1.7320508f);
  }
}

constexpr int tokens = 16384, width = 2048;
struct Data {
  __nv_bfloat16 *q, *k, *v, *out, *expected;
};

template <int head_dim, Tile tile>
void run(const Data& data, bool first) {
  constexpr int shared = attn::sm80::shared_bytes(tile, head_dim);
  const auto function = kernel<head_dim, tile.rows, tile.keys, tile.warps, tile.stages,
                               tile.q_in_registers, tile.blocks>;
  std::printf("d%d rows %3d keys %3d warps %d stages %d q_in_registers %d blocks %d:", head_dim,
              tile.rows, tile.keys, tile.warps, tile.stages, tile.q_in_registers, tile.blocks);
  CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, function));
  int blocks = 0;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, tile.threads(), shared));
  std::printf(" %3d registers %3d spilled, %d blocks/SM;", attributes.numRegs,
              int(attributes.localSizeBytes), blocks);
  float worst = 0;
  for (int seqlen : {512, 2048, 16384}) {
    for (bool causal : {false, true}) {
      const int heads = width / head_dim, batch = tokens / seqlen;
      attn_sm80_forward_kernarg a{};
      a.q = data.q;
      a.out = first ? data.expected : data.out;
      a.q_stride[0] = a.out_stride[0] = (long long)seqlen * width;
      a.q_stride[1] = a.out_stride[1] = width;
      a.q_stride[2] = a.out_stride[2] = head_dim;
      a.batch = batch;
      a.heads_q = heads;
      a.group = 1;
      a.seqlen_q = seqlen;
      a.head_dim = a.head_dim_v = head_dim;
      a.out_type = attn_element_bf16;
      a.num_segments = 1;
      a.chunk = std::min<long long>(
          batch * heads, std::max<long long>(1, (24ll << 20) / (4ll * seqlen * head_dim)));
      a.scale = 1 / std::sqrt(float(head_dim));
      a.mask = {causal, false, false, 0, 0};
      auto& s = a.segment[0];
      s.k = data.k, s.v = data.v, s.lengths.capacity = seqlen;
      for (int i = 0; i < 3; ++i) s.k_stride[i] = s.v_stride[i] = a.q_stride[i];
      const unsigned grid = batch * heads * ((seqlen + tile.rows - 1) / tile.rows);
      cudaEvent_t start, stop;
      CHECK(cudaEventCreate(&start));
      CHECK(cudaEventCreate(&stop));
      std::vector<float> times;
      for (int i = 0; i < 12; ++i) {
        CHECK(cudaEventRecord(start));
        for (int n = 0; n < 3; ++n) function<<<grid, tile.threads(), shared>>>(a);
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 2) times.push_back(ms / 3);
      }
      CHECK(cudaGetLastError());
      std::sort(times.begin(), times.end());
      const double flop = 4.0 * tokens * double(seqlen) * width * (causal ? 0.5 : 1);
      std::printf(" %s%d %.0f", causal ? "causal " : "", seqlen,
                  flop / times[times.size() / 2] / 1e9);
      if (seqlen == 2048 && causal) {  // every block shape sums in another order
        if (first) {
          CHECK(cudaMemcpy(data.q + size_t(tokens) * width, data.expected,
                           size_t(tokens) * width * 2, cudaMemcpyDeviceToDevice));
        } else {
          std::vector<__nv_bfloat16> got(size_t(tokens) * width), want(got.size());
          CHECK(cudaMemcpy(got.data(), data.out, got.size() * 2, cudaMemcpyDeviceToHost));
          CHECK(cudaMemcpy(want.data(), data.q + size_t(tokens) * width, got.size() * 2,
                           cudaMemcpyDeviceToHost));
          for (size_t i = 0; i < got.size(); ++i)
            worst = std::max(worst, std::abs(__bfloat162float(got[i]) - __bfloat162float(want[i])));
        }
      }
    }
  }
  std::printf(" TFLOP/s; differs by %.4f\n", worst);
  std::fflush(stdout);
}

template <int head_dim, Tile... tiles>
void run_all() {
  Data data;
  const size_t count = size_t(tokens) * width;
  CHECK(cudaMalloc(&data.q, 2 * count * 2));
  CHECK(cudaMalloc(&data.k, count * 2));
  CHECK(cudaMalloc(&data.v, count * 2));
  CHECK(cudaMalloc(&data.out, count * 2));
  CHECK(cudaMalloc(&data.expected, count * 2));
  fill<<<1024, 256>>>(data.q, count, 1);
  fill<<<1024, 256>>>(data.k, count, 2);
  fill<<<1024, 256>>>(data.v, count, 3);
  CHECK(cudaDeviceSynchronize());
  bool first = true;
  (..., (run<head_dim, tiles>(data, first), first = false));
}

int main() {
#if HEAD_DIM == 64
  run_all<64, attn::sm80::tile_of(64, false), Tile{128, 64, 4, 1, true, 2},
          Tile{128, 64, 4, 1, false, 2}, Tile{128, 64, 4, 2, false, 2},
          Tile{128, 96, 4, 1, true, 2}, Tile{128, 96, 4, 1, false, 2},
          Tile{128, 128, 4, 1, false, 2}, Tile{128, 32, 4, 2, true, 2}, Tile{64, 64, 4, 2, true, 4},
          Tile{64, 64, 4, 2, true, 3}, Tile{256, 64, 8, 2, true, 1}>();
#elif HEAD_DIM == 128
  run_all<128, attn::sm80::tile_of(128, false), Tile{128, 64, 4, 2, false, 2},
          Tile{128, 32, 4, 1, false, 2}, Tile{128, 32, 4, 2, false, 2}, Tile{64, 64, 4, 2, true, 2},
          Tile{64, 64, 4, 1, true, 3}, Tile{64, 128, 4, 1, true, 2}, Tile{128, 64, 8, 2, true, 1},
          Tile{128, 128, 8, 1, true, 1}>();
#else
  run_all<256, attn::sm80::tile_of(256, false), Tile{128, 64, 8, 1, false, 1},
          Tile{128, 64, 8, 2, false, 1}, Tile{64, 32, 4, 1, false, 2}, Tile{64, 32, 4, 2, false, 2},
          Tile{128, 32, 8, 2, true, 1}, Tile{64, 32, 4, 2, true, 2}>();
#endif
}
