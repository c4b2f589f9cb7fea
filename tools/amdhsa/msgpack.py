"""MessagePack, read: what AMDGPU metadata notes are made of."""
import struct

from .failure import Failure

MAX_DEPTH = 16
SCALARS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
           0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I",
           0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, size):
        if self.at + size > len(self.data):
            raise Failure("it ends within a value")
        self.at += size
        return self.data[self.at - size:self.at]

    def number(self, layout):
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self, size):
        return self.take(size).decode("utf-8", "replace")

    def array(self, count, depth):
        return [self.value(depth) for _ in range(count)]

    def map(self, count, depth):
        result = {}
        for _ in range(count):
            key = self.value(depth)
            if not isinstance(key, str):
                raise Failure("a key is not a string")
            result[key] = self.value(depth)
        return result

    def value(self, depth=0):
        if depth > MAX_DEPTH:
            raise Failure(f"it nests more than {MAX_DEPTH} deep")
        tag = self.number(">B")
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self.map(tag & 15, depth + 1)
        if tag < 0xA0:
            return self.array(tag & 15, depth + 1)
        if tag < 0xC0:
            return self.text(tag & 31)
        if tag >= 0xE0:
            return tag - 0x100
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag in SCALARS:
            return self.number(SCALARS[tag])
        if tag not in LENGTHS:
            raise Failure(f"byte 0x{tag:02x} starts no known value")
        size = self.number(LENGTHS[tag])
        if tag <= 0xC6:
            return self.take(size)
        if tag <= 0xDB:
            return self.text(size)
        return self.array(size, depth + 1) if tag <= 0xDD else self.map(size, depth + 1)


def read(data):
    return Reader(data).value()
