"""Times decode: few queries against a long cache, libattn next to what is importable, in one process, rounds interleaved.

    python3 bench/decode.py --lib build/release/lib/libattn.so --read build/release/kernels/read_cuda.compute_80.ptx
    python3 bench/decode.py --lib new=a/libattn.so --lib old=b/libattn.so --only anchors,short --out docs/measured/NAME.json
    python3 bench/decode.py --lib chosen=a/libattn.so --lib r32=a/libattn.so@decode_sm90_fp8_d128_r32 --only rows

A figure is microseconds per launch of a graph of up to 50. "cold": caches in turn that are larger than 200 MB together;
"warm": one. GB/s count K and V once. `read` is what read_cuda takes to read as many bytes in such a graph.
"""
import argparse
import math
import re
import statistics
from dataclasses import dataclass, replace

from peers import add_options, libraries_of

COLD_BYTES = 200 << 20
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "iq4_nl": 18}  # ggml's, of 32 values
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "i8": 1, "i4": 0.5, "nvfp4": 9 / 16, **{kind: size / 32 for kind, size in BLOCK_BYTES.items()}}
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SCALED = ("i8", "i4", "nvfp4")  # with scales in an array of their own: an f16 for each token and head, nvfp4 an e4m3 for each 16 elements
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True)
class Cell:
    group: str
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    kv: str = "bf16"
    page: int = 0  # keys; 0: padded
    seqlen_q: int = 1
    warm: bool = False
    dim: int = 128
    fixed_split: int = 0
    newest: int = 0  # keys that are f16, in a segment of their own

    @property
    def name(self):
        return (f"B{self.batch} {self.heads}/{self.heads_kv} {self.seqlen} d{self.dim} {self.kv}" +
                (f" pages of {self.page}" if self.page else "") + (f" q{self.seqlen_q}" if self.seqlen_q > 1 else "") +
                (f" split {self.fixed_split}" if self.fixed_split else "") +
                (f" + f16 {self.newest}" if self.newest else "") + (" warm" if self.warm else ""))

    @property
    def kv_bytes(self):
        old = self.dim * ELEMENT_BYTES[self.kv] + (2 if self.kv in ("i8", "i4") else 0)
        return int(2 * self.batch * self.heads_kv * (self.seqlen * old + self.newest * self.dim * 2))


def all_cells():
    anchors = [Cell("anchors", *shape) for shape in (
        (1, 32, 8, 8192), (1, 32, 8, 131072), (16, 32, 8, 8192), (64, 32, 8, 8192), (128, 64, 8, 4096), (32, 32, 32, 4096),
        (1, 8, 1, 65536))]
    short = [Cell("short", 1, 32, 8, seqlen, warm=warm) for seqlen in (1024, 8192) for warm in (False, True)]
    fp8 = [replace(cell, group="fp8", kv="e4m3") for cell in anchors]
    pages = [replace(anchors[3], group="pages", page=page) for page in (128, 64, 16, 1)]
    pages += [replace(fp8[3], group="pages", page=page) for page in (64, 16)]
    rows = [replace(anchors[3], group="rows", seqlen_q=seqlen_q) for seqlen_q in (4, 8, 12)]
    rows += [replace(fp8[3], group="rows", seqlen_q=8), Cell("rows", 4, 32, 8, 1024, seqlen_q=12), Cell("rows", 64, 8, 8, 8192), Cell("rows", 16, 128, 8, 8192),
            Cell("rows", 64, 32, 8, 8192, dim=64), Cell("rows", 32, 32, 8, 8192, dim=256)]
    prefill = [Cell("prefill", 1, 32, 8, 8192, page=page, seqlen_q=2048) for page in (0, 64, 16)]
    prefill += [replace(cell, kv=kv) for cell in prefill for kv in ("e4m3", "q8_0", "q4_0", "i8", "i4")] + [Cell("prefill", 64, 16, 16, 512, seqlen_q=48)]
    chunks = [Cell("chunks", 4, 32, heads_kv, 8192, kv="e4m3", page=64, seqlen_q=seqlen_q)
              for heads_kv in (8, 32) for seqlen_q in (16, 32, 64, 128, 256, 512)]
    fixed = [replace(cell, group="fixed", fixed_split=split) for cell in (anchors[3], fp8[3]) for split in (512, 2048)]
    fixed += [replace(cell, group="fixed", fixed_split=1024) for cell in (anchors[1], prefill[0])]
    blocks = [replace(cell, group="blocks", kv=kv) for cell in (anchors[1], anchors[3], anchors[0], anchors[2])
              for kv in ("f16", "q8_0", "q4_0", "i8", "i4")]
    blocks += [replace(anchors[1], group="blocks", kv=kv, newest=1024) for kv in ("q8_0", "q4_0", "i8", "i4")]
    blocks += [replace(anchors[3], group="blocks", kv=kv, page=page) for kv in ("q4_0", "i4") for page in (64, 16)]
    blocks += [replace(anchors[3], group="blocks", kv=kv, dim=dim) for dim in (64, 256)
               for kv in ("f16", "q8_0", "q4_0", "i8", "i4")]
    blocks += [replace(cell, group="blocks", kv=kv) for cell in (anchors[1], anchors[3], anchors[0], anchors[2])
               for kv in ("q4_1", "q5_0", "q5_1", "iq4_nl", "nvfp4")]
    blocks += [replace(anchors[3], group="blocks", kv="nvfp4", **of) for of in ({"dim": 64}, {"dim": 256}, {"page": 64}, {"page": 16})]
    return anchors + short + fp8 + pages + rows + prefill + chunks + fixed + blocks


# ---- ggml's blocks: of 32 values a scale of f16, perhaps a minimum and their fifth bits, then their codes --------------

def to_blocks(torch, x, kind):
    """[..., D] to bytes [..., D / 32 * bytes of a block]. iq4_nl: by the scale of the largest value alone."""
    x = x.float().unflatten(-1, (-1, 32))
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    if kind == "q8_0":
        scale = (largest.abs() / 127).half()
        codes = (x / scale.float()).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return torch.cat([scale.view(torch.uint8), codes], -1).flatten(-2)
    most = 31 if kind in ("q5_0", "q5_1") else 15
    parts = []
    if kind in ("q4_1", "q5_1"):
        least = x.amin(-1, keepdim=True).half()
        scale = ((x.amax(-1, keepdim=True) - least.float()) / most).half()
        codes = (x - least.float()) / scale.float() + 0.5
        parts = [least.view(torch.uint8)]
    elif kind == "iq4_nl":
        scale = (largest / -127).half()
        edges = torch.tensor([(a + b) / 2 for a, b in zip(IQ4_NL, IQ4_NL[1:])], device=x.device)
        codes = torch.bucketize(x / scale.float(), edges)
    else:
        half = (most + 1) / 2
        scale = (largest / -half).half()
        codes = x / scale.float() + half + 0.5
    codes = codes.clamp(0, most).to(torch.uint8)
    if most == 31:
        bits = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, device=x.device, dtype=torch.uint8)
        parts.append(bits.sum(-1).to(torch.uint8))
    codes = codes & 15
    return torch.cat([scale.view(torch.uint8), *parts, codes[..., :16] | codes[..., 16:] << 4], -1).flatten(-2)


def of_blocks(torch, blocks, kind):
    """Back to float32."""
    blocks = blocks.unflatten(-1, (-1, BLOCK_BYTES[kind]))
    halves, codes = blocks[..., :4].contiguous().view(torch.float16).float(), blocks[..., -16:].contiguous()
    scale, least = halves[..., :1], halves[..., 1:] if kind in ("q4_1", "q5_1") else 0
    if kind == "q8_0":
        return (scale * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)
    codes = torch.cat([codes & 15, codes >> 4], -1)
    if kind == "iq4_nl":
        return (scale * torch.tensor(IQ4_NL, device=codes.device).float()[codes.long()]).flatten(-2)
    if kind in ("q5_0", "q5_1"):
        bits = blocks[..., -20:-16, None] >> torch.arange(8, device=codes.device, dtype=torch.uint8) & 1
        codes = codes | bits.flatten(-2) << 4
    offset = {"q4_0": 8, "q5_0": 16}.get(kind, 0)
    return (scale * (codes.float() - offset) + least).flatten(-2)


def to_codes(torch, x, kind):
    """[..., D] to bytes [..., D or D / 2] and scales [...], of nvfp4 [..., D / 16]."""
    if kind == "nvfp4":
        x = x.float().unflatten(-1, (-1, 16))
        scale = (x.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        edges = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])], device=x.device)
        codes = torch.bucketize((x / scale.float()[..., None]).abs(), edges).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
        codes = codes.flatten(-2)
        return codes[..., ::2] | codes[..., 1::2] << 4, scale.view(torch.uint8)
    x, most = x.float(), 127 if kind == "i8" else 7
    scale = (x.abs().amax(-1) / most).half()
    codes = (x / scale.float()[..., None]).round().clamp(-most, most).to(torch.int8)
    return (codes if kind == "i8" else codes[..., ::2] & 15 | codes[..., 1::2] << 4).view(torch.uint8), scale


def of_codes(torch, codes, scale, kind):
    """Back to float32."""
    if kind == "nvfp4":
        values = torch.tensor(E2M1 + tuple(-x for x in E2M1), device=codes.device)
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return values[codes.long()] * scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    codes = codes.view(torch.int8)
    if kind == "i4":
        codes = torch.stack([codes << 4 >> 4, codes >> 4], -1).flatten(-2)
    return codes.float() * scale.float()[..., None]


class Inputs:
    """Sets of q, k, v [B, S, H, D], of which k and v may be pools of pages [pages, page, H, D], shuffled by `table`; of the
    newest k and v; of the scales of k and v."""

    def __init__(self, torch, cell):
        q_kind = torch.bfloat16 if cell.kv in ("bf16", "e4m3") else torch.float16
        sets = 1 if cell.warm else max(1, math.ceil(COLD_BYTES / cell.kv_bytes))
        torch.manual_seed(0)
        cache = (cell.batch, cell.seqlen, cell.heads_kv, cell.dim)
        if cell.page:
            pages = cell.batch * cell.seqlen // cell.page
            cache = (pages, cell.page, cell.heads_kv, cell.dim)
            self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(cell.batch, -1).contiguous()
        newest = (cell.batch, cell.newest, cell.heads_kv, cell.dim)

        def random(*size):
            return torch.randn(size, device="cuda", dtype=q_kind)

        def cached():
            if cell.kv in BLOCK_BYTES:
                return to_blocks(torch, random(*cache), cell.kv)
            return random(*cache).to(torch.float8_e4m3fn if cell.kv == "e4m3" else q_kind)

        def both():
            if cell.kv not in SCALED:
                return (cached(), cached()), ()
            (k, k_scale), (v, v_scale) = (to_codes(torch, random(*cache), cell.kv) for _ in range(2))
            return (k, v), (k_scale, v_scale)

        def one():
            kv, scales = both()
            return (random(cell.batch, cell.seqlen_q, cell.heads, cell.dim), *kv,
                    *((random(*newest), random(*newest)) if cell.newest else ()), *scales)
        self.sets = [one() for _ in range(sets)]

    def of_first(self, torch, cell, which):
        """k (1) or v (2) of the first set's first sequence as [S, H, D] in float32."""
        def first(cache):
            return cache[self.table[0].long()].flatten(0, 1) if cell.page else cache[0]
        cache = self.sets[0][which]
        kind, cache = cache.dtype, first(cache.view(torch.uint8))
        if cell.kv in SCALED:
            cache = of_codes(torch, cache, first(self.sets[0][which - 3]), cell.kv)
        else:
            cache = of_blocks(torch, cache, cell.kv) if cell.kv in BLOCK_BYTES else cache.view(kind).float()
        return torch.cat([cache, self.sets[0][which + 2][0].float()]) if cell.newest else cache


def expected(torch, cell, inputs):
    """What the first sequence's outputs are, in float32 [Sq, H, D], causal."""
    q, k, v = inputs.sets[0][0][0].float(), *(inputs.of_first(torch, cell, which) for which in (1, 2))
    group = cell.heads // cell.heads_kv
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(cell.dim)
    keys = cell.seqlen + cell.newest
    seen = torch.arange(keys, device="cuda")[None] <= torch.arange(cell.seqlen_q, device="cuda")[:, None] + \
        keys - cell.seqlen_q
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


# ---- contenders: label -> calls, one per set of inputs ----------------------------------------------------------------

def libattn_calls(library, kernel, cell, inputs, torch, parts):
    from contenders import BYTE_TYPES, CAUSAL, Args, Plan, Problem, Segment, SegmentArgs, TYPE_OF, make
    import ctypes as c
    q_kind = TYPE_OF[inputs.sets[0][0].dtype]
    kind = BYTE_TYPES.get(cell.kv) or TYPE_OF[inputs.sets[0][1].dtype]
    layout = dict(layout=2, num_pages=inputs.sets[0][1].shape[0], page_size=cell.page,
                  max_pages=cell.seqlen // cell.page) if cell.page else dict(seqlen=cell.seqlen)
    segments = [make(Segment, k_type=kind, v_type=kind, **layout)]
    if cell.newest:
        segments.append(make(Segment, k_type=q_kind, v_type=q_kind, seqlen=cell.newest))
    problem = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=cell.heads_kv, head_dim=cell.dim,
                   seqlen_q=cell.seqlen_q, q_type=q_kind, num_segments=len(segments),
                   segments=(Segment * len(segments))(*segments),
                   flags=CAUSAL, fixed_split=cell.fixed_split,
                   kernel=kernel.encode() or None)
    plan = Plan(library, problem)
    out = torch.empty_like(inputs.sets[0][0])
    table = inputs.table.data_ptr() if cell.page else None

    def call(q, k, v, *others):
        scales = dict(k_scale=others[-2].data_ptr(), v_scale=others[-1].data_ptr()) if cell.kv in SCALED else {}
        of_each = [make(SegmentArgs, k=k.data_ptr(), v=v.data_ptr(), block_table=table, **scales)]
        if cell.newest:
            of_each.append(make(SegmentArgs, k=others[0].data_ptr(), v=others[1].data_ptr()))
        segment_args = (SegmentArgs * len(of_each))(*of_each)
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=len(of_each), segments=segment_args)
        return lambda keep=segment_args: (plan.run(args), out)[1]
    parts["kernel"] = plan.kernel
    return [call(*one) for one in inputs.sets]


def cudnn_calls(cell, inputs, torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    if cell.page or cell.kv not in ("bf16", "f16") or cell.newest or cell.seqlen_q > 1:
        raise ImportError("one query, bf16 or f16, padded only")

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def run():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, enable_gqa=cell.heads != cell.heads_kv).transpose(1, 2)
        return run
    return [call(*one) for one in inputs.sets]


def fa3_calls(cell, inputs, torch, library):
    """FlashAttention-3 as vllm ships it: q in the type of K and V, pages, packed GQA."""
    if cell.kv not in ("bf16", "e4m3"):
        raise ImportError("bf16 and fp8 only")
    torch.ops.load_library(library)
    batch, length = cell.batch, cell.seqlen
    used = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    table = inputs.table if cell.page else None

    def call(q, k, v):
        fp8 = cell.kv != "bf16"
        q = q.to(k.dtype)
        out = torch.empty(q.shape, device="cuda", dtype=torch.bfloat16)
        descale = torch.ones(batch, cell.heads_kv, device="cuda") if fp8 else None

        def run():
            return torch.ops._vllm_fa3_C.fwd(
                q, k, v, None, None, None, out, None, None, None, None, used, None, cell.seqlen, table, None, None, None,
                None, None, descale, descale, descale, cell.dim ** -0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None,
                1, 0, None)[0]
        return run
    return [call(*one) for one in inputs.sets]


def flashinfer_calls(cell, inputs, torch):
    """FlashInfer's decode over pages, those of the cell or of 16 keys; its kernels are compiled at their first use."""
    import flashinfer
    if cell.seqlen_q > 1 or cell.dim != 128:
        raise ImportError("one query, d128 only")
    page = cell.page or 16
    pages = cell.seqlen // page
    kind = inputs.sets[0][1].dtype
    starts = torch.arange(cell.batch + 1, dtype=torch.int32) * pages
    table = inputs.table.flatten() if cell.page else torch.arange(cell.batch * pages, device="cuda", dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, device="cuda", dtype=torch.uint8), "NHD", use_tensor_cores=cell.heads >= 4 * cell.heads_kv)
    wrapper.plan(starts.cuda(), table, torch.full((cell.batch,), page, device="cuda", dtype=torch.int32), cell.heads,
                 cell.heads_kv, cell.dim, page, q_data_type=torch.bfloat16, kv_data_type=kind)

    def call(q, k, v):
        q = q.squeeze(1)
        k, v = (x.view(-1, page, cell.heads_kv, cell.dim) for x in (k, v))
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, (k, v), out=out).unsqueeze(1)
    return [call(*one) for one in inputs.sets]


def read_calls(path, cell, torch):
    """read_cuda over buffers of ones as large as K and V, whose sum is checked."""
    import ctypes as c
    driver = c.CDLL("libcuda.so.1")

    def check(code):
        if code:
            raise RuntimeError(f"libcuda.so.1: error {code}")
    module, kernel = c.c_void_p(), c.c_void_p()
    check(driver.cuModuleLoad(c.byref(module), str(path).encode()))
    check(driver.cuModuleGetFunction(c.byref(kernel), module, b"read_cuda"))

    class Kernarg(c.Structure):
        _fields_ = [("data", c.c_void_p), ("vectors", c.c_longlong), ("sum", c.c_void_p)]
    threads, granule = 512, 16 * 512 * 8
    size = max(granule, cell.kv_bytes // granule * granule)
    sets = 1 if cell.warm else max(1, math.ceil(COLD_BYTES / size))
    total = torch.zeros(1, device="cuda", dtype=torch.int32)
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count

    def call():
        data = torch.ones(size // 4, device="cuda", dtype=torch.int32)
        kernarg = Kernarg(data.data_ptr(), size // 16, total.data_ptr())
        parameters = (c.c_void_p * 1)(c.cast(c.byref(kernarg), c.c_void_p))

        def run(keep=(data, kernarg)):
            stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None))
            return total
        return run
    calls = [call() for _ in range(sets)]
    calls[0]()
    if total.item() != size // 4:
        raise RuntimeError(f"read_cuda added {size // 4} ones up to {total.item()}")
    return calls, size


# ---- a run ------------------------------------------------------------------------------------------------------------

def measure(options, cells):
    import torch
    from timing import Launches, Nvml, result_of, save, take_rounds
    torch.zeros(1, device="cuda")
    libraries = libraries_of(options.lib, dict(one.split("=", 1) for one in options.code))
    nvml = Nvml()
    result = result_of(options, nvml, cudnn=torch.backends.cudnn.version())
    for cell in cells:
        inputs = Inputs(torch, cell)
        row = {**cell.__dict__, "name": cell.name, "kv_bytes": cell.kv_bytes, "kernels": {}, "missing": {}, "errors": {}}
        want = expected(torch, cell, inputs)
        calls = {}

        def add(name, make_calls):
            try:
                made = make_calls()
                got = made[0]()
                torch.cuda.synchronize()
                if name != "read":
                    row["errors"][name] = ((got[0].float() - want).norm() / want.norm()).item()
                calls[name] = made
            except Exception as error:  # each package has its own for "not here" and "not this problem"
                row["missing"][name] = (str(error) or type(error).__name__).splitlines()[0][:200]
        for label, (library, kernel) in libraries.items():
            parts = {}
            add(label, lambda: libattn_calls(library, kernel, cell, inputs, torch, parts))
            row["kernels"][label] = parts.get("kernel")
        if not options.alone:
            add("cudnn", lambda: cudnn_calls(cell, inputs, torch))
            add("flashinfer", lambda: flashinfer_calls(cell, inputs, torch))
            if options.fa3:
                add("fa3", lambda: fa3_calls(cell, inputs, torch, options.fa3))
        size = cell.kv_bytes
        if options.read:
            def reading():
                nonlocal size
                made, size = read_calls(options.read, cell, torch)
                return made
            add("read", reading)
        launches = {name: Launches(made, options.ms, options.settle) for name, made in calls.items()}
        rounds, row["clocks"] = take_rounds(launches, options.rounds, nvml)
        row["rounds_us"] = rounds
        row["us"] = {name: statistics.median(times) for name, times in rounds.items()}
        if "read" in row["us"]:
            row["us"]["read"] *= cell.kv_bytes / size
        row["gbytes_per_s"] = {name: cell.kv_bytes / us / 1e3 for name, us in row["us"].items()}
        result["cells"].append(row)
        line = f"{cell.name:34}" + "".join(f"  {name} {us:8.2f} us {row['gbytes_per_s'][name]:5.0f}"
                                           for name, us in row["us"].items())
        line += "  |" + "".join(f" {name} {error:.1e}" for name, error in row["errors"].items())
        line += "".join(f" [{name}: {why}]" for name, why in row["missing"].items())
        print(line, flush=True)
        del inputs, calls, launches
        torch.cuda.empty_cache()
        save(options, result, nvml)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, ms=60, settle=30)
    parser.add_argument("--code", action="append", default=[], metavar="LABEL=FILE",
                        help="device code in place of that of the build of this label")
    parser.add_argument("--read", metavar="FILE", help="read_cuda as PTX or cubin")
    parser.add_argument("--fa3", metavar="FILE", help="vllm's _vllm_fa3_C.abi3.so")
    parser.add_argument("--only", default="", help="comma-separated groups")
    parser.add_argument("--cells", default="", metavar="REGEX", help="of names of cells")
    parser.add_argument("--alone", action="store_true", help="without peers")
    chosen = parser.parse_args()
    groups = chosen.only.split(",") if chosen.only else None
    measure(chosen, [cell for cell in all_cells() if (not groups or cell.group in groups) and re.search(chosen.cells, cell.name)])
