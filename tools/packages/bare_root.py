"""Each released file installed where there is neither compiler nor CUDA nor network, and used: README's Python example, the
package's tests, a C program."""
import importlib.util
import re
import time

from .common import DIST, SOURCE, fresh, run, say

ROOT = DIST / "root"
SECONDS = 10  # from `pip install` to the example's result


def check(archives, wheels):
    say("a bare root of Debian")
    if not (ROOT / "usr/bin/python3").exists():
        run("mmdebstrap", "--variant=minbase", "--include=python3-venv", codename(), fresh(ROOT))
    for tool in "cc gcc c++ nvcc ld".split():
        inside(f"! command -v {tool}")
    library(*archives)
    for python, wheel in wheels:
        package(python, wheel)


def codename():
    return re.search(r"^VERSION_CODENAME=(.*)$", open("/etc/os-release").read(), re.M).group(1)


def inside(command):
    """A shell's command in the root, without a network."""
    return run("unshare", "--net", "chroot", ROOT, "/bin/sh", "-ec", command,
               env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"})


def library(tar, deb):
    """A C program that is compiled here, against the unpacked archive, runs there."""
    prefix = fresh(DIST / "unpacked")
    run("tar", "-x", "-f", tar, "-C", prefix, "--strip-components=1")
    program = ROOT / "root" / "program"
    run("cc", "-std=c99", SOURCE / "tests/consumers/c/main.c", "-o", program, f"-I{prefix}/include", f"-L{prefix}/lib", "-lattn", "-lm")
    run("rm", "-rf", ROOT / "opt/libattn")
    run("cp", "-a", prefix, ROOT / "opt/libattn")
    inside("LD_LIBRARY_PATH=/opt/libattn/lib /root/program")
    say(f"{tar.name}: unpacked, a C program runs")
    run("cp", deb, ROOT / "root/libattn.deb")
    inside("dpkg -i /root/libattn.deb && /root/program; dpkg -r libattn")
    say(f"{deb.name}: installed, a C program runs")


def package(python, wheel):
    base, version, tag = run(python, "-c", "import sys; print(sys.base_prefix, sys.version.split()[0], "
                             "'%d%d' % sys.version_info[:2])").split()
    index = fresh(DIST / "index")
    run(python, "-m", "pip", "download", "-q", "--only-binary=:all:", "--no-deps", "-d", index, "numpy", "ml_dtypes")
    run("cp", wheel, index)
    run("rm", "-rf", ROOT / "root/index")
    run("cp", "-r", index, ROOT / "root/index")
    interpreter = "/usr/bin/python3"
    if inside(f"{interpreter} -c 'import sys; print(sys.version_info[:2])'").strip() != str((int(tag[0]), int(tag[1:]))):
        interpreter = f"{base}/bin/python{tag[0]}.{tag[1:]}"
        (ROOT / base[1:]).mkdir(parents=True, exist_ok=True)
        run("sh", "-c", f"tar -c -C {base} --exclude=test --exclude=__pycache__ bin lib | tar -x -C {ROOT / base[1:]}")
    (ROOT / "root/example.py").write_text(readme_example())
    run("rm", "-rf", ROOT / "root/source")
    (ROOT / "root/source").mkdir()
    run("cp", "-r", *(SOURCE / folder for folder in ("tests", "docs", "examples", "README.md")), ROOT / "root/source")
    inside(f"rm -rf /root/venv && {interpreter} -m venv /root/venv")
    begin = time.monotonic()
    inside("cd /root && venv/bin/pip install -q --no-index --find-links index libattn && venv/bin/python example.py")
    seconds = time.monotonic() - begin
    kernels = inside("cd /root && venv/bin/python -c 'import attn, collections as c; "
                     'print(*(f"{n} {b}" for b, n in c.Counter(k["backend"] for k in attn.info()["kernels"]).items()), sep=", ")\'').strip()
    say(f"{wheel.name}: Python {version}, README's example {seconds:.1f} s after `pip install` began; kernels: {kernels}")
    if seconds > SECONDS:
        raise SystemExit(f"release: failed: that took more than {SECONDS} s")
    tests = inside("cd /root/source/tests/python && /root/venv/bin/python -m unittest discover 2>&1")
    say(f"{wheel.name}: tests/python: {' '.join(tests.splitlines()[-3:])}")


def readme_example():
    """As tests/docs runs it, with its inputs before it and what must come out after it."""
    spec = importlib.util.spec_from_file_location("examples", SOURCE / "tests/docs/examples.py")
    examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(examples)
    code = re.search(r"^```python\n(.*?)^```", (SOURCE / "README.md").read_text(), re.M | re.S).group(1)
    before, after = examples.EXAMPLES["README.md"][0]
    return f"{before}\n{code}\n{after}\n"
