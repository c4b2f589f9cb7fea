"""Conformance, stress and speed: the project's own programs on the device, kernel by kernel of its catalog."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tests"))
from count import catch_counts  # noqa: E402

DONE, FAILED_A_CASE, NO_BACKEND, UNSUPPORTED = 0, 1, 3, 4  # exit codes of attn and attn-fp8-stress
TIMEOUT = 3600


class Programs:
    def __init__(self, folder, backend, library=None, device=0):
        self.folder, self.emulated = Path(folder), backend == "hip-emu"
        self.options = ["--backend", backend]
        if library:
            self.options += ["--driver", str(library)]
        if device:
            self.options += ["--device", str(device)]
        # What takes no --driver finds the library by its name.
        self.environment = dict(os.environ)
        if library and not self.emulated:
            paths = [str(Path(library).resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
            self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))

    def run(self, name, *arguments):
        return subprocess.run([str(self.folder / name), *map(str, arguments)], capture_output=True, text=True, errors="replace",
                              env=self.environment, timeout=TIMEOUT)

    def kernels(self):
        """Rows of the catalog for hip."""
        rows = json.loads(self.run("attn", "info", "--json").stdout)["kernels"]
        return [row for row in rows if row["backend"] == "hip" and row["in_build"]]


# ---- conformance ------------------------------------------------------------------------------------------------------

SHORT_TESTS = ["merge: shapes*"]


FAILED_CASE = re.compile(r"^-{79}\n(?P<name>.+)\n(?:.+\n)*?-{79}\n(?:.*\n)*?(?P<where>\S+:\d+): FAILED:\n(?P<what>.*)$", re.M)


def conformance(programs, short, progress):
    """({tests, failed, skipped}, sentences of failure)."""
    progress("conformance: attn-tests")
    done = programs.run("attn-tests", *(SHORT_TESTS if short else []))
    counts = catch_counts(done.stdout)
    if not counts or not counts[0]:
        raise RuntimeError(f"attn-tests: {last_line(done)}")
    failed = {found["name"]: f"{Path(found['where']).name}: {found['what'].strip()}" for found in
              FAILED_CASE.finditer(done.stdout)}
    if done.returncode and not failed:  # such as a kernel that was never launched
        failed["attn-tests"] = last_line(done)
    results = {"tests": counts[0], "failed": sorted(failed), "skipped": counts[2]}
    return results, [f"{name}: {why}" for name, why in failed.items()]


def last_line(done):
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    text = (done.stderr + done.stdout).strip().splitlines()
    return text[-1] if text else f"exit status {done.returncode}"


# ---- stress -----------------------------------------------------------------------------------------------------------

LONG_STRESS = [(seqlen, dim, seed) for seqlen in (512, 333) for dim in (128, 64) for seed in (1, 2)]
EMULATED_STRESS = [LONG_STRESS[0], LONG_STRESS[-1]]  # which take minutes there


def stress(programs, short, progress):
    """(results by shape, sentences of failure)."""
    results, failures = [], []
    long = EMULATED_STRESS if programs.emulated else LONG_STRESS
    for seqlen, dim, seed in [(64, 64, 1)] if short else long:
        progress(f"stress: seqlen {seqlen}, head_dim {dim}, seed {seed}")
        options = ["--seq", seqlen, "--dim", dim, "--seed", seed, *(["--case", "normal/3"] if short else [])]
        done = programs.run("attn-fp8-stress", *programs.options, *options, "--json")
        if done.returncode not in (DONE, FAILED_A_CASE):
            raise RuntimeError(f"attn-fp8-stress: {error_of(done)}")
        report = json.loads(done.stdout)["backends"][0]
        worst = max(report["cases"], key=lambda case: case["ratio_to_model"])
        results.append({"seqlen": seqlen, "head_dim": dim, "seed": seed, "passed": report["passed"],
                        "failed": [case["case"] for case in report["cases"] if not case["pass"]],
                        "kernels": sorted({case["kernel"] for case in report["cases"]}),
                        "largest_ratio_to_model": worst["ratio_to_model"], "in": worst["case"],
                        "largest_share_of_max_v": max(case["share_of_max_v"] for case in report["cases"])})
        failures += [f"{case['case']} of {seqlen}, {dim}: {case['broken']}" for case in report["cases"] if not case["pass"]]
    return results, failures


def error_of(done):
    """A program's sentence, which with --json stands on stdout."""
    try:
        return json.loads(done.stdout)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return last_line(done)


# ---- speed ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "prefill": ["--batch", 4, "--heads", 32, "--seqlen-q", 4096],
    "prefill, causal": ["--batch", 4, "--heads", 32, "--seqlen-q", 4096, "--causal"],
    "long, causal": ["--batch", 1, "--heads", 16, "--seqlen-q", 16384, "--causal"],
    "decode": ["--batch", 32, "--heads", 32, "--heads-kv", 8, "--seqlen-q", 1, "--seqlen-kv", 8192],
}
SHORT_SHAPES = {"a tile": ["--heads", 1, "--seqlen-q", 16]}  # in short, and on the emulator, whose times say nothing


def types_of(kernel):
    """Of q, and of K/V where that is another: each that the kernel takes."""
    there = kernel.get("kv") or kernel["in"]
    # gfx942's own fp8; gfx950's kernels have OCP's alone.
    fp8 = "f8_e4m3fnuz" if "f8_e4m3fnuz" in there else "f8_e4m3fn"
    for q in kernel["in"]:
        for kv in kernel.get("kv") or [q]:
            if q in ("bf16", "f16", fp8) and kv in (q, "q8_0", "q4_0", fp8):
                yield q, kv


def speed(programs, short, progress):
    """Rows of kernel, types and shape, at the kernel's largest head_dim, with times or why there are none."""
    short, rows = short or programs.emulated, []
    for kernel in (kernel for kernel in programs.kernels() if kernel["op"] == "forward"):
        for q, kv in types_of(kernel):
            for name, shape in (SHORT_SHAPES if short else SHAPES).items():
                progress(f"speed: {kernel['name']}, {q}, {kv}, {name}")
                dim = kernel["head_dim"]["max"]
                rows.append({"kernel": kernel["name"], "q": q, "kv": kv, "head_dim": dim, "shape": name,
                             **timed(programs, kernel["name"], q, kv, dim, shape, short)})
    return rows


def timed(programs, kernel, q, kv, dim, shape, short):
    done = programs.run("attn", "bench", *programs.options, "--kernel", kernel, "--dtype", q, "--kv-dtype", kv, "--head-dim", dim,
                        *shape, "--no-ceilings", "--launches", "--repeats", 1 if short else 20, "--json")
    if done.returncode == UNSUPPORTED:
        return {"declined": error_of(done)}
    if done.returncode:
        return {"error": error_of(done)}
    report = json.loads(done.stdout)
    row = report["cases"][0]
    launches = [launch["kernel"] for launch in row["launches"]]
    if report.get("emulated"):  # whose time is that of this machine
        return {"launches": launches}
    own = next((launch["warm_us"] for launch in row["launches"] if launch["kernel"] == kernel), None)
    return {"launches": launches, "us": row["median_us"], "tflops": row["tflops"], "gbytes_per_s": row["gbytes_per_s"],
            "kernel_alone_us": own, "kernel_alone_tflops": row["tflops"] * row["median_us"] / own if own else None,
            "launches_us": {launch["kernel"]: launch["warm_us"] for launch in row["launches"]}}


def peers(progress, python=sys.executable):
    """hipBLASLt through PyTorch, and AITER: rates, or "not here" with the reason."""
    progress("speed: peers")
    done = subprocess.run([python, str(HERE / "peers.py")], capture_output=True, text=True, timeout=TIMEOUT)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"peers": {"not here": last_line(done)}}


def speed_lines(rows, others):
    """Of a report's text."""
    lines = []
    for row in rows:
        head = f"{row['kernel']:30} {row['q'] + ('' if row['kv'] == row['q'] else '/' + row['kv']):18} d{row['head_dim']:<4} " \
               f"{row['shape']:16}"
        if "us" in row:
            alone = f"{row['kernel_alone_us']:10.1f} us {row['kernel_alone_tflops']:8.1f}" if row["kernel_alone_us"] else ""
            lines.append(f"{head} {row['us']:10.1f} us {row['tflops']:8.1f} TFLOP/s, without prepare {alone}")
        elif "launches" in row:
            lines.append(f"{head} ran: {', '.join(row['launches'])}")
    declined = sum("declined" in row for row in rows)
    if declined:
        lines.append(f"{declined} cases that kernels decline (--json)")
    lines += [f"error  {row['kernel']} {row['q']} d{row['head_dim']} {row['shape']}: {row['error']}" for row in rows
              if "error" in row]
    for name, of in others.items():
        lines.append(f"{name}: " + (f"not here: {of['not here']}" if "not here" in of else
                                    ", ".join(f"{key} {value}" for key, value in of.items())))
    return lines
