"""Kernels around single instructions. Workgroup (row, y) executes the block at byte table[y] on the values of its row and
stores what it left; a block is an instruction, 16 bytes of code with the jump back.

    vector   VALU and SALU: v[8:9], v[10:11], v[12:13] sources, v[16:17] destination, s[16:17], s[18:19], s[20:21]
             scalar sources, s[24:25] scalar destination, s[26:27] and vcc lane masks, SCC
    matrix   MFMA: v[8:11], v[12:15] A and B, v[32:63] C, v[64:95] D, AGPRs a[0:31] as C
    lds      v8 address, v9 any bits, v29 an address that four lanes share, v[10:13] and v[20:23] data, v[16:19]
             destination; 5120 bytes of LDS, stored whole; for loads into it M0 of 256, s[12:13] the row's 2048 bytes of
             inputs, s[32:35] a buffer of them, s[36:39] one of their first 512
    memory   s[12:13] and v[30:31] the address of the workgroup's own 5120 bytes, v8 an offset, the data as in lds;
             s[32:35] a buffer of them, s[36:39] one of 512 bytes, s[40:43] one of records of 16 bytes, v[28:29] index and
             offset; s[48:63] destination of scalar loads
    scratch  the same data in scratch, which is copied to memory afterwards
"""
from dataclasses import dataclass

STRIDE = 16  # bytes of a block
MOST_BLOCKS = 2048  # within a jump of the kernel's end
REGION = 5120  # bytes of memory that a block may change


@dataclass(frozen=True)
class Frame:
    name: str
    inputs: int  # words of a lane and row
    outputs: int  # words of a lane
    declaration: str
    enter: str  # from the inputs in v[...] on
    leave: str

    def kernel(self, number, blocks):
        """(kernel's name, source) of up to MOST_BLOCKS instructions."""
        name = f"{self.name}_{number}"
        body = "\n".join(f"  .p2align 4\n{block}\n  s_branch {name}_done" for block in blocks)
        return name, f"""
//# kernel {name} workgroup=64 workgroup_id=xy {self.declaration}
//#   ptr out
//#   ptr in
//#   ptr scalars
//#   ptr table
//#   u32 mode
//#   u32 rows
.globl {name}
.p2align 8
{name}:
{START.replace("WORDS", str(self.outputs)).replace("ROW_BYTES", str(self.inputs * 256))}
{self.enter}
  s_nop 15
  s_nop 15
  s_getpc_b64 s[30:31]
{name}_here:
  s_add_u32 s30, s30, {name}_blocks-{name}_here
  s_addc_u32 s31, s31, 0
  s_add_u32 s30, s30, s47
  s_addc_u32 s31, s31, 0
  s_bitcmp1_b32 s22, 0                  // SCC
  s_setpc_b64 s[30:31]
  .p2align 4
{name}_blocks:
{body}
{name}_done:
{self.leave}
  s_endpgm
"""


def each(text, count, first=0):
    """`text` with {i} from first on, {at} 256 i and {low}, {high} the registers of four."""
    return "\n".join(text.format(i=i, at=256 * (i - first), n=i - first) for i in range(first, first + count))


# Out: s[4:5], of this row and block. v1: 4 * lane. Scalars of the row in s[16:23], the block's offset in s47.
START = """
  s_load_dwordx8 s[4:11], s[0:1], 0
  s_load_dwordx2 s[44:45], s[0:1], 32
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshlrev_b32_e32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  s_lshl_b32 s46, s3, 2
  s_load_dword s47, s[10:11], s46
  s_lshl_b32 s46, s2, 5
  s_load_dwordx8 s[16:23], s[8:9], s46
  s_mul_i32 s46, s3, s45
  s_add_u32 s46, s46, s2
  s_mul_i32 s46, s46, WORDS*256
  s_add_u32 s4, s4, s46
  s_addc_u32 s5, s5, 0
  s_mul_i32 s46, s2, ROW_BYTES
  v_add_u32_e32 v2, s46, v1
  s_waitcnt lgkmcnt(0)
  s_mov_b64 s[24:25], s[22:23]
  s_mov_b64 s[26:27], s[20:21]
  s_mov_b64 vcc, s[18:19]
  s_lshr_b32 s46, s44, 23
  s_setreg_b32 hwreg(HW_REG_MODE, 0, 10), s44
  s_nop 3
  s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s46
"""

LOADS = each("  global_load_dword v{i}, v2, s[6:7] offset:{at}", 8, 8)

VECTOR = Frame(
    "vector", 8, 3, "",
    f"""{LOADS}
  s_waitcnt vmcnt(0)
  v_mov_b32_e32 v16, v14
  v_mov_b32_e32 v17, v15""",
    f"""
  s_cselect_b32 s28, 1, 0
  s_mov_b64 s[34:35], exec
  s_mov_b64 exec, -1
  s_mov_b64 s[36:37], vcc
  s_nop 7
  v_mov_b32_e32 v18, 0
""" + "\n".join(f"  v_writelane_b32 v18, {s}, {lane}" for lane, s in
                enumerate(["s24", "s25", "s28", "s34", "s35", "s36", "s37"])) + """
  global_store_dword v1, v16, s[4:5]
  global_store_dword v1, v17, s[4:5] offset:256
  global_store_dword v1, v18, s[4:5] offset:512
""")

MATRIX = Frame(
    "matrix", 40, 32, "",
    each("  global_load_dword v{i}, v2, s[6:7] offset:{at}", 8, 8) + "\n  v_add_u32_e32 v2, 2048, v2\n" +
    "\n".join(each("  global_load_dword v{i}, v2, s[6:7] offset:{at}", 8, first) + "\n  v_add_u32_e32 v2, 2048, v2"
              for first in (32, 40, 48, 56)) +
    "\n  s_waitcnt vmcnt(0)\n" + each("  v_mov_b32_e32 v{i}, v1", 32, 64) + "\n" +
    "\n".join(f"  v_accvgpr_write_b32 a{i}, v{32 + i}" for i in range(32)),
    "  s_mov_b64 exec, -1\n  s_nop 15\n  s_nop 15\n" +
    "\n".join(each("  global_store_dword v1, v{i}, s[4:5] offset:{at}", 8, first) + "\n  v_add_u32_e32 v1, 2048, v1"
              for first in (64, 72, 80, 88)))

# v4: 16 * lane, v5: 16 lanes' worth behind; the region is filled with the row's own values.
DATA = f"""{LOADS}
  v_lshlrev_b32_e32 v4, 4, v0
  s_waitcnt vmcnt(0)
  v_mov_b32_e32 v3, v8
  v_mov_b32_e32 v20, v11
  v_mov_b32_e32 v21, v10
  v_mov_b32_e32 v22, v13
  v_mov_b32_e32 v23, v12
  v_mov_b32_e32 v16, v14
  v_mov_b32_e32 v17, v15
  v_mov_b32_e32 v18, v9
  v_mov_b32_e32 v19, v14"""
RESULT = each("  global_store_dword v1, v{i}, s[4:5] offset:{at}", 4, 16) + "\n"
PARTS = range(0, REGION, 1024)  # of 16 bytes a lane

LDS = Frame(
    "lds", 8, 24, f"lds={REGION}",
    DATA + "\n" + "\n".join(f"  ds_write_b128 v4, v[12:15] offset:{at}" for at in PARTS) +
    """
  v_xor_b32_e32 v12, v12, v9
  v_mov_b32_e32 v13, v15
  v_and_b32_e32 v29, 0x3c0, v4
  s_movk_i32 m0, 0x100
  s_mul_i32 s46, s2, 2048
  s_add_u32 s12, s6, s46
  s_addc_u32 s13, s7, 0
  s_mov_b64 s[32:33], s[12:13]
  s_movk_i32 s34, 0x800
  s_mov_b32 s35, 0x20000
  s_mov_b64 s[36:37], s[12:13]
  s_movk_i32 s38, 0x200
  s_mov_b32 s39, s35
  s_waitcnt lgkmcnt(0)""",
    "  s_mov_b64 exec, -1\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n" + RESULT + "  v_add_u32_e32 v5, 0x400, v4\n" +
    "\n".join(f"  ds_read_b128 v[24:27], v4 offset:{at}\n  s_waitcnt lgkmcnt(0)\n"
              f"  global_store_dwordx4 v5, v[24:27], s[4:5]\n  v_add_u32_e32 v5, 0x400, v5\n"
              f"  s_waitcnt vmcnt(0)" for at in PARTS))

MEMORY = Frame(
    "memory", 8, 25, "",
    DATA + "\n  s_add_u32 s12, s4, 0x500\n  s_addc_u32 s13, s5, 0\n  v_mov_b32_e32 v6, v4\n" +
    "\n".join("  global_store_dwordx4 v6, v[12:15], s[12:13]\n  v_add_u32_e32 v6, 0x400, v6" for _ in PARTS) + """
  s_waitcnt vmcnt(0)
  s_dcache_inv                            // scalar loads read what was stored
  v_xor_b32_e32 v12, v12, v9
  v_mov_b32_e32 v13, v15
  s_mov_b32 s32, s12
  s_mov_b32 s33, s13
  s_mov_b32 s34, 5120
  s_mov_b32 s35, 0x20000
  s_mov_b64 s[36:37], s[32:33]
  s_movk_i32 s38, 0x200
  s_mov_b32 s39, s35
  s_mov_b32 s40, s12
  s_or_b32 s41, s13, 0x100000
  s_movk_i32 s42, 40
  s_mov_b32 s43, s35
  s_movk_i32 s44, 0x40
  v_mov_b32_e32 v30, s12
  v_mov_b32_e32 v31, s13
  v_add_co_u32_e32 v30, vcc, v30, v8
  s_nop 1
  v_addc_co_u32_e32 v31, vcc, 0, v31, vcc
  v_mov_b32_e32 v28, v0
  v_mov_b32_e32 v29, 4
""" + "\n".join(f"  s_mov_b32 s{i}, s{16 + i % 8}" for i in range(48, 64)),
    "  s_mov_b64 exec, -1\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n  v_mov_b32_e32 v24, 0\n" +
    "\n".join(f"  v_writelane_b32 v24, s{48 + i}, {i}" for i in range(16)) + "\n" + RESULT +
    "  global_store_dword v1, v24, s[4:5] offset:1024\n")

SCRATCH = Frame(
    "scratch", 8, 24, f"scratch={REGION // 64 + 16}",
    DATA + "\n" + "\n".join(f"  scratch_store_dwordx4 off, v[12:15], off offset:{at}" for at in range(0, 96, 16)) +
    "\n  v_and_b32_e32 v8, 31, v0\n  v_and_b32_e32 v8, 12, v8\n  s_movk_i32 s12, 16\n  s_waitcnt vmcnt(0)\n"
    "  v_xor_b32_e32 v12, v12, v9\n  v_mov_b32_e32 v13, v15",
    "  s_mov_b64 exec, -1\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n" + RESULT + "  v_add_u32_e32 v5, 0x400, v4\n" +
    "\n".join(f"  scratch_load_dwordx4 v[24:27], off, off offset:{at}\n  s_waitcnt vmcnt(0)\n"
              f"  global_store_dwordx4 v5, v[24:27], s[4:5]\n  v_add_u32_e32 v5, 0x400, v5\n"
              f"  s_waitcnt vmcnt(0)" for at in range(0, 80, 16)))

FRAMES = (VECTOR, MATRIX, LDS, MEMORY, SCRATCH)
