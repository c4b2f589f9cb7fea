"""Inputs that fuzz_codeobject begins with: python3 seed_codeobject.py FOLDER OBJECT... makes of each code
object that is not too large one input that is the file and one that is its code."""
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from amdhsa.elf import Elf

LARGEST = 16384
# The first byte of an input says what the others are.
FILE, CODE = b"\x00", b"\x02"

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for path in map(Path, sys.argv[2:]):
    data = path.read_bytes()
    if len(data) > LARGEST:
        continue
    elf = Elf(data, str(path))
    text = next(section for section in elf.sections if section.name == ".text")
    (folder / f"{path.stem}.file").write_bytes(FILE + data)
    (folder / f"{path.stem}.code").write_bytes(CODE + elf.bytes(text.offset, text.size, ".text"))
