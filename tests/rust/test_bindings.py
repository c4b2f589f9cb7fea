"""rust/attn-sys against include/attn/attn.h: every constant, struct, field, function and argument, with their types and order."""
import os
import pathlib
import re
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include/attn/attn.h").read_text()
RUST = (ROOT / "rust/attn-sys/src/lib.rs").read_text()

OF_C = {"size_t": "usize", "int32_t": "i32", "int64_t": "i64", "uint32_t": "u32", "uint64_t": "u64", "uint8_t": "u8", "float": "f32",
        "double": "f64", "char": "c_char", "void": "c_void"}
UNSIGNED = ("attn_flag", "attn_gradient")  # enums of bits, which fields of uint32_t hold


def rust_type(c):
    """A type of C in Rust's words."""
    words = re.findall(r"\w+|\*", c)
    constant = "const" in words[:words.index("*")] if "*" in words else False
    base = next(word for word in words if word not in ("const", "*"))
    made = OF_C.get(base, base)
    for i, word in enumerate(words):
        if word == "*":
            made = f"*{'const' if constant else 'mut'} {made}"
            constant = words[i + 1:i + 2] == ["const"]
    return made


def declarators(text):
    """(name, type in Rust's words) of one declaration of C."""
    function = re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", text)
    if function:
        result, name, arguments = function.groups()
        given = ", ".join(f"{inner}: {kind}" for argument in arguments.split(", ") for inner, kind in declarators(argument))
        returned = "" if result == "void" else f" -> {rust_type(result)}"
        return [(name, f'Option<unsafe extern "C" fn({given}){returned}>')]
    first, *others = text.split(",")
    kind, name = re.fullmatch(r"(.*?)(\w+(?:\[\d+\])?)", first.strip()).groups()
    made = []
    for name in (name, *(other.strip() for other in others)):
        bare, count = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name).groups()
        made.append((bare, f"[{rust_type(kind)}; {count}]" if count else rust_type(kind)))
    return made


def plain(name):
    return "type_" if name == "type" else name  # a word of Rust's own


def of_header(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M).replace("ATTN_ENUM", "")
    constants, structs, functions = {}, {}, {}
    for kind, body in re.findall(r"enum\s+(\w+)\s*\{(.*?)\}", text, flags=re.S):
        for item in filter(None, map(str.strip, body.split(","))):
            name, value = re.fullmatch(r"(\w+)\s*=\s*([\d<\s]+)", item).groups()
            constants[name] = (kind, eval(value))
    for name in re.findall(r"typedef\s+struct\s+(\w+)\s+\1\s*;", text):
        structs[name] = []
    for name, body in re.findall(r"typedef\s+struct\s+(\w+)\s*\{(.*?)\}\s*\1\s*;", text, flags=re.S):
        fields = filter(None, (" ".join(line.split()) for line in body.split(";")))
        structs[name] = [(plain(n), kind) for field in fields for n, kind in declarators(field)]
    for result, name, arguments in re.findall(r"ATTN_API\s+([\w*\s]*?)\s*\b(\w+)\(([^;]*?)\)\s*;", text, flags=re.S):
        given = [] if arguments.strip() == "void" else [declarators(a.strip())[0] for a in " ".join(arguments.split()).split(",")]
        functions[name] = ([(plain(n), kind) for n, kind in given], None if result.strip() == "void" else rust_type(result))
    return constants, structs, functions


def of_rust(text):
    text = re.sub(r"//.*", "", text)
    types = dict(re.findall(r"pub type (\w+) = (\w+);", text))
    constants = {name: (kind, eval(value)) for name, kind, value in re.findall(r"pub const (\w+): (\w+) = ([\d<\s]+);", text)
                 if types.get(kind) == ("u32" if kind in UNSIGNED else "c_int")}
    structs = {}
    for name, body in re.findall(r"#\[repr\(C\)\]\s*(?:#\[[^\]]*\]\s*)*pub struct (\w+) \{(.*?)\n\}", text, flags=re.S):
        structs[name] = re.findall(r"pub (\w+): (.*),\n", body + "\n")
    functions = {}
    for name, arguments, result in re.findall(r"pub fn (\w+)\(([^;]*?)\)\s*(?:->\s*([^;]+?))?;", text, flags=re.S):
        given = [tuple(part.strip() for part in a.split(":")) for a in filter(str.strip, arguments.split(","))]
        functions[name] = (given, result or None)
    return constants, structs, functions


class Bindings(unittest.TestCase):
    def test_same(self):
        header, rust = of_header(HEADER), of_rust(RUST)
        self.assertGreater(min(map(len, header)), 15)
        for what, in_header, in_rust in zip(("constant", "struct", "function"), header, rust):
            self.assertEqual(sorted(in_header), sorted(in_rust))
            for name in in_header:
                self.assertEqual(in_rust[name], in_header[name], f"{what} {name}")

    def test_functions_of_the_program(self):
        """Types of functions that the library calls."""
        declared = re.findall(r"typedef (\w+ \(\*\w+\)\(.*?\));", HEADER)
        self.assertTrue(declared)
        for text in declared:
            (name, kind), = declarators(text)
            self.assertIn(f"pub type {name} = {kind};", RUST)

    def test_version(self):
        """The crate and the distribution libattn-flash-attn have libattn's version."""
        version = re.search(r"project\(libattn VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
        for file in "rust/attn-sys/Cargo.toml", "python/libattn-flash-attn/pyproject.toml":
            self.assertIn(f'\nversion = "{version}"\n', (ROOT / file).read_text(), file)

    def test_versioned(self):
        """Every struct that begins with struct_size has new()."""
        begin = RUST.index("versioned!(\n")
        listed = re.findall(r"\b(attn_\w+)", RUST[begin:RUST.index(");", begin)])
        sized = [name for name, fields in of_header(HEADER)[1].items() if fields[:1] == [("struct_size", "usize")]]
        self.assertEqual(sorted(listed), sorted(sized))

    def test_a_missing_line_is_found(self):
        header = of_header(HEADER)
        lines = RUST.split("\n")
        items = [i for i, line in enumerate(lines) if re.match(r"\s+pub \w+: |pub const ATTN|pub type attn|\s+pub fn attn", line)]
        self.assertGreater(len(items), 300)
        for i in items[::9]:
            self.assertNotEqual(of_rust("\n".join(lines[:i] + lines[i + 1:])), header, lines[i])


class Runs(unittest.TestCase):
    def test_cargo(self):
        """The crate's own tests, on the library in ATTN_LIB_DIR."""
        folder = os.environ.get("ATTN_LIB_DIR")
        if not folder or not shutil.which("cargo"):
            self.skipTest("ATTN_LIB_DIR is not set" if not folder else "cargo is not installed")
        paths = ":".join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
        ran = subprocess.run(["cargo", "test", "--offline", "--quiet"], cwd=ROOT / "rust/attn-sys", text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env={**os.environ, "LD_LIBRARY_PATH": paths})
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertIn("2 passed", ran.stdout)


if __name__ == "__main__":
    unittest.main()
