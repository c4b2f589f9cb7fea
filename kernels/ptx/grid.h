// griddepcontrol: a kernel launched to start early runs beside the end of the one before it in its
// stream (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
#ifndef ATTN_KERNELS_PTX_GRID_H
#define ATTN_KERNELS_PTX_GRID_H

namespace attn::ptx {

// Until all that is before this kernel in the stream has ended, and what it wrote can be seen.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The kernel behind this one may be placed where there is room, once all blocks have said so.
__device__ __forceinline__ void grid_let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace attn::ptx
#endif
