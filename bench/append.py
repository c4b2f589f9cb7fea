"""Times attn_kv_append: a token of each of 64 sequences, rotated with its queries, into caches of 8 heads of 128.

    python3 bench/append.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json

A figure is microseconds per launch of a graph of up to 50 over caches in turn, larger than 200 MB together.
"""
import argparse
import datetime
import pathlib
import statistics

import torch
import measured
from contenders import TYPE_OF, KvAppend, KvAppendArgs, KvAppendProblem, Libattn, Segment, SegmentArgs, make
from timing import Launches, Nvml, take_rounds

BATCH, HEADS, HEADS_KV, DIM, CAPACITY, HELD, SETS = 64, 32, 8, 128, 1024, 500, 2


def calls(library, kv, page):
    """A call per cache. What they write is compared with PyTorch's rotation first."""
    kind = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[kv]
    pages = BATCH * CAPACITY // page
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(BATCH, -1).contiguous()
    lengths = torch.full((BATCH,), HELD, device="cuda", dtype=torch.int32)
    angle = torch.arange(CAPACITY, device="cuda")[:, None] * 10000 ** -(torch.arange(DIM // 2, device="cuda") / (DIM / 2))
    cos, sin = angle.cos().float().contiguous(), angle.sin().float().contiguous()
    segment = make(Segment, k_type=TYPE_OF[kind], v_type=TYPE_OF[kind], layout=2, has_seqlens=1, num_pages=pages,
                   page_size=page, max_pages=CAPACITY // page)
    plan = KvAppend(library, make(
        KvAppendProblem, batch=BATCH, heads_kv=HEADS_KV, head_dim=DIM, seqlen_new=1, new_type=TYPE_OF[torch.bfloat16],
        segment=segment, advance_seqlens=1, rotary_dim=DIM, rotary_positions=CAPACITY, heads_q=HEADS))
    lengths_out = torch.empty_like(lengths)

    def call():
        k, v = (torch.randn(BATCH, 1, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(BATCH, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        q_out = torch.empty_like(q)
        cache = [torch.zeros(pages, page, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16).to(kind) for _ in range(2)]
        args = make(KvAppendArgs, k_new=k.data_ptr(), v_new=v.data_ptr(), q=q.data_ptr(), q_out=q_out.data_ptr(),
                    cache=make(SegmentArgs, k=cache[0].data_ptr(), v=cache[1].data_ptr(), seqlens=lengths.data_ptr(),
                               block_table=table.data_ptr()), rotary_cos=cos.data_ptr(), rotary_sin=sin.data_ptr(),
                    seqlens_out=lengths_out.data_ptr())

        def run(keep=(k, v, q, cache, table, lengths, cos, sin)):
            plan.run(args)
            return q_out
        run()
        x, y = q.float().chunk(2, -1)
        rotated = torch.cat([x * cos[HELD] - y * sin[HELD], x * sin[HELD] + y * cos[HELD]], -1)
        torch.testing.assert_close(q_out.float(), rotated, rtol=2 ** -8, atol=1e-6)
        row = cache[1].float()[table[:, HELD // page].long(), HELD % page]
        assert torch.equal(row, v[:, 0].to(kind).float())
        assert lengths_out.eq(HELD + 1).all()
        return run
    return [call() for _ in range(SETS)], plan.kernel


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", required=True, metavar="PATH", help="a build of libattn.so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    library, nvml = Libattn(str(pathlib.Path(options.lib).resolve())), Nvml()
    made = {(kv, page): calls(library, kv, page) for kv in ("bf16", "e4m3") for page in (64, 16, 1)}
    launches = {f"{kv} pages of {page}": Launches(one, 20) for (kv, page), (one, _) in made.items()}
    rounds, clocks = take_rounds(launches, options.rounds, nvml)
    for name, times in rounds.items():
        print(f"append {name:20} {statistics.median(times):6.2f} us")
    if options.out:
        measured.write(options.out, {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
            "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
            "kernels": {f"{kv} pages of {page}": kernel for (kv, page), (_, kernel) in made.items()},
            "rounds_us": rounds, "us": {n: statistics.median(t) for n, t in rounds.items()}, "clocks": clocks})
