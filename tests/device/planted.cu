// attn-planted BUG: runs kernels with one known mistake, which compute-sanitizer must report, and
// two without that it reports all the same (tests/device/sanitize.sh). Exit code 77: no device.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "attn/attn.h"

// The forward kernel without the barriers of its loader, after which K and V of a tile are there.
#define __syncthreads()
#include "../../kernels/forward_sm80/load.cuh"
#undef __syncthreads
#include "../../kernels/forward_sm80/forward.cuh"
extern "C" __global__ void __launch_bounds__(attn::sm80::tile_of(64, false).threads(),
                                             attn::sm80::tile_of(64, false).blocks)
    without_barriers(const __grid_constant__ attn::sm80::Kernarg<0> a) {
  attn::sm80::forward<attn::sm80::Shape<attn::device::F16, 64, 0>>(a);
}

namespace {

__global__ void write_behind_the_end(int* p, int count) {
  p[count + threadIdx.x] = 1;
}

__global__ void copy(const int* from, int* to) {
  to[threadIdx.x] = from[threadIdx.x];
}

__global__ void reverse_without_barrier(int* p) {
  __shared__ int x[128];
  x[threadIdx.x] = p[threadIdx.x];
  p[threadIdx.x] = x[127 - threadIdx.x];
}

__global__ void barrier_of_half_a_warp(int* p) {
  if (threadIdx.x < 16) {
    p[threadIdx.x] = 1;
    __syncthreads();
  }
  p[threadIdx.x + 32] = 2;
}

__global__ void barrier_of_other_lanes(int* p) {
  const unsigned mask = __ballot_sync(0xffffffff, threadIdx.x < 16);
  if (threadIdx.x <= 16) {
    p[threadIdx.x] = 1;
    __syncwarp(mask);
  }
}

// No mistake: group 0 reads what both have written before barrier 3. But the groups, as those of
// decode_sm90_fp8_*_r64, have met at barriers of their own another number of times, and racecheck
// reports it.
__global__ void groups_apart(int* p) {
  __shared__ int x[2][128];
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const auto meet = [](int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  };
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 1 + (i + group) % 2; ++k) meet(1 + group, 128);
    meet(3, 256);
    x[group][thread] = i;
    meet(3, 256);
    if (group == 0) p[thread] += x[1][127 - thread];
  }
}

// No mistake: in turns, one group writes and passes barrier 1 or 2 without waiting, and the other
// reads after it has waited there, as in forward_sm90/alternating.cuh. racecheck reports it, but
// not if both groups wait.
__global__ void hand_over(int* p) {
  __shared__ int x[2][128];
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  int sum = 0;
  for (int n = 0; n < 8; ++n) {
    const int barrier = 1 + n % 2;
    if (n % 2 == group) {
      x[n % 2][thread] = n + thread;
      asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory");
    } else {
      asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory");
      sum += x[n % 2][127 - thread];
    }
  }
  p[threadIdx.x] = sum;
}

constexpr int queries = 128, keys = 256, dim = 64;
constexpr size_t row_bytes = 2 * dim;

void* memory(size_t bytes, bool cleared) {
  void* p = nullptr;
  cudaMalloc(&p, bytes);
  if (cleared) cudaMemset(p, 0, bytes);
  return p;
}
int* ints(int count, bool cleared) {
  return static_cast<int*>(memory(count * sizeof(int), cleared));
}

// attn_run on K of which only `rows` of the 256 keys that it is told of are there.
void run_forward(int rows, bool cleared) {
  attn_context* context = nullptr;
  if (attn_context_create(ATTN_BACKEND_CUDA, nullptr, &context) != ATTN_OK) {
    std::printf("%s\n", attn_last_error());
    return;
  }
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = ATTN_F16;
  segment.seqlen = keys;
  attn_problem p{};
  p.struct_size = sizeof p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim = dim;
  p.seqlen_q = queries;
  p.q_type = ATTN_F16;
  p.num_segments = 1;
  p.segments = &segment;
  p.kernel = "fwd_sm80_f16_d64";
  attn_plan* plan = nullptr;
  if (attn_plan_create(context, &p, &plan) != ATTN_OK) std::printf("%s\n", attn_last_error());
  attn_segment_args kv{};
  kv.struct_size = sizeof kv;
  kv.v = memory(keys * row_bytes, true);
  attn_args args{};
  args.struct_size = sizeof args;
  args.q = memory(queries * row_bytes, true);
  args.out = memory(queries * row_bytes, true);
  args.num_segments = 1;
  args.segments = &kv;
  kv.k = memory(rows * row_bytes, cleared);  // the last: nothing lies behind it
  attn_run(plan, &args, nullptr, 0, nullptr);
  cudaDeviceSynchronize();
  attn_plan_destroy(plan);
  attn_context_destroy(context);
}

void run_without_barriers() {
  constexpr attn::sm80::Tile tile = attn::sm80::tile_of(dim, false);
  constexpr int shared = attn::sm80::shared_bytes(tile, dim, dim);
  attn_sm80_forward_kernarg a{};
  a.q = memory(queries * row_bytes, true);
  a.out = memory(queries * row_bytes, true);
  a.q_stride[1] = a.q_stride[2] = a.out_stride[1] = a.out_stride[2] = dim;
  a.batch = a.heads_q = a.group = 1;
  a.seqlen_q = queries;
  a.head_dim = a.head_dim_v = dim;
  a.out_type = attn_element_f16;
  a.num_segments = 1;
  a.chunk = 1;
  a.scale = a.log2_scale = 1;
  a.segment[0].k = memory(keys * row_bytes, true);
  a.segment[0].v = memory(keys * row_bytes, true);
  a.segment[0].k_stride[1] = a.segment[0].v_stride[1] = dim;
  a.segment[0].lengths.capacity = keys;
  cudaFuncSetAttribute(without_barriers, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  without_barriers<<<1, tile.threads(), shared>>>(a);
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP: no CUDA device\n");
    return 77;
  }
  const char* bug = argc == 2 ? argv[1] : "";
  const auto is = [&](const char* name) { return std::strcmp(bug, name) == 0; };
  if (is("write"))
    write_behind_the_end<<<1, 1>>>(ints(32, true), 32);
  else if (is("forward-read"))
    run_forward(200, true);
  else if (is("uninitialised"))
    copy<<<1, 32>>>(ints(32, false), ints(32, true));
  else if (is("forward-uninitialised"))
    run_forward(keys, false);
  else if (is("race"))
    reverse_without_barrier<<<1, 128>>>(ints(128, true));
  else if (is("forward-race"))
    run_without_barriers();
  else if (is("groups-apart"))
    groups_apart<<<1, 256>>>(ints(128, true));
  else if (is("hand-over"))
    hand_over<<<1, 256>>>(ints(256, true));
  else if (is("barrier"))
    barrier_of_half_a_warp<<<1, 32>>>(ints(64, true));
  else if (is("barrier-mask"))
    barrier_of_other_lanes<<<1, 32>>>(ints(64, true));
  else {
    std::printf(
        "usage: attn-planted write|forward-read|uninitialised|forward-uninitialised|race|"
        "forward-race|groups-apart|hand-over|barrier|barrier-mask\n");
    return 2;
  }
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s: %s\n", bug, cudaGetErrorString(error));
  return 0;
}
