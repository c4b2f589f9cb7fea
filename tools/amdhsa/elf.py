"""ELF files of AMDGPU, every offset checked against the file's size."""
import struct
from dataclasses import dataclass

from .failure import Failure
from .target import TARGETS

EM_AMDGPU = 224
ELFOSABI_AMDGPU_HSA = 64
ET_REL, ET_DYN = 1, 3
SHT_SYMTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 2, 7, 8, 11
SHF_ALLOC, SHF_EXECINSTR = 2, 4
SHN_UNDEF, SHN_ABS = 0, 0xFFF1
STB_LOCAL = 0


@dataclass(frozen=True)
class Section:
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    alignment: int


@dataclass(frozen=True)
class Symbol:
    name: str
    value: int
    size: int
    binding: int
    section: int


class Elf:
    def __init__(self, data, name):
        self.data, self.name = data, name
        if data[:4] != b"\x7fELF":
            raise Failure(f"{name} is not an ELF file")
        header = self.unpack("<16sHHIQQQIHHHHHH", 0, "the ELF header")
        (ident, self.type, machine, _, _, _, offset, self.flags, _, _, _, entry_size, count,
         names) = header
        if ident[4:6] != b"\x02\x01":
            raise Failure(f"{name} is not a 64-bit little-endian ELF file")
        if machine != EM_AMDGPU:
            raise Failure(f"{name} is for ELF machine {machine}, not AMDGPU ({EM_AMDGPU})")
        if ident[7] != ELFOSABI_AMDGPU_HSA:
            raise Failure(f"{name} has OS ABI {ident[7]}, not AMDGPU HSA ({ELFOSABI_AMDGPU_HSA})")
        if count and entry_size != 64:
            raise Failure(f"{name} has section headers of {entry_size} bytes, not 64")
        rows = [self.unpack("<IIQQQQIIQQ", offset + 64 * i, f"section header {i}")
                for i in range(count)]
        if count and names >= count:
            raise Failure(f"{name} names section {names} of {count} for the section names")
        self.sections = [
            Section(self.string(rows[names][4], rows[names][5], row[0], f"the name of section {i}"),
                    row[1], row[2], row[3], row[4], row[5], row[6], row[8])
            for i, row in enumerate(rows)]
        self.abi_version = ident[8]
        self.symbols, self.undefined = {}, []
        for kind in SHT_DYNSYM, SHT_SYMTAB:
            for section in self.sections:
                if section.type == kind:
                    self.read_symbols(section)

    @property
    def xnack(self):
        """What e_flags says of it."""
        return ("unsupported", "any", "off", "on")[self.flags >> 8 & 3]

    @property
    def target(self):
        for target in TARGETS.values():
            if self.flags & 0xFF == target.elf_machine:
                return target
        raise Failure(f"{self.name} is for processor 0x{self.flags & 0xFF:x} of e_flags, not for "
                      + " or ".join(f"{t.name} (0x{t.elf_machine:x})" for t in TARGETS.values()))

    def bytes(self, offset, size, what):
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise Failure(f"{self.name} is truncated: {what} is at bytes {offset} to {offset + size} "
                          f"of {len(self.data)}")
        return self.data[offset:offset + size]

    def unpack(self, layout, offset, what):
        return struct.unpack(layout, self.bytes(offset, struct.calcsize(layout), what))

    def string(self, offset, size, index, what):
        table = self.bytes(offset, size, "a string table")
        end = table.find(b"\0", index)
        if index >= size or end < 0:
            raise Failure(f"{self.name}: {what} is outside its string table")
        return table[index:end].decode("utf-8", "replace")

    def read_symbols(self, table):
        if table.link >= len(self.sections):
            raise Failure(f"{self.name}: {table.name} names section {table.link} for its strings")
        strings = self.sections[table.link]
        self.bytes(table.offset, table.size, table.name)
        for at in range(table.offset, table.offset + table.size // 24 * 24, 24):
            name, info, _, section, value, size = self.unpack("<IBBHQQ", at, "a symbol")
            name = self.string(strings.offset, strings.size, name, "the name of a symbol")
            if name and section == SHN_UNDEF:
                self.undefined.append(name)
            elif name:
                self.symbols[name] = Symbol(name, value, size, info >> 4, section)

    def section_of(self, symbol):
        if symbol.section >= len(self.sections):
            raise Failure(f"{self.name}: symbol {symbol.name} is in section {symbol.section}, which is "
                          "not there")
        return self.sections[symbol.section]

    def section_at(self, address):
        """The section loaded at an address, None if there is none."""
        for section in self.sections:
            if section.flags & SHF_ALLOC and section.address <= address < section.address + section.size:
                return section
        return None

    def loaded(self, address, size, what):
        section = self.section_at(address)
        if not section or section.type == SHT_NOBITS or address + size > section.address + section.size:
            raise Failure(f"{self.name}: {what} is at address 0x{address:x}, where the file has no data")
        return self.bytes(section.offset + address - section.address, size, what)

    def notes(self):
        """(owner, type, bytes) of every note."""
        for section in self.sections:
            if section.type != SHT_NOTE:
                continue
            at, end = section.offset, section.offset + section.size
            self.bytes(at, section.size, section.name)
            while at + 12 <= end:
                owner_size, size, kind = self.unpack("<III", at, "a note")
                owner = self.bytes(at + 12, owner_size, "a note's owner").rstrip(b"\0")
                at += 12 + (owner_size + 3) // 4 * 4
                yield owner, kind, self.bytes(at, size, "a note")
                at += (size + 3) // 4 * 4
