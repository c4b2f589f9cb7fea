"""The C library's binary interface against an earlier one, by libabigail."""
import subprocess

from .common import DIST, SOURCE, fresh, run, say

# Structs say their size, so they may grow at their end.
ALLOWED = """[suppress_type]
name_regexp = ^attn_
type_kind = struct
has_data_member_inserted_at = end
"""
INCOMPATIBLE, CHANGED, NO_ANSWER = 8, 4, 3  # bits of abidiff's exit code


def compare(base):
    base = base or subprocess.run(["git", "-C", SOURCE, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True).stdout.strip()
    if not base:
        say("ABI: not compared, no tag yet")
        return
    old, new = DIST / "abi" / "old", SOURCE
    fresh(old)
    run("sh", "-c", f"git -C {SOURCE} archive {base} | tar -x -C {old}")
    before, after = library(old, "before"), library(new, "after")
    allowed = DIST / "abi/allowed"
    allowed.write_text(ALLOWED)
    done = subprocess.run(["abidiff", "--suppr", allowed, "--headers-dir1", old / "include", "--headers-dir2", new / "include", before, after],
                          capture_output=True, text=True)
    print(done.stdout + done.stderr)
    if done.returncode & NO_ANSWER:
        raise SystemExit("release: failed: abidiff gave no answer")
    if not done.returncode & CHANGED:
        say(f"ABI: that of {base}")
    elif not done.returncode & INCOMPATIBLE:
        say(f"ABI: of {base} with additions and changes as printed")
    elif minor_version(old) == minor_version(new):
        raise SystemExit(f"release: failed: programs linked to {base}, of the same minor version, would break")
    else:
        say(f"ABI: incompatible with {base}, whose SONAME differs")


def library(source, name):
    """libattn.so with types to compare, of the host code alone and without versions of symbols, which change with the SONAME."""
    folder = DIST / "abi" / name
    run("cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DATTN_CUDA=OFF", "-DATTN_GFX9=OFF",
        "-DATTN_BUILD_TOOLS=OFF", "-DATTN_BUILD_TESTS=OFF", "-DATTN_PYTHON=OFF")
    run("cmake", "--build", folder, "--target", "attn_static")
    versions = folder / "versions"
    versions.write_text("{global: attn_*; local: *;};\n")
    run("c++", "-shared", "-o", folder / "libattn.so", "-Wl,-soname,libattn.so", f"-Wl,--version-script={versions}", "-Wl,--whole-archive",
        *folder.glob("**/libattn.a"), "-Wl,--no-whole-archive", "-pthread", "-ldl")
    return folder / "libattn.so"


def minor_version(source):
    return [line for line in (source / "include/attn/attn.h").read_text().splitlines() if "ATTN_VERSION_M" in line]
