"""From assembly with a declaration to a linked code object."""
import re
import tempfile
from pathlib import Path

from . import code, declare, metadata
from .check import check
from .code_object import load
from .elf import SHF_EXECINSTR, SHN_ABS, STB_LOCAL, Elf
from .failure import Failure
from .llvm import CODE_OBJECT
from .target import ENTRY_ALIGNMENT


def absolute(elf, declaration, key):
    """The value of lds=N and the like; None where unsaid."""
    text = declaration.options[key]
    if text is None:
        return None
    where = f"kernel {declaration.name}: {key}"
    try:
        return int(text, 0)
    except ValueError:
        pass
    symbol = elf.symbols.get(text)
    if symbol is None or symbol.section != SHN_ABS:
        raise Failure(f"{where} '{text}' is neither a number nor an absolute symbol of the file")
    return symbol.value


def bounded(elf, declaration, key, limit):
    value = absolute(elf, declaration, key)
    if value is not None and not 0 <= value <= limit:
        raise Failure(f"kernel {declaration.name}: {key} {value} is not in 0 to {limit}")
    return value


class Kernel:
    """What a kernel's descriptor and metadata say. `elf` is the assembled file, `table` the linked one's code,
    in which the kernel's is at `entry`."""

    def __init__(self, declaration, elf, table, entry, target):
        self.declaration = declaration
        name = self.name = declaration.name
        symbol = elf.symbols[name]
        if symbol.binding == STB_LOCAL:
            raise Failure(f"kernel {name}: its label is local; write '.globl {name}'")
        section = elf.section_of(symbol)
        if not section.flags & SHF_EXECINSTR:
            raise Failure(f"kernel {name} is in section {section.name}, which is not for code")
        if symbol.value % ENTRY_ALIGNMENT or section.alignment < ENTRY_ALIGNMENT:
            raise Failure(f"kernel {name} is not aligned to {ENTRY_ALIGNMENT} bytes; write '.p2align 8' "
                          "before its label")
        use, _ = code.registers_used(table, entry, name)
        self.use = use
        if use.misaligned:
            raise Failure(f"kernel {name}: {code.misaligned(*use.misaligned[0])}")
        if use.unseen:
            raise Failure(f"kernel {name}: {code.leaves(use.unseen)}; functions of the file are accepted")
        for kind, key in ("v", "indexed_vgprs"), ("s", "indexed_sgprs"):
            limit = target.max_arch_vgprs if kind == "v" else target.max_sgprs
            bound = bounded(elf, declaration, key, limit)
            if kind in use.indexed and bound is None:
                raise Failure(f"kernel {name}: '{use.indexed[kind]}' indexes registers, which cannot "
                              f"be seen in the code; declare {key}=N, the first one it never reaches")
            setattr(use, kind, max(getattr(use, kind), bound or 0))
        self.lds = bounded(elf, declaration, "lds", target.lds_bytes)
        self.scratch = bounded(elf, declaration, "scratch", 1 << 18)
        if use.scratch and not self.scratch:
            raise Failure(f"kernel {name}: '{use.scratch}' accesses scratch; declare scratch=BYTES")
        ids = declaration.options["workgroup_id"]
        self.ids = {axis: int(axis in ids and ids != "none") for axis in "xyz"}
        # At entry the hardware writes the user SGPRs and the workgroup ids.
        self.sgprs = max(use.s, declare.USER_SGPRS + sum(self.ids.values()))
        self.sgpr_total = self.sgprs + target.extra_sgprs
        allocated = target.allocated_vgprs(self.use.vgprs), target.allocated_sgprs(self.sgpr_total)
        if not target.workgroups(*allocated, self.lds, declaration.threads):
            waves = min(target.waves_by_vgprs(allocated[0]), target.waves_by_sgprs(allocated[1]))
            raise Failure(f"kernel {name}: a workgroup of {declaration.threads} threads does not fit: "
                          f"{self.use.vgprs} VGPRs let {waves * target.simds * 64} threads run")

    def descriptor(self):
        options = self.declaration.options
        denorm = {"flush": 0, "keep": 3}
        fields = [
            ("group_segment_fixed_size", self.lds),
            ("private_segment_fixed_size", self.scratch),
            ("enable_private_segment", int(self.scratch > 0)),
            ("kernarg_size", self.declaration.kernarg_size),
            ("user_sgpr_count", declare.USER_SGPRS),
            ("user_sgpr_kernarg_segment_ptr", 1),
            ("system_sgpr_workgroup_id_x", self.ids["x"]),
            ("system_sgpr_workgroup_id_y", self.ids["y"]),
            ("system_sgpr_workgroup_id_z", self.ids["z"]),
            ("system_vgpr_workitem_id", self.declaration.workitem_id),
            ("next_free_vgpr", self.use.vgprs),
            ("accum_offset", self.use.accum_offset),
            ("next_free_sgpr", self.sgprs),
            ("reserve_vcc", int(self.use.vcc)),
            ("float_denorm_mode_32", denorm[options["denorm_f32"]]),
            ("float_denorm_mode_16_64", denorm[options["denorm_f16_f64"]]),
            ("ieee_mode", options["ieee_mode"]),
            ("dx10_clamp", options["dx10_clamp"]),
            ("fp16_overflow", options["fp16_overflow"]),
            ("tg_split", 0),
        ]
        lines = [f".globl {self.name}", f".protected {self.name}", f".amdhsa_kernel {self.name}"]
        lines += [f"  .amdhsa_{field} {value}" for field, value in fields]
        return "\n".join(lines + [".end_amdhsa_kernel", ""])

    def metadata(self):
        declaration = self.declaration
        lines = []
        for argument in declaration.arguments:
            lines += [f"      - .name: !str {argument.name}",
                      f"        .offset: {argument.offset}",
                      f"        .size: {argument.size}"]
            if argument.is_buffer:
                lines += ["        .value_kind: global_buffer", "        .address_space: global"]
            else:
                lines += ["        .value_kind: by_value"]
        arguments = "\n".join(["    .args:", *lines]) if lines else "    .args: []"
        fields = [
            ("group_segment_fixed_size", self.lds),
            ("private_segment_fixed_size", self.scratch),
            ("kernarg_segment_size", declaration.kernarg_size),
            ("kernarg_segment_align", 8),
            ("max_flat_workgroup_size", declaration.threads),
            ("uniform_work_group_size", 1),
            ("wavefront_size", 64),
            ("sgpr_count", self.sgpr_total),
            ("vgpr_count", self.use.vgprs),
            ("agpr_count", self.use.a),
            ("sgpr_spill_count", 0),
            ("vgpr_spill_count", 0),
            ("uses_dynamic_stack", "false"),
        ]
        head = f"  - .name: !str {self.name}\n    .symbol: !str {self.name}.kd\n{arguments}\n"
        return head + "".join(f"    .{field}: {value}\n" for field, value in fields)


def directives(kernels, target):
    triple = f"amdgcn-amd-amdhsa--{target.name}"
    return "\n".join([
        f'.amdgcn_target "{triple}"',
        '.section .rodata, "a", @progbits',
        ".p2align 6",
        *[kernel.descriptor() for kernel in kernels],
        ".amdgpu_metadata",
        "---",
        "amdhsa.version:",
        "  - 1",
        "  - 2",
        f"amdhsa.target: {triple}",
        "amdhsa.kernels:",
        *[kernel.metadata().rstrip("\n") for kernel in kernels],
        "...",
        ".end_amdgpu_metadata",
        ""])


def check_own(elf, declarations):
    """Refuses what the generated part would contradict, or what stands in no file."""
    for name in sorted(elf.symbols):
        if name.endswith(".kd"):
            raise Failure(f"kernel {name[:-3]}: the file has a descriptor of its own; .amdhsa_ directives "
                          "are generated")
    if metadata.notes(elf):
        raise Failure(f"{elf.name} has metadata of its own; .amdgpu_metadata is generated")
    if elf.abi_version != CODE_OBJECT - 2:
        raise Failure(f"{elf.name} asks for ABI version {elf.abi_version}, that of code object version "
                      f"{elf.abi_version + 2}; {CODE_OBJECT} is generated")
    if elf.undefined:
        raise Failure(f"{elf.name} uses '{elf.undefined[0]}', which it does not define; a code object is complete")
    for declaration in declarations:
        symbol = elf.symbols.get(declaration.name)
        if symbol is None or symbol.section == SHN_ABS:
            raise Failure(f"kernel {declaration.name} is declared, but the file has no label "
                          f"'{declaration.name}:'")


def link_last(llvm, objects, output, source, *options):
    """What differs from the link before: other code objects may put theirs in the place of global symbols."""
    try:
        llvm.link(objects, output, *options)
    except Failure as failure:
        symbol = re.search("cannot be used against symbol '(.*?)'", str(failure))
        if not symbol:
            raise
        name = symbol.group(1)
        raise Failure(f"{source}: '{name}' is global, so that another code object's may take its place; write "
                      f"'.protected {name}' or leave .globl and .weak out") from None


def check_made(path, llvm, source):
    """What is generated stands up to the check of any code object. What is larger than needed comes from
    declared bounds of indexed registers alone."""
    made = load(path, llvm, source)
    for kernel, found in zip(made.kernels, check(made)):
        for sentence in found.errors + ([] if kernel.use.indexed else found.warnings):
            raise Failure(f"kernel {kernel.name}: what was generated does not pass check: {sentence}")


def generate(llvm, source, target, includes=(), local_symbols=True):
    """The code object's bytes and the directives made for it. Local symbols are registers and labels."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{source}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    folders = [Path(source).parent, *includes]
    renamed = declare.for_target(text, source, target)
    declarations = declare.parse(renamed, source, folders)
    symbols = declare.symbols(declarations)
    with tempfile.TemporaryDirectory() as folder:
        named, body, linked, extra, output = (Path(folder) / name for name in
                                              ("named.s", "body.o", "linked", "directives.s", "out.hsaco"))
        named.write_text(f'# 1 "{source}"\n{renamed}')  # errors and the line table name the source
        llvm.assemble(source if renamed == text else named, body, target.name, folders, symbols, debug=True)
        elf = Elf(body.read_bytes(), source)
        check_own(elf, declarations)
        # Where branches between sections and to global symbols lead is known once they are linked.
        llvm.link([body], linked, "-Bsymbolic")
        table = code.instructions(llvm.disassemble(linked))
        entries = Elf(linked.read_bytes(), source).symbols
        kernels = [Kernel(d, elf, table, entries[d.name].value, target) for d in declarations]
        made = directives(kernels, target)
        extra.write_text(made)
        llvm.assemble(extra, extra.with_suffix(".o"), target.name)
        link_last(llvm, [body, extra.with_suffix(".o")], output, source, *([] if local_symbols else ["--discard-all"]))
        check_made(output, llvm, source)
        return output.read_bytes(), made
