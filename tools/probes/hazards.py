"""Wait states: pairs of instructions with too few between them on purpose. What the second one reads or leaves shows whether
the device minds.

For each pair and number of wait states the pair runs three times in a row, the code then being in the instruction cache, in
many waves, and is compared with the same pair far apart. On the emulator the fewest that it does not fault are its rule.
"""
import struct
from dataclasses import dataclass
from pathlib import Path

from amdhsa.elf import Elf

from .operations import tuple_of
from .report import AGREED, DIFFERS, NOT_RUN, NOT_SEEN, Rule
from .runner import Buffer, Launch, out

MOST, MOST_OF_OTHERS = 22, 8  # wait states tried
FAR = 40
RESULTS = 8  # registers that a pair leaves
PASSES = 3
WAVES = 64
PAIRS_OF_KERNEL = 16


@dataclass(frozen=True)
class Pair:
    """`see`: registers compared. `before` is done long before the pair, `after` long behind it."""
    first: str
    second: str
    see: tuple
    before: str = ""
    after: str = ""

    @property
    def name(self):
        return f"{self.first} / {self.second}"


def v(first, count=1):
    return tuple_of("v", first, count)


# ---- MFMA: A v[32:33] (of 0; v[36:37] ordinary), B v[34:35], C from v64, D from v96, another D from v160 ----------------

def matrix_pairs(shape):
    name, d, a = shape["name"], shape["d_regs"], shape["a_regs"]

    def mfma(to, left=36, c=64):
        return f"{name} {v(to, d)}, {v(left, a)}, {v(34, a)}, {v(c, d)}"
    last, halves = 96 + d - 1, (f"v{96}", f"v{96 + d - 1}")
    others = ("v160", f"v{160 + d - 1}")
    shifted = 98 if d > 2 else 96
    yield Pair("v_mov_b32_e32 v32, v36", mfma(96, left=32), halves)
    yield Pair("v_mov_b32_e32 v34, v38", mfma(96), halves)
    yield Pair(f"v_mov_b32_e32 v{64 + d - 1}, v9", mfma(96), halves)
    yield Pair("v_cmpx_gt_f32_e32 vcc, v9, v10", mfma(96), halves)
    yield Pair(mfma(96), mfma(96, c=96), halves)
    if d > 2:
        yield Pair(mfma(96), mfma(160, c=shifted), others)
    yield Pair(mfma(96), mfma(160, left=96 + d - 2 if a == 2 else last), others)
    yield Pair(mfma(96), f"v_mov_b32_e32 v16, v{last}", ("v16",))
    yield Pair(mfma(96), "v_mov_b32_e32 v16, v96", ("v16",))
    yield Pair(mfma(96), f"global_store_dword v1, v{last}, s[12:13]", ("v16",),
               after="global_load_dword v16, v1, s[12:13]")
    yield Pair(mfma(96), f"ds_write_b32 v1, v{last}", ("v16",), after="ds_read_b32 v16, v1")
    yield Pair(mfma(96), f"v_mov_b32_e32 v{last}, v9", (f"v{last}",))
    yield Pair(mfma(96), f"ds_read_b32 v{last}, v1", (f"v{last}",))
    yield Pair(mfma(96), f"global_load_dword v{last}, v1, s[12:13]", (f"v{last}",))
    yield Pair(mfma(96), f"v_mov_b32_e32 v{64 + d - 1}, v9", halves)


SHAPES = ("v_mfma_f32_4x4x4_16b_f16", "v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_32x32x16_fp8_fp8",
          "v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8_f16", "v_mfma_f32_32x32x4_2b_f16",
          "v_mfma_f32_16x16x4_f32", "v_mfma_f32_32x32x2_f32", "v_mfma_f64_4x4x4_4b_f64", "v_mfma_f64_16x16x4_f64",
          "v_mfma_i32_16x16x32_i8")
SHORT_SHAPES = SHAPES[1:3]

# ---- others: v8 .. v15 ordinary values, v16 .. v31 old ones; s40 .. s47 3, memory of the wave's own at s[12:13] ---------

CMP = "v_cmp_gt_f32_e32 vcc, v9, v14"
CMPX = "v_cmpx_gt_f32_e32 vcc, v9, v14"
FIRST_LANE = "v_readfirstlane_b32 s40, v24"  # 7
PAIRS = [
    Pair("v_exp_f32_e32 v16, v8", "v_add_f32_e32 v17, v16, v9", ("v17",)),
    Pair("v_rcp_f32_e32 v16, v9", "v_mov_b32_e32 v17, v16", ("v17",)),
    Pair("v_log_f32_e32 v16, v9", "v_cvt_pk_fp8_f32 v17, v16, v9", ("v17",)),
    Pair("v_exp_f32_e32 v16, v8", "v_pk_mul_f32 v[18:19], v[16:17], v[8:9]", ("v18", "v19")),
    Pair("v_cvt_pk_fp8_f32 v16, v8, v9 op_sel:[0,0,1]", "v_mov_b32_e32 v17, v16", ("v17",)),
    Pair("v_add_u32_sdwa v16, v8, v9 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD",
         "v_mov_b32_e32 v17, v16", ("v17",)),
    Pair("v_cvt_pk_fp8_f32 v16, v8, v9", "v_cvt_pk_fp8_f32 v16, v10, v11 op_sel:[0,0,1]", ("v16",)),
    Pair("v_mov_b32_e32 v16, v9", "v_readfirstlane_b32 s40, v16", ("s40",)),
    Pair("v_mov_b32_e32 v16, v9", "v_readlane_b32 s40, v16, 17", ("s40",)),
    Pair("v_exp_f32_e32 v16, v9", "v_readfirstlane_b32 s40, v16", ("s40",)),
    Pair("v_mov_b32_e32 v16, v9", "v_mov_b32_dpp v17, v16 row_shl:1 row_mask:0xf bank_mask:0xf", ("v17",)),
    Pair("v_add_f32_e32 v16, v8, v9", "v_max_f32_dpp v17, v16, v8 row_ror:8 row_mask:0xf bank_mask:0xf", ("v17",)),
    Pair("v_dot4_i32_i8 v16, v8, v9, v10", "v_add_u32_e32 v17, v16, v11", ("v17",)),
    Pair("v_dot4_i32_i8 v16, v8, v9, v10", "v_dot4_i32_i8 v17, v16, v9, v10", ("v17",)),
    Pair("v_dot2_f32_f16 v16, v8, v9, v10", "v_mov_b32_e32 v16, v11", ("v16",)),
    Pair("global_store_dwordx4 v4, v[16:19], s[12:13]", "v_mov_b32_e32 v19, v9", ("v20", "v23"),
         after="global_load_dwordx4 v[20:23], v4, s[12:13]"),
    Pair("global_store_dwordx3 v4, v[16:18], s[12:13]", "v_mov_b32_e32 v18, v9", ("v20", "v22"),
         after="global_load_dwordx3 v[20:22], v4, s[12:13]"),
    Pair("buffer_store_dwordx4 v[16:19], v4, s[32:35], 0 offen", "v_mov_b32_e32 v19, v9", ("v20", "v23"),
         after="global_load_dwordx4 v[20:23], v4, s[12:13]"),
    Pair(FIRST_LANE, "v_add_u32_e32 v16, s40, v10", ("v16",)),
    Pair(CMP, "v_cndmask_b32_e32 v16, v8, v11, vcc", ("v16",)),
    Pair("v_cmp_gt_f32_e64 s[40:41], v9, v14", "v_cndmask_b32_e64 v16, v8, v11, s[40:41]", ("v16",)),
    Pair("v_add_co_u32_e32 v16, vcc, v25, v25", "v_addc_co_u32_e32 v17, vcc, v8, v9, vcc", ("v17",)),
    Pair("v_readfirstlane_b32 s40, v27", "buffer_load_dword v16, v1, s[32:35], s40 offen", ("v16",), before="s_mov_b32 s40, 0"),
    Pair("v_readfirstlane_b32 s42, v26", "global_load_dword v16, v1, s[42:43]", ("v16",), before="s_mov_b64 s[42:43], s[12:13]"),
    Pair(FIRST_LANE, "v_readlane_b32 s42, v8, s40", ("s42",)),
    Pair(FIRST_LANE, "v_writelane_b32 v16, 5, s40", ("v16",), before="s_mov_b32 s40, 3\n  s_mov_b32 m0, 0"),
    Pair(CMP, "v_div_fmas_f32 v16, v8, v9, v10", ("v16",)),
    Pair(CMPX, "v_readfirstlane_b32 s40, v8", ("s40",)),
    Pair(CMPX, "v_readlane_b32 s40, v8, 2", ("s40",)),
    Pair(CMPX, "v_mov_b32_dpp v16, v8 row_shr:1 row_mask:0xf bank_mask:0xf", ("v16",)),
    Pair("s_mov_b32 m0, s45", "buffer_load_dword v1, s[32:35], 0 offen lds", ("v16", "v17"),
         after="ds_read_b32 v16, v1\n  ds_read_b32 v17, v1 offset:256"),
    Pair("s_mov_b32 m0, s45", "global_load_lds_dword v1, s[12:13]", ("v16", "v17"),
         after="ds_read_b32 v16, v1\n  ds_read_b32 v17, v1 offset:256"),
    Pair("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s46", "s_getreg_b32 s40, hwreg(HW_REG_MODE, 0, 4)", ("s40",),
         after="s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0"),
    Pair("s_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s46", "s_setreg_b32 hwreg(HW_REG_MODE, 2, 2), s40", ("s42",),
         before="s_mov_b32 s40, 0",
         after="s_getreg_b32 s42, hwreg(HW_REG_MODE, 0, 4)\n  s_nop 3\n  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0"),
]


CHAIN = 4  # of matrix_pairs: D to C


def all_pairs(rules, short):
    """[(pairs, the most wait states tried)]."""
    shapes = {shape["name"]: shape for shape in rules["mfma"]}
    own = [pair for name in (SHORT_SHAPES if short else SHAPES) for pair in matrix_pairs(shapes[name])]
    if short:  # the chain that is not interlocked
        own.append(list(matrix_pairs(shapes[SHAPES[0]]))[CHAIN])
    return [(own, MOST), (PAIRS, MOST_OF_OTHERS)]


# ---- code -------------------------------------------------------------------------------------------------------------

ENTER = """
  s_load_dwordx8 s[4:11], s[0:1], 0
  s_load_dword s44, s[0:1], 32
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshlrev_b32_e32 v1, 2, v0
  v_lshlrev_b32_e32 v4, 4, v0
  s_waitcnt lgkmcnt(0)
  s_lshl_b32 s46, s3, 2
  s_load_dword s47, s[8:9], s46
  s_mul_i32 s46, s3, s44                   // (y * waves + x), of `results` registers and of 1024 bytes of memory
  s_add_u32 s46, s46, s2
  s_mul_i32 s45, s46, RESULTS*PASSES*256
  s_add_u32 s4, s4, s45
  s_addc_u32 s5, s5, 0
  s_lshl_b32 s46, s46, 10
  s_add_u32 s12, s6, s46
  s_addc_u32 s13, s7, 0
  s_waitcnt lgkmcnt(0)
  s_mov_b32 s48, s47
  s_mov_b32 s49, PASSES
"""

AGAIN = """
  s_mov_b64 exec, -1
  s_mov_b64 vcc, 0
  s_mov_b32 m0, 0
  v_cvt_f32_u32_e32 v8, v0
  v_mov_b32_e32 v14, 0x41c00000            // 24: in some lanes only v9 is larger
  v_mul_f32_e32 v8, 0.5, v8
  v_mov_b32_e32 v24, 7
  v_mov_b32_e32 v25, -1
  v_mov_b32_e32 v27, 64
  v_add_f32_e32 v9, 1.0, v8
  v_add_f32_e32 v10, 2.0, v8
  v_add_f32_e32 v11, 4.0, v8
  v_sub_f32_e32 v12, 1.0, v8
  v_sub_f32_e32 v13, 2.0, v8
  v_sub_f32_e32 v15, 4.0, v8
  v_mov_b32_e32 v32, 0
  v_mov_b32_e32 v33, 0
  v_mov_b32_e32 v34, 0x3c3c3c3c
  v_mov_b32_e32 v35, 0x3c3c3c3c
  v_mov_b32_e32 v36, 0x3c3c3c3c
  v_mov_b32_e32 v37, 0x3c3c3c3c
  v_mov_b32_e32 v38, 0x38383838
  v_mov_b32_e32 v39, 0x38383838
  v_mov_b32_e32 v26, s12
  v_add_u32_e32 v26, 0x200, v26
""" + "".join(f"  v_mov_b32_e32 v{i}, 0x42c60000\n" for i in range(16, 24)) + \
    "".join(f"  v_mov_b32_e32 v{i}, v{8 + i % 8}\n" for i in range(64, 96)) + \
    "".join(f"  v_mov_b32_e32 v{i}, 0x42c60000\n" for i in range(96, 192)) + \
    "".join(f"  s_mov_b32 s{i}, 3\n" for i in range(40, 45)) + """
  v_add_u32_e32 v5, 0x1000, v0
  v_add_u32_e32 v6, 0x2000, v0
  ds_write_b32 v1, v5
  ds_write_b32 v1, v6 offset:256
  ds_write_b32 v1, v6 offset:512
  global_store_dword v1, v5, s[12:13]
  global_store_dword v1, v6, s[12:13] offset:256
  global_store_dword v1, v5, s[12:13] offset:512
  global_store_dword v1, v6, s[12:13] offset:768
  s_movk_i32 s45, 0x100
  s_mov_b32 s46, 1
  s_mov_b32 s32, s12
  s_mov_b32 s33, s13
  s_movk_i32 s34, 0x400
  s_mov_b32 s35, 0x20000
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_getpc_b64 s[30:31]
NAME_here:
  s_add_u32 s30, s30, NAME_blocks-NAME_here
  s_addc_u32 s31, s31, 0
  s_add_u32 s30, s30, s48
  s_addc_u32 s31, s31, 0
  s_nop 15
  s_nop 15
  s_setpc_b64 s[30:31]
NAME_done:
  s_mov_b64 exec, -1
""" + "".join(f"  global_store_dword v1, v{240 + i}, s[4:5] offset:{256 * i}\n" for i in range(RESULTS)) + """
  s_add_u32 s4, s4, RESULTS*256
  s_addc_u32 s5, s5, 0
  s_waitcnt vmcnt(0)
  s_sub_u32 s49, s49, 1
  s_cmp_eq_u32 s49, 0
  s_cbranch_scc1 NAME_end
  s_branch NAME_again
NAME_end:
  s_endpgm
"""


def nops(states):
    return "".join(f"  s_nop {min(16, states - at) - 1}\n" for at in range(0, states, 16))


def block(kernel, label, pair, states):
    after = f"  {pair.after}\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n" if pair.after else ""
    moves = "".join(f"  v_mov_b32_e32 v{240 + i}, {pair.see[i % len(pair.see)]}\n" for i in range(RESULTS))
    before = f"  {pair.before}\n" if pair.before else ""
    return (f"  .p2align 6\n{label}:\n{before}{nops(32)}  {pair.first}\n{nops(states)}  {pair.second}\n{nops(32)}"
            f"  s_waitcnt vmcnt(0) lgkmcnt(0)\n  s_mov_b64 exec, -1\n{after}{moves}  s_branch {kernel}_done\n")


class Kernel:
    """Some pairs at every number of wait states."""

    def __init__(self, number, pairs, assembler, most):
        self.name, self.pairs, self.states = f"hazards_{number}", pairs, [*range(most + 1), FAR]
        text = {"NAME": self.name, "RESULTS": str(RESULTS), "PASSES": str(PASSES)}
        code = f"{self.name}_again:\n{AGAIN}"
        enter = ENTER
        for word, by in text.items():
            code, enter = code.replace(word, by), enter.replace(word, by)
        labels = {(p, n): f"{self.name}_{p}_{n}" for p in range(len(pairs)) for n in self.states}
        blocks = "".join(block(self.name, labels[p, n], pairs[p], n) for p, n in labels)
        # The blocks stand between the loop's two ends.
        head, tail = code.split(f"{self.name}_done:\n")
        path = assembler.build(self.name, f"""
//# kernel {self.name} workgroup=64 workgroup_id=xy lds=1024
//#   ptr out
//#   ptr memory
//#   ptr table
//#   ptr unused
//#   u32 waves
.globl {self.name}
.p2align 8
{self.name}:
{enter}{head}
{self.name}_done:
{tail}
  .p2align 6
{self.name}_blocks:
{blocks}
""")
        self.path = path
        symbols = Elf(Path(path).read_bytes(), str(path)).symbols
        start = symbols[f"{self.name}_blocks"].value
        self.offsets = {key: symbols[label].value - start for key, label in labels.items()}

    def launch(self, keys, waves):
        table = struct.pack(f"<{len(keys)}I", *(self.offsets[key] for key in keys))
        size = len(keys) * waves
        return Launch(self.name, [out(size * RESULTS * PASSES * 256), Buffer(size=1024 * size), Buffer(table),
                                  Buffer(size=16), waves], grid=(waves, len(keys), 1))

    def left(self, outcome, keys, waves):
        """{key: what each wave left in each pass}."""
        each = waves * RESULTS * PASSES * 256
        return {key: outcome.read[0][n * each:(n + 1) * each] for n, key in enumerate(keys)}


def rule_of(message):
    return message.split(": needs ")[0]


def predict(kernel, emulator):
    """({pair: wait states that the emulator asks for}, {pair: its rule}, {pair: what the pair leaves far apart})."""
    keys = list(kernel.offsets)
    outcome = emulator.run(kernel.path, [kernel.launch(keys, 1)])[0]
    if outcome.error:
        raise RuntimeError(f"{kernel.name}: {outcome.error}")
    needed, rules, other = {}, {}, {}
    for fault in outcome.found:
        pair, states = keys[fault["workgroup"][1]]
        if "wait states" not in fault["message"]:
            other[pair] = fault
            continue
        if states + 1 > needed.get(pair, 0):
            needed[pair], rules[pair] = states + 1, rule_of(fault["message"])
    for pair, fault in other.items():
        raise RuntimeError(f"{kernel.pairs[pair].name}: {fault['instruction']}: {fault['message']}")
    left = kernel.left(outcome, keys, 1)
    return needed, rules, {pair: left[pair, FAR] for pair in range(len(kernel.pairs))}


def measure(kernel, device, needed, waves):
    """{key: bytes, or the launch's error}. Where the device refuses what lacks wait states, the last that lacks one."""
    legal = [key for key in kernel.offsets if key[1] >= needed.get(key[0], 0)]
    short = [key for key in kernel.offsets if key not in set(legal)]
    outcomes = device.run(kernel.path, [kernel.launch(keys, waves) for keys in (legal, short) if keys])
    found = {}
    for keys, outcome in zip((legal, short), outcomes):
        if not outcome.error:
            found.update(kernel.left(outcome, keys, waves))
        elif keys is legal:
            raise RuntimeError(f"{kernel.name}: {outcome.error}")
    if short and outcomes[-1].error:
        last = [key for key in short if key[1] == needed[key[0]] - 1]
        for key, outcome in zip(last, device.run(kernel.path, [kernel.launch([key], 1) for key in last])):
            found[key] = outcome.error or kernel.left(outcome, [key], 1)[key]
    return found


def judge(pair, index, needed, rule, at_isa, far, found, waves, states):
    """A Rule of one pair. `at_isa`: what the emulator's level isa says of a lack."""
    name = f"{rule}: {pair.name}" if rule else pair.name
    looser = f" (at level isa, {'a warning' if at_isa == 'warning' else 'none'})" if needed and at_isa != "fault" else ""
    result = Rule("wait states", name, NOT_RUN, emulator=f"needs {needed}{looser}")
    reference = found.get((index, FAR))
    if reference != far * waves:
        result.result, result.differing, result.cases = DIFFERS, 1, 1
        result.device, result.what = "another value", "the two far apart leave what the emulator does not"
        return result
    tried = [n for n in states if (index, n) in found]
    wrong = [n for n in tried if found[index, n] != (far * waves if len(found[index, n]) == len(reference) else far)]
    result.cases = len(tried)
    fewest = max(wrong) + 1 if wrong else 0
    refused = next((found[index, n] for n in wrong if isinstance(found[index, n], str)), "")
    result.device = f"needs {fewest}" if wrong else f"right with {min(tried)}"
    if fewest > needed:
        result.result, result.differing = DIFFERS, len([n for n in wrong if n >= needed])
        result.what = "wrong with as many wait states as the emulator asks for"
    elif needed == 0 or fewest == needed:
        result.result = AGREED
    else:
        result.result = NOT_SEEN
        result.what = "right with fewer than the emulator asks for"
    if refused:
        result.device = "refuses fewer"
    return result


def run(rules, assembler, emulator, device, short, progress, match=""):
    """A Rule for each pair."""
    waves, found, number = 2 if short else WAVES, [], 0
    at_isa = {rule["text"]: rule["isa"] for rule in rules["hazards"]}
    for pairs, most in all_pairs(rules, short):
        pairs = [pair for pair in pairs if match in pair.name]
        for first in range(0, len(pairs), PAIRS_OF_KERNEL):
            own = pairs[first:first + PAIRS_OF_KERNEL]
            progress(f"wait states: {own[0].name}")
            kernel = Kernel(number, own, assembler, most)
            number += 1
            needed, texts, far = predict(kernel, emulator)
            measured = measure(kernel, device, needed, waves)
            found += [judge(pair, i, needed.get(i, 0), texts.get(i, ""), at_isa.get(texts.get(i)), far[i], measured, waves, range(most + 1))
                      for i, pair in enumerate(own)]
    return found
