"""Times attn_kv_append into caches of 8 heads of 128: a token of each of 64 sequences, rotated with its queries, 16 to
512 tokens of each of 8, and 2048.

    python3 bench/append.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/append.py --lib new=a/libattn.so --lib old=b/libattn.so --only long
    python3 bench/append.py --lib libattn.so:kv_append_cuda --only middle

A figure is microseconds per launch of a graph of up to 50 over inputs and caches in turn, larger than 200 MB together. For
many tokens `copy` is what a copy takes that reads and writes as many bytes together, in turn too.
"""
import argparse
import datetime
import math
import pathlib
import statistics
from dataclasses import dataclass

import torch
import measured
from contenders import (BYTE_TYPES, TYPE_OF, KvAppend, KvAppendArgs, KvAppendProblem, Libattn, Segment, SegmentArgs,
                        make)
from decode import COLD_BYTES, of_blocks, of_codes
from timing import Launches, Nvml, take_rounds

HEADS_KV, DIM, HELD = 8, 128, 500
FLOATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
ROW_BYTES = {"bf16": 2 * DIM, "e4m3": DIM, "q8_0": DIM // 32 * 34, "q4_0": DIM // 32 * 18, "i8": DIM, "i4": DIM // 2, "nvfp4": DIM // 2}
SCALES = {"i8": 2, "i4": 2, "nvfp4": DIM // 16}  # bytes of a row's
STEPS = {"q8_0": 1 / 254, "q4_0": 1 / 8, "i8": 1 / 254, "i4": 1 / 14, "nvfp4": 1 / 4}  # how far codes may be off, of the largest value


@dataclass(frozen=True)
class Cell:
    kv: str
    page: int
    batch: int = 64
    tokens: int = 1
    capacity: int = 1024
    heads: int = 0  # of queries
    rotated: bool = False
    divided: bool = False  # by descales

    @property
    def name(self):
        many = f"{self.batch}x{self.tokens} " if self.tokens > 1 else ""
        what = " rotated" * (self.rotated and self.tokens > 1) + " divided" * self.divided
        return f"{self.kv} {many}pages of {self.page}{what}"

    @property
    def bytes(self):
        rows = self.batch * self.tokens
        kv = 2 * HEADS_KV * (2 * DIM + ROW_BYTES[self.kv] + SCALES.get(self.kv, 0))
        return rows * (kv + self.heads * 4 * DIM) + (self.tokens * DIM * 4 if self.rotated else 0)


def all_cells():
    few = [Cell(kv, page, heads=32, rotated=True) for kv in FLOATS for page in (64, 16, 1)]
    long = {"batch": 8, "tokens": 2048, "capacity": 4096}
    middle = [Cell("bf16", 64, batch=8, tokens=16 << n, heads=heads, rotated=heads > 0)
              for heads in (0, 32) for n in range(6)]
    many = [Cell(kv, page, **long) for kv in ROW_BYTES for page in (64, 16)]
    many += [Cell(kv, 64, rotated=True, **long) for kv in FLOATS]
    many += [Cell("e4m3", 64, divided=True, rotated=rotated, **long) for rotated in (False, True)]
    return {"few": few, "middle": middle, "long": many}


class Inputs:
    """Sets of new k, v and q, and of caches, which the libraries share."""

    def __init__(self, cell):
        self.cell, batch = cell, cell.batch
        torch.manual_seed(0)
        self.pages = batch * cell.capacity // cell.page
        self.table = torch.randperm(self.pages, device="cuda", dtype=torch.int32).view(batch, -1).contiguous()
        self.lengths = torch.full((batch,), HELD, device="cuda", dtype=torch.int32)
        self.lengths_out = torch.empty_like(self.lengths)
        angle = torch.arange(cell.capacity, device="cuda")[:, None] * 10000 ** -(torch.arange(DIM // 2, device="cuda") / (DIM / 2))
        self.cos, self.sin = angle.cos().float().contiguous(), angle.sin().float().contiguous()
        self.descale = torch.full((1,), 0.5, device="cuda")
        self.sets = [self.one() for _ in range(2 if cell.tokens == 1 else min(32, math.ceil(COLD_BYTES / cell.bytes)))]

    def one(self):
        cell = self.cell
        tokens = (cell.batch, cell.tokens)
        k, v = (torch.randn(*tokens, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(*tokens, cell.heads, DIM, device="cuda", dtype=torch.bfloat16)
        rows = (self.pages, cell.page, HEADS_KV)
        cache = [torch.zeros(*rows, ROW_BYTES[cell.kv], device="cuda", dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(*rows, SCALES[cell.kv], device="cuda", dtype=torch.uint8) for _ in range(2 if cell.kv in SCALES else 0)]
        if cell.kv in ("i8", "i4"):
            scales = [x.view(torch.float16).squeeze(-1) for x in scales]
        return k, v, q, torch.empty_like(q), cache, scales

    def rotate(self, x):
        if not self.cell.rotated:
            return x.float()
        here = slice(HELD, HELD + self.cell.tokens)
        cos, sin = self.cos[here, None], self.sin[here, None]
        x, y = x.float().chunk(2, -1)
        return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)

    def check(self, k, v, q, q_out, cache, scales):
        """What a call has written, next to PyTorch's rotation and conversion."""
        cell, kv = self.cell, self.cell.kv
        assert self.lengths_out.eq(HELD + cell.tokens).all()
        if cell.heads:
            torch.testing.assert_close(q_out.float(), self.rotate(q), rtol=2 ** -8, atol=1e-6)
        position = torch.arange(HELD, HELD + cell.tokens, device="cuda")
        for n, want in enumerate((self.rotate(k), v.float())):
            at = self.table[:, position // cell.page].long(), position % cell.page
            rows = cache[n][at]
            if kv in FLOATS:
                got = rows.view(FLOATS[kv]).float()
                want = want / self.descale if cell.divided else want
                if n == 1:
                    assert torch.equal(got, want.to(FLOATS[kv]).float())
                torch.testing.assert_close(got, want, rtol=1.01 * 2 ** (-8 if kv == "bf16" else -4), atol=2 ** -9)
            else:
                got = of_codes(torch, rows, scales[n][at], kv) if scales else of_blocks(torch, rows, kv)
                assert (got - want).abs().max() <= 1.02 * STEPS[kv] * want.abs().max()


def calls(library, inputs):
    """A call per set. What they write is checked first."""
    cell, kv = inputs.cell, inputs.cell.kv
    kind = TYPE_OF[FLOATS[kv]] if kv in FLOATS else BYTE_TYPES[kv]
    divided = 1 if cell.divided else 0
    segment = make(Segment, k_type=kind, v_type=kind, layout=2, has_seqlens=1, num_pages=inputs.pages, page_size=cell.page,
                   max_pages=cell.capacity // cell.page, k_descale=divided, v_descale=divided)
    plan = KvAppend(library, make(
        KvAppendProblem, kernel=library.kernel.encode() if library.kernel else None, batch=cell.batch, heads_kv=HEADS_KV,
        head_dim=DIM, seqlen_new=cell.tokens, new_type=TYPE_OF[torch.bfloat16], segment=segment, advance_seqlens=1,
        rotary_dim=DIM if cell.rotated else 0, rotary_positions=cell.capacity if cell.rotated else 0, heads_q=cell.heads))

    def call(k, v, q, q_out, cache, scales):
        at = {"k": cache[0], "v": cache[1], "seqlens": inputs.lengths, "block_table": inputs.table}
        at |= {"k_scale": scales[0], "v_scale": scales[1]} if scales else {}
        at |= {"k_descale": inputs.descale, "v_descale": inputs.descale} if cell.divided else {}
        new = {"k_new": k, "v_new": v, "seqlens_out": inputs.lengths_out}
        new |= {"q": q, "q_out": q_out} if cell.heads else {}
        new |= {"rotary_cos": inputs.cos, "rotary_sin": inputs.sin} if cell.rotated else {}
        args = make(KvAppendArgs, cache=make(SegmentArgs, **{n: x.data_ptr() for n, x in at.items()}),
                    **{n: x.data_ptr() for n, x in new.items()})

        def run(keep=inputs):
            plan.run(args)
        for x in (*cache, *scales):
            x.zero_()
        run()
        inputs.check(k, v, q, q_out, cache, scales)
        return run
    return [call(*one) for one in inputs.sets], plan.kernel


def copies(size):
    """Copies that read and write `size` bytes together."""
    size //= 2
    sets = [(torch.ones(size, device="cuda", dtype=torch.uint8), torch.empty(size, device="cuda", dtype=torch.uint8))
            for _ in range(math.ceil(COLD_BYTES / size / 2))]
    return [lambda to=to, source=source: to.copy_(source) for source, to in sets]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", required=True, action="append", metavar="[NAME=]PATH[:KERNEL]",
                        help="a build of libattn.so, or several, and the kernel to demand")
    parser.add_argument("--only", choices=all_cells())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    libraries = {}
    for lib in options.lib:
        name, _, lib = lib.rpartition("=")
        path, _, kernel = lib.partition(":")
        libraries[name] = Libattn(str(pathlib.Path(path).resolve()), kernel or None)
    nvml, times, clocks, kernels, table = Nvml(), {}, {}, {}, []
    for cell in [cell for group, cells in all_cells().items() if options.only in (None, group) for cell in cells]:
        inputs, launches = Inputs(cell), {}
        for name, library in libraries.items():
            label = f"{cell.name} {name}".rstrip()
            made, kernels[label] = calls(library, inputs)
            launches[label] = Launches(made, 20)
        if cell.tokens > 1:
            launches[f"{cell.name} copy"] = Launches(copies(cell.bytes), 20)
        rounds, watched = take_rounds(launches, options.rounds, nvml)
        times |= rounds
        clocks |= watched
        for label in launches:
            us = statistics.median(rounds[label])
            copy = rounds.get(f"{cell.name} copy")
            beside = f" {us / statistics.median(copy):5.2f} of the copy's" if copy else ""
            print(f"append {label:36} {us:7.2f} us {cell.bytes / us / 1e3:5.0f} GB/s{beside}", flush=True)
    if options.out:
        measured.write(options.out, {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
            "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
            "kernels": kernels, "bytes": {cell.name: cell.bytes for cells in all_cells().values() for cell in cells},
            "rounds_us": times, "us": {n: statistics.median(t) for n, t in times.items()}, "clocks": clocks})
