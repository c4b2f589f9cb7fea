"""Times libattn beside whatever else is importable: the same tensors, one process, rounds interleaved.

    python3 bench/peers.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/peers.py --plot docs/measured/NAME.json --png docs/measured/NAME.png

Contenders: PyTorch's scaled_dot_product_attention with cuDNN and FlashAttention-2, FlashAttention-3 and FlashInfer where
installed. Cases that take less than 200 us are timed as one CUDA graph of 50 launches, for every contender alike. Each
figure is the median over rounds; every round times all contenders one behind the other. cuDNN is the live anchor: figures
taken in different runs compare only through their ratio to it.
"""
import argparse
import ctypes as c
import datetime
import json
import pathlib
import statistics
import subprocess
import sys

# ---- libattn through ctypes: attn.h, field by field -------------------------------------------------------------------

F32, F16, BF16 = 1, 2, 3
CAUSAL = 1
CUDA = 3


class Strides(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ("batch", "seq", "head")]


class Segment(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("k_type", c.c_int), ("v_type", c.c_int), ("layout", c.c_int),
                ("has_seqlens", c.c_int32), ("seqlen", c.c_int64), ("total", c.c_int64), ("num_pages", c.c_int64),
                ("page_size", c.c_int32), ("max_pages", c.c_int32), ("k_stride", Strides), ("v_stride", Strides),
                ("k_descale", c.c_int), ("v_descale", c.c_int), ("descale_block_keys", c.c_int32)]


class Problem(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("batch", c.c_int64), ("heads_q", c.c_int64), ("heads_kv", c.c_int64),
                ("head_dim", c.c_int64), ("head_dim_v", c.c_int64), ("seqlen_q", c.c_int64), ("total_q", c.c_int64),
                ("q_layout", c.c_int), ("q_type", c.c_int), ("out_type", c.c_int), ("q_descale", c.c_int),
                ("q_stride", Strides), ("out_stride", Strides), ("num_segments", c.c_int32),
                ("segments", c.POINTER(Segment)), ("scale", c.c_float), ("softcap", c.c_float), ("flags", c.c_uint32),
                ("window_left", c.c_int64), ("window_right", c.c_int64), ("bias_type", c.c_int),
                ("bias_stride", c.c_int64 * 4), ("block_q", c.c_int32), ("block_k", c.c_int32), ("mask_batch", c.c_int64),
                ("mask_heads", c.c_int64), ("mask_partials", c.c_int64), ("fixed_split", c.c_int64), ("max_sms", c.c_int32),
                ("kernel", c.c_char_p)]


class SegmentArgs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(n, c.c_void_p) for n in (
        "k", "v", "seqlens", "cu_seqlens", "block_table", "k_descale", "v_descale")]


class Args(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("q", c.c_void_p), ("out", c.c_void_p), ("lse", c.c_void_p),
                ("cu_seqlens_q", c.c_void_p), ("num_segments", c.c_int32), ("segments", c.POINTER(SegmentArgs))] + [
                    (n, c.c_void_p) for n in ("bias", "alibi_slopes", "sinks", "q_descale", "out_scale", "block_kinds",
                                              "block_index", "block_bits")]


def make(kind, **fields):
    return kind(struct_size=c.sizeof(kind), **fields)


class Libattn:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        for name in ("attn_last_error", "attn_plan_kernel", "attn_version"):
            getattr(self.lib, name).restype = c.c_char_p
        self.lib.attn_plan_workspace.restype = c.c_size_t
        self.lib.attn_plan_kernel.argtypes = self.lib.attn_plan_workspace.argtypes = [c.c_void_p]
        self.context = c.c_void_p()
        self.check(self.lib.attn_context_create(CUDA, None, c.byref(self.context)))

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.attn_last_error().decode())

    def forward(self, torch, q, k, v, causal):
        """A call that launches on PyTorch's current stream, its output, and the kernel's name. q, k, v [B, S, H, D]."""
        kind = {torch.bfloat16: BF16, torch.float16: F16}[q.dtype]
        out = torch.empty(q.shape[:3] + v.shape[3:], dtype=q.dtype, device=q.device)
        segment = make(Segment, k_type=kind, v_type=kind, seqlen=k.shape[1])
        problem = make(Problem, batch=q.shape[0], heads_q=q.shape[2], heads_kv=k.shape[2], head_dim=q.shape[3],
                       head_dim_v=v.shape[3], seqlen_q=q.shape[1], q_type=kind, num_segments=1, segments=c.pointer(segment),
                       flags=CAUSAL if causal else 0)
        plan = c.c_void_p()
        self.check(self.lib.attn_plan_create(self.context, c.byref(problem), c.byref(plan)))
        size = self.lib.attn_plan_workspace(plan)
        space = torch.zeros(max(size, 1), dtype=torch.uint8, device=q.device)
        segment_args = make(SegmentArgs, k=k.data_ptr(), v=v.data_ptr())
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=1, segments=c.pointer(segment_args))
        run, pointer, memory, bytes_ = self.lib.attn_run, c.byref(args), c.c_void_p(space.data_ptr()), c.c_size_t(size)

        def call(keep=(q, k, v, out, space, segment_args, args)):
            self.check(run(plan, pointer, memory, bytes_, c.c_void_p(torch.cuda.current_stream().cuda_stream)))
            return out
        return call, self.lib.attn_plan_kernel(plan).decode()


# ---- peers ------------------------------------------------------------------------------------------------------------

def contenders(torch, library, q, k, v, causal, missing):
    """name -> call, for what is here; reasons for the rest go into `missing`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    calls = {}
    call, kernel = library.forward(torch, q, k, v, causal)
    calls["libattn"] = call
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    gqa = q.shape[2] != k.shape[2]

    def sdpa(backend):
        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=gqa).transpose(1, 2)
        return run
    calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    calls["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION)
    try:
        from flash_attn_interface import flash_attn_func
        calls["fa3"] = lambda: flash_attn_func(q, k, v, causal=causal)
    except ImportError as error:
        missing["fa3"] = str(error)
    try:
        import flashinfer
        if q.shape[0] == 1:
            calls["flashinfer"] = lambda: flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=causal)[None]
    except ImportError as error:
        missing["flashinfer"] = str(error)
    return calls, kernel


def timer(torch, call):
    """A function that returns microseconds per call of one round."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    once = start.elapsed_time(stop) * 1e3
    batch, launch = 1, call
    if once < 200:
        batch = 50
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(batch):
                call()
        launch = graph.replay
    repeats = max(3, int(20e3 / max(once * batch, 1)))

    def round_():
        launch()
        start.record()
        for _ in range(repeats):
            launch()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3 / repeats / batch
    return round_


def gpu_state():
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    text = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True).stdout
    return dict(zip(fields.split(","), (x.strip() for x in text.splitlines()[0].split(",")))) if text else {}


def measure(options):
    import torch
    library = Libattn(options.lib)
    dtype = getattr(torch, options.dtype)
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "libattn": library.lib.attn_version().decode(),
              "gpu": gpu_state(), "dtype": options.dtype, "rounds": options.rounds, "missing": {}, "cases": []}
    for dim in options.dims:
        for causal in (False, True):
            for seqlen in options.seqlens:
                batch, heads = max(1, 16384 // seqlen), 2048 // dim
                torch.manual_seed(0)
                q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype) for _ in range(3))
                calls, kernel = contenders(torch, library, q, k, v, causal, result["missing"])
                outs = {name: call().float() for name, call in calls.items()}
                error = {name: ((out - outs["cudnn"]).norm() / outs["cudnn"].norm()).item() for name, out in outs.items()}
                timers = {name: timer(torch, call) for name, call in calls.items()}
                rounds = {name: [] for name in timers}
                for _ in range(options.rounds):
                    for name, round_ in timers.items():
                        rounds[name].append(round_())
                state = gpu_state()
                flop = 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
                row = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": dim, "causal": causal, "kernel": kernel,
                       "us": {n: statistics.median(r) for n, r in rounds.items()}, "worst_us": {n: max(r) for n, r in rounds.items()},
                       "difference_to_cudnn": error, "sm_clock": state.get("clocks.sm"), "power": state.get("power.draw")}
                row["tflops"] = {n: flop / us / 1e6 for n, us in row["us"].items()}
                result["cases"].append(row)
                print(f"d{dim} {'causal' if causal else 'full':6} {seqlen:6}  " + "  ".join(
                    f"{n} {t:6.1f}" for n, t in row["tflops"].items()) + "  libattn/" + " ".join(
                        f"{n} {row['us'][n] / row['us']['libattn']:.3f}" for n in row["us"] if n != "libattn") +
                      f"  {row['sm_clock']} {row['power']}  diff {error['libattn']:.1e}", flush=True)
    pathlib.Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    for name in result["cases"][0]["us"]:
        if name != "libattn":
            ratios = [row["us"][name] / row["us"]["libattn"] for row in result["cases"] if name in row["us"]]
            print(f"libattn against {name}: geometric mean {statistics.geometric_mean(ratios):.3f}, lowest {min(ratios):.3f}")
    for name, reason in result["missing"].items():
        print(f"{name}: not here: {reason}")


def plot(options):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    result = json.loads(pathlib.Path(options.plot).read_text())
    dims = sorted({row["head_dim"] for row in result["cases"]})
    figure, axes = plt.subplots(2, len(dims), figsize=(4.2 * len(dims), 6.4), sharey=True, squeeze=False)
    for at, dim in enumerate(dims):
        for line, causal in enumerate((False, True)):
            rows = [r for r in result["cases"] if r["head_dim"] == dim and r["causal"] == causal]
            names = list(rows[0]["tflops"])
            for n, name in enumerate(names):
                axes[line][at].bar([x + n / (len(names) + 1) for x in range(len(rows))], [r["tflops"][name] for r in rows],
                                   1 / (len(names) + 1), label=name)
            axes[line][at].set_xticks([x + 0.3 for x in range(len(rows))], [str(r["seqlen"]) for r in rows])
            axes[line][at].set_title(f"head_dim {dim}, {'causal' if causal else 'full'}")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[1][0].set_ylabel("TFLOP/s")
    axes[0][0].legend()
    figure.suptitle(f"{result['dtype']} forward, {result['gpu'].get('name', '')}, {result['date']}")
    figure.tight_layout()
    figure.savefig(options.png, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/release/lib/libattn.so")
    parser.add_argument("--out", default="peers.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--plot", help="draw this result instead of measuring")
    parser.add_argument("--png", default="peers.png")
    options = parser.parse_args()
    plot(options) if options.plot else measure(options)


if __name__ == "__main__":
    sys.exit(main())
