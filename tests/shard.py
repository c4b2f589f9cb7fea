"""Parts of attn-tests, which together are all of it.

python3 tests/shard.py I/N DIR PROGRAM [FILTER...] runs those test cases of the filters that hashes of their names put into part I of
N, and notes in DIR which kernels they launched. python3 tests/shard.py check/N DIR fails if the N parts together left out a kernel
that runs here, or left out its largest head_dim.
"""
import os
import pathlib
import re
import subprocess
import sys
import zlib


def part_of(name, count):
    return 1 + zlib.crc32(name.encode()) % count


def run(part, count, folder, program, filters):
    listed = subprocess.run([program, "--list-test-names-only", *filters], check=True, stdout=subprocess.PIPE, text=True)
    names = [name for name in (line.strip() for line in listed.stdout.splitlines()) if name and part_of(name, count) == part]
    folder.mkdir(parents=True, exist_ok=True)
    launches = folder / f"launches.{part}"
    launches.write_text("")
    if not names:
        return 0
    # A comma separates names, and a bracket begins a tag.
    chosen = ",".join(re.sub(r"([,\[\\])", r"\\\1", name) for name in names)
    return subprocess.run([program, chosen], env={**os.environ, "ATTN_LAUNCHES": str(launches)}).returncode


def check(count, folder):
    total = {}
    for part in range(1, count + 1):
        for line in (folder / f"launches.{part}").read_text().splitlines():
            launches, kernel, _ = line.split("\t")
            total[kernel] = total.get(kernel, 0) + int(launches)
    for kernel, launches in sorted(total.items()):
        print(f"launched: {kernel} {launches}" if launches else f"FAILED: no test has launched {kernel}")
    return 0 if total and all(total.values()) else 1


if __name__ == "__main__":
    which, of = sys.argv[1].split("/")
    where = pathlib.Path(sys.argv[2])
    sys.exit(check(int(of), where) if which == "check" else run(int(which), int(of), where, sys.argv[3], sys.argv[4:]))
