"""Rounds the float32 tensors of a safetensors file to float16: python3 examples/to_f16.py IN OUT. Needs Python alone."""
import json
import struct
import sys
from pathlib import Path


def main(source, target):
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
            count = len(chunk) // 4
            chunk = struct.pack(f"<{count}e", *struct.unpack(f"<{count}f", chunk))
            tensor["dtype"] = "F16"
        tensor["data_offsets"] = [len(out), len(out) + len(chunk)]
        out += chunk
    text = json.dumps(header).encode()
    Path(target).write_bytes(struct.pack("<Q", len(text)) + text + out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
