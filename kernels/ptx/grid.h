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

}  // namespace attn::ptx
#endif
