"""Register counts against a compiler's: python3 tests/amdhsa/test_compiled.py SOURCE_DIR [unittest options].

Each kernel of tests/gfx9/kernels is compiled to assembly by clang, stripped of all directives, and given back
to amdhsa with a declaration; what it then counts in the code must be what the compiler knew.
"""
import re
import shutil
import subprocess
import unittest

from common import SOURCE, Case, granules, llvm_tool, skip

# Later ones compile an OpenCL kernel as a function and a stub that calls it.
CLANG = next(filter(None, map(shutil.which, ("clang-19", "clang-18", "clang-17"))), None)
if not CLANG:
    skip("no clang 17 to 19")
KERNELS = sorted((SOURCE / "tests/gfx9/kernels").glob("*.cl"))
FLAGS = ["-x", "cl", "-cl-std=CL2.0", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib", "-O2",
         "-ffp-contract=off", "-cl-fp32-correctly-rounded-divide-sqrt", "-Werror"]


def clang(*arguments):
    subprocess.run([CLANG, *map(str, arguments)], check=True, capture_output=True)


def strip(assembly):
    """Labels and instructions of the code; nothing that says what they need."""
    lines, code = [], True
    for line in re.sub(r";.*", "", assembly).splitlines():
        words = line.split()
        if not words:
            continue
        if words[0] in (".text", ".section"):
            code = words[0] == ".text" or words[1].startswith(".text")
        if code and (not words[0].startswith(".") or words[0].endswith(":")):
            lines.append(line)
    return "\n".join(lines)


def said(assembly, directive):
    return int(re.search(rf"\.amdhsa_{directive} (\d+)", assembly).group(1))


class Compiled(Case):
    def test_there_are_enough_kernels(self):
        self.assertGreaterEqual(len(KERNELS), 20)

    def test_granules_are_the_compilers(self):
        seen = {"agprs": 0, "scratch": 0, "lds": 0, "vcc": 0, "calls": 0}
        for source in KERNELS:
            name = source.stem
            with self.subTest(kernel=name):
                compiled = self.folder / f"{name}.compiled.s"
                clang(*FLAGS, "-S", source, "-o", compiled)
                text = compiled.read_text()
                lds, scratch = said(text, "group_segment_fixed_size"), said(text, "private_segment_fixed_size")
                body = strip(text).replace(f"{name}:", f".globl {name}\n.p2align 8\n{name}:")
                self.assertNotIn(".amdhsa", body)
                declaration = (f"//# kernel {name} workgroup=128 workgroup_id=x lds={lds} "
                               f"scratch={scratch}\n//# ptr out\n//# ptr in\n//# i32 n\n")
                ours = self.generate(declaration + body, name=name)

                theirs = self.folder / f"{name}.theirs"
                clang(*FLAGS[3:6], "-x", "assembler", "-c", compiled, "-o", f"{theirs}.o")
                llvm_tool("ld.lld", "-shared", f"{theirs}.o", "-o", theirs)
                self.assertEqual(granules(ours, name), granules(theirs, name))
                for path in ours, theirs:
                    checked = self.amdhsa("check", path)
                    self.assertEqual(checked.stdout, f"kernel {name}: ok\n")
                agprs = re.search(r"\.agpr_count: +(\d+)", text).group(1)
                self.assertRegex(llvm_tool("llvm-readelf", "-n", ours), rf"\.agpr_count: +{agprs}\n")
                seen["agprs"] += agprs != "0"
                seen["scratch"] += scratch > 0
                seen["lds"] += lds > 0
                seen["vcc"] += said(text, "reserve_vcc")
                seen["calls"] += "s_swappc_b64" in text
        for what, count in seen.items():
            self.assertGreater(count, 0, f"no kernel has {what}")


if __name__ == "__main__":
    unittest.main()
