"""Values: every form of every operation, on the emulator and on the device, word by word."""
import math
import struct

from . import frames, inputs, operations
from .report import AGREED, DIFFERS, NOT_RUN, Rule
from .runner import Buffer, Launch, out

KEEP = 0xF0  # MODE: to nearest, subnormals kept, as the library's kernels run
MODES = {
    "f32 subnormals flushed": 0xC0,
    "f32 subnormals of results flushed": 0xD0,
    "f32 subnormals of sources flushed": 0xE0,
    "f32 rounded up": 0xF1,
    "f32 rounded down": 0xF2,
    "f32 rounded to zero": 0xF3,
    "FP16_OVFL": 0x8000F0,
    "DX10_CLAMP": 0x1F0,
    "IEEE": 0x2F0,
}
# Rows of values, of scalar operations, and forms of an operation.
LONG = {"rows": 30, "scalar_rows": 256, "forms": None}
SHORT = {"rows": 2, "scalar_rows": 4, "forms": 3}
CHUNK = 24 << 20  # bytes that a launch leaves


def make_rows(frame, count):
    if frame.name == "matrix":
        return inputs.matrix_rows(count)
    return inputs.data_rows(count) if frame.name in ("lds", "memory", "scratch") else inputs.vector_rows(count)


def few(forms, most):
    """The first two forms of each operation and, up to `most`, others from all over it."""
    by_operation = {}
    for form in forms:
        by_operation.setdefault(form.operation, []).append(form)
    chosen = []
    for own in by_operation.values():
        step = max(1, (len(own) - 2) // max(most - 2, 1))
        chosen += own[:2] + own[2::step][:most - 2]
    return chosen


class Batch:
    """Forms of one frame, in one kernel."""

    def __init__(self, number, frame, forms, assembler, depth):
        self.frame, self.forms = frame, forms
        scalar = all(form.text.startswith("s_") for form in forms) and frame is frames.VECTOR
        self.rows = depth["scalar_rows" if scalar else "rows"]
        self.values, self.kinds = make_rows(frame, self.rows)
        self.scalars = inputs.scalar_rows(self.rows)
        self.kernel, source = frame.kernel(number, [form.block for form in forms])
        self.path = assembler.build(self.kernel, source, sramecc=operations.by_sramecc(forms[0]))

    @property
    def size(self):
        """Bytes that a workgroup leaves."""
        return self.frame.outputs * 256

    def launch(self, indices, mode):
        table = struct.pack(f"<{len(indices)}I", *(frames.STRIDE * index for index in indices))
        return Launch(self.kernel, [out(len(indices) * self.rows * self.size), Buffer(self.values), Buffer(self.scalars),
                                    Buffer(table), mode, self.rows], grid=(self.rows, len(indices), 1))

    def chunks(self, indices):
        most = max(1, CHUNK // (self.rows * self.size))
        return [indices[i:i + most] for i in range(0, len(indices), most)]

    def expected(self, emulator, indices, mode):
        """({form's index: bytes}, {form's index: why the emulator refuses it})."""
        found, refused = {}, {}
        chunks = self.chunks(indices)
        for chunk, outcome in zip(chunks, emulator.run(self.path, [self.launch(c, mode) for c in chunks])):
            if outcome.error:
                raise RuntimeError(f"{self.kernel}: {outcome.error}")
            for fault in outcome.found:
                if not fault["warning"]:
                    refused[chunk[fault["workgroup"][1]]] = fault
            found.update(self.split(chunk, outcome))
        return {index: data for index, data in found.items() if index not in refused}, refused

    def split(self, indices, outcome):
        each = self.rows * self.size
        return {index: outcome.read[0][n * each:(n + 1) * each] for n, index in enumerate(indices)}

    def measured(self, device, indices, mode):
        """{form's index: bytes}, {form's index: why there are none}."""
        found, failed = {}, {}
        pending = self.chunks(indices)
        while pending:
            retry = []
            for chunk, outcome in zip(pending, device.run(self.path, [self.launch(c, mode) for c in pending])):
                if not outcome.error:
                    found.update(self.split(chunk, outcome))
                elif len(chunk) == 1:
                    failed[chunk[0]] = outcome.error
                else:
                    retry += [chunk[:len(chunk) // 2], chunk[len(chunk) // 2:]]
            pending = retry
        return found, failed


# ---- comparing --------------------------------------------------------------------------------------------------------

def result_types(rules):
    """operation -> f16, f32, f64, or "" where its result is no float."""
    return {operation["name"]: operation["result"] for operation in rules["operations"]
            if operation["class"] in (*operations.VALU, "mfma") and operation["result"] != "fp8"}


def is_nan(kind, bits):
    exponent, width = {"f16": (0x7C00, 16), "f32": (0x7F800000, 32), "f64": (0x7FF << 52, 64)}[kind]
    return bits & ((1 << (width - 1)) - 1) > exponent


def ulps(kind, a, b):
    """How many values lie between two, NaN apart."""
    width = {"f16": 16, "f32": 32, "f64": 64}[kind]
    sign = 1 << (width - 1)
    if is_nan(kind, a) or is_nan(kind, b):
        return 0 if is_nan(kind, a) and is_nan(kind, b) else math.inf
    ordered = [-(x & (sign - 1)) if x & sign else x & (sign - 1) for x in (a & (2 * sign - 1), b & (2 * sign - 1))]
    return abs(ordered[0] - ordered[1])


class Comparison:
    """Of all forms of one operation."""

    def __init__(self, group, name, kind, tolerance):
        self.rule = Rule(group, name, NOT_RUN)
        self.kind, self.tolerance = kind, tolerance
        self.most_ulps, self.payloads = 0, 0

    def add(self, batch, index, want, got):
        self.rule.cases += batch.rows * inputs.LANES
        if want == got:
            return
        words = batch.frame.outputs
        for row in range(batch.rows):
            part = slice(row * batch.size, (row + 1) * batch.size)
            if want[part] == got[part]:
                continue
            lanes = [struct.unpack(f"<{words * inputs.LANES}I", data[part]) for data in (want, got)]
            for lane in range(inputs.LANES):
                left, right = (words_of[lane::inputs.LANES] for words_of in lanes)
                if left != right and not self.tolerated(batch, left, right):
                    self.differ(batch, index, row, lane, left, right)

    def tolerated(self, batch, want, got):
        """Counts NaN payloads and ulps where these are all that differs."""
        if not self.kind:
            return False
        pairs = [(x, y) for x, y in zip(want, got) if x != y]
        if self.kind == "f64":
            if batch.frame is not frames.VECTOR or want[2:] != got[2:]:
                return False
            pairs = [tuple(x[0] | x[1] << 32 for x in (want, got))]
        elif batch.frame is frames.VECTOR and want[1:] != got[1:]:
            return False
        if all(is_nan(self.kind, value) for pair in pairs for value in pair):
            self.payloads += 1
            return False
        distance = max(ulps(self.kind, *pair) for pair in pairs)
        if self.tolerance:
            self.most_ulps = max(self.most_ulps, distance)
        return distance <= self.tolerance

    def differ(self, batch, index, row, lane, want, got):
        self.rule.differing += 1
        if self.rule.differing > 1:
            return
        at = [i for i, (x, y) in enumerate(zip(want, got)) if x != y]
        self.rule.emulator, self.rule.device = (" ".join(f"{x[i]:08x}" for i in at[:4]) for x in (want, got))
        count = batch.frame.inputs
        row_words = struct.unpack_from(f"<{count * inputs.LANES}I", batch.values, row * count * 256)
        sources = " ".join(f"{row_words[i * inputs.LANES + lane]:08x}" for i in range(min(count, 8)))
        self.rule.what = (f"{batch.forms[index]}, lane {lane}, words {at[:4]} of what it leaves; the lane's values "
                          f"({batch.kinds[row]}): {sources}")

    def done(self):
        rule = self.rule
        if rule.cases:
            rule.result = DIFFERS if rule.differing else AGREED
        if rule.differing and rule.differing == self.payloads:
            rule.what += "; all that differs is which NaN"
        if self.most_ulps:
            rule.what = (rule.what + "; " if rule.what else "") + f"at most {self.most_ulps} ulp apart"
        return rule


def run(rules, assembler, emulator, device, depth, progress, match=""):
    """A Rule for each operation, then for each mode; of those whose name has `match`."""
    forms, missing = operations.all_forms(rules, assembler)
    if missing:
        raise RuntimeError(f"no form is known of {', '.join(missing)}")
    forms = [form for form in forms if match in form.operation]
    if depth["forms"]:
        forms = few(forms, depth["forms"])
    scalar = [form for form in forms if form.text.startswith("s_") and form.frame == "vector"]
    vector = [form for form in forms if form not in set(scalar)]
    batches = [Batch(n, frame, own, assembler, depth) for n, (frame, own) in
               enumerate([*operations.kernels(scalar), *operations.kernels(vector)])]
    types, floats = result_types(rules), {o["name"] for o in rules["operations"] if any([o["result"], *o["sources"]]) or
                                          o["class"] == "mfma"}
    transcendental = {o["name"] for o in rules["operations"] if o["class"] == "trans"}
    found = {}
    for batch in batches:
        progress(f"values: {batch.kernel}, {len(batch.forms)} forms")
        compare(batch, range(len(batch.forms)), KEEP, emulator, device, lambda form: found.setdefault(
            form.operation, Comparison("operations", form.operation, types.get(form.operation, ""),
                                       1 if form.operation in transcendental else 0)))
    for mode, bits in MODES.items():
        progress(f"values: {mode}")
        for batch in batches:
            if batch.frame not in (frames.VECTOR, frames.MATRIX) or batch.forms[0].text.startswith("s_"):
                continue
            indices = [i for i, form in enumerate(batch.forms) if form.operation in floats and
                       in_mode(form, batch.forms, mode)]
            compare(batch, indices, bits, emulator, device, lambda form, mode=mode: found.setdefault(
                f"{form.operation}, {mode}", Comparison("modes", f"{form.operation}, {mode}",
                                                        types.get(form.operation, ""),
                                                        1 if form.operation in transcendental else 0)))
    return [comparison.done() for comparison in found.values()]


def in_mode(form, forms, mode):
    """Operations in their first form; under DX10_CLAMP, with clamp."""
    if form.masked:
        return False
    if mode == "DX10_CLAMP":
        return form.text.endswith(" clamp")
    return form.text.split(" ")[0] == form.operation and \
        next(f for f in forms if f.operation == form.operation).text == form.text


def compare(batch, indices, mode, emulator, device, comparison_of):
    indices = list(indices)
    if not indices:
        return
    want, refused = batch.expected(emulator, indices, mode)
    got, failed = batch.measured(device, list(want), mode)
    for index in indices:
        comparison = comparison_of(batch.forms[index])
        if index in refused:
            comparison.rule.not_modelled.append(f"{batch.forms[index]}: {refused[index]['message']}")
        elif index in failed:
            comparison.rule.differing += 1
            comparison.rule.what = comparison.rule.what or f"{batch.forms[index]}: {failed[index]}"
            comparison.rule.device = comparison.rule.device or "the launch failed"
            comparison.rule.cases += 1
        else:
            comparison.add(batch, index, want[index], got[index])
