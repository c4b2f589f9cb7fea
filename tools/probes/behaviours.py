"""Rules that show in whole kernels: what a wave begins with, jumps, barriers, clocks, AGPRs; and sweeps over all values
of a conversion or transcendental function."""
import math
import struct
from dataclasses import dataclass

from . import inputs, values
from .report import AGREED, DIFFERS, NOT_RUN, Rule
from .runner import Launch, out


@dataclass(frozen=True)
class Behaviour:
    """A kernel `body` that stores `words` for each work item at out[s[4:5]], v1 holding 4 * its number in the grid's row.
    """
    name: str
    body: str
    words: int = 1
    declaration: str = "workgroup_id=xyz"
    workgroup: str = "64"
    grid: tuple = (1, 1, 1)

    @property
    def kernel(self):
        return "rule_" + self.name.replace(" ", "_").replace(",", "")

    @property
    def block(self):
        sizes = [int(size) for size in self.workgroup.split("x")]
        return tuple(sizes + [1] * (3 - len(sizes)))

    @property
    def items(self):
        return math.prod(self.block) * math.prod(self.grid)

    @property
    def source(self):
        return f"""
//# kernel {self.kernel} workgroup={self.workgroup} {self.declaration}
//#   ptr out
.globl {self.kernel}
.p2align 8
{self.kernel}:
{self.body}
  s_endpgm
"""


def store(first, count):
    """Registers v[first:] of work item v1 / 4 to out, one after the other, `count` words each."""
    lines = ["  s_load_dwordx2 s[4:5], s[0:1], 0", f"  v_mul_u32_u24_e32 v1, {count}, v1", "  s_waitcnt lgkmcnt(0)"]
    return "\n".join(lines + [f"  global_store_dword v1, v{first + i}, s[4:5] offset:{4 * i}" for i in range(count)])


# Work item 64 * wave + lane of the first workgroups; the wave's number from v0.
ONE_WAVE = "  v_and_b32_e32 v1, 0x3ff, v0\n  v_lshlrev_b32_e32 v1, 2, v1\n"

ENTRY = """
  s_mov_b64 s[8:9], exec
  s_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)
  s_getreg_b32 s11, hwreg(HW_REG_MODE, 23, 1)
  v_mov_b32_e32 v8, v0
  v_mov_b32_e32 v9, s2
  v_mov_b32_e32 v10, s3
  v_mov_b32_e32 v11, s4
  v_mov_b32_e32 v12, s8
  v_mov_b32_e32 v13, s9
  v_mov_b32_e32 v14, s10
  v_mov_b32_e32 v15, s11
  // the work item's number: x + X (y + Y z), then of its workgroup in the grid of 2 x 3 x 2
  v_and_b32_e32 v2, 0x3ff, v0
  v_bfe_u32 v3, v0, 10, 10
  v_bfe_u32 v4, v0, 20, 10
  v_mad_u32_u24 v3, v4, Y, v3
  v_mad_u32_u24 v2, v3, X, v2
  s_mul_i32 s12, s4, 3
  s_add_u32 s12, s12, s3
  s_lshl_b32 s12, s12, 1
  s_add_u32 s12, s12, s2
  s_mul_i32 s12, s12, ITEMS
  v_add_lshl_u32 v1, v2, s12, 2
""" + store(8, 8)


def entry(name, x, y, z, declaration):
    body = ENTRY.replace("ITEMS", str(x * y * z)).replace("X,", f"{x},").replace("Y,", f"{y},")
    return Behaviour(name, body, 8, declaration, f"{x}x{y}x{z}", (2, 3, 2))


JUMPS = ONE_WAVE + "  v_mov_b32_e32 v8, 0\n" + "".join(f"""
  {setting}
  {jump} jump_{n}
  v_or_b32_e32 v8, {1 << n}, v8
jump_{n}:
""" for n, (setting, jump) in enumerate([
    ("s_cmp_eq_u32 s2, s2", "s_cbranch_scc0"), ("s_cmp_lg_u32 s2, s2", "s_cbranch_scc0"),
    ("s_cmp_eq_u32 s2, s2", "s_cbranch_scc1"), ("s_cmp_lg_u32 s2, s2", "s_cbranch_scc1"),
    ("s_mov_b64 vcc, 0", "s_cbranch_vccz"), ("s_mov_b64 vcc, 5", "s_cbranch_vccz"),
    ("s_mov_b64 vcc, 0", "s_cbranch_vccnz"), ("s_mov_b32 vcc_hi, 4", "s_cbranch_vccnz"),
    ("s_mov_b64 exec, 0", "s_cbranch_execz"), ("s_mov_b64 exec, -1", "s_cbranch_execz"),
    ("s_mov_b64 exec, 0", "s_cbranch_execnz"), ("s_mov_b64 exec, -1", "s_cbranch_execnz"),
    ("s_nop 0", "s_branch")])).replace("v_or_b32_e32 v8, 2048", "s_nop 0\n  v_or_b32_e32 v8, 0x800") + """
  s_mov_b64 exec, -1
""" + store(8, 1)

# Distances from the place after s_getpc_b64, and which function ran.
CALLS = ONE_WAVE + """
  s_getpc_b64 s[8:9]
  s_getpc_b64 s[10:11]
calls_here:
  s_add_u32 s10, s10, calls_one-calls_here
  s_addc_u32 s11, s11, 0
  s_swappc_b64 s[12:13], s[10:11]
  s_sub_u32 s12, s12, s8
  v_mov_b32_e32 v8, s12
  v_mov_b32_e32 v9, s14
  s_call_b64 s[16:17], calls_two
  s_sub_u32 s16, s16, s8
  v_mov_b32_e32 v10, s16
  v_mov_b32_e32 v11, s14
  s_branch calls_end
calls_one:
  s_mov_b32 s14, 11
  s_setpc_b64 s[12:13]
calls_two:
  s_mov_b32 s14, 22
  s_setpc_b64 s[16:17]
calls_end:
""" + store(8, 4)

BARRIER = """
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshlrev_b32_e32 v1, 2, v0
  v_mov_b32_e32 v8, 0
  v_mov_b32_e32 v4, v0
  s_mov_b32 s8, 8
barrier_turn:
  ds_write_b32 v1, v4
  s_waitcnt lgkmcnt(0)
  s_barrier
  v_add_u32_e32 v5, 0x144, v1             // of another wave
  v_and_b32_e32 v5, 0x3ff, v5
  ds_read_b32 v6, v5
  s_waitcnt lgkmcnt(0)
  v_lshl_add_u32 v8, v8, 1, v6
  v_add_u32_e32 v4, v4, v6
  s_barrier
  s_sub_u32 s8, s8, 1
  s_cmp_lg_u32 s8, 0
  s_cbranch_scc1 barrier_turn
""" + store(8, 1)

# 1 where the later reading is larger.
CLOCK = ONE_WAVE + "\n".join(f"""
  {read} s[8:9]
  s_waitcnt lgkmcnt(0)
  s_sleep 20
  {read} s[10:11]
  s_waitcnt lgkmcnt(0)
  s_sub_u32 s10, s10, s8
  s_subb_u32 s11, s11, s9
  s_cmp_lg_u64 s[10:11], 0
  s_cselect_b32 s12, 1, 0
  s_cmp_ge_i32 s11, 0
  s_cselect_b32 s13, 1, 0
  s_and_b32 s12, s12, s13
  v_mov_b32_e32 v{8 + n}, s12
""" for n, read in enumerate(("s_memtime", "s_memrealtime"))) + store(8, 2)

MODE_REGISTER = ONE_WAVE + """
  s_mov_b32 s8, 0x2f5
  s_getreg_b32 s9, hwreg(HW_REG_MODE, 0, 10)
  s_nop 3
  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 1
  s_nop 3
  s_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)
  s_nop 3
  s_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s8
  s_nop 3
  s_getreg_b32 s11, hwreg(HW_REG_MODE, 0, 8)
  s_nop 3
  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0xffffffff
  s_nop 3
  s_getreg_b32 s12, hwreg(HW_REG_MODE, 20, 6)
""" + "".join(f"  v_mov_b32_e32 v{8 + i}, s{9 + i}\n" for i in range(4)) + store(8, 4)

ACCUMULATION = ONE_WAVE + """
  s_load_dwordx2 s[4:5], s[0:1], 0
  v_add_u32_e32 v2, 7, v1
  v_accvgpr_write_b32 a0, v2
  v_accvgpr_write_b32 a1, 1.0
  v_accvgpr_write_b32 a3, -3
  v_accvgpr_mov_b32 a2, a0
  s_waitcnt lgkmcnt(0)
  v_mul_u32_u24_e32 v3, 5, v1
  global_store_dword v3, a0, s[4:5]
  ds_write_b32 v1, a3
  s_waitcnt vmcnt(0) lgkmcnt(0)
  global_load_dword a4, v3, s[4:5]
  ds_read_b32 a5, v1
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_nop 7
  v_accvgpr_read_b32 v8, a1
  v_accvgpr_read_b32 v9, a2
  v_accvgpr_read_b32 v10, a3
  v_accvgpr_read_b32 v11, a4
  v_accvgpr_read_b32 v12, a5
""" + store(8, 5)

SCRATCH_DMA = ONE_WAVE + """
  v_mul_u32_u24_e32 v2, 0x123, v1
  s_movk_i32 m0, 0x40
  v_mov_b32_e32 v3, -1
  ds_write_b32 v1, v3
  ds_write_b32 v1, v3 offset:256
  scratch_store_dword off, v2, off offset:16
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_mov_b32 exec_lo, 0xfffff0ff
  scratch_load_lds_dword off, off offset:16
  s_mov_b64 exec, -1
  s_waitcnt vmcnt(0)
  ds_read_b32 v8, v1
  ds_read_b32 v9, v1 offset:256
  s_waitcnt lgkmcnt(0)
""" + store(8, 2)

INDEXED = ONE_WAVE + "".join(f"  v_add_u32_e32 v{16 + i}, {i}, v1\n  s_movk_i32 s{20 + i}, {100 + i}\n" for i in range(8)) + \
    "".join(f"  v_mov_b32_e32 v{i}, -1\n" for i in (8, 9, 10, 11, 12)) + """
  s_mov_b32 s8, 3
  s_set_gpr_idx_on s8, gpr_idx(SRC0)
  s_nop 3
  v_mov_b32_e32 v8, v16
  s_set_gpr_idx_idx 5
  s_nop 3
  v_sub_u32_e32 v10, v16, v17
  s_set_gpr_idx_mode gpr_idx(SRC1,DST)
  s_nop 3
  v_sub_u32_e32 v6, v16, v17
  s_set_gpr_idx_off
  s_mov_b32 m0, 2
  s_mov_b64 s[30:31], 0
  s_mov_b64 s[32:33], 0
  s_nop 3
  s_movrels_b32 s9, s20
  s_movrels_b64 s[10:11], s[20:21]
  s_movreld_b32 s28, s24
  s_movreld_b64 s[30:31], s[26:27]
  s_add_u32 s9, s9, s30
  s_add_u32 s10, s10, s32
  v_mov_b32_e32 v9, s9
  v_mov_b32_e32 v12, s10
""" + store(8, 5)

BEHAVIOURS = [
    entry("entry state", 16, 4, 2, "workgroup_id=xyz"),
    entry("entry state of a wave in part", 33, 3, 1, "workgroup_id=xyz denorm_f32=flush dx10_clamp=1"),
    entry("entry state, modes", 64, 1, 1, "workgroup_id=xyz denorm_f16_f64=keep ieee_mode=1 fp16_overflow=1"),
    Behaviour("jumps", JUMPS),
    Behaviour("calls", CALLS, 4),
    Behaviour("barrier", BARRIER, 1, "workgroup_id=xyz lds=1024", "256"),
    Behaviour("clock", CLOCK, 2),
    Behaviour("mode register", MODE_REGISTER, 4),
    Behaviour("accumulation registers", ACCUMULATION, 5, "workgroup_id=xyz lds=256"),
    Behaviour("indexed registers", INDEXED, 5, "workgroup_id=xyz indexed_vgprs=24 indexed_sgprs=36"),
    Behaviour("loads to LDS, scratch", SCRATCH_DMA, 2, "workgroup_id=xyz lds=1024 scratch=32"),
]


def run(assembler, emulator, device, progress, match=""):
    """A Rule for each behaviour."""
    progress("behaviours")
    wanted = [b for b in BEHAVIOURS if match in b.name]
    # A kernel that jumps through registers counts all code of its object as its own.
    apart = [b for b in wanted if "s_setpc" in b.body]
    return [rule for name, group in (("behaviours", [b for b in wanted if b not in apart]), ("calls", apart)) if group
            for rule in run_group(assembler.build(name, "".join(b.source for b in group)), group, emulator, device)]


def run_group(path, behaviours, emulator, device):
    launches = [Launch(b.kernel, [out(4 * b.words * b.items)], b.grid, b.block) for b in behaviours]
    rules = []
    for b, want, got in zip(behaviours, emulator.run(path, launches), device.run(path, launches)):
        faults = [f"{f['instruction']}: {f['message']}" for f in want.found if not f["warning"]]
        if want.error:
            raise RuntimeError(f"{b.name}: {want.error}")
        if faults:
            rules.append(Rule("behaviours", b.name, NOT_RUN, not_modelled=faults[:1]))
            continue
        rules.append(compare("behaviours", b.name, want.read[0], got, b.words))
    return rules


def compare(group, name, want, got, words, show=None):
    """Of `words` for each case. show(case): what it is."""
    rule = Rule(group, name, AGREED, cases=len(want) // (4 * words))
    if got.error:
        return Rule(group, name, DIFFERS, 1, 1, device="the launch failed", what=got.error)
    left, right = (memoryview(data).cast("I") for data in (want, got.read[0]))
    if left == right:
        return rule
    for case in range(rule.cases):
        a, b = (list(x[case * words:(case + 1) * words]) for x in (left, right))
        if a == b:
            continue
        rule.differing += 1
        if rule.differing == 1:
            rule.result = DIFFERS
            rule.emulator, rule.device = (" ".join(f"{x:08x}" for x in y) for y in (a, b))
            rule.what = show(case) if show else f"work item {case}"
    return rule


# ---- sweeps -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sweep:
    """An operation on all values of its source; of a `width` of 32 bits on x = (n << shift) + n % 4 - 1, so that what lies
    beside a tie is among them."""
    name: str
    text: str  # v8 is x, v9 the result
    width: int = 32
    mode: int = values.KEEP
    tolerance: int = 0  # ulps of f32
    truth: object = None  # of a float, in float64

    @property
    def kernel(self):
        return "sweep_" + self.name.replace(" ", "_").replace(",", "")

    @property
    def source(self):
        return f"""
//# kernel {self.kernel} workgroup=256 workgroup_id=x
//#   ptr out
//#   u32 shift
//#   u32 mode
.globl {self.kernel}
.p2align 8
{self.kernel}:
  s_load_dwordx4 s[4:7], s[0:1], 0
  v_and_b32_e32 v0, 0x3ff, v0
  s_lshl_b32 s8, s2, 8
  v_add_u32_e32 v0, s8, v0
  v_lshlrev_b32_e32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  s_lshr_b32 s9, s7, 23
  s_setreg_b32 hwreg(HW_REG_MODE, 0, 10), s7
  s_nop 3
  s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s9
  v_lshlrev_b32_e32 v8, s6, v0
  s_cmp_lg_u32 s6, 0
  s_cselect_b32 s8, 3, 0
  v_and_b32_e32 v2, s8, v0
  v_add_u32_e32 v8, v8, v2
  s_cselect_b32 s8, -1, 0
  v_add_u32_e32 v8, s8, v8
  v_mov_b32_e32 v9, 0
  s_nop 3
  {self.text}
  s_nop 3
  global_store_dword v1, v9, s[4:5]
  s_endpgm
"""


def exp2(x):
    return 2.0 ** x if x < 1024 else math.inf


OVFL = values.MODES["FP16_OVFL"]
SWEEPS = [
    Sweep("v_cvt_pk_fp8_f32", "v_cvt_pk_fp8_f32 v9, v8, v8"),
    Sweep("v_cvt_pk_fp8_f32 with FP16_OVFL", "v_cvt_pk_fp8_f32 v9, v8, v8", mode=OVFL),
    Sweep("v_cvt_pk_bf8_f32", "v_cvt_pk_bf8_f32 v9, v8, v8"),
    Sweep("v_cvt_pk_bf8_f32 with FP16_OVFL", "v_cvt_pk_bf8_f32 v9, v8, v8", mode=OVFL),
    Sweep("v_cvt_f16_f32", "v_cvt_f16_f32_e32 v9, v8"),
    Sweep("v_cvt_f32_f16", "v_cvt_f32_f16_e32 v9, v8", 16),
    Sweep("v_cvt_f32_fp8", "v_cvt_f32_fp8_e32 v9, v8", 8),
    Sweep("v_cvt_f32_bf8", "v_cvt_f32_bf8_e32 v9, v8", 8),
    Sweep("v_exp_f32", "v_exp_f32_e32 v9, v8", tolerance=1, truth=exp2),
    Sweep("v_log_f32", "v_log_f32_e32 v9, v8", tolerance=1, truth=lambda x: math.log2(x) if x > 0 else None),
    Sweep("v_rcp_f32", "v_rcp_f32_e32 v9, v8", tolerance=1, truth=lambda x: 1 / x if x else None),
    Sweep("v_rsq_f32", "v_rsq_f32_e32 v9, v8", tolerance=1, truth=lambda x: x ** -0.5 if x > 0 else None),
    Sweep("v_sqrt_f32", "v_sqrt_f32_e32 v9, v8", tolerance=1, truth=lambda x: x ** 0.5 if x >= 0 else None),
    Sweep("v_sin_f32", "v_sin_f32_e32 v9, v8", tolerance=1),
    Sweep("v_cos_f32", "v_cos_f32_e32 v9, v8", tolerance=1),
]


def run_sweeps(assembler, emulator, device, bits, progress, match=""):
    """A Rule for each sweep, and how far the device's functions are from float64, in ulps."""
    rules, ulps = [], {}
    wanted = [sweep for sweep in SWEEPS if match in sweep.name]
    path = assembler.build("sweeps", "".join(sweep.source for sweep in wanted)) if wanted else None
    for sweep in wanted:
        progress(f"sweep: {sweep.name}")
        count, shift = 1 << min(bits, sweep.width), 32 - bits if sweep.width == 32 else 0
        launch = Launch(sweep.kernel, [out(4 * max(count, 256)), shift, sweep.mode], (max(count // 256, 1), 1, 1),
                        (256, 1, 1))
        want, got = emulator.run(path, [launch])[0], device.run(path, [launch])[0]
        name = f"{sweep.name}, {count} values"
        rule = compare("sweeps", name, want.read[0], got, 1, lambda n, s=shift: f"of {source_of(n, s):08x}")
        if not got.error and sweep.tolerance:
            within(rule, sweep, want.read[0], got.read[0], shift)
            if sweep.truth:
                ulps[sweep.name] = {"device": farthest(sweep, got.read[0], shift),
                                    "emulator": farthest(sweep, want.read[0], shift)}
        rules.append(rule)
    return rules, ulps


def source_of(n, shift):
    return (n << shift) + (n % 4 - 1 if shift else 0) & 0xFFFFFFFF


def words(data):
    return struct.unpack(f"<{len(data) // 4}I", data)


def within(rule, sweep, want, got, shift):
    """A rule whose values may be an ulp apart."""
    apart = [(values.ulps("f32", a, b), n) for n, (a, b) in enumerate(zip(words(want), words(got))) if a != b]
    far = [n for distance, n in apart if distance > sweep.tolerance]
    rule.differing = len(far)
    rule.result = DIFFERS if far else AGREED
    if far:
        rule.emulator, rule.device = (f"{words(x)[far[0]]:08x}" for x in (want, got))
        rule.what = f"of {source_of(far[0], shift):08x}"
    elif apart:
        rule.emulator = rule.device = ""
        rule.what = f"{len(apart)} of {rule.cases} values are at most {max(apart)[0]} ulp apart"


def farthest(sweep, data, shift):
    """The largest distance from float64, in ulps of the result; normal numbers alone."""
    most = 0.0
    for n, bits in enumerate(words(data)):
        x, y = struct.unpack("<2f", struct.pack("<2I", source_of(n, shift), bits))
        if not math.isfinite(x) or not 2.0 ** -126 <= abs(y) < math.inf or abs(x) < 2.0 ** -126:
            continue
        exact = sweep.truth(x)
        if exact is not None and math.isfinite(exact):
            most = max(most, abs(exact - y) / 2.0 ** (math.frexp(y)[1] - 24))
    return round(most, 3)
