"""HIP's module functions over libattn-hipemu.so, as far as foreign kernels need them."""
import ctypes
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

LEVELS = {"strict": 0, "isa": 1}


class EmulatorOptions(ctypes.Structure):
    """attn_emu_options of tools/gfx9emu/runtime/hipemu.h."""
    _fields_ = [("checks_off", c_int32), ("hazards_off", c_int32), ("seed", c_uint64),
                ("instruction_budget", c_uint64), ("threads", c_int32), ("level", c_int32), ("gfx", c_int32)]


class Fault(Exception):
    pass


class Hip:
    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        self.library.attn_emu_last_fault.restype = c_char_p
        self.library.attn_emu_last_counters.restype = c_char_p
        for name, types in {
                "hipMalloc": [POINTER(c_void_p), c_size_t], "hipFree": [c_void_p],
                "hipMemcpy": [c_void_p, c_void_p, c_size_t, ctypes.c_int],
                "hipModuleLoad": [POINTER(c_void_p), c_char_p], "hipModuleUnload": [c_void_p],
                "hipModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
                "hipModuleLaunchKernel": [c_void_p] + [c_uint] * 7 + [c_void_p] * 3}.items():
            getattr(self.library, name).argtypes = types

    def configure(self, checks=True, level="strict", threads=0, seed=0):
        self.library.attn_emu_configure(byref(EmulatorOptions(
            checks_off=not checks, level=LEVELS[level], threads=threads, seed=seed)))

    def call(self, name, *arguments):
        if getattr(self.library, name)(*arguments) != 0:
            raise Fault(self.library.attn_emu_last_fault().decode())

    def put(self, array):
        """The address of a copy on the device."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        self.call("hipMemcpy", address, array.ctypes.data, array.nbytes, 1)
        return address

    def empty(self, size):
        address = c_void_p()
        self.call("hipMalloc", byref(address), size)
        return address.value

    def get(self, address, shape, dtype):
        array = np.empty(shape, dtype)
        self.call("hipMemcpy", array.ctypes.data, address, array.nbytes, 2)
        return array

    def free(self, *addresses):
        for address in addresses:
            self.call("hipFree", address)

    def function(self, path, name):
        module, function = c_void_p(), c_void_p()
        self.call("hipModuleLoad", byref(module), str(path).encode())
        self.call("hipModuleGetFunction", byref(function), module, name.encode())
        return function

    def launch(self, function, grid, block, kernarg, shared=0):
        buffer = ctypes.create_string_buffer(bytes(kernarg), len(kernarg))
        size = c_size_t(len(kernarg))
        extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 3)
        self.call("hipModuleLaunchKernel", function, *grid, *block, shared, None, None,
                  ctypes.addressof(extra))
