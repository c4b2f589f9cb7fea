"""Graphs of PyTorch, on stand-ins: libamdhip64 whose memory is the host's (tests/mock) and a torch that has what attn asks of it.
What a kernel computes is not seen here, but which memory a graph's runs use, and that what must not run while a stream is captured
does not. test_frameworks has the same on a GPU."""
import ctypes
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import attn

MOCK = Path(attn.__file__).parents[2] / "mock" / "hip.so"

TORCH = '''
import ctypes
import numpy
driver = ctypes.CDLL("libamdhip64.so", mode=ctypes.RTLD_GLOBAL)
float8_e4m3fnuz, uint8, bfloat16, float32 = "torch.float8_e4m3fnuz", "torch.uint8", "torch.bfloat16", "torch.float32"
pool = []  # what was allocated while capturing: (address, bytes)

class Device:
    index = 0

class Tensor:
    __module__ = "torch"
    device, requires_grad = Device(), False
    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype
    __torch_dispatch__ = None
    def is_neg(self): return False
    def view(self, dtype): return Tensor(self.array, dtype)
    def data_ptr(self): return self.array.ctypes.data
    def __dlpack_device__(self): return (10, 0)

class Claimed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]

def to_dlpack(tensor):
    capsule = tensor.array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.POINTER(Claimed), [ctypes.py_object, ctypes.c_char_p]
    pointer(capsule, b"dltensor").contents.device_type = 10
    return capsule

def aligned(size):
    room = numpy.empty(size + 256, numpy.uint8)
    return room[-room.ctypes.data % 256:][:size]

def empty(shape, dtype, device):
    if dtype == uint8:
        array = aligned(shape)
        array[:] = 0xee
        pool.append((array.ctypes.data, shape, array))
    else:
        array = numpy.empty(shape, {"torch.bfloat16": numpy.uint16, "torch.float32": numpy.float32}[dtype])
    return Tensor(array, dtype)

def is_grad_enabled(): return False

class cuda:
    stream, capturing = 0, False
    def current_device(): return 0
    def is_current_stream_capturing(): return cuda.capturing
    class current_stream:
        def __init__(self, device): self.cuda_stream = cuda.stream
'''

PROGRAM = '''
import ctypes, numpy, torch, attn
driver = torch.driver
def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    assert code == 0, (name, code)

def tensors():
    return [torch.Tensor(torch.aligned(1 * 64 * 2 * 64).reshape(1, 64, 2, 64), torch.float8_e4m3fnuz) for _ in range(3)]
out = torch.Tensor(torch.aligned(2 * 64 * 2 * 64).view(numpy.float16).reshape(1, 64, 2, 64), torch.float32)

def stream():
    made = ctypes.c_void_p()
    call("hipStreamCreateWithFlags", ctypes.byref(made), 1)
    return made

def capture(where, work):
    call("hipStreamBeginCapture", where, 0)
    torch.cuda.stream, torch.cuda.capturing = where.value, True
    work()
    torch.cuda.stream, torch.cuda.capturing = 0, False
    graph = ctypes.c_void_p()
    call("hipStreamEndCapture", where, ctypes.byref(graph))
    made = ctypes.c_void_p()
    call("hipGraphInstantiate", ctypes.byref(made), graph, None, None, 0)
    return made

q, k, v = tensors()
'''


@unittest.skipUnless(MOCK.exists(), "this build has no stand-in for libamdhip64")
@unittest.skipUnless(any(k["backend"] == "hip" and k["in_build"] for k in attn.info()["kernels"]), "this build has no gfx9 kernels")
@unittest.skipIf("LD_PRELOAD" in os.environ, "the stand-in's memory is not the sanitizer's")
class Capture(unittest.TestCase):
    def run_program(self, text):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "libamdhip64.so").symlink_to(MOCK)
            (folder / "libamdhip64.so.6").symlink_to(MOCK)
            utils = folder / "torch" / "utils"
            utils.mkdir(parents=True)
            (folder / "torch" / "__init__.py").write_text(TORCH)
            (utils / "__init__.py").write_text("")
            (utils / "dlpack.py").write_text("from torch import to_dlpack\n")
            environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
            done = subprocess.run([sys.executable, "-c", PROGRAM + text], env=environment, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])

    def test_graphs_have_workspaces_of_their_own(self):
        """A plan's and forward()'s: contexts, modules and plans are made while the stream is captured, the workspace is the
        graph's memory, and its first state a node."""
        self.run_program('''
first, second, third = stream(), stream(), stream()
calls = {}
def forward():
    attn.forward(q, k, v, out=out)
def planned():
    calls.setdefault("plan", attn.Plan(q, k, v, out=out))(q, k, v, out=out)
graphs = [capture(first, forward), capture(second, planned), capture(third, planned)]
assert calls["plan"].workspace > 0
assert [size for _, size, _ in torch.pool] == [calls["plan"].workspace] * 3, torch.pool
memory = [array for _, _, array in torch.pool]
assert len({address for address, _, _ in torch.pool}) == 3
for array in memory:
    assert (array == 0xee).all()  # nothing ran yet
for i, graph in enumerate(graphs):
    for array in memory:
        array[:] = 0x55
    call("hipGraphLaunch", graph, first)
    for j, array in enumerate(memory):
        assert (array == (0 if i == j else 0x55)).all(), (i, j)
planned()  # beside captures: the plan's own workspace
forward()
assert len(torch.pool) == 3
# One that ran in the stream before has a workspace there, which is not the graph's.
capture(first, planned)
assert len(torch.pool) == 4
''')

    def test_failures_leave_the_capture_alone(self):
        """A call that is refused adds no node, and the stream can be captured again."""
        self.run_program('''
where = stream()
def refused():
    try:
        attn.forward(q, k, v, out=out, window=(1, -2))
    except attn.InvalidArgument:
        pass
    else:
        raise AssertionError
call("hipGraphLaunch", capture(where, refused), where)
assert torch.pool == []
capture(where, lambda: attn.forward(q, k, v, out=out))
assert len(torch.pool) == 1
''')

    def test_memory_of_growing_lengths(self):
        """Plans of 400 lengths in two streams: the driver has two workspaces, and each run finds its own zeroed."""
        self.run_program('''
part = lambda x, n: torch.Tensor(x.array[:, :n], x.dtype)
row = torch.Tensor(out.array[:, :1], torch.float32)
keys = torch.Tensor(torch.aligned(1 * 1024 * 2 * 64).reshape(1, 1024, 2, 64), torch.float8_e4m3fnuz)
streams, live, size = [stream().value, stream().value], set(), []
for n in range(1, 401):
    for torch.cuda.stream in streams:
        attn.forward(part(q, 1), part(keys, n), part(keys, n), out=row)
    live.add(driver.attn_mock_live_memory())
    size.append(attn.cache_info()["workspace_bytes"])
assert attn.cache_info()["misses"] == 400 and attn.cache_info()["workspaces"] == 2, attn.cache_info()
assert live == {2}, live
plan = attn.Plan(part(q, 1), part(keys, 400), part(keys, 400), out=row)
assert 2 * plan.workspace <= size[-1] <= 2 * (plan.workspace * 1.125 + 4096), (plan.workspace, size[-1])
attn.cache_clear()
assert driver.attn_mock_live_memory() == 0
''')


if __name__ == "__main__":
    unittest.main()
