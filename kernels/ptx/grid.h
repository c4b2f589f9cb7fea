// griddepcontrol: a kernel launched to start early overlaps with the end of the previous one in its
// stream (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
#ifndef ATTN_KERNELS_PTX_GRID_H
#define ATTN_KERNELS_PTX_GRID_H

namespace attn::ptx {

// Until all that is before this kernel in the stream has ended, and what it wrote can be seen.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Once all blocks have called this, the next kernel may be placed where there is room.
__device__ __forceinline__ void grid_let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Instead of grid_wait(), for a kernel that runs at the same time as its predecessors, the first of
// which has called grid_wait() before it let the next one start. So everything before them has
// ended, and can be seen from here on. The kernel must call grid_wait() in one of its threads
// before it ends, so that it ends after its predecessors.
__device__ __forceinline__ void grid_begin_concurrent() {
  asm volatile("fence.acq_rel.gpu;\n\tfence.proxy.async;" ::: "memory");
}

}  // namespace attn::ptx
#endif
