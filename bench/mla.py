"""Times decode over a latent cache (docs/mla.md): bf16 rows of 576, of which 512 are V too, in pages of 64 in random order.

    python3 bench/mla.py --lib build/release/lib/libattn.so --read build/release/kernels/read_cuda.compute_80.ptx
    python3 bench/mla.py --lib chosen=libattn.so --lib r32=libattn.so@mla_sm90_bf16_d576_r32 --flashmla _flashmla_C.abi3.so

A figure is microseconds per launch of a graph of up to 50, over caches in turn that are larger than 200 MB together. GB/s
count the cache once. The number after | is the largest error of an output of the first and last sequence against
float64, in units of the largest output. --flashmla: FlashMLA as vllm's wheel has it. `read`: bench/decode.py.
"""
import argparse
import ctypes as c
import math
import pathlib
import statistics
from dataclasses import asdict, dataclass

from peers import add_options, libraries_of

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = 192 ** -0.5
COLD_BYTES = 200 << 20


@dataclass(frozen=True)
class Cell:
    batch: int
    seqlen: int
    heads: int
    seqlen_q: int = 1
    warm: bool = False

    @property
    def name(self):
        return f"B{self.batch} {self.seqlen} {self.heads} heads" + (f" q{self.seqlen_q}" if self.seqlen_q > 1 else "")

    @property
    def kv_bytes(self):
        return 2 * (LATENT + ROPE) * self.batch * self.seqlen


CELLS = [Cell(*shape) for shape in ((64, 8192, 8), (64, 8192, 16), (64, 8192, 64), (64, 8192, 128), (128, 4096, 128), (1, 65536, 16),
                                    (1, 65536, 128), (8, 32768, 16), (1, 8192, 128), (64, 8192, 16, 2), (64, 8192, 16, 4),
                                    (32, 4096, 128, 2))]


def inputs_of(torch, cell):
    generator = torch.Generator("cuda").manual_seed(1)
    sets = max(1, math.ceil(COLD_BYTES / cell.kv_bytes))
    pages = cell.batch * cell.seqlen // PAGE
    table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).view(cell.batch, -1)
    lengths = torch.full((cell.batch,), cell.seqlen, device="cuda", dtype=torch.int32)
    q = torch.randn(cell.batch, cell.seqlen_q, cell.heads, LATENT + ROPE, device="cuda", generator=generator).to(torch.bfloat16)
    caches = [torch.randn(pages, PAGE, 1, LATENT + ROPE, device="cuda", generator=generator, dtype=torch.bfloat16)
              for _ in range(sets)]
    return q, caches, table, lengths


def expected(torch, cell, q, cache, table, b):
    rows = cache[table[b].long()].view(-1, LATENT + ROPE).double()
    scores = torch.einsum("qhd,kd->hqk", q[b].double(), rows) * SCALE
    seen = torch.arange(cell.seqlen, device="cuda") <= torch.arange(cell.seqlen_q, device="cuda")[:, None] + cell.seqlen - cell.seqlen_q
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), rows[:, :LATENT])


def libattn_calls(torch, library, kernel, cell, q, caches, table, lengths, named):
    from contenders import CAUSAL, TYPE_OF, Args, Plan, Problem, Segment, SegmentArgs, make

    class LatentSegment(Segment):
        _fields_ = [("shared", c.c_int32), ("list_size", c.c_int64), ("list_heads", c.c_int64)] + [
            (n, c.c_int32) for n in ("list_block", "list_queries", "list_of_pool", "has_list_lengths", "no_positions", "v_in_k")]
    segment = make(LatentSegment, k_type=TYPE_OF[q.dtype], layout=2, num_pages=caches[0].shape[0], page_size=PAGE,
                   max_pages=table.shape[1], has_seqlens=1, v_in_k=1)
    problem = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=1, head_dim=LATENT + ROPE, head_dim_v=LATENT,
                   seqlen_q=cell.seqlen_q, q_type=TYPE_OF[q.dtype], num_segments=1, scale=SCALE, flags=CAUSAL,
                   segments=c.cast(c.pointer(segment), c.POINTER(Segment)), kernel=kernel.encode() or None)
    plan = Plan(library, problem)
    named.append(plan.kernel)
    out = torch.empty(*q.shape[:3], LATENT, device="cuda", dtype=q.dtype)

    def call(cache):
        of = make(SegmentArgs, k=cache.data_ptr(), seqlens=lengths.data_ptr(), block_table=table.data_ptr())
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=1, segments=c.pointer(of))
        return lambda keep=of: (plan.run(args), out)[1]
    return [call(cache) for cache in caches]


def flashmla_calls(torch, path, cell, q, caches, table, lengths):
    torch.ops.load_library(path)
    decode = torch.ops._flashmla_C.dense_decode_fwd
    _, _, metadata, splits = decode(q, caches[0], LATENT, lengths, table, SCALE, True, None, None, None)
    return [lambda cache=cache: decode(q, cache, LATENT, lengths, table, SCALE, True, metadata, splits, None)[0] for cache in caches]


def measure(options):
    import torch
    from decode import read_calls
    from timing import Launches, Nvml, result_of, save, take_rounds
    torch.zeros(1, device="cuda")
    libraries, nvml = libraries_of(options.lib), Nvml()
    result = result_of(options, nvml)
    for cell in CELLS:
        if options.cells and options.cells not in cell.name:
            continue
        inputs = inputs_of(torch, cell)
        q, caches, table, lengths = inputs
        row = {**asdict(cell), "name": cell.name, "kv_bytes": cell.kv_bytes, "kernels": {}, "missing": {}, "errors": {}}
        calls, size = {}, cell.kv_bytes

        def add(name, make_calls):
            try:
                made = make_calls()
                got = made[0]()
                torch.cuda.synchronize()
                if name != "read":
                    wants = {b: expected(torch, cell, q, caches[0], table, b) for b in {0, cell.batch - 1}}
                    error = max(((got[b].double() - want).abs().max() / want.abs().max()).item() for b, want in wants.items())
                    row["errors"][name] = error if math.isfinite(error) else "not finite"
                    del wants
                calls[name] = made
            except Exception as error:  # what a contender lacks
                row["missing"][name] = (str(error) or type(error).__name__).splitlines()[0][:200]
        for label, (library, kernel) in libraries.items():
            named = []
            add(label, lambda: libattn_calls(torch, library, kernel, cell, *inputs, named))
            row["kernels"][label] = named[0] if named else None
        if options.flashmla:
            add("flashmla", lambda: flashmla_calls(torch, str(pathlib.Path(options.flashmla).resolve()), cell, *inputs))
        if options.read:
            def reading():
                nonlocal size
                made, size = read_calls(options.read, cell, torch)
                return made
            add("read", reading)
        launches = {name: Launches(made, options.ms, options.settle) for name, made in calls.items()}
        row["rounds_us"], row["clocks"] = take_rounds(launches, options.rounds, nvml)
        row["us"] = {name: statistics.median(times) for name, times in row["rounds_us"].items()}
        if "read" in row["us"]:
            row["us"]["read"] *= cell.kv_bytes / size
        flops = 2 * cell.batch * cell.seqlen * cell.seqlen_q * cell.heads * (2 * LATENT + ROPE)
        print(f"{cell.name:24}" + "".join(f"  {name} {us:7.2f} us {cell.kv_bytes / us / 1e3:5.0f} GB/s {flops / us / 1e6:4.0f} TFLOP/s"
                                          for name, us in row["us"].items()) +
              "  |" + "".join(f" {name} {error if isinstance(error, str) else f'{error:.1e}'}" for name, error in row["errors"].items()) +
              "".join(f" [{name}: {why}]" for name, why in row["missing"].items()), flush=True)
        result["cells"].append(row)
        del inputs, q, caches, table, lengths, calls, launches
        torch.cuda.empty_cache()
        save(options, result, nvml)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, ms=40, settle=20)
    parser.add_argument("--flashmla", metavar="FILE", help="vllm's _flashmla_C.abi3.so")
    parser.add_argument("--read", metavar="FILE", help="read_cuda as PTX or cubin")
    parser.add_argument("--cells", default="", metavar="TEXT", help="part of names of cells")
    measure(parser.parse_args())
