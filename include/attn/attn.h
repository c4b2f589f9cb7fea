/* libattn: attention on NVIDIA, AMD and CPU through one C ABI.
 *
 *   attn_context  a backend and one of its devices
 *   attn_problem  sizes, types, strides and masks of one call: everything but data
 *   attn_plan     the kernel chosen for one problem on one context; immutable
 *   workspace     memory for the partial results of a run, which the caller allocates
 *   attn_run      runs a plan on data: no allocation; on GPU backends no locks, no synchronisation
 *
 * docs/start.md has complete programs.
 *
 * Letters in shapes: B batch, Sq and Skv queries and keys of a sequence, Hq and Hkv query and K/V
 * heads, D and Dv head dimensions of q, k and of v, out. A token is one position of a sequence.
 *
 * Rules of all functions
 *   - Structs. Set struct_size to sizeof(the struct). A zero in any other field means "the default"
 * if the field has one, else the number 0 (batch, window_left, keep). A struct from a newer
 * header is accepted if the fields that this library does not know are zero.
 *   - Strides are 64-bit, count elements and may be negative. The last dimension is contiguous. A
 * tensor's address is the address of its element 0, also if other elements are before it. The
 * stride of a dimension with one element is ignored. For ggml's types, which store blocks of 32
 * elements, strides are multiples of 32; for i4, multiples of 2. GPU kernels decline negative
 * strides; reference and cpu take them.
 *   - Memory. Every array of a run, small ones included, is in the memory of the context's backend:
 * host memory for reference and cpu, device memory for cuda and hip, memory of attn_alloc for
 * hip-emu.
 *   - Overlap. An array that a run writes (out, lse, a gradient, dst, a computed descale, a cache,
 * the workspace) must not share memory with any other array of the run; if it does, the call fails
 * with INVALID_ARGUMENT on every backend. Every element that shapes and strides can reach counts,
 * for example all pages of a pool, whatever the lengths and tables say. Exceptions: in
 * attn_run_kv_append q_out may be q, seqlens_out may be seqlens, and k and v of the cache may be
 * views of one pool of pages (attn_kv_append_problem). Interleaved arrays, such as slices of one
 * tensor [B, S, 4, H, D], do not overlap. If the strides of two interleaved arrays, sorted by size,
 * are not multiples of each other, the call may fail although they share nothing.
 *   - Batch 0 is a call with nothing to do, for every operation: the plan needs no workspace, its
 * runs launch and write nothing, and pointers to arrays without elements may be NULL.
 *   - Errors. Functions return a status; attn_last_error() then has a sentence for the calling
 * thread. Nothing prints, aborts or falls back to another backend. Output parameters are written
 * only on success.
 *   - Threads. All functions may be called from any thread. A plan may run on many threads at once
 * if each run has its own workspace. Handles may be destroyed in any order, but not while in use:
 * wait until calls on them have returned and the work that these launched has ended. The same holds
 * for memory.
 *   - Graphs. While any thread captures a GPU stream, you can still create contexts, plans and
 * masks, and allocate and free memory. attn_workspace_init and runs in the captured stream become
 * nodes of the graph. A replay uses the addresses given during capture, so give each graph a
 * workspace of its own.
 *   - Repeatability. Equal runs of one plan on one machine give equal bits. ATTN_SPLIT_INVARIANT
 * and fixed_split promise more; docs/numerics.md compares them.
 *   - fork. Handles of reference and cpu made before a fork work in the child, but only on the
 * calling thread. Handles of GPU backends do not work there, because the drivers do not.
 */
#ifndef ATTN_ATTN_H
#define ATTN_ATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(ATTN_STATIC) || !defined(__GNUC__)
#define ATTN_API
#else
#define ATTN_API __attribute__((visibility("default")))
#endif

/* Before 1.0 a new minor version may break programs built with an older one (SONAME
 * libattn.so.0.2); a new patch version does not. */
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 2
#define ATTN_VERSION_PATCH 0

/* Callers may pass any integer as an enum. In C++ a value outside an enum's range is undefined
 * unless the enum's type is fixed, so it is. */
#ifdef __cplusplus
#define ATTN_ENUM : int
extern "C" {
#else
#define ATTN_ENUM
#endif

/* ---- status --------------------------------------------------------------------------------- */

typedef enum attn_status ATTN_ENUM {
  ATTN_OK = 0,
  ATTN_INVALID_ARGUMENT = 1, /* an argument breaks a rule stated here; nothing was done */
  ATTN_UNSUPPORTED = 2,      /* valid, but no kernel of this backend serves it */
  ATTN_NO_DEVICE = 3,        /* the driver is there, the device is not */
  ATTN_DRIVER_MISSING = 4,   /* the vendor's driver library or one of its symbols is absent */
  ATTN_DRIVER_ERROR = 5,     /* the driver refused; the sentence has its native code */
  ATTN_OUT_OF_MEMORY = 6,
  ATTN_WORKSPACE_TOO_SMALL = 7,
  ATTN_INTERNAL = 8, /* a defect of this library */
  /* attn_context_options.interrupted ended the call; its outputs are undefined */
  ATTN_INTERRUPTED = 9
} attn_status;

/* The name of a status, e.g. "invalid argument". Never NULL. */
ATTN_API const char* attn_status_string(attn_status status);

/* A sentence about the last failure on this thread: the argument, its value and what is accepted.
 * "" if nothing has failed yet. Valid until the next attn call on this thread. */
ATTN_API const char* attn_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library that is loaded. */
ATTN_API const char* attn_version(void);

/* ---- types ---------------------------------------------------------------------------------- */

typedef enum attn_backend ATTN_ENUM {
  ATTN_BACKEND_AUTO = 0, /* cuda if there is a device that this build has code for; else hip by the
                            same rule; else cpu. attn_info tells which one and why */
  ATTN_BACKEND_REFERENCE = 1, /* float64 on the host, slow */
  ATTN_BACKEND_CPU = 2,
  ATTN_BACKEND_CUDA = 3,
  ATTN_BACKEND_HIP = 4,
  ATTN_BACKEND_HIP_EMU = 5 /* the gfx9 emulator; never chosen by AUTO */
} attn_backend;

typedef enum attn_dtype ATTN_ENUM {
  ATTN_DTYPE_NONE = 0,
  ATTN_F32 = 1,
  ATTN_F16 = 2,
  ATTN_BF16 = 3,
  ATTN_F8_E4M3FN = 4,   /* OCP: bias 7, max 448, NaN 0x7f/0xff */
  ATTN_F8_E5M2 = 5,     /* OCP: bias 15, max 57344, has inf */
  ATTN_F8_E4M3FNUZ = 6, /* bias 8, max 240, NaN 0x80, no -0 */
  ATTN_Q8_0 = 7,        /* ggml: f16 scale + 32 x int8, 34 bytes per 32 elements */
  ATTN_Q4_0 = 8, /* ggml: f16 scale + 16 bytes, low nibbles first, 18 bytes per 32 elements */
  ATTN_F64 = 9,  /* output of the reference backend only */
  /* ggml's blocks of 32 elements. d and m are f16, little-endian. In the 16 bytes, byte i has the
     code of element i in its low half and that of element i + 16 in its high half. Bit i of qh is
     the fifth bit of element i's code */
  ATTN_Q4_1 = 10,   /* d, m, 16 bytes: code d + m, 20 bytes */
  ATTN_Q5_0 = 11,   /* d, u32 qh, 16 bytes: (code - 16) d, 22 bytes */
  ATTN_Q5_1 = 12,   /* d, m, u32 qh, 16 bytes: code d + m, 24 bytes */
  ATTN_IQ4_NL = 13, /* d, 16 bytes: ggml's table of 16 values at code, times d, 18 bytes */
  /* K/V with one f16 scale for each token and head, in a separate array
     (attn_segment_args.k_scale): real value = code x scale */
  ATTN_I8 = 14, /* int8 */
  ATTN_I4 = 15, /* two's complement, two per byte: the even element in the low half */
  /* Caches that servers write; K and V only (docs/mla.md) */
  ATTN_F8_E4M3FN_TOKEN = 16, /* e4m3fn codes; one f32 scale for each token and head in k_scale */
  ATTN_NVFP4 = 17,   /* e2m1 codes, two per byte, the even element in the low half; one e4m3fn scale
                        for each 16 elements in k_scale. Real value = code x scale x descale */
  ATTN_MLA_656 = 18, /* FlashMLA's row of 576 elements: 512 e4m3fn, 4 f32 scales of 128 elements
                        each, 64 bf16 */
  ATTN_MLA_584 = 19  /* vLLM's row of 512 elements: 448 e4m3fn, 64 bf16, 576 bytes. In k_scale 8
                        bytes: an e8m0 scale (2^(code - 127), 255 = NaN) for each 64 of the 448
                        elements; the last byte is not used */
} attn_dtype;

typedef enum attn_dtype_kind ATTN_ENUM {
  ATTN_KIND_FLOAT = 1, /* f32, f16, bf16, f64 */
  ATTN_KIND_FP8 = 2,
  ATTN_KIND_GGML = 3,  /* blocks that contain their scales; K and V only */
  ATTN_KIND_CODES = 4, /* integers; K and V only */
  ATTN_KIND_CACHE = 5  /* formats of servers' caches, with scales of their own; K and V only */
} attn_dtype_kind;

/* The properties of a type. */
typedef struct attn_dtype_properties {
  size_t struct_size; /* of the loaded library: fields beyond it do not exist */
  attn_dtype type;
  const char* name; /* "f8_e4m3fn", as in errors, files and command lines */
  attn_dtype_kind kind;
  int32_t block_elements; /* 1; ggml's types 32, i4 2, nvfp4 16, mla_656 576, mla_584 512: a row
                             consists of whole blocks, of mla_656 and mla_584 of one */
  int32_t block_bytes;
  int32_t has_scales;     /* 1: each token and head has scales in a separate array */
  int32_t output_only;    /* 1: f64 */
  double max_finite;      /* the largest finite value of a stored element; ggml's, mla_*: 0 */
  int32_t scale_bytes;    /* has_scales: bytes of one scale: f16 2, f32 4, e4m3fn and e8m0 1 */
  int32_t scale_elements; /* has_scales: elements under one scale; 0: all of a token's head */
} attn_dtype_properties;

/* Valid as long as the library is loaded. NULL if `type` is ATTN_DTYPE_NONE or this library does
 * not have it. To list all types, ask for 1, 2 and so on up to the first NULL. */
ATTN_API const attn_dtype_properties* attn_dtype_info(attn_dtype type);

/* Six things are called scale:
 *   attn_problem.scale           factor of q k^T before the softmax
 *   *_descale (f32)              multiplies stored values: real = stored x descale
 *   k_scale, v_scale             multiply codes of types that have scales: real = code x scale (x
 *                                descale). f16 of i8 and i4, else as attn_dtype says
 *   out_scale (f32)              multiplies the real result before it is stored in fp8
 *   attn_quantize_problem.scale  says where quantisation takes its descale from
 *   attn_quantize_args.scale     the k_scale or v_scale that quantisation writes */

typedef enum attn_layout ATTN_ENUM {
  ATTN_PADDED = 0, /* [B, S, H, D] */
  ATTN_PACKED = 1, /* [total, H, D] with cu_seqlens [B+1] */
  ATTN_PAGED = 2   /* [num_pages, page_size, H, D] with a block table [B, max_pages]; K/V only */
} attn_layout;

/* real value = stored value x descale */
typedef enum attn_descale_kind ATTN_ENUM {
  ATTN_DESCALE_NONE = 0,
  ATTN_DESCALE_TENSOR = 1, /* f32 [1] */
  ATTN_DESCALE_HEAD = 2,   /* f32 [B, Hkv], also for q */
  ATTN_DESCALE_BLOCK = 3   /* K/V only: f32 [B, Hkv, ceil(seqlen / descale_block_keys)] */
} attn_descale_kind;

/* Here i is a query's position and j a key's, both within their sequence; Sq and Skv are the
 * lengths of that sequence in the call, Skv the sum over its segments. All masks given apply at
 * once; a window's rule is the one below also with ATTN_CAUSAL_TOP_LEFT. */
enum attn_flag {
  ATTN_CAUSAL = 1 << 0,          /* bottom-right: query i sees key j <= i + Skv - Sq */
  ATTN_CAUSAL_TOP_LEFT = 1 << 1, /* j <= i; not together with ATTN_CAUSAL */
  ATTN_WINDOW = 1 << 2,     /* i + Skv - Sq - window_left <= j <= i + Skv - Sq + window_right */
  ATTN_BLOCK_MASK = 1 << 3, /* attn_args.block_kinds, block_index and block_bits are used */
  ATTN_ALIBI = 1 << 4,      /* adds -alibi_slopes[h] * |i + Skv - Sq - j| to the score */
  ATTN_SINKS = 1 << 5,      /* adds exp(sinks[h]) to the softmax's denominator, and so to lse */
  ATTN_OUT_SCALE = 1 << 6,  /* fp8 out only: stored = round(real x out_scale) */
  ATTN_SPLIT_INVARIANT = 1 << 7,  /* cutting K/V into other segments or splits changes the result
                                     by no more than float32 rounding */
  ATTN_KV_PREFIX_STABLE = 1 << 8, /* accepted, without effect */
  ATTN_BIAS_SLOPES = 1 << 9, /* multiplies the bias by attn_args.bias_slopes[h]: ggml's mask. A bias
                               of -inf hides its key whatever the slope */
  ATTN_FP8_PRECISE = 1 << 10, /* fp8 q only: kernels that round the softmax weights P to fp8 keep
                               the rounding error in a second fp8 value */
  /* shards of a sequence, docs/distributed.md. Backends: reference, cpu, cuda */
  ATTN_QUERY_POSITIONS = 1 << 11, /* query i of sequence b is at position attn_args.query_start[b] +
                                     i, not at i + Skv - Sq. Not with ATTN_CAUSAL_TOP_LEFT */
  ATTN_ACCUMULATE = 1 << 12 /* out (f32) and lse, which is needed, hold the result of earlier runs
                               over other keys, and the run adds its own as attn_merge does. A row
                               with lse -inf holds nothing, whatever its out contains. A row that
                               sees no key keeps its bits. ATTN_SINKS: in one of the runs only */
};

enum attn_block_kind {
  ATTN_BLOCK_EMPTY = 0,  /* nothing visible; its keys are not loaded */
  ATTN_BLOCK_CAUSAL = 1, /* the rule of ATTN_CAUSAL inside the block */
  ATTN_BLOCK_FULL = 2,   /* everything visible */
  ATTN_BLOCK_PARTIAL = 3 /* one bit per element */
};

/* Element strides of the outer dimensions. All three zero: contiguous in the order of the layout.
 * Otherwise a zero repeats an input along that dimension, which GPU kernels may decline. PADDED:
 * batch, seq, head. PACKED: batch is ignored. PAGED: batch is the stride between pages. */
typedef struct attn_strides {
  int64_t batch, seq, head;
} attn_strides;

/* ---- context -------------------------------------------------------------------------------- */

typedef struct attn_context attn_context;

/* A thread's part of a call's work, see attn_context_options.run_threads. */
typedef void (*attn_work)(void* data, int32_t thread);

typedef struct attn_context_options {
  size_t struct_size;
  int32_t device;      /* ordinal, from 0; see has_device. reference, cpu: 0 */
  int32_t cpu_threads; /* cpu, reference: threads a run may use, the caller's included. 0: the first
                          number in OMP_NUM_THREADS, read once per process, else all cores */
  /* cuda, hip: the driver library to open. NULL = the system's: libcuda.so.1, or libamdhip64.so.7,
     .6 or .5, where the loader finds it (LD_LIBRARY_PATH). hip also looks in $ROCM_PATH/lib, in
     /opt/rocm/lib and, if this library is part of a Python package, in _rocm_sdk_core/lib next to
     that package. hip-emu: path of libattn-hipemu.so, NULL = the one next to this library. Other
     backends: NULL */
  const char* driver_path;
  const char* kernel_file; /* cuda, hip, hip-emu; for authors of kernels: a file of device code
                              (cubin or code object) whose kernels replace the library's kernels of
                              the same names. Kernels that it does not contain are unsupported,
                              except helpers that one of its kernels launches first (prepare_*),
                              which then come from the library. NULL = none */
  int32_t has_device;      /* Set it to 1 to select device 0 explicitly; a `device` that is not 0 is
                              selected anyway. If no device is selected, cuda takes the device of the
                              calling thread's current CUDA context, or device 0 if there is none; auto
                              takes the device of the current CUDA context, or the first device that
                              this build has code for. cuda works in the current CUDA context if that
                              belongs to the device, else in the device's primary one. Runs use this
                              device whatever is current, and leave that as it was */
  /* Called about every 50 ms by the calling thread, during runs on reference and cpu and, on every
   * backend, while the host builds a block mask; by several threads at once if several call. A
   * result other than 0 ends the call with INTERRUPTED. Must not throw. NULL = none */
  int32_t (*interrupted)(void* user);
  void* interrupted_user; /* passed to interrupted */
  /* cpu, reference: runs a call's work on threads of the program's, which may have a pool whose
   * threads are awake. It calls work(data, 0) on the calling thread and, at the same time,
   * work(data, t) on other threads, at most once for each t in [1, threads). It returns when all
   * these calls have returned. If it does not call work for some t, the other threads do that work.
   * threads is at most cpu_threads. Several threads may be in it at once. While it waits,
   * interrupted is not called. Must not throw. NULL = threads of the context */
  void (*run_threads)(void* user, int32_t threads, attn_work work, void* data);
  void* run_threads_user; /* passed to run_threads */
} attn_context_options;

/* Opens a backend and one device. options may be NULL. Errors: INVALID_ARGUMENT, NO_DEVICE,
 * DRIVER_MISSING, DRIVER_ERROR, OUT_OF_MEMORY. */
ATTN_API attn_status attn_context_create(attn_backend backend, const attn_context_options* options,
                                         attn_context** context);
/* NULL is allowed. Plans made from the context stay valid. */
ATTN_API void attn_context_destroy(attn_context* context);
/* The backend in use, never AUTO; AUTO for NULL. */
ATTN_API attn_backend attn_context_backend(const attn_context* context);
/* cpu, reference: the most threads that a run uses, the caller's included; 0 on GPU backends. */
ATTN_API int32_t attn_context_threads(const attn_context* context);

/* "auto", "reference", "cpu", "cuda", "hip", "hip-emu". Never NULL. */
ATTN_API const char* attn_backend_string(attn_backend backend);

/* Allocates memory of the context's backend: bytes > 0, 256-byte aligned, contents undefined.
 * Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, DRIVER_ERROR. */
ATTN_API attn_status attn_alloc(attn_context* context, size_t bytes, void** memory);
/* Frees memory of attn_alloc, of the same context; NULL is allowed. */
ATTN_API attn_status attn_free(attn_context* context, void* memory);
/* Copy between host memory and the backend's memory, after all earlier work on `stream` (NULL: the
 * default stream; on reference and cpu it must be NULL). They return when the copy is complete. */
ATTN_API attn_status attn_copy_in(attn_context* context, void* backend_dst, const void* host_src,
                                  size_t bytes, void* stream);
ATTN_API attn_status attn_copy_out(attn_context* context, void* host_dst, const void* backend_src,
                                   size_t bytes, void* stream);
/* Waits for the stream (NULL: the default stream) and reports errors of the work in it. */
ATTN_API attn_status attn_synchronize(attn_context* context, void* stream);

/* ---- the problem: everything but data ------------------------------------------------------- */

/* Part of the keys and values of every sequence: one K/V cache or buffer. A problem has 1 to 1024
 * segments; a sequence's keys are those of segment 0, then those of segment 1, and so on. */
typedef struct attn_segment {
  size_t struct_size;
  attn_dtype k_type, v_type; /* may differ */
  attn_layout layout;
  int32_t has_seqlens; /* PADDED, PAGED: 1: attn_segment_args.seqlens is given; 0: every sequence
                          has `seqlen` keys. PACKED: 0 */
  int64_t seqlen;      /* capacity: the most keys of a sequence. PADDED: S. PAGED: 0 means
                          max_pages * page_size. PACKED: 0 means total.
                          With has_seqlens, an attn_problem's may be larger than its k and v, so
                          that one plan serves growing lengths: reference, cpu and hip read no key
                          after a sequence's last one. cuda may read all `seqlen` keys of a PADDED
                          segment, and the rule of overlap counts them on every backend */
  int64_t total;       /* PACKED: tokens in the buffer */
  int64_t num_pages;   /* PAGED: pages in the pool */
  int32_t page_size;   /* PAGED: keys per page */
  int32_t max_pages;   /* PAGED: columns of the block table */
  attn_strides k_stride, v_stride;
  attn_descale_kind k_descale, v_descale;
  int32_t descale_block_keys; /* ATTN_DESCALE_BLOCK: 64 or 128 */
  /* Types with scales: strides of k_scale and v_scale, counted in scales. All zero: contiguous [B,
     S, Hkv], [total, Hkv] or [num_pages, page_size, Hkv]; nvfp4 and mla_584 [..., head_dim /
     scale_elements] */
  attn_strides k_scale_stride, v_scale_stride;
  /* 1: a prefix that the sequences of the batch share: every sequence has these keys. Each array of
     the segment is as in a batch of 1: k [1, S, Hkv, D], seqlens [1], block_table [1, max_pages],
     descales [1, Hkv, ...]; the batch stride is ignored. PADDED or PAGED, before all segments that
     are not shared; attn_problem only. The result is as if each sequence had its own copy of these
     keys. Which kernels read them once for the whole batch: docs/decode.md */
  int32_t shared;
  /* ---- latent caches and lists of keys. Backends: reference, cpu; some on cuda: docs/mla.md -- */
  /* Above 0: queries see only the keys in attn_segment_args.list, with list_size entries for each
     list. An entry e stands for keys e * list_block to e * list_block + list_block - 1 of the
     segment, counted from 0. Entries may be in any order. -1 and keys outside the sequence's keys
     are no keys. A key that is listed twice counts twice. Causal masks and windows hide listed keys
     by their positions. attn_problem only, as the following up to no_positions; PADDED or PAGED;
     without bias, ALiBi, block mask, tree, kv_begin and key_start */
  int64_t list_size;
  int64_t list_heads;   /* 1 or heads_kv lists; 0 = 1 */
  int32_t list_block;   /* 1, 64 or 128; 0 = 1 */
  int32_t list_queries; /* 1, 64 or 128 consecutive queries of a sequence that have one list; 0 = 1.
                           PACKED q: 1 */
  int32_t list_of_pool; /* 1: entries are page * page_size + key of the page, of any page of the
                           pool; seqlens and the block table are not used. PAGED, no_positions,
                           list_block 1, no descales of blocks */
  int32_t has_list_lengths;
  /* 1: the keys have no position. Causal masks and windows do not hide them, and Skv and the
     positions of the other segments do not count them. Without bias, ALiBi, block mask, tree,
     kv_begin and key_start */
  int32_t no_positions;
  /* 1: V is the first head_dim_v columns of K (also cuda on sm_90: docs/mla.md). v_type is NONE or
     k_type; v_stride, v_scale_stride and v_descale are 0 or as those of K; v, v_scale and v_descale
     of the args, and v_new of kv_append, are NULL */
  int32_t v_in_k;
  /* ---- shards of a sequence (docs/distributed.md): reference, cpu, cuda ---- */
  /* attn_problem only. With has_key_start, key c of sequence b is at position
         attn_segment_args.key_start[b]
         + (c / key_interleave * key_ranks + key_rank) * key_interleave + c % key_interleave
     which causal masks, windows, ALiBi and CAUSAL blocks compare with that of the query. Without,
     it is at its number among the sequence's keys. All segments have has_key_start or none; it
     needs ATTN_QUERY_POSITIONS, and excludes tree_keys, has_kv_begin, list_size and no_positions.
     Biases and the grid of a block mask still count keys, and not positions */
  int64_t key_interleave; /* consecutive positions of a rank; 0 = 1 */
  int32_t has_key_start;
  int32_t key_ranks, key_rank; /* ranks over which the keys are interleaved, 0 = 1; from 0 */
  int32_t has_ready;           /* 1: attn_segment_args.ready is given */
} attn_segment;

typedef struct attn_problem {
  size_t struct_size;
  /* Shapes. q: [B, Sq, Hq, D], or packed [total_q, Hq, D]. k: [B, Skv, Hkv, D]; v: [B, Skv, Hkv,
   * Dv]; or another layout. out: as q, with Dv. lse: f32, contiguous, [B, Hq, Sq] or packed [Hq,
   * total_q]: the natural logarithm of the softmax's denominator. Every row of out and lse is
   * written. A row that sees no key has out 0 and lse -inf, with ATTN_SINKS lse = its sink. A
   * packed row that belongs to no sequence (from cu_seqlens_q[B] on) has out 0 and lse -inf */
  int64_t batch;
  /* heads_q is a multiple of heads_kv; query head h reads K/V head h / (heads_q / heads_kv) */
  int64_t heads_q;
  int64_t heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;   /* 0 = head_dim */
  int64_t seqlen_q;     /* PACKED: the maximum over the batch */
  int64_t total_q;      /* PACKED: tokens in q and out, or the most of a run (attn_args.total_q);
                           0 for a batch of 0 */
  attn_layout q_layout; /* PADDED or PACKED */
  attn_dtype q_type;
  attn_dtype out_type;         /* NONE: q's type; bf16 if q is fp8 */
  attn_descale_kind q_descale; /* not BLOCK; HEAD: the query heads of a K/V head share one */
  attn_strides q_stride, out_stride;
  int32_t num_segments;
  const attn_segment* segments; /* copied; element i is at i * segments[0].struct_size bytes */
  /* Scores, in this order: scale * q k^T, softcap, bias, ALiBi, masks, softmax */
  float scale;         /* 0 = 1 / sqrt(head_dim). For a scale of zero, which weighs all visible keys
                          alike, pass FLT_MIN: products q k^T below 1e30 then count as 0 */
  float softcap;       /* 0 = none; else s becomes softcap * tanh(s / softcap) */
  uint32_t flags;      /* attn_flag */
  int64_t window_left; /* ATTN_WINDOW: keys to the left of a query; 0 = none, -1 or at least 2^31 =
                          unbounded; other negative values are refused */
  int64_t window_right;   /* the same to the right */
  attn_dtype bias_type;   /* NONE = no bias; f32, f16 or q's type; PADDED q only */
  int64_t bias_stride[4]; /* of bias [B, Hq, Sq, Skv]; also the last dimension may have any
                             stride. 0 broadcasts a dimension. All zero: contiguous. Skv is the sum
                             of the segments' seqlen */
  /* ATTN_BLOCK_MASK: grid [mask_batch, mask_heads, ceil(Sq / block_q), ceil(Skv / block_k)], with
   * Sq = seqlen_q and Skv the sum of the segments' seqlen. PACKED q: reference and cpu; each
   * sequence begins at the grid's first row */
  int32_t block_q, block_k;       /* 64 or 128 on GPUs, any on reference and cpu */
  int64_t mask_batch, mask_heads; /* 1 or B; 1 or Hq; 0 = 1 */
  int64_t mask_partials;          /* PARTIAL blocks stored in block_bits */
  /* execution */
  int64_t fixed_split; /* keys per split, on CUDA a multiple of 64; 0 = the plan decides. If set,
                          the bits of a query's result do not depend on the other sequences of the
                          batch; on CUDA they depend only on the query, the keys that it sees and
                          how these are distributed over segments (docs/numerics.md) */
  int32_t max_sms;     /* the most multiprocessors to use; 0 = all. Kept by fwd_sm90_*, bwd_sm90_*,
                          mla_sm90_* and decode_*; other launches, before and after, ignore it */
  const char* kernel;  /* the kernel to use, by name; NULL = the plan chooses */
  int64_t tree_keys;   /* 1 to 128: whether a query sees the last tree_keys keys of its sequence,
                          counted over all segments, is also decided by bits in attn_args.tree. 0 =
                          none */
  /* 1: attn_args.kv_begin hides each sequence's first keys. Gradients: reference, cpu */
  int32_t has_kv_begin;
  /* 1, with ATTN_CAUSAL: attn_args.causal_sequences says which sequences are causal. Forward only.
     Backends: reference, cpu */
  int32_t has_causal_sequences;
} attn_problem;

/* ---- the data ------------------------------------------------------------------------------- */

typedef struct attn_segment_args {
  size_t struct_size;
  const void* k; /* in the segment's layout, strides and types */
  const void* v;
  const int32_t* seqlens;     /* has_seqlens: [B], each in [0, seqlen] */
  const int32_t* cu_seqlens;  /* PACKED: [B+1], from 0, not decreasing, last <= total */
  const int32_t* block_table; /* PAGED: [B, max_pages] contiguous, each in [0, num_pages). Entries
                                 after a sequence's last key may hold anything; kv_append's new keys
                                 count as keys */
  const float* k_descale;     /* of the shape that the descale's kind says */
  const float* v_descale;
  const void* k_scale; /* k_type with scales (attn_dtype): i8 and i4 f16, one for each token and
                          head. A descale, if given, multiplies it */
  const void* v_scale;
  /* list_size: [B, ceil(Sq / list_queries), list_heads, list_size], or packed [total_q, list_heads,
     list_size], contiguous */
  const int32_t* list;
  /* has_list_lengths: the entries of each list that are read, in [0, list_size]; shape of list
     without list_size */
  const int32_t* list_lengths;
  /* shards */
  const int64_t* key_start; /* has_key_start: [B]; positions are below 2^30 in magnitude */
  const uint32_t* ready;    /* has_ready: [2]. Nothing of the segment's arrays is read before the
                               difference ready[0] - ready[1], as int32, is 0 or more: whoever
                               delivers the segment increments ready[0] when it has arrived.
                               reference and cpu refuse a segment that has not; cuda waits for it:
                               what delivers it must not wait for the run (docs/distributed.md) */
} attn_segment_args;

typedef struct attn_args {
  size_t struct_size;
  const void* q;
  void* out;
  float* lse;                        /* NULL = not wanted */
  const int32_t* cu_seqlens_q;       /* PACKED q: [B+1], as cu_seqlens of a segment */
  int32_t num_segments;              /* the problem's */
  const attn_segment_args* segments; /* in host memory; element i is at i * struct_size bytes, which
                                        is the same in all elements */
  const void* bias;                  /* bias_type, [B, Hq, Sq, Skv] with bias_stride */
  const float* alibi_slopes;         /* [Hq] */
  const float* sinks;                /* [Hq], in the units of a score after scaling */
  const float* q_descale;            /* [1] or [B, Hkv] */
  const float* out_scale;            /* [1] */
  const uint8_t* block_kinds;        /* attn_block_kind of each block of attn_problem's grid */
  const int32_t* block_index; /* the same grid: index into block_bits, -1 where not PARTIAL */
  const uint32_t* block_bits; /* [mask_partials, block_q, ceil(block_k / 32)]: the element in column
                                 c of a row is bit c % 32 of word c / 32; 1 = visible */
  const uint64_t* tree; /* tree_keys: [B, Sq, 2] or packed [total_q, 2], contiguous. Key n of the
                           last tree_keys keys is visible to a query only if bit n % 64 of the
                           query's word n / 64 is set. All other masks apply as well. If a
                           sequence has fewer keys, the bits of the missing ones, the first
                           ones, are ignored */
  const float* bias_slopes; /* ATTN_BIAS_SLOPES: [Hq], finite */
  /* has_kv_begin: [B], 0 or more: the first key of each sequence that its queries see, counted over
   * all segments, as after padding on the left. Hidden keys count in lengths and positions */
  const int32_t* kv_begin;
  const int32_t* causal_sequences; /* has_causal_sequences: [B]; 0: ATTN_CAUSAL does not apply to
                                      this sequence. Its window and lengths do */
  /* shards */
  const int64_t* query_start; /* ATTN_QUERY_POSITIONS: [B], below 2^30 in magnitude */
  /* PACKED q: tokens in q, out and lse [Hq, total_q] of this run, up to the problem's total_q, for
   * which the strides are valid: one plan serves batches of other sizes. 0 = the problem's. Nothing
   * after the last token is read or written. Forward on every backend; only the problem's for
   * gradients, with lists of keys, and in shards_cuda, lists_cuda and prefix_* */
  int64_t total_q;
} attn_args;

/* ---- plan and run --------------------------------------------------------------------------- */

typedef struct attn_plan attn_plan;

/* Validates the problem, chooses the kernel and loads its module. Errors: INVALID_ARGUMENT;
 * UNSUPPORTED if no kernel of this backend, or not the kernel named, takes the problem (the
 * sentence says why); DRIVER_ERROR; OUT_OF_MEMORY. */
ATTN_API attn_status attn_plan_create(attn_context* context, const attn_problem* problem,
                                      attn_plan** plan);
/* NULL is allowed. */
ATTN_API void attn_plan_destroy(attn_plan* plan);
/* The name of the chosen kernel. Valid as long as the plan. */
ATTN_API const char* attn_plan_kernel(const attn_plan* plan);
/* Bytes of workspace that every run of the plan needs; may be 0. */
ATTN_API size_t attn_plan_workspace(const attn_plan* plan);

/* Call it once on a new workspace before its first run, and again before another plan uses the
 * workspace or after a DRIVER_ERROR. It belongs to one stream at a time. workspace: 256-byte
 * aligned, in the backend's memory, at least attn_plan_workspace bytes; if these are 0, workspace
 * may be NULL here and in attn_run. Errors: INVALID_ARGUMENT, WORKSPACE_TOO_SMALL, DRIVER_ERROR. */
ATTN_API attn_status attn_workspace_init(const attn_plan* plan, void* workspace, size_t bytes,
                                         void* stream);

/* Computes out and, if given, lse. Errors: INVALID_ARGUMENT (also for a plan of another operation),
 * WORKSPACE_TOO_SMALL, DRIVER_ERROR, INTERRUPTED.
 *
 * stream: a CUstream or hipStream_t, NULL for the default stream. On GPU backends the call only
 * launches. On reference and cpu stream must be NULL, and the call returns when the result is
 * ready.
 *
 * Lengths and tables. reference and cpu check lengths and cu_seqlens before they start. GPU kernels
 * read them on the device and do not trust them: a length is clamped to [0, capacity], a negative
 * difference of cu_seqlens counts as 0, and a page outside the pool has no keys. attn_check reports
 * such values.
 *
 * Alignment. On reference and cpu addresses are aligned to an element. On GPUs addresses of q, k, v
 * and out are multiples of 16 bytes, those of other arrays are aligned to an element, and strides
 * of q, k, v and out are multiples of 16 bytes except here:
 *
 *   K or V       kernels                                     strides
 *   ggml's       fwd_sm90_*_dequantised, decode_gfx942_*,    any number of blocks
 *                decode_gfx950_*
 *   ggml's       decode_sm90_blocks_*                        tokens, sequences, pages: multiples of
 *                                                            16 bytes; heads: the same, or
 *                                                            contiguous (q8_0, D 128: 136 bytes)
 *   i8, i4       decode_sm90_blocks_*                        of scales of pages: an even number
 *   nvfp4        decode_sm90_blocks_*                        of scales: multiples of D / 16, of a
 *                                                            row's
 *
 * On GPUs scales of nvfp4 begin at a multiple of 16 bytes.
 *
 * For few queries decode_sm90_blocks_* are faster, since they read K and V only once. */
ATTN_API attn_status attn_run(const attn_plan* plan, const attn_args* args, void* workspace,
                              size_t bytes, void* stream);

/* Validates what small arrays contain (lengths, tables, block kinds and indices), which attn_run
 * cannot do on GPUs. Synchronises the stream. Errors: INVALID_ARGUMENT, DRIVER_ERROR. */
ATTN_API attn_status attn_check(const attn_plan* plan, const attn_args* args, void* stream);

/* ---- gradients ------------------------------------------------------------------------------ */

/* Arrays that attn_run_backward writes. */
enum attn_gradient {
  ATTN_GRAD_Q = 1 << 0,
  ATTN_GRAD_K = 1 << 1,
  ATTN_GRAD_V = 1 << 2,
  ATTN_GRAD_SINKS = 1 << 3, /* with ATTN_SINKS */
  ATTN_GRAD_BIAS = 1 << 4   /* with a bias_type */
};

/* The gradients of a number L that depends on a forward run's out and lse, given those of out and
 * lse: d_out = dL/d out, d_lse = dL/d lse. With s the scores after scale, softcap, bias and ALiBi:
 *   p       = exp(s - lse) where the key is visible, else 0
 *   delta_i = sum_d d_out_id out_id - d_lse_i
 *   ds      = p (d_out v^T - delta)
 *   dq      = scale (ds t) k        t: softcap's slope, 1 - tanh^2; 1 without softcap
 *   dk      = scale (ds t)^T q
 *   dv      = p^T d_out
 *   d_bias  = ds, with ATTN_BIAS_SLOPES times bias_slopes[h]
 *   d_sinks = -sum_i exp(sinks - lse_i) delta_i
 * dk and dv of a K/V head are sums over the query heads that read it. lse and out are inputs like
 * any other: with those that a merge computed over all parts, a run over the keys of one part gives
 * that part's contributions, and their sum is the gradient of the whole (ring attention).
 *
 * Every row of dq, dk and dv is written. A query that sees no key, a key that no query sees, and
 * rows after a sequence's length or of no sequence get 0, or with accumulate keep what they hold.
 * What these rows of q, k, v and d_out contain influences nothing.
 *
 * Equal inputs give equal bits, run after run, on any number of threads and multiprocessors. */
typedef struct attn_backward_problem {
  size_t struct_size;
  const attn_problem* forward; /* of the forward run; copied, its segments too. One segment, PADDED
                                  or PACKED, not shared; q_type = k_type = v_type f32, f16 or bf16;
                                  out_type one of these (reference: f64 too). Without descales,
                                  tree_keys, has_causal_sequences, v_in_k, lists, no_positions and
                                  fields of shards. kernel, fixed_split and ATTN_SPLIT_INVARIANT in
                                  it have no effect here */
  attn_dtype d_out_type;       /* f32, f16, bf16 (reference: f64 too); NONE: out's type */
  attn_strides d_out_stride;   /* d_out has out's shape. All zero: contiguous */
  uint32_t gradients;          /* attn_gradient; 0 = Q, K and V */
  uint32_t accumulate;         /* those of `gradients` that are added to what their arrays hold; the
                                  sum is rounded once */
  attn_dtype dq_type, dk_type, dv_type; /* q's type or f32 (reference: f64 too); NONE: q's type */
  attn_strides dq_stride, dk_stride, dv_stride; /* shapes of q, k, v. All zero: contiguous; else
                                                   elements do not overlap */
  attn_dtype d_bias_type;   /* bias_type or f32 (reference: f64 too); NONE: bias_type */
  int64_t d_bias_stride[4]; /* of d_bias [B, Hq, Sq, Skv], which is not written if a size is 0. A
                               stride of 0 sums over its dimension, in which d_bias has one
                               element. All zero: contiguous, with sums where bias_stride repeats */
  const char* kernel;       /* NULL = the plan chooses */
} attn_backward_problem;

typedef struct attn_backward_args {
  size_t struct_size;
  const attn_args* forward; /* as attn_run had them. out and lse are read; both are needed */
  const void* d_out;        /* d_out_type, shape of out */
  const float* d_lse;       /* shape of lse; NULL = 0 */
  void* dq;                 /* NULL if not in `gradients`, as the following */
  void* dk;
  void* dv;
  float* d_sinks; /* [Hq] */
  void* d_bias;
} attn_backward_args;

/* Errors as attn_plan_create; UNSUPPORTED for a forward problem that has no gradients (the sentence
 * names the argument). attn_plan_kernel, attn_plan_workspace and attn_workspace_init take the plan.
 * Backends: reference, cpu, cuda. */
ATTN_API attn_status attn_plan_create_backward(attn_context* context,
                                               const attn_backward_problem* problem,
                                               attn_plan** plan);
/* Errors, stream, lengths and alignment as attn_run. */
ATTN_API attn_status attn_run_backward(const attn_plan* plan, const attn_backward_args* args,
                                       void* workspace, size_t bytes, void* stream);

/* ---- merge of partial results --------------------------------------------------------------- */

/* Combines the results of num_parts runs over different keys into the result over all of them.
 * With m = max lse_i and w_i = exp(lse_i - m): out = sum(w_i out_i) / sum(w_i); lse = m + log(sum
 * w_i). A part with lse -inf contributes nothing; if all are -inf, out is 0 and lse -inf. (Online
 * softmax merge as in arXiv 2205.14135, 3.1.) */
typedef struct attn_merge_problem {
  size_t struct_size;
  /* out_i, out: [B, Sq, Hq, Dv]; lse_i, lse: f32 [B, Hq, Sq], contiguous */
  int64_t batch, heads_q, seqlen_q, head_dim_v;
  int32_t num_parts;    /* 1 to 65535 */
  attn_dtype part_type; /* f32, f16, bf16 */
  attn_dtype out_type;  /* f32, f16, bf16; NONE: part_type */
  attn_strides part_stride, out_stride;
  const char* kernel; /* NULL = the plan chooses */
} attn_merge_problem;

typedef struct attn_merge_args {
  size_t struct_size;
  int32_t num_parts;       /* the problem's */
  const void* const* outs; /* array in host memory of num_parts pointers into backend memory */
  const float* const* lses;
  void* out;
  float* lse; /* NULL = not wanted */
} attn_merge_args;

/* Errors of both as attn_plan_create and attn_run. Runs need no workspace. All backends. */
ATTN_API attn_status attn_plan_create_merge(attn_context* context,
                                            const attn_merge_problem* problem, attn_plan** plan);
ATTN_API attn_status attn_run_merge(const attn_plan* plan, const attn_merge_args* args,
                                    void* stream);

/* ---- quantisation --------------------------------------------------------------------------- */

typedef enum attn_scale_source ATTN_ENUM {
  ATTN_SCALE_ONE = 0,   /* stored = round(x) */
  ATTN_SCALE_GIVEN = 1, /* descale is read: stored = round(x / descale) */
  ATTN_SCALE_AMAX = 2   /* as GIVEN, with a descale that is computed and written: the largest finite
                           |x| / the largest finite value of dst_type; 1 if all finite x are 0 */
} attn_scale_source;

/* Converts x [B, S, H, D] to fp8, ggml's blocks, i8, i4 or a cache's format. Rounds to nearest
 * even. NaN stays NaN. A value beyond the range of fp8 becomes NaN (e5m2: inf), with saturate the
 * largest finite value.
 *
 * ggml's types have their scales inside the blocks: scale must be ATTN_SCALE_ONE, head_dim a
 * multiple of 32.
 *
 * i8, i4: scale must be ATTN_SCALE_ONE; for i4 head_dim is even. The scale of a token's head is its
 * largest |x| / 127 (i4: / 7), rounded to f16; stored = round(x / scale). A scale beyond f16's
 * range becomes NaN, with saturate 65504. If an x is NaN, so is the scale.
 *
 * Formats of servers' caches, on reference and cpu, f8_e4m3fn_token and nvfp4 also on cuda: their
 * codes saturate, with saturate or without. scale must be ATTN_SCALE_ONE, except for nvfp4.
 *
 * f8_e4m3fn_token: the scale (f32) of a token's head is its largest finite |x| / 448, 1 if that is
 * 0; stored = round(x / scale).
 *
 * mla_656, mla_584: the scale of 128 (64) elements is the least power of two that is at least their
 * largest finite |x| / 448, 2^-126 or more; stored = round(x / scale). The last 64 elements are
 * rounded to bf16.
 *
 * nvfp4: the scale of 16 elements is round(their largest finite |x| / 6 / descale) in e4m3fn, at
 * most 448, NaN if one of them is NaN; stored = round(x / (scale x descale)). kind is NONE or
 * TENSOR; with ATTN_SCALE_AMAX descale = the largest |x| / (6 x 448). */
typedef struct attn_quantize_problem {
  size_t struct_size;
  int64_t batch, seqlen, heads, head_dim;
  attn_dtype src_type; /* f32, f16, bf16 */
  attn_dtype dst_type; /* f8_e4m3fn, f8_e5m2, f8_e4m3fnuz; ggml's; i8, i4; of ATTN_KIND_CACHE */
  attn_strides src_stride, dst_stride;
  attn_descale_kind kind; /* of descale. NONE: same as TENSOR. TENSOR [1], HEAD [B, H], BLOCK [B, H,
                             ceil(S / descale_block_keys)] */
  int32_t descale_block_keys; /* BLOCK: 64 or 128 */
  attn_scale_source scale;
  int32_t saturate;          /* 0 or 1 */
  const char* kernel;        /* NULL = the plan chooses */
  attn_strides scale_stride; /* types with scales: strides of attn_quantize_args.scale, counted in
                                scales; all zero: contiguous [B, S, H]; nvfp4 and mla_584 [B, S, H,
                                D / scale_elements] */
} attn_quantize_problem;

typedef struct attn_quantize_args {
  size_t struct_size;
  const void* src;
  void* dst;
  float* descale; /* GIVEN: read, finite (checked on the host); AMAX: written; ONE: 1 is written, or
                     NULL */
  void* scale;    /* types with scales (attn_dtype): written; i8, i4: f16 [B, S, H] */
} attn_quantize_args;

/* Errors of both as attn_plan_create and attn_run. Runs need no workspace. All backends. */
ATTN_API attn_status attn_plan_create_quantize(attn_context* context,
                                               const attn_quantize_problem* problem,
                                               attn_plan** plan);
ATTN_API attn_status attn_run_quantize(const attn_plan* plan, const attn_quantize_args* args,
                                       void* stream);

/* ---- appending to a KV cache ---------------------------------------------------------------- */

/* Writes new keys and values after those that a segment holds, converted to the segment's types:
 * token t of sequence b goes to position seqlens[b] + t. A token whose position is not below the
 * segment's capacity is not written.
 *
 * Conversion: stored = round(x / descale), to nearest even. Values beyond the range of fp8 become
 * its largest value, since a NaN in a cache would reach every later result; beyond the range of f16
 * and bf16 they become infinity; NaN stays NaN. ggml's blocks, i8, i4 and formats of servers'
 * caches with their scales are made as attn_quantize makes them with saturate.
 *
 * Rotary embedding: if rotary_dim is set, the first rotary_dim elements of each head of k_new are
 * rotated before they are stored. If heads_q is set, so is q, which has the same tokens as k_new,
 * into q_out; other elements of q are copied. Pair i of a head, (x, y), at position p becomes
 * (x c - y s, x s + y c) with c = rotary_cos[p, i], s = rotary_sin[p, i]. Its elements are i and
 * i + rotary_dim / 2, or with rotary_interleaved 2 i and 2 i + 1.
 *
 * Lengths are read from the backend's memory by each run. With advance_seqlens the run writes the
 * new ones: seqlens[b] + the new tokens of b, at most the capacity. Without, the caller advances
 * them. A page that a run writes must belong to one sequence and appear once in its table, else its
 * contents are undefined.
 *
 * Slots: with has_slots, token t of entry b goes to slot_mapping[b, t] = page * page_size + place
 * in the page, whatever sequence has that page, and a token whose slot is negative is not written.
 * Then new_layout is PADDED ([1, T, Hkv, D] for tokens of many sequences) and the cache PAGED, with
 * has_seqlens 0 and descales per tensor or head; cu_seqlens_new, block_table and max_pages are not
 * used, advance_seqlens and rotary_dim are 0. On cuda and hip a slot beyond the pages is not
 * written either. If two tokens have one slot, its contents are undefined.
 *
 * k and v of a PAGED cache may be views of one pool: of equal types and strides, a whole number of
 * pages apart, and pages do not interleave. Then a run must not write the same memory as a page of
 * k and as a page of v; reference and cpu check that.
 *
 * Callers built with an older header have a shorter `segment` and `cache`. The library finds the
 * fields after them by their struct_size, so such callers need no change. */
typedef struct attn_kv_append_problem {
  size_t struct_size;
  int64_t batch, heads_kv, head_dim;
  int64_t head_dim_v;     /* 0 = head_dim */
  int64_t seqlen_new;     /* tokens per sequence; PACKED: the maximum */
  int64_t total_new;      /* PACKED: tokens in k_new and v_new; 0 for a batch of 0 */
  attn_layout new_layout; /* PADDED [B, seqlen_new, Hkv, D] or PACKED [total_new, Hkv, D] */
  attn_dtype new_type;    /* f32, f16, bf16 */
  attn_strides k_new_stride, v_new_stride;
  attn_segment segment;    /* the cache: PADDED or PAGED, has_seqlens; strides without overlap */
  const char* kernel;      /* NULL = the plan chooses */
  int32_t advance_seqlens; /* 1: attn_kv_append_args.seqlens_out is written */
  /* Rotary embedding (arXiv 2104.09864). Without rotary_dim the other fields are 0 */
  int32_t rotary_interleaved; /* 1: pairs are neighbours; 0: rotary_dim / 2 apart */
  int64_t rotary_dim;         /* even, up to head_dim; 0 = none */
  int64_t rotary_positions;   /* rows of the tables: the segment's capacity or more */
  int64_t heads_q;            /* 0 = no q; else q and q_out are as k_new, with Hq heads */
  attn_strides q_stride, q_out_stride;
  int32_t has_slots; /* 1: attn_kv_append_args.slot_mapping says where tokens go */
} attn_kv_append_problem;

typedef struct attn_kv_append_args {
  size_t struct_size;
  const void* k_new;
  const void* v_new;
  const int32_t* cu_seqlens_new; /* PACKED: [B+1] */
  attn_segment_args cache;       /* k, v, k_scale and v_scale are written */
  const float* rotary_cos;       /* [rotary_positions, rotary_dim / 2], contiguous */
  const float* rotary_sin;       /* the same */
  const void* q;
  void* q_out; /* may be q, if the strides are q's. Rows of tokens that have no room in the cache
                  or, packed, belong to no sequence are not written */
  int32_t* seqlens_out; /* [B]; may be cache.seqlens */
  /* has_slots: [B, seqlen_new], contiguous, below num_pages * page_size */
  const int64_t* slot_mapping;
} attn_kv_append_args;

/* Errors as attn_plan_create. Runs need no workspace. All backends. */
ATTN_API attn_status attn_plan_create_kv_append(attn_context* context,
                                                const attn_kv_append_problem* problem,
                                                attn_plan** plan);
/* Errors as attn_run. reference and cpu check lengths, offsets and the pages to be written before
 * they write anything. On GPUs lengths are clamped to [0, capacity], and tokens whose page is
 * outside the pool are not written. */
ATTN_API attn_status attn_run_kv_append(const attn_plan* plan, const attn_kv_append_args* args,
                                        void* stream);

/* ---- moving old pages of a cache into another type ------------------------------------------ */

/* For a cache in two segments: `recent`, in 16 or 32 bits, where attn_kv_append writes, and before
 * it `old`, usually quantised. Called from time to time, this moves the oldest full pages of
 * `recent` to the end of `old`, converted as attn_kv_append converts. From sequence b it moves as
 * many pages as leave at least `keep` keys in recent and fit into old:
 *   n = max(0, min(recent.seqlens[b] - keep, old's capacity - old.seqlens[b]) / page_size)
 * Then it subtracts n * page_size from recent's length and adds it to old's, in place, and rotates
 * the entries in use of recent's row of the block table left by n: with n = 1 a row [7 3 9 4 . .]
 * of four pages in use becomes [3 9 4 7 . .]. Freed page 7 is where the next new keys go. Old's
 * table must already have the pages that are needed.
 *
 * A page that a run writes must belong to one sequence and appear once in its table, else its
 * contents are undefined. reference and cpu check lengths and the pages that a run uses first. On
 * GPUs lengths are clamped, and a key whose page is outside the pool on either side is not moved:
 * old's memory there keeps what it had. */
typedef struct attn_kv_roll_problem {
  size_t struct_size;
  int64_t batch, heads_kv, head_dim;
  int64_t head_dim_v;         /* 0 = head_dim */
  const attn_segment* recent; /* PAGED, has_seqlens; k_type = v_type = f32, f16 or bf16; no
                                 descales. Copied, as old is */
  const attn_segment* old;    /* PADDED or PAGED, has_seqlens; strides without overlap */
  int64_t keep;               /* at least this many keys stay in recent; 0 or more */
  const char* kernel;         /* NULL = the plan chooses */
} attn_kv_roll_problem;

typedef struct attn_kv_roll_args {
  size_t struct_size;
  const attn_segment_args* recent; /* seqlens and block_table are written */
  const attn_segment_args* old;    /* k, v, k_scale, v_scale and seqlens are written */
} attn_kv_roll_args;

/* Errors of both as attn_plan_create and attn_run. Runs need no workspace. Backends: reference,
 * cpu, cuda. */
ATTN_API attn_status attn_plan_create_kv_roll(attn_context* context,
                                              const attn_kv_roll_problem* problem,
                                              attn_plan** plan);
ATTN_API attn_status attn_run_kv_roll(const attn_plan* plan, const attn_kv_roll_args* args,
                                      void* stream);

/* ---- block masks ---------------------------------------------------------------------------- */

/* A block mask in the backend's memory. A mask of batch 1 or heads 1 serves all batch entries or
 * heads. PARTIAL blocks with equal bits are stored once if the host builds the mask.
 *
 * Builders that take lengths, a window or kinds read them from host memory and compute on the host.
 * Builders that take arrays in the backend's memory compute there, on GPUs in the order of
 * `stream`: keep such an array alive until the stream has executed the build. Entries of block_bits
 * that block_index does not name have undefined contents.
 *
 * A mask is fixed to positions from 0: Sq and Skv below are seqlen_q and seqlen_kv of its shape,
 * whatever lengths a call has. Only CAUSAL blocks, which only from_kinds makes, follow the lengths
 * of the call.
 *
 * Errors of builders: INVALID_ARGUMENT, OUT_OF_MEMORY, DRIVER_ERROR; INTERRUPTED on the host. */
typedef struct attn_block_mask attn_block_mask;

typedef struct attn_block_mask_shape {
  size_t struct_size;
  int64_t batch, heads; /* 1 (or 0) to broadcast */
  int64_t seqlen_q, seqlen_kv;
  int32_t block_q, block_k; /* 64 or 128; any on reference and cpu */
} attn_block_mask_shape;

/* dense: u8 [batch, heads, Sq, Skv], non-zero = visible, contiguous, in the backend's memory. */
ATTN_API attn_status attn_block_mask_from_dense(attn_context* context,
                                                const attn_block_mask_shape* shape,
                                                const uint8_t* dense, void* stream,
                                                attn_block_mask** mask);
/* Several documents in one sequence, one after the other: a query sees the keys of its own
 * document, with causal = 1 those up to itself. lengths: [num_documents], in host memory; they add
 * up to seqlen_q = seqlen_kv. */
ATTN_API attn_status attn_block_mask_from_documents(attn_context* context,
                                                    const attn_block_mask_shape* shape,
                                                    const int64_t* lengths, int64_t num_documents,
                                                    int32_t causal, attn_block_mask** mask);
/* Query i sees keys i + Skv - Sq - window_left to i + Skv - Sq + window_right; -1 = unbounded. In
 * addition every query sees the first max(global_tokens, prefix_tokens) keys. global_tokens are
 * keys such as attention sinks. prefix_tokens are the prompt of a prefix-LM, with window_left -1
 * and window_right 0. */
ATTN_API attn_status attn_block_mask_from_window(attn_context* context,
                                                 const attn_block_mask_shape* shape,
                                                 int64_t window_left, int64_t window_right,
                                                 int64_t global_tokens, int64_t prefix_tokens,
                                                 attn_block_mask** mask);
/* For each key the queries that see it, as num_intervals (1 or 2) half-open ranges within [0, Sq]:
 * i32 [batch, heads, Skv, num_intervals, 2], in the backend's memory (arXiv 2410.01359). */
ATTN_API attn_status attn_block_mask_from_intervals(attn_context* context,
                                                    const attn_block_mask_shape* shape,
                                                    const int32_t* intervals, int32_t num_intervals,
                                                    void* stream, attn_block_mask** mask);
/* For each block of queries the blocks of keys that it sees: i32 [batch, heads, ceil(Sq / block_q),
 * list_size], contiguous, in host memory. An entry is a block's number, 0 to ceil(Skv / block_k) -
 * 1, or -1 for none; entries may be in any order, and a block that is listed twice is seen once. */
ATTN_API attn_status attn_block_mask_from_lists(attn_context* context,
                                                const attn_block_mask_shape* shape,
                                                const int32_t* lists, int64_t list_size,
                                                attn_block_mask** mask);
/* Kinds, index and bits directly, with the shapes of attn_args, in host memory; copied. index and
 * bits may be NULL if no block is PARTIAL. */
ATTN_API attn_status attn_block_mask_from_kinds(attn_context* context,
                                                const attn_block_mask_shape* shape,
                                                const uint8_t* kinds, const int32_t* index,
                                                const uint32_t* bits, int64_t num_partials,
                                                attn_block_mask** mask);
/* Element-wise intersection (combine = 0) or union (1) of two masks with the same seqlens and
 * blocks. Where one has batch or heads 1, it is broadcast. A CAUSAL block that the other mask does
 * not change stays CAUSAL; any other CAUSAL block is evaluated with the shape's Sq and Skv.
 * Computes on the host, after waiting for the default stream. */
ATTN_API attn_status attn_block_mask_combine(attn_context* context, const attn_block_mask* a,
                                             const attn_block_mask* b, int32_t combine,
                                             attn_block_mask** mask);
/* Fills the mask fields of a problem and of its args (either may be NULL). The problem's shapes
 * must be set already and equal those of the mask. The mask must outlive the runs. */
ATTN_API attn_status attn_block_mask_apply(const attn_block_mask* mask, attn_problem* problem,
                                           attn_args* args);
/* NULL is allowed. */
ATTN_API void attn_block_mask_destroy(attn_block_mask* mask);

/* ---- looking around ------------------------------------------------------------------------- */

/* What this library has and what is here, as JSON text:
 *   {"version",
 *    "backends": [{"name", "available", "reason",
 *                  "devices": [{"device", "name", "arch", ...,
 *                               "passed_by": why auto does not take it, or "",
 *                               "kernels": [names of kernels that it can run]}]}],
 *    "auto": {"backend", "device"}: what auto takes,
 *    "types": [{"name", "kind", ..., as in attn_dtype_properties}],
 *    "kernels": [{"name", "op", "backend", "arch", "in", "out",
 *                 "kv": not of merge and quantize,
 *                 of forward kernels also "head_dim": {"multiple", "max"}, "head_dim_v",
 *                 "takes": [options that it computes], "demands": [flags that it runs only with]}]}
 * "kernels" are those with code of their own. prefix_*, lists_cuda and shards_cuda consist of
 * others and are not listed: what they take depends on the problem and the device. attn_explain
 * names them and their parts. Opens drivers, loads no module. Writes at most `capacity` bytes,
 * ending in a 0; a longer text is cut, without an error. *size, if size is not NULL, gets the bytes
 * needed, the 0 included. text may be NULL if capacity is 0. */
ATTN_API attn_status attn_info(char* text, size_t capacity, size_t* size);

/* Which kernel attn_plan_create would choose, and why each other kernel of the backend declines, as
 * JSON text: {"kernel": name or null, "backend", "workspace", "declined": [{"kernel", "reason"}]}.
 * If kernel is null, "workspace" is replaced by "reason": attn_plan_create's sentence. A kernel
 * that consists of others (prefix_*, lists_cuda, shards_cuda) also has "parts": [{"kernel",
 * "computes"}], in the order of their launches; a part that consists of others has "parts", too.
 * text, capacity and size as in attn_info. */
ATTN_API attn_status attn_explain(attn_context* context, const attn_problem* problem, char* text,
                                  size_t capacity, size_t* size);

/* attn_explain for attn_plan_create_backward. */
ATTN_API attn_status attn_explain_backward(attn_context* context,
                                           const attn_backward_problem* problem, char* text,
                                           size_t capacity, size_t* size);

/* The description of a device, which need not be in this machine. */
typedef struct attn_device {
  size_t struct_size;
  const char* arch;         /* "sm_80", "sm_89", "sm_90", "gfx942", "gfx950" */
  int32_t multiprocessors;  /* compute units */
  int64_t shared_bytes_max; /* the most shared memory or LDS of one thread block */
  int64_t l2_bytes;         /* 0: not known */
} attn_device;

/* attn_explain for a described device: which kernel a context on it would choose, if its driver has
 * everything that libattn uses. Launches, loads and opens nothing. */
ATTN_API attn_status attn_explain_device(const attn_device* device, const attn_problem* problem,
                                         char* text, size_t capacity, size_t* size);

/* How often this process has launched a kernel so far, by the name that attn_plan_kernel gives; 0
 * for unknown names. Tests use it to prove which kernel ran. */
ATTN_API uint64_t attn_launch_count(const char* kernel);

#ifdef __cplusplus
}
#endif
#endif
