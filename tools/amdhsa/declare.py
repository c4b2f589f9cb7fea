"""The declaration at the top of an assembly file: each kernel with its arguments.

    //# kernel scale_gfx942 workgroup=256 lds=4096
    //#   ptr   out     [rows, 64] float32
    //#   ptr   in      the same
    //#   i64   rows

The kernarg segment is the C struct of the arguments; the body names an argument's offset
scale_gfx942.rows. What follows an argument's name is for the reader. Arguments that several kernels have stand
in a file of their own or that they include, found as these are, whose lines of this kind

    //# arguments forward.inc

adds; forward.q is then the offset of q in each of them. A file that is right for several processors has a line

    //# architectures gfx942 gfx950

before its kernels. Its names say the first one; `generate -mcpu gfx950` puts gfx950 in its place wherever it is written.

    workgroup=X | XxY | XxYxZ    largest workgroup; Y and Z ask for the y and z work-item ids in v0
    lds=N scratch=N              bytes, of a workgroup and of a work-item (0)
    workgroup_id=xyz             which ids follow the kernarg pointer s[0:1], from s2 on (xyz)
    denorm_f32=keep|flush        MODE at entry (keep)
    denorm_f16_f64=keep|flush    (keep)
    ieee_mode, dx10_clamp, fp16_overflow=0|1    (0)
    indexed_vgprs=N indexed_sgprs=N    what s_set_gpr_idx and s_movrel reach is below v[N], s[N]

An N is a number or an absolute symbol of the body.
"""
import re
from dataclasses import dataclass, field
from pathlib import Path

from .failure import Failure
from .target import MAX_WORKGROUP, align

PREFIX = "//#"
NAME = re.compile(r"[A-Za-z_]\w*")
ARGUMENT = re.compile(r"([a-z]+\d*)(?:\[(\d+)\])?\s+(\w+)(?:\s|$)")
SIZES = {"ptr": 8, "i64": 8, "u64": 8, "f64": 8, "i32": 4, "u32": 4, "f32": 4,
         "i16": 2, "u16": 2, "f16": 2, "bf16": 2, "i8": 1, "u8": 1}
MAX_KERNARG = 4096
USER_SGPRS = 2  # the kernarg pointer


@dataclass(frozen=True)
class Argument:
    name: str
    type: str
    count: int
    offset: int
    table: str = ""  # of the file that it stands in, if that is not the kernel's

    @property
    def size(self):
        return SIZES[self.type] * self.count

    @property
    def is_buffer(self):
        return self.type == "ptr" and self.count == 1


@dataclass
class Declaration:
    name: str
    options: dict  # key -> text, the default where unsaid
    workgroup: tuple = (0, 1, 1)
    arguments: list = field(default_factory=list)

    @property
    def threads(self):
        x, y, z = self.workgroup
        return x * y * z

    @property
    def workitem_id(self):
        """0: x alone, 1: x and y, 2: all three."""
        return 2 if self.workgroup[2] > 1 else 1 if self.workgroup[1] > 1 else 0

    @property
    def kernarg_size(self):
        end = max((a.offset + a.size for a in self.arguments), default=0)
        return align(end, max((SIZES[a.type] for a in self.arguments), default=1))

    @property
    def symbols(self):
        own = {f"{self.name}.{a.name}": a.offset for a in self.arguments}
        return own | {f"{a.table}.{a.name}": a.offset for a in self.arguments if a.table}

    def add(self, type_name, count, name, table=""):
        where = f"kernel {self.name}: argument {name}"
        if type_name not in SIZES:
            raise Failure(f"{where}: type '{type_name}' is not one of {', '.join(SIZES)}")
        if not NAME.fullmatch(name):
            raise Failure(f"{where}: not a name")
        if any(a.name == name for a in self.arguments):
            raise Failure(f"{where} is declared twice")
        if not 1 <= count <= MAX_KERNARG:
            raise Failure(f"{where}: {count} elements; 1 to {MAX_KERNARG} are accepted")
        end = max((a.offset + a.size for a in self.arguments), default=0)
        self.arguments.append(Argument(name, type_name, count, align(end, SIZES[type_name]), table))
        if self.kernarg_size > MAX_KERNARG:
            raise Failure(f"{where} ends at byte {self.kernarg_size}; at most {MAX_KERNARG} are "
                          "accepted")


DEFAULTS = {"lds": "0", "scratch": "0", "workgroup_id": "xyz", "denorm_f32": "keep",
            "denorm_f16_f64": "keep", "ieee_mode": "0", "dx10_clamp": "0", "fp16_overflow": "0",
            "indexed_vgprs": None, "indexed_sgprs": None}
CHOICES = {"workgroup_id": ("x", "y", "z", "xy", "xz", "yz", "xyz", "none"),
           "denorm_f32": ("keep", "flush"), "denorm_f16_f64": ("keep", "flush"),
           "ieee_mode": ("0", "1"), "dx10_clamp": ("0", "1"), "fp16_overflow": ("0", "1")}


def parse_workgroup(kernel, text):
    if not re.fullmatch(r"\d{1,4}(x\d{1,4}){0,2}", text or ""):
        raise Failure(f"kernel {kernel}: workgroup '{text or ''}' is not threads as X, XxY or XxYxZ")
    sizes = [int(size) for size in text.split("x")]
    x, y, z = sizes + [1] * (3 - len(sizes))
    if not 1 <= x * y * z <= MAX_WORKGROUP:
        raise Failure(f"kernel {kernel}: workgroup {text} has {x * y * z} threads; 1 to "
                      f"{MAX_WORKGROUP} are accepted")
    return x, y, z


def parse_kernel(words):
    name, *options = words or [""]
    if not NAME.fullmatch(name):
        raise Failure(f"a kernel's declaration: '{name}' is not a name")
    values, seen = dict(DEFAULTS, workgroup=None), set()
    for option in options:
        key, _, value = option.partition("=")
        if key not in values:
            raise Failure(f"kernel {name}: '{option}' is not KEY=VALUE with a key of "
                          f"{', '.join(values)}")
        if key in seen:
            raise Failure(f"kernel {name}: {key} is said twice")
        seen.add(key)
        if key in CHOICES and value not in CHOICES[key]:
            raise Failure(f"kernel {name}: {key} '{value}' is not one of {', '.join(CHOICES[key])}")
        values[key] = value
    workgroup = parse_workgroup(name, values.pop("workgroup"))
    return Declaration(name, values, workgroup)


def declared_lines(text):
    """(line number, what a line says behind the prefix)."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(PREFIX):
            yield number, line[len(PREFIX):].strip()


def add_argument(kernel, line, where, table=""):
    match = ARGUMENT.match(line)
    if not match:
        raise Failure(f"{where}: '{PREFIX} {line}' is no argument 'TYPE NAME'")
    type_name, count, argument = match.groups()
    kernel.add(type_name, int(count or 1), argument, table)


def read_table(name, includes, where):
    for folder in includes:
        path = Path(folder) / name
        if path.is_file():
            return path.read_text(encoding="utf-8")
    searched = ", ".join(str(folder) for folder in includes) or "nowhere"
    raise Failure(f"{where}: there is no file {name}; searched: {searched}")


def add_table(kernel, words, includes, where):
    """The arguments that another file has."""
    if len(words) != 1:
        raise Failure(f"{where}: 'arguments' takes one file name; {len(words)} are given")
    name = words[0]
    table = Path(name).stem
    lines = list(declared_lines(read_table(name, includes, where)))
    if not lines:
        raise Failure(f"{where}: {name} declares no argument: it needs lines '{PREFIX} TYPE NAME'")
    for number, line in lines:
        add_argument(kernel, line, f"{name}:{number}", table)


def for_target(text, file_name, target):
    """The text with the target's names."""
    number, line = next(declared_lines(text), (0, ""))
    first, *names = line.split() or [""]
    if first != "architectures":
        return text
    if target.name not in names:
        raise Failure(f"{file_name}:{number}: this file is for {' and '.join(names)}, not for {target.name}")
    return text.replace(names[0], target.name)


def parse(text, file_name, includes=()):
    """The declarations of an assembly file, in their order. includes: folders of the files whose arguments it adds."""
    kernels = {}
    kernel = None
    for number, line in declared_lines(text):
        where = f"{file_name}:{number}"
        words = line.split()
        if words[:1] == ["architectures"]:
            continue  # for_target()
        if words[:1] == ["kernel"]:
            kernel = parse_kernel(words[1:])
            if kernel.name in kernels:
                raise Failure(f"kernel {kernel.name} is declared twice")
            kernels[kernel.name] = kernel
            continue
        if kernel and words[:1] == ["arguments"]:
            add_table(kernel, words[1:], includes, where)
            continue
        if not kernel or not ARGUMENT.match(line):
            raise Failure(f"{file_name}: '{PREFIX} {line}' is neither 'kernel NAME workgroup=N ...' nor "
                          "an argument 'TYPE NAME' of a kernel before it")
        add_argument(kernel, line, where)
    if not kernels:
        raise Failure(f"{file_name} declares no kernel: a line '{PREFIX} kernel NAME workgroup=N' is "
                      "needed")
    return list(kernels.values())


def symbols(declarations):
    """Of all of a file: each offset that its body may name. A table's is the same in each kernel that has it."""
    found = {}
    for name, offset in (item for d in declarations for item in d.symbols.items()):
        if found.setdefault(name, offset) != offset:
            raise Failure(f"{name} is at byte {found[name]} of one kernel and at {offset} of another; arguments of one "
                          "file stand at the same place in all kernels of a source")
    return found
