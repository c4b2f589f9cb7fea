"""Whether workgroups on different XCDs see what each other stored: the merge of the decode kernels (arrive in
asm/include/decode_merge.inc) in a small kernel, and what happens without each of its parts."""
import struct

from .report import AGREED, DIFFERS, NOT_SEEN, Rule
from .runner import Buffer, Launch, out

GROUPS, LANES = 32, 64  # 32 workgroups, four on each XCD; each stores a dword of 64 lines of 128 bytes
PARTS = {  # what is left out, as it is in the kernel
    "buffer_wbl2": "  buffer_wbl2 sc1\n",
    "the wait before the atomic": "  s_waitcnt vmcnt(0)        // written back\n",
    "buffer_inv": "  buffer_inv sc1\n",
}


def source(kernel, without=""):
    """Each workgroup reads its lines, so that its caches have them as they are before others store; then it stores its
    dword of each, and the last to arrive adds up all dwords. The next turn has other lines."""
    body = f"""
//# kernel {kernel} workgroup={LANES} workgroup_id=x
//#   ptr out
//#   ptr arrived
//#   ptr lines
//#   u32 turns
.globl {kernel}
.p2align 8
{kernel}:
  s_load_dwordx4 s[4:7], s[0:1], 0
  s_load_dwordx2 s[8:9], s[0:1], 16
  s_load_dword s15, s[0:1], 24
  v_and_b32_e32 v0, 0x3ff, v0
  s_lshl_b32 s10, s2, 2
  v_lshlrev_b32_e32 v1, 7, v0
  v_add_u32_e32 v2, s10, v1
  v_lshlrev_b32_e32 v3, 2, v0
  s_mov_b32 s11, 0
  s_waitcnt lgkmcnt(0)
{kernel}_turn:
  s_mul_i32 s12, s11, 0x3f1
  s_add_u32 s12, s12, s2
  v_mul_u32_u24_e32 v4, 0x1235, v0
  v_mul_lo_u32 v5, s12, s12
  v_add_u32_e32 v4, v4, v5
  global_load_dword v5, v2, s[8:9]
  s_waitcnt vmcnt(0)
  global_store_dword v2, v4, s[8:9]
  buffer_wbl2 sc1
  s_waitcnt vmcnt(0)        // written back
  s_mov_b64 exec, 1
  s_lshl_b32 s13, s11, 2
  v_mov_b32_e32 v6, s13
  v_mov_b32_e32 v7, {GROUPS - 1}
  global_atomic_inc v8, v6, v7, s[6:7] sc0
  s_waitcnt vmcnt(0)
  buffer_inv sc1
  s_nop 4
  v_readfirstlane_b32 s14, v8
  s_mov_b64 exec, -1
  s_cmp_lg_u32 s14, {GROUPS - 1}
  s_cbranch_scc1 {kernel}_next
  v_mov_b32_e32 v9, 0
""" + "".join(f"  global_load_dwordx4 v[{12 + 4 * i}:{15 + 4 * i}], v1, s[8:9] offset:{16 * i}\n" for i in range(GROUPS // 4)) + \
        "  s_waitcnt vmcnt(0)\n" + "".join(f"  v_add_u32_e32 v9, v9, v{12 + i}\n" for i in range(GROUPS)) + f"""
  global_store_dword v3, v9, s[4:5]
{kernel}_next:
  s_add_u32 s4, s4, {4 * LANES}
  s_addc_u32 s5, s5, 0
  s_add_u32 s8, s8, {128 * LANES}
  s_addc_u32 s9, s9, 0
  s_add_u32 s11, s11, 1
  s_cmp_lt_u32 s11, s15
  s_cbranch_scc1 {kernel}_turn
  s_endpgm
"""
    if without:
        assert body.count(PARTS[without]) == 1
        body = body.replace(PARTS[without], "")
    return body


def truth(turns):
    return [sum(0x1235 * lane + (0x3f1 * turn + group) ** 2 for group in range(GROUPS)) & 0xFFFFFFFF
            for turn in range(turns) for lane in range(LANES)]


def launch(kernel, turns):
    buffers = [out(4 * LANES * turns), Buffer(size=4 * turns, fill=0), Buffer(size=128 * LANES * turns, fill=0)]
    return Launch(kernel, [*buffers, turns], (GROUPS, 1, 1), (LANES, 1, 1))


def run(assembler, emulator, device, progress, short, match=""):
    """A Rule for the merge, and one for each of its parts."""
    names = {"": "a merge across XCDs", **{part: f"a merge across XCDs needs {part}" for part in PARTS}}
    wanted = {part: name for part, name in names.items() if match in name}
    if not wanted:
        return []
    progress("merge across XCDs")
    turns = 4 if short else 256
    kernels = {part: f"merge_xcds_{n}" for n, part in enumerate(wanted)}
    path = assembler.build("coherence", "".join(source(kernel, part) for part, kernel in kernels.items()))
    launches = [launch(kernel, turns) for kernel in kernels.values()]
    return [judge(names[part], part, turns, want, got)
            for part, want, got in zip(kernels, emulator.run(path, launches), device.run(path, launches))]


def judge(name, part, turns, want, got):
    """`want` is the emulator's outcome: without a part it is a report."""
    faults = [f["message"] for f in want.found if not f["warning"]]
    if want.error or bool(part) != bool(faults):
        raise RuntimeError(f"{name}: the emulator said: {want.error or faults[:1] or 'nothing'}")
    right = truth(turns)
    rule = Rule("coherence", name, AGREED, len(right))
    words = list(struct.unpack(f"<{len(right)}I", got.read[0])) if not got.error else []
    wrong = [i for i, word in enumerate(words) if word != right[i]]
    if part:
        rule.result = AGREED if wrong or got.error else NOT_SEEN
        rule.what = got.error or f"{len(wrong)} of {len(right)} sums were wrong without it"
    elif got.error:
        rule.result, rule.differing, rule.device, rule.what = DIFFERS, 1, "the launch failed", got.error
    elif wrong:
        rule.result, rule.differing = DIFFERS, len(wrong)
        rule.emulator, rule.device = f"{right[wrong[0]]:08x}", f"{words[wrong[0]]:08x}"
        rule.what = f"turn {wrong[0] // LANES}, lane {wrong[0] % LANES}"
    return rule
