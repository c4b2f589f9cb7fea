/* libattn: attention forward on NVIDIA, AMD and CPU behind one C ABI.
 *
 *   attn_context  a backend and one of its devices
 *   attn_plan     an immutable choice of kernel for one problem on one context
 *   attn_run      runs a plan on data: no allocation; on GPU backends no locks, no synchronisation
 *
 * Common rules
 *   - Every struct starts with struct_size, set by the caller to sizeof(the struct). Zero in any
 * other field means "unset, use the default". A struct from a newer header is accepted as long as
 * the fields unknown to this library are zero.
 *   - Strides are 64-bit and count elements. The last dimension is contiguous. For ggml's types,
 * where 32 elements make one block, strides are multiples of 32, for i4 of 2. The stride of a
 * dimension with one element means nothing. Strides may be negative: the address given is that of
 * element 0 of every dimension, wherever the others lie. reference and cpu take them, kernels of
 * GPUs decline.
 *   - Data pointers, small arrays included, live in the memory of the context's backend: host
 * memory for reference and cpu, device memory for cuda and hip.
 *   - What a run writes (out, lse, dst, a descale that is found, a cache, the workspace) shares no
 * memory with any other array of the run; else INVALID_ARGUMENT, on every backend. An array is the
 * elements that the shapes and strides of its problem reach, whatever lengths and tables say: all
 * tokens of a packed buffer, all pages of a pool. Arrays that lie between each other's elements, as
 * slices of one tensor [B, S, 4, H, D] do, share none; but where the strides of two such arrays, in
 * order of size, are not multiples of each other, they may be refused too.
 *   - A batch of 0 is a call with nothing to do, of every operation: its plan has no workspace, its
 * runs launch and write nothing, and pointers to what has no elements may be NULL.
 *   - Functions return a status; attn_last_error() then has a sentence for the calling thread.
 * Nothing prints, aborts or falls back to another backend. Output parameters are written on success
 * only.
 *   - All functions may be called from any thread. A plan may run on many threads at once as long
 * as each run has its own workspace. Handles may be destroyed in any order, but not while in use.
 *   - While a stream of a GPU is being captured, by this thread or another, contexts, plans and
 * masks can be made and memory allocated and freed; attn_workspace_init and the runs in that stream
 * become nodes of its graph. A replay uses the memory that they were given, so the workspace of a
 * graph is the graph's own.
 *   - In the child of a fork, handles of reference and cpu made before it work on the calling
 * thread alone; those of devices do not work, as their drivers do not.
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

/* Until 1.0 a minor version may break what was built with the one before (SONAME libattn.so.0.2);
 * patch versions do not. */
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 2
#define ATTN_VERSION_PATCH 0

/* C++ may not hold a value outside an enum's range unless its type is fixed; callers pass what they
 * like. */
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
  ATTN_INTERNAL = 8,
  ATTN_INTERRUPTED =
      9 /* attn_context_options.interrupted ended the call; its outputs are undefined */
} attn_status;

/* The name of a status, e.g. "invalid argument". Never NULL. */
ATTN_API const char* attn_status_string(attn_status status);

/* A sentence about the last failure on this thread: argument, value and what would be accepted. ""
 * if nothing failed yet. Valid until the next attn call on this thread. */
ATTN_API const char* attn_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library that is loaded. */
ATTN_API const char* attn_version(void);

/* ---- types ---------------------------------------------------------------------------------- */

typedef enum attn_backend ATTN_ENUM {
  ATTN_BACKEND_AUTO = 0, /* cuda if a device is there that this build has code for, else hip by
                            the same rule, else cpu; attn_info tells which and why */
  ATTN_BACKEND_REFERENCE = 1,
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
  /* ggml, 32 elements a block; of f16 d and m, little-endian. Each of 16 bytes has element i in its
     low half and element i + 16 in its high one; bit i of qh is element i's fifth */
  ATTN_Q4_1 = 10,   /* d, m, 16 bytes: code d + m, 20 bytes */
  ATTN_Q5_0 = 11,   /* d, u32 qh, 16 bytes: (code - 16) d, 22 bytes */
  ATTN_Q5_1 = 12,   /* d, m, u32 qh, 16 bytes: code d + m, 24 bytes */
  ATTN_IQ4_NL = 13, /* d, 16 bytes: ggml's 16 values at code, times d, 18 bytes */
  /* K/V whose scales, an f16 for each token and head, lie in an array of their own
     (attn_segment_args.k_scale): real value = code x scale */
  ATTN_I8 = 14, /* int8 */
  ATTN_I4 = 15  /* two's complement, two a byte: the even element in the low half */
} attn_dtype;

typedef enum attn_dtype_kind ATTN_ENUM {
  ATTN_KIND_FLOAT = 1, /* f32, f16, bf16, f64 */
  ATTN_KIND_FP8 = 2,
  ATTN_KIND_GGML = 3, /* blocks that have their scales in them; K and V only */
  ATTN_KIND_CODES = 4 /* integers; K and V only */
} attn_dtype_kind;

/* What a type is. */
typedef struct attn_dtype_properties {
  size_t struct_size; /* of the library that is loaded: fields from there on do not exist */
  attn_dtype type;
  const char* name; /* "f8_e4m3fn", as in errors, files and command lines */
  attn_dtype_kind kind;
  int32_t block_elements; /* 1; ggml's types 32, i4 2: a row is whole blocks */
  int32_t block_bytes;
  int32_t has_scales;  /* 1: an f16 for each token and head lies in an array of its own */
  int32_t output_only; /* 1: f64 */
  double max_finite;   /* of an element as it is stored; ggml's types: 0 */
} attn_dtype_properties;

/* Valid as long as the library is loaded. NULL if `type` is NONE or no type of this library, whose
 * types are 1, 2 and so on up to the first NULL. */
ATTN_API const attn_dtype_properties* attn_dtype_info(attn_dtype type);

typedef enum attn_layout ATTN_ENUM {
  ATTN_PADDED = 0, /* [B, S, H, D] */
  ATTN_PACKED = 1, /* [total, H, D] with cu_seqlens [B+1] */
  ATTN_PAGED = 2   /* [num_pages, page_size, H, D] with a block table [B, max_pages]; K/V only */
} attn_layout;

typedef enum attn_descale_kind
    ATTN_ENUM { /* real value = stored value x descale */
                ATTN_DESCALE_NONE = 0,
                ATTN_DESCALE_TENSOR = 1, /* f32 [1] */
                ATTN_DESCALE_HEAD = 2,   /* f32 [B, Hkv] */
                ATTN_DESCALE_BLOCK =
                    3 /* f32 [B, Hkv, ceil(seqlen / descale_block_keys)]; K/V only */
    } attn_descale_kind;

enum attn_flag {
  ATTN_CAUSAL = 1 << 0,          /* bottom-right: query i sees key j <= i + Skv[b] - Sq[b] */
  ATTN_CAUSAL_TOP_LEFT = 1 << 1, /* j <= i; not together with ATTN_CAUSAL */
  ATTN_WINDOW = 1 << 2,     /* i + Skv - Sq - window_left <= j <= i + Skv - Sq + window_right */
  ATTN_BLOCK_MASK = 1 << 3, /* attn_args.block_kinds and its companions */
  ATTN_ALIBI = 1 << 4,      /* - slope[h] * |i + Skv - Sq - j| */
  ATTN_SINKS = 1 << 5,      /* exp(sink[h]) joins the denominator and lse */
  ATTN_OUT_SCALE = 1 << 6,  /* fp8 out only: stored = round(real x out_scale) */
  ATTN_SPLIT_INVARIANT = 1 << 7,  /* any cut of KV gives the same answer to float32 rounding */
  ATTN_KV_PREFIX_STABLE = 1 << 8, /* accepted, without effect */
  ATTN_BIAS_SLOPES = 1 << 9, /* bias x attn_args.bias_slopes[h] in the place of bias: ggml's mask.
                               -inf hides its element whatever the slope */
  ATTN_FP8_PRECISE = 1 << 10 /* fp8 q only: a kernel that rounds P to fp8 keeps what is left in a
                               second fp8 value */
};

enum attn_block_kind {
  ATTN_BLOCK_EMPTY = 0,  /* nothing visible; never loaded */
  ATTN_BLOCK_CAUSAL = 1, /* the rule of ATTN_CAUSAL inside the block */
  ATTN_BLOCK_FULL = 2,
  ATTN_BLOCK_PARTIAL = 3 /* one bit per element */
};

/* Element strides of the outer dimensions. All three zero: contiguous in the order of the layout.
 * PADDED: batch, seq, head. PACKED: batch is ignored. PAGED: batch is the stride between pages. */
typedef struct attn_strides {
  int64_t batch, seq, head;
} attn_strides;

/* ---- context -------------------------------------------------------------------------------- */

typedef struct attn_context attn_context;

typedef struct attn_context_options {
  size_t struct_size;
  int32_t device;      /* ordinal, from 0; see has_device. reference, cpu: 0 */
  int32_t cpu_threads; /* cpu, reference: threads a run may use, the caller's included; 0 = the
                          first number of OMP_NUM_THREADS, which is read once, else all cores */
  const char*
      driver_path; /* hip-emu: path of libattn-hipemu.so, NULL = the one beside this library;
                      cuda, hip: a driver library to open. NULL = the system's: libcuda.so.1 or
                      libamdhip64.so.7, .6 or .5 where the loader finds it (LD_LIBRARY_PATH), the
                      latter also in $ROCM_PATH/lib, /opt/rocm/lib and, if this library is part of a
                      Python package, _rocm_sdk_core/lib beside that. Other backends: NULL */
  const char* kernel_file; /* cuda, hip, hip-emu: a file of device code (cubin, code object) that
                              kernels are taken from instead of the library's own, under the same
                              names; those it does not have are unsupported, but for helpers that a
                              kernel of it launches first (prepare_*), which are then the library's.
                              For authors of kernels. NULL = none */
  int32_t has_device; /* 1: `device` is meant, as it is where it is not 0. 0 with device 0: cuda
                         takes that of the calling thread's current context, where there is one,
                         else 0; auto takes that, too, or the first device that this build has
                         code for. cuda: the current context is used where it is of the device, else
                         the primary one. Runs work on the context's device whatever is current, and
                         leave that as it was */
  /* Asked about every 50 ms by the thread that called, during runs on reference and cpu and while
   * the host builds a block mask; on several threads at once if these call. Not 0 ends the call
   * with INTERRUPTED. Must not throw. NULL = none */
  int32_t (*interrupted)(void* user);
  void* interrupted_user;
} attn_context_options;

/* options may be NULL. Errors: INVALID_ARGUMENT, NO_DEVICE, DRIVER_MISSING, DRIVER_ERROR,
 * OUT_OF_MEMORY. */
ATTN_API attn_status attn_context_create(attn_backend backend, const attn_context_options* options,
                                         attn_context** context);
/* NULL is allowed. Plans made from the context stay valid. */
ATTN_API void attn_context_destroy(attn_context* context);
/* The backend in use, never AUTO. */
ATTN_API attn_backend attn_context_backend(const attn_context* context);
/* cpu, reference: the most threads that a run uses, the caller's included; 0 on GPU backends. */
ATTN_API int32_t attn_context_threads(const attn_context* context);

/* "auto", "reference", "cpu", "cuda", "hip", "hip-emu". Never NULL. */
ATTN_API const char* attn_backend_string(attn_backend backend);

/* Memory of the context's backend: 256-byte aligned, contents undefined. bytes > 0. */
ATTN_API attn_status attn_alloc(attn_context* context, size_t bytes, void** memory);
ATTN_API attn_status attn_free(attn_context* context, void* memory);
/* Copies between host memory and the backend's memory, after all work in front of it on `stream`,
 * and returns when the copy is complete. */
ATTN_API attn_status attn_copy_in(attn_context* context, void* backend_dst, const void* host_src,
                                  size_t bytes, void* stream);
ATTN_API attn_status attn_copy_out(attn_context* context, void* host_dst, const void* backend_src,
                                   size_t bytes, void* stream);
/* Waits for the stream (NULL: the default stream) and reports errors of the work in it. */
ATTN_API attn_status attn_synchronize(attn_context* context, void* stream);

/* ---- the problem: everything but data ------------------------------------------------------- */

/* One K/V segment. A problem has one or more, older keys first. */
typedef struct attn_segment {
  size_t struct_size;
  attn_dtype k_type, v_type; /* may differ */
  attn_layout layout;
  int32_t has_seqlens; /* PADDED, PAGED: attn_segment_args.seqlens is given; else all are full */
  int64_t seqlen;      /* capacity: keys per sequence at most. PADDED: S. PAGED: 0 means
                          max_pages * page_size */
  int64_t total;       /* PACKED: tokens in the buffer */
  int64_t num_pages;   /* PAGED: pages in the pool */
  int32_t page_size;   /* PAGED: keys per page */
  int32_t max_pages;   /* PAGED: columns of the block table */
  attn_strides k_stride, v_stride;
  attn_descale_kind k_descale, v_descale;
  int32_t descale_block_keys; /* ATTN_DESCALE_BLOCK: 64 or 128 */
  /* k_type, v_type i8 and i4: of k_scale and v_scale, in scales, as k_stride without a head's
     elements: all zero, contiguous [B, S, Hkv], [total, Hkv], [num_pages, page_size, Hkv] */
  attn_strides k_scale_stride, v_scale_stride;
} attn_segment;

typedef struct attn_problem {
  size_t struct_size;
  /* shapes: q [B, Sq, Hq, D] or packed [total_q, Hq, D]; k [B, Skv, Hkv, D]; v [B, Skv, Hkv, Dv];
   * out as q with Dv; lse f32 [B, Hq, Sq] or packed [Hq, total_q], contiguous, natural log. Each
   * row is written: one that sees no key is 0 in out and -inf in lse, or its sink; a packed row
   * that belongs to no sequence, from cu_seqlens_q[B] on, is 0 and -inf */
  int64_t batch;
  int64_t heads_q; /* a multiple of heads_kv */
  int64_t heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;   /* 0 = head_dim */
  int64_t seqlen_q;     /* PACKED: the maximum over the batch */
  int64_t total_q;      /* PACKED: tokens in q and out; 0 for a batch of 0 */
  attn_layout q_layout; /* PADDED or PACKED */
  attn_dtype q_type;
  attn_dtype out_type; /* NONE: q's type; bf16 for an fp8 q */
  attn_descale_kind q_descale;
  attn_strides q_stride, out_stride;
  int32_t num_segments;
  const attn_segment* segments; /* copied; element i is at i * segments[0].struct_size bytes */
  /* scores: scale * q k^T, softcap, bias, ALiBi, masks, softmax */
  float scale;    /* 0 = 1 / sqrt(head_dim). For a scale of zero, so that all visible keys weigh
                     the same, pass FLT_MIN: it leaves nothing of finite scores below 1e30 */
  float softcap;  /* 0 = none; else softcap * tanh(s / softcap) */
  uint32_t flags; /* attn_flag */
  int64_t window_left; /* ATTN_WINDOW: -1 = unbounded, and so is 2^31 or more */
  int64_t window_right;
  attn_dtype bias_type;   /* NONE = no bias; f32, f16 or q's type; PADDED q only */
  int64_t bias_stride[4]; /* over [B, Hq, Sq, Skv]; 0 broadcasts. All zero: contiguous [B, Hq, Sq,
                             sum of seqlen] */
  /* ATTN_BLOCK_MASK (PADDED q only): grid [mask_batch, mask_heads, ceil(Sq / block_q), ceil(Skv /
   * block_k)] */
  int32_t block_q, block_k;       /* 64 or 128 on GPUs, any on reference and cpu */
  int64_t mask_batch, mask_heads; /* 1 or B; 1 or Hq; 0 = 1 */
  int64_t mask_partials;          /* blocks in block_bits */
  /* execution */
  int64_t fixed_split; /* keys per split, on CUDA a multiple of 64; 0 = the plan decides. A query's
                          bits do not depend on the batch then; on CUDA on nothing but the query,
                          the keys that it sees and the segments they lie in (docs/numerics.md) */
  int32_t max_sms;     /* multiprocessors to use at most; 0 = all */
  const char* kernel;  /* demand this kernel by name; NULL = the plan chooses */
  int64_t tree_keys; /* 1 to 128: the last so many keys of a sequence, all segments together, have a
                        bit per query in attn_args.tree. 0 = none */
} attn_problem;

/* ---- the data ------------------------------------------------------------------------------- */

typedef struct attn_segment_args {
  size_t struct_size;
  const void* k;
  const void* v;
  const int32_t* seqlens;     /* [B], each in [0, seqlen] */
  const int32_t* cu_seqlens;  /* PACKED: [B+1], from 0, not decreasing, last <= total */
  const int32_t* block_table; /* PAGED: [B, max_pages] contiguous, each in [0, num_pages). Columns
                                 behind a sequence's keys, new ones of kv_append among them, may
                                 hold anything: no run uses them */
  const float* k_descale;
  const float* v_descale;
  const void* k_scale; /* k_type i8 and i4: f16, one for each token and head; a descale, where there
                          is one, multiplies it */
  const void* v_scale;
} attn_segment_args;

typedef struct attn_args {
  size_t struct_size;
  const void* q;
  void* out;
  float* lse;                  /* NULL = not wanted */
  const int32_t* cu_seqlens_q; /* PACKED q: [B+1] */
  int32_t num_segments;
  const attn_segment_args* segments; /* host array, as in the problem; all of one struct_size */
  const void* bias;
  const float* alibi_slopes;  /* [Hq] */
  const float* sinks;         /* [Hq] */
  const float* q_descale;     /* [1] or [B, Hkv] */
  const float* out_scale;     /* [1] */
  const uint8_t* block_kinds; /* the grid of attn_problem */
  const int32_t* block_index; /* the same grid: index into block_bits, -1 where not PARTIAL */
  const uint32_t*
      block_bits; /* [mask_partials, block_q, ceil(block_k / 32)]; bit c % 32 of word c / 32 */
  const uint64_t* tree;     /* [B, Sq, 2] or packed [total_q, 2], contiguous: query i sees key
                               Skv - tree_keys + n only if bit n % 64 of its word n / 64 is set. Keys
                               before have no bit, bits before key 0 no key. Beside all other masks */
  const float* bias_slopes; /* ATTN_BIAS_SLOPES: [Hq], finite */
} attn_args;

/* ---- plan and run --------------------------------------------------------------------------- */

typedef struct attn_plan attn_plan;

/* Validates the problem, chooses the kernel, loads its module. Errors: INVALID_ARGUMENT,
 * UNSUPPORTED (no kernel of this backend takes it, or the demanded one does not; the sentence has
 * the reasons), DRIVER_ERROR, OUT_OF_MEMORY. */
ATTN_API attn_status attn_plan_create(attn_context* context, const attn_problem* problem,
                                      attn_plan** plan);
ATTN_API void attn_plan_destroy(attn_plan* plan);
/* The name of the chosen kernel. Valid as long as the plan. */
ATTN_API const char* attn_plan_kernel(const attn_plan* plan);
/* Bytes a run needs; may be 0. The same for every run of the plan. */
ATTN_API size_t attn_plan_workspace(const attn_plan* plan);

/* Must be called once on a new workspace before its first run; afterwards the workspace belongs to
 * one stream at a time. workspace: 256-byte aligned, in the backend's memory, at least
 * attn_plan_workspace. */
ATTN_API attn_status attn_workspace_init(const attn_plan* plan, void* workspace, size_t bytes,
                                         void* stream);

/* Computes out (and lse). stream: CUstream or hipStream_t, NULL for the default stream; must be
 * NULL on reference and cpu, where the call returns when the result is there. On GPU backends the
 * call only launches, so contents of device arrays are clamped by the kernels, never trusted:
 * lengths to [0, capacity], a bad page has no keys, a negative span is 0. On reference and cpu
 * lengths and cu_seqlens are host values and checked first. GPU kernels need 16-byte aligned bases
 * and outer strides. Of ggml's types on sm_90 and hip any strides will do. Of q8_0 and q4_0 those
 * of tokens and of sequences or pages that are multiples of 16 bytes, in which heads follow each
 * other as ggml has them, 136 and 72 bytes for 128 elements, or lie multiples of 16 bytes apart,
 * are what the kernels of sm_90 for few queries take, which read K and V once. Of i8 and i4 those
 * kernels want pages' scales an even number of scales apart. */
ATTN_API attn_status attn_run(const attn_plan* plan, const attn_args* args, void* workspace,
                              size_t bytes, void* stream);

/* Validates the contents of the small arrays (lengths, tables, block kinds and indices), which
 * attn_run cannot on GPUs. Synchronises the stream. */
ATTN_API attn_status attn_check(const attn_plan* plan, const attn_args* args, void* stream);

/* ---- merge of partial results --------------------------------------------------------------- */

/* m = max lse; w = exp(lse_s - m); out = sum(w out) / sum(w); lse = m + log(sum w). Parts with lse
 * -inf contribute nothing; all -inf gives 0 and -inf. (Online softmax merge as in arXiv
 * 2205.14135, 3.1.) */
typedef struct attn_merge_problem {
  size_t struct_size;
  int64_t batch, heads_q, seqlen_q,
      head_dim_v;       /* out.i, out [B, Sq, Hq, Dv]; lse.i, lse [B, Hq, Sq] */
  int32_t num_parts;    /* at least 1 */
  attn_dtype part_type; /* f32, f16, bf16 */
  attn_dtype out_type;  /* NONE: part_type */
  attn_strides part_stride, out_stride;
  const char* kernel;
} attn_merge_problem;

typedef struct attn_merge_args {
  size_t struct_size;
  int32_t num_parts;
  const void* const* outs; /* host array of num_parts backend pointers */
  const float* const* lses;
  void* out;
  float* lse; /* NULL = not wanted */
} attn_merge_args;

ATTN_API attn_status attn_plan_create_merge(attn_context* context,
                                            const attn_merge_problem* problem, attn_plan** plan);
ATTN_API attn_status attn_run_merge(const attn_plan* plan, const attn_merge_args* args,
                                    void* stream);

/* ---- quantisation --------------------------------------------------------------------------- */

typedef enum attn_scale_source ATTN_ENUM {
  ATTN_SCALE_ONE = 0,   /* stored = round(x) */
  ATTN_SCALE_GIVEN = 1, /* descale is read: stored = round(x / descale) */
  ATTN_SCALE_AMAX = 2   /* descale = max of the finite |x| / largest finite value, and is written; 1
                           where that max is 0 */
} attn_scale_source;

/* x [B, S, H, D] -> fp8, or ggml blocks (whose scales are inside; scale must be ATTN_SCALE_ONE and
 * head_dim a multiple of 32). Rounds to nearest even. Without saturate a value beyond the range
 * becomes NaN (inf for e5m2); with it, the largest finite value. NaN stays NaN.
 *
 * i8, i4 (ATTN_SCALE_ONE; i4: head_dim even): the scale of a token's head is the largest |x| / 127
 * or 7, rounded to f16; stored = round(x / scale). A NaN, and without saturate a scale beyond f16,
 * makes the scale NaN; with it, it is 65504 at most. */
typedef struct attn_quantize_problem {
  size_t struct_size;
  int64_t batch, seqlen, heads, head_dim;
  attn_dtype src_type; /* f32, f16, bf16 */
  attn_dtype dst_type; /* f8_e4m3fn, f8_e5m2, f8_e4m3fnuz; ggml's; i8, i4 */
  attn_strides src_stride, dst_stride;
  attn_descale_kind kind; /* NONE: same as TENSOR. TENSOR [1], HEAD [B, H], BLOCK [B, H, nblocks] */
  int32_t descale_block_keys; /* BLOCK: 64 or 128 */
  attn_scale_source scale;
  int32_t saturate;
  const char* kernel;
  attn_strides scale_stride; /* i8, i4: of attn_quantize_args.scale, in scales; all zero: contiguous
                                [B, S, H] */
} attn_quantize_problem;

typedef struct attn_quantize_args {
  size_t struct_size;
  const void* src;
  void* dst;
  float* descale; /* GIVEN: read; AMAX: written; ONE: written with 1 unless NULL */
  void* scale;    /* i8, i4: f16 [B, S, H], written */
} attn_quantize_args;

ATTN_API attn_status attn_plan_create_quantize(attn_context* context,
                                               const attn_quantize_problem* problem,
                                               attn_plan** plan);
ATTN_API attn_status attn_run_quantize(const attn_plan* plan, const attn_quantize_args* args,
                                       void* stream);

/* ---- appending to a KV cache ---------------------------------------------------------------- */

/* Writes new keys and values behind the ones that a segment holds, converted to the segment's
 * types: token t of sequence b goes to position seqlens[b] + t. Positions from the segment's
 * capacity on have no room: nothing is written for a token there.
 *
 * stored = round(x / descale), to nearest even; ggml blocks, i8 and i4 as attn_quantize makes them,
 * the scales of these written too. Beyond the range of fp8 and of a scale: the largest value; of
 * f16 and bf16: infinity. NaN stays NaN.
 *
 * With rotary_dim the first rotary_dim elements of each head of k_new are rotated before that, and
 * with heads_q those of q, whose rows are the tokens of k_new: a pair (x, y) at a position becomes
 * (x cos[i] - y sin[i], x sin[i] + y cos[i]), pair i of a head being the elements i and
 * i + rotary_dim / 2, or 2 i and 2 i + 1. The other elements of q are copied.
 *
 * The call reads lengths where they lie, and with advance_seqlens writes what they become:
 * seqlens[b] + the new tokens of b, at most the capacity. Else the caller advances them. A page
 * that a run writes belongs to one sequence and stands once in its table; else its contents are
 * undefined.
 *
 * segment and cache may be those of an older header: what follows them lies behind as many bytes as
 * their own struct_size says. */
typedef struct attn_kv_append_problem {
  size_t struct_size;
  int64_t batch, heads_kv, head_dim;
  int64_t head_dim_v;     /* 0 = head_dim */
  int64_t seqlen_new;     /* tokens per sequence; PACKED: the maximum */
  int64_t total_new;      /* PACKED: tokens in k_new and v_new; 0 for a batch of 0 */
  attn_layout new_layout; /* PADDED [B, seqlen_new, Hkv, D] or PACKED with cu_seqlens_new */
  attn_dtype new_type;    /* f32, f16, bf16 */
  attn_strides k_new_stride, v_new_stride;
  attn_segment segment; /* the cache: PADDED or PAGED, has_seqlens; strides without overlap */
  const char* kernel;
  int32_t advance_seqlens; /* 1: attn_kv_append_args.seqlens_out is written */
  /* rotary embedding (arXiv 2104.09864); what follows is 0 without rotary_dim */
  int32_t rotary_interleaved; /* 1: pairs of neighbours; 0: of elements rotary_dim / 2 apart */
  int64_t rotary_dim;         /* even, up to head_dim; 0 = none */
  int64_t rotary_positions;   /* rows of the tables: the segment's capacity or more */
  int64_t heads_q;            /* 0 = no q; else q, q_out as k_new with Hq heads, of new_type */
  attn_strides q_stride, q_out_stride;
} attn_kv_append_problem;

typedef struct attn_kv_append_args {
  size_t struct_size;
  const void* k_new;
  const void* v_new;
  const int32_t* cu_seqlens_new; /* PACKED: [B+1] */
  attn_segment_args cache;       /* k and v are written */
  const float* rotary_cos;       /* [rotary_positions, rotary_dim / 2], contiguous */
  const float* rotary_sin;
  const void* q;
  void* q_out; /* may be q, with q's strides; not written for tokens without room or, packed,
                  of no sequence */
  int32_t* seqlens_out; /* [B]; may be cache.seqlens */
} attn_kv_append_args;

ATTN_API attn_status attn_plan_create_kv_append(attn_context* context,
                                                const attn_kv_append_problem* problem,
                                                attn_plan** plan);
/* On reference and cpu lengths, offsets and the pages to be written are checked before anything is
 * written. On GPUs lengths count as clamped to [0, capacity], and what a page out of range would
 * get is not written. */
ATTN_API attn_status attn_run_kv_append(const attn_plan* plan, const attn_kv_append_args* args,
                                        void* stream);

/* ---- moving old pages of a cache into another type ------------------------------------------ */

/* A mixed cache that rolls: attn_run has `old`, of a type of few bits, in front of `recent`, where
 * attn_kv_append writes. From time to time this call moves the oldest full pages of `recent` behind
 * the keys of `old`, converted as attn_kv_append converts. Of sequence b so many pages are moved as
 * leave `keep` keys or more and have room behind old's keys:
 *   n = min(recent.seqlens[b] - keep, old's capacity - old.seqlens[b]) / page_size, 0 at least.
 * Then recent's length is less by n * page_size and old's is more by it, both where they lie, and
 * of the row of recent's block table the entries that have keys are turned by n: the first n pages,
 * free now, come behind the others, where the next keys go. Rows of old's table are ready before.
 *
 * A page that a run writes belongs to one sequence and stands once in its table; else its contents
 * are undefined. On reference and cpu lengths and the pages that a run uses are checked first; on
 * GPUs lengths count as clamped, and a key whose page is out of range on either side leaves what
 * old has in its place as it is. Computed on reference, cpu and cuda. */
typedef struct attn_kv_roll_problem {
  size_t struct_size;
  int64_t batch, heads_kv, head_dim;
  int64_t head_dim_v;         /* 0 = head_dim */
  const attn_segment* recent; /* PAGED, has_seqlens; k_type = v_type f32, f16 or bf16; no descales.
                                 Copied, as old is */
  const attn_segment* old;    /* PADDED or PAGED, has_seqlens; strides without overlap */
  int64_t keep;               /* keys of recent that stay, at least; 0 or more */
  const char* kernel;
} attn_kv_roll_problem;

typedef struct attn_kv_roll_args {
  size_t struct_size;
  const attn_segment_args* recent; /* seqlens and block_table are written */
  const attn_segment_args* old;    /* k, v, k_scale, v_scale and seqlens are written */
} attn_kv_roll_args;

ATTN_API attn_status attn_plan_create_kv_roll(attn_context* context,
                                              const attn_kv_roll_problem* problem,
                                              attn_plan** plan);
ATTN_API attn_status attn_run_kv_roll(const attn_plan* plan, const attn_kv_roll_args* args,
                                      void* stream);

/* ---- block masks ---------------------------------------------------------------------------- */

/* A block mask in the backend's memory. Identical PARTIAL blocks are stored once. A mask of batch 1
 * or heads 1 serves all batch entries or heads. Builders that take lengths, windows or kinds
 * compute on the host; those that take arrays of the backend's memory compute where these lie, on
 * GPUs in the order of `stream`. The contents of bits that no element of the index names are
 * undefined.
 *
 * Masks stand at positions from 0: Sq and Skv below are those of the shape, whatever lengths a call
 * has. Only CAUSAL blocks, which none but from_kinds makes, follow the lengths of the call. */
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
/* Documents one behind the other, lengths on the host; a query sees its own document (causal: up to
 * itself). The lengths add up to seqlen_q = seqlen_kv. */
ATTN_API attn_status attn_block_mask_from_documents(attn_context* context,
                                                    const attn_block_mask_shape* shape,
                                                    const int64_t* lengths, int64_t num_documents,
                                                    int32_t causal, attn_block_mask** mask);
/* window_left, window_right as in attn_problem: query i sees the keys from i + Skv - Sq - left to i
 * + Skv - Sq + right, -1 = unbounded. Beside them every query sees the first global_tokens keys and
 * the first prefix_tokens keys, also the queries in front of these (prefix-LM: window_left -1,
 * window_right 0). */
ATTN_API attn_status attn_block_mask_from_window(attn_context* context,
                                                 const attn_block_mask_shape* shape,
                                                 int64_t window_left, int64_t window_right,
                                                 int64_t global_tokens, int64_t prefix_tokens,
                                                 attn_block_mask** mask);
/* Per key the queries that see it, as num_intervals (1 or 2) half-open ranges within [0, Sq]: i32
 * [batch, heads, Skv, num_intervals, 2], in the backend's memory (arXiv 2410.01359). */
ATTN_API attn_status attn_block_mask_from_intervals(attn_context* context,
                                                    const attn_block_mask_shape* shape,
                                                    const int32_t* intervals, int32_t num_intervals,
                                                    void* stream, attn_block_mask** mask);
/* Kinds, index and bits directly, as in attn_args, in host memory; copied. index and bits may be
 * NULL if no block is PARTIAL. */
ATTN_API attn_status attn_block_mask_from_kinds(attn_context* context,
                                                const attn_block_mask_shape* shape,
                                                const uint8_t* kinds, const int32_t* index,
                                                const uint32_t* bits, int64_t num_partials,
                                                attn_block_mask** mask);
/* Element-wise intersection (combine = 0) or union (1) of two masks of one grid; batch and heads
 * may be 1 in one of them. A CAUSAL block that the other mask leaves as it is stays CAUSAL; else it
 * counts with the shape's Sq and Skv. Computes on the host; waits for the default stream. */
ATTN_API attn_status attn_block_mask_combine(attn_context* context, const attn_block_mask* a,
                                             const attn_block_mask* b, int32_t combine,
                                             attn_block_mask** mask);
/* Fills the mask fields of a problem, whose shapes are set and must be those of the mask, and of
 * its args (either may be NULL). The mask must outlive the runs. */
ATTN_API attn_status attn_block_mask_apply(const attn_block_mask* mask, attn_problem* problem,
                                           attn_args* args);
ATTN_API void attn_block_mask_destroy(attn_block_mask* mask);

/* ---- looking around ------------------------------------------------------------------------- */

/* JSON text: {"version", "backends": [{"name", "available", "reason", "devices": [{"device",
 * "name", "arch", ..., "passed_by": why auto does not take it or "", "kernels": [names of those
 * that this build has code of for it]}]}], "auto": {"backend", "device"}: what auto takes,
 * "types": [{"name", "kind", ..., as in attn_dtype_properties}], "kernels": [{"name", "op",
 * "backend", "arch", "in", "out", of forward and kv_append "kv", and of forward kernels "head_dim":
 * {"multiple", "max"}, "head_dim_v", "takes": [words], "demands": [words]}]}. Opens drivers, loads
 * no module. Writes at most `capacity` bytes with a terminating 0; *size gets the bytes needed, the
 * 0 included. text may be NULL if capacity is 0. */
ATTN_API attn_status attn_info(char* text, size_t capacity, size_t* size);

/* JSON text: {"kernel": name or null, "backend", "workspace", "declined": [{"kernel", "reason"}]}:
 * which kernel attn_plan_create would choose and why each other one of the backend declines; where
 * kernel is null, "reason" with attn_plan_create's sentence in the place of "workspace". */
ATTN_API attn_status attn_explain(attn_context* context, const attn_problem* problem, char* text,
                                  size_t capacity, size_t* size);

/* A device, described. It need not be here. */
typedef struct attn_device {
  size_t struct_size;
  const char* arch;         /* "sm_80", "sm_89", "sm_90", "gfx942" */
  int32_t multiprocessors;  /* compute units */
  int64_t shared_bytes_max; /* shared memory or LDS that one block can have */
  int64_t l2_bytes;         /* 0: not known */
} attn_device;

/* The same for a device that is described: which kernel a context on it would choose, with a driver
 * that has all that libattn uses. Launches, loads and opens nothing. */
ATTN_API attn_status attn_explain_device(const attn_device* device, const attn_problem* problem,
                                         char* text, size_t capacity, size_t* size);

/* Launches of a kernel by this process so far, under the name that attn_plan_kernel gives; 0 for
 * names it does not know. Tests use it to prove that the kernel they mean did run. */
ATTN_API uint64_t attn_launch_count(const char* kernel);

#ifdef __cplusplus
}
#endif
#endif
