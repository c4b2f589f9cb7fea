//! Runs on the CPU, against the formula in f64.
use attn_sys::*;
use std::ffi::{c_char, CStr};
use std::ptr::{null, null_mut};

const B: usize = 2;
const SQ: usize = 3;
const SKV: usize = 7;
const HQ: usize = 4;
const HKV: usize = 2;
const D: usize = 8;

fn numbers(count: usize, mut state: u64) -> Vec<f32> {
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn text(of: *const c_char) -> String {
    unsafe { CStr::from_ptr(of) }.to_str().unwrap().to_string()
}

fn good(status: attn_status) {
    assert_eq!(status, ATTN_OK, "{}", text(unsafe { attn_last_error() }));
}

struct Call {
    context: *mut attn_context,
    plan: *mut attn_plan,
}
impl Drop for Call {
    fn drop(&mut self) {
        unsafe {
            attn_plan_destroy(self.plan);
            attn_context_destroy(self.context);
        }
    }
}

/// Causal, with hidden keys before kv_begin.
#[test]
fn forward_is_the_formula() {
    let (q, k, v) = (
        numbers(B * SQ * HQ * D, 1),
        numbers(B * SKV * HKV * D, 2),
        numbers(B * SKV * HKV * D, 3),
    );
    let mut out = vec![0f32; q.len()];
    let mut lse = vec![0f32; B * HQ * SQ];
    let begin = [0i32, 2];

    let mut segment = attn_segment::new();
    segment.k_type = ATTN_F32;
    segment.v_type = ATTN_F32;
    segment.seqlen = SKV as i64;
    let mut problem = attn_problem::new();
    problem.batch = B as i64;
    problem.heads_q = HQ as i64;
    problem.heads_kv = HKV as i64;
    problem.head_dim = D as i64;
    problem.seqlen_q = SQ as i64;
    problem.q_type = ATTN_F32;
    problem.num_segments = 1;
    problem.segments = &segment;
    problem.flags = ATTN_CAUSAL;
    problem.has_kv_begin = 1;

    let mut call = Call {
        context: null_mut(),
        plan: null_mut(),
    };
    good(unsafe { attn_context_create(ATTN_BACKEND_CPU, null(), &mut call.context) });
    good(unsafe { attn_plan_create(call.context, &problem, &mut call.plan) });
    let kernel = unsafe { attn_plan_kernel(call.plan) };
    assert!(text(kernel).starts_with("cpu_"), "{}", text(kernel));

    let mut keys = attn_segment_args::new();
    keys.k = k.as_ptr().cast();
    keys.v = v.as_ptr().cast();
    let mut args = attn_args::new();
    args.q = q.as_ptr().cast();
    args.out = out.as_mut_ptr().cast();
    args.lse = lse.as_mut_ptr();
    args.num_segments = 1;
    args.segments = &keys;
    args.kv_begin = begin.as_ptr();
    let bytes = unsafe { attn_plan_workspace(call.plan) };
    let mut workspace = null_mut();
    good(unsafe { attn_alloc(call.context, bytes.max(1), &mut workspace) });
    good(unsafe { attn_workspace_init(call.plan, workspace, bytes, null_mut()) });
    let before = unsafe { attn_launch_count(kernel) };
    good(unsafe { attn_run(call.plan, &args, workspace, bytes, null_mut()) });
    assert_eq!(unsafe { attn_launch_count(kernel) }, before + 1);
    good(unsafe { attn_free(call.context, workspace) });

    for b in 0..B {
        for i in 0..SQ {
            for h in 0..HQ {
                let row = |x: &[f32], j: usize, d: usize| x[((b * SKV + j) * HKV + h / (HQ / HKV)) * D + d] as f64;
                let seen: Vec<usize> = (begin[b] as usize..=i + SKV - SQ).collect();
                let weights: Vec<f64> = seen
                    .iter()
                    .map(|&j| {
                        ((0..D)
                            .map(|d| q[((b * SQ + i) * HQ + h) * D + d] as f64 * row(&k, j, d))
                            .sum::<f64>()
                            / (D as f64).sqrt())
                        .exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                assert!((lse[(b * HQ + h) * SQ + i] as f64 - total.ln()).abs() < 1e-6);
                for d in 0..D {
                    let want: f64 = seen.iter().zip(&weights).map(|(&j, w)| w * row(&v, j, d)).sum::<f64>() / total;
                    assert!((out[((b * SQ + i) * HQ + h) * D + d] as f64 - want).abs() < 2e-6);
                }
            }
        }
    }
}

#[test]
fn errors_are_sentences() {
    let mut context = null_mut();
    good(unsafe { attn_context_create(ATTN_BACKEND_CPU, null(), &mut context) });
    let mut plan = null_mut();
    let problem = attn_problem::new();
    assert_eq!(unsafe { attn_plan_create(context, &problem, &mut plan) }, ATTN_INVALID_ARGUMENT);
    assert_eq!(text(unsafe { attn_last_error() }), "heads_q is 0; accepted: 1 to 2147483647");
    unsafe { attn_context_destroy(context) };
    assert_eq!(text(unsafe { (*attn_dtype_info(ATTN_Q8_0)).name }), "q8_0");
}
