"""Where work is placed: workgroups on XCDs, waves on SIMDs, lanes in the groups that LDS serves together."""
import statistics
import struct
from collections import Counter

from . import rates
from .report import AGREED, DIFFERS, NOT_RUN, Rule
from .runner import Buffer, Launch, out

WORKGROUPS, WAVES = 2432, 8  # eight for each compute unit of an MI300X
XCDS = 8

WHERE = f"""
//# kernel where workgroup={64 * WAVES} workgroup_id=x
//#   ptr out
.globl where
.p2align 8
where:
  s_load_dwordx2 s[4:5], s[0:1], 0
  v_and_b32_e32 v0, 0x3ff, v0
  s_getreg_b32 s8, hwreg(HW_REG_HW_ID)
  s_getreg_b32 s9, hwreg(HW_REG_XCC_ID, 0, 4)
  v_readfirstlane_b32 s10, v0
  s_mul_i32 s11, s2, {WAVES}
  s_waitcnt lgkmcnt(0)
  s_lshr_b32 s10, s10, 6
  s_add_u32 s11, s11, s10
  s_lshl_b32 s11, s11, 3
  v_mov_b32_e32 v1, s11
  v_mov_b32_e32 v2, s8
  v_mov_b32_e32 v3, s9
  global_store_dwordx2 v1, v[2:3], s[4:5]
  s_endpgm
"""


def run_where(assembler, device, emulated, progress):
    """Rules of workgroups and waves."""
    names = {"XCD": "workgroup i runs on XCD i % 8", "SIMD": "wave w of a workgroup runs on SIMD w % 4"}
    if emulated:  # whose XCC_ID and HW_ID say nothing of a chip
        return [Rule("placement", name, NOT_RUN, what="not modelled") for name in names.values()]
    progress("placement")
    path = assembler.build("where", WHERE)
    outcome = device.run(path, [Launch("where", [out(8 * WORKGROUPS * WAVES)], (WORKGROUPS, 1, 1), (64 * WAVES, 1, 1))])[0]
    if outcome.error:
        return [Rule("placement", name, DIFFERS, 1, 1, device="the launch failed", what=outcome.error)
                for name in names.values()]
    words = struct.unpack(f"<{2 * WORKGROUPS * WAVES}I", outcome.read[0])
    return [judge_xcds(names["XCD"], words), judge_simds(names["SIMD"], words)]


def judge_xcds(name, words):
    """XCC_ID has physical numbers: that workgroups go round is what counts."""
    xcds = [words[2 * WAVES * i + 1] for i in range(WORKGROUPS)]
    first = xcds[:XCDS]
    wrong = [i for i, xcd in enumerate(xcds) if xcd != first[i % XCDS]]
    rule = Rule("placement", name, AGREED, WORKGROUPS, len(wrong), what=f"XCC_ID of workgroups 0 to 7: {first}")
    if wrong or len(set(first)) != XCDS:
        rule.result, rule.differing = DIFFERS, max(len(wrong), 1)
        rule.emulator, rule.device = f"{first[(wrong or [0])[0] % XCDS]}", f"{xcds[(wrong or [0])[0]]}"
        rule.what += f"; workgroup {(wrong or [0])[0]}; workgroups by XCD: {dict(sorted(Counter(xcds).items()))}"
    return rule


def judge_simds(name, words):
    """SIMD_ID is bits 5:4 of HW_ID. A workgroup's first wave may be on any; the others are to follow in turn."""
    rule = Rule("placement", name, AGREED, WORKGROUPS)
    starts = Counter()
    for i in range(WORKGROUPS):
        simds = [words[2 * (WAVES * i + w)] >> 4 & 3 for w in range(WAVES)]
        starts[simds[0]] += 1
        if simds == [(simds[0] + w) % 4 for w in range(WAVES)]:
            continue
        rule.differing += 1
        if rule.differing == 1:
            rule.emulator = " ".join(str((simds[0] + w) % 4) for w in range(WAVES))
            rule.device, rule.what = " ".join(map(str, simds)), f"workgroup {i}"
    if rule.differing:
        rule.result = DIFFERS
    rule.what += ("; " if rule.what else "") + f"the first wave is on SIMD {dict(sorted(starts.items()))}"
    return rule


# ---- LDS: two lanes want words of one bank, all others one word of another; it takes longer if a group has both ---------

GROUP_WAVES = 8
KINDS = {  # name: (instruction's address and data order, registers, bytes)
    "ds_read_b32": ("{d}, v4", 1, 4), "ds_read_b64": ("{d}, v4", 2, 8), "ds_read_b128": ("{d}, v4", 4, 16),
    "ds_write_b32": ("v4, {d}", 1, 4), "ds_write_b64": ("v4, {d}", 2, 8), "ds_write_b128": ("v4, {d}", 4, 16),
}
LONE, OTHERS = 64, 0  # bytes: half the banks apart


def group_source(kind):
    operands, words, _ = KINDS[kind]

    def body(i):
        return "s_waitcnt lgkmcnt(11)\n  " + f"{kind} " + operands.format(d=rates.v(16 + 4 * (i % 12), words))
    before = f"""
  s_load_dwordx2 s[20:21], s[0:1], 16      // the addresses, and which of them
  s_load_dword s22, s[0:1], 24
  s_waitcnt lgkmcnt(0)
  s_add_u32 s22, s22, s2
  s_lshl_b32 s22, s22, 8
  v_lshlrev_b32_e32 v4, 2, v2
  v_add_u32_e32 v4, s22, v4
  global_load_dword v4, v4, s[20:21]
  s_mul_i32 s23, s2, {64 * GROUP_WAVES}
  s_add_u32 s4, s4, s23
  s_addc_u32 s5, s5, 0
  s_lshl_b32 s23, s16, 13                  // each wave has bytes of its own, on the same banks
  s_waitcnt vmcnt(0)
  v_add_u32_e32 v4, s23, v4"""
    rate = rates.Rate(f"groups {kind}", body, GROUP_WAVES, before=before, few=16, many=64)
    return rate, rate.source.replace("//#   ptr memory\n", "//#   ptr memory\n//#   ptr addresses\n//#   u32 first\n")


def addresses(size, pair, distance):
    """Of 64 lanes: two of them `distance` bytes apart, where no other reads."""
    lanes = [OTHERS] * 64
    if pair:
        lanes[pair[0]], lanes[pair[1]] = LONE, LONE + distance
    return lanes


def clocks_of(rate, path, machine, cases, modelled):
    """Of one instruction, for each list of addresses."""
    data = struct.pack(f"<{64 * len(cases)}I", *(lane for case in cases for lane in case))
    table, memory = Buffer(data), Buffer(size=256, fill=0)
    if modelled:  # the model looks at workgroup 0 alone
        launches = [Launch(rate.kernel, [out(64 * GROUP_WAVES), memory, table, n], (1, 1, 1), (64 * GROUP_WAVES, 1, 1))
                    for n in range(len(cases))]
        outcomes = machine.run(path, launches)
        bad = next((o for o in outcomes if o.error or o.found), None)
        if bad:
            raise RuntimeError(f"{rate.name}: {bad.error or bad.found[0]['message']}")
        return [rate.per([reads[-4:] for reads in o.clock_reads]) / GROUP_WAVES for o in outcomes]
    launch = Launch(rate.kernel, [out(64 * GROUP_WAVES * len(cases)), memory, table, 0], (len(cases), 1, 1),
                    (64 * GROUP_WAVES, 1, 1))
    runs = []
    for outcome in machine.run(path, [launch] * rates.LAUNCHES):
        if outcome.error:
            raise RuntimeError(f"{rate.name}: {outcome.error}")
        waves = [reads[:4] for reads in rates.readings(outcome.read[0], 8)]
        runs.append([rate.per(waves[n * GROUP_WAVES:(n + 1) * GROUP_WAVES]) / GROUP_WAVES for n in range(len(cases))])
    return [statistics.median(values) for values in zip(*runs)]


def written(groups):
    """0-3,20-23 4-7,16-19 ..."""
    def ranges(lanes):
        found = []
        for lane in lanes:
            if found and found[-1][1] == lane - 1:
                found[-1][1] = lane
            else:
                found.append([lane, lane])
        return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in found)
    return " ".join(ranges(group) for group in groups)


def find_groups(rate, path, machine, size, lanes, modelled):
    """(groups of the lanes, banks)."""
    def slower(cases):
        return [c > alone + 0.5 for c in clocks_of(rate, path, machine, [addresses(size, *case) for case in cases],
                                                   modelled)]
    alone = clocks_of(rate, path, machine, [addresses(size, None, 0)], modelled)[0]
    groups, left = [], list(lanes)
    while left:
        first, *others = left
        together = [lane for lane, slow in zip(others, slower([((first, lane), 128) for lane in others])) if slow]
        groups.append([first, *together])
        left = [lane for lane in others if lane not in together]
    pair = next((group[:2] for group in groups if len(group) > 1), None)
    # Distances that bring the second lane to where the others are say nothing.
    distances = [d for d in range(size, 513, size) if (LONE + d - OTHERS) % 128 >= size]
    conflicts = [d for d, slow in zip(distances, slower([(pair, d) for d in distances]) if pair else ()) if slow]
    return groups, min(conflicts) // 4 if conflicts else None


def run_groups(assembler, emulator, device, emulated, short, progress):
    """A Rule for the groups of each instruction."""
    made = {kind: group_source(kind) for kind in (["ds_read_b128"] if short else KINDS)}
    path = assembler.build("groups", "".join(source for _, source in made.values()))
    lanes = [0, 1, 3, 4, 8, 16, 20, 23, 24, 28, 32, 52, 63] if short else list(range(64))
    rules = []
    for kind, (rate, _) in made.items():
        progress(f"LDS groups: {kind}")
        rule = Rule("placement", f"lanes that LDS serves together, {kind}", AGREED, len(lanes) * (len(lanes) - 1) // 2)
        want = find_groups(rate, path, emulator, KINDS[kind][2], lanes, True)
        got = want if emulated else find_groups(rate, path, device, KINDS[kind][2], lanes, False)
        rule.emulator, rule.device = (f"{written(groups)}; banks {banks}" for groups, banks in (want, got))
        if want != got:
            rule.result, rule.differing = DIFFERS, 1
        if emulated:
            rule.what = "from the issue model"
        rules.append(rule)
    return rules
