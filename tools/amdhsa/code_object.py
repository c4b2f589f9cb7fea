"""A linked code object: its kernels with descriptor, metadata and what their code uses."""
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import code, descriptor, metadata
from .elf import ET_DYN, SHF_EXECINSTR, Elf
from .failure import Failure


@dataclass
class Kernel:
    name: str
    descriptor: descriptor.Descriptor
    metadata: dict
    entry: int
    instructions: list  # that it may execute
    use: code.Use

    @property
    def threads(self):
        return self.metadata[".max_flat_workgroup_size"]

    def sgprs(self, target):
        return max(self.use.s, self.descriptor.initial_sgprs) + target.extra_sgprs


@dataclass
class CodeObject:
    name: str
    target: object
    kernels: list
    replays: bool  # its loads may be repeated after a page fault: XNACK on, or not said


def load(path, llvm, name=None):
    """`name` is what errors call the file."""
    name = str(name or path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise Failure(f"{name}: {error.strerror}") from None
    elf = Elf(data, name)
    target = elf.target
    if elf.type != ET_DYN:
        raise Failure(f"{name} is not linked: its ELF type is {elf.type}, not {ET_DYN}")
    triple, described = metadata.read(elf)
    # "amdgcn-amd-amdhsa--gfx942", of newer compilers "amdgpu9.42-amd-amdhsa-unknown-gfx942".
    if triple is not None and triple.split(":")[0].rpartition("-")[2] != target.name:
        raise Failure(f"{name}: the metadata is for {triple}, the code for {target.name}")
    for symbol in sorted(symbol for symbol in elf.symbols if symbol.endswith(".kd")):
        if symbol not in described:
            raise Failure(f"{name}: kernel {symbol[:-3]} has a descriptor but no metadata")
    if not described:
        raise Failure(f"{name} has no kernel")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "object"
        copy.write_bytes(data)
        table = code.instructions(llvm.disassemble(copy))
    kernels = [load_kernel(elf, symbol, kernel, table) for symbol, kernel in described.items()]
    return CodeObject(name, target, kernels, elf.xnack != "off")


def load_kernel(elf, symbol, described, table):
    name = described[".name"]
    if symbol not in elf.symbols:
        raise Failure(f"{elf.name}: kernel {name} has metadata but no symbol {symbol}")
    address = elf.symbols[symbol].value
    read = descriptor.read(elf.loaded(address, descriptor.SIZE, f"the descriptor of {name}"))
    entry = address + read.entry_offset
    section = elf.section_at(entry)
    if not section or not section.flags & SHF_EXECINSTR:
        raise Failure(f"{elf.name}: the entry of kernel {name} is 0x{entry:x}, where there is no code")
    use, instructions = code.registers_used(table, entry, name)
    return Kernel(name, read, described, entry, instructions, use)
