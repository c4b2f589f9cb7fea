"""The command line of tools/silicon."""
import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from amdhsa.failure import Failure

from . import behaviours, coherence, hazards, placement, programs, rates, values, vectors
from .assembler import Assembler
from .report import AGREED, DIFFERS, Part, Report, Rule
from .runner import Machine, NoBackend

TREE = Path(__file__).resolve().parents[2]
DONE, DIFFERENT, USAGE, NO_BACKEND, FAILED = range(5)
PROGRAMS = ("attn", "attn-probe-run", "attn-fp8-stress", "attn-tests")
TARGETS = ("attn_cli", "attn_probe_run", "attn_fp8_stress", "attn-tests")


class Stop(Exception):
    """Ends the program with a code and a sentence."""

    def __init__(self, code, sentence):
        super().__init__(sentence)
        self.code = code


class Progress:
    """One line on stderr that tells what is being done, where that is a terminal."""

    def __init__(self):
        self.shown = 0

    def __call__(self, what):
        if not sys.stderr.isatty():
            return
        print(f"\r{what:{self.shown}}", end="\r" if not what else "", file=sys.stderr, flush=True)
        self.shown = len(what)


# ---- the build --------------------------------------------------------------------------------------------------------

def built(build):
    """Builds what is missing; throws Stop."""
    def missing():
        return [name for name in PROGRAMS if not (build / "bin" / name).exists()]
    if not missing():
        return
    if build != TREE / "build" / "release":
        raise Stop(FAILED, f"{build} has no {' and no '.join(missing())}; build it, or leave --build out")
    log = build / "silicon" / "build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        for command in ["cmake", "--preset", "release"], \
                ["cmake", "--build", "--preset", "release", "--target", *TARGETS]:
            if subprocess.run(command, cwd=TREE, stdout=out, stderr=subprocess.STDOUT).returncode == 0:
                continue
            reason = next((line for line in log.read_text().splitlines() if "emulator: left out" in line), "")
            if reason:
                raise Stop(FAILED, f"the build has no emulator, which says what a probe is to give ({reason.strip('- ')}); "
                           "tools/setup installs what it needs")
            raise Stop(FAILED, f"{' '.join(command[:4])} failed, see {log}; tools/setup installs what a build needs")
    if missing():
        raise Stop(FAILED, f"the build made no {' and no '.join(missing())}, see {log}")


def attn_version(build):
    done = subprocess.run([build / "bin" / "attn", "--version"], capture_output=True, text=True)
    return done.stdout.split()[-1] if done.stdout.split() else "unknown"


def commit():
    """That of the tree; "unknown" outside a clone or without git."""
    if not shutil.which("git"):
        return "unknown"
    done = subprocess.run(["git", "-C", str(TREE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


# ---- parts ------------------------------------------------------------------------------------------------------------

class Session:
    """What the parts share."""

    def __init__(self, options, progress):
        self.options, self.progress = options, progress
        self.program = options.build / "bin" / "attn-probe-run"
        self.device = Machine(self.program, options.backend, options.driver, options.device)
        self.emulator = Machine(self.program, "emulator")
        self.described = self.device.describe()
        if self.described["arch"] != "gfx942":
            raise NoBackend(f"{options.backend}: device {options.device} is {self.described['name']}, "
                            f"{self.described['arch']}; the probes are for gfx942")
        self.assembler = Assembler(options.build / "silicon")
        self.programs = programs.Programs(options.build / "bin", options.backend, options.driver, options.device)
        self.rules = json.loads(subprocess.run([self.program, "--rules"], capture_output=True, text=True,
                                               check=True).stdout)


def run_values(session, report):
    short, match = session.options.short, session.options.match
    machines = session.assembler, session.emulator, session.device
    report.rules += values.run(session.rules, *machines, values.SHORT if short else values.LONG, session.progress, match)
    report.rules += behaviours.run(*machines, session.progress, match)
    report.rules += coherence.run(*machines, session.progress, short, match)
    rules, ulps = behaviours.run_sweeps(*machines, 10 if short else 20, session.progress, match)
    report.rules += rules
    report.rules += vectors.run(session.assembler, session.device, session.progress, 40 if short else None, match)
    return {"ulps_from_float64": ulps},


def run_hazards(session, report):
    report.rules += hazards.run(session.rules, session.assembler, session.emulator, session.device, session.options.short,
                                session.progress, session.options.match)
    return ()


def run_rates(session, report):
    emulated, short = report.emulated, session.options.short
    machines = session.assembler, session.emulator, session.device
    report.constants += rates.run(*machines, emulated, session.progress, session.options.match)
    if not session.options.match:
        report.rules += placement.run_where(session.assembler, session.device, emulated, session.progress)
        report.rules += placement.run_groups(*machines, emulated, short, session.progress)
    return ()


def run_conformance(session, report):
    results, failures = programs.conformance(session.programs, session.options.short, session.progress)
    report.rules.append(Rule("conformance", "attn-tests", DIFFERS if failures else AGREED, results["tests"], len(failures),
                             what="; ".join(failures[:3])))
    return results, [f"conformance: {results['tests']} tests, {len(failures)} failed, {results['skipped']} skipped",
                     *(f"failed  {failure}" for failure in failures)]


def run_stress(session, report):
    results, failures = programs.stress(session.programs, session.options.short, session.progress)
    cases = sum(row["passed"] + len(row["failed"]) for row in results)
    report.rules.append(Rule("stress", "attn-fp8-stress", DIFFERS if failures else AGREED, cases, len(failures),
                             what="; ".join(failures[:3])))
    worst = max(results, key=lambda row: row["largest_ratio_to_model"])
    return {"runs": results}, [
        f"stress: {cases} cases, {len(failures)} failed; largest error {worst['largest_ratio_to_model']:.2f} of the model's, "
        f"1.25 is allowed ({worst['in']})", *(f"failed  {failure}" for failure in failures)]


def run_speed(session, report):
    rows = programs.speed(session.programs, session.options.short, session.progress)
    others = {"peers": {"not here": "the emulator has none"}} if report.emulated else programs.peers(session.progress)
    return {"kernels": rows, "others": others}, programs.speed_lines(rows, others), \
        [f"{row['kernel']}: {row['error']}" for row in rows if "error" in row]


PARTS = {"values": run_values, "hazards": run_hazards, "rates": run_rates, "conformance": run_conformance, "stress": run_stress,
         "speed": run_speed}


def run_part(name, session, report):
    """A part adds to the report's rules and constants; what it returns is results, lines of text, sentences of failure."""
    begun = time.monotonic()
    results, lines, errors = {}, [], []
    try:
        results, lines, errors = unpack(*PARTS[name](session, report))
    except (Failure, RuntimeError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        errors = [str(error).splitlines()[0] if str(error) else type(error).__name__]
    report.parts.append(Part(name, "failed" if errors else "done", round(time.monotonic() - begun, 2),
                             errors[0] if errors else "", results, lines))


def unpack(results=None, lines=(), errors=()):
    return results or {}, list(lines), list(errors)


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="silicon", description="Holds the gfx942 emulator's rules against a device: one report, each rule agreed or "
        "differs. docs/silicon.md tells what it does.",
        epilog="exit codes: 0 every rule agreed; 1 a rule differs; 2 bad usage; 3 no such device or library; 4 the build or a "
        "part failed")
    parser.add_argument("--backend", choices=("hip", "hip-emu"), default="hip", help="hip-emu: the emulator in the place of "
                        "the device (hip)")
    parser.add_argument("--device", type=int, default=0, metavar="N")
    parser.add_argument("--driver", type=Path, metavar="FILE", help="HIP library to open instead of the system's")
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--match", default="", metavar="TEXT", help="only rules whose name has it (values, hazards and rates)")
    parser.add_argument("--short", action="store_true", help="few values of each rule: seconds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report as JSON too")
    parser.add_argument("--build", type=Path, default=TREE / "build" / "release", metavar="DIR",
                        help="build folder (build/release, built if need be)")
    options = parser.parse_args(arguments)
    options.parts = options.only.split(",") if options.only else list(PARTS)[:3] if options.match else list(PARTS)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--only: '{name}' is no part; parts are {', '.join(PARTS)}")
    if options.json and not options.json.parent.is_dir():  # rather than when all is done
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


def run(options):
    progress = Progress()
    built(options.build)
    try:
        session = Session(options, progress)
    except NoBackend as error:
        raise Stop(NO_BACKEND, str(error).removeprefix("attn-probe-run: ")) from None
    except (Failure, OSError, subprocess.SubprocessError) as error:
        raise Stop(FAILED, str(error)) from None
    report = Report(datetime.date.today().isoformat(), options.backend, "short" if options.short else "long",
                    attn_version(options.build), commit(), session.described)
    for name in options.parts:
        run_part(name, session, report)
    progress("")
    print(report.text(), end="")
    if options.json:
        try:
            report.write(options.json)
        except OSError as error:
            raise Stop(FAILED, f"--json {options.json}: {error.strerror}") from None
    if report.failed:
        raise Stop(FAILED, f"{report.failed[0].name}: {report.failed[0].sentence}")
    return DIFFERENT if report.differing else DONE


def main(arguments=None):
    try:
        return run(parse(arguments))
    except Stop as stop:
        print(f"silicon: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("silicon: interrupted", file=sys.stderr)
        return FAILED
