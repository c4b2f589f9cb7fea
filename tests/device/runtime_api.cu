// attn-runtime-api: a program of the CUDA runtime API that has libattn between its own kernels, on
// one stream, without waiting in between. Exit code 77: no device.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <attn/attn.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int queries = 70, keys = 200, heads = 2, dim = 64;

// The element of q, k or v: a small number that a float16 holds exactly.
__host__ __device__ float element(int tensor, int i) {
  return float((i * 37 + i / 61 * 11 + tensor * 29) % 65 - 32) / 32;
}

__global__ void produce(__half* to, int count, int tensor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = __float2half_rn(element(tensor, i));
}

__global__ void add_one(float* x, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] += 1;
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

// The largest difference of out from 1 + attention, in float64.
double worst_error(const std::vector<float>& out) {
  double worst = 0;
  for (int i = 0; i < queries; ++i) {
    for (int h = 0; h < heads; ++h) {
      std::vector<double> weights(keys);
      double sum = 0;
      for (int j = 0; j < keys; ++j) {
        double s = 0;
        for (int d = 0; d < dim; ++d)
          s +=
              double(element(0, (i * heads + h) * dim + d)) * element(1, (j * heads + h) * dim + d);
        sum += weights[j] = std::exp(s / 8);  // sqrt(dim)
      }
      for (int d = 0; d < dim; ++d) {
        double x = 1;
        for (int j = 0; j < keys; ++j)
          x += weights[j] / sum * element(2, (j * heads + h) * dim + d);
        const double error = std::abs(out[(i * heads + h) * dim + d] - x);
        worst = error <= worst ? worst : error;
      }
    }
  }
  return worst;
}

}  // namespace

int main() try {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices);
      error != cudaSuccess || devices == 0) {
    std::printf("SKIP: no CUDA device: %s\n", cudaGetErrorString(error));
    return 77;
  }
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  constexpr int counts[] = {queries * heads * dim, keys * heads * dim, keys * heads * dim};
  __half* tensors[3];
  for (int n = 0; n < 3; ++n) {
    CHECK(
        cudaMallocAsync(reinterpret_cast<void**>(&tensors[n]), counts[n] * sizeof(__half), stream));
    produce<<<(counts[n] + 255) / 256, 256, 0, stream>>>(tensors[n], counts[n], n);
  }
  std::vector<float> out(counts[0]);
  float* device_out;
  CHECK(cudaMallocAsync(reinterpret_cast<void**>(&device_out), counts[0] * sizeof(float), stream));

  const attn::context context(ATTN_BACKEND_CUDA);
  auto segment = attn::make<attn_segment>();
  segment.k_type = segment.v_type = ATTN_F16;
  segment.seqlen = keys;
  auto problem = attn::make<attn_problem>();
  problem.batch = 1;
  problem.heads_q = problem.heads_kv = heads;
  problem.head_dim = dim;
  problem.seqlen_q = queries;
  problem.q_type = ATTN_F16;
  problem.out_type = ATTN_F32;
  problem.num_segments = 1;
  problem.segments = &segment;
  const attn::plan plan(context, problem);
  const attn::buffer workspace = plan.make_workspace(context);
  auto kv = attn::make<attn_segment_args>();
  kv.k = tensors[1];
  kv.v = tensors[2];
  auto args = attn::make<attn_args>();
  args.q = tensors[0];
  args.out = device_out;
  args.num_segments = 1;
  args.segments = &kv;
  plan.run(args, workspace, stream);

  add_one<<<(counts[0] + 255) / 256, 256, 0, stream>>>(device_out, counts[0]);
  CHECK(cudaMemcpyAsync(out.data(), device_out, out.size() * sizeof(float), cudaMemcpyDeviceToHost,
                        stream));
  for (__half* tensor : tensors) CHECK(cudaFreeAsync(tensor, stream));
  CHECK(cudaFreeAsync(device_out, stream));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaStreamDestroy(stream));

  const double error = worst_error(out);
  const bool passed = error < 2e-3;
  std::printf("%s between kernels of the CUDA runtime on one stream: max error %.1e; %s\n",
              plan.kernel(), error, passed ? "passed" : "failed: above 2e-3");
  return passed ? 0 : 1;
} catch (const std::exception& error) {
  std::printf("failed: %s\n", error.what());
  return 1;
}
