"""Probe kernels to code objects, and which instructions the assembler knows."""
import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

from amdhsa.generate import generate
from amdhsa.llvm import TRIPLE, find_llvm
from amdhsa.target import find_target

ARCH = "gfx942"
E_FLAGS, SRAMECC_ON = 48, 3 << 10  # of the ELF header; EF_AMDGPU_FEATURE_SRAMECC_ON_V4


class Assembler:
    """`cache`: a folder where code objects stay; the same source is not assembled twice."""

    def __init__(self, cache, llvm=None):
        self.llvm = find_llvm(llvm)
        self.cache = Path(cache)
        self.cache.mkdir(parents=True, exist_ok=True)

    def build(self, name, source, sramecc=False):
        """The path of the code object that a declared source makes. `sramecc`: for devices alone that have it on, as MI300X."""
        key = hashlib.sha256(f"{self.llvm.version} {sramecc}\n{source}".encode()).hexdigest()[:16]
        path = self.cache / f"{name}-{key}.hsaco"
        if not path.exists():
            text = self.cache / f"{name}.s"
            text.write_text(source)
            data, _ = generate(self.llvm, text, find_target(ARCH))
            if sramecc:
                flags = int.from_bytes(data[E_FLAGS:E_FLAGS + 4], "little") | SRAMECC_ON
                data = data[:E_FLAGS] + flags.to_bytes(4, "little") + data[E_FLAGS + 4:]
            part = path.with_suffix(".part")
            part.write_bytes(data)
            part.replace(path)
        return path

    def accepted(self, lines):
        """Of each instruction "": the assembler takes it; or its words. Kept as code objects are."""
        key = hashlib.sha256("\n".join([self.llvm.version, *lines]).encode()).hexdigest()[:16]
        kept = self.cache / f"accepted-{key}.json"
        if not kept.exists():
            part = kept.with_suffix(".part")
            part.write_text(json.dumps(self.ask(lines)))
            part.replace(kept)
        return json.loads(kept.read_text())

    def ask(self, lines):
        with tempfile.TemporaryDirectory() as folder:
            source, words = Path(folder) / "lines.s", Path(folder) / "words"
            source.write_text("\n".join(lines) + "\n")
            if self.llvm.assembler == "llvm-mc":
                command = ["llvm-mc", f"-triple={TRIPLE}", f"-mcpu={ARCH}", "-filetype=null"]
            else:
                command = ["clang", "-x", "assembler", "-c", "-target", TRIPLE, f"-mcpu={ARCH}", "-ferror-limit=0",
                           "-o", "/dev/null"]
            with open(words, "w") as errors:
                subprocess.run([str(self.llvm.folder / command[0]), *command[1:], str(source)],
                               stdout=subprocess.DEVNULL, stderr=errors)
            said = {int(line): error for line, error in
                    re.findall(r"lines\.s:(\d+):\d+: error: (.*)", words.read_text())}
        return [said.get(number, "") for number in range(1, len(lines) + 1)]
