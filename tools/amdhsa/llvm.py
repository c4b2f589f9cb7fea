"""LLVM's assembler, linker and disassembler."""
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .failure import Failure
from .target import TARGETS

MINIMUM = 17
TRIPLE = "amdgcn-amd-amdhsa"
CODE_OBJECT = 5
TIMEOUT = 300  # seconds


def run(command, name, text=None):
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              input=text or "", timeout=TIMEOUT)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{name} did not end within {TIMEOUT} s") from None
    if done.returncode != 0:
        what = done.stderr.strip()
        if done.returncode < 0 or not what:
            what = f"exit status {done.returncode}"
        raise Failure(f"{name}: {what}")
    return done.stdout


@dataclass(frozen=True)
class Llvm:
    folder: Path
    version: str
    assembler: str  # llvm-mc, or clang

    def assemble(self, source, output, mcpu, includes=(), symbols=None, debug=False):
        """`symbols` are absolute ones that the source may use."""
        defined = [f"{name}={value}" for name, value in (symbols or {}).items()]
        include = [word for folder in includes for word in ("-I", str(folder))]
        if self.assembler == "llvm-mc":
            command = ["llvm-mc", f"-triple={TRIPLE}", f"-mcpu={mcpu}", "-filetype=obj",
                       f"--amdhsa-code-object-version={CODE_OBJECT}"]
            command += [f"--defsym={text}" for text in defined]
        else:
            command = ["clang", "-x", "assembler", "-c", "-target", TRIPLE, f"-mcpu={mcpu}",
                       f"-mcode-object-version={CODE_OBJECT}"]
            command += [f"-Wa,--defsym,{text}" for text in defined]
        if debug:  # source lines, without this machine's paths
            command += ["-g", "-dwarf-version=4"] if self.assembler == "llvm-mc" else ["-gdwarf-4"]
            command += [f"-fdebug-prefix-map={os.getcwd()}=."]
        self.run(command + include + ["-o", str(output), str(source)])

    def knows(self, mcpu):
        text = f'.amdgcn_target "{TRIPLE}--{mcpu}"\n'
        command = (["llvm-mc", f"-triple={TRIPLE}"] if self.assembler == "llvm-mc" else
                   ["clang", "-x", "assembler", "-c", "-target", TRIPLE])
        try:
            self.run([*command, f"-mcpu={mcpu}", "-o", os.devnull, "-"], text)
        except Failure:
            return False
        return True

    def link(self, objects, output, *options):
        self.run(["ld.lld", "-shared", *options, "-o", str(output), *map(str, objects)])

    def disassemble(self, path):
        """Every section of code."""
        return self.run(["llvm-objdump", "-d", "-z", str(path)])

    def show_instructions(self, text, mcpu, encoded=False):
        """Each instruction as LLVM holds it, of assembly or of bytes written as 0x00."""
        command = ["llvm-mc", f"-triple={TRIPLE}", f"-mcpu={mcpu}", "--show-inst"]
        return self.run(command + (["--disassemble"] if encoded else []), text)

    def insert_wait_states(self, machine_ir, mcpu, replays):
        """The machine IR with LLVM's own s_nops; those too that replays of page faults (XNACK) need, if so."""
        return self.run(["llc", f"-mtriple={TRIPLE}", f"-mcpu={mcpu}", f"-mattr={'+' if replays else '-'}xnack",
                         "-run-pass=post-RA-hazard-rec", "-x", "mir", "-o", "-", "-"], machine_ir)

    def run(self, command, text=None):
        return run([str(self.folder / command[0]), *command[1:]], command[0], text)


def version_of(path):
    match = re.search(r"(?:LLD|version) (\d+\.\d+\.\d+)", run([str(path), "--version"], path.name))
    return match.group(1) if match else "unknown"


def inspect(folder):
    """The tools in a folder, or why they do not do."""
    assembler = "llvm-mc" if (folder / "llvm-mc").exists() else "clang"
    tools = [assembler, "ld.lld", "llvm-objdump"]
    missing = [tool for tool in tools if not (folder / tool).exists()]
    if missing:
        return f"{folder} has no {' and no '.join(missing)}"
    versions = [version_of(folder / tool) for tool in tools]
    if len(set(versions)) != 1:
        return f"{folder} has " + ", ".join(f"{t} {v}" for t, v in zip(tools, versions))
    if versions[0] == "unknown" or int(versions[0].split(".")[0]) < MINIMUM:
        return f"{folder} has LLVM {versions[0]}"
    return Llvm(folder, versions[0], assembler)


def find_llvm(folder=None):
    """In `folder`; else the first that knows all processors, or the first of all, of these: ROCm's own, the newest that the
    distribution has, the one on the PATH."""
    if folder:
        found = inspect(Path(folder))
        if isinstance(found, Llvm):
            return found
        raise Failure(f"--llvm: {found}; llvm-mc or clang, ld.lld and llvm-objdump of one version "
                      f">= {MINIMUM} are needed")
    folders = [Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "llvm/bin"]
    folders += [Path(f"/usr/lib/llvm-{major}/bin") for major in range(30, MINIMUM - 1, -1)]
    on_path = shutil.which("ld.lld")
    folders += [Path(on_path).parent] if on_path else []
    first, reasons = None, []
    for candidate in folders:
        if candidate.is_dir():
            found = inspect(candidate)
            if not isinstance(found, Llvm):
                reasons.append(found)
            elif all(found.knows(mcpu) for mcpu in TARGETS):
                return found
            else:
                first = first or found
    if first:
        return first
    raise Failure(f"no LLVM >= {MINIMUM} with llvm-mc or clang, ld.lld and llvm-objdump of one version"
                  + "".join(f"; {reason}" for reason in reasons))
