// What the kernels here are written with, in OpenCL C for gfx942 and in C for the host, so that one
// source gives a code object and the results that it must have.
//
// A kernel is NAME(out, in, n): 16 * n words each way, n a multiple of 128, run by n / 128
// workgroups of 128 work-items. `in` holds floats k / 8 with |k| <= 64; integer kernels take their
// bits, spread() where that is too few. `out` is 0 before. Results must agree in every bit:
// floating point is not contracted, division and square root are correctly rounded, sums have one
// order.
//
// On the host each work-item is a thread, workgroups run one after another; the program sets
// `attn_item` in each and gives attn_barrier(), which all 128 pass together. Integers wrap:
// -fwrapv.
#ifdef __OPENCL_C_VERSION__

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define KERNEL __kernel __attribute__((reqd_work_group_size(128, 1, 1)))
#define GLOBAL __global
#define LOCAL __local
#define UNROLL _Pragma("unroll")
typedef half half_v4 __attribute__((ext_vector_type(4)));
typedef half half_v2 __attribute__((ext_vector_type(2)));
typedef short short_v4 __attribute__((ext_vector_type(4)));
typedef float float_v4 __attribute__((ext_vector_type(4)));
typedef float float_v16 __attribute__((ext_vector_type(16)));
typedef int int_v4 __attribute__((ext_vector_type(4)));
typedef int int_v16 __attribute__((ext_vector_type(16)));
typedef long int_64;
typedef unsigned long uint_64;

static int local_id(void) {
  return (int)__builtin_amdgcn_workitem_id_x();
}
static int group_id(void) {
  return (int)__builtin_amdgcn_workgroup_id_x();
}
static void barrier(void) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static int atomic_add_global(__global int* at, int value) {
  return __opencl_atomic_fetch_add((__global atomic_int*)at, value, __ATOMIC_RELAXED,
                                   __OPENCL_MEMORY_SCOPE_DEVICE);
}
static int atomic_max_global(__global int* at, int value) {
  return __opencl_atomic_fetch_max((__global atomic_int*)at, value, __ATOMIC_RELAXED,
                                   __OPENCL_MEMORY_SCOPE_DEVICE);
}
static int atomic_add_local(__local int* at, int value) {
  return __opencl_atomic_fetch_add((__local atomic_int*)at, value, __ATOMIC_RELAXED,
                                   __OPENCL_MEMORY_SCOPE_WORK_GROUP);
}
static int atomic_xchg_cas(__global int* at, int expected, int value) {
  __opencl_atomic_compare_exchange_strong((__global atomic_int*)at, &expected, value,
                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                          __OPENCL_MEMORY_SCOPE_DEVICE);
  return expected;
}
#define mfma_f32_32x32x8_f16(a, b, c) __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0)
#define mfma_f32_16x16x16_f16(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0)
#define mfma_i32_32x32x16_i8(a, b, c) __builtin_amdgcn_mfma_i32_32x32x16_i8(a, b, c, 0, 0, 0)
#define mfma_i32_16x16x32_i8(a, b, c) __builtin_amdgcn_mfma_i32_16x16x32_i8(a, b, c, 0, 0, 0)
#define mfma_f32_32x32x2_f32(a, b, c) __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, c, 0, 0, 0)

#else

#include <stdint.h>
#include <string.h>

#define KERNEL
#define GLOBAL
#define LOCAL static
#define UNROLL
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef _Float16 half;
typedef int64_t int_64;
typedef uint64_t uint_64;
typedef half half_v4 __attribute__((vector_size(8)));
typedef half half_v2 __attribute__((vector_size(4)));
typedef float float_v4 __attribute__((vector_size(16)));
typedef float float_v16 __attribute__((vector_size(64)));
typedef int int_v4 __attribute__((vector_size(16)));
typedef int int_v16 __attribute__((vector_size(64)));

struct attn_item {
  int local_id, group_id;
};
extern __thread struct attn_item attn_item;
void attn_barrier(void);

static inline int local_id(void) {
  return attn_item.local_id;
}
static inline int group_id(void) {
  return attn_item.group_id;
}
static inline void barrier(void) {
  attn_barrier();
}
static inline int atomic_add_global(int* at, int value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
static inline int atomic_max_global(int* at, int value) {
  int old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < value &&
         !__atomic_compare_exchange_n(at, &old, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
static inline int atomic_add_local(int* at, int value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
static inline int atomic_xchg_cas(int* at, int expected, int value) {
  __atomic_compare_exchange_n(at, &expected, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// D = A B + C of one wave: every lane publishes its part of A and B, then computes its own part of
// D. The layouts are those of gfx942: with G lanes per row and W elements per lane and operand,
// A[i][k] is element k % W of lane (k / W) * M + i; D[i][j] is element 4 * (i / (4 * H)) + i % 4 of
// lane M * (i / 4 % H) + j, H = 64 / M.
#define ATTN_MFMA(NAME, AB, CD, ELEMENT, SUM, M, W)                                         \
  static inline CD NAME(AB a, AB b, CD c) {                                                 \
    static ELEMENT as[128][W], bs[128][W];                                                  \
    const int lane = local_id() % 64, wave = local_id() - lane, groups = 64 / M;            \
    memcpy(as[local_id()], &a, sizeof a);                                                   \
    memcpy(bs[local_id()], &b, sizeof b);                                                   \
    attn_barrier();                                                                         \
    for (int r = 0; r < (int)(sizeof c / sizeof(SUM)); ++r) {                               \
      const int i = 4 * groups * (r / 4) + 4 * (lane / M) + r % 4, j = lane % M;            \
      SUM sum = c[r];                                                                       \
      for (int k = 0; k < groups * W; ++k)                                                  \
        sum += (SUM)as[wave + k / W * M + i][k % W] * (SUM)bs[wave + k / W * M + j][k % W]; \
      c[r] = sum;                                                                           \
    }                                                                                       \
    attn_barrier();                                                                         \
    return c;                                                                               \
  }
ATTN_MFMA(mfma_f32_32x32x8_f16, half_v4, float_v16, half, float, 32, 4)
ATTN_MFMA(mfma_f32_16x16x16_f16, half_v4, float_v4, half, float, 16, 4)
ATTN_MFMA(mfma_i32_32x32x16_i8, int_64, int_v16, signed char, int, 32, 8)
ATTN_MFMA(mfma_i32_16x16x32_i8, int_64, int_v4, signed char, int, 16, 8)
ATTN_MFMA(mfma_f32_32x32x2_f32, float, float_v16, float, float, 32, 1)

#endif

static inline int global_id(void) {
  return 128 * group_id() + local_id();
}

// Spreads the few bits that the floats of `in` differ in.
static inline uint spread(uint word) {
  word = (word ^ word >> 16) * 0x7feb352du;
  return (word ^ word >> 15) * 0x846ca68bu;
}
