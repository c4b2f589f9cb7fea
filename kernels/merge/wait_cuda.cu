//# architectures sm_80 sm_90 compute_80
// Ends when all segments have arrived (attn_segment_args.ready), and with it begins what is behind
// it in the stream. One warp, which leaves the device to whoever copies.
#include "../ptx/acquire_system.h"
#include "shards_args.h"

extern "C" __global__ void __launch_bounds__(32)
    wait_cuda(const __grid_constant__ attn_wait_kernarg a) {
  using attn::ptx::load_acquire_system;
  for (int n = threadIdx.x; n < a.count; n += 32) {
    const unsigned* const words = a.ready[n];
    while (int(load_acquire_system(words) - load_acquire_system(words + 1)) < 0) __nanosleep(100);
  }
}
