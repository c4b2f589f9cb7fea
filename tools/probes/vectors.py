"""MFMA of FP8 against published dot products: not the emulator but a file says what they are to give."""
import json
import struct
from pathlib import Path

from . import frames, inputs, values
from .report import AGREED, DIFFERS, NOT_RUN, Rule
from .runner import Buffer, Launch, out

DATA = Path(__file__).resolve().parents[2] / "tests" / "gfx9" / "data" / "mfma_fp8_vectors.json"


def operand(codes, i, k_bytes, words, rows):
    """Puts row i of A, or column i of B: 8 consecutive k a lane, in two registers."""
    for k in range(0, k_bytes, 8):
        lane = i + rows * (k // 8)
        for register in range(2):
            words[register * inputs.LANES + lane] = int.from_bytes(codes[k + 4 * register:k + 4 * register + 4], "little")


def place_of(i, rows):
    """(register, lane) of D[i][i]."""
    four, groups = i // 4, inputs.LANES // rows
    return 4 * (four // groups) + i % 4, i + rows * (four % groups)


def make_row(vectors, k_bytes, rows):
    a, b, c = [0] * 4 * inputs.LANES, [0] * 4 * inputs.LANES, [0] * 32 * inputs.LANES
    for i, vector in enumerate(vectors):
        operand(bytes.fromhex(vector["A"]), i, k_bytes, a, rows)
        operand(bytes.fromhex(vector["B"]), i, k_bytes, b, rows)
        register, lane = place_of(i, rows)
        c[register * inputs.LANES + lane] = int(vector["c"], 16)
    return a + b + c


def run(assembler, device, progress, most=None, match=""):
    """A Rule for each instruction. `most`: vectors of each."""
    progress("MFMA vectors")
    by_shape = {}
    for vector in json.loads(DATA.read_text())["vectors"]:
        k = len(vector["A"]) // 2
        by_shape.setdefault((k, vector["ka"], vector["kb"]), []).append(vector)
    names, launches, cases = [], [], []
    shapes = sorted(by_shape)
    blocks = [f"  v_mfma_f32_{'32x32x16' if k == 16 else '16x16x32'}_{a}_{b} "
              f"v[64:{79 if k == 16 else 67}], v[8:9], v[12:13], v[32:{47 if k == 16 else 35}]" for k, a, b in shapes]
    kernel, source = frames.MATRIX.kernel("vectors", blocks)
    path = assembler.build(kernel, source)
    for index, shape in enumerate(shapes):
        rows = 32 if shape[0] == 16 else 16
        own = by_shape[shape][:most]
        groups = [own[i:i + rows] for i in range(0, len(own), rows)]
        words = [word for group in groups for word in make_row(group, shape[0], rows)]
        scalars = inputs.scalar_rows(len(groups))
        names.append(f"{blocks[index].split()[0]}, published vectors")
        cases.append((groups, rows))
        launches.append(Launch(kernel, [out(len(groups) * 32 * 256), Buffer(struct.pack(f"<{len(words)}I", *words)),
                                        Buffer(scalars), Buffer(struct.pack("<I", frames.STRIDE * index)), values.KEEP, len(groups)],
                               grid=(len(groups), 1, 1)))
    wanted = [n for n, name in enumerate(names) if match in name]
    return [judge(names[n], *cases[n], outcome) for n, outcome in
            zip(wanted, device.run(path, [launches[n] for n in wanted]))]


def judge(name, groups, rows, outcome):
    rule = Rule("vectors", name, NOT_RUN)
    if outcome.error:
        return Rule("vectors", name, DIFFERS, 1, 1, device="the launch failed", what=outcome.error)
    words = memoryview(outcome.read[0]).cast("I")
    payloads = 0
    for n, group in enumerate(groups):
        for i, vector in enumerate(group):
            register, lane = place_of(i, rows)
            got, want = words[(n * 32 + register) * inputs.LANES + lane], int(vector["d"], 16)
            rule.cases += 1
            if got == want:
                continue
            rule.differing += 1
            payloads += values.is_nan("f32", got) and values.is_nan("f32", want)
            if rule.differing == 1:
                rule.emulator, rule.device = f"{want:08x}", f"{got:08x}"
                rule.what = f"A {vector['A']}, B {vector['B']}, c {vector['c']}"
    rule.result = DIFFERS if rule.differing else AGREED
    if rule.differing and rule.differing == payloads:
        rule.what += "; all that differs is which NaN"
    return rule
