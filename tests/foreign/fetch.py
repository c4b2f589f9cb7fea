"""Fetches what tests/foreign runs, all of it from PyPI: fetch.py [FOLDER], by default build/foreign. Two clangs
for the OpenCL sources of tests/gfx9/kernels (of the packages ziglang), Triton's compiler for
triton_kernels.py, AITER's code objects. 700 MB; what is there already is kept."""
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "gfx9" / "kernels"
CLANGS = {"clang21": "ziglang==0.16.0", "clang22": "ziglang==0.17.1"}
TRITON = ["triton==3.9.0", "numpy"]
AITER = "amd-aiter==0.1.7.post2.dev18"
LLVM_19 = Path("/usr/lib/llvm-19")
FLAGS = ["-x", "cl", "-cl-std=CL2.0", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib",
         "-ffp-contract=off", "-gline-tables-only", "-cl-fp32-correctly-rounded-divide-sqrt", "-w"]


def run(*command, **options):
    subprocess.run([str(part) for part in command], check=True, **options)


def environment(folder, packages):
    """The Python of an environment with these packages."""
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True)
        run(python, "-m", "pip", "install", "--quiet", *packages)
        (folder / "done").touch()
    return python


def compile_kernels(folder):
    """KERNEL.COMPILER.LEVEL.co for each; the header of OpenCL's types is that of clang 19."""
    out, include = folder / "compiled", folder / "include"
    out.mkdir(exist_ok=True)
    include.mkdir(exist_ok=True)
    header = next(LLVM_19.glob("lib/clang/*/include/opencl-c-base.h"))
    (include / header.name).write_bytes(header.read_bytes())
    compilers = {"clang19": ([LLVM_19 / "bin" / "clang"], [LLVM_19 / "bin" / "ld.lld"])}
    for name, package in CLANGS.items():
        python = environment(folder / name, [package])
        compilers[name] = [python, "-m", "ziglang", "clang"], [python, "-m", "ziglang", "ld.lld"]
    for source in sorted(KERNELS.glob("*.cl")):
        for name, (clang, linker) in compilers.items():
            for level in ("O0", "O1", "O2", "O3"):
                made = out / f"{source.stem}.{name}.{level}.co"
                if made.exists():
                    continue
                compiled = made.with_suffix(".o")
                run(*clang, *FLAGS, f"-I{include}", f"-{level}", "-c", source, "-o", compiled)
                run(*linker, "-shared", compiled, "-o", made)
                compiled.unlink()


def compile_triton(folder):
    if (folder / "triton" / "done").exists():
        return
    python = environment(folder / "triton-env", TRITON)
    run(python, HERE / "triton_kernels.py", folder / "triton",
        env={**os.environ, "TRITON_CACHE_DIR": str(folder / "triton-cache"), "TRITON_DEFAULT_FP_FUSION": "1"})
    (folder / "triton" / "done").touch()


def unpack_aiter(folder):
    if (folder / "aiter").exists():
        return
    run(sys.executable, "-m", "pip", "download", "--quiet", "--pre", "--no-deps", "-d", folder, AITER)
    wheel, = folder.glob("amd_aiter-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/hsa/gfx942/" in name and name.endswith(".co"):
                path = folder / "aiter" / name.split("/hsa/gfx942/")[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
    wheel.unlink()


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "build" / "foreign"
    folder.mkdir(parents=True, exist_ok=True)
    for part in (compile_kernels, compile_triton, unpack_aiter):
        part(folder)


if __name__ == "__main__":
    main()
