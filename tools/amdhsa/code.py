"""Which registers a kernel's encoded instructions touch, from LLVM's disassembly of them."""
import re
from dataclasses import dataclass, field

from .failure import Failure
from .target import align

LINE = re.compile(r"^\s+(\S+)(.*?)\s*// ([0-9A-F]+):((?: [0-9A-F]{8})+)", re.MULTILINE)
# LLVM prints each operand with its whole width: v7, v[8:23], a[0:15], s[4:7].
REGISTER = re.compile(r"\b([vas])(?:(\d+)|\[(\d+):(\d+)\])")
ENDS = ("s_endpgm", "s_endpgm_saved", "s_endpgm_ordered_ps_done")
# Where these lead is in registers: which operand of those that name it.
COMPUTED = {"s_setpc_b64": 0, "s_swappc_b64": 1, "s_cbranch_g_fork": None, "s_cbranch_join": None,
            "s_rfe_b64": None}
CALLS = ("s_swappc_b64", "s_call_b64")  # the first operand is where the return address goes
SUMS = {"s_add_u32": 1, "s_addc_u32": 1 << 32, "s_sub_u32": -1, "s_subb_u32": -1 << 32}
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
    def operand(self):
        """Its operands, each a text."""
        return [text.strip() for text in self.operands.split(",")]

    def writes_sgprs(self, first, last):
        """As far as the first operand says."""
        match = REGISTER.fullmatch(self.operand[0])
        if not match or match.group(1) != "s" or self.name.startswith(("s_cmp", "s_bitcmp")):
            return False
        low, high = int(match.group(2) or match.group(3)), int(match.group(2) or match.group(4))
        return low <= last and high >= first

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
    unseen: object = None  # the first branch that may leave the file

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


def leaves(branch):
    return (f"'{branch}' at 0x{branch.address:x} leads to what neither s_getpc_b64 nor a call of this file says")


def instructions(text):
    """objdump's listing as {address: Instruction}, in the order of addresses."""
    table = {}
    for name, operands, address, dwords in LINE.findall(re.sub(r"/\*.*?\*/", "", text)):  # newer LLVM's remarks
        address = int(address, 16)
        table[address] = Instruction(address, name, operands,
                                     tuple(int(word, 16) for word in dwords.split()))
    return dict(sorted(table.items()))


def stays(table, branch):
    """Whether a computed branch is seen to stay in the file: going back in the order of the code, its registers
    have the address of s_getpc_b64 plus something, or a return address."""
    place = COMPUTED[branch.name]
    pair = REGISTER.fullmatch(branch.operand[place]) if place is not None else None
    if not pair or pair.group(1) != "s":
        return False
    offset = 0
    for i in reversed([i for i in table.values() if i.address < branch.address]):
        if i.name in ENDS or i.name in ("s_branch", "s_setpc_b64"):
            break  # execution comes from elsewhere
        if not i.writes_sgprs(int(pair.group(3)), int(pair.group(4))):
            continue
        if i.name == "s_getpc_b64":
            return offset is None or (i.address + i.size + offset) % (1 << 64) in table
        if i.name in CALLS or i.name == "v_readlane_b32":  # which brings back what was saved
            return True
        if i.name not in SUMS or i.operand[1] != i.operand[0]:
            return False
        try:
            offset += SUMS[i.name] * (int(i.operand[2], 0) % (1 << 32))
        except (TypeError, ValueError):
            offset = None  # into a table
    return any(i.name in CALLS and i.operand[0] == pair.group() for i in table.values())


def reached(table, entry, kernel):
    """The instructions that a kernel may execute, of all code of a linked file: what its branches lead to, or
    everything if a branch is computed."""
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


def registers_used(table, entry, kernel):
    """What a kernel needs, and the instructions that it may execute."""
    use, code = Use(), reached(table, entry, kernel)
    for instruction in code:
        use.add(instruction)
        if instruction.name in COMPUTED and not use.unseen and not stays(table, instruction):
            use.unseen = instruction
    return use, code
