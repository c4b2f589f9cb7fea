"""Times attention over lists of keys (docs/mla.md): latent rows of 576, of which 512 are V too, or K and V heads of 128, in pages
of 64 in random order. Each query has a list of 2048 random keys of its sequence.

    python3 bench/lists.py --lib build/release/lib/libattn.so
    python3 bench/lists.py --lib before=old/libattn.so --lib after=libattn.so --cells heads --out lists.json
    python3 bench/lists.py --lib build/release/lib/libattn.so --flashmla _flashmla_C.abi3.so --cells lists

A figure is microseconds per launch of a graph of up to 50, over caches in turn that are larger than 200 MB together. The number
after | is the largest error of an output of some queries against float64, in units of the largest output. --flashmla: FlashMLA as vllm's wheel has it, for lists of latent rows.
"""
import argparse
import ctypes as c
import json
import math
import pathlib
import statistics
from dataclasses import asdict, dataclass

from peers import add_options, libraries_of

LATENT, ROPE, PAGE = 512, 64, 64
COLD_BYTES = 200 << 20
MLA_656 = 18


@dataclass(frozen=True)
class Cell:
    batch: int
    seqlen_q: int
    seqlen: int  # keys of a sequence
    heads: int
    size: int = 2048  # of a list; 0: no lists
    rows: str = "bf16"
    heads_kv: int = 0  # 0: latent rows
    list_heads: int = 1

    @property
    def name(self):
        return (f"B{self.batch} q{self.seqlen_q} " + (f"lists of {self.size} of {self.seqlen}" if self.size else f"{self.seqlen} keys") +
                f" {self.heads} heads" + (f" of {self.heads_kv}, {self.list_heads} lists" if self.heads_kv else "") + f" {self.rows}")

    @property
    def row_bytes(self):
        return 656 if self.rows == "mla_656" else 576 if self.rows == "e4m3" else 2 * self.heads_kv * 2 * 128 if self.heads_kv else 2 * (LATENT + ROPE)

    @property
    def dims(self):
        return (128, 128) if self.heads_kv else (LATENT + ROPE, LATENT)

    @property
    def flops(self):
        return 2 * self.batch * self.seqlen_q * self.heads * (self.size or self.seqlen) * sum(self.dims)


CELLS = [Cell(1, 4096, 65536, 128), Cell(1, 4096, 65536, 64), Cell(1, 4096, 65536, 16), Cell(1, 4096, 65536, 8),
         Cell(64, 1, 32768, 128), Cell(64, 1, 32768, 64), Cell(64, 1, 32768, 16), Cell(128, 1, 32768, 128), Cell(1, 1, 65536, 128),
         Cell(64, 1, 2048, 64, 0), Cell(64, 1, 2048, 128, 0),
         *(Cell(1, 4096, 65536, heads, rows="mla_656") for heads in (128, 64, 16, 8)),
         *(Cell(64, 1, 32768, heads, rows="mla_656") for heads in (128, 64, 16)), Cell(128, 1, 32768, 128, rows="mla_656"),
         *(Cell(64, 1, 8192, heads, 0, "mla_656") for heads in (8, 16, 64, 128)), Cell(1, 1, 65536, 128, 0, "mla_656"),
         Cell(64, 1, 8192, 16, 0, "e4m3"), Cell(64, 1, 32768, 64, rows="e4m3"),
         Cell(64, 1, 8192, 32, heads_kv=8), Cell(64, 1, 8192, 32, heads_kv=8, list_heads=8)]


def inputs_of(torch, cell):
    generator = torch.Generator("cuda").manual_seed(1)
    bytes_of = cell.row_bytes * cell.batch * cell.seqlen
    visited = cell.row_bytes * cell.batch * cell.seqlen_q * (cell.size or cell.seqlen)
    sets = 1 if cell.seqlen_q > 1 else max(1, min(math.ceil(COLD_BYTES / visited), (8 << 30) // bytes_of))
    pages, dim = cell.batch * cell.seqlen // PAGE, cell.dims[0]
    table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).view(cell.batch, -1)
    lengths = torch.full((cell.batch,), cell.seqlen, device="cuda", dtype=torch.int32)
    q = torch.randn(cell.batch, cell.seqlen_q, cell.heads, dim, device="cuda", generator=generator).to(torch.bfloat16)
    heads_kv = cell.heads_kv or 1

    def cache():
        x = torch.randn(pages, PAGE, heads_kv, dim, device="cuda", generator=generator, dtype=torch.bfloat16)
        if cell.rows == "e4m3":
            return x.to(torch.float8_e4m3fn)
        if cell.rows != "mla_656":
            return x
        raw = torch.empty(pages, PAGE, 656, device="cuda", dtype=torch.uint8)
        raw[..., :512] = x[..., 0, :512].to(torch.float8_e4m3fn).view(torch.uint8)
        raw[..., 512:528] = torch.ones(4, device="cuda").view(torch.uint8)
        raw[..., 528:] = x[..., 0, 512:].contiguous().view(torch.uint8)
        return raw
    ks = [cache() for _ in range(sets)]
    vs = [cache() for _ in range(sets)] if cell.heads_kv else [None] * sets
    lists = torch.randint(cell.seqlen, (cell.batch, cell.seqlen_q, cell.list_heads, cell.size), device="cuda", generator=generator,
                          dtype=torch.int32) if cell.size else None
    return q, ks, vs, table, lengths, lists


def expected(torch, cell, q, k, v, table, lists, b, i):
    """Of query i of sequence b: [heads, head_dim_v]."""
    dim, dim_v = cell.dims
    if cell.rows == "mla_656":
        raw = k[table[b].long()].view(-1, 656)
        rows = torch.cat([raw[:, :512].view(torch.float8_e4m3fn).double(), raw[:, 528:].contiguous().view(torch.bfloat16).double()], 1)[:, None]
    elif cell.rows == "e4m3":
        rows = k.view(torch.uint8)[table[b].long()].view(torch.float8_e4m3fn).double().view(-1, 1, dim)
    else:
        rows = k[table[b].long()].view(-1, cell.heads_kv or 1, dim)
    values = rows[..., :dim_v] if v is None else v[table[b].long()].view(-1, cell.heads_kv, dim_v)
    heads_kv, group = rows.shape[1], cell.heads // rows.shape[1]
    out = []
    for h in range(heads_kv):
        at = slice(None) if lists is None else lists[b, i, h % cell.list_heads].long()
        scores = q[b, i, h * group:(h + 1) * group].double() @ rows[at, h].double().T * dim ** -0.5
        out.append(scores.softmax(-1) @ values[at, h].double())
    return torch.cat(out)


def calls_of(torch, library, kernel, cell, inputs, named):
    from contenders import TYPE_OF, Args, Plan, Problem, Segment, SegmentArgs, make

    class ListSegment(Segment):
        _fields_ = [("shared", c.c_int32), ("list_size", c.c_int64), ("list_heads", c.c_int64)] + [
            (n, c.c_int32) for n in ("list_block", "list_queries", "list_of_pool", "has_list_lengths", "no_positions", "v_in_k")]

    class ListArgs(SegmentArgs):
        _fields_ = [("list", c.c_void_p), ("list_lengths", c.c_void_p)]
    q, ks, vs, table, lengths, lists = inputs
    kind = MLA_656 if cell.rows == "mla_656" else TYPE_OF[ks[0].dtype]
    segment = make(ListSegment, k_type=kind, v_type=kind if cell.heads_kv else 0, layout=2, num_pages=ks[0].shape[0], page_size=PAGE,
                   max_pages=table.shape[1], has_seqlens=1, v_in_k=not cell.heads_kv, list_size=cell.size,
                   list_heads=cell.list_heads if cell.size else 0)
    problem = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=cell.heads_kv or 1, head_dim=cell.dims[0],
                   head_dim_v=cell.dims[1], seqlen_q=cell.seqlen_q, q_type=TYPE_OF[torch.bfloat16], num_segments=1,
                   scale=cell.dims[0] ** -0.5, segments=c.cast(c.pointer(segment), c.POINTER(Segment)), kernel=kernel.encode() or None)
    plan = Plan(library, problem)
    text, size = c.create_string_buffer(1 << 20), c.c_size_t()
    library.check(library.lib.attn_explain(library.context, c.byref(problem), text, c.c_size_t(len(text)), c.byref(size)))
    named += [part["kernel"] for part in json.loads(text.value).get("parts", [])] or [plan.kernel]
    out = torch.empty(*q.shape[:3], cell.dims[1], device="cuda", dtype=q.dtype)

    def call(k, v):
        of = make(ListArgs, k=k.data_ptr(), v=v.data_ptr() if v is not None else None, seqlens=lengths.data_ptr(),
                  block_table=table.data_ptr(), list=lists.data_ptr() if lists is not None else None)
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=1, segments=c.cast(c.pointer(of), c.POINTER(SegmentArgs)))
        return lambda keep=of: (plan.run(args), out)[1]
    return [call(k, v) for k, v in zip(ks, vs)]


def flashmla_calls(torch, path, cell, inputs):
    """Its lists are places in the pool, which are made beforehand. It takes 64 or 128 heads; fewer are filled up with zeros, as
    vllm does. bf16 rows by its prefill, which sees one sequence; mla_656 by its decode."""
    if not cell.size or not (cell.rows == "mla_656" or cell.rows == "bf16" and not cell.heads_kv):
        raise RuntimeError("for lists of latent bf16 and of mla_656 rows")
    torch.ops.load_library(path)
    q, ks, _, table, _, lists = inputs
    pages = lists[:, :, 0].long() // PAGE
    places = (table.long().gather(1, pages.flatten(1)).view_as(pages) * PAGE + lists[:, :, 0] % PAGE).to(torch.int32)
    heads = -(-cell.heads // 64) * 64
    q = torch.cat([q, q.new_zeros(*q.shape[:2], heads - cell.heads, q.shape[3])], 2)
    scale = cell.dims[0] ** -0.5

    def in_order(out):
        return out.view(cell.batch, cell.seqlen_q, heads, LATENT)[:, :, :cell.heads]
    if cell.rows == "bf16":
        prefill = torch.ops._flashmla_C.sparse_prefill_fwd
        q, places = q.flatten(0, 1), places.flatten(0, 1)[:, None].contiguous()
        out = torch.empty(q.shape[0], heads, LATENT, device="cuda", dtype=q.dtype)
        return [lambda k=k: in_order((prefill(q, k.view(-1, 1, LATENT + ROPE), places, scale, LATENT, None, None, out), out)[1]) for k in ks]
    decode = torch.ops._flashmla_C.sparse_decode_fwd
    if cell.seqlen_q > 1:  # each query is a sequence
        q, places = q.transpose(0, 1), places.transpose(0, 1).contiguous()
    none = (None, None, None, None, None, None, None)

    def call(k, *more):
        out, _, *scheduled = decode(q, k[:, :, None], places, *(more or none), LATENT, scale, None)
        return out, scheduled
    _, scheduled = call(ks[0])
    more = (None, None, *scheduled, None, None, None)
    return [lambda k=k: in_order(call(k, *more)[0]) for k in ks]


def measure(options):
    import torch
    from timing import Launches, Nvml, result_of, save, take_rounds
    torch.zeros(1, device="cuda")
    libraries, nvml = libraries_of(options.lib), Nvml()
    result = result_of(options, nvml)
    for cell in CELLS:
        if options.cells and options.cells not in cell.name:
            continue
        inputs = inputs_of(torch, cell)
        q, ks, vs, table, _, lists = inputs
        row = {**asdict(cell), "name": cell.name, "parts": {}, "missing": {}, "errors": {}}
        calls = {}
        some = [(0, 0), (cell.batch - 1, cell.seqlen_q - 1), (0, cell.seqlen_q // 2)]
        wants = [expected(torch, cell, q, ks[0], vs[0], table, lists, b, i) for b, i in some]
        contenders = {label: lambda to, of=of: calls_of(torch, *of, cell, inputs, to) for label, of in libraries.items()}
        if options.flashmla and cell.size and cell.rows != "e4m3" and not cell.heads_kv:
            contenders["flashmla"] = lambda to: flashmla_calls(torch, str(pathlib.Path(options.flashmla).resolve()), cell, inputs)
        for label, calls_by in contenders.items():
            try:
                made = calls_by(row["parts"].setdefault(label, []))
                got = made[0]()
                torch.cuda.synchronize()
                error = max(((got[b, i].double() - want).abs().max() / want.abs().max()).item() for (b, i), want in zip(some, wants))
                row["errors"][label] = error if math.isfinite(error) else "not finite"
                calls[label] = made
            except Exception as error:  # what a build lacks
                row["missing"][label] = (str(error) or type(error).__name__).splitlines()[0][:200]
        launches = {name: Launches(made, options.ms, options.settle) for name, made in calls.items()}
        row["rounds_us"], row["clocks"] = take_rounds(launches, options.rounds, nvml) if launches else ({}, {})
        row["us"] = {name: statistics.median(times) for name, times in row["rounds_us"].items()}
        print(f"{cell.name:40}" + "".join(f"  {name} {us:8.2f} us {cell.flops / us / 1e6:4.0f} TFLOP/s" for name, us in row["us"].items()) +
              "  |" + "".join(f" {name} {error if isinstance(error, str) else f'{error:.1e}'}" for name, error in row["errors"].items()) +
              "".join(f" [{name}: {why}]" for name, why in row["missing"].items()) + f" {row['parts']}", flush=True)
        result["cells"].append(row)
        del inputs, q, ks, vs, table, lists, calls, launches
        torch.cuda.empty_cache()
        save(options, result, nvml)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, ms=40, settle=20)
    parser.add_argument("--flashmla", metavar="FILE", help="vllm's _flashmla_C.abi3.so")
    parser.add_argument("--cells", default="", metavar="TEXT", help="part of names of cells")
    measure(parser.parse_args())
