"""Wait states as LLVM's hazard recognizer sees them: a kernel's code goes as machine IR through llc's
pass post-RA-hazard-rec, which inserts an s_nop wherever it finds too few. It shares nothing with the
emulator's tables. Tried with LLVM 19 and 22.

`llvm-mc --disassemble --show-inst` gives LLVM's own opcode and operands of every instruction; the pass
wants the opcodes that the compiler uses, whose names differ by suffixes, and their implicit operands,
which llc asks for by name."""
import re
from dataclasses import dataclass

from . import code
from .failure import Failure

INST = re.compile(r"<MCInst #\d+ (\w+)((?:\s*;\s*<MCOperand [^>]*>)*)>")
PRINTED = re.compile(r"^    (?:[^=\n]*= )?(?:\w+(?:-\w+)* )*?([A-Z][A-Z0-9_]\w*)\b(.*)$", re.MULTILINE)
OPERAND = re.compile(r"<MCOperand (\w+):([^>]*)>")
TUPLE = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])$")
NAMED = {"vcc": "vcc", "vcc_lo": "vcc_lo", "vcc_hi": "vcc_hi", "exec": "exec", "exec_lo": "exec_lo",
         "exec_hi": "exec_hi", "m0": "m0", "flat_scratch": "flat_scr", "scc": "src_scc",
         "src_scc": "src_scc"}
WORD = re.compile(r"\b(?:[vas]\d+|[vas]\[\d+:\d+\]|" + "|".join(NAMED) + r")(?![\w\[])")
# Instructions with one register of a kind and size, by which LLVM's numbers of registers are learnt.
MFMA = {4: "v_mfma_f32_16x16x16_f16", 8: "v_mfma_f64_16x16x4_f64", 16: "v_mfma_f32_32x32x8_f16", 32: "v_mfma_f32_32x32x4_2b_f16"}
TIED = ("S_BITSET0", "S_BITSET1")  # the destination is a source too, which their encoding does not show
PLAIN = ("V_SWAP_B32", "V_READLANE", "V_WRITELANE", "V_READFIRSTLANE", "V_FMAAK", "V_FMAMK", "V_PK_", "V_DOT", "V_MFMA")
CALL = "s_call_b64"
BRANCHES = ("s_cbranch", "s_branch", CALL)  # with an immediate offset
RETURN = "s_setpc_b64"
NO_RESULT = ("s_cmp", "s_bitcmp", "s_cbranch", "s_branch", "s_setpc", "s_nop", "s_waitcnt", "s_barrier", "s_endpgm",
             "s_setprio", "s_setreg", "s_sleep", "v_nop", "ds_write", "s_dcache", "s_icache", "s_sendmsg",
             "buffer_wb", "buffer_inv")
TWO_RESULTS = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32_e64|v_div_scale|v_mad_u64_u32|v_swap_b32|v_permlane32_swap")


def probe(name):
    """An instruction whose first operand is the register."""
    match = TUPLE.match(name)
    if not match:
        wide = name in ("vcc", "exec", "flat_scratch")
        if "scc" in name:
            return None
        return f"s_mov_b64 {name}, 0" if wide else f"s_mov_b32 {name}, 0"
    kind, single, first, last = match.groups()
    size = 1 if single else int(last) - int(first) + 1
    if kind == "s":
        if size <= 2:
            return f"s_mov_b{32 * size} {name}, 0"
        return f"s_load_dwordx{size} {name}, s[0:1], 0x0"
    if size <= 4:
        return f"global_load_dword{'' if size == 1 else f'x{size}'} {name}, v[0:1], off"
    if size in MFMA:
        return f"{MFMA[size]} {name}, v[0:{1}], v[0:1], 0"
    return None


def machine_register(name):
    match = TUPLE.match(name)
    if not match:
        return "$" + NAMED[name]
    kind, single, first, last = match.groups()
    first, last = (int(single), int(single)) if single else (int(first), int(last))
    word = {"v": "vgpr", "a": "agpr", "s": "sgpr"}[kind]
    return "$" + "_".join(f"{word}{n}" for n in range(first, last + 1))


def parse_show_inst(text):
    """[(opcode, [(kind, value)])], in order."""
    return [(name, OPERAND.findall(operands)) for name, operands in INST.findall(text)]


def numbers_of_registers(llvm, mcpu, names):
    known = {}
    probes = [(name, line) for name in sorted(names) if (line := probe(name))]
    made = parse_show_inst(llvm.show_instructions("\n".join(line for _, line in probes), mcpu))
    if len(made) != len(probes):
        raise Failure(f"llvm-mc shows {len(made)} of {len(probes)} instructions")
    for (name, _), (_, operands) in zip(probes, made):
        known[operands[0][1]] = machine_register(name)
    return known


def pseudo(opcode):
    """The compiler's opcode for one of the encoder's."""
    mfma = re.match(r"(V_MFMA_\w+?)_gfx9\w*?_(acd|vcd)$", opcode)
    if mfma:
        return mfma.group(1) + ("_vgprcd_e64" if mfma.group(2) == "vcd" else "_e64")
    name = re.sub(r"_(vi|gfx9|gfx90a|gfx940)$", "", opcode)
    if name.startswith("DS_"):
        return name if re.search("PERMUTE|SWIZZLE|_TR_", name) else name + "_gfx9"
    name = re.sub("^V_(ADDC|SUBB|SUBBREV)_CO_", r"V_\1_", name)
    if name.startswith("V_") and not name.endswith(("_e32", "_e64", "_dpp", "_sdwa")):
        return name if name.startswith(PLAIN) else name + "_e64"
    return name


# What an opcode reads and writes beside its operands, in the order in which llc lists it.
IMPLICIT = [(re.compile(opcodes), operand) for opcodes, operand in (
    (r"S_(ADD|SUB|AND|OR|XOR|NAND|NOR|XNOR|NOT_|LSH|ASHR|BFE|ABS|BCNT|BITCMP|CMP|MIN|MAX)", "implicit-def $scc"),
    (r"S_(ADDC|SUBB|CSELECT|CBRANCH_SCC)", "implicit $scc"),
    (r"V_CMP_.*_e32", "implicit-def $vcc"),
    (r"S_CBRANCH_VCC|V_CNDMASK_B32_(e32|dpp)|V_DIV_FMAS", "implicit $vcc"),
    (r"(BUFFER|GLOBAL)_LOAD_.*LDS", "implicit $m0"),
    (r"V_.*F(16|32|64)", "implicit $mode"),
    (r"S_CBRANCH_EXEC|V_|BUFFER_|GLOBAL_|FLAT_|SCRATCH_|DS_", "implicit $exec"))]


def implicit_operands(opcode):
    """Most of them, so that llc need not miss them one by one."""
    return tuple(operand for opcodes, operand in IMPLICIT if opcodes.match(opcode))


def defined_operands(line):
    """How many of an instruction's first operands it writes."""
    name, operands = line.instruction.name, line.instruction.operands
    if name.startswith(NO_RESULT) or "_store_" in name or "_load_lds_" in name or " lds" in operands:
        return 0
    if name.startswith("v_cmp") and line.opcode.endswith("_e32"):
        return 0
    if "_atomic_" in name or name.startswith(("ds_add", "ds_max", "ds_min")):
        return int("_rtn" in name or " sc0" in operands)
    return 2 if TWO_RESULTS.match(name) else 1


@dataclass(frozen=True)
class Line:
    instruction: code.Instruction
    opcode: str
    operands: tuple  # texts of machine IR


class Translation:
    """A kernel's instructions as machine IR."""

    def __init__(self, llvm, target, instructions, replays):
        self.replays = replays
        self.instructions = [i for i in instructions if not i.name.startswith(".")]
        names = {word for i in self.instructions for word in WORD.findall(i.operands)}
        registers = numbers_of_registers(llvm, target.name, names)
        encoded = "\n".join(" ".join(f"0x{b:02x}" for word in i.dwords for b in word.to_bytes(4, "little"))
                            for i in self.instructions)
        shown = parse_show_inst(llvm.show_instructions(encoded, target.name, encoded=True))
        if len(shown) != len(self.instructions):
            raise Failure(f"llvm-mc shows {len(shown)} of {len(self.instructions)} instructions")
        self.lines = []
        for instruction, (opcode, operands) in zip(self.instructions, shown):
            texts = []
            for kind, value in operands:
                if kind == "Reg":
                    if value not in registers and int(value) != 0:
                        raise Failure(f"'{instruction}': register {value} of {opcode} is not known")
                    texts.append(registers.get(value, "$noreg"))
                else:
                    texts.append(value)
            if opcode.startswith(TIED):
                texts.append(texts[0])
            elif "UNUSED_PRESERVE" in instruction.operands:
                texts.append(f"implicit {texts[0]}(tied-def 0)")
            elif opcode.startswith("DS_") and "PERMUTE" not in opcode:
                texts.pop()  # GDS, twice
            elif opcode.startswith(("V_CVT_PK_FP8", "V_CVT_PK_BF8")):
                texts.append("0")  # op_sel, which is in the first modifier
            elif opcode.startswith("V_PK_"):
                texts += ["0"] * 4  # op_sel, op_sel_hi, neg_lo, neg_hi: likewise
            self.lines.append(Line(instruction, pseudo(opcode), tuple(texts)))
        self.implicit = {line.opcode: implicit_operands(line.opcode) for line in self.lines}

    def function(self, name, without=()):
        """Machine IR of all but the instructions at the addresses `without`."""
        lines = [line for line in self.lines if line.instruction.address not in without]
        starts = {lines[0].instruction.address}
        where = {line.instruction.address: n for n, line in enumerate(lines)}
        address = {}  # where a branch to a dropped instruction leads
        following = None
        for line in reversed(self.lines):
            if line.instruction.address in where:
                following = line.instruction.address
            address[line.instruction.address] = following
        for line in lines:
            i = line.instruction
            if i.name in code.ENDS or i.name == RETURN or i.name.startswith(BRANCHES):
                starts.add(address.get(i.address + i.size))
            if i.name.startswith(BRANCHES):
                starts.add(address[i.target])
        # Where a return leads: behind each call that leaves its address in the same registers.
        returns = {}
        for line in lines:
            i = line.instruction
            if i.name == CALL:
                returns.setdefault(i.operand[0], []).append(address[i.address + i.size])
        blocks = {start: n for n, start in enumerate(sorted(s for s in starts if s is not None))}
        text = [f"---\nname: {name}\ntracksRegLiveness: false", "machineFunctionInfo:",
                "  isEntryFunction: true", "body: |"]
        open_block = []
        successors = set()

        def close():
            if open_block:
                text.append(f"  bb.{open_block[0]}:")
                if successors:
                    text.append("    successors: " + ", ".join(f"%bb.{n}" for n in sorted(successors)))
                text.extend("    " + t for t in open_block[1:])
                text.append("")

        for n, line in enumerate(lines):
            i = line.instruction
            if i.address in blocks:
                close()
                open_block = [blocks[i.address]]
                successors = set()
            open_block.append(self.text(line, blocks, address))
            ends = i.name in code.ENDS or i.name == RETURN or i.name in ("s_branch", CALL)
            if i.name.startswith(BRANCHES):
                successors.add(blocks[address[i.target]])
            if i.name == RETURN:
                if i.operand[0] not in returns:
                    raise Failure(code.leaves(i))
                successors.update(blocks[a] for a in returns[i.operand[0]])
            follows = lines[n + 1].instruction.address if n + 1 < len(lines) else None
            if not ends and follows in blocks:
                successors.add(blocks[follows])
        close()
        return "\n".join(text + ["...\n"])

    def text(self, line, blocks, address):
        i = line.instruction
        operands = list(line.operands)
        if i.name == CALL:  # as the jump that it is; the return address takes no part in hazards
            return f"S_BRANCH %bb.{blocks[address[i.target]]}"
        if i.name.startswith(BRANCHES):
            operands = [f"%bb.{blocks[address[i.target]]}"]
        count = defined_operands(line)
        sources = ", ".join([*operands[count:], *self.implicit[line.opcode]])
        defined = ", ".join(operands[:count]) + " = " if count else ""
        return f"{defined}{line.opcode} {sources}"

    def run(self, llvm, target, variants):
        """What llc makes of the code without each set of addresses: {address: wait states it would add
        before that instruction} for each."""
        while True:
            source = "".join(self.function(f"f{n}", without) for n, without in enumerate(variants))
            try:
                made = llvm.insert_wait_states(source, target.name, self.replays)
            except Failure as failure:
                self.learn(str(failure))
            else:
                return [self.added(function, without) for function, without in
                        zip(made.split("\nname:")[1:], variants)]

    def learn(self, error):
        """Adds the implicit operand that llc misses."""
        missing = re.search(r"missing implicit register operand '([^']+)'", error)
        opcode = re.search(r"(?:= )?\b([A-Z][A-Z0-9]*_\w+)", error)

        if not missing or not opcode or missing.group(1) in self.implicit.get(opcode.group(1), ()):
            raise Failure(error)
        self.implicit[opcode.group(1)] += (missing.group(1),)

    def added(self, function, without):
        ours = []  # wait states of the s_nops before each other instruction
        addresses = []
        states = 0
        for line in self.lines:
            if line.opcode == "S_NOP":
                if line.instruction.address not in without:
                    states += int(line.operands[0]) + 1
            else:
                ours.append(states)
                addresses.append(line.instruction.address)
                states = 0
        theirs = []
        states = 0
        body = function[function.index("body:"):]
        for opcode, rest in PRINTED.findall(body):
            if opcode == "S_NOP":
                states += int(rest.split()[0]) + 1
            else:
                theirs.append(states)
                states = 0
        if len(theirs) != len(ours):
            raise Failure(f"llc's listing has {len(theirs)} instructions, the code {len(ours)}")
        return {address: b - a for address, a, b in zip(addresses, ours, theirs) if b > a}


@dataclass(frozen=True)
class Findings:
    """Offsets are bytes from the kernel's entry."""
    kernel: str
    missing: list  # instructions before which LLVM adds wait states
    s_nops: list  # those asked for, and whether LLVM would put wait states in their place


def examine(kernel, target, llvm, each_s_nop, replays=True):
    translation = Translation(llvm, target, kernel.instructions, replays)
    [as_it_is] = translation.run(llvm, target, [set()])
    s_nops = [line.instruction for line in translation.lines if each_s_nop and line.opcode == "S_NOP"]
    dropped = translation.run(llvm, target, [{i.address} for i in s_nops]) if s_nops else []
    table = {i.address: i for i in kernel.instructions}
    missing = [{"offset": address - kernel.entry, "instruction": str(table[address]), "wait_states": states}
               for address, states in sorted(as_it_is.items())]
    needed = [{"offset": i.address - kernel.entry, "needed": added != as_it_is}
              for i, added in zip(s_nops, dropped)]
    return Findings(kernel.name, missing, needed)
