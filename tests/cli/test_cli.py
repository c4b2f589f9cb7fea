"""Tests of the attn command line: python3 tests/cli/test_cli.py ATTN SOURCE_DIR [unittest options].

Needs Python's standard library only.
"""
import ctypes
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import unittest
import zlib
from pathlib import Path

from program import ProgramTest

ATTN = sys.argv[1]
SOURCE = Path(sys.argv[2])
MOCKS = Path(ATTN).resolve().parent.parent / "mock"
GOLDEN = SOURCE / "tests" / "golden"
EXAMPLE = SOURCE / "examples" / "minilm_layer3.safetensors"
EXPECTED = SOURCE / "examples" / "minilm_layer3.expected.safetensors"

FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I32": "i", "I64": "q", "U64": "Q", "U8": "B", "I8": "b", "BF16": "H",
           "BOOL": "?"}


def pack(dtype, shape, values):
    """A tensor from numbers; one number fills it."""
    count = math.prod(shape)
    if not hasattr(values, "__len__"):
        values = [values] * count
    return dtype, list(shape), struct.pack(f"<{count}{FORMATS[dtype]}", *values)


def unpack(tensor):
    dtype, shape, data = tensor
    return struct.unpack(f"<{math.prod(shape)}{FORMATS[dtype]}", data)


def save(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, chunk) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def load(path):
    data = Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = entry["dtype"], entry["shape"], data[begin:end]
    return tensors, metadata


def noise(shape, seed=1):
    rng = random.Random(seed)
    return pack("F32", shape, [rng.uniform(-1, 1) for _ in range(math.prod(shape))])


def small(b=2, sq=5, skv=7, hq=4, hkv=2, d=8):
    return {"q": noise([b, sq, hq, d], 1), "k": noise([b, skv, hkv, d], 2), "v": noise([b, skv, hkv, d], 3)}


class CliTest(ProgramTest):
    program = ATTN
    attn = ProgramTest.run_program


class Usage(CliTest):
    def test_example_in_16_bits(self):
        half, out = self.path("half"), self.path("out")
        info = self.json("info")
        here = [b["name"] for b in info["backends"] if b["available"]]
        built = {k["backend"] for k in info["kernels"] if k["op"] == "forward" and k["in_build"]}
        backends = [name for name in ("cpu", "cuda", "hip", "hip-emu") if name in here and name.split("-")[0] in built]
        for kind, bound in ("f16", "4e-3"), ("bf16", "2e-2"):
            subprocess.run([sys.executable, SOURCE / "examples" / "to_16_bits.py", EXAMPLE, half, kind], check=True)
            self.assertEqual({tensor[0] for tensor in load(half)[0].values()}, {kind.upper()})
            for backend in backends:
                self.attn("run", half, out, "--backend", backend, "--out-dtype", "f32")
                for tensor in ("out", "lse"):
                    self.attn("diff", out, EXPECTED, "--tensor", tensor, "--max-abs", bound)

    def test_bad_usage(self):
        example, out = str(EXAMPLE), self.path("out")
        for args, says in [
            ([], "a subcommand is missing; accepted: info run merge"),
            (["fly"], '"fly" is not one of info run merge quantize append diff mask bench'),
            (["--fly"], "subcommand"),
            (["run"], "IN"),
            (["run", example], "OUT"),
            (["run", example, out, "third"], "third"),
            (["run", example, out, "--backend", "tpu"], "tpu"),
            (["run", example, out, "--window", "3"], '--window "3"'),
            (["run", example, out, "--window", "3,-2"], "-1 (unbounded)"),
            (["run", example, out, "--window", "a,b"], '"a,b"'),
            (["run", example, out, "--causal", "--causal-top-left"], "--causal"),
            (["run", example, out, "--scale", "0"], "--scale"),
            (["run", example, out, "--scale", "nan"], "--scale is nan"),
            (["run", example, out, "--scale", "inf"], "--scale is inf"),
            (["run", example, out, "--scale", "1e99"], "--scale"),
            (["run", example, out, "--scale", "1e-99"], "--scale"),
            (["run", example, out, "--scale", "x"], "--scale"),
            (["run", example, out, "--softcap", "-1"], "softcap"),
            (["run", example, out, "--softcap", "inf"], "softcap"),
            (["run", example, out, "--softcap", "nan"], "softcap"),
            (["run", example, out, "--window", "nan,1"], '"nan,1"'),
            (["run", example, out, "--window", "1,inf"], '"1,inf"'),
            (["run", example, out, "--out-dtype", "f7"], '"f7" is not one of f32'),
            (["run", example, out, "--out-dtype", "q8_0"], "out_type is q8_0"),
            (["run", example, out, "--fixed-split", "-1"], "fixed_split"),
            (["run", example, out, "--threads", "-1"], "cpu_threads"),
            (["run", example, out, "--device", "-1"], "device"),
            (["run", example, out, "--device", "5", "--backend", "cpu"], "device is 5; accepted with cpu: 0"),
            (["run", example, out, "--device", "5", "--backend", "reference"], "device is 5"),
            (["quantize", example, out, "--to", "q8_0", "--device", "1", "--backend", "cpu"], "device is 1"),
            (["bench", "--device", "1", "--backend", "cpu", "--seqlen-q", "1"], "device is 1"),
            (["quantize", example, out], "--to"),
            (["quantize", example, out, "--to", "f16"], "f16"),
            (["quantize", example, out, "--to", "f8_e5m2", "--scale", "0"], '--scale "0"'),
            (["quantize", example, out, "--to", "f8_e5m2", "--scale", "big"], '--scale "big"'),
            (["quantize", example, out, "--to", "f8_e5m2", "--scale", "nan"], '--scale "nan"'),
            (["quantize", example, out, "--to", "f8_e5m2", "--scale", "inf"], '--scale "inf"'),
            (["quantize", example, out, "--to", "f8_e5m2", "--per", "row"], "row"),
            (["quantize", example, out, "--to", "q8_0", "--scale", "amax"], "scale is"),
            (["quantize", example, out, "--to", "q8_0", "--q"], "--q with --to q8_0"),
            (["append", example, out], '"seqlens_kv" is missing'),
            (["append", GOLDEN / "segments_causal.safetensors", out], "segments; 1 is accepted"),
            (["append", GOLDEN / "seqlens.safetensors", out], '"k_new" is missing'),
            (["append", GOLDEN / "seqlens.safetensors"], "OUT"),
            (["diff", example], "B"),
            (["diff", example, example, "--max-abs", "-1"], "--max-abs"),
            (["diff", example, example, "--max-abs", "nan"], "--max-abs"),
            (["diff", example, example, "--rel-fro", "nan"], "--rel-fro"),
            (["diff", example, example, "--tensor", "bias"], '"bias" is missing'),
            (["diff", example, str(EXPECTED)], "no tensor of the same name"),
            (["merge", example, out], '"out.0" is missing'),
            (["mask", example], '"block_kinds" is missing'),
            (["bench", "--batch", "0"], "--batch"),
            (["bench", "--heads", "3", "--heads-kv", "2", "--seqlen-q", "1"], "heads_q is 3"),
            (["bench", "--repeats", "0"], "--repeats"),
        ]:
            with self.subTest(args=args):
                self.attn(*args, code=2, says=says)
        self.assertFalse(os.path.exists(out))

    def test_json_errors(self):
        out = self.path("out")
        for args, code, status, says in [
            (["run", EXAMPLE, "--json"], 2, "invalid argument", "OUT"),
            (["fly", "--json"], 2, "invalid argument", '"fly" is not one of'),
            (["run", EXAMPLE, out, "--json", "--fly"], 2, "invalid argument", "--fly"),
            (["run", EXAMPLE, out, "--json", "--scale", "nan"], 2, "invalid argument", "--scale"),
            (["run", EXAMPLE, out, "--json", "--softcap", "-1"], 2, "invalid argument", "softcap is -1"),
            (["run", EXAMPLE, out, "--json", "--backend", "cpu", "--out-dtype", "f64"], 4, "unsupported here", "f64"),
            (["run", EXAMPLE, out, "--json", "--backend", "cuda", "--driver", "/absent"], 3, "driver missing", "/absent"),
            (["run", "/absent", out, "--json"], 2, "invalid argument", "/absent"),
            (["merge", EXAMPLE, out, "--json"], 2, "invalid argument", '"out.0" is missing'),
            (["quantize", EXAMPLE, "/no/out", "--json", "--to", "q8_0"], 2, "invalid argument", "/no/out"),
            (["mask", EXAMPLE, "--json"], 2, "invalid argument", '"block_kinds" is missing'),
            (["mask", GOLDEN / "blocks.safetensors", "--json", "--show", "/no/out.png"], 2, "invalid argument", "/no/out.png"),
            (["diff", EXAMPLE, EXPECTED, "--json"], 2, "invalid argument", "no tensor of the same name"),
            (["bench", "--json", "--repeats", "0"], 2, "invalid argument", "--repeats"),
            (["info", "--json", "more"], 2, "invalid argument", "more"),
        ]:
            with self.subTest(args=args):
                self.assertEqual(self.json_error(*args, code=code, says=says), status)

    def test_help_names_the_tensors(self):
        """Those that some golden file has, so that none is forgotten; and no others."""
        def named(command):
            text = self.attn(command, "--help").split("IN holds", 1)[1]
            words = re.findall(r"^  ((?:[a-z_0-9.]+, )*[a-z_0-9.]+)(?: |$)", text, re.M)
            return {name for word in words for name in word.split(", ")}
        held, parts = set(), set()
        for path in GOLDEN.glob("*.safetensors"):
            for name in load(path)[0]:
                base = name.split(".")[0]
                if name != base and base in ("out", "lse"):
                    parts.add(base + ".0")
                elif base not in ("out", "lse", "golden"):
                    held.add(base)
        held.add("out_scale")  # of fp8 results, of which no file is golden
        mask = {name for name in held if name.startswith("block_") and name != "block_table"}
        latent = {"head_dim_v", "lists", "no_positions"}  # test_latent_and_lists has files of these
        self.assertEqual(named("run"), held - mask | latent | {"block_kinds"})
        self.assertEqual(named("quantize"), named("run"))
        self.assertEqual(named("mask"), mask | {"q", "k", "v"})
        self.assertEqual(named("merge"), parts)

    def test_help(self):
        for command in ([], ["info"], ["run"], ["merge"], ["quantize"], ["diff"], ["mask"], ["bench"]):
            self.assertIn("Usage: attn", self.attn(*command, "--help"))
        self.assertRegex(self.attn("--version"), r"^\d+\.\d+\.\d+\n$")

    def test_info(self):
        info = self.json("info")
        backends = {backend["name"]: backend for backend in info["backends"]}
        self.assertEqual(list(backends), ["reference", "cpu", "cuda", "hip", "hip-emu"])
        self.assertEqual([name for name in backends if backends[name].get("emulated")], ["hip-emu"])
        if backends["hip-emu"]["available"]:
            self.attn("info", says="hip-emu    available, emulated: no hardware")
        for backend in backends.values():
            self.assertNotEqual(backend["available"], bool(backend["reason"]), backend)
        self.assertTrue(backends["cpu"]["available"])
        self.assertIn("reference", {kernel["name"] for kernel in info["kernels"]})
        self.attn("info", says="reference")

    def test_backend_that_is_not_here(self):
        for backend in self.json("info")["backends"]:
            if not backend["available"]:
                for command in (["run", EXAMPLE, self.path("out")], ["bench"],
                                ["quantize", EXAMPLE, self.path("out"), "--to", "q8_0"]):
                    self.attn(*command, "--backend", backend["name"], code=3, says=backend["reason"])
        self.assertFalse(os.path.exists(self.path("out")))

    def stand_ins(self, **environment):
        """Libraries under the drivers' names, in front of the real ones, as `environment` scripts them."""
        folder = self.dir / "drivers"
        folder.mkdir(exist_ok=True)
        for name, stand_in in ("libcuda.so.1", "cuda.so"), ("libamdhip64.so.7", "hip.so"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(MOCKS / stand_in)
        for name, value in {"LD_LIBRARY_PATH": str(folder), **environment}.items():
            before = os.environ.get(name)
            os.environ[name] = value
            self.addCleanup(*((os.environ.pop, name, None) if before is None else (os.environ.__setitem__, name, before)))

    def test_compute_units(self):
        """Of partitions of MI300X and of MI300A and MI308X: info names them, and decode shares its work among them."""
        info = self.json("info")
        emulated = not next(b["reason"] for b in info["backends"] if b["name"] == "hip-emu")
        in_build = next(k["in_build"] for k in info["kernels"] if k["name"] == "decode_gfx942_f16_d64")
        random.seed(4)
        source = save(self.path("step"), {name: pack("F16", shape, [random.gauss(0, 1) for _ in range(math.prod(shape))])
                                          for name, shape in (("q", [3, 1, 4, 64]), ("k", [3, 333, 2, 64]), ("v", [3, 333, 2, 64]))})
        self.attn("run", source, self.path("want"), "--backend", "reference")
        many = save(self.path("many"), {name: pack("F16", shape, [random.gauss(0, 1) for _ in range(math.prod(shape))])
                                        for name, shape in (("q", [1, 300, 2, 64]), ("k", [1, 70, 1, 64]), ("v", [1, 70, 1, 64]))})
        self.attn("run", many, self.path("want of many"), "--backend", "reference")
        self.stand_ins(MOCK_GCN_ARCH="gfx950", MOCK_COMPUTE_UNITS="256")
        [devices] = [b["devices"] for b in self.json("info")["backends"] if b["name"] == "hip"]
        self.assertEqual({(device["arch"], device["multiprocessors"]) for device in devices}, {("gfx950", 256)})
        os.environ.pop("MOCK_GCN_ARCH")
        for units in "38", "80", "228":
            self.stand_ins(MOCK_COMPUTE_UNITS=units, ATTN_EMU_COMPUTE_UNITS=units)
            info = self.json("info")
            for name in ("hip", "hip-emu") if emulated else ("hip",):
                [devices] = [b["devices"] for b in info["backends"] if b["name"] == name]
                self.assertEqual({device["multiprocessors"] for device in devices}, {int(units)}, name)
            if emulated and in_build:
                self.attn("run", source, self.path("got"), "--backend", "hip-emu", says="decode_gfx942_f16_d64 on hip-emu (emulated)")
                self.attn("diff", self.path("want"), self.path("got"), "--max-abs", 2e-3)
                self.attn("run", many, self.path("got"), "--backend", "hip-emu", says="fwd_gfx942_f16_d64 on hip-emu (emulated)")
                self.attn("diff", self.path("want of many"), self.path("got"), "--max-abs", 2e-3)

    def test_auto_takes_a_device_with_code(self):
        built = {arch for kernel in self.json("info")["kernels"] if kernel["op"] == "forward" for arch in kernel["arch"]}
        amd, nvidia = "gfx942" in built, "sm_80" in built
        for capabilities, archs, taken in (("75", "gfx1103", ("cpu", 0)), ("75", "gfx951", ("cpu", 0)),
                                           ("75", "gfx950", ("hip", 0) if "gfx950" in built else ("cpu", 0)),
                                           ("75", "gfx942", ("hip", 0) if amd else ("cpu", 0)),
                                           ("75", "gfx1103,gfx942", ("hip", 1) if amd else ("cpu", 0)),
                                           ("75,90", "gfx942", ("cuda", 1) if nvidia else ("hip", 0) if amd else ("cpu", 0))):
            with self.subTest(cuda=capabilities, hip=archs):
                self.stand_ins(MOCK_COMPUTE_CAPABILITY=capabilities, MOCK_GCN_ARCH=archs)
                info = self.json("info")
                self.assertEqual((info["auto"]["backend"], info["auto"]["device"]), taken)
                backends = {backend["name"]: backend for backend in info["backends"]}
                kernels = {kernel["name"]: kernel for kernel in info["kernels"]}
                for name, expected in ("cuda", capabilities), ("hip", archs):
                    devices = backends[name]["devices"]
                    wanted = [name == "cuda" and f"sm_{arch}" or arch for arch in expected.split(",")]
                    self.assertEqual([d["arch"] for d in devices], (wanted * 2)[:2] if len(wanted) == 1 else wanted)
                    for device in devices:
                        # None of a device's kernels is another's; auto passes by those that have none.
                        self.assertTrue(all(kernels[k]["backend"] == name and kernels[k]["in_build"] for k in device["kernels"]))
                        self.assertEqual(bool(device["passed_by"]), not device["kernels"], device)
                        if device["passed_by"]:
                            self.assertIn(f"{device['arch']}; accepted" if (amd if name == "hip" else nvidia) else "made without",
                                          device["passed_by"])
                            self.attn("info", says=f"passed by: {device['passed_by']}")
                place = taken[0] if taken[0] == "cpu" else f"{taken[0]}, device {taken[1]}"
                self.attn("info", says=f"auto       {place}\n")
                if taken[0] == "cpu":
                    # Runs there, where it did not before.
                    self.assertEqual(self.json("run", EXAMPLE, self.path("out"))["backend"], "cpu")
                    self.attn("diff", self.path("out"), EXPECTED, "--max-abs", "1e-5")
                    self.attn("run", EXAMPLE, self.path("out"), "--device", 0, says="on cpu")
                    self.attn("run", EXAMPLE, self.path("out"), "--device", 1, code=2, says="accepted with auto here: cpu 0")
        if not (amd and nvidia):
            print("SKIP: this build lacks CUDA or gfx9 kernels, so auto takes no device of theirs")

    def test_named_backend_without_code(self):
        self.stand_ins(MOCK_COMPUTE_CAPABILITY="75", MOCK_GCN_ARCH="gfx1103")
        for backend, arch in ("cuda", "sm_75"), ("hip", "gfx1103"):
            built = any(k["in_build"] for k in self.json("info")["kernels"] if k["backend"] == backend)
            says = f"has code for {arch}; accepted: " if built else f"this build has no {backend} kernels"
            for command in (["run", EXAMPLE, self.path("out")], ["bench", "--heads", 2, "--seqlen-q", 64, "--head-dim", 64, "--no-ceilings"],
                            ["quantize", EXAMPLE, self.path("out"), "--to", "f8_e4m3fn"]):
                arguments = *command, "--backend", backend
                self.attn(*arguments, code=4, says=says)
                error = subprocess.run([ATTN, *map(str, arguments)], capture_output=True, text=True).stderr
                self.assertLess(len(error), 300, error)
            self.assertEqual(self.json_error("run", EXAMPLE, self.path("out"), "--backend", backend, "--json", code=4, says=says),
                             "unsupported here")

    def test_drivers(self):
        """Exit code 3 where the driver or the device is not there, 2 where the option has no meaning."""
        text = self.path("text.so")
        Path(text).write_text("text")
        none, out = self.path("none.so"), self.path("out")
        for backend, stand_in in ("cuda", "cuda.so"), ("hip", "hip.so"), ("hip-emu", "hip_emulator.so"):
            run = "run", EXAMPLE, out, "--backend", backend, "--driver"
            self.attn(*run, none, code=3, says=f"{backend}: {none}: cannot open shared object file: No such file")
            self.attn(*run, text, code=3, says=text)
            self.attn(*run, self.dir, code=3, says=str(self.dir))
            self.attn(*run, MOCKS / "empty.so", code=3, says="empty.so has no ")
            self.attn(*run, MOCKS / stand_in, "--device", 2, code=3, says="device: 2; this ")
            self.attn(*run, MOCKS / stand_in, "--device", -1, code=2, says="options.device is -1")
        for backend in "auto", "cpu", "reference":
            self.attn("run", EXAMPLE, out, "--backend", backend, "--driver", none, code=2, says="options.driver_path is given")

    def test_where_rocm_is(self):
        """In $ROCM_PATH/lib, and in AMD's Python package beside that of libattn."""
        hip = next(b for b in self.json("info")["backends"] if b["name"] == "hip")
        if hip["available"]:
            self.skipTest("the loader finds a HIP library")
        names = "libamdhip64.so.7, libamdhip64.so.6, libamdhip64.so.5: cannot open shared object file: No such file or directory"
        self.assertIn(f"hip: {names}; nor in ", hip["reason"])
        for part in "/opt/rocm/lib", "_rocm_sdk_core/lib", "LD_LIBRARY_PATH", "driver_path (attn --driver)":
            self.assertIn(part, hip["reason"])
        self.assertLess(len(hip["reason"]), 600)

        rocm = self.dir / "rocm"
        (rocm / "lib").mkdir(parents=True)
        os.environ["ROCM_PATH"] = str(rocm)
        self.addCleanup(os.environ.pop, "ROCM_PATH", None)
        self.attn("info", says=f"$ROCM_PATH/lib ({rocm}/lib), /opt/rocm/lib")
        (rocm / "lib" / "libamdhip64.so.7").write_text("text")
        self.attn("info", says=f"; {rocm}/lib/libamdhip64.so.7: ")
        (rocm / "lib" / "libamdhip64.so.6").symlink_to(MOCKS / "hip.so")
        self.attn("info", says="0: Mock HIP device, gfx942")
        del os.environ["ROCM_PATH"]

        package = self.dir / "site-packages" / "attn"
        package.mkdir(parents=True)
        program = package / "attn"
        shutil.copy(ATTN, program)
        for library in (Path(ATTN).parent.parent / "lib").glob("libattn.so*"):
            shutil.copy(library, package)
        wheel = package.parent / "_rocm_sdk_core" / "lib"
        wheel.mkdir(parents=True)
        os.environ["LD_LIBRARY_PATH"] = str(package)
        self.addCleanup(os.environ.pop, "LD_LIBRARY_PATH", None)
        for there in False, True:
            if there:
                (wheel / "libamdhip64.so.7").symlink_to(MOCKS / "hip.so")
            run = subprocess.run([program, "info"], capture_output=True, text=True)
            self.assertEqual("0: Mock HIP device, gfx942" in run.stdout, there, run.stdout + run.stderr)

    def test_unsupported(self):
        for args in ([], ["--kernel", "cpu_baseline"]):
            self.attn("run", EXAMPLE, self.path("out"), "--backend", "cpu", "--out-dtype", "f64", *args, code=4, says="f64")

    def test_unknown_kernels(self):
        for kernel in ("nothing", "merge_cpu", "reference"):
            self.attn("run", EXAMPLE, self.path("out"), "--backend", "cpu", "--kernel", kernel, code=2, says=kernel)


class Files(CliTest):
    """Bytes that are no good safetensors file: exit code 2 and a sentence from every reader."""

    def refused(self, data, says):
        bad = self.path("bad")
        Path(bad).write_bytes(data)
        for command in (["run", bad, self.path("out")], ["merge", bad, self.path("out")], ["mask", bad],
                        ["quantize", bad, self.path("out"), "--to", "f8_e5m2"], ["diff", bad, bad]):
            self.attn(*command, code=2, says=says)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_bad_bytes(self):
        good = EXAMPLE.read_bytes()

        def file(header, data=b""):
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data

        def entry(dtype, shape, begin, end):
            return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

        for says, data in [
            ("0 bytes", b""),
            ("5 bytes", b"12345"),
            ("header length", good[:8]),
            ("header length", good[:100]),
            ("are not within", good[:-1]),
            ("the tensors use", good + b"x"),
            ("header length", struct.pack("<Q", 1 << 63) + good[8:]),
            ("header length", struct.pack("<Q", 100_000_001) + good[8:]),
            ("not JSON", file(b"{")),
            ("not JSON", file(b"\x00\xff")),
            ("JSON object", file(b"[1]")),
            ("JSON object", file(b"[" * 1_000_000)),
            ('dtype "F12"', file({"q": entry("F12", [1], 0, 1)}, b"0")),
            ("span 4 bytes", file({"q": entry("F32", [2], 0, 4)}, b"0000")),
            ("begins at byte 2", file({"q": entry("U8", [4], 0, 4), "k": entry("U8", [4], 2, 6)}, b"000000")),
            ("begins at byte 1", file({"q": entry("U8", [4], 1, 5)}, b"00000")),
            ("shape holds -1", file({"q": entry("U8", [-1], 0, 1)}, b"0")),
            ("larger than any file", file({"q": entry("U8", [1 << 62, 1 << 62], 0, 0)})),
            ("appears twice", file(b'{"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                                   b'"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')),
            ("a string is expected", file({"__metadata__": {"k": 1}})),
        ]:
            with self.subTest(says=says):
                self.refused(data, says)

    def test_bad_paths(self):
        self.attn("run", self.path("absent"), self.path("out"), code=2, says="cannot open")
        self.attn("run", self.dir, self.path("out"), code=2, says="is a directory")
        self.attn("diff", EXAMPLE, self.path("absent"), code=2, says="absent")
        for out, says in ((self.path("no/such/dir"), "cannot create"), (self.dir, "not a regular file"),
                          ("/dev/null", "not a regular file")):
            self.attn("run", EXAMPLE, out, code=2, says=says)
            self.attn("quantize", EXAMPLE, out, "--to", "q8_0", code=2, says=says)
        self.assertTrue(Path("/dev/null").is_char_device())
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_bad_input_keeps_the_old_output(self):
        out = self.path("out")
        self.attn("run", EXAMPLE, out)
        before = Path(out).read_bytes()
        self.attn("run", save(self.path("bad"), {"q": noise([1, 1, 1, 8])}), out, code=2, says='"k" is missing')
        self.attn("run", EXAMPLE, out, "--backend", "cpu", "--out-dtype", "f64", code=4)
        self.assertEqual(Path(out).read_bytes(), before)

    def test_in_place(self):
        path = save(self.path("x"), small())
        self.attn("run", path, path)
        self.assertEqual(sorted(load(path)[0]), ["lse", "out"])


class Inputs(CliTest):
    """Tensors that do not fit together: exit code 2, naming the tensor."""

    def refused(self, says, change, metadata=None):
        tensors = small()
        tensors.update(change)
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        path = save(self.path("in"), tensors, metadata)
        with self.subTest(says=says):
            for backend in ("reference", "cpu"):
                self.attn("run", path, self.path("out"), "--backend", backend, code=2, says=says)

    def test_types(self):
        self.refused('"q" is missing', {"q": None})
        self.refused('"v" is missing', {"v": None})
        self.refused("q is F64", {"q": pack("F64", [2, 5, 4, 8], 0)})
        self.refused("k is I32", {"k": pack("I32", [2, 7, 2, 8], 0)})
        self.refused("k is U8", {"k": pack("U8", [2, 7, 2, 34], 0)})
        self.refused("k is ", {"k": pack("U8", [2, 7, 2, 34], 0)}, {"k": "q2_0"})
        self.refused("its dtype is F32", {}, {"k": "q8_0"})
        self.refused("its dtype is F32", {}, {"v": "f8_e4m3fnuz"})
        self.refused("multiple of the 34 bytes", {"k": pack("U8", [2, 7, 2, 35], 0)}, {"k": "q8_0"})
        self.refused("q is q8_0", {"q": pack("U8", [2, 5, 4, 34], 0), "k": noise([2, 7, 2, 32]),
                                        "v": noise([2, 7, 2, 32])}, {"q": "q8_0"})
        self.refused("bias_type is bf16", {"bias": pack("BF16", [1, 1, 5, 7], 0)})
        self.refused("bias_slopes has shape", {"bias": pack("F16", [1, 1, 5, 7], 0), "bias_slopes": pack("F32", [3], 0)})
        self.refused("ATTN_BIAS_SLOPES without a bias_type", {"bias_slopes": pack("F32", [4], 0)})
        self.refused('"k_scale" is missing', {"k": pack("I8", [2, 7, 2, 8], 0)})
        self.refused("k_scale has shape", {"k": pack("I8", [2, 7, 2, 8], 0), "k_scale": pack("F16", [2, 7], 0)})

    def test_shapes(self):
        self.refused("q has shape [2, 5, 4]", {"q": noise([2, 5, 4])})
        self.refused("q has shape []", {"q": noise([])})
        self.refused("q has shape [0, 5, 4, 8]", {"q": noise([0, 5, 4, 8])})
        self.refused("k: batch is 3", {"k": noise([3, 7, 2, 8]), "v": noise([3, 7, 2, 8])})
        self.refused("k: head_dim is 4", {"k": noise([2, 7, 2, 4])})
        self.refused("v has shape [2, 6, 2, 8]", {"v": noise([2, 6, 2, 8])})
        self.refused("v has shape [2, 7, 1, 8]", {"v": noise([2, 7, 1, 8])})
        self.refused("heads_q is 4", {"k": noise([2, 7, 3, 8]), "v": noise([2, 7, 3, 8])})
        self.refused("Hkv and Dv from 1 up", {"v": noise([2, 7, 2, 0])})
        self.refused("bias has shape", {"bias": noise([3, 1, 5, 7])})
        self.refused("bias has shape", {"bias": noise([5, 7])})
        self.refused("sinks has shape [2]", {"sinks": noise([2])})
        self.refused("alibi_slopes is I32", {"alibi_slopes": pack("I32", [4], 0)})
        self.refused("out_scale has shape", {"out_scale": noise([2])})
        self.refused("ATTN_OUT_SCALE", {"out_scale": noise([1])})
        self.refused("k_descale has shape [2]", {"k_descale": noise([2])})
        self.refused("k_descale has shape [2, 2, 3]", {"k_descale": noise([2, 2, 3])})
        self.refused("q_descale has shape [2, 2, 1]", {"q_descale": noise([2, 2, 1])})
        self.refused("v_descale is F16", {"v_descale": pack("F16", [1], 0)})

    def test_tree(self):
        keys, words = pack("I32", [1], 3), lambda value: pack("U64", [2, 5, 2], value)
        self.refused("tree is there without tree_keys", {"tree": words(1)})
        self.refused("tree_keys is there without tree", {"tree_keys": keys})
        self.refused("tree has shape [2, 5]", {"tree": pack("U64", [2, 5], 1), "tree_keys": keys})
        self.refused("tree is I64", {"tree": pack("I64", [2, 5, 2], 1), "tree_keys": keys})
        self.refused("tree_keys is 129", {"tree": words(1), "tree_keys": pack("I32", [1], 129)})
        self.refused("tree is given", {"tree": words(1), "tree_keys": pack("I32", [1], 0)})
        # Of 7 keys the first 4 have no bit; bits 0 and 2 of the others leave keys 4 and 6.
        tensors = small()
        shown = {name: pack("F32", [2, 6, 2, 8], [x for n, x in enumerate(unpack(tensors[name])) if n // 16 % 7 != 5])
                 for name in "kv"}
        for backend in "reference", "cpu":
            tree, want = self.path("tree"), self.path("want")
            self.attn("run", save(self.path("in"), {**tensors, "tree": words(5), "tree_keys": keys}), tree,
                      "--backend", backend)
            self.attn("run", save(self.path("in"), {**tensors, **shown}), want, "--backend", backend)
            self.attn("diff", tree, want, "--tensor", "out", "--max-abs", 1e-6)

    def test_lengths(self):
        i32 = lambda *values: pack("I32", [len(values)], values)
        self.refused("seqlens_kv has shape [3]", {"seqlens_kv": i32(1, 2, 3)})
        self.refused("seqlens_kv is I64", {"seqlens_kv": pack("I64", [2], 1)})
        self.refused("seqlens[1] is 8", {"seqlens_kv": i32(1, 8)})
        self.refused("seqlens[0] is -1", {"seqlens_kv": i32(-1, 7)})
        packed = noise([6, 4, 8])
        self.refused("q has shape [2, 5, 4, 8]", {"cu_seqlens_q": i32(0, 3, 6)})
        self.refused("cu_seqlens_q[0] is 1", {"q": packed, "cu_seqlens_q": i32(1, 3, 6)})
        self.refused("cu_seqlens_q[2] is 2 after 3", {"q": packed, "cu_seqlens_q": i32(0, 3, 2)})
        self.refused("cu_seqlens_q ends at 7", {"q": packed, "cu_seqlens_q": i32(0, 3, 7)})
        self.refused("cu_seqlens_q has no batch", {"q": packed, "cu_seqlens_q": i32(0)})
        self.refused("cu_seqlens_q has no batch", {"q": packed, "cu_seqlens_q": i32()})
        self.refused("as in cu_seqlens_q", {"q": packed, "cu_seqlens_q": i32(0, 6)})
        kv = {"k": noise([9, 2, 8]), "v": noise([9, 2, 8])}
        self.refused("k has shape [2, 7, 2, 8]", {"cu_seqlens_kv": i32(0, 3, 9)})
        self.refused("cu_seqlens_kv has shape [2]", {**kv, "cu_seqlens_kv": i32(0, 9)})
        self.refused("cu_seqlens_kv ends at 10", {**kv, "cu_seqlens_kv": i32(0, 3, 10)})
        self.refused("both there", {**kv, "cu_seqlens_kv": i32(0, 3, 9), "seqlens_kv": i32(1, 1)})
        pages = {"k": noise([5, 4, 2, 8]), "v": noise([5, 4, 2, 8])}
        table = lambda *values: pack("I32", [2, 2], values)
        self.refused("block_table[0, 1] is 5", {**pages, "block_table": table(0, 5, 1, 2)})
        self.refused("block_table[1, 0] is -1", {**pages, "block_table": table(0, 4, -1, 2)})
        self.refused("block_table has shape", {**pages, "block_table": pack("I32", [3, 1], 0)})
        self.refused("block_table is U8", {**pages, "block_table": pack("U8", [2, 2], 0)})

    def test_segments(self):
        parts = {"k": None, "v": None}
        one = {"k.0": noise([2, 3, 2, 8]), "v.0": noise([2, 3, 2, 8])}
        self.refused("as well as k.0", one)
        self.refused('"v.1" is missing', {**parts, **one, "k.1": noise([2, 3, 2, 8])})
        self.refused('"k.2" belongs to no segment', {**parts, **one, "k.2": noise([2, 3, 2, 8])})
        self.refused('"seqlens_kv" belongs to no segment', {**parts, **one, "seqlens_kv": pack("I32", [2], 1)})
        self.refused('"k_descale.0" belongs to no segment', {"k_descale.0": noise([1])})
        self.refused("k.1: heads_kv is 1", {**parts, **one, "k.1": noise([2, 3, 1, 8]), "v.1": noise([2, 3, 1, 8])})
        self.refused("v.1: head_dim_v is 4", {**parts, **one, "k.1": noise([2, 3, 2, 8]), "v.1": noise([2, 3, 2, 4])})

    def test_block_masks(self):
        size = pack("I32", [2], [4, 4])
        kinds = lambda *values: pack("U8", [1, 1, 2, 2], values)
        index = lambda *values: pack("I32", [1, 1, 2, 2], values)
        bits = pack("BOOL", [1, 4, 4], True)
        self.refused('"block_size" is missing', {"block_kinds": kinds(2, 2, 2, 2)})
        self.refused("block_size is (0, 4)", {"block_kinds": kinds(2, 2, 2, 2), "block_size": pack("I32", [2], [0, 4])})
        self.refused("without block_kinds", {"block_size": size})
        self.refused("row 1, column 0 is 4", {"block_kinds": kinds(2, 2, 4, 2), "block_size": size})
        self.refused("block_kinds has shape", {"block_kinds": pack("U8", [1, 1, 2, 3], 2), "block_size": size})
        self.refused("block_kinds has shape", {"block_kinds": pack("U8", [2, 2], 2), "block_size": size})
        self.refused("block_kinds is I32", {"block_kinds": index(2, 2, 2, 2), "block_size": size})
        self.refused("row 1, column 0 is partial (3)", {"block_kinds": kinds(2, 2, 3, 2), "block_size": size})
        self.refused("row 0, column 1 is 1; accepted: 0 to 0", {"block_kinds": kinds(2, 3, 2, 2), "block_size": size,
                                                      "block_index": index(-1, 1, -1, -1), "block_bits": bits})
        self.refused("block_bits has shape", {"block_kinds": kinds(2, 3, 2, 2), "block_size": size,
                                              "block_index": index(-1, 0, -1, -1), "block_bits": pack("BOOL", [1, 4, 8], True)})
        self.refused("block_bits is U8", {"block_kinds": kinds(2, 3, 2, 2), "block_size": size,
                                          "block_index": index(-1, 0, -1, -1), "block_bits": pack("U8", [1, 4, 4], 1)})

    def test_merge(self):
        out, lse = noise([2, 5, 4, 8]), noise([2, 4, 5])
        for says, tensors in [
            ('"lse.0" is missing', {"out.0": out}),
            ('"out.1" is missing', {"out.0": out, "lse.0": lse, "lse.1": lse}),
            ('.2" follows no part 1', {"out.0": out, "lse.0": lse, "out.2": out, "lse.2": lse}),
            ("out.0 has shape [5]", {"out.0": noise([5]), "lse.0": lse}),
            ("out.1 has shape", {"out.0": out, "lse.0": lse, "out.1": noise([2, 5, 4, 4]), "lse.1": lse}),
            ("out.1 is F16", {"out.0": out, "lse.0": lse, "out.1": pack("F16", [2, 5, 4, 8], 0), "lse.1": lse}),
            ("lse.0 has shape", {"out.0": out, "lse.0": noise([2, 5, 4])}),
            ("part_type is f64", {"out.0": pack("F64", [2, 5, 4, 8], 0), "lse.0": lse}),
        ]:
            with self.subTest(says=says):
                self.attn("merge", save(self.path("in"), tensors), self.path("out"), code=2, says=says)

    def test_quantize_twice(self):
        once = self.path("once")
        self.attn("quantize", EXAMPLE, once, "--to", "f8_e4m3fn")
        self.attn("quantize", once, self.path("twice"), "--to", "f8_e4m3fn", code=2, says="k_descale is there already")
        self.attn("quantize", EXAMPLE, once, "--to", "q8_0")
        self.attn("quantize", once, self.path("twice"), "--to", "q4_0", code=2, says="src_type is q8_0")

    def test_unused_tensors_are_named(self):
        path = save(self.path("in"), {**small(), "sink": noise([4])})
        run = subprocess.run([ATTN, "run", path, self.path("out")], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0)
        self.assertIn('tensor "sink" is not used', run.stderr)


class RoundTrips(CliTest):
    def options(self, metadata):
        options, args = json.loads(metadata.get("options", "{}")), []
        args += ["--causal"] * options.get("causal", False)
        args += ["--causal-top-left"] * options.get("causal_top_left", False)
        if "window" in options:
            args += ["--window", "{},{}".format(*options["window"])]
        for name in ("scale", "softcap"):
            if name in options:
                args += ["--" + name, options[name]]
        return args

    def test_golden(self):
        files = sorted(GOLDEN.glob("*.safetensors"))
        self.assertTrue(files)
        for path in files:
            with self.subTest(case=path.stem):
                tensors, metadata = load(path)
                golden = save(self.path("golden"), {"out": tensors["golden.out"], "lse": tensors["golden.lse"]})
                out = self.path("out")
                if path.stem.startswith("merge_"):
                    self.attn("merge", path, out, "--backend", "reference", "--out-dtype", "f32")
                    bound = 2e-6
                else:
                    self.attn("run", path, out, "--backend", "reference", "--out-dtype", "f64",
                              *self.options(metadata))
                    bound = 1e-12
                self.attn("diff", out, golden, "--tensor", "out", "--max-abs", bound)
                self.attn("diff", out, golden, "--tensor", "lse", "--rel-fro", 1e-6)

    def test_real_model(self):
        for backend in self.json("info")["backends"]:
            if backend["name"] not in ("reference", "cpu"):
                continue
            out = self.path(backend["name"])
            report = self.json("run", EXAMPLE, out, "--backend", backend["name"])
            self.assertEqual(report["backend"], backend["name"])
            self.assertEqual(report["out"], {"dtype": "f32", "shape": load(EXAMPLE)[0]["q"][1]})
            self.attn("diff", out, EXPECTED, "--max-abs", 2e-6)
            self.attn("diff", out, EXPECTED, "--max-abs", 0, code=0 if backend["name"] == "reference" else 1)

    def test_output_types(self):
        reference = self.path("reference")
        self.attn("run", EXAMPLE, reference, "--backend", "reference")
        for dtype, name, bound in (("f16", "F16", 1e-3), ("bf16", "BF16", 8e-3), ("f8_e4m3fn", "F8_E4M3", 0.07),
                                   ("f8_e5m2", "F8_E5M2", 0.13), ("f8_e4m3fnuz", "F8_E4M3", 0.07)):
            for backend in ("reference", "cpu"):
                out = self.path("out")
                self.attn("run", EXAMPLE, out, "--backend", backend, "--out-dtype", dtype)
                tensors, metadata = load(out)
                self.assertEqual(tensors["out"][0], name)
                self.assertEqual(metadata, {"out": dtype} if dtype == "f8_e4m3fnuz" else {})
                self.attn("diff", out, reference, "--rel-fro", bound)

    def test_segments_equal_the_whole(self):
        whole = small(b=1, sq=4, skv=10, hq=2, hkv=2)
        row = 2 * 8 * 4
        parts = {"q": whole["q"]}
        for i, (begin, end) in enumerate(((0, 3), (3, 4), (4, 10))):
            for name in "kv":
                parts[f"{name}.{i}"] = "F32", [1, end - begin, 2, 8], whole[name][2][begin * row:end * row]
        for args in ([], ["--causal"], ["--split-invariant"], ["--fixed-split", "3"], ["--threads", "1"]):
            for backend in ("reference", "cpu"):
                one, many = self.path("one"), self.path("many")
                self.attn("run", save(self.path("a"), whole), one, "--backend", backend, *args)
                self.attn("run", save(self.path("b"), parts), many, "--backend", backend, *args)
                self.attn("diff", many, one, "--max-abs", 1e-6)

    def test_shared_segments(self):
        q = small(b=2, sq=1, skv=4, hq=2, hkv=2)
        prefix = small(b=1, sq=1, skv=3, hq=2, hkv=2)
        row = 2 * 8 * 4
        flat, parts = {"q": q["q"]}, {"q": q["q"], "shared_segments": pack("I32", [1], 1)}
        for name in "kv":
            own, first = q[name][2], prefix[name][2]
            flat[name] = "F32", [2, 7, 2, 8], b"".join(first + own[b * 4 * row:(b + 1) * 4 * row] for b in range(2))
            parts[f"{name}.0"], parts[f"{name}.1"] = prefix[name], q[name]
        for args in (["--backend", "reference"], ["--backend", "cpu"], ["--kernel", "prefix_cpu", "--explain", "--backend", "cpu"]):
            one, many = self.path("one"), self.path("many")
            self.attn("run", save(self.path("a"), flat), one, "--backend", "reference", "--causal")
            told = self.attn("run", save(self.path("b"), parts), many, *args, "--causal")
            self.attn("diff", many, one, "--max-abs", 1e-6)
        self.assertIn("prefix_cpu runs", str(told))
        self.assertIn("shared segments", str(told))
        for n in (-1, 3):
            self.attn("run", save(self.path("c"), {**parts, "shared_segments": pack("I32", [1], n)}), self.path("out"), code=2,
                      says=f"shared_segments is {n}; 0 to 2 are accepted")
        self.attn("run", save(self.path("c"), {**parts, "k.0": q["k"], "v.0": q["v"]}), self.path("out"), code=2,
                  says="k.0: batch is 2; 1 as in a shared segment is expected")

    def test_merge_of_parts(self):
        whole = small(b=1, sq=4, skv=10, hq=2, hkv=2)
        row = 2 * 8 * 4
        parts = {}
        for i, (begin, end) in enumerate(((0, 6), (6, 10))):
            piece = {"q": whole["q"]}
            for name in "kv":
                piece[name] = "F32", [1, end - begin, 2, 8], whole[name][2][begin * row:end * row]
            self.attn("run", save(self.path("in"), piece), self.path("part"))
            for name, tensor in load(self.path("part"))[0].items():
                parts[f"{name}.{i}"] = tensor
        self.attn("run", save(self.path("in"), whole), self.path("whole"))
        for backend in ("reference", "cpu"):
            self.attn("merge", save(self.path("parts"), parts), self.path("merged"), "--backend", backend, says="2 parts")
            self.attn("diff", self.path("merged"), self.path("whole"), "--max-abs", 1e-6)
        report = self.json("merge", self.path("parts"), self.path("merged"), "--out-dtype", "bf16")
        self.assertEqual(report["out"], {"dtype": "bf16", "shape": [1, 4, 2, 8]})

    def test_quantize(self):
        for to, bound in (("f8_e4m3fn", 0.04), ("f8_e5m2", 0.08), ("f8_e4m3fnuz", 0.04), ("q8_0", 0.01), ("q4_0", 0.12), ("q4_1", 0.12),
                          ("q5_0", 0.06), ("q5_1", 0.06), ("iq4_nl", 0.12), ("i8", 0.012), ("i4", 0.2), ("f8_e4m3fn_token", 0.04), ("nvfp4", 0.2)):
            scales = {"i8": ("F16", [1, 127, 12]), "i4": ("F16", [1, 127, 12]), "f8_e4m3fn_token": ("F32", [1, 127, 12]),
                      "nvfp4": ("U8", [1, 127, 12, 2])}.get(to)
            beside = scales is not None
            ggml = beside or to.startswith(("q", "iq"))
            for args in ([], *([["--scale", "amax"], ["--scale", "0.125", "--saturate"], ["--scale", "amax", "--per", "head", "--q"]]
                               if not ggml else [])):
                with self.subTest(to=to, args=args):
                    results = []
                    for backend in ("reference", "cpu"):
                        path = self.path(backend)
                        self.attn("quantize", EXAMPLE, path, "--to", to, "--backend", backend, *args)
                        results.append(Path(path).read_bytes())
                    self.assertEqual(*results)
                    tensors, metadata = load(path)
                    self.assertEqual("k_scale" in tensors, beside)
                    if beside:
                        self.assertEqual(tensors["v_scale"][:2], scales)
                    if ggml and to != "i8" or to == "f8_e4m3fnuz":
                        self.assertEqual((metadata["k"], metadata["v"]), (to, to))
                    self.assertEqual("k_descale" in tensors, not ggml or to == "nvfp4")
                    if "head" in args:
                        self.assertEqual(tensors["k_descale"][1], [1, 12])
                        self.assertEqual(tensors["q_descale"][1], [1, 12])
                        self.assertEqual(tensors["q"][0], "F8_E5M2" if to == "f8_e5m2" else "F8_E4M3")
                    if "0.125" in args:
                        self.assertEqual(unpack(tensors["k_descale"]), (0.125,))
                    if "0.125" not in args:
                        self.attn("run", path, self.path("out"), "--out-dtype", "f32")
                        self.attn("diff", self.path("out"), EXPECTED, "--tensor", "out", "--rel-fro", bound * 2)

    def test_latent_and_lists(self):
        """V in k and lists of keys in a file: the result of the listed rows with v of their own."""
        q, k = noise([1, 2, 4, 16]), noise([1, 9, 1, 16])
        row = 16 * 4
        listed = [[5, 0, 5], [8, 2, -1]]
        latent = {"q": q, "k": k, "head_dim_v": pack("I32", [1], 12), "lists": pack("I32", [1, 2, 1, 3], sum(listed, []))}
        for backend in ("reference", "cpu"):
            self.attn("run", save(self.path("in"), latent), self.path("out"), "--backend", backend)
            got = load(self.path("out"))[0]
            self.assertEqual(got["out"][1], [1, 2, 4, 12])
            for i, keys in enumerate(listed):
                rows = [k[2][j * row:(j + 1) * row] for j in keys if j >= 0]
                alone = {"q": ("F32", [1, 1, 4, 16], q[2][i * 4 * row:(i + 1) * 4 * row]), "k": ("F32", [1, len(rows), 1, 16], b"".join(rows)),
                         "v": ("F32", [1, len(rows), 1, 12], b"".join(r[:48] for r in rows))}
                self.attn("run", save(self.path("one"), alone), self.path("want"), "--backend", "reference")
                want = unpack(load(self.path("want"))[0]["out"])
                for a, b in zip(unpack(got["out"])[i * 48:(i + 1) * 48], want):
                    self.assertAlmostEqual(a, b, delta=2e-6)
        for said, change in (("lists has shape", {"lists": pack("I32", [1, 1, 1, 3], 0)}), ("head_dim_v is 17", {"head_dim_v": pack("I32", [1], 17)}),
                             ("head_dim_v is -1; 1 to head_dim", {"head_dim_v": pack("I32", [1], -1)}),
                             ("list_block is 3", {"list_block": pack("I32", [1], 3)}), ('"v" is missing', {"head_dim_v": None})):
            tensors = {name: t for name, t in {**latent, **change}.items() if t}
            self.attn("run", save(self.path("in"), tensors), self.path("out"), "--backend", "cpu", code=2, says=said)

    def test_mixed_cache(self):
        """Old keys of the real encoder in each type, the newest in f32, in one file and one call."""
        for to, bound in (("f8_e4m3fn", 0.04), ("q8_0", 0.01), ("q4_0", 0.15), ("i8", 0.012), ("i4", 0.25)):
            with self.subTest(to):
                mixed = self.path("mixed")
                self.attn("quantize", EXAMPLE, mixed, "--to", to, "--recent", 32, "--scale", "amax" if to[0] == "f" else "1")
                tensors, _ = load(mixed)
                self.assertEqual((tensors["k.1"][:2], tensors["v.0"][1][:2]), (("F32", [1, 32, 12, 32]), [1, 95]))
                for backend in ("reference", "cpu"):
                    self.attn("run", mixed, self.path(backend), "--backend", backend, "--out-dtype", "f32")
                    self.attn("diff", self.path(backend), EXPECTED, "--tensor", "out", "--rel-fro", bound)
                self.attn("diff", self.path("reference"), self.path("cpu"), "--max-abs", 1e-5)
        for recent in -1, 127:
            self.attn("quantize", EXAMPLE, self.path("out"), "--to", "q8_0", "--recent", recent, code=2,
                      says=f"--recent is {recent}; 1 to 126")
        self.attn("quantize", mixed, self.path("out"), "--to", "q8_0", "--recent", 3, code=2, says='"k" is missing')

    def test_emulated_gfx950(self):
        info = self.json("info")
        reason = next(b["reason"] for b in info["backends"] if b["name"] == "hip-emu")
        if reason or not next(k["in_build"] for k in info["kernels"] if k["name"] == "merge_gfx950"):
            self.skipTest(reason or "this build has no gfx950 kernels")
        os.environ["ATTN_EMU_ARCH"] = "gfx950"
        self.addCleanup(os.environ.pop, "ATTN_EMU_ARCH")
        self.attn("info", says="0: gfx950 (emulated), gfx950, 256 multiprocessors")
        tried = subprocess.run([self.program, "quantize", EXAMPLE, self.path("tried"), "--to", "f8_e5m2", "--backend", "hip-emu"],
                               capture_output=True, text=True)
        if "this emulator needs LLVM" in tried.stderr:
            self.skipTest("the emulator's LLVM does not know gfx950")
        random.seed(4)
        shapes = {"q": [1, 20, 2, 64], "k": [1, 70, 2, 64], "v": [1, 70, 2, 64]}
        values = {name: pack("F32", shape, [random.gauss(0, 1) for _ in range(math.prod(shape))]) for name, shape in shapes.items()}
        source = save(self.path("f32"), values)
        for to in ("f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz"):
            results = []
            for backend in ("cpu", "hip-emu"):
                self.attn("quantize", source, self.path(backend), "--to", to, "--backend", backend, "--scale", "amax",
                          says="convert_gfx950" if backend == "hip-emu" else "on cpu")
                results.append(Path(self.path(backend)).read_bytes())
            self.assertEqual(*results)
        halves = save(self.path("f16"), {name: pack("F16", shape, [random.gauss(0, 1) for _ in range(math.prod(shape))])
                                         for name, shape in shapes.items()})
        self.attn("run", halves, self.path("a"), "--backend", "hip-emu", says="fwd_gfx950_f16_d64 on hip-emu (emulated)")
        self.attn("run", halves, self.path("b"), "--backend", "reference")
        self.attn("diff", self.path("a"), self.path("b"), "--max-abs", 2e-3)
        self.attn("run", source, self.path("c"), "--backend", "hip-emu", code=4, says="no kernel on gfx950 takes q of f32")
        # 128 head dims need no prepare launch; both signs of 0.25 to 1.875.
        codes = [sign | code for sign in (0, 0x80) for code in range(0x28, 0x40)]
        for dim, kernel in (64, "fwd_gfx950_fp8_d64"), (128, "fwd_gfx950_fp8_d128_direct"):
            bytes8 = save(self.path("f8"), {name: ("F8_E4M3", shape, bytes(random.choices(codes, k=math.prod(shape))))
                                            for name, shape in (("q", [1, 40, 4, dim]), ("k", [1, 70, 2, dim]), ("v", [1, 70, 2, dim]))})
            self.attn("run", bytes8, self.path("a"), "--backend", "hip-emu", "--out-dtype", "f32", says=f"{kernel} on hip-emu (emulated)")
            self.attn("run", bytes8, self.path("b"), "--backend", "reference", "--out-dtype", "f32")
            self.attn("diff", self.path("a"), self.path("b"), "--rel-fro", 0.05)

    def test_emulator(self):
        info = self.json("info")
        reason = next(b["reason"] for b in info["backends"] if b["name"] == "hip-emu")
        if reason or not next(k["in_build"] for k in info["kernels"] if k["name"] == "merge_gfx942"):
            self.skipTest(reason or "this build has no gfx9 kernels")
        random.seed(3)
        parts = {}
        for i in range(3):
            for name, shape in ("out", [2, 5, 3, 40]), ("lse", [2, 3, 5]):
                values = [random.gauss(0, 1) for _ in range(math.prod(shape))]
                parts[f"{name}.{i}"] = pack("F32", shape, values)
        source = save(self.path("parts"), parts)
        self.attn("merge", source, self.path("a"), "--backend", "reference")
        self.attn("merge", source, self.path("b"), "--backend", "hip-emu", says="on hip-emu (emulated)")
        self.attn("diff", self.path("a"), self.path("b"), "--max-abs", 1e-6)
        for to in ("f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz"):
            for args in ([], ["--scale", "amax", "--per", "head"], ["--scale", "0.125", "--saturate"]):
                results = []
                for backend in ("cpu", "hip-emu"):
                    self.attn("quantize", EXAMPLE, self.path(backend), "--to", to, "--backend", backend, *args)
                    results.append(Path(self.path(backend)).read_bytes())
                self.assertEqual(*results)
        self.attn("quantize", EXAMPLE, self.path("a"), "--to", "q8_0", "--backend", "hip-emu", code=4, says="q8_0")

        # A kernel's author: code objects from files.
        def generate(name, text):
            body, made = self.path(f"{name}.s"), self.path(f"{name}.hsaco")
            Path(body).write_text(text)
            subprocess.run([sys.executable, SOURCE / "tools/amdhsa/amdhsa", "generate", body, "-o", made,
                            "-I", SOURCE / "asm/include"], check=True)
            return made

        text = (SOURCE / "asm/gfx942/merge_gfx942.s").read_text()
        merge = ("merge", source, self.path("c"), "--backend", "hip-emu", "--kernel-file")
        good = generate("good", text)
        self.attn(*merge, good, says=f"merge_gfx942 from {good}, NOT the library's own, on hip-emu (emulated)")
        self.attn(*merge, good, "--kernel", "merge_gfx942")
        self.attn("diff", self.path("b"), self.path("c"), "--max-abs", 0)
        report = self.json(*merge, good)
        self.assertEqual((report["kernel_file"], report["emulated"]), (good, True))
        wait = "  wait_scalar\n"
        self.assertIn(wait, text)
        self.attn(*merge, generate("bad", text.replace(wait, "", 1)), code=4, says="missing s_waitcnt: merge_gfx942+0x")
        other = generate("other", text.replace("merge_gfx942", "something"))
        self.attn(*merge, other, code=4, says="the code object has no kernel merge_gfx942, only something")
        self.attn(*merge, str(EXAMPLE), code=4, says="ELF")
        self.attn(*merge, self.path("nowhere"), code=2, says="nowhere")
        self.attn("run", EXAMPLE, self.path("d"), "--backend", "cpu", "--kernel-file", good, code=2, says="kernel_file")
        self.attn("run", EXAMPLE, self.path("d"), "--backend", "hip-emu", "--kernel-file", good, code=4,
                  says="the code object has no kernel decode_gfx942_bf16_d64, only merge_gfx942")

        # One forward kernel; the kernel that it launches first comes from the library.
        forward = (SOURCE / "asm/gfx942/fwd_gfx942_fp8_d64.s").read_text()
        prepare = (SOURCE / "asm/gfx942/prepare_gfx942_fp8.s").read_text()
        self.attn("quantize", EXAMPLE, self.path("fp8"), "--to", "f8_e4m3fnuz", "--q", "--backend", "cpu")
        run = ("run", self.path("fp8"), self.path("e"), "--backend", "hip-emu")
        self.attn(*run, says="fwd_gfx942_fp8_d64 on hip-emu (emulated)")
        with_file = ("run", self.path("fp8"), self.path("f"), "--backend", "hip-emu", "--kernel-file")
        alone = generate("alone", forward)
        self.attn(*with_file, alone, says=f"fwd_gfx942_fp8_d64 from {alone}, NOT the library's own,")
        self.attn("diff", self.path("e"), self.path("f"), "--max-abs", 0)
        self.attn(*with_file, alone, "--kernel", "fwd_gfx942_fp8_d64")
        # Of either the file's is what runs, where the file has it.
        self.assertIn("forward_fp8 fwd_gfx942_fp8_d64\n", forward)
        ends = generate("ends", forward.replace("forward_fp8 fwd", "kernel_entry fwd").rstrip() + "\n  s_endpgm\n")
        self.attn(*with_file, ends)
        self.attn("diff", self.path("e"), self.path("f"), "--max-abs", 0, code=1)
        self.assertIn("prepare prepare_gfx942_fp8\n", prepare)
        ends = prepare.replace("\nprepare prepare", "\nkernel_entry prepare").rstrip() + "\n  s_endpgm\n"
        both = generate("both", ends + forward)
        self.attn(*with_file, both)
        self.attn("diff", self.path("e"), self.path("f"), "--max-abs", 0, code=1)
        # What has none of the kernels, is none, or is for another device.
        self.attn(*with_file, generate("prepare", prepare), code=4,
                  says=", only prepare_gfx942_fp8")
        self.attn(*with_file, good, code=4, says=", only merge_gfx942")
        self.attn(*with_file, alone, "--kernel", "fwd_gfx942_fp8_d128", code=4, says="no kernel fwd_gfx942_fp8_d128")
        for name, content, says in [("garbage", bytes(range(256)) * 8, "ELF"), ("empty", b"", "ELF"),
                                    ("cut", Path(alone).read_bytes()[:600], "")]:
            Path(self.path(name)).write_bytes(content)
            self.attn(*with_file, self.path(name), code=4, says=says)
        other = bytearray(Path(alone).read_bytes())
        self.assertEqual(other[48], 0x4c)  # e_flags: gfx942
        other[48] = 0x3f  # gfx90a
        Path(self.path("gfx90a")).write_bytes(other)
        self.attn(*with_file, self.path("gfx90a"), code=4, says="gfx")

    def test_append(self):
        """Tokens appended to a padded and to a paged cache, beside a file that has had them all along."""
        whole = small(b=2, sq=2, skv=8)
        lengths, room = [6, 3], 10
        _, shape, _ = whole["k"]
        rows = {name: unpack(whole[name]) for name in "kv"}
        row = shape[2] * shape[3]

        def at(name, b, j):
            return rows[name][(b * 8 + j) * row:(b * 8 + j + 1) * row]
        expected = dict(whole, seqlens_kv=pack("I32", [2], [n + 2 for n in lengths]))
        self.attn("run", save(self.path("whole"), expected), self.path("want"), "--causal", "--backend", "reference")
        table = [[4, 1, 0, -1, 9], [2, 3, 6, 5, 7]]
        for paged in False, True:
            cache = {}
            for name in "kv":
                values = [math.nan] * (10 * 2 * row if paged else 2 * room * row)
                for b, n in enumerate(lengths):
                    for j in range(n):
                        place = table[b][j // 2] * 2 + j % 2 if paged else b * room + j
                        values[place * row:(place + 1) * row] = at(name, b, j)
                cache[name] = pack("F32", [10, 2, 2, 8] if paged else [2, room, 2, 8], values)
                new = [x for b, n in enumerate(lengths) for j in (n, n + 1) for x in at(name, b, j)]
                cache[name + "_new"] = pack("F32", [2, 2, 2, 8], new)
            if paged:
                table[0][3] = 8
                cache["block_table"] = pack("I32", [2, 5], sum(table, []))
            cache.update(q=whole["q"], seqlens_kv=pack("I32", [2], lengths))
            path, out, got = save(self.path("in"), cache), self.path("out"), self.path("got")
            for backend in "reference", "cpu":
                with self.subTest(paged=paged, backend=backend):
                    report = self.json("append", path, out, "--backend", backend)
                    self.assertEqual((report["backend"], report["seqlens_kv"]), (backend, [n + 2 for n in lengths]))
                    self.assertTrue(report["kernel"].startswith("kv_append_"))
                    self.assertEqual(sorted(load(out)[0]), sorted(set(cache) - {"k_new", "v_new"}))
                    self.attn("run", out, got, "--causal", "--backend", backend)
                    self.attn("diff", got, self.path("want"), "--max-abs", "2e-6")

    def test_append_rotates(self):
        """By 90 degrees pairs (x, y) become (-y, x), in k and in q."""
        q, k = noise([1, 1, 2, 4], 1), noise([1, 1, 1, 4], 2)
        cos, sin = pack("F32", [3, 2], 0), pack("F32", [3, 2], 1)
        path = save(self.path("in"), {"q": q, "k": pack("F32", [1, 3, 1, 4], 0), "v": pack("F32", [1, 3, 1, 4], 0), "k_new": k,
                                      "v_new": k, "seqlens_kv": pack("I32", [1], 1), "rotary_cos": cos, "rotary_sin": sin})
        for options, turn in ([], lambda a, b, c, d: (-c, -d, a, b)), (["--interleaved"], lambda a, b, c, d: (-b, a, -d, c)):
            out = self.path("out")
            self.attn("append", path, out, *options, "--backend", "cpu")
            got, _ = load(out)
            self.assertEqual(unpack(got["k"]), (0,) * 4 + turn(*unpack(k)) + (0,) * 4)
            self.assertEqual(unpack(got["v"]), (0,) * 4 + unpack(k) + (0,) * 4)
            values = unpack(q)
            self.assertEqual(unpack(got["q"]), turn(*values[:4]) + turn(*values[4:]))
            self.assertNotIn("rotary_cos", got)
        tensors, _ = load(path)
        del tensors["rotary_sin"]
        self.attn("append", save(path, tensors), self.path("out"), code=2, says='"rotary_sin" is missing')
        del tensors["rotary_cos"]
        self.attn("append", save(path, tensors), self.path("out"), "--interleaved", code=2, says="--interleaved goes with")
        self.attn("append", save(path, dict(tensors, seqlens_kv=pack("I32", [1], 4))), self.path("out"), "--backend", "cpu",
                  code=2, says="seqlens[0] is 4")
        self.attn("append", save(path, dict(tensors, v_new=noise([1, 1, 1, 3]))), self.path("out"), code=2,
                  says="v_new has shape [1, 1, 1, 3]")

    def test_quantize_packed_paged_and_segments(self):
        for case in ("segments_causal", "segments_varlen", "paged_varlen", "varlen_causal"):
            with self.subTest(case=case):
                path = GOLDEN / f"{case}.safetensors"
                _, metadata = load(path)
                quantized, out, golden = self.path("quantized"), self.path("out"), self.path("golden")
                self.attn("quantize", path, quantized, "--to", "f8_e5m2", "--per", "head")
                self.attn("run", quantized, out, "--out-dtype", "f32", *self.options(metadata))
                tensors, _ = load(path)
                save(golden, {"out": tensors["golden.out"]})
                self.attn("diff", out, golden, "--rel-fro", 0.2)


class Diff(CliTest):
    def files(self, a, b, dtype="F32"):
        return (save(self.path("a"), {"x": pack(dtype, [len(a)], a)}),
                save(self.path("b"), {"x": pack(dtype, [len(b)], b)}))

    def test_numbers(self):
        a, b = self.files([1.0, 2.0, 2.0], [1.0, 2.0, 4.0])
        row = self.json("diff", a, b)["tensors"]["x"]
        self.assertEqual(row["max_abs"], 2)
        self.assertAlmostEqual(row["mean_abs"], 2 / 3)
        self.assertAlmostEqual(row["rel_fro"], 2 / math.sqrt(21))
        self.assertAlmostEqual(row["cosine"], 13 / math.sqrt(9 * 21))
        self.attn("diff", a, b, "--max-abs", 2, "--rel-fro", 0.5)
        self.attn("diff", a, b, "--max-abs", 1.99, code=1, says="[2]: 2 against 4")
        self.attn("diff", a, b, "--rel-fro", 0.4, code=1, says="FAILED")
        self.assertFalse(self.json("diff", a, b, "--max-abs", 1, code=1)["passed"])

    def test_non_finite(self):
        inf, nan = math.inf, math.nan
        for a, b, code in [([-inf, 1], [-inf, 1], 0), ([nan, 1], [nan, 1], 0), ([nan, 1], [1, nan], 1),
                           ([inf, 1], [-inf, 1], 1), ([1, 1], [inf, 1], 1), ([nan, 1], [0, 1], 1)]:
            with self.subTest(a=a, b=b):
                self.attn("diff", *self.files(a, b), code=code)

    def test_shapes_types_names(self):
        a, b = self.files([1.0, 2.0], [1.0, 2.0, 3.0])
        self.attn("diff", a, b, code=1, says="shape [2] against [3]")
        a, b = self.files([1.0, 2.0], [1.0, 2.0], "F16")[0], self.files([1.0, 2.0], [1.0, 2.0])[1]
        self.attn("diff", a, b, "--max-abs", 0)
        a = save(self.path("a"), {"x": pack("I64", [1], [5]), "y": pack("I64", [1], [5])})
        b = save(self.path("b"), {"x": pack("U8", [1], [5]), "z": pack("I64", [1], [5])})
        report = self.json("diff", a, b)
        self.assertEqual((report["only_a"], report["only_b"]), (["y"], ["z"]))
        self.attn("diff", a, b, "--tensor", "x", "--tensor", "y", code=2, says='"y" is missing')
        empty = save(self.path("a"), {"x": pack("F32", [0, 3], [])})
        self.attn("diff", empty, empty, "--max-abs", 0, "--rel-fro", 0)


class Mask(CliTest):
    def test_text_and_picture(self):
        path = GOLDEN / "blocks_batch_head.safetensors"
        tensors, _ = load(path)
        report = self.json("mask", path)
        kinds = unpack(tensors["block_kinds"])
        drawn = "".join(row for mask in report["masks"] for row in mask["rows"])
        self.assertEqual(drawn, "".join(".\\#%"[kind] for kind in kinds))
        self.assertEqual(sum(mask["PARTIAL"] for mask in report["masks"]), kinds.count(3))
        self.attn("mask", path, says="batch 1, head 1")

        picture = self.path("mask.png")
        self.attn("mask", path, "--show", picture)
        data = Path(picture).read_bytes()
        self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
        chunks, at = {}, 8
        while at < len(data):
            size = struct.unpack(">I", data[at:at + 4])[0]
            kind, body = data[at + 4:at + 8], data[at + 8:at + 8 + size]
            self.assertEqual(struct.unpack(">I", data[at + 8 + size:at + 12 + size])[0], zlib.crc32(kind + body))
            chunks[kind] = body
            at += 12 + size
        width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
        rows = zlib.decompress(chunks[b"IDAT"])
        self.assertEqual(len(rows), height * (width + 1))
        # A pixel per element of [2, 2] masks of 19 x 29, 4 between them; the first is at (4, 4).
        self.assertEqual((width, height), (2 * (29 + 4) + 4, 2 * (19 + 4) + 4))
        bits, index = unpack(tensors["block_bits"]), unpack(tensors["block_index"])
        for b in range(2):
            for h in range(2):
                for i in range(19):
                    for j in range(29):
                        cell = ((b * 2 + h) * 3 + i // 8) * 4 + j // 8
                        kind = kinds[cell]
                        visible = {0: False, 1: j <= i + 29 - 19, 2: True,
                                   3: bits[(index[cell] * 8 + i % 8) * 8 + j % 8] if kind == 3 else None}[kind]
                        pixel = rows[(4 + b * 23 + i) * (width + 1) + 1 + 4 + h * 33 + j]
                        self.assertEqual(pixel, kind if visible or kind == 0 else 5, (b, h, i, j))

    def test_mask_alone(self):
        path = save(self.path("in"), {"block_kinds": pack("U8", [1, 1, 2, 2], [1, 0, 2, 1]),
                                      "block_size": pack("I32", [2], [64, 64])})
        self.assertEqual(self.json("mask", path)["masks"][0]["rows"], ["\\.", "#\\"])
        self.attn("mask", path, "--show", self.path("mask.png"))


class Bench(CliTest):
    def test_json(self):
        for backend in ("reference", "cpu"):
            report = self.json("bench", "--backend", backend, "--seqlen-q", 8, "--seqlen-kv", 16, "--heads", 4,
                               "--heads-kv", 2, "--head-dim", 32, "--causal", "--repeats", 3, "--dtype", "bf16",
                               "--kv-dtype", "q8_0")
            row = report["cases"][0]
            self.assertEqual((row["heads"], row["heads_kv"], row["seqlen_kv"], row["causal"]), (4, 2, 16, True))
            for name in ("median_us", "tflops", "gbytes_per_s"):
                self.assertGreater(row[name], 0)
            # causal, bottom-right: 9 + ... + 16 pairs, 2 products of 2 * 32 operations
            operations = sum(range(9, 17)) * 4 * 2 * 2 * 32
            self.assertAlmostEqual(row["tflops"] * row["median_us"] * 1e6, operations, places=3)
            self.assertGreater(report["plan_us"], 0)
            self.assertGreater(report["run_overhead_us"], 0)
        self.attn("bench", "--seqlen-q", 4, "--window", "1,1", says="window 1,1")

    def test_report(self):
        """Of a run, and of runs that lie in files; what these hold cannot end the page's script."""
        page = Path(self.path("page.html"))
        small = ["--seqlen-q", 8, "--head-dim", 32, "--repeats", 1, "--backend", "cpu"]
        run = self.json("bench", *small, "--report", page)
        runs = self.runs_of(page)
        self.assertEqual([r["file"] for r in runs], ["this run"])
        self.assertEqual(runs[0]["json"]["cases"], run["cases"])
        planted = "</script><script>document.title = 'broken'</script>"
        Path(self.path("own.json")).write_text(json.dumps({**run, "commit": planted}))
        measured = [str(max(SOURCE.glob(f"docs/measured/*_h200_{what}_???????.json"))) for what in ("peers", "decode", "fp8_stress")]
        self.attn("bench", "--report", page, *(word for path in [self.path("own.json"), *measured] for word in ("--from", path)))
        runs = self.runs_of(page)
        self.assertEqual((len(runs), runs[0]["json"]["commit"]), (4, planted))
        self.assertNotRegex(page.read_text(), "https?://|src=|href=")
        if not (browser := shutil.which("chromium")):
            self.skipTest("no chromium, in which the page would be drawn")
        drawn = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
                               capture_output=True, text=True).stdout
        for title in ("Roofline", "TFLOP/s against length", "GB/s against length", "GB/s in decoding", "Speed next to other libraries",
                      "Inputs that break FP8 kernels", "Runs"):
            self.assertIn(f"<h2>{title}</h2>", drawn)
        self.assertNotIn("NaN", re.sub(r"<script.*?</script>", "", drawn, flags=re.S))

    def runs_of(self, page):
        data = re.search(r'<script type="application/json" id="runs">(.*?)</script>', page.read_text(), re.S).group(1)
        return json.loads(data)

    def test_launches(self):
        """Of the emulator: which they are, for their times say nothing."""
        if not any(b["name"] == "hip-emu" and b["available"] for b in self.json("info")["backends"]):
            self.skipTest("this build has no emulator")
        report = self.json("bench", "--backend", "hip-emu", "--dtype", "f8_e4m3fnuz", "--heads", 1, "--seqlen-q", 32,
                           "--head-dim", 64, "--repeats", 1, "--no-ceilings", "--launches")
        self.assertTrue(report["emulated"])
        self.assertEqual([launch["kernel"] for launch in report["cases"][0]["launches"]],
                         ["prepare_gfx942_fp8", "fwd_gfx942_fp8_d64"])

    def test_device(self):
        """On the stand-in for libcuda, where every launch takes as long as MOCK_TICK_MS says."""
        if not any(k["in_build"] for k in self.json("info")["kernels"] if k["backend"] == "cuda"):
            self.skipTest("this build has no CUDA kernels")
        mock = Path(ATTN).parent.parent / "mock" / "cuda.so"
        arguments = ["bench", "--backend", "cuda", "--driver", mock, "--heads", 2, "--seqlen-q", 64, "--head-dim", 64,
                     "--repeats", 3]
        # q, k, v of 16 KiB each: 43 sets exceed twice the 1 MiB of L2; 50 launches round up to 2 * 43.
        operations = 4 * 2 * 64 * 64 * 64
        for tick_ms, graph_launches in ((0.01, 86), (0.5, 0)):
            os.environ["MOCK_TICK_MS"] = str(tick_ms)
            self.addCleanup(os.environ.pop, "MOCK_TICK_MS", None)
            report = self.json(*arguments, "--no-ceilings")
            row = report["cases"][0]
            self.assertEqual((row["input_sets"], row["graph_launches"]), (43, graph_launches))
            for name in ("median_us", "min_us", "warm_us"):
                self.assertAlmostEqual(row[name], tick_ms * 1e3, places=2)
            self.assertAlmostEqual(row["tflops"] * row["median_us"] * 1e6, operations, delta=operations * 1e-6)
            self.assertIsNone(row["read_share"])
            self.assertEqual(report["ceilings"]["read"]["missing"], "--no-ceilings")
            self.assertEqual(report["device"]["l2_bytes"], 1 << 20)
            self.attn(*arguments, "--no-ceilings", says="of matmul")
        try:
            ctypes.CDLL("libcuda.so.1")
            self.skipTest("ceilings: cuBLAS would use the real driver beside the stand-in")
        except OSError:
            pass
        # The stand-in copies 16 MiB a launch, and runs no kernel: the sum that read_cuda did not make is noticed.
        ceilings = self.json(*arguments)["ceilings"]
        self.assertAlmostEqual(ceilings["copy"]["gbytes_per_s"], 2 * (16 << 20) / 0.5e-3 / 1e9, places=2)
        self.assertIn("summed its buffer to 0 instead of", ceilings["read"]["missing"])
        self.assertIn("cublas", ceilings["matmul"]["missing"])


class Explain(CliTest):
    def test_explain(self):
        report = self.json("run", EXAMPLE, self.path("out"), "--backend", "reference", "--explain")
        self.assertEqual(report["explain"]["kernel"], "reference")
        self.assertEqual(report["kernel"], "reference")
        self.attn("run", EXAMPLE, self.path("out"), "--backend", "reference", "--explain", says="reference runs")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
