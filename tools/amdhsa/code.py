"""Which registers a kernel's encoded instructions touch, from LLVM's disassembly of them."""
import re
from dataclasses import dataclass, field

from .failure import Failure
from .target import align

LINE = re.compile(r"^\s+(\S+)(.*?)\s*// ([0-9A-F]+):((?: [0-9A-F]{8})+)", re.MULTILINE)
# LLVM prints each operand with its whole width: v7, v[8:23], a[0:15], s[4:7].
REGISTER = re.compile(r"\b([vas])(?:(\d+)|\[(\d+):(\d+)\])")
ENDS = ("s_endpgm", "s_endpgm_saved", "s_endpgm_ordered_ps_done")
# Where these lead is in a register.
COMPUTED = ("s_setpc_b64", "s_swappc_b64", "s_cbranch_g_fork", "s_cbranch_join", "s_rfe_b64")
INDEXED = {"v": ("s_set_gpr_idx_on", "s_set_gpr_idx_idx", "s_set_gpr_idx_mode", "v_movrel"),
           "s": ("s_movrel",)}
USES_VCC = re.compile(r"\bvcc(?:_lo|_hi)?\b")


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str
    dwords: tuple

    def __str__(self):
        return self.name + self.operands

    @property
    def size(self):
        return 4 * len(self.dwords)

    @property
    def target(self):
        """Where a branch with an immediate offset leads."""
        offset = self.dwords[0] & 0xFFFF
        return self.address + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)


@dataclass
class Use:
    """How many registers of each kind code needs: the highest touched plus one."""
    v: int = 0
    a: int = 0
    s: int = 0
    vcc: bool = False
    scratch: object = None  # the first instruction that accesses it
    touched_by: dict = field(default_factory=dict)  # kind -> the instruction with the highest
    indexed: dict = field(default_factory=dict)  # v, s -> the first instruction that indexes
    misaligned: list = field(default_factory=list)  # (register, instruction)

    @property
    def accum_offset(self):
        return max(align(self.v, 4), 4)

    @property
    def vgprs(self):
        """Arch VGPRs and AGPRs as they lie in one register file."""
        return self.accum_offset + self.a if self.a else max(self.v, 1)

    def add(self, instruction):
        operands = instruction.operands
        for kind, single, first, last in REGISTER.findall(operands):
            first, last = (int(first), int(last)) if last else (int(single), int(single))
            if last >= getattr(self, kind):
                setattr(self, kind, last + 1)
                self.touched_by[kind] = instruction
            if kind != "s" and last > first and first % 2:
                self.misaligned.append((f"{kind}[{first}:{last}]", instruction))
        name = instruction.name
        if (USES_VCC.search(operands) or name.startswith(("v_div_fmas", "s_cbranch_vcc"))):
            self.vcc = True
        if name.startswith(("scratch_load", "scratch_store")) and not self.scratch:
            self.scratch = instruction
        for kind, names in INDEXED.items():
            if name.startswith(names):
                self.indexed.setdefault(kind, instruction)


def misaligned(register, instruction):
    return (f"{register} in '{instruction}' at 0x{instruction.address:x} starts at an odd register; tuples "
            "of VGPRs and AGPRs start at even ones")


def instructions(text):
    """objdump's listing as {address: Instruction}."""
    table = {}
    for name, operands, address, dwords in LINE.findall(text):
        address = int(address, 16)
        table[address] = Instruction(address, name, operands,
                                     tuple(int(word, 16) for word in dwords.split()))
    return table


def reached(table, entry, kernel):
    """The instructions that a kernel may execute: what its branches lead to, or all code if a
    branch is computed."""
    seen, pending = {}, [entry]
    while pending:
        address = pending.pop()
        while address not in seen:
            instruction = table.get(address)
            if instruction is None or instruction.name.startswith("."):
                raise Failure(f"kernel {kernel}: execution reaches address 0x{address:x}, where there "
                              "is no instruction")
            seen[address] = instruction
            name = instruction.name
            if name in COMPUTED:
                return [i for i in table.values() if not i.name.startswith(".")]
            if name in ENDS:
                break
            if name == "s_branch":
                address = instruction.target
                continue
            if name.startswith("s_cbranch_") or name == "s_call_b64":
                pending.append(instruction.target)
            address += instruction.size
    return [seen[address] for address in sorted(seen)]


def registers_used(instructions_reached):
    use = Use()
    for instruction in instructions_reached:
        use.add(instruction)
    return use
