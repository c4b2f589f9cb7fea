#!/usr/bin/env python3
"""Which folder of the tree includes which, by the #include lines: none upwards, none in a circle.

    tests/tree/includes.py [TREE]             how many includes there are, and each that is upwards
    tests/tree/includes.py [TREE] --picture   the folders from below upwards, and what each includes
"""
import re
import sys
from collections import Counter
from pathlib import Path

# From below upwards; a folder includes itself and, of the folders of src, those before it.
FOLDERS = ["src/core", "src/problem", "src/masks", "src/driver", "src/cpu", "src/kernels", "src/catalog", "src/runtime",
         "src/plan", "src/api"]
# What else a folder includes. Device code knows nothing of the host; what both share knows neither.
BESIDE = {
    "include": [],
    "kernels/shared": [],
    "kernels/ptx": ["kernels/shared"],
    "kernels/common": ["kernels/shared", "kernels/ptx"],
    **dict.fromkeys(("kernels/decode", "kernels/forward_sm80", "kernels/forward_sm90", "kernels/cache", "kernels/mask",
                     "kernels/merge", "kernels/read", "kernels/backward"), ["kernels/shared", "kernels/ptx", "kernels/common"]),
    # Products and fragments are those of the forward pass.
    "kernels/backward_sm90": ["kernels/shared", "kernels/ptx", "kernels/common", "kernels/backward"],
    "kernels/backward_sm80": ["kernels/shared", "kernels/ptx", "kernels/common", "kernels/backward", "kernels/forward_sm80"],
    # Units, loads and partial results are those of decode.
    "kernels/mla": ["kernels/shared", "kernels/ptx", "kernels/common", "kernels/decode"],
    "kernels/write_stubs.cpp": ["kernels/decode", "kernels/forward_sm80", "kernels/forward_sm90", "kernels/backward_sm80", "kernels/backward_sm90", "kernels/mla"],
    "asm": ["kernels/shared"],
}
# The variants, tiles and parameter structs next to a kernel are there for its host side.
SHARED_FILES = re.compile(r"(_args|tiles|variants?|key_walk|config)\.h$")
# The outermost folders include what they use.
OUTER = ["python", "integrations", "tools", "tests", "examples", "bench"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
SOURCES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"}


def folder_of(path):
    for folder in [*FOLDERS, *BESIDE, *OUTER]:
        if path == folder or path.startswith(folder + "/"):
            return folder
    return None


def accepted(folder):
    if folder in FOLDERS:
        return ["include", "kernels/shared", *FOLDERS[:FOLDERS.index(folder) + 1]]
    if folder in BESIDE:
        return [folder, *BESIDE[folder]]
    return [*FOLDERS, *BESIDE, *OUTER]


def resolve(tree, path, name):
    """The file of the tree that an include means: beside the one that includes it, else from a root."""
    for base in (path.parent, tree / "src", tree / "include", tree, tree / "tools", tree / "tests"):
        found = (base / name).resolve()
        if found.is_file() and tree in found.parents:
            return found
    return None


def includes(tree):
    """(file, line, included file), as paths from the tree."""
    for top in ("include", "src", "kernels", "asm", "python", "integrations", "tools", "tests", "examples", "bench"):
        for path in sorted((tree / top).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            text = path.read_text(errors="replace")
            for match in INCLUDE.finditer(text):
                found = resolve(tree, path, match[1])
                if found:
                    line = text.count("\n", 0, match.start(1)) + 1
                    yield str(path.relative_to(tree)), line, str(found.relative_to(tree))


def circles(edges):
    """The circles of a graph {node: successors}, each from its first node in order."""
    found, done = [], set()

    def walk(node, trail):
        if node in trail:
            circle = trail[trail.index(node):]
            if node == min(circle):
                found.append(circle + [node])
            return
        if node in done:
            return
        for successor in sorted(edges.get(node, ())):
            walk(successor, trail + [node])
        done.add(node)

    for node in sorted(edges):
        walk(node, [])
    return found


def main(arguments):
    picture = "--picture" in arguments
    trees = [a for a in arguments if a != "--picture"]
    tree = Path(trees[0] if trees else Path(__file__).parents[2]).resolve()
    count, wrong, files, folders = 0, [], {}, Counter()
    for path, line, included in includes(tree):
        count += 1
        files.setdefault(path, set()).add(included)
        folder, other = folder_of(path), folder_of(included)
        if folder != other:
            folders[folder, other] += 1
        for_host = folder in FOLDERS and folder == "src/kernels" and SHARED_FILES.search(included)
        if other not in accepted(folder) and not for_host:
            wrong.append(f"{path}:{line}: {folder} includes {other} ({included}); accepted: {', '.join(accepted(folder))}")
    edges = {}
    for folder, other in folders:
        edges.setdefault(folder, set()).add(other)
    inner = {r: {o for o in s if o not in OUTER} for r, s in edges.items() if r not in OUTER}
    wrong += ["folders in a circle: " + " -> ".join(circle) for circle in circles(inner)]
    wrong += ["files in a circle: " + " -> ".join(circle) for circle in circles(files)]
    if picture:
        for folder in [*BESIDE, *FOLDERS]:
            below = [f"{other.removeprefix('src/')} {n}" for (from_, other), n in sorted(folders.items()) if from_ == folder]
            print(f"{folder:16} -> {', '.join(below) or '-'}")
    print("\n".join(wrong) if wrong else f"{count} includes, 0 of them upwards, no circle")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
