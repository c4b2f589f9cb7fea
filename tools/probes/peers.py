"""What other libraries do on the device: products of matrices by hipBLASLt, through PyTorch, and AITER's attention. Prints one
line of JSON; what is not importable is "not here". Run by tools/silicon in a process of its own.
"""
import json
import statistics

SHAPES = [(8192, 8192, 8192), (4096, 4096, 16384), (16384, 8192, 4096)]
ATTENTION = {"prefill": (4, 32, 4096, False), "prefill, causal": (4, 32, 4096, True), "long, causal": (1, 16, 16384, True)}


def microseconds(torch, call):
    """The median of 20 timings of at least 5 ms each."""
    def once(count):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / count
    once(3)
    count = max(1, int(5e3 / once(5)))
    return statistics.median(once(count) for _ in range(20))


def gemm(torch):
    """The best rate of several shapes, TFLOP/s, in bf16 and in fp8."""
    one = torch.ones((), device="cuda")
    found = {}
    for name, dtype in ("bf16", torch.bfloat16), ("f8_e4m3fnuz", torch.float8_e4m3fnuz):
        rates = []
        for m, n, k in SHAPES:
            a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16).to(dtype)
            b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).to(dtype).t()
            if dtype is torch.bfloat16:
                def call(a=a, b=b):
                    return a @ b
            else:
                def call(a=a, b=b):
                    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            rates.append(2e-6 * m * n * k / microseconds(torch, call))
        found[f"{name}, TFLOP/s"] = round(max(rates), 1)
    return found


def aiter_attention(torch):
    import aiter
    one = torch.ones(1, device="cuda")
    found = {}
    for name, (batch, heads, seqlen, causal) in ATTENTION.items():
        operations = 4 * batch * heads * 128 * (seqlen * (seqlen + 1) / 2 if causal else seqlen ** 2)
        q, k, v = (torch.randn(batch, seqlen, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        eight = [x.to(torch.float8_e4m3fnuz) for x in (q, k, v)]
        for kind, call in [("bf16", lambda: aiter.flash_attn_func(q, k, v, causal=causal)),
                           ("f8_e4m3fnuz", lambda: aiter.flash_attn_fp8_pertensor_func(*eight, one, one, one, causal=causal))]:
            try:
                found[f"{kind} {name}, TFLOP/s"] = round(operations / microseconds(torch, call) * 1e-6, 1)
            except (RuntimeError, AttributeError, TypeError) as error:
                found[f"{kind} {name}"] = (str(error) or type(error).__name__).splitlines()[0]
    return found


def main():
    report = {}
    try:
        import torch
        if not torch.version.hip:
            raise ImportError("PyTorch here is not built for ROCm")
        if not torch.cuda.is_available():
            raise ImportError("PyTorch sees no device")
    except ImportError as error:
        why = {"not here": str(error)}
        print(json.dumps({"hipBLASLt, through PyTorch": why, "AITER": why}))
        return
    for name, measure in ("hipBLASLt, through PyTorch", gemm), ("AITER", aiter_attention):
        try:
            report[name] = measure(torch)
        except Exception as error:  # each package has its own for "not on this device"
            report[name] = {"not here": (str(error) or type(error).__name__).splitlines()[0]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
