"""attn-tests on a device, each case in a process of its own, several at a time: what a case leaves behind reaches no other, and
one that hangs is cut off alone. The GPUs of the machine, which must be alike, share the cases. Cases that take long are several processes
(PARTS), each with a part of the devices' kernels; their row has the sum of assertions, and the seconds of the longest.

    conformance.py BIN_DIR OUT.json COMMIT [--jobs N] [--seconds N] [--only FILTER] [--before JSON]

BIN_DIR holds attn-tests. FILTER chooses cases as Catch2 does ("fp8:*"), by default all but the hidden ones. OUT.json is as those of
docs/measured: date, GPU, driver, clocks, commit, and what became of each case. It is written after each case, so that a run which is
ended early keeps what it has. --before is the JSON of an earlier run: new cases, and then those that took long, begin first. Prints the
cases that did not pass. Exit code: 1 if one failed or was cut off.
"""
import argparse
import datetime
import json
import math
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import gpus

# How many processes run a case. Only cases that look at each kernel by itself, whose kernels are many.
PARTS = {
    "forward: random problems for matrix units": 3,
    "scores: the largest wins, whatever its size": 2,
    "rows of nobody: behind the last sequence": 2,
    "accuracy: K/V in 2 to 5 segments against uncut": 2,
    "accuracy: 100 runs give the same bits": 2,
    "descales: from the smallest to the largest, on every kernel of fp8": 2,
    "forward: boundary shapes": 2,
    "decode: random problems": 3,
    "positions: random problems": 3,
    "positions: the merged results of ranks are the whole sequence's": 2,
    "caches: a token over a cache, full and causal, is what it is by hand": 2,
    "forward: the output shows the mask": 2,
    "forward: prefill over pages": 2,
}
RESULTS = ("passed", "failed", "cut off", "skipped")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import measured  # noqa: E402


def relative(text):
    """Without where the tree lies on this machine."""
    return text.replace(f"{ROOT}/", "")


def device():
    asked = ["name", "driver_version", "power.limit", "clocks.max.sm"]
    made = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"], capture_output=True, text=True)
    if made.returncode != 0:
        sys.exit(f"conformance: nvidia-smi: {made.stdout.strip() or made.stderr.strip()}")
    return dict(zip(("name", "driver", "watts_limit", "clocks_max_sm"), made.stdout.splitlines()[0].split(", ")), count=gpus.count())


def cases(tests, only):
    made = subprocess.run([tests, *([only] if only else []), "--list-test-names-only"], capture_output=True, text=True)
    return [name for name in made.stdout.splitlines() if name]  # the exit code is how many there are


def longest_first(names, before):
    """`before` is a path or None."""
    seconds = {row["case"]: row["seconds"] for row in json.loads(before.read_text())["cases"]} if before else {}
    return sorted(names, key=lambda name: -seconds.get(name, math.inf))


def run(tests, name, seconds, number=0, part=(1, 1)):
    begin = time.monotonic()
    environment = gpus.environment(number)
    if part[1] > 1:
        environment["ATTN_KERNELS_PART"] = "{}/{}".format(*part)
    try:
        # A comma separates names, and a bracket begins a tag.
        done = subprocess.run([tests, re.sub(r"([,\[\\])", r"\\\1", name)], capture_output=True, text=True, errors="replace",
                              timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"case": name, "result": "cut off", "seconds": seconds}
    took = round(time.monotonic() - begin, 1)
    found = re.search(r"\((\d+) assertions? in|^assertions: (\d+)", done.stdout, re.M)
    assertions = int(found.group(1) or found.group(2)) if found else 0
    skipped = assertions <= 1 and re.search(r"^SKIPPED: ", done.stdout, re.M)  # a case that ends so asserts that it does
    row = {"case": name, "result": "failed" if done.returncode else "skipped" if skipped else "passed", "seconds": took,
           "assertions": assertions}
    if row["result"] == "failed":
        row["output"] = relative(done.stdout + done.stderr)[-2000:]
    elif skipped:
        row["why"] = re.findall(r"^SKIP: (.*)$", relative(done.stdout), re.M)[-1:]
    return row


def joined(parts):
    """The row of a case whose parts are rows."""
    if len(parts) == 1:
        return parts[0]
    worst = next(result for result in ("failed", "cut off", "passed", "skipped") if any(row["result"] == result for row in parts))
    row = {"case": parts[0]["case"], "result": worst, "seconds": max(row["seconds"] for row in parts),
           "assertions": sum(row.get("assertions", 0) for row in parts), "parts": [row["seconds"] for row in parts]}
    output = "".join(row.get("output", "") for row in parts)
    if worst == "skipped":
        row["why"] = parts[0]["why"]
    return {**row, "output": output} if output else row


def summary(options, gpu, names, rows, begin):
    counts = {result: sum(row["result"] == result for row in rows) for result in RESULTS}
    return {"date": datetime.date.today().isoformat(), "commit": options.commit, "gpu": gpu, "jobs": options.jobs,
            "seconds": round(time.monotonic() - begin), **counts, "not ended": len(names) - len(rows),
            "assertions": sum(row.get("assertions", 0) for row in rows), "cases": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--only")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    tests = options.bin / "attn-tests"
    gpu = device()
    begin = time.monotonic()
    names = longest_first(cases(tests, options.only), options.before)
    made, rows = {}, []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs, number = [], 0
        for name in names:
            count = PARTS.get(name, 1)
            runs.append([pool.submit(run, tests, name, options.seconds, number + n, (n + 1, count)) for n in range(count)])
            number += count
        for _ in as_completed([one for parts in runs for one in parts]):
            rows = [joined([one.result() for one in parts]) for parts in runs if all(one.done() for one in parts)]
            made = summary(options, gpu, names, rows, begin)
            measured.write(options.out, made)  # each time, for whoever ends this before its end
    for row in rows:
        if row["result"] != "passed":
            print(f"{row['result']}: {row['case']}")
    print(", ".join(f"{made.get(result, 0)} {result}" for result in RESULTS) + f", {made.get('assertions', 0)} assertions, "
          f"{round(time.monotonic() - begin)} s")
    return int(not rows or made["failed"] + made["cut off"] > 0)


if __name__ == "__main__":
    sys.exit(main())
