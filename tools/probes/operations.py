"""A probe for each operation of the emulator's tables: every form of it that the assembler takes."""
import itertools
from dataclasses import dataclass

from . import frames

SIZES = ("dword", "ubyte", "sbyte", "ushort", "sshort")
# What a frame cannot hold, and which behaviour shows it.
ELSEWHERE = {
    "s_branch": "jumps", "s_cbranch_scc0": "jumps", "s_cbranch_scc1": "jumps", "s_cbranch_vccz": "jumps",
    "s_cbranch_vccnz": "jumps", "s_cbranch_execz": "jumps", "s_cbranch_execnz": "jumps", "s_setpc_b64": "calls",
    "s_swappc_b64": "calls", "s_call_b64": "calls", "s_getpc_b64": "calls", "s_barrier": "barrier",
    "s_getreg_b32": "mode register", "s_setreg_b32": "mode register", "s_setreg_imm32_b32": "mode register",
    "s_memtime": "clock", "s_memrealtime": "clock",
    "v_accvgpr_read_b32": "accumulation registers", "v_accvgpr_write_b32": "accumulation registers",
    "v_accvgpr_mov_b32": "accumulation registers",
    **{f"s_set_gpr_idx_{what}": "indexed registers" for what in ("on", "off", "idx", "mode")},
    **{f"s_movrel{way}_b{bits}": "indexed registers" for way in "sd" for bits in (32, 64)},
    **{f"global_load_lds_{size}": "loads to LDS, global" for size in SIZES},
    **{f"scratch_load_lds_{size}": "loads to LDS, scratch" for size in SIZES},
}
# What leaves nothing to compare.
NOTHING_TO_SEE = {
    "s_endpgm": "every probe ends with it", "s_trap": "ends the wave in the trap handler",
    "s_waitcnt": "every probe waits", "s_sendmsg": "is for the host to see",
    "s_ttracedata": "is for a profiler", "s_incperflevel": "is for a profiler", "s_decperflevel": "is for a profiler",
}

CONSTANTS = ("-3", "1.0", "-4.0", "0.15915494309189532", "0x41234567")
VALU = ("valu", "trans", "packed_f32")


@dataclass(frozen=True)
class Form:
    """An instruction of a frame. `masked`: in the lanes of s[26:27] alone."""
    operation: str
    text: str
    frame: str
    masked: bool = False

    @property
    def block(self):
        return (f"  s_mov_b64 exec, s[26:27]\n" if self.masked else "") + "  " + self.text

    def __str__(self):
        return self.text + (" in the lanes of s[26:27]" if self.masked else "")


def tuple_of(kind, first, count):
    return f"{kind}{first}" if count == 1 else f"{kind}[{first}:{first + count - 1}]"


def registers(kind, first, counts):
    return [tuple_of(kind, first, count) for count in counts]


# ---- which operands an operation has: the first candidate that the assembler takes -----------------------------------

# Sources are (kind, first register, width); a width of 0: the text in the register's place.
LITERAL = ("literal", "0x41234567", 0)
OTHER_SHAPES = {
    "v_nop": ([], []),
    "v_swap_b32": (["v16", "v17"], []),
    "v_readlane_b32": (["s24"], [("v", 8, 1), ("lane", "s16", 0)]),
    "v_readfirstlane_b32": (["s24"], [("v", 8, 1)]),
    "v_writelane_b32": (["v16"], [("lane", "s16", 0), ("lane", "41", 0)]),
    "v_fmaak_f32": (["v16"], [("v", 8, 1), ("v", 10, 1), LITERAL]),
    "v_fmamk_f32": (["v16"], [("v", 8, 1), LITERAL, ("v", 10, 1)]),
}


def vector_candidates(name):
    """(destinations, sources) that the operation may have."""
    if name in OTHER_SHAPES:
        yield OTHER_SHAPES[name]
        return
    wide = "64" in name or (name.startswith("v_pk_") and name.endswith(("_f32", "_b32")))
    widths = (1, 2) if wide else (1,)
    destinations = ["s[24:25]"] if name.startswith("v_cmp") else \
        ["v16", "v[16:17]"] if wide or name.startswith("v_cvt_pk_f32") else ["v16"]
    masks = [["s[24:25]"]] if "_co_" in name or "div_scale" in name or name.startswith("v_mad_") else []
    carries = [[("mask", "s[26:27]", 0)]] if name.startswith(("v_addc", "v_subb", "v_cndmask")) else []
    for destination, mask, carry in itertools.product(destinations, [[], *masks], [[], *carries]):
        for count in 1, 2, 3:
            for shape in itertools.product(widths, repeat=count):
                yield [destination, *mask], [*(("v", 8 + 2 * i, width) for i, width in enumerate(shape)), *carry]


def scalar_candidates(name):
    yield [], []
    widths = (1, 2) if "64" in name else (1,)
    for destination in [["s24"], ["s[24:25]"], []]:
        for count in 1, 2:
            for shape in itertools.product(widths, repeat=count):
                yield destination, [("s", 16 + 2 * i, width) for i, width in enumerate(shape)]
        yield destination, [("literal", "-12345", 0)]
        yield destination, [("s", 16, 1), ("literal", "-12345", 0)]
        yield destination, [("s", 16, 1), ("literal", "12345", 0)]


def operand(source):
    kind, first, width = source
    return tuple_of(kind, first, width) if width else first


# What the assembler says of what is no instruction of the architecture at all.
UNKNOWN = ("invalid instruction", "instruction not supported on this GPU")


def base_forms(operations, candidates_of, assembler):
    """operation -> (destinations, sources)."""
    rows = [(name, destinations, sources) for name in operations for destinations, sources in candidates_of(name)]
    lines = [f"{name} {', '.join([*destinations, *map(operand, sources)])}" for name, destinations, sources in rows]
    found = {}
    for (name, destinations, sources), error in zip(rows, assembler.accepted(lines)):
        if not error:
            found.setdefault(name, (destinations, sources))
    return found


# ---- other forms of the same ------------------------------------------------------------------------------------------

def vector_variants(name, destinations, sources):
    texts = [operand(source) for source in sources]

    def line(changed, suffix="", encoding=""):
        return f"{name}{encoding} {', '.join([*destinations, *changed])}{suffix}"

    def changed(i, text):
        return [*texts[:i], text, *texts[i + 1:]]

    inputs = [i for i, source in enumerate(sources) if source[0] == "v"]
    yield line(texts)
    for i in inputs:
        width = sources[i][2]
        yield line(changed(i, tuple_of("s", 16, width)))
        for constant in CONSTANTS:
            yield line(changed(i, constant))
        yield line(changed(i, f"-|{texts[i]}|"))
        yield line(changed(i, f"-{texts[i]}"))
    for suffix in " clamp", " mul:2", " div:2", " mul:4 clamp":
        yield line(texts, suffix)
    count = len(inputs)
    for bits in itertools.product("01", repeat=count + 1):
        if bits.count("1") in (1, count + 1):
            yield line(texts, f" op_sel:[{','.join(bits)}]")
    for bits in itertools.product("01", repeat=count):
        if bits.count("1") == 1:
            yield line(texts, f" op_sel:[{','.join(bits)}]")
            yield line(texts, f" op_sel_hi:[{','.join(bits)}]")
            yield line(texts, f" neg_lo:[{','.join(bits)}]")
            yield line(texts, f" neg_hi:[{','.join(bits)}]")
            for i in inputs:
                yield line(changed(i, "1.0"), f" op_sel_hi:[{','.join(bits)}]")
    yield line(texts, f" op_sel:[{','.join('1' * count)}] op_sel_hi:[{','.join('0' * count)}]")
    for i in inputs:
        yield line(changed(i, tuple_of("s", 16, sources[i][2])),
                   f" op_sel_hi:[{','.join('0' if k == i else '1' for k in range(count))}]")
    if sources and sources[-1][0] == "mask":  # SDWA and DPP know vcc alone
        texts = [*texts[:-1], "vcc"]
    if destinations[1:]:
        destinations = [destinations[0], "vcc"]
    selections = ["src0_sel:BYTE_1", "src0_sel:WORD_1"] if count == 1 else \
        ["src0_sel:BYTE_3 src1_sel:WORD_1", "src0_sel:WORD_0 src1_sel:BYTE_0", "src0_sel:DWORD src1_sel:BYTE_2"]
    for selection in selections:
        yield line(texts, " " + selection, "_sdwa")
        for to in "dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE ", "dst_sel:WORD_1 dst_unused:UNUSED_SEXT ", \
                "dst_sel:BYTE_1 dst_unused:UNUSED_PAD ", "dst_sel:DWORD dst_unused:UNUSED_PAD ":
            yield line(texts, f" {to}{selection}", "_sdwa")
    for i in inputs[:2]:
        yield line(changed(i, f"sext({texts[i]})"), " dst_sel:DWORD dst_unused:UNUSED_PAD " + selections[0], "_sdwa")
        yield line(changed(i, f"-|{texts[i]}|"), " dst_sel:DWORD dst_unused:UNUSED_PAD " + selections[-1], "_sdwa")
    for control in "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", "row_shr:5 row_mask:0xa bank_mask:0x7", \
            "row_bcast:15 row_mask:0xf bank_mask:0xf bound_ctrl:0":
        yield line(texts, " " + control, "_dpp")


def scalar_variants(name, destinations, sources):
    texts = [operand(source) for source in sources]
    yield f"{name} {', '.join([*destinations, *texts])}"
    for i, source in enumerate(sources):
        if source[0] == "s":
            for constant in (*CONSTANTS, "vcc" if source[2] == 2 else "vcc_lo"):
                yield f"{name} {', '.join([*destinations, *texts[:i], constant, *texts[i + 1:]])}"


# ---- memory and MFMA --------------------------------------------------------------------------------------------------

DATA_WIDTHS = (1, 2, 3, 4)


def lds_lines(operation):
    name = operation["name"]
    if "swizzle" in name:
        return [f"{name} v16, v10{offset}" for offset in
                (" offset:0x041f", " offset:0x8053", " offset:swizzle(BROADCAST,32,5)", " offset:swizzle(REVERSE,8)")]
    to, data = registers("v", 16, DATA_WIDTHS), registers("v", 10, DATA_WIDTHS)
    pairs = list(zip(registers("v", 10, (1, 2)), registers("v", 20, (1, 2))))
    if operation["load"] and not operation["store"]:
        shapes = [f"{name} {t}, v8" for t in to]
    elif operation["load"]:
        shapes = [f"{name} {t}, v8, {d}" for t, d in zip(to, data[:2])]
        shapes += [f"{name} {t}, v8, {a}, {b}" for t, (a, b) in zip(to, pairs)]
    elif operation["store"]:
        shapes = [f"{name} v8, {d}" for d in data] + [f"{name} v8, {a}, {b}" for a, b in pairs]
    else:
        shapes = [name, f"{name} v16, v8, v10"]
    offsets = "", " offset:48", " offset:40", " offset0:1 offset1:3", " offset0:2 offset1:2"
    return [text + offset for text in shapes for offset in offsets]


def buffer_lines(operation):
    name = operation["name"]
    places = ["v8, s[32:35], 0 offen", "v8, s[32:35], s44 offen", "v8, s[36:39], 0 offen", "v8, s[36:39], s44 offen",
              "v28, s[40:43], 0 idxen", "v[28:29], s[40:43], 0 idxen offen", "off, s[32:35], s44"]
    # A store takes its data from where a load puts it; an atomic operation leaves there what was in memory.
    first = registers("v", 16 if operation["load"] or operation["atomic"] else 10, DATA_WIDTHS)
    returns = ("", " sc0") if operation["atomic"] else ("",)
    lines = [f"{name} {data}, {place}{offset}{r}" for data in first for place in places for offset in OFFSETS
             for r in returns]
    return lines + [f"{name} {data}, {places[0]}{policy}" for data in first for policy in POLICIES]


OFFSETS = "", " offset:20", " offset:64"
POLICIES = " sc0", " sc1", " nt", " sc0 sc1 nt"


def vector_memory_lines(operation):
    name = operation["name"]
    to, data = registers("v", 16, DATA_WIDTHS), registers("v", 10, DATA_WIDTHS)
    lines = []
    for address, base in {"global": [("v8", ", s[12:13]"), ("v[30:31]", ", off")], "flat": [("v[30:31]", "")],
                          "scratch": [("v8", ", off"), ("off", ", s12")]}[operation["class"]]:
        if operation["atomic"]:
            returned = zip(to[:2] + to[:2], data[:2] + [data[1], data[3]])
            lines += [f"{name} {address}, {d}{base}{o}" for d in data for o in (*OFFSETS, " sc1", " nt")]
            lines += [f"{name} {t}, {address}, {d}{base}{o} sc0" for t, d in returned for o in OFFSETS]
        elif operation["load"]:
            lines += [f"{name} {t}, {address}{base}{o}" for t in to for o in (*OFFSETS, *POLICIES)]
        else:
            lines += [f"{name} {address}, {d}{base}{o}" for d in data for o in (*OFFSETS, *POLICIES)]
    return lines


def scalar_memory_lines(name):
    base = "s[32:35]" if "buffer" in name else "s[12:13]"
    targets = registers("s", 48, (1, 2, 4, 8, 16))
    return [f"{name} {to}, {base}, {offset}" for to in targets for offset in ("0x10", "s44", "0x7")]


def memory_lines(operation):
    kind = operation["class"]
    if kind == "smem":
        return scalar_memory_lines(operation["name"])
    return {"lds": lds_lines, "buffer": buffer_lines}.get(kind, vector_memory_lines)(operation)


def mfma_lines(shape):
    a, b = tuple_of("v", 8, shape["a_regs"]), tuple_of("v", 12, shape["a_regs"])
    c, d = tuple_of("v", 32, shape["d_regs"]), tuple_of("v", 64, shape["d_regs"])
    name, lines = shape["name"], []
    for third in (c, "0", "1.0", "-4.0", "64", "0.15915494309189532"):
        lines.append(f"{name} {d}, {a}, {b}, {third}")
    lines.append(f"{name} {tuple_of('v', 64, shape['d_regs'])}, {a}, {a}, {c}")
    lines.append(f"{name} {d}, {tuple_of('a', 8, shape['a_regs'])}, {tuple_of('a', 12, shape['a_regs'])}, {c}")
    for suffix in [f" cbsz:{n} abid:{k}" for n, k in ((1, 0), (1, 1), (2, 1), (2, 3), (3, 5), (4, 13))] + \
            [f" blgp:{n}" for n in range(1, 8)] + [" neg:[1,0,0]", " neg:[0,1,1]"]:
        lines.append(f"{name} {d}, {a}, {b}, {c}{suffix}")
    return lines


# ---- rules that are not one operation's ---------------------------------------------------------------------------

DPP_CONTROLS = ["quad_perm:[3,1,0,2]", "row_shl:1", "row_shl:15", "row_shr:1", "row_shr:6", "row_ror:3", "wave_shl:1",
                "wave_rol:1", "wave_shr:1", "wave_ror:1", "row_mirror", "row_half_mirror", "row_bcast:15", "row_bcast:31",
                "row_newbcast:5"]


def rule_forms(rules):
    """(rule, instruction, frame, masked) of what stands in no table."""
    for control in DPP_CONTROLS:
        for masks in "row_mask:0xf bank_mask:0xf", "row_mask:0x5 bank_mask:0xf", "row_mask:0xf bank_mask:0xa":
            for bound in "", " bound_ctrl:0":
                for masked in False, True:
                    yield (f"DPP {control.split(':')[0]}", f"v_mov_b32_dpp v16, v8 {control} {masks}{bound}", "vector",
                           masked)
    for size, memory in itertools.product(SIZES, ("buffer", "global")):
        for masked, offset in itertools.product((False, True), ("", " offset:16")):
            text = f"buffer_load_{size} v8, s[32:35], 0 offen{offset} lds" if memory == "buffer" else \
                f"global_load_lds_{size} v8, s[12:13]{offset}"
            yield f"loads to LDS, {memory}", text, "lds", masked
    yield "loads to LDS, out of range", "buffer_load_dword v8, s[36:39], 0 offen lds", "lds", False
    for masked in False, True:
        yield "ds_permute_b32, several lanes to one", "ds_permute_b32 v16, v9, v10", "lds", masked
        yield "ds_bpermute_b32, any lane", "ds_bpermute_b32 v16, v9, v10", "lds", masked
        yield "LDS writes of several lanes to one place", "ds_write_b32 v29, v10", "lds", masked
        yield "LDS writes of several lanes to one place", "ds_write_b128 v29, v[10:13]", "lds", masked
        for atomic in "ds_add_rtn_u32 v16, v29, v10", "ds_wrxchg_rtn_b32 v16, v29, v10", "ds_add_rtn_f32 v16, v29, v10":
            yield "LDS atomics of several lanes to one place", atomic, "lds", masked
    for shape in rules["mfma"]:
        yield "MFMA looks at no EXEC", mfma_lines(shape)[0], "matrix", True


# ---- all of them ------------------------------------------------------------------------------------------------------

def all_forms(rules, assembler):
    """The forms of every operation, and the operations that have none although the architecture has them."""
    by_class = {}
    for operation in rules["operations"]:
        if operation["name"] not in ELSEWHERE and operation["name"] not in NOTHING_TO_SEE:
            by_class.setdefault(operation["class"], []).append(operation)
    lines = []  # (operation, text, frame)
    for classes, candidates, variants in (VALU, vector_candidates, vector_variants), \
            (("salu", "nop", "control"), scalar_candidates, scalar_variants):
        names = [operation["name"] for kind in classes for operation in by_class.pop(kind, [])]
        for name, (destinations, sources) in base_forms(names, candidates, assembler).items():
            lines += [(name, text, "vector") for text in variants(name, destinations, sources)]
    for operation in by_class.pop("control", []):
        lines.append((operation["name"], operation["name"], "vector"))
    shapes = {shape["name"]: shape for shape in rules["mfma"]}
    for operation in by_class.pop("mfma"):
        lines += [(operation["name"], text, "matrix") for text in mfma_lines(shapes[operation["name"]])]
    for kind in list(by_class):
        frame = {"lds": "lds", "scratch": "scratch"}.get(kind, "memory")
        for operation in by_class.pop(kind):
            lines += [(operation["name"], text, frame) for text in memory_lines(operation)]
    lines = list(dict.fromkeys(lines))
    forms, said = [], {}
    for (name, text, frame), error in zip(lines, assembler.accepted([text for _, text, _ in lines])):
        first = "" not in said.setdefault(name, set())
        said[name].add(error)
        if not error:
            forms.append(Form(name, text, frame))
            if first and frame != "matrix" and name[0] != "s":
                forms.append(Form(name, text, frame, masked=True))
    there = {operation["name"] for operation in rules["operations"]} - ELSEWHERE.keys() - NOTHING_TO_SEE.keys()
    others = list(rule_forms(rules))
    for (name, text, frame, masked), error in zip(others, assembler.accepted([text for _, text, _, _ in others])):
        if not error:
            forms.append(Form(name, text, frame, masked))
    foreign = {name for name, words in said.items() if all(word.startswith(UNKNOWN) for word in words if word) and
               "" not in words}
    missing = sorted(there - foreign - {form.operation for form in forms})
    return forms, missing


def by_sramecc(form):
    """Loads into half a register, whose other half is cleared where memory has ECC and kept where it has none."""
    return "_d16" in form.operation and "store" not in form.operation and "write" not in form.operation


def kernels(forms, most=frames.MOST_BLOCKS):
    """[(frame, its forms)], as many of a frame as fit a kernel; those that look at sramecc are apart."""
    for frame in frames.FRAMES:
        for apart in False, True:
            own = [form for form in forms if form.frame == frame.name and by_sramecc(form) == apart]
            for first in range(0, len(own), most):
                yield frame, own[first:first + most]
