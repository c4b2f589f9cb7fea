"""Launches on a device and on the emulator, through attn-probe-run."""
import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

POISON = 0xA5  # what buffers that a kernel is to write hold before


@dataclass
class Buffer:
    """Memory of a launch: `data` before it, or `size` bytes of poison; `read`: wanted after it."""
    data: bytes = None
    size: int = 0
    read: bool = False
    fill: int = POISON

    def __post_init__(self):
        self.size = len(self.data) if self.data is not None else self.size


def out(size):
    return Buffer(size=size, read=True)


@dataclass
class Launch:
    kernel: str
    arguments: list  # Buffers and ints; an int is 32 bits
    grid: tuple = (1, 1, 1)
    block: tuple = (64, 1, 1)
    repeats: int = 1


@dataclass
class Outcome:
    """What a launch left: the wanted buffers in their order, or why there are none."""
    read: list = field(default_factory=list)
    error: str = ""
    milliseconds: float = 0
    found: list = field(default_factory=list)  # the emulator's faults, with workgroup, message, instruction
    clock_reads: list = field(default_factory=list)

    @property
    def refused(self):
        """Workgroups in which the emulator stopped."""
        return {tuple(f["workgroup"]) for f in self.found if not f["warning"]}


class NoBackend(Exception):
    """There is no such device, or no library for it."""


class Machine:
    """`backend`: hip, hip-emu, or emulator, the one that says what a probe is to give."""

    def __init__(self, program, backend, library=None, device=0, constants=None, timeout=900):
        self.program, self.backend, self.timeout = Path(program), backend, timeout
        self.options = ["--backend", backend]
        if library:
            self.options += ["--driver", str(library)]
        if constants:
            self.options += ["--constants", str(constants)]
        if device:
            self.options += ["--device", str(device)]

    def call(self, arguments):
        return subprocess.run([str(self.program), *arguments, *self.options], capture_output=True, text=True,
                              errors="replace", timeout=self.timeout)

    def describe(self):
        try:
            done = self.call([])
        except subprocess.TimeoutExpired:
            raise NoBackend(f"{self.backend}: the driver did not answer within {self.timeout} s") from None
        if done.returncode:
            raise NoBackend(said(done))
        return json.loads(done.stdout)["device"]

    def run(self, code_object, launches):
        """An Outcome for each. What ends the program is the error of the launch that did, and the rest goes on."""
        outcomes, ended = [], 0
        while len(outcomes) < len(launches):
            done = self.attempt(code_object, launches[len(outcomes):])
            outcomes += done
            ended = ended + 1 if len(done) == 1 and done[0].error else 0
            if ended == 3:  # it is not that launch
                outcomes += [Outcome(error=done[0].error)] * (len(launches) - len(outcomes))
        return outcomes

    def attempt(self, code_object, launches):
        with tempfile.TemporaryDirectory() as folder:
            job, data, left = (Path(folder) / name for name in ("job.json", "data", "left"))
            write_job(job, data, code_object, launches)
            why = ""
            try:
                done = self.call([str(job), "--out", str(left)])
                lines = done.stdout
                if done.returncode:
                    why = said(done)
            except subprocess.TimeoutExpired as expired:
                lines = (expired.stdout or b"").decode(errors="replace")
                why = f"no end within {self.timeout} s"
            outcomes = read_lines(lines, left)
        if len(outcomes) == len(launches):
            return outcomes
        return outcomes + [Outcome(error=why or "the program ended before the launch did")]


def said(done):
    if done.returncode < 0:
        return f"the program was ended by signal {-done.returncode}"
    text = done.stderr.strip().splitlines()
    return text[-1] if text else f"exit status {done.returncode}"


def write_job(path, data_path, code_object, launches):
    places, rows, at = {}, [], 0
    with open(data_path, "wb") as data:
        for launch in launches:
            buffers, arguments = [], []
            for argument in launch.arguments:
                if not isinstance(argument, Buffer):
                    arguments.append({"u32": argument & 0xFFFFFFFF})
                    continue
                place = None
                if argument.data is not None:
                    if id(argument.data) not in places:  # many launches share their inputs
                        places[id(argument.data)] = at
                        data.write(argument.data)
                        at += argument.size
                    place = places[id(argument.data)]
                arguments.append({"buffer": len(buffers)})
                buffers.append({"bytes": argument.size, "from": place, "fill": argument.fill, "read": argument.read})
            rows.append({"kernel": launch.kernel, "grid": launch.grid, "block": launch.block, "buffers": buffers,
                         "arguments": arguments, "repeats": launch.repeats})
    path.write_text(json.dumps({"object": str(code_object), "data": str(data_path), "launches": rows}))


def read_lines(lines, left):
    outcomes, data = [], left.read_bytes() if left.exists() else b""
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut off, or not the program's
            continue
        if "launch" not in row:
            continue
        outcomes.append(Outcome(read=[data[r["at"]:r["at"] + r["bytes"]] for r in row.get("read", [])],
                                error=row.get("error", ""), milliseconds=row["milliseconds"],
                                found=row.get("found", []), clock_reads=row.get("clock_reads", [])))
    return outcomes
