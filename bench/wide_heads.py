"""Times heads of 512/512, 320/256 and 256/256 (columns of Q and K / of V): prefill and decode, bf16.

    python3 bench/wide_heads.py --lib build/release/lib/libattn.so
    python3 bench/wide_heads.py --lib build/release/lib/libattn.so --only 512/512 --out docs/measured/NAME.json

A row for each contender: the plan's kernel of libattn; `cudnn`, by nvidia-cudnn-frontend, and PyTorch's sdpa, where they are
here and take the call; without pages, softcap and e4m3. ms: the median of the rounds, in which contenders of a row take turns,
min_ms: the fastest, of a launch of a graph of up to 50. tflops: causal counts half of the products; gbs: bytes of K and V,
which are larger than 200 MB, in turn if need be. largest_error: of an output of three queries against float64, in
units of the largest output. clocks: while it ran.
"""
import argparse
import math
import statistics
from dataclasses import dataclass

from peers import add_options, libraries_of

COLD_BYTES = 200 << 20
PAGE = 64


@dataclass(frozen=True)
class Cell:
    dim: int
    dim_v: int
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    causal: bool = False
    decode: bool = False
    variant: str = ""  # "pages of 64", "softcap", "e4m3"

    @property
    def shape(self):
        return (f"{'decode ' if self.decode else ''}{self.dim}/{self.dim_v} B{self.batch} H{self.heads}/{self.heads_kv} {self.seqlen}" +
                ("" if self.decode else " causal" if self.causal else " full"))

    @property
    def name(self):
        return f"{self.shape} {self.variant}".rstrip()

    @property
    def queries(self):
        return 1 if self.decode else self.seqlen

    @property
    def kv_bytes(self):
        return self.batch * self.heads_kv * self.seqlen * (self.dim + self.dim_v) * (1 if self.variant == "e4m3" else 2)

    @property
    def flops(self):
        return 2 * self.batch * self.heads * self.seqlen ** 2 * (self.dim + self.dim_v) / (2 if self.causal else 1)


def all_cells():
    cells = []
    for dims in ((512, 512), (320, 256), (256, 256)):
        shapes = [(1, 16, 2, 8192)] + ([(1, 8, 8, 8192), (4, 32, 4, 2048), (1, 32, 4, 4096)] if dims[0] == 512 else [])
        cells += [Cell(*dims, *shape, causal, variant=variant) for shape in shapes for causal in (False, True)
                  for variant in (("", f"pages of {PAGE}", "softcap") if shape == shapes[0] else ("",))]
    for dims in ((512, 512), (320, 256), (256, 256)):
        shapes = [(16, 32, 4, 8192)] + ([(64, 32, 4, 2048), (1, 32, 4, 32768)] if dims[0] == 512 else [])
        cells += [Cell(*dims, *shape, decode=True, variant=variant) for shape in shapes for variant in ("", f"pages of {PAGE}", "e4m3")]
    return cells


def inputs_of(torch, cell):
    """q, sets of k and v [B, S, H, D] or pages of them, and the table."""
    torch.manual_seed(0)
    paged = cell.variant.startswith("pages")
    q = torch.randn(cell.batch, cell.queries, cell.heads, cell.dim, device="cuda", dtype=torch.bfloat16)
    pages = cell.batch * cell.seqlen // PAGE
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(cell.batch, -1).contiguous() if paged else None

    def one(dim):
        x = torch.randn(*((pages, PAGE) if paged else (cell.batch, cell.seqlen)), cell.heads_kv, dim, device="cuda", dtype=torch.bfloat16)
        return x.to(torch.float8_e4m3fn) if cell.variant == "e4m3" else x
    sets = max(1, math.ceil(COLD_BYTES / cell.kv_bytes)) if cell.decode else 1
    return q, [(one(cell.dim), one(cell.dim_v)) for _ in range(sets)], table


def expected(torch, cell, q, k, v, table, b, i):
    """Of query i of sequence b: [heads, dim_v]."""
    def rows(x):
        x = x.view(torch.uint8)[table[b].long()].flatten(0, 1).view(x.dtype) if table is not None else x[b]
        return x[:i + 1 if cell.causal else None].double().repeat_interleave(cell.heads // cell.heads_kv, 1)
    scores = torch.einsum("hd,khd->hk", q[b, i].double(), rows(k)) * cell.dim ** -0.5
    if cell.variant == "softcap":
        scores = 30 * (scores / 30).tanh()
    return torch.einsum("hk,khd->hd", scores.softmax(-1), rows(v))


# ---- contenders: a call per set -----------------------------------------------------------------------------------------

def libattn_calls(torch, library, kernel, cell, q, sets, table, named):
    import ctypes as c
    from contenders import CAUSAL, TYPE_OF, Args, Plan, Problem, Segment, SegmentArgs, make
    kind = TYPE_OF[sets[0][0].dtype]
    layout = dict(seqlen=cell.seqlen) if table is None else dict(
        layout=2, num_pages=sets[0][0].shape[0], page_size=PAGE, max_pages=table.shape[1])
    segment = make(Segment, k_type=kind, v_type=kind, **layout)
    problem = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=cell.heads_kv, head_dim=cell.dim, head_dim_v=cell.dim_v,
                   seqlen_q=cell.queries, q_type=TYPE_OF[q.dtype], num_segments=1, segments=c.pointer(segment),
                   flags=CAUSAL if cell.causal else 0, softcap=30 if cell.variant == "softcap" else 0, kernel=kernel.encode() or None)
    plan = Plan(library, problem)
    named.append(plan.kernel)
    out = torch.empty(*q.shape[:3], cell.dim_v, device="cuda", dtype=q.dtype)

    def call(k, v):
        of = make(SegmentArgs, k=k.data_ptr(), v=v.data_ptr(), block_table=table.data_ptr() if table is not None else None)
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=1, segments=c.pointer(of))
        return lambda keep=of: (plan.run(args), out)[1]
    return [call(k, v) for k, v in sets]


def cudnn_calls(torch, cell, q, sets):
    import cudnn
    from contenders import built_by_cudnn
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, handle=handle)

    def tensor(x):
        x = x.transpose(1, 2)
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=cudnn.data_type.BFLOAT16)
    inputs = [tensor(x) for x in (q, *sets[0])]
    o, _ = graph.sdpa(q=inputs[0], k=inputs[1], v=inputs[2], is_inference=True, attn_scale=cell.dim ** -0.5,
                      use_causal_mask=cell.causal, name="sdpa")
    out = torch.empty(*q.shape[:3], cell.dim_v, device="cuda", dtype=q.dtype)
    heads_first = out.transpose(1, 2)
    o.set_output(True).set_dim(list(heads_first.shape)).set_stride(list(heads_first.stride()))
    space = built_by_cudnn(graph)

    def call(k, v):
        pack = {**dict(zip(inputs, (x.transpose(1, 2) for x in (q, k, v)))), o: heads_first}

        def run():
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(pack, space, handle=handle)
            return out
        return run
    return [call(k, v) for k, v in sets]


def sdpa_calls(torch, backend, cell, q, sets):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    group = cell.heads // cell.heads_kv
    q = q.transpose(1, 2)

    def call(k, v):
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))

        def run():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal).transpose(1, 2)
        return run
    return [call(k, v) for k, v in sets]


def contenders_of(torch, options, libraries, cell, q, sets, table, named):
    found = {label: lambda of=of, label=label: libattn_calls(torch, *of, cell, q, sets, table, named.setdefault(label, []))
             for label, of in libraries.items()}
    if not cell.variant and not options.alone:
        found["cudnn"] = lambda: cudnn_calls(torch, cell, q, sets)
        if not cell.decode:
            for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
                found["sdpa " + backend] = lambda backend=backend: sdpa_calls(torch, backend, cell, q, sets)
    return found


def measure(options):
    import torch
    from timing import Launches, Nvml, result_of, save, take_rounds
    torch.zeros(1, device="cuda")
    libraries, nvml = libraries_of(options.lib), Nvml()
    result = result_of(options, nvml, cudnn=torch.backends.cudnn.version())
    try:
        import cudnn
        result["cudnn_frontend"] = cudnn.__version__
    except Exception as error:
        print(f"cudnn: {error}", flush=True)
    result["what"] = ("bf16; causal counts half of the products; by: the kernel or the peer; ms: the median, min_ms: the fastest; gbs: bytes of K and V; "
                      "sdpa has K and V of each query head")
    result["rows"] = []
    del result["cells"]
    for cell in all_cells():
        if options.only not in cell.name:
            continue
        q, sets, table = inputs_of(torch, cell)
        some = {(0, 0), (cell.batch - 1, cell.queries - 1), (0, cell.queries // 2)}
        wants = {(b, i): expected(torch, cell, q, *sets[0], table, b, i) for b, i in some}
        named, calls, errors, missing = {}, {}, {}, {}
        for label, make_calls in contenders_of(torch, options, libraries, cell, q, sets, table, named).items():
            try:
                made = make_calls()
                got = made[0]()
                torch.cuda.synchronize()
                errors[label] = max(((got[at].double() - want).abs().max() / want.abs().max()).item() for at, want in wants.items())
                calls[label] = Launches(made, options.ms, options.settle)
            except Exception as error:  # each package has its own for "not here" and "not this problem"
                missing[label] = (str(error) or type(error).__name__).splitlines()[0][:200]
        rounds, clocks = take_rounds(calls, options.rounds, nvml) if calls else ({}, {})
        for label in (*calls, *missing):
            row = {"by": named.get(label, [label])[0] if named.get(label) else label, "row": cell.name}
            if len(libraries) > 1 and label in libraries:
                row["lib"] = label
            if label in missing:
                row["error"] = missing[label]
            else:
                us = statistics.median(rounds[label])
                row |= {"ms": round(us / 1e3, 5), "min_ms": round(min(rounds[label]) / 1e3, 5)}
                row |= {"gbs": round(cell.kv_bytes / us / 1e3, 1)} if cell.decode else {"tflops": round(cell.flops / us / 1e6, 1)}
                row |= {"largest_error": errors[label], "clocks": clocks[label]}
            result["rows"].append(row)
            print(row, flush=True)
        del q, sets, table, calls
        torch.cuda.empty_cache()
        save(options, result, nvml)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5, ms=40, settle=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="part of names of rows")
    parser.add_argument("--alone", action="store_true", help="without peers")
    measure(parser.parse_args())
