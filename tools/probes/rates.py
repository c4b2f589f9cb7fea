"""Rates: how many clocks instructions take, alone, beside MFMA, with LDS conflicts, from memory; by s_memtime in kernels.

Each kernel times FEW and MANY of its instructions and takes the difference. The issue model says of the same kernel what it
would read there: that is the figure beside the device's. Figures that are settings of the model bear its names.
"""
import statistics
import struct
from dataclasses import dataclass

from .operations import tuple_of
from .report import AGREED, DIFFERS, MEASURED, MODELLED, NOT_RUN, Constant
from .runner import Buffer, Launch, out

FEW, MANY, PASSES = 32, 160, 3  # repetitions, and how often; the last pass counts
LAUNCHES = 5
CLOSE = 0.06  # relative, or half a clock
LATENCY_STEPS = 1024
LATENCY_BYTES = 128 * LATENCY_STEPS


def v(first, count=1):
    return tuple_of("v", first, count)


def mfma(i, name="v_mfma_f32_32x32x16_fp8_fp8", d=16, a=2):
    to = 64 + d * (i % (64 // d))
    return f"{name} {v(to, d)}, {v(8, a)}, {v(12, a)}, {v(to, d)}"


@dataclass(frozen=True)
class Rate:
    """`body(i)`: repetition i, in each of `waves`; `clocks(per, c)`: the figure from the clocks of one repetition, with those that
    stand before it in c."""
    name: str
    body: object
    waves: int = 1
    clocks: object = lambda per, c: per
    unit: str = "clocks"
    before: str = ""
    other: object = None  # body of the upper half of the waves
    few: int = FEW
    many: int = MANY

    @property
    def kernel(self):
        return "rate_" + "".join(c if c.isalnum() else "_" for c in self.name)

    @property
    def source(self):
        def repeat(body, count):
            return "\n".join("  " + body(i) for i in range(count))

        def part(count):
            if not self.other:
                return repeat(self.body, count)
            label = f"{self.kernel}_{count}"
            return (f"  s_cbranch_scc1 {label}_other\n{repeat(self.body, count)}\n  s_branch {label}_end\n"
                    f"{label}_other:\n{repeat(self.other, count)}\n{label}_end:")
        return f"""
//# kernel {self.kernel} workgroup={64 * self.waves} workgroup_id=x lds=65536
//#   ptr out
//#   ptr memory
.globl {self.kernel}
.p2align 8
{self.kernel}:
  s_load_dwordx4 s[4:7], s[0:1], 0
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshlrev_b32_e32 v1, 2, v0
  v_mov_b32_e32 v8, 0x3f000000
  v_mov_b32_e32 v9, 0x3f400000
  v_readfirstlane_b32 s16, v0
  v_mov_b32_e32 v10, v8
  v_mov_b32_e32 v11, v9
  s_lshr_b32 s16, s16, 6                   // the wave
""" + "\n".join(f"  v_mov_b32_e32 v{i}, 0x40404040" for i in (12, 13, 14, 15)) + "\n" + \
            "\n".join(f"  v_mov_b32_e32 v{i}, 0" for i in range(16, 128)) + f"""
  v_and_b32_e32 v2, 63, v0
  v_lshlrev_b32_e32 v3, 4, v0
  s_movk_i32 s18, {64 // self.waves}
{self.kernel}_clear:
  ds_write_b128 v3, v[16:19]
  v_add_u32_e32 v3, {1024 * self.waves}, v3
  s_waitcnt lgkmcnt(0)
  s_sub_u32 s18, s18, 1
  s_cmp_lg_u32 s18, 0
  s_cbranch_scc1 {self.kernel}_clear
{self.before}
  s_mov_b32 s18, {PASSES}
  s_cmp_ge_u32 s16, {self.waves // 2 if self.other else 64}
  s_cselect_b32 s19, 1, 0
{self.kernel}_again:
  s_barrier
  s_cmp_eq_u32 s19, 1
  s_memtime s[8:9]
  s_waitcnt lgkmcnt(0)
{part(self.few)}
  s_memtime s[10:11]
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_barrier
  s_cmp_eq_u32 s19, 1
  s_memtime s[12:13]
  s_waitcnt lgkmcnt(0)
{part(self.many)}
  s_memtime s[14:15]
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_nop 15
  s_sub_u32 s18, s18, 1
  s_cmp_eq_u32 s18, 0
  s_cbranch_scc1 {self.kernel}_end
  s_branch {self.kernel}_again
{self.kernel}_end:
  s_lshl_b32 s16, s16, 6
  v_mov_b32_e32 v1, s16
""" + "\n".join(f"  v_mov_b32_e32 v{16 + i}, s{8 + i}\n  global_store_dword v1, v{16 + i}, s[4:5] offset:{4 * i}"
                for i in range(8)) + "\n  s_endpgm\n"

    def launch(self):
        return Launch(self.kernel, [out(64 * self.waves), Buffer(bytes(MEMORY))], (1, 1, 1), (64 * self.waves, 1, 1))

    def per(self, reads):
        """Clocks of a repetition, from four readings of each wave."""
        spans = [max(r[at + 1] for r in reads) - min(r[at] for r in reads) for at in (0, 2)]
        return (spans[1] - spans[0]) / (self.many - self.few)


MEMORY = 4 << 20


def read_lds(width, words):
    """Wide reads, of which eleven are under way."""
    def body(i):
        return f"s_waitcnt lgkmcnt(11)\n  ds_read_b{width} {v(16 + 4 * (i % 12), words)}, v4"
    return body


def lds_rate(name, width, words, address, waves=16):
    return Rate(f"{name}, b{width}", read_lds(width, words), waves, lambda per, c: per / waves,
                before=f"{address}\n  s_nop 1")


def load(width, lds=False):
    """Loads of lines that are not in the first cache; fifteen are under way."""
    def body(i):
        move = "s_waitcnt vmcnt(15)\n  v_add_u32_e32 v4, s20, v4\n  "
        if lds:
            return f"{move}s_add_u32 m0, s21, {256 * (i % 16)}\n  s_nop 0\n  global_load_lds_dword v4, s[6:7]"
        name = {1: "dword", 2: "dwordx2", 4: "dwordx4"}[width]
        return move + f"global_load_{name} {v(16 + 4 * (i % 16), width)}, v4, s[6:7]"
    return body


def load_rate(name, width, waves=8, lds=False):
    size = 4 * width
    return Rate(name, load(width, lds), waves, lambda per, c: 64 * size * waves / per, "bytes per clock and unit",
                before=f"  v_mul_u32_u24_e32 v4, {size}, v2\n  s_mul_i32 s17, s16, {MEMORY // 2 // waves}\n  s_lshl_b32 s21, s16, 12\n"
                       f"  v_add_u32_e32 v4, s17, v4\n  s_movk_i32 s20, {64 * size}")


def alone(name, text, count=16, width=1, waves=1):
    """An instruction on registers that rotate: {d} its destination."""
    return Rate(name, lambda i: text.format(d=v(16 + width * (i % count), width)), waves)


def beside(name, text, count, width=1):
    """As many of the instruction behind each MFMA of 32 clocks as leave it no room; what one of them takes."""
    def body(i):
        rows = [text.format(d=v(16 + width * ((count * i + n) % 16), width)) for n in range(count)]
        return "\n  ".join([mfma(i), *rows])
    return Rate(f"{name} beside MFMA", body, 1, lambda per, c: (per - c["valu_clocks"]) / count)


EXP, PACKED = "v_exp_f32_e32 {d}, v8", "v_pk_fma_f32 {d}, v[8:9], v[10:11], v[8:9]"
CONVERT, FMA = "v_cvt_pk_fp8_f32 {d}, v8, v9", "v_fma_f32 {d}, v8, v9, v10"
LINEAR = "  v_lshlrev_b32_e32 v4, {}, v2"

RATES = [
    # Settings of the model.
    Rate("issue_clocks", lambda i: f"s_mov_b32 s{24 + i % 8}, s16"),
    alone("valu_clocks", "v_add_f32_e32 {d}, v8, v9"),
    alone("trans_clocks", EXP),
    alone("packed_f32_clocks", PACKED, 8, 2),
    Rate("clocks_per_pass", mfma, 1, lambda per, c: per / 8),
    Rate("barrier_clocks", lambda i: "s_barrier", 4),
    Rate("simds", lambda i: f"v_add_f32_e32 v{16 + i % 16}, v8, v9", 8, lambda per, c: 8 * c["valu_clocks"] / per, "a unit"),
    Rate("lds_latency", lambda i: "ds_read_b32 v4, v4\n  s_waitcnt lgkmcnt(0)", 1,
         lambda per, c: per - c["issue_clocks"] - 2, before="  v_lshlrev_b32_e32 v4, 2, v2"),
    Rate("scalar_latency", lambda i: "s_load_dword s24, s[6:7], s25\n  s_waitcnt lgkmcnt(0)\n  s_and_b32 s25, s24, 0x3fc", 1,
         lambda per, c: per - 2 * c["issue_clocks"], before="  s_mov_b32 s25, 0"),
    load_rate("memory_bytes_per_clock", 4),
    # What the model takes for plain VALU, transcendentals or MFMA.
    *(alone(f"{name}", text) for name, text in [
        ("v_fma_f32", FMA), ("v_mul_f32", "v_mul_f32_e32 {d}, v8, v9"), ("v_max3_f32", "v_max3_f32 {d}, v8, v9, v10"),
        ("v_cvt_pk_fp8_f32", CONVERT), ("v_perm_b32", "v_perm_b32 {d}, v8, v9, v10"),
        ("v_cndmask_b32", "v_cndmask_b32_e64 {d}, v8, v9, s[6:7]"), ("v_mov_b32_dpp",
         "v_mov_b32_dpp {d}, v8 row_shr:1 row_mask:0xf bank_mask:0xf"), ("v_cvt_f16_f32", "v_cvt_f16_f32_e32 {d}, v8"),
        ("v_log_f32", "v_log_f32_e32 {d}, v9"), ("v_rcp_f32", "v_rcp_f32_e32 {d}, v9"),
        ("v_mul_lo_u32", "v_mul_lo_u32 {d}, v8, v9"), ("v_lshl_add_u32", "v_lshl_add_u32 {d}, v8, 2, v9")]),
    alone("v_pk_mul_f32", "v_pk_mul_f32 {d}, v[8:9], v[10:11]", 8, 2),
    alone("v_pk_add_f32", "v_pk_add_f32 {d}, v[8:9], v[10:11]", 8, 2),
    alone("v_fma_f64", "v_fma_f64 {d}, v[8:9], v[10:11], v[8:9]", 8, 2),
    *(Rate(name, lambda i, n=name, d=d, a=a: mfma(i, n, d, a)) for name, d, a in [
        ("v_mfma_f32_16x16x32_fp8_fp8", 4, 2), ("v_mfma_f32_32x32x8_bf16", 16, 2), ("v_mfma_f32_16x16x16_bf16", 4, 2),
        ("v_mfma_f32_32x32x2_f32", 16, 1), ("v_mfma_i32_32x32x16_i8", 16, 2)]),
    Rate("v_mfma_f32_32x32x16_fp8_fp8, a chain", lambda i: mfma(0)),
    # Beside MFMA: of the same wave, then of another.
    Rate("MFMA and 7 v_add_f32", lambda i: "\n  ".join([mfma(i)] + [f"v_add_f32_e32 v{16 + n}, v8, v9" for n in range(7)])),
    beside("v_add_f32", "v_add_f32_e32 {d}, v8, v9", 14),
    beside("v_exp_f32", EXP, 4),
    beside("v_cvt_pk_fp8_f32", CONVERT, 14),
    beside("v_pk_fma_f32", PACKED, 8, 2),
    beside("v_fma_f32", FMA, 14),
    Rate("MFMA of one wave, v_exp_f32 of another", mfma, 8, other=lambda i: "\n  ".join(
        EXP.format(d=f"v{16 + n}") for n in range(2))),
    Rate("MFMA of one wave, v_pk_fma_f32 of another", mfma, 8, other=lambda i: "\n  ".join(
        PACKED.format(d=v(16 + 2 * n, 2)) for n in range(6))),
    # LDS, per instruction: linear, then with conflicts.
    lds_rate("ds_read, linear", 32, 1, LINEAR.format(2)),
    lds_rate("ds_read, linear", 64, 2, LINEAR.format(3)),
    lds_rate("ds_read, linear", 128, 4, LINEAR.format(4)),
    lds_rate("ds_read, all of one address", 128, 4, "  v_mov_b32_e32 v4, 0"),
    lds_rate("ds_read, 8 bytes apart", 32, 1, LINEAR.format(3)),
    lds_rate("ds_read, 128 bytes apart", 32, 1, LINEAR.format(7)),
    lds_rate("ds_read, 128 bytes apart", 128, 4, LINEAR.format(7)),
    lds_rate("ds_read, 136 bytes apart", 64, 2, "  v_mul_u32_u24_e32 v4, 0x88, v2"),
    lds_rate("ds_read, 144 bytes apart", 128, 4, "  v_mul_u32_u24_e32 v4, 0x90, v2"),
    lds_rate("ds_read, 256 bytes apart", 128, 4, LINEAR.format(8)),
    # Loads by width.
    load_rate("global_load_dword", 1),
    load_rate("global_load_dwordx2", 2),
    load_rate("global_load_lds_dword", 1, lds=True),
]
NAMES_OF_MODEL = {"issue_clocks", "valu_clocks", "trans_clocks", "packed_f32_clocks", "clocks_per_pass", "barrier_clocks",
                  "simds", "lds_latency", "scalar_latency", "memory_bytes_per_clock", "memory_latency", "overlap"}

# One lane follows a chain of addresses; the first time through memory, then, the first cache being smaller, from L2.
LATENCY = f"""
//# kernel latency workgroup=64 workgroup_id=x
//#   ptr out
//#   ptr memory
.globl latency
.p2align 8
latency:
  s_load_dwordx4 s[4:7], s[0:1], 0
  s_mov_b64 exec, 1
  v_mov_b32_e32 v1, 0
  v_mov_b32_e32 v2, 0
  s_mov_b32 s16, 3
  s_waitcnt lgkmcnt(0)
latency_pass:
  s_mov_b32 s17, {LATENCY_STEPS // 16}
  s_memtime s[8:9]
  s_waitcnt lgkmcnt(0)
latency_step:
""" + "  global_load_dword v2, v2, s[6:7]\n  s_waitcnt vmcnt(0)\n" * 16 + """
  s_sub_u32 s17, s17, 1
  s_cmp_lg_u32 s17, 0
  s_cbranch_scc1 latency_step
  s_memtime s[10:11]
  s_waitcnt lgkmcnt(0)
""" + "".join(f"  v_mov_b32_e32 v{4 + i}, s{8 + i}\n  global_store_dword v1, v{4 + i}, s[4:5] offset:{4 * i}\n"
              for i in range(4)) + """
  v_add_u32_e32 v1, 16, v1
  s_waitcnt vmcnt(0)
  s_sub_u32 s16, s16, 1
  s_cmp_lg_u32 s16, 0
  s_cbranch_scc1 latency_pass
  s_endpgm
"""


# Both clocks around some 10 ms of VALU.
CORE_CLOCK = """
//# kernel core_clock workgroup=256 workgroup_id=x
//#   ptr out
.globl core_clock
.p2align 8
core_clock:
  s_load_dwordx2 s[4:5], s[0:1], 0
  v_mov_b32_e32 v1, 0
  s_mov_b32 s16, 10000
  s_memtime s[8:9]
  s_memrealtime s[10:11]
  s_waitcnt lgkmcnt(0)
core_clock_loop:
""" + "  v_fma_f32 v2, 1.0, v1, v1\n  v_fma_f32 v3, 1.0, v1, v1\n" * 256 + """
  s_sub_u32 s16, s16, 1
  s_cmp_lg_u32 s16, 0
  s_cbranch_scc1 core_clock_loop
  s_memtime s[12:13]
  s_memrealtime s[14:15]
  s_waitcnt lgkmcnt(0)
""" + "".join(f"  v_mov_b32_e32 v{4 + i}, s{8 + i}\n  global_store_dword v1, v{4 + i}, s[4:5] offset:{4 * i}\n"
              for i in range(8)) + "  s_endpgm\n"
REAL_TIME_MHZ = 100  # of s_memrealtime


def core_clock(assembler, device, figures, progress):
    """MHz, on all compute units at once."""
    name, unit = "core clock under VALU", "MHz"
    if figures.emulated:
        figures.constants.append(Constant(name, None, unit, None, NOT_RUN, "not modelled"))
        return
    progress("rates: core clock")
    path = assembler.build("core_clock", CORE_CLOCK)
    outcome = device.run(path, [Launch("core_clock", [out(64)], (1216, 1, 1), (256, 1, 1))])[0]
    if outcome.error:
        figures.constants.append(Constant(name, None, unit, None, NOT_RUN, outcome.error))
        return
    reads = struct.unpack("<8Q", outcome.read[0])
    mhz = (reads[2] - reads[0]) / (reads[3] - reads[1]) * REAL_TIME_MHZ
    figures.constants.append(Constant(name, rounded(mhz), unit, None, MEASURED, f"if s_memrealtime counts at {REAL_TIME_MHZ} MHz"))


def chain():
    """Each line of 128 bytes names the next one, in an order without a stride."""
    words = [0] * (LATENCY_BYTES // 4)
    order = [line * 389 % LATENCY_STEPS for line in range(LATENCY_STEPS)]
    for line, following in zip(order, order[1:] + order[:1]):
        words[32 * line] = 128 * following
    return struct.pack(f"<{len(words)}I", *words)


def readings(data, count):
    """64-bit numbers, `count` of each wave."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return [words[i:i + count] for i in range(0, len(words), count)]


class Figures:
    """Device and model, figure by figure; without a device the model's stand for both."""

    def __init__(self, emulated):
        self.emulated, self.device, self.model, self.constants = emulated, {}, {}, []

    def add(self, name, device, model, unit, what=""):
        """`device` and `model`: a number, or a sentence that says why there is none."""
        value = model if self.emulated else device
        if isinstance(value, str):
            self.constants.append(Constant(name, None, unit, None if isinstance(model, str) else rounded(model), NOT_RUN, value))
            return
        self.device[name], self.model[name] = value, model
        close = abs(value - model) <= max(CLOSE * abs(model), 0.5)
        result = MODELLED if self.emulated else AGREED if close else DIFFERS
        self.constants.append(Constant(name, rounded(value), unit, rounded(model), result, what))


def rounded(x):
    return x if isinstance(x, bool) else round(float(x), 2)


def derive(rate, per, before):
    try:
        return rate.clocks(per, before)
    except (KeyError, ZeroDivisionError):
        return "a figure that it needs was not measured"


def run(assembler, emulator, device, emulated, progress, match=""):
    """Constants, in the order of RATES."""
    figures = Figures(emulated)
    wanted = [rate for rate in RATES if match in rate.name or rate.name in NAMES_OF_MODEL]
    path = assembler.build("rates", "".join(rate.source for rate in wanted))
    progress("rates")
    launches = [rate.launch() for rate in wanted]
    said = emulator.run(path, launches)
    seen = [] if emulated else device.run(path, launches * LAUNCHES)
    for n, rate in enumerate(wanted):
        faults = [f"{fault['instruction']}: {fault['message']}" for fault in said[n].found if not fault["warning"]]
        if said[n].error or faults:
            raise RuntimeError(f"{rate.name}: {said[n].error or faults[0]}")
        model = derive(rate, rate.per([reads[-4:] for reads in said[n].clock_reads]), figures.model)
        good = [rate.per(readings(o.read[0], 4)) for o in seen[n::len(wanted)] if not o.error]
        measured = derive(rate, statistics.median(good), figures.device) if good else \
            seen[n].error if seen else model
        figures.add(rate.name, measured, model, rate.unit)
    latency(assembler, emulator, device, figures, progress)
    overlap(figures)
    core_clock(assembler, device, figures, progress)
    return figures.constants


def latency(assembler, emulator, device, figures, progress):
    progress("rates: memory_latency")
    path = assembler.build("latency", LATENCY)
    launch = Launch("latency", [out(64), Buffer(chain())], (1, 1, 1), (64, 1, 1))
    said = emulator.run(path, [launch])[0]
    if said.error or said.found:
        raise RuntimeError(f"latency: {said.error or said.found[0]['message']}")

    def per(reads, which, c):
        return (reads[2 * which + 1] - reads[2 * which]) / LATENCY_STEPS - c["issue_clocks"] - 1 - 3 / 16 * c["issue_clocks"]
    model = [per(said.clock_reads[0], which, figures.model) for which in (0, 2)]
    measured = model
    if not figures.emulated:
        outcome = device.run(path, [launch])[0]
        measured = [outcome.error] * 2
        if not outcome.error:
            reads = struct.unpack("<6Q", outcome.read[0][:48])
            measured = [per(reads, which, figures.device) for which in (0, 2)]
    figures.add("memory_latency", measured[0], model[0], "clocks", "the first time through 128 KiB")
    figures.add("memory latency from L2", measured[1], model[1], "clocks", "the third time through 128 KiB")


def overlap(figures):
    """Whether VALU run behind an MFMA: seven take no time of their own then."""
    name = "MFMA and 7 v_add_f32"
    for constant in figures.constants:
        if constant.name != name or constant.value is None:
            continue
        found = {side: of[name] < 8 * of["clocks_per_pass"] + 7 * of["valu_clocks"] / 2 for side, of in
                 (("device", figures.device), ("model", figures.model)) if name in of}
        value = found["device"]
        result = MODELLED if figures.emulated else AGREED if value == found["model"] else DIFFERS
        figures.constants.append(Constant("overlap", value, "", found["model"], result))
        return
    figures.constants.append(Constant("overlap", None, "", True, NOT_RUN, f"'{name}' was not measured"))
