"""The command line of amdhsa."""
import argparse
import json
import os
import sys
from pathlib import Path

from . import declare, hazards, report
from .check import check
from .code_object import load
from .failure import Failure
from .generate import generate
from .llvm import find_llvm
from .target import TARGETS, find_target


def write(path, data):
    """Whole or not at all."""
    part = Path(f"{path}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None


def run_generate(options):
    target = find_target(options.mcpu)
    data, directives = generate(find_llvm(options.llvm), options.input, target, options.include,
                                not options.no_local_symbols)
    if options.emit_s:
        print(directives, end="")
    if options.output:
        write(options.output, data)
    return 0


def run_check(options):
    code_object = load(options.object, find_llvm(options.llvm))
    found = check(code_object)
    if options.json:
        print(json.dumps({"file": code_object.name, "target": code_object.target.name,
                          "kernels": [vars(kernel) for kernel in found]}, indent=2))
    else:
        for kernel in found:
            for kind, sentences in ("error", kernel.errors), ("warning", kernel.warnings):
                for sentence in sentences:
                    print(f"{kind}: kernel {kernel.kernel}: {sentence}")
            if not kernel.errors and not kernel.warnings:
                print(f"kernel {kernel.kernel}: ok")
    return int(any(kernel.errors for kernel in found))


def run_report(options):
    made = report.report(load(options.object, find_llvm(options.llvm)))
    print(json.dumps(made, indent=2) if options.json else report.text(made))
    return 0


def run_hazards(options):
    llvm = find_llvm(options.llvm)
    code_object = load(options.object, llvm)
    found = [hazards.examine(kernel, code_object.target, llvm, options.s_nops, code_object.replays)
             for kernel in code_object.kernels]
    if options.json:
        print(json.dumps({"file": code_object.name, "kernels": [vars(kernel) for kernel in found]}, indent=2))
    else:
        for kernel in found:
            for row in kernel.missing:
                print(f"error: kernel {kernel.kernel}: LLVM adds {row['wait_states']} wait states before "
                      f"'{row['instruction']}' at +0x{row['offset']:x}")
            for row in kernel.s_nops:
                if not row["needed"]:
                    print(f"note: kernel {kernel.kernel}: LLVM does without the s_nop at "
                          f"+0x{row['offset']:x}")
            if not kernel.missing:
                print(f"kernel {kernel.kernel}: ok")
    return int(any(kernel.missing for kernel in found))


def run_llvm(options):
    llvm = find_llvm(options.llvm)
    text = f"LLVM {llvm.version} in {llvm.folder}"
    if options.knows:
        text += f" {'knows' if llvm.knows(options.knows) else 'does not know'} {options.knows}"
    print(text)
    return 0


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(
        prog="amdhsa", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Kernel descriptors and metadata for hand-written gfx9 assembly, from what its "
        "encoded instructions use.",
        epilog="exit codes: 0 done; 1 check or hazards found an error; 2 bad usage or input.\n\n"
        + declare.__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--llvm", metavar="DIR", help="where LLVM's programs are")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sub = commands.add_parser("generate", parents=[common], help="assemble and link a declared file")
    sub.add_argument("input", metavar="IN.s")
    sub.add_argument("-o", dest="output", metavar="OUT.hsaco")
    sub.add_argument("-mcpu", default="gfx942", help=f"{', '.join(TARGETS)} (gfx942)")
    sub.add_argument("-I", dest="include", action="append", default=[], metavar="DIR",
                     help="where .include looks, after the file's own folder")
    sub.add_argument("--no-local-symbols", action="store_true", help="leave the names of registers and labels out")
    sub.add_argument("--emit-s", action="store_true", help="print the generated directives")
    sub.set_defaults(run=run_generate)

    for name, run, what in [
            ("check", run_check, "descriptors against code and metadata"),
            ("report", run_report, "registers, LDS, waves per SIMD, kernarg layout"),
            ("hazards", run_hazards, "wait states by LLVM's hazard recognizer; needs llc, of LLVM 19 or 22")]:
        sub = commands.add_parser(name, parents=[common], help=what)
        sub.add_argument("object", metavar="OBJ", help="a linked code object")
        sub.add_argument("--json", action="store_true")
        if name == "hazards":
            sub.add_argument("--s-nops", action="store_true", help="also which s_nops LLVM does without")
        sub.set_defaults(run=run)

    sub = commands.add_parser("llvm", parents=[common], help="print which LLVM is used")
    sub.add_argument("--knows", metavar="MCPU", help="and whether it assembles for this processor")
    sub.set_defaults(run=run_llvm)
    options = parser.parse_args(arguments)
    if options.command == "generate" and not options.output and not options.emit_s:
        parser.error("generate: -o OUT.hsaco or --emit-s is needed")
    return options


def main(arguments=None):
    """The exit code; without arguments, of this process's."""
    try:
        options = parse_arguments(arguments)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except Failure as failure:
        print(f"amdhsa: {failure}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
