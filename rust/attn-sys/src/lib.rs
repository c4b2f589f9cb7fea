//! libattn's C ABI (`include/attn/attn.h`), which has the documentation of every item. Kept by hand;
//! `tests/rust/header.py` compares it with the header.
//!
//! Structs begin with `struct_size`: make them with `new()`, which sets it and zeroes the rest.
#![allow(non_camel_case_types)]
#![no_std]

use core::ffi::{c_char, c_int, c_void};

macro_rules! versioned {
    ($($name:ident),* $(,)?) => {$(
        impl $name {
            /// All zero but `struct_size`.
            pub const fn new() -> Self {
                // Every field is an integer, a float, a pointer, or a struct of these.
                let mut made: Self = unsafe { core::mem::zeroed() };
                made.struct_size = core::mem::size_of::<Self>();
                made
            }
        }
        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }
    )*};
}

pub type attn_status = c_int;
pub const ATTN_OK: attn_status = 0;
pub const ATTN_INVALID_ARGUMENT: attn_status = 1;
pub const ATTN_UNSUPPORTED: attn_status = 2;
pub const ATTN_NO_DEVICE: attn_status = 3;
pub const ATTN_DRIVER_MISSING: attn_status = 4;
pub const ATTN_DRIVER_ERROR: attn_status = 5;
pub const ATTN_OUT_OF_MEMORY: attn_status = 6;
pub const ATTN_WORKSPACE_TOO_SMALL: attn_status = 7;
pub const ATTN_INTERNAL: attn_status = 8;
pub const ATTN_INTERRUPTED: attn_status = 9;

pub type attn_backend = c_int;
pub const ATTN_BACKEND_AUTO: attn_backend = 0;
pub const ATTN_BACKEND_REFERENCE: attn_backend = 1;
pub const ATTN_BACKEND_CPU: attn_backend = 2;
pub const ATTN_BACKEND_CUDA: attn_backend = 3;
pub const ATTN_BACKEND_HIP: attn_backend = 4;
pub const ATTN_BACKEND_HIP_EMU: attn_backend = 5;

pub type attn_dtype = c_int;
pub const ATTN_DTYPE_NONE: attn_dtype = 0;
pub const ATTN_F32: attn_dtype = 1;
pub const ATTN_F16: attn_dtype = 2;
pub const ATTN_BF16: attn_dtype = 3;
pub const ATTN_F8_E4M3FN: attn_dtype = 4;
pub const ATTN_F8_E5M2: attn_dtype = 5;
pub const ATTN_F8_E4M3FNUZ: attn_dtype = 6;
pub const ATTN_Q8_0: attn_dtype = 7;
pub const ATTN_Q4_0: attn_dtype = 8;
pub const ATTN_F64: attn_dtype = 9;
pub const ATTN_Q4_1: attn_dtype = 10;
pub const ATTN_Q5_0: attn_dtype = 11;
pub const ATTN_Q5_1: attn_dtype = 12;
pub const ATTN_IQ4_NL: attn_dtype = 13;
pub const ATTN_I8: attn_dtype = 14;
pub const ATTN_I4: attn_dtype = 15;
pub const ATTN_F8_E4M3FN_TOKEN: attn_dtype = 16;
pub const ATTN_NVFP4: attn_dtype = 17;
pub const ATTN_MLA_656: attn_dtype = 18;
pub const ATTN_MLA_584: attn_dtype = 19;

pub type attn_dtype_kind = c_int;
pub const ATTN_KIND_FLOAT: attn_dtype_kind = 1;
pub const ATTN_KIND_FP8: attn_dtype_kind = 2;
pub const ATTN_KIND_GGML: attn_dtype_kind = 3;
pub const ATTN_KIND_CODES: attn_dtype_kind = 4;
pub const ATTN_KIND_CACHE: attn_dtype_kind = 5;

pub type attn_layout = c_int;
pub const ATTN_PADDED: attn_layout = 0;
pub const ATTN_PACKED: attn_layout = 1;
pub const ATTN_PAGED: attn_layout = 2;

pub type attn_descale_kind = c_int;
pub const ATTN_DESCALE_NONE: attn_descale_kind = 0;
pub const ATTN_DESCALE_TENSOR: attn_descale_kind = 1;
pub const ATTN_DESCALE_HEAD: attn_descale_kind = 2;
pub const ATTN_DESCALE_BLOCK: attn_descale_kind = 3;

pub type attn_flag = u32;
pub const ATTN_CAUSAL: attn_flag = 1 << 0;
pub const ATTN_CAUSAL_TOP_LEFT: attn_flag = 1 << 1;
pub const ATTN_WINDOW: attn_flag = 1 << 2;
pub const ATTN_BLOCK_MASK: attn_flag = 1 << 3;
pub const ATTN_ALIBI: attn_flag = 1 << 4;
pub const ATTN_SINKS: attn_flag = 1 << 5;
pub const ATTN_OUT_SCALE: attn_flag = 1 << 6;
pub const ATTN_SPLIT_INVARIANT: attn_flag = 1 << 7;
pub const ATTN_KV_PREFIX_STABLE: attn_flag = 1 << 8;
pub const ATTN_BIAS_SLOPES: attn_flag = 1 << 9;
pub const ATTN_FP8_PRECISE: attn_flag = 1 << 10;
pub const ATTN_QUERY_POSITIONS: attn_flag = 1 << 11;
pub const ATTN_ACCUMULATE: attn_flag = 1 << 12;

pub type attn_block_kind = c_int;
pub const ATTN_BLOCK_EMPTY: attn_block_kind = 0;
pub const ATTN_BLOCK_CAUSAL: attn_block_kind = 1;
pub const ATTN_BLOCK_FULL: attn_block_kind = 2;
pub const ATTN_BLOCK_PARTIAL: attn_block_kind = 3;

pub type attn_gradient = u32;
pub const ATTN_GRAD_Q: attn_gradient = 1 << 0;
pub const ATTN_GRAD_K: attn_gradient = 1 << 1;
pub const ATTN_GRAD_V: attn_gradient = 1 << 2;
pub const ATTN_GRAD_SINKS: attn_gradient = 1 << 3;
pub const ATTN_GRAD_BIAS: attn_gradient = 1 << 4;

pub type attn_scale_source = c_int;
pub const ATTN_SCALE_ONE: attn_scale_source = 0;
pub const ATTN_SCALE_GIVEN: attn_scale_source = 1;
pub const ATTN_SCALE_AMAX: attn_scale_source = 2;

#[repr(C)]
pub struct attn_context {
    _private: [u8; 0],
}

#[repr(C)]
pub struct attn_plan {
    _private: [u8; 0],
}

#[repr(C)]
pub struct attn_block_mask {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_dtype_properties {
    pub struct_size: usize,
    pub type_: attn_dtype,
    pub name: *const c_char,
    pub kind: attn_dtype_kind,
    pub block_elements: i32,
    pub block_bytes: i32,
    pub has_scales: i32,
    pub output_only: i32,
    pub max_finite: f64,
    pub scale_bytes: i32,
    pub scale_elements: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct attn_strides {
    pub batch: i64,
    pub seq: i64,
    pub head: i64,
}

pub type attn_work = Option<unsafe extern "C" fn(data: *mut c_void, thread: i32)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_context_options {
    pub struct_size: usize,
    pub device: i32,
    pub cpu_threads: i32,
    pub driver_path: *const c_char,
    pub kernel_file: *const c_char,
    pub has_device: i32,
    pub interrupted: Option<unsafe extern "C" fn(user: *mut c_void) -> i32>,
    pub interrupted_user: *mut c_void,
    pub run_threads: Option<unsafe extern "C" fn(user: *mut c_void, threads: i32, work: attn_work, data: *mut c_void)>,
    pub run_threads_user: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_segment {
    pub struct_size: usize,
    pub k_type: attn_dtype,
    pub v_type: attn_dtype,
    pub layout: attn_layout,
    pub has_seqlens: i32,
    pub seqlen: i64,
    pub total: i64,
    pub num_pages: i64,
    pub page_size: i32,
    pub max_pages: i32,
    pub k_stride: attn_strides,
    pub v_stride: attn_strides,
    pub k_descale: attn_descale_kind,
    pub v_descale: attn_descale_kind,
    pub descale_block_keys: i32,
    pub k_scale_stride: attn_strides,
    pub v_scale_stride: attn_strides,
    pub shared: i32,
    pub list_size: i64,
    pub list_heads: i64,
    pub list_block: i32,
    pub list_queries: i32,
    pub list_of_pool: i32,
    pub has_list_lengths: i32,
    pub no_positions: i32,
    pub v_in_k: i32,
    pub key_interleave: i64,
    pub has_key_start: i32,
    pub key_ranks: i32,
    pub key_rank: i32,
    pub has_ready: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_problem {
    pub struct_size: usize,
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub seqlen_q: i64,
    pub total_q: i64,
    pub q_layout: attn_layout,
    pub q_type: attn_dtype,
    pub out_type: attn_dtype,
    pub q_descale: attn_descale_kind,
    pub q_stride: attn_strides,
    pub out_stride: attn_strides,
    pub num_segments: i32,
    pub segments: *const attn_segment,
    pub scale: f32,
    pub softcap: f32,
    pub flags: u32,
    pub window_left: i64,
    pub window_right: i64,
    pub bias_type: attn_dtype,
    pub bias_stride: [i64; 4],
    pub block_q: i32,
    pub block_k: i32,
    pub mask_batch: i64,
    pub mask_heads: i64,
    pub mask_partials: i64,
    pub fixed_split: i64,
    pub max_sms: i32,
    pub kernel: *const c_char,
    pub tree_keys: i64,
    pub has_kv_begin: i32,
    pub has_causal_sequences: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_segment_args {
    pub struct_size: usize,
    pub k: *const c_void,
    pub v: *const c_void,
    pub seqlens: *const i32,
    pub cu_seqlens: *const i32,
    pub block_table: *const i32,
    pub k_descale: *const f32,
    pub v_descale: *const f32,
    pub k_scale: *const c_void,
    pub v_scale: *const c_void,
    pub list: *const i32,
    pub list_lengths: *const i32,
    pub key_start: *const i64,
    pub ready: *const u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_args {
    pub struct_size: usize,
    pub q: *const c_void,
    pub out: *mut c_void,
    pub lse: *mut f32,
    pub cu_seqlens_q: *const i32,
    pub num_segments: i32,
    pub segments: *const attn_segment_args,
    pub bias: *const c_void,
    pub alibi_slopes: *const f32,
    pub sinks: *const f32,
    pub q_descale: *const f32,
    pub out_scale: *const f32,
    pub block_kinds: *const u8,
    pub block_index: *const i32,
    pub block_bits: *const u32,
    pub tree: *const u64,
    pub bias_slopes: *const f32,
    pub kv_begin: *const i32,
    pub causal_sequences: *const i32,
    pub query_start: *const i64,
    pub total_q: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_backward_problem {
    pub struct_size: usize,
    pub forward: *const attn_problem,
    pub d_out_type: attn_dtype,
    pub d_out_stride: attn_strides,
    pub gradients: u32,
    pub accumulate: u32,
    pub dq_type: attn_dtype,
    pub dk_type: attn_dtype,
    pub dv_type: attn_dtype,
    pub dq_stride: attn_strides,
    pub dk_stride: attn_strides,
    pub dv_stride: attn_strides,
    pub d_bias_type: attn_dtype,
    pub d_bias_stride: [i64; 4],
    pub kernel: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_backward_args {
    pub struct_size: usize,
    pub forward: *const attn_args,
    pub d_out: *const c_void,
    pub d_lse: *const f32,
    pub dq: *mut c_void,
    pub dk: *mut c_void,
    pub dv: *mut c_void,
    pub d_sinks: *mut f32,
    pub d_bias: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_merge_problem {
    pub struct_size: usize,
    pub batch: i64,
    pub heads_q: i64,
    pub seqlen_q: i64,
    pub head_dim_v: i64,
    pub num_parts: i32,
    pub part_type: attn_dtype,
    pub out_type: attn_dtype,
    pub part_stride: attn_strides,
    pub out_stride: attn_strides,
    pub kernel: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_merge_args {
    pub struct_size: usize,
    pub num_parts: i32,
    pub outs: *const *const c_void,
    pub lses: *const *const f32,
    pub out: *mut c_void,
    pub lse: *mut f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_quantize_problem {
    pub struct_size: usize,
    pub batch: i64,
    pub seqlen: i64,
    pub heads: i64,
    pub head_dim: i64,
    pub src_type: attn_dtype,
    pub dst_type: attn_dtype,
    pub src_stride: attn_strides,
    pub dst_stride: attn_strides,
    pub kind: attn_descale_kind,
    pub descale_block_keys: i32,
    pub scale: attn_scale_source,
    pub saturate: i32,
    pub kernel: *const c_char,
    pub scale_stride: attn_strides,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_quantize_args {
    pub struct_size: usize,
    pub src: *const c_void,
    pub dst: *mut c_void,
    pub descale: *mut f32,
    pub scale: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_kv_append_problem {
    pub struct_size: usize,
    pub batch: i64,
    pub heads_kv: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub seqlen_new: i64,
    pub total_new: i64,
    pub new_layout: attn_layout,
    pub new_type: attn_dtype,
    pub k_new_stride: attn_strides,
    pub v_new_stride: attn_strides,
    pub segment: attn_segment,
    pub kernel: *const c_char,
    pub advance_seqlens: i32,
    pub rotary_interleaved: i32,
    pub rotary_dim: i64,
    pub rotary_positions: i64,
    pub heads_q: i64,
    pub q_stride: attn_strides,
    pub q_out_stride: attn_strides,
    pub has_slots: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_kv_append_args {
    pub struct_size: usize,
    pub k_new: *const c_void,
    pub v_new: *const c_void,
    pub cu_seqlens_new: *const i32,
    pub cache: attn_segment_args,
    pub rotary_cos: *const f32,
    pub rotary_sin: *const f32,
    pub q: *const c_void,
    pub q_out: *mut c_void,
    pub seqlens_out: *mut i32,
    pub slot_mapping: *const i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_kv_roll_problem {
    pub struct_size: usize,
    pub batch: i64,
    pub heads_kv: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub recent: *const attn_segment,
    pub old: *const attn_segment,
    pub keep: i64,
    pub kernel: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_kv_roll_args {
    pub struct_size: usize,
    pub recent: *const attn_segment_args,
    pub old: *const attn_segment_args,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_block_mask_shape {
    pub struct_size: usize,
    pub batch: i64,
    pub heads: i64,
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    pub block_q: i32,
    pub block_k: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct attn_device {
    pub struct_size: usize,
    pub arch: *const c_char,
    pub multiprocessors: i32,
    pub shared_bytes_max: i64,
    pub l2_bytes: i64,
}

versioned!(
    attn_dtype_properties,
    attn_context_options,
    attn_segment,
    attn_problem,
    attn_segment_args,
    attn_args,
    attn_backward_problem,
    attn_backward_args,
    attn_merge_problem,
    attn_merge_args,
    attn_quantize_problem,
    attn_quantize_args,
    attn_kv_append_problem,
    attn_kv_append_args,
    attn_kv_roll_problem,
    attn_kv_roll_args,
    attn_block_mask_shape,
    attn_device,
);

#[link(name = "attn")]
extern "C" {
    pub fn attn_status_string(status: attn_status) -> *const c_char;
    pub fn attn_last_error() -> *const c_char;
    pub fn attn_version() -> *const c_char;
    pub fn attn_dtype_info(type_: attn_dtype) -> *const attn_dtype_properties;
    pub fn attn_context_create(backend: attn_backend, options: *const attn_context_options, context: *mut *mut attn_context)
        -> attn_status;
    pub fn attn_context_destroy(context: *mut attn_context);
    pub fn attn_context_backend(context: *const attn_context) -> attn_backend;
    pub fn attn_context_threads(context: *const attn_context) -> i32;
    pub fn attn_backend_string(backend: attn_backend) -> *const c_char;
    pub fn attn_alloc(context: *mut attn_context, bytes: usize, memory: *mut *mut c_void) -> attn_status;
    pub fn attn_free(context: *mut attn_context, memory: *mut c_void) -> attn_status;
    pub fn attn_copy_in(
        context: *mut attn_context,
        backend_dst: *mut c_void,
        host_src: *const c_void,
        bytes: usize,
        stream: *mut c_void,
    ) -> attn_status;
    pub fn attn_copy_out(
        context: *mut attn_context,
        host_dst: *mut c_void,
        backend_src: *const c_void,
        bytes: usize,
        stream: *mut c_void,
    ) -> attn_status;
    pub fn attn_synchronize(context: *mut attn_context, stream: *mut c_void) -> attn_status;
    pub fn attn_plan_create(context: *mut attn_context, problem: *const attn_problem, plan: *mut *mut attn_plan) -> attn_status;
    pub fn attn_plan_destroy(plan: *mut attn_plan);
    pub fn attn_plan_kernel(plan: *const attn_plan) -> *const c_char;
    pub fn attn_plan_workspace(plan: *const attn_plan) -> usize;
    pub fn attn_workspace_init(plan: *const attn_plan, workspace: *mut c_void, bytes: usize, stream: *mut c_void) -> attn_status;
    pub fn attn_run(
        plan: *const attn_plan,
        args: *const attn_args,
        workspace: *mut c_void,
        bytes: usize,
        stream: *mut c_void,
    ) -> attn_status;
    pub fn attn_check(plan: *const attn_plan, args: *const attn_args, stream: *mut c_void) -> attn_status;
    pub fn attn_plan_create_backward(
        context: *mut attn_context,
        problem: *const attn_backward_problem,
        plan: *mut *mut attn_plan,
    ) -> attn_status;
    pub fn attn_run_backward(
        plan: *const attn_plan,
        args: *const attn_backward_args,
        workspace: *mut c_void,
        bytes: usize,
        stream: *mut c_void,
    ) -> attn_status;
    pub fn attn_plan_create_merge(context: *mut attn_context, problem: *const attn_merge_problem, plan: *mut *mut attn_plan)
        -> attn_status;
    pub fn attn_run_merge(plan: *const attn_plan, args: *const attn_merge_args, stream: *mut c_void) -> attn_status;
    pub fn attn_plan_create_quantize(
        context: *mut attn_context,
        problem: *const attn_quantize_problem,
        plan: *mut *mut attn_plan,
    ) -> attn_status;
    pub fn attn_run_quantize(plan: *const attn_plan, args: *const attn_quantize_args, stream: *mut c_void) -> attn_status;
    pub fn attn_plan_create_kv_append(
        context: *mut attn_context,
        problem: *const attn_kv_append_problem,
        plan: *mut *mut attn_plan,
    ) -> attn_status;
    pub fn attn_run_kv_append(plan: *const attn_plan, args: *const attn_kv_append_args, stream: *mut c_void) -> attn_status;
    pub fn attn_plan_create_kv_roll(
        context: *mut attn_context,
        problem: *const attn_kv_roll_problem,
        plan: *mut *mut attn_plan,
    ) -> attn_status;
    pub fn attn_run_kv_roll(plan: *const attn_plan, args: *const attn_kv_roll_args, stream: *mut c_void) -> attn_status;
    pub fn attn_block_mask_from_dense(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        dense: *const u8,
        stream: *mut c_void,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_from_documents(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        lengths: *const i64,
        num_documents: i64,
        causal: i32,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_from_window(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        window_left: i64,
        window_right: i64,
        global_tokens: i64,
        prefix_tokens: i64,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_from_intervals(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        intervals: *const i32,
        num_intervals: i32,
        stream: *mut c_void,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_from_kinds(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        kinds: *const u8,
        index: *const i32,
        bits: *const u32,
        num_partials: i64,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_from_lists(
        context: *mut attn_context,
        shape: *const attn_block_mask_shape,
        lists: *const i32,
        list_size: i64,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_combine(
        context: *mut attn_context,
        a: *const attn_block_mask,
        b: *const attn_block_mask,
        combine: i32,
        mask: *mut *mut attn_block_mask,
    ) -> attn_status;
    pub fn attn_block_mask_apply(mask: *const attn_block_mask, problem: *mut attn_problem, args: *mut attn_args) -> attn_status;
    pub fn attn_block_mask_destroy(mask: *mut attn_block_mask);
    pub fn attn_info(text: *mut c_char, capacity: usize, size: *mut usize) -> attn_status;
    pub fn attn_explain(
        context: *mut attn_context,
        problem: *const attn_problem,
        text: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> attn_status;
    pub fn attn_explain_backward(
        context: *mut attn_context,
        problem: *const attn_backward_problem,
        text: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> attn_status;
    pub fn attn_explain_device(
        device: *const attn_device,
        problem: *const attn_problem,
        text: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> attn_status;
    pub fn attn_launch_count(kernel: *const c_char) -> u64;
}
