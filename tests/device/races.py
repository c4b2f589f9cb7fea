"""What racecheck reports, as pairs of accesses, and whether each is known to be of right code.

    races.py LOG...

A pair is known by the functions and files of its two accesses, so the device code must have lines (-DATTN_CUDA_LINES=ON). Prints each
kind of pair once, with why it is known. Exit code: 1 if one is not known.
"""
import re
import sys
from collections import Counter
from pathlib import Path

# What racecheck does not see. WARP, LOADS: fwd_sm90_f16_d64_score{,_paged}, bwd_sm90_bf16_d64, bwd_sm90_bf16_d256 and three decode_sm90_blocks_* have no
# report if they are compiled so that every lane arrives (docs/log/2026-11-25_serving.md, 2026-11-27_backward_again.md, _backward_d256.md, _short_calls.md). PARTS:
# docs/log/2026-11-27_mla_decode.md. The pairs of load_paged_keys with alternating.cuh, and those of by_rows.cuh, have none in fwd_sm90_f16_d512_paged and in
# mla_sm90_bf16_d576_*_{656,e4m3} compiled that way, TAKES none in fwd_sm90_bf16_d512 compiled with bar.sync for both (docs/log/2026-11-27_last_run.md).
WARP = "lanes meet at a __syncwarp() that ptxas leaves out, then lane 0 arrives at a barrier for all"
TURNS = "groups meet at a barrier, and have met apart another number of times before: planted.cu, groups-apart"
TAKES = "one group passes a barrier by bar.arrive, then the other reads after its bar.sync: planted.cu, hand-over"
LOADS = "the copy engine writes after a barrier for which the copy waits, at which lane 0 has arrived for those who read"
PARTS = "three parts lie between: the writer's unit is asked for when all warps have arrived for the unit before the last, after the read"
VOTE = "a warp votes on what its lanes have read, and only then writes: clear_poisoned"
# function and file of either access, and why
KNOWN = [
    ("visible_by_blocks live_tiles.cuh", "leave live_tiles.cuh", WARP),
    ("prepare forward.cuh", "load load.cuh", WARP),
    ("run forward.cuh", "load load.cuh", WARP),
    ("v_of warp.cuh", "load load.cuh", WARP),
    ("clear_unused sums.cuh", "load load.cuh", WARP),
    ("prepare forward.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("run forward.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("clear_unused sums.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("hide_absent scores.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("Box load_paged.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("load_paged_values load_paged.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("Box load_paged.cuh", "__cvta_generic_to_shared sm_20_intrinsics.hpp", WARP),
    ("run alternating.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("weigh alternating.cuh", "load_paged_keys load_paged.cuh", WARP),
    ("receive alternating.cuh", "hand_over alternating.cuh", TAKES),
    ("run own.cuh", "post swapped_load.cuh", WARP),
    ("run own.cuh", "load own_load.cuh", WARP),
    ("take own.cuh", "load own_load.cuh", WARP),
    ("load_shared_half load_shared.h", "cp_async_part_if cp_async_part.h", WARP),
    ("load_shared_pair load_shared.h", "cp_async_part_if cp_async_part.h", WARP),
    ("alone merge.cuh", "run swapped_load.cuh", WARP),
    ("run many.cuh", "store many.cuh", PARTS),
    ("join_groups swapped.cuh", "join_groups swapped.cuh", TURNS),
    ("find_dq consumer.cuh", "add_dq load.cuh", WARP),
    ("load_shared_two_floats load_shared.h", "bulk_load bulk.h", LOADS),
    ("store_shared_floats load_shared.h", "bulk_load bulk.h", LOADS),
    ("load_shared_floats load_shared.h", "bulk_load bulk.h", LOADS),
    ("ldmatrix ldmatrix.h", "bulk_load bulk.h", LOADS),
    ("ldmatrix_transposed ldmatrix.h", "bulk_load bulk.h", LOADS),
    ("run by_rows.cuh", "run by_rows.cuh", WARP),
    ("take by_rows.cuh", "run by_rows.cuh", WARP),
    ("load_shared_floats load_shared.h", "store_shared_floats load_shared.h", WARP),
    ("load_shared_floats load_shared.h", "fill_shared load_shared.h", VOTE),
    ("store_shared_floats load_shared.h", "store_shared_floats load_shared.h", WARP),
]


def access(text):
    """Function and file of the access in a line of a log; None if it has no line."""
    found = re.search(r"(?:Read|Write) access at (.+)\+0x[0-9a-f]+ in ([\w.]+):\d+", text)
    if not found:
        return None
    name = found[1]
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:  # template arguments
        name = shorter
    return f"{name.partition('(')[0].split('::')[-1].split()[-1]} {found[2]}"


def pairs(log):
    """Counts of pairs, each sorted."""
    found, first = Counter(), None
    for line in log.splitlines():
        if "Race reported between" in line:
            first = access(line)
        elif " access at " in line:
            second = access(line)
            found[tuple(sorted((first, second))) if first and second else ("an access without a line",) * 2] += 1
    return found


def main(paths):
    reasons = {tuple(sorted(row[:2])): row[2] for row in KNOWN}
    unknown = 0
    for pair, count in sorted(sum((pairs(Path(path).read_text(errors="replace")) for path in paths), Counter()).items()):
        unknown += pair not in reasons
        print(f"{count} of {pair[0]} and {pair[1]}: {reasons.get(pair, 'NOT KNOWN')}")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
