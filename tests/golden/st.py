"""Read and write safetensors with NumPy only.

A tensor is an array whose type NumPy has, or a pair (dtype name, array of raw bits) for BF16, F8_E4M3 and F8_E5M2.
"""
import json
import struct

import numpy as np

NATIVE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "I8": "i1", "U8": "u1", "BOOL": "?"}
BITS = {"BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}


def save(path, tensors, metadata=None):
    header, chunks, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            dtype, array = tensor
            array = np.ascontiguousarray(array, dtype=BITS[dtype])
        else:
            dtype = next(d for d, n in NATIVE.items() if np.dtype(n) == tensor.dtype)
            array = np.ascontiguousarray(tensor, dtype=NATIVE[dtype])
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        chunks.append(array.tobytes())
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def load(path, only=None):
    """Returns (tensors, metadata); `only` is a test on names."""
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if only and not only(name):
            continue
        begin, end = (8 + size + o for o in entry["data_offsets"])
        dtype = entry["dtype"]
        array = np.frombuffer(data[begin:end], dtype=NATIVE.get(dtype) or BITS[dtype]).reshape(entry["shape"])
        tensors[name] = array if dtype in NATIVE else (dtype, array)
    return tensors, metadata
