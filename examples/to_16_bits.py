"""Rounds the float32 tensors of a safetensors file: python3 examples/to_16_bits.py IN OUT f16|bf16. Needs Python alone."""
import json
import struct
import sys
from pathlib import Path


def bf16(x):
    """To nearest even; of finite values."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits + 0x7fff + (bits >> 16 & 1) >> 16


ROUND = {"f16": lambda values: struct.pack(f"<{len(values)}e", *values),
         "bf16": lambda values: struct.pack(f"<{len(values)}H", *map(bf16, values))}


def main(source, target, kind):
    data = Path(source).read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    out = b""
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        chunk = data[start + begin:start + end]
        if tensor["dtype"] == "F32":
            chunk = ROUND[kind](struct.unpack(f"<{len(chunk) // 4}f", chunk))
            tensor["dtype"] = kind.upper()
        tensor["data_offsets"] = [len(out), len(out) + len(chunk)]
        out += chunk
    text = json.dumps(header).encode()
    Path(target).write_bytes(struct.pack("<Q", len(text)) + text + out)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in ROUND:
        sys.exit(__doc__)
    main(*sys.argv[1:])
