#!/usr/bin/env python3
"""Writes docs/performance.md, and the paragraph on speed in README.md, from the JSON files in docs/measured. No figure on that
page is typed by hand.

    bench/performance.py            writes both
    bench/performance.py --check    fails if they are not what it would write
"""
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SOURCE / "tools"))
sys.dont_write_bytecode = True
import generated  # noqa: E402

FOLDER = SOURCE / "docs" / "measured"
NAMES = {"cudnn": "cuDNN", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer", "flashmla": "FlashMLA"}

FORWARD = "2026-11-22_h200_peers_25aed70"
FORWARD_AGAIN = "2026-11-22_h200_peers_25aed70b", "2026-11-22_h200_peers_1f1f008"
FORWARD_H100 = "2026-11-25_h100_peers_bf684b3"
FORWARD_H100_SHORT = "2026-11-25_h100_peers_d64_a4af09b"
FP8 = "2026-11-25_h100_peers_fp8_bf684b3"
FP8_D256 = "2026-11-25_h100_peers_fp8_d256_a4af09b"
FP8_H200 = "2026-11-25_h200_peers_fp8_5b7ee4e"
FP8_FORMS = "2026-11-25_h100_fp8_forms_a4af09b"
FP8_ERRORS = "2026-11-24_h200_fp8_errors_5e446fc"
FP8_ERRORS_H100 = "2026-11-25_h100_fp8_errors_8780882"
FP8_SIGMA = "2026-11-25_h200_fp8_7c0ac2f"
FP8_SIGMA_PRECISE = "2026-11-25_h100_fp8_precise_scores_b5e7db9"
FP8_SUMS = "2026-11-25_h200_fp8_838905f"
ACCURACY = "2026-11-22_h200_accuracy_25aed70"
MASKS = "2026-11-22_h200_masks_1f1f008", "2026-11-22_h200_masks_1f1f008b", "2026-11-22_h200_masks_1f1f008c"
MASK_CLOCKS = "2026-11-22_h200_mask_clocks_1f1f008"
DECODE_ROWS = "2026-11-27_h100_decode_9e96548"
DECODE_ROWS_H200 = "2026-11-28_h200_decode_d568d4b"
DECODE = "2026-11-25_h200_decode_ce0eb29"
PREFILL = "2026-11-24_h200_decode_65b81da"
QUANTISED = "2026-11-28_h200_decode_quantised_daaee3e"
LATENT = "2026-11-28_h200_mla_daaee3e"
LATENT_H100 = "2026-11-28_h100_mla_0e4c2d2"
PREFIX = "2026-11-27_h100_prefix_50b6a6c"
STEP = "2026-11-27_h100_step_50b6a6c"
APPEND = "2026-11-25_h200_append_ce0eb29"
APPEND_MANY = "2026-11-28_h200_append_daaee3e"
BACKWARD = "2026-11-28_h200_backward_daaee3e"
BACKWARD_PACKED, BACKWARD_SM80 = "2026-11-28_h200_backward_packed_daaee3e", "2026-11-28_h200_backward_sm80_daaee3e"
TRAINING = "2026-11-28_h200_training_daaee3e"  # these three of one run with BACKWARD, None if not measured
SM80 = "2026-11-21_h200_sm80_peers_f6b6a59"
CPU = "2026-11-21_zen5_bench_5813749"
CALLS = "2026-11-25_zen5_host_overhead_983a8d2"
CALLS_GPU = "2026-11-25_h100_host_overhead_82d1448"
CALLS_GPU_BEFORE = "2026-11-25_h200_host_overhead_fea8d4f"


def measured(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def link(name, text="JSON"):
    return f"[{text}](measured/{name}.json)"


def table(head, rows):
    """Cells are texts, or None where nothing was measured."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in [head, *rows]]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def number(value, digits=0):
    return None if value is None else f"{value:.{digits}f}"


def microseconds(value):
    """Three digits or so."""
    return None if value is None else number(value, 1 if value < 200 else 0)


def span(values, digits=2):
    values = list(values)
    low, high = number(min(values), digits), number(max(values), digits)
    return low if low == high else f"{low} to {high}"


def mean(values):
    return number(statistics.geometric_mean(values), 2)


def speed(cell, peers):
    """The time of the fastest of these peers over libattn's: of each round, then the median of the rounds."""
    rounds = cell["rounds_us"]
    return statistics.median(min(theirs) / ours for ours, *theirs in zip(rounds["libattn"], *(rounds[peer] for peer in peers)))


def cells(result, group=None, dim=None):
    return [c for c in result["cells"] if (group is None or c["group"] == group) and (dim is None or c["dim"] == dim)]


def where(result):
    gpu = result.get("gpu") or result.get("device") or result.get("cpu")
    return f"{gpu['name'] if isinstance(gpu, dict) else gpu}, {result['date']}, commit {result['commit']}"


# ---- forward ----------------------------------------------------------------------------------------------------------

LENGTHS = 512, 2048, 16384


def grid(result, columns):
    """A row for each head size, mask and length; columns: the heading of each contender."""
    rows = []
    for cell in cells(result, "grid"):
        if cell["seqlen"] in LENGTHS:
            mask = "causal" if cell["causal"] else "full"
            rows.append([f"d{cell['dim']} {mask}, {cell['seqlen']}", *(number(cell["tflops"].get(name)) for name in columns)])
    return table(["head_dim, mask, length", *columns.values()], rows)


def forward():
    result = measured(FORWARD)
    here, gqa, peers = cells(result, "grid"), cells(result, "gqa"), ["cudnn", "fa3"]
    short = cells(result, "latency")[0]
    worst = sorted(here, key=lambda c: speed(c, peers))[:3]
    again = " and ".join(f"{mean(speed(c, peers) for c in cells(measured(name), 'grid'))} ({link(name)})" for name in FORWARD_AGAIN)
    h100, h100_short = cells(measured(FORWARD_H100), "gqa"), cells(measured(FORWARD_H100_SHORT))[0]
    return f"""## Forward in bf16, on Hopper

TFLOP/s; higher is better. batch x length = 16384, heads x head_dim = 2048. {where(result)}, PyTorch {result['torch']}, cuDNN
9.19, FlashAttention-3 from the package fa3-fwd 0.0.3 ({link(FORWARD)}, {len(here)} cases). FlashAttention-2 did not run here: its
column is cuDNN's figure of this run times the ratio of the two in an earlier run on the same kind of machine.

{grid(result, {"libattn": "libattn", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "fa2": "FlashAttention-2, derived"})}
Speed of libattn as a multiple of the peer's. A ratio is taken within a round of measurements, and the median of the rounds counts; so it can
differ by a few percent from the ratio of two figures above. Geometric means:

{table(["", "against cuDNN", "against FlashAttention-3", "against the faster of both"],
       [[f"{what}, {len(some)} cases", *(mean(speed(c, p) for c in some) for p in (["cudnn"], ["fa3"], peers))]
        for what, some in (("the grid", here), ("64 query heads, 8 K/V heads, 2048 to 32768", gqa),
                           ("the same on an H100 (" + link(FORWARD_H100) + ")", h100))])}
- Two more runs of the grid gave {again} of the faster of both.
- Where libattn trails most: {", ".join(f"{c['name']} at {number(speed(c, peers), 2)}" for c in worst)} of the faster peer. On an H100
  {h100_short['name']} runs at {number(speed(h100_short, ['cudnn']), 2)} of cuDNN's speed ({link(FORWARD_H100_SHORT)}).
- One sequence of 512 with 8 heads of 64 in f16 takes {number(short['us']['libattn'], 1)} us, with cuDNN {number(short['us']['cudnn'], 1)} us.
- The device is at its power limit in the long cases.

![bf16 forward on an H200](measured/{FORWARD}.png)

[hopper.md](hopper.md) describes the kernels.
"""


def fp8():
    result, d256 = measured(FP8), measured(FP8_D256)
    h200 = measured(FP8_H200)
    peers = ["cudnn_fp8", "fa3_fp8"]
    errors = next(row for row in measured(FP8_ERRORS)["rows"] if (row["seqlen"], row["v"]) == (8192, "abs"))
    rows = []
    for what, some in [(f"head_dim {dim}", cells(result, "grid", dim)) for dim in (64, 128, 256)] + [
            (f"head_dim 256, another board ({link(FP8_D256)})", cells(d256, "grid")),
            ("64 query heads, 8 K/V heads", cells(result, "gqa")),
            (f"head_dim 128 on an H200 ({link(FP8_H200)})", cells(h200, "grid")),
            ("64 query heads, 8 K/V heads, on an H200", cells(h200, "gqa"))]:
        rows.append([f"{what}, {len(some)} cases", mean(speed(c, peers) for c in some), span(speed(c, peers) for c in some)])
    return f"""## Forward in FP8, on Hopper

q, k and v in e4m3; TFLOP/s. Out is bf16 (cuDNN's is e4m3). {where(result)}, means of {result['rounds']} rounds, peers live
({link(FP8)}). libattn adds the sums of each tile in float32, which the others do not; the last row is the relative
error of out (Frobenius norm) for V = |N(0,1)| and 8192 keys on an H200 ([below](#accuracy-of-fp8), {link(FP8_ERRORS)}).

{grid(result, {"libattn": "libattn", "cudnn_fp8": "cuDNN", "fa3_fp8": "FlashAttention-3"})[:-1]}
| error | {' | '.join(number(errors[name]['error'], 4) for name in ('libattn', 'cudnn', 'fa3'))} |

Speed of libattn as a multiple of the faster of both peers:

{table(["", "geometric mean", "from, to"], rows)}
At head_dim 256 FlashAttention-3 is faster, because it leaves its sums in the matrix unit.

![e4m3 forward on an H100](measured/{FP8}.png)

What options cost, as a multiple of the plain kernel's time. {where(measured(FP8_FORMS))} ({link(FP8_FORMS)}):

{forms()}
"""


def forms():
    result = measured(FP8_FORMS)
    names = {"mask": "block mask, all FULL", "score": "`_score` kernel, options unused", "descales of 128 keys": "descales of 128 keys",
             "descales of 64 keys": "descales of 64 keys", "out in fp8": "out in fp8", "precise": "`ATTN_FP8_PRECISE`"}
    return table(["", *names.values()],
                 [[c["cell"], *(number(c["us"].get(f"libattn {n}") and c["us"][f"libattn {n}"] / c["us"]["libattn"], 2) for n in names)]
                  for c in result["cells"]])


def masks():
    runs = [measured(name) for name in MASKS]
    names = {"full": "all FULL", "window 1024": "causal, window of 1024", "documents": "causal, documents of 700 to 1300",
             "prefix": "prefix-LM, prefix of 1024", "text and images": "causal text, two images of 1024",
             "half empty": "half of the blocks EMPTY at random"}
    rows = []
    for row in runs[0]["masks"]:
        same = [next(m for m in run["masks"] if m["mask"] == row["mask"]) for run in runs]
        rows.append([names.get(row["mask"], row["mask"]), number(row["tflops"]["libattn"]), number(row["tflops"]["flex"]),
                     ", ".join(number(m["ratio_to_flex"]["libattn"], 2) for m in same)])
    own = [[what, *(", ".join(number(x, 3) for x in run["own"][key]) for run in runs)]
           for what, key in (("speed with all FULL / without a mask", "none_to_full"), ("time with half EMPTY / with all FULL", "half_empty_to_full"))]
    clocks = {launch["mask"]: statistics.mean(launch["million_clocks"]) for launch in measured(MASK_CLOCKS)["launches"]
              if launch["kernels"] == runs[0]["commit"] and "d128" in launch["kernel"]}
    spread = max(max(times) / min(times) - 1 for run in runs for times in run["own"]["rounds_us"].values())
    return f"""## Block masks

bf16, batch 1, 16 heads of 128, 8192 queries and keys, blocks of 128. TFLOP/s of the visible pairs, next to FlexAttention compiled;
the worst of three rounds counts. {where(runs[0])} ({link(MASKS[0])}); the ratios are those of three runs
({link(MASKS[1], "second")}, {link(MASKS[2], "third")}).

{table(["mask", "libattn", "FlexAttention", "ratio in three runs"], rows)}
No mask, all FULL and half EMPTY compared with each other, three rounds a run:

{table(["", "first run", "second", "third"], own)}
Times of the same launch differ by up to {100 * spread:.0f} %, because the device is at its power limit. Counted in clocks, these two are
{number(clocks['none'] / clocks['full'], 2)} and {number(clocks['half empty'] / clocks['full'], 2)} ({link(MASK_CLOCKS)}).
[masks.md](masks.md) describes the masks.
"""


# ---- decode and serving -----------------------------------------------------------------------------------------------

def decode_cell(results, heads, seqlen, batch, kv, page=0, queries=1):
    for result in results:
        for c in result["cells"]:
            if (f"{c['heads']}/{c['heads_kv']}", c["seqlen"], c["batch"], c["kv"], c["page"], c["seqlen_q"], c["dim"], c["warm"],
                    c.get("promise", False), c["fixed_split"]) == (heads, seqlen, batch, kv, page, queries, 128, False, False, 0):
                return c["us"]
    return {}


def against(some, peer):
    """Of the cases that the peer takes."""
    rates = [speed(c, [peer]) for c in some if peer in c["rounds_us"]]
    return f"{span(rates)} of {NAMES[peer]}'s speed, slower in {sum(rate < 1 for rate in rates)} of {len(rates)}"


def decode_cases(result):
    """Those of one query a sequence over padded caches larger than L2, head_dim 128: in bf16, in e4m3."""
    plain = {c["name"]: c for c in result["cells"] if c["group"] in ("short", "fp8", "anchors") and not c["warm"] and not c.get("promise")}
    return [[c for c in plain.values() if c["kv"] == kv] for kv in ("bf16", "e4m3")]


def single_queries(result):
    """Those of any head_dim and number of heads, in bf16."""
    some = {c["name"]: c for c in result["cells"] if c["seqlen_q"] == 1 and c["kv"] == "bf16"
            and not (c["page"] or c["warm"] or c["fixed_split"] or c.get("promise"))}
    return list(some.values())


def slow_reads(result):
    """A reader wonders at a kernel that is faster than reading alone."""
    slow = [c for c in decode_cases(result)[0] if c["us"]["read"] > c["us"]["libattn"]]
    return "".join(f"; at B{c['batch']} {c['heads']}/{c['heads_kv']}, {c['seqlen']} its rounds took "
                   f"{' and '.join(microseconds(us) for us in sorted(c['rounds_us']['read']))} us, so that row says little of memory" for c in slow)


def decode_rows():
    result = measured(DECODE_ROWS)
    sixteen, eight = decode_cases(result)
    rows = {}
    for c in result["cells"]:
        rows.setdefault(c["name"].replace(" d128", ""), [microseconds(c["us"].get(who)) for who in ("libattn", "cudnn", "fa3", "flashinfer", "read")])
    errors = {who: [c["errors"][who] for c in eight] for who in ("libattn", "fa3")}
    return f"""## Decode by rows

The kernels `decode_sm90_*_r8` to `_r64`, next to cuDNN {result['cudnn'] // 10000}.{result['cudnn'] // 100 % 100}, which takes one query, 16-bit types and no pages,
FlashAttention-3 as vllm 0.33 ships it, without a promise of splits, and FlashInfer 0.6.6, over pages of 16 where the row names none. Microseconds; lower is better; caches larger than L2 unless the row says warm; `q4`: 4
queries of each sequence. `read` is the time to read as many bytes. {where(result)}, {result['rounds']} rounds, interleaved ({link(DECODE_ROWS)}).
What each step gave, and the kernels before these, are in the logs of [26](log/2026-11-26_decode_rows.md) and [27 November](log/2026-11-27_decode_rows.md).

{table(["batch, query/K/V heads, keys", "libattn", "cuDNN", "FA3", "FlashInfer", "read"], [[name, *us] for name, us in rows.items()])}
- One query in bf16, no pages ({len(sixteen)} cases): {against(sixteen, "cudnn")}; {against(sixteen, "fa3")}; {against(sixteen, "flashinfer")}.
- The same over e4m3 ({len(eight)} cases): {against(eight, "fa3")}; {against(eight, "flashinfer")}. FlashAttention-3 takes q in e4m3 too there: its error is {max(errors['fa3']):.1e},
  libattn's {max(errors['libattn']):.1e}.
- The first of these with other head_dims and numbers of heads too ({len(single_queries(result))} cases): {against(single_queries(result), "cudnn")}.
- Loading has changed since, [in pages and over fp8](log/2026-11-28_fp8_appends.md) and [in 16 bits](log/2026-11-28_rows_one_by_one.md). The next
  section has newer kernels.

![Time to read as many bytes as a part of each library's time, decode on an H100](measured/{DECODE_ROWS}.png)
"""


def decode_rows_h200():
    result = measured(DECODE_ROWS_H200)
    rows = {}
    for c in result["cells"]:
        us = c["us"]
        share = None if c["warm"] or c["seqlen_q"] > 64 else f"{100 * us['read'] / us['libattn']:.0f} %"
        rows.setdefault(c["name"].replace(" d128", ""), [*(microseconds(us.get(who)) for who in ("libattn", "cudnn", "read")), share])
    sixteen, eight = decode_cases(result)
    many = [c for c in sixteen if c["kv_bytes"] > 1e8]
    few = [c for c in sixteen if c["kv_bytes"] <= 1e8]

    def times(heads, dim):
        us = next(c["us"] for c in single_queries(result) if (c["heads"], c["dim"]) == (heads, dim))
        return number(us["libattn"] / us["cudnn"], 2)

    def shares(some):
        return span((100 * c["us"]["read"] / c["us"]["libattn"] for c in some), 0)

    return f"""## Decode by rows on an H200

Newer kernels than those above. Microseconds; lower is better. {where(result)}, {result['rounds']} rounds, interleaved ({link(DECODE_ROWS_H200)}). FlashAttention-3 and FlashInfer
did not run. `share` is the time of `read` divided by libattn's: at 100 % libattn would take as long as reading the bytes. It is left out for warm caches and 2048 queries, which memory does not limit.

{table(["batch, query/K/V heads, keys", "libattn", "cuDNN", "read", "share"], [[name, *us] for name, us in rows.items()])}
- One query in bf16, no pages ({len(single_queries(result))} cases): {against(single_queries(result), "cudnn")}.
- With caches below 100 MB ({len(few)} cases) libattn takes {span((c["us"]["libattn"] / c["us"]["cudnn"] for c in few))} of cuDNN's time, with larger ones ({len(many)} cases, head_dim 128)
  {span((c["us"]["libattn"] / c["us"]["cudnn"] for c in many))}. At B16 128/8, where a K/V head has 16 rows, it is {times(128, 128)}, at head_dim 64 {times(32, 64)}, at 256 {times(32, 256)}.
- With caches above 100 MB and head_dim 128 the share is {shares(many)} % in bf16, {shares(c for c in eight if c["kv_bytes"] > 1e8)} % over e4m3.
- With 8 and more queries of a sequence, and with splits of 512 keys, the share is smaller.
"""


def latent():
    result = measured(LATENT)
    rows = [[c["name"], *(microseconds(c["us"].get(who)) for who in ("libattn", "flashmla")), f"`{c['kernels']['libattn']}`"]
            for c in result["cells"]]
    return f"""## Decode over latent caches

`mla_sm90_*` ([mla.md](mla.md)) next to FlashMLA as vllm 0.33 ships it: K of 576 columns, of which the first 512 are V, bf16; batch, keys, query heads,
`q2`: 2 queries of each sequence. Microseconds, larger than L2. {where(result)}, {result['rounds']} rounds, interleaved ({link(LATENT)}).

{table(["", "libattn", "FlashMLA", "kernel"], rows)}
- {against(result["cells"], "flashmla")} rows. On an H100 at 0e4c2d2, {against(measured(LATENT_H100)["cells"], "flashmla")} rows
  ({link(LATENT_H100)}). What limits them is in the [log](log/2026-11-27_mla_decode.md).
"""


def decode():
    result, prefill = measured(DECODE), measured(PREFILL)
    rows = []
    for heads, seqlen, batch, page, queries in (
            ("32/8", 1024, 1, 0, 1), ("32/8", 8192, 1, 0, 1), ("32/8", 131072, 1, 0, 1), ("32/8", 8192, 16, 0, 1), ("32/8", 8192, 64, 0, 1),
            ("64/8", 4096, 128, 0, 1), ("32/32", 4096, 32, 0, 1), ("8/1", 65536, 1, 0, 1), ("32/8", 8192, 64, 64, 1),
            ("32/8", 8192, 64, 16, 1), ("32/8", 8192, 64, 1, 1), ("32/8", 8192, 64, 0, 4), ("32/8", 8192, 64, 0, 8),
            ("32/8", 8192, 64, 0, 12), ("32/8", 8192, 1, 0, 2048), ("32/8", 8192, 1, 64, 2048)):
        name = f"B{batch} {heads}, {seqlen}" + (f", pages of {page}" if page else "") + (f", {queries} queries" if queries > 1 else "")
        two, one = (decode_cell((result, prefill), heads, seqlen, batch, kv, page, queries) for kv in ("bf16", "e4m3"))
        rows.append([name, *(microseconds(two.get(who)) for who in ("libattn", "cudnn", "fa3", "flashinfer", "read")),
                     *(microseconds(one.get(who)) for who in ("libattn", "fa3", "flashinfer", "read"))])
    sixteen, eight = decode_cases(result)
    errors = {who: [c["errors"][who] for c in eight] for who in ("libattn", "fa3")}
    return f"""## Decode on an H200, the kernels before

Microseconds; lower is better. One query of each sequence unless the row says otherwise, head_dim 128, caches larger than L2, replayed as
graphs. {where(result)} ({link(DECODE)}); 2048 queries: {where(prefill)} ({link(PREFILL)}). cuDNN 9.19, FlashAttention-3 as vllm
0.33 ships it, FlashInfer 0.6.6 (with pages of 16 where the row names none). `read` is the time to read as many bytes{slow_reads(result)}. An empty cell: not measured, most often
because the library does not take such a call.

{table(["batch, query/K/V heads, keys", "libattn", "cuDNN", "FA3", "FlashInfer", "read", "e4m3 K and V: libattn", "e4m3: FA3", "e4m3: FlashInfer",
        "e4m3: read"], rows)}
- One query in bf16, no pages ({len(sixteen)} cases): {against(sixteen, "cudnn")}; {against(sixteen, "fa3")}; {against(sixteen, "flashinfer")}.
- The same over e4m3 ({len(eight)} cases): {against(eight, "fa3")}; {against(eight, "flashinfer")}. FlashAttention-3 takes q in e4m3 too
  there: its error is {max(errors['fa3']):.1e}, libattn's {max(errors['libattn']):.1e}.
- These kernels were slower than others with short caches of one sequence, with one K/V head, with 4 or more queries of a sequence, and
  with pages below 16 keys.

![GB/s in decoding on an H200, at the earlier commit f90f792](measured/2026-11-24_h200_decode_f90f792.png)

[decode.md](decode.md) describes the kernels. Caches of 8 and 4 bits, microseconds, head_dim 128. {where(measured(QUANTISED))}
({link(QUANTISED)}); in parentheses the time to read as many bytes:

{quantised()}
"""


def quantised():
    result, kinds = measured(QUANTISED), ["f16", "q8_0", "i8", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "i4", "nvfp4"]
    rows = []
    for batch, seqlen in ((1, 8192), (1, 131072), (16, 8192), (64, 8192)):
        found = [decode_cell([result], "32/8", seqlen, batch, kind) for kind in kinds]
        rows.append([f"B{batch} 32/8, {seqlen}", *(f"{microseconds(us['libattn'])} ({microseconds(us['read'])})" for us in found)])
    return table(["batch, heads, keys", *kinds], rows)


def serving():
    step, append, prefix, many = measured(STEP), measured(APPEND), measured(PREFIX), measured(APPEND_MANY)
    us = append["us"]
    of_copy = {name.partition(" ")[0]: time / many["us"][f"{name} copy"] for name in
               (f"{kind} 8x2048 pages of 64" for kind in ("bf16", "e4m3", "q8_0", "q4_0", "i8", "i4", "nvfp4")) for time in [many["us"][name]]}
    return f"""## Steps of a server

{where(step)} ({link(STEP)}): 127 tokens and a chunk of 2048 queries, each over 8192 keys, 32/8 heads, bf16: {number(step["us"]["one call"])} us in one
call, {number(step["us"]["two calls"])} us in two.

{where(append)}, microseconds:

{table(["", "us", "JSON"],
       [["`kv_append` with rotary embedding, one token of each of 64 sequences, bf16", number(us["bf16 pages of 64"], 1), link(APPEND)],
        ["the same into e4m3", number(us["e4m3 pages of 64"], 1), link(APPEND)]])}
{where(many)} ({link(APPEND_MANY)}): `kv_append` of 8 x 2048 tokens takes, as a multiple of a copy of as many bytes,
{", ".join(f"{number(ratio, 2)} into {kind}" for kind, ratio in of_copy.items())}.

{where(prefix)} ({link(PREFIX)}): 64 sequences that share 8192 keys and have 256 of their own, 32/8 heads, bf16: {number(prefix["us"]["shared"])} us as
a shared segment, {number(prefix["us"]["flat"])} us as 8448 keys of each sequence.
"""


# ---- others -----------------------------------------------------------------------------------------------------------

def sm80():
    result = measured(SM80)
    return f"""## The portable CUDA kernels

`fwd_sm80_*` serve NVIDIA GPUs from Ampere on. They were timed on an H200, not on an Ampere or consumer GPU. Speed as a multiple of
FlashAttention-2's on the same device, lengths 2048 and 16384. {where(result)} ({link(SM80)}):

{table(["", "full", "causal"],
       [[f"head_dim {dim}", *(span(speed(c, ["fa2"]) for c in cells(result, "grid", dim) if c["causal"] == causal) for causal in (False, True))]
        for dim in (64, 128, 256)])}
"""


def cpu():
    result = measured(CPU)
    def middle(mask, key):
        return statistics.median(r[key][mask] for r in result["rounds"])

    bench = result["attn_bench"]
    return f"""## CPU

float32, batch 1, 8 heads of 128, 2048 queries and keys, both cores, next to PyTorch 2.15's CPU attention in the same minute, medians of
three rounds. {where(result)} ({link(CPU)}):

{table(["", "libattn", "share of the measured multiply-add rate", "PyTorch"],
       [[mask, f"{middle(mask, 'libattn_ms'):.1f} ms", f"{100 * middle(mask, 'share_of_fma'):.0f} %",
         f"{middle(mask, 'torch_2.15_sdpa_ms'):.1f} ms"] for mask in ("full", "causal")])}
A plan takes {number(bench['plan_us'], 1)} us on this machine, a run {number(bench['run_overhead_us'], 1)} us besides its work.
"""


def overhead(case_list, framework, device):
    return {tuple(c["batch_heads_seqlen_dim"]): c["us"] for c in case_list if (c["framework"], c["device"]) == (framework, device)}


def calls():
    result, gpu, before = measured(CALLS), measured(CALLS_GPU), measured(CALLS_GPU_BEFORE)
    host = []
    shapes = list(overhead(result["runs"][0]["cases"], "numpy", "cpu"))
    commits = list(dict.fromkeys(run["commit"] for run in result["runs"]))

    def best(shape, framework, name):
        """The smaller figure of a commit's runs, of the first and of the last commit."""
        return [min(overhead(run["cases"], framework, "cpu")[shape][name] for run in result["runs"] if run["commit"] == commit)
                for commit in (commits[0], commits[-1])]

    for shape in shapes:
        changed = [" -> ".join(number(x, 1) for x in best(shape, *what)) for what in
                   (("numpy", "attn.forward"), ("numpy", "attn.Plan, out="), ("torch", "attn.torch sdpa"), ("torch", "attn.forward"),
                    ("torch", "attn.Plan, out="))]
        host.append([", ".join(map(str, shape)), *changed[:2], number(best(shape, "torch", "torch's sdpa")[1], 1), *changed[2:]])
    on_gpu = overhead(gpu["cases"], "torch", "cuda")
    names = ["a launch", "torch's sdpa", "attn.torch sdpa", "attn.forward", "attn.Plan, out="]

    def beside(case_list, name):
        return statistics.mean(us[name] - us["a launch"] for us in overhead(case_list, "torch", "cuda").values())

    return f"""## Calls from Python

What a small call costs, in microseconds. Contenders take turns, and the smallest of {result['rounds']} rounds of
{result['calls_of_a_round']} calls counts. On the host a call includes its computation. {result['device']}, Python {result['python']},
PyTorch {result['torch']}, f32, {result['date']}, commits {commits[0]} -> {commits[-1]} in turns ({link(CALLS)}):

{table(["batch, heads, queries and keys, head_dim", "NumPy: `forward`", "`Plan`, out=", "torch's sdpa", "`attn.torch` sdpa",
        "tensors: `forward`", "`Plan`, out="], host)}
On a GPU a call only launches. H100 in a virtual machine, PyTorch {gpu['torch']}, f16, {gpu['date']}, commit {gpu['commit']}
({link(CALLS_GPU)}); `a launch` is `torch.cuda._sleep(0)`, PyTorch's launch of a kernel that does nothing:

{table(["batch, heads, queries and keys, head_dim", "a launch", "torch's sdpa", "`attn.torch` sdpa", "tensors: `forward`", "`Plan`, out="],
       [[", ".join(map(str, shape)), *(number(us[name], 1) for name in names)] for shape, us in on_gpu.items()])}
On average a plan's call takes {number(beside(gpu['cases'], 'attn.Plan, out='), 1)} us more than the launch, `forward`
{number(beside(gpu['cases'], 'attn.forward'), 1)} us. Before commit {commits[-1]}, on an H200, these were
{number(beside(before['runs'][0], 'attn.Plan, out='), 1)} and {number(beside(before['runs'][0], 'attn.forward'), 1)} us
({link(CALLS_GPU_BEFORE)}).
"""


def accuracy():
    result = measured(ACCURACY)
    rows = []
    for dtype in dict.fromkeys(c["dtype"] for c in result["cells"]):
        here = [c for c in result["cells"] if c["dtype"] == dtype]
        rows.append([dtype, *(span(c["times"][peer][kind] for c in here if peer in c["times"])
                              for peer in ("cudnn", "fa2") for kind in ("max", "mean"))])
    return f"""## Accuracy in 16 bits

Error of libattn against float64 as a multiple of the peer's error, B1 H4 S1024, head_dim 64, 128 and 256, full and causal.
{where(result)} ({link(ACCURACY)}):

{table(["", "largest error, of cuDNN's", "mean error, of cuDNN's", "largest, of FlashAttention-2's", "mean, of FlashAttention-2's"], rows)}
"""


def fp8_accuracy():
    plain, precise = measured(FP8_SIGMA), measured(FP8_SIGMA_PRECISE)
    by = {(row["head_dim"], row["sigma"]): row for row in plain["errors"]["rows"]}
    sigmas = []
    for row in precise["sigma"]:
        cell = [str(row["sigma"])]
        for dim in (64, 128, 256):
            one = by[dim, row["sigma"]]
            cell += [f"{one['plain']:.2e}", f"{one['precise'] if dim == 64 else row[f'd{dim}_precise']:.1e}", f"{one['FlashAttention-3']:.2e}"]
        sigmas.append(cell)
    errors = measured(FP8_ERRORS)
    apart = max(abs(row[who]["error"] - other[who]["error"]) for row, other in zip(errors["rows"], measured(FP8_ERRORS_H100)["rows"])
                for who in ("libattn", "fa3", "cudnn"))
    found = {(row["seqlen"], row["v"]): row for row in errors["rows"]}
    kinds = list(dict.fromkeys(row["v"] for row in errors["rows"]))
    lengths = [[str(length), *(number(found[length, v][who]["error"], 4) for v in kinds for who in ("libattn", "fa3", "cudnn"))]
               for length in dict.fromkeys(row["seqlen"] for row in errors["rows"])]
    same = [row["libattn"]["to_same_p"] for row in errors["rows"] if row["v"] == kinds[0]]
    signs = [row["libattn"]["to_same_p"] for row in errors["rows"] if row["v"] == kinds[1]]
    sums = measured(FP8_SUMS)["matrix_sums"]
    return f"""## Accuracy of FP8

[numerics.md](numerics.md#how-hopper-adds-fp8-products) explains these figures.

Error by number of keys: head_dim 128, q and k of N(0,1) rounded to e4m3, relative Frobenius norm against float64.
{errors['device']}, {errors['date']} ({link(FP8_ERRORS)}; on an H100 they differ by at most {apart:.0e}, {link(FP8_ERRORS_H100)}). Out is f32 in
libattn, bf16 in FlashAttention-3, e4m3 in cuDNN.

{table(["keys", "V >= 0, the size of N(0,1): libattn", "FlashAttention-3", "cuDNN", "V = N(0,1): libattn", "FlashAttention-3", "cuDNN"], lengths)}
Against float64 sums of the same rounded P libattn is off by {min(same):.1e} to {max(same):.1e} for V >= 0, and by {min(signs):.1e} to
{max(signs):.1e} for V of both signs.

![Error by number of keys, FP8 on an H200](measured/{FP8_ERRORS}.png)

With `ATTN_FP8_PRECISE`: relative Frobenius norm against float64, q, k and v of N(0, sigma^2) in e4m3, B1 H4 S1024.
{plain['device']}, {plain['date']} ({link(FP8_SIGMA)}); `precise` at head_dim 128 and 256: B1 H2 S1024, {precise['gpu']}
({link(FP8_SIGMA_PRECISE)}).

{table(["sigma", "d64", "precise", "FlashAttention-3", "d128", "precise", "FlashAttention-3", "d256", "precise", "FlashAttention-3"], sigmas)}
Relative error of a sum of positive products, |N(0,1)| in e4m3: added by the matrix unit alone, and with float32 sums after each 128
products. H200, {measured(FP8_SUMS)['date']} ({link(FP8_SUMS)}).

{table(["products", *map(str, sums["products"])],
       [["by the unit alone", *(f"{x:.1e}" for x in sums["alone"])],
        ["float32 after each 128", *(f"{x:.1e}" for x in sums["float32 behind each 128"])]])}
"""


def fill(text):
    """Paragraphs and items of lists in lines of one width."""
    blocks = []
    for block in re.split(r"\n\n+", text.strip()):
        if block[0] == "-":
            items = re.split(r"\n(?=- )", block)
            block = "\n".join(textwrap.fill(" ".join(item.split()), 140, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                              for item in items)
        elif block[0] not in "|#!":
            block = textwrap.fill(" ".join(block.split()), 140, break_long_words=False, break_on_hyphens=False)
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def gradient_name(at):
    mask = f"window of {at['window']}" if at.get("window") else "causal" if at["causal"] else "full"
    tokens = f"{len(at['documents'])} documents in {at['seqlen']}" if at.get("documents") else at["seqlen"]
    return f"d{at['dim']} {mask}, {tokens}" + (f", {at['heads']}/{at['heads_kv']} heads" if at["heads"] != at["heads_kv"] else "")


def gradients_beside(name, peer, title):
    """A table of a result with one peer, or nothing if it was not measured."""
    if not name:
        return ""
    rows = [[gradient_name(c["cell"]), *(number(c["tflops"][who]) for who in ("libattn", peer)), number(c["tflops"]["libattn"] / c["tflops"][peer], 2)]
            for c in measured(name)["cells"]]
    return f"""{title} ({link(name)}):

{table(["head_dim, mask, tokens", "libattn", {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}[peer], "libattn's part of it"], rows)}
"""


def training():
    if not TRAINING:
        return ""
    names = {"none": "no attention", "libattn": "libattn", "fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}
    rows = [[c["cell"].replace("x", " x "), *(who in c["milliseconds"] and number(c["milliseconds"][who], 1) +
             (f" ({c['share_of_attention'][who]:.1%})" if who in c["share_of_attention"] else "") or None for who in names)] for c in measured(TRAINING)["cells"]]
    return f"""A training step of 16 layers of Llama 3.2 1B's shape with AdamW, bf16, causal, 8192 tokens, in ms, and in brackets what attention takes of it ({link(TRAINING)}):

{table(["sequences x length", *names.values()], rows)}
"""


def backward():
    result, rows = measured(BACKWARD), []
    for c in result["cells"]:
        rows.append([gradient_name(c["cell"]), *(number(c["tflops"][who]) for who in ("libattn", "fa3", "cudnn", "fa2")),
                     c["kernels"]["libattn"].partition("_bf16")[0]])
    settled = f" after {result['settle']:.0f} ms to settle" if result.get("settle") else ""
    picture = f"![Gradients on an H200](measured/{BACKWARD}.png)\n\n" if (FOLDER / f"{BACKWARD}.png").exists() else ""
    return f"""## Gradients on Hopper

TFLOP/s of 2.5 forwards, bf16; higher is better. 16384 tokens, heads x head_dim = 2048 where the row names no heads. libattn gives the same bits in every run, and its
figures contain all its launches. {where(result)}, PyTorch {result['torch']}, FlashAttention-3 of xformers 0.0.34, whose bits differ from run to run, 3 rounds of {result.get('milliseconds', 15):.0f} ms{settled} ({link(BACKWARD)}).{"" if settled else " Runs this short leave the clock at its highest."}

{picture}{table(["head_dim, mask, length", "libattn", "FlashAttention-3", "cuDNN", "FlashAttention-2", "kernel"], rows)}

{gradients_beside(BACKWARD_PACKED, "fa3", "Documents of 700 to 1300 tokens, and windows; TFLOP/s of visible pairs")}
{gradients_beside(BACKWARD_SM80, "fa2", "The portable kernels `bwd_sm80_*` on the same device")}
{training()}
The logs have what limits [bwd_sm90](log/2026-11-27_backward_sm90.md), [its kernels of head_dim 256](log/2026-11-27_backward_d256.md) and [bwd_sm80](log/2026-11-27_backward_sm80.md), and what was tried since ([parts](log/2026-11-28_backward_limits.md), [order](log/2026-11-28_backward_order.md), [steps](log/2026-11-28_backward_steps.md)).
"""


def page():
    sections = [forward(), fp8(), masks(), decode_rows(), decode_rows_h200(), latent(), decode(), serving(), backward(), sm80(), cpu(), calls(), accuracy(), fp8_accuracy()]
    return """# Performance

`bench/performance.py` writes this page from the JSON files that it links to. Each of them has the date, device, driver, clocks and
commit of its run. [bench.md](bench.md) says how the figures are made. Nothing was measured on an AMD GPU: the gfx942 kernels have
only run on the emulator, which counts instructions and clocks of a model ([gfx942.md](gfx942.md)).

`d64` is head_dim 64, `full` is without a mask, `B16` is a batch of 16, `32/8` are 32 query heads and 8 K/V heads.

""" + "\n".join(fill(section) for section in sections)


def readme():
    """Wins and losses alike."""
    grid, peers = cells(measured(FORWARD), "grid"), ["cudnn", "fa3"]
    fp8_grid, fp8_peers = cells(measured(FP8), "grid"), ["cudnn_fp8", "fa3_fp8"]
    two, newer = single_queries(measured(DECODE_ROWS)), single_queries(measured(DECODE_ROWS_H200))
    latent_cells = measured(LATENT)["cells"]
    worst = min(grid, key=lambda c: speed(c, peers))
    gradients = {(who, dim): [c["tflops"]["libattn"] / c["tflops"][who] for c in measured(BACKWARD)["cells"] if c["cell"]["dim"] == dim]
                 for who in ("cudnn", "fa3") for dim in (64, 128, 256)}
    return fill(f"""
- **Forward, bf16, H200:** {mean(speed(c, ["cudnn"]) for c in grid)} times cuDNN's speed and {mean(speed(c, ["fa3"]) for c in grid)} times
  FlashAttention-3's (geometric means of {len(grid)} cases); in the worst case {number(speed(worst, peers), 2)} of the faster one's.
- **Forward, FP8, H100:** {mean(speed(c, fp8_peers) for c in fp8_grid)} times the speed of the faster of these two, but
  {mean(speed(c, fp8_peers) for c in fp8_grid if c["dim"] == 256)} at head_dim 256 (geometric means of {len(fp8_grid)} and
  {sum(c["dim"] == 256 for c in fp8_grid)} cases); in the worst case {number(min(speed(c, fp8_peers) for c in fp8_grid), 2)}.
- **Decode, bf16, one query a sequence, H100:** {against(two, "cudnn")} cases; {against(two, "fa3")}; {against(two, "flashinfer")}.
  H200, with newer kernels: {against(newer, "cudnn")} cases.
  Over fp8 and quantised caches decode reaches a smaller share of the memory's bandwidth.
- **Decode over latent caches, bf16, H200:** {against(latent_cells, "flashmla")} cases.
- **Gradients, bf16, H200:** {span(gradients["cudnn", 64])} of cuDNN's speed at head_dim 64, {span(gradients["cudnn", 128])} at 128, {span(gradients["cudnn", 256])} at 256; {span(gradients["fa3", 64])}, {span(gradients["fa3", 128])} and {span(gradients["fa3", 256])} of FlashAttention-3's, whose gradients differ from run to run.
""") + """
[docs/performance.md](docs/performance.md) has the tables, other devices and the CPU.
"""


def texts():
    return {"docs/performance.md": page(), "README.md": generated.between("README.md", "bench/performance.py", readme())}


def main(check=""):
    if check not in ("", "--check"):
        sys.exit(f"{check}: accepted: --check")
    generated.write(texts(), "bench/performance.py", check)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
