"""What the files' sizes are made of."""
import collections
import re
import tarfile
import zipfile

from .common import run, say

LIMIT = 40_000_000  # bytes of one packed file


def report(library, files):
    for path in files:
        size = path.stat().st_size
        say(f"{path.name}: {size / 1e6:.1f} MB")
        for name, bytes_ in parts(path):
            print(f"  {bytes_ / 1e6:8.2f}  {name}")
        if size > LIMIT:
            raise SystemExit(f"release: failed: {path.name} has {size} bytes; accepted: {LIMIT}")
    say("libattn.so by kind of code, MB")
    for kind, (count, bytes_) in sorted(images(library).items(), key=lambda item: -item[1][1]):
        print(f"  {bytes_ / 1e6:8.2f}  {kind}" + (f", {count} kernels" if count else ""))


def parts(path):
    """[(name, bytes)] of the members from 0.1 MB, packed in a wheel, unpacked in a tar; then the rest."""
    if path.suffix == ".whl":
        members = [(m.filename, m.compress_size) for m in zipfile.ZipFile(path).infolist()]
    elif path.suffix == ".gz":
        with tarfile.open(path) as tar:
            members = [(m.name + ", unpacked", m.size) for m in tar if m.isfile()]
    else:
        return []  # the Debian package holds what the tar.gz holds
    large = [member for member in members if member[1] >= 100_000]
    return sorted(large, key=lambda member: -member[1]) + [("the rest", sum(b for _, b in members) - sum(b for _, b in large))]


def images(library):
    """{architecture, or what else there is: (images, bytes)}, from the symbols around each embedded image."""
    path = next((library / "lib").glob("libattn.so.*.*.*"))
    ends = collections.defaultdict(dict)
    for address, name, arch, end in re.findall(r"^([0-9a-f]+) r attn_image_(\w+)_(sm_\d+a?|compute_\d+|gfx\d+)_(begin|end)$",
                                               run("nm", path), re.M):
        ends[name, arch][end] = int(address, 16)
    found = collections.Counter(), collections.Counter()
    for (_, arch), at in ends.items():
        kind = f"{arch}, PTX" if arch.startswith("compute") else arch
        found[0][kind] += 1
        found[1][kind] += at["end"] - at["begin"]
    whole = sum(int(n) for n in run("size", path).splitlines()[1].split()[:2])
    made = {kind: (found[0][kind], found[1][kind]) for kind in found[0]}
    made["host code and its data"] = (0, whole - sum(found[1].values()))
    return made
