"""What a run of tools/silicon found: rules, constants and parts; as JSON (report.schema.json) and as text."""
import json
from dataclasses import asdict, dataclass, field

AGREED, DIFFERS, NOT_SEEN, NOT_RUN = "agreed", "differs", "not seen", "not run"
RESULTS = (AGREED, DIFFERS, NOT_SEEN, NOT_RUN)
# Of constants: one that the issue model has nothing beside; one of the issue model, there being nothing to measure.
MEASURED, MODELLED = "measured", "modelled"
VERSION = 1
MOST_LINES = 20  # of one group, in text


@dataclass
class Rule:
    """One rule of the emulator beside the device. `emulator` and `device`: the values of the first case that differs."""
    group: str
    name: str
    result: str
    cases: int = 0
    differing: int = 0
    emulator: str = ""
    device: str = ""
    what: str = ""  # of the first case that differs; or why the rule was not run
    not_modelled: list = field(default_factory=list)  # forms that the emulator refuses

    def json(self):
        needed = ("group", "name", "result", "cases", "differing")
        return {key: value for key, value in asdict(self).items() if value or key in needed}


@dataclass
class Constant:
    """A figure measured in a kernel, beside the issue model's. value None: it was not measured, `what` says why."""
    name: str
    value: object
    unit: str
    model: object
    result: str  # agreed, differs, measured, modelled, not run
    what: str = ""

    def json(self):
        return {key: value for key, value in asdict(self).items() if key != "name"}


@dataclass
class Part:
    """done, failed, or not here; the sentence says why."""
    name: str
    status: str
    seconds: float
    sentence: str = ""
    results: dict = field(default_factory=dict)  # what else it found
    lines: list = field(default_factory=list)  # of these, for the text

    def json(self):
        return {key: value for key, value in asdict(self).items() if key != "lines" and (key != "results" or value)}


@dataclass
class Report:
    date: str
    backend: str
    depth: str
    version: str
    commit: str
    device: dict
    rules: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    parts: list = field(default_factory=list)

    @property
    def emulated(self):
        return self.backend == "hip-emu"

    @property
    def differing(self):
        return [rule for rule in self.rules if rule.result == DIFFERS]

    @property
    def failed(self):
        return [part for part in self.parts if part.status == "failed"]

    def json(self):
        return {
            "report": VERSION, "date": self.date, "backend": self.backend, "emulated": self.emulated,
            "depth": self.depth, "version": self.version, "commit": self.commit, "device": self.device,
            "parts": [part.json() for part in self.parts],
            "rules": [rule.json() for rule in self.rules],
            "constants": {constant.name: constant.json() for constant in self.constants},
        }

    def write(self, path):
        """A list item a line, whole or not at all."""
        made = self.json()
        rows = {"rules": made.pop("rules"), "constants": None}
        constants = made.pop("constants")
        text = json.dumps(made, indent=1)[:-2]
        text += ',\n "rules": [\n' + ",\n".join("  " + json.dumps(row) for row in rows["rules"]) + '\n ],\n "constants": {\n'
        text += ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in constants.items()) + "\n }\n}\n"
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        part.replace(path)

    def text(self):
        device = self.device
        where = f"{device['name']}, {device['arch']}, {device['compute_units']} compute units, driver {device['driver']}"
        lines = [f"libattn {self.version} {self.commit}, {self.date}, {self.depth}",
                 f"{where}{' (EMULATED: nothing here was seen on silicon)' if self.emulated else ''}", ""]
        for part in self.parts:
            lines.append(f"{part.name}: {part.status}, {part.seconds:.0f} s" +
                         (f": {part.sentence}" if part.sentence else ""))
        lines.append("")
        for part in self.parts:
            lines += [*part.lines, ""] if part.lines else []
        lines += self.rule_lines() + self.constant_lines()
        counts = {result: sum(rule.result == result for rule in self.rules) for result in RESULTS}
        lines.append(f"{len(self.rules)} rules: " + ", ".join(f"{n} {result}" for result, n in counts.items()))
        return "\n".join(lines) + "\n"

    def rule_lines(self):
        lines, groups = [], list(dict.fromkeys(rule.group for rule in self.rules))
        if groups:
            lines.append(f"{'rules':14} {'agreed':>8} {'differs':>8} {'not seen':>8} {'not run':>8} {'cases':>12}")
        for group in groups:
            own = [rule for rule in self.rules if rule.group == group]
            lines.append(f"{group:14} " + " ".join(f"{sum(rule.result == result for rule in own):8}" for result in RESULTS) +
                         f" {sum(rule.cases for rule in own):12}")
        for group in groups:
            shown = [rule for rule in self.rules if rule.group == group and rule.result == DIFFERS]
            lines += [""] * bool(shown)
            for rule in shown[:MOST_LINES]:
                lines.append(f"differs  {rule.name}: {rule.differing} of {rule.cases}; emulator {rule.emulator or '-'}, "
                             f"device {rule.device or '-'}; {rule.what}")
            if len(shown) > MOST_LINES:
                lines.append(f"differs  {len(shown) - MOST_LINES} more of {group}, see --json")
        refused = sum(len(rule.not_modelled) for rule in self.rules)
        if refused:
            lines += ["", f"{refused} forms of instructions are not modelled by the emulator and were not run (--json)"]
        return lines + [""]

    def constant_lines(self):
        if not self.constants:
            return []
        head = "not measured" if self.emulated else "measured"
        lines = [f"{'constant':40} {head:>12} {'issue model':>12}  unit"]
        for c in self.constants:
            value = "" if self.emulated else show(c.value)
            result = "" if c.result == MODELLED else c.result
            lines.append(f"{c.name:40} {value:>12} {show(c.model):>12}  {c.unit:26} {result}".rstrip() +
                         (f"; {c.what}" if c.what else ""))
        return lines + [""]


def show(value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
