//# architectures sm_80 sm_90 compute_80
// Where the keys are that each query visits (visits.cuh): a row of a block table with pages of one
// key, for each item and segment, and the number of its keys. So kernels that know nothing of lists
// read the keys where they are. A block has one item.
#include "../ptx/grid.h"
#include "visits.cuh"

using namespace attn;
using namespace attn::device;

extern "C" __global__ void __launch_bounds__(attn_list_slots_threads)
    list_slots_cuda(const __grid_constant__ attn_list_slots_kernarg a) {
  constexpr int warps = attn_list_slots_threads / 32, rounds = attn_list_slots_rounds;
  __shared__ Visit visits[attn_gather_max_segments];
  __shared__ int kept_of_warp[2][rounds * warps];
  static_assert(sizeof visits + sizeof kept_of_warp == attn_list_slots_shared_bytes);
  const unsigned item = blockIdx.x;
  const long long number = a.visits.first + item;
  const bool in_memory = items_in_memory(a.visits);
  Item of{};
  if (!in_memory) of = find_padded_item(a.visits, number);
#if __CUDA_ARCH__ >= 900
  ptx::grid_let_next_start();
  if (!in_memory) prefetch_visits(a.visits, of, number);
  ptx::grid_wait();  // before any other access to memory
#endif
  if (in_memory) of = find_packed_item(a.visits, number);
  if (threadIdx.x < 32) find_visits(a.visits, of, number, visits);
  __syncthreads();
  int turn = 0;
  for (int i = 0; i < a.visits.num_segments; ++i) {
    const attn_list_slots_segment& to = a.segment[i];
    int* const table = to.table + item * (long long)to.capacity;
    int before = 0;
    for (int j = 0; j < visits[i].keys; j += rounds * attn_list_slots_threads, turn ^= 1) {
      Key key[rounds];
      find_keys(a.visits, of.b, visits[i], i, j + int(threadIdx.x), attn_list_slots_threads, key);
      int slot[rounds];
      bool keeps[rounds];
#pragma unroll
      for (int r = 0; r < rounds; ++r) {
        keeps[r] = key[r].entry >= 0;
        slot[r] = int(key[r].entry * to.entry_slots + key[r].row);
      }
      const Kept<warps, rounds> kept(keeps, kept_of_warp[turn]);
#pragma unroll
      for (int r = 0; r < rounds; ++r)
        if (keeps[r]) table[before + kept.place[r]] = slot[r];
      before += kept.all;
    }
    if (threadIdx.x == 0) to.lengths[item] = before;
  }
}
