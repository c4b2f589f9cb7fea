"""Runs kernels that were not made here on the emulator: run.py PART BUILD [FOLDER], with a part of
compilers, triton, aiter, aiter-objects. BUILD has libattn-hipemu and attn-gfx9-tests, FOLDER is what fetch.py made,
by default build/foreign. Prints a line for each kind of kernel; exit code 77 and the reason where something is
missing, 1 where a result is wrong or good code is reported."""
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.dont_write_bytecode = True
SOURCE = Path(__file__).resolve().parents[2]
SKIPPED = 77


def skip(why):
    print(f"SKIP: {why}")
    sys.exit(SKIPPED)


class Table:
    """Of each kind of kernel how many ran, were right, were reported."""

    def __init__(self):
        self.rows = defaultdict(Counter)
        self.bad = []

    def add(self, kind, name, right, fault=""):
        row = self.rows[kind]
        row["kernels"] += 1
        row["right"] += bool(right)
        row["reports"] += bool(fault)
        if not right or fault:
            self.bad.append(f"{name}: {fault or 'wrong'}")

    def close(self):
        for kind, row in self.rows.items():
            print(f"{kind}: {row['kernels']} kernels, {row['right']} right, {row['reports']} with a report")
        for line in self.bad:
            print(line[:400])
        return int(bool(self.bad))


def compilers(folder, build, table):
    if not any(folder.glob("compiled/*.co")):
        skip(f"{folder}/compiled has no code objects; tests/foreign/fetch.py makes them")
    done = subprocess.run([build / "bin" / "attn-gfx9-tests", "[foreign]"], text=True, capture_output=True,
                          env={**os.environ, "ATTN_FOREIGN_KERNELS": str(folder / "compiled")})
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            made = json.loads(line)
            kind = " -".join(made["file"].split(".")[1:])
            table.add(kind, made["file"], made["right"], made.get("unchecked") or made["strict"])
    if done.returncode:
        table.bad.append(done.stdout[-2000:])


def hip_of(build):
    library = build / "lib" / "libattn-hipemu.so"
    if not library.exists():
        skip(f"there is no {library}")
    try:
        from hip import Hip
    except ImportError as error:
        skip(f"{error}; tools/setup --test installs it")
    return Hip(library)


def run_levels(hip, table, kind, name, levels, run):
    """`run` returns whether the result is right."""
    from hip import Fault
    for level in levels:
        hip.configure(level=level)
        try:
            right, fault = run(), ""
        except Fault as error:
            right, fault = False, str(error)
        table.add(f"{kind}, {level}", f"{name} {level}", right, fault)


def triton(folder, build, table):
    names = sorted(path.stem for path in folder.glob("triton/*.json"))
    if not names:
        skip(f"{folder}/triton has no kernels; tests/foreign/fetch.py makes them")
    hip = hip_of(build)
    import triton_run
    version = json.loads((folder / "triton" / f"{names[0]}.json").read_text())["triton"]
    for name in names:
        run_levels(hip, table, f"Triton {version}", name, ("strict", "isa"),
                   lambda: triton_run.run(hip, folder / "triton", name)[1])


def aiter(folder, build, table):
    objects = sorted(folder.glob("aiter/fmha_v3_fwd/*/*.co"))
    if not objects:
        skip(f"{folder}/aiter has no code objects; tests/foreign/fetch.py gets them")
    hip = hip_of(build)
    import aiter_run

    def right(path):
        # rtne rounds bf16 to nearest; the others truncate.
        error, lse_error = aiter_run.forward(hip, path)
        return error < 0.03 and lse_error < 1e-5

    for path in objects:
        run_levels(hip, table, f"AITER fmha_v3_fwd {path.parent.name}", path.name, ("isa",),
                   lambda: right(path))


def aiter_objects(folder, build, table):
    objects = sorted(folder.glob("aiter/**/*.co"))
    if not objects:
        skip(f"{folder}/aiter has no code objects; tests/foreign/fetch.py gets them")
    sentences = Counter()
    for path in objects:
        done = subprocess.run([SOURCE / "tools" / "amdhsa" / "amdhsa", "check", path], text=True,
                              capture_output=True)
        sentences.update({re.sub(r"kernel \S+: |'[^']*'|\d+", "_", line.replace(str(path), ""))
                          for line in (done.stdout + done.stderr).splitlines() if ": ok" not in line})
        # AMD's own kernels use VGPRs from accum_offset on where they have no AGPR, which check refuses.
        errors = [line for line in (done.stdout + done.stderr).splitlines() if ": ok" not in line and "warning: " not in line]
        fault = "\n".join(line for line in errors if not re.search(r"accum_offset \d+ is too small", line))
        table.add("AITER, amdhsa check", str(path.relative_to(folder)), not fault, fault)
    for sentence, count in sentences.most_common():
        print(f"{count} x {sentence}")


PARTS = {"compilers": compilers, "triton": triton, "aiter": aiter, "aiter-objects": aiter_objects}


def main(part, build, folder=SOURCE / "build" / "foreign"):
    table = Table()
    PARTS[part](Path(folder), Path(build), table)
    return table.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
