"""Makes docs/masks.png: masks of the library's builders, drawn by `attn mask --show`.

    python3 docs/masks.py build/release
"""
import ctypes
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "golden"))
import st  # noqa: E402

S, BLOCK = 192, 32
CPU, HANDLE = 2, ctypes.c_void_p


class Shape(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("batch", ctypes.c_int64), ("heads", ctypes.c_int64),
                ("seqlen_q", ctypes.c_int64), ("seqlen_kv", ctypes.c_int64), ("block_q", ctypes.c_int32),
                ("block_k", ctypes.c_int32)]


class Args(ctypes.Structure):  # attn_args
    _fields_ = [("struct_size", ctypes.c_size_t)] + [(f"p{n}", HANDLE) for n in range(4)] + [
        ("num_segments", ctypes.c_int32)] + [(f"q{n}", HANDLE) for n in range(6)] + [
        (name, HANDLE) for name in ("kinds", "index", "bits")]


def main():
    build = pathlib.Path(sys.argv[1])
    lib = ctypes.CDLL(str(build / "lib" / "libattn.so"))
    lib.attn_last_error.restype = ctypes.c_char_p
    context, shape = HANDLE(), Shape(ctypes.sizeof(Shape), 1, 1, S, S, BLOCK, BLOCK)

    def call(name, *arguments):
        if getattr(lib, name)(*arguments):
            sys.exit(lib.attn_last_error().decode())

    call("attn_context_create", CPU, None, ctypes.byref(context))

    def make(builder, *arguments):
        mask = HANDLE()
        call(f"attn_block_mask_from_{builder}", context, ctypes.byref(shape), *arguments, ctypes.byref(mask))
        return mask

    i64, i32 = ctypes.c_int64, ctypes.c_int32
    lengths = (i64 * 3)(75, 30, 87)
    # Per key the queries that see it: text those behind it, an image from its own begin on.
    first = np.arange(S)
    for begin, end in ((40, 90), (120, 170)):
        first[begin:end] = begin
    intervals = np.stack([first, np.full(S, S)], 1).astype(np.int32)
    masks = [make("documents", lengths, i64(3), i32(1)),
             make("window", i64(40), i64(0), i64(8), i64(0)),
             make("window", i64(-1), i64(0), i64(0), i64(70)),
             make("intervals", intervals.ctypes.data_as(HANDLE), i32(1), None)]

    n = S // BLOCK
    kinds, index, blocks = [], [], []
    for mask in masks:
        args = Args(ctypes.sizeof(Args))
        call("attn_block_mask_apply", mask, None, ctypes.byref(args))
        kind = np.ctypeslib.as_array(ctypes.cast(args.kinds, ctypes.POINTER(ctypes.c_uint8)), (n, n)).copy()
        where = np.ctypeslib.as_array(ctypes.cast(args.index, ctypes.POINTER(i32)), (n, n)).copy()
        count = where.max() + 1
        words = np.ctypeslib.as_array(ctypes.cast(args.bits, ctypes.POINTER(ctypes.c_uint32)), (count, BLOCK))
        index.append(np.where(where >= 0, where + len(blocks), -1))
        blocks.extend((words[b][:, None] >> np.arange(BLOCK) & 1).astype(bool) for b in range(count))
        kinds.append(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/masks.safetensors"
        st.save(path, {"block_kinds": np.stack(kinds)[None], "block_index": np.stack(index)[None].astype(np.int32),
                       "block_bits": np.stack(blocks), "block_size": np.array([BLOCK, BLOCK], np.int32)})
        subprocess.run([build / "bin" / "attn", "mask", path, "--show", ROOT / "docs" / "masks.png"], check=True)


if __name__ == "__main__":
    main()
