"""A module `cupy` whose arrays lie on the tests' own GPU: as much of CuPy as calls of Regard use.

Needs LD_LIBRARY_PATH to name the folder of the tests' libcuda.so.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import types
import weakref

import numpy as np

driver = ctypes.CDLL("libcuda.so.1")
driver.regard_fake_context.restype = ctypes.c_void_p
driver.regard_fake_stream.restype = ctypes.c_void_p
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
capturing: set[int] = set()  # streams
live: set[int] = set()  # addresses


class Stream:
    def __init__(self, ptr=0):
        self.ptr = ptr or driver.regard_fake_stream(context)


class Memory:
    device_id = 0

    def __init__(self, size):
        address = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(size, 256))) == 0
        self.ptr = address.value
        live.add(self.ptr)
        weakref.finalize(self, live.discard, self.ptr)


class Device(contextlib.nullcontext):
    id = 0


class ndarray:  # noqa: N801
    def __init__(self, shape, dtype, data=None):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.strides = np.empty(self.shape, self.dtype).strides
        self.data = data or Memory(math.prod(self.shape) * self.itemsize)
        self.device = Device()

    def __dlpack__(self):
        raise NotImplementedError  # it is there, but CuPy's arrays are read without it

    @classmethod
    def zeros(cls, shape, dtype):
        return to_gpu(np.zeros(shape, dtype))

    def fill(self, value):
        host = np.full(self.shape, value, self.dtype)
        ctypes.memmove(self.data.ptr, host.ctypes.data, host.nbytes)

    def __setitem__(self, key, value):
        assert key is ...
        self.fill(value)

    def view(self):
        return ndarray(self.shape, self.dtype, self.data)

    def copy(self):
        return to_gpu(to_host(self))


def to_gpu(x):
    """A copy; the memory of this GPU is the host's."""
    made = ndarray(x.shape, x.dtype)
    ctypes.memmove(made.data.ptr, np.ascontiguousarray(x).ctypes.data, x.nbytes)
    return made


def to_host(x):
    made = np.empty(x.shape, x.dtype)
    ctypes.memmove(made.ctypes.data, x.data.ptr, made.nbytes)
    return made


default = Stream.__new__(Stream)
default.ptr = 0
current = [default]


@contextlib.contextmanager
def on(stream):
    current.append(stream)
    yield
    current.pop()


def launches():
    """So far, from the first question on."""
    return driver.regard_fake_calls(b"cuLaunchKernelEx")


module = types.ModuleType("cupy")
ndarray.__module__ = "cupy"
module.ndarray, module.empty, module.zeros = ndarray, ndarray, ndarray.zeros
module.cuda = types.SimpleNamespace(
    get_current_stream=lambda: current[-1],
    runtime=types.SimpleNamespace(getDevice=lambda: 0,
                                  streamIsCapturing=lambda ptr: ptr in capturing))
sys.modules["cupy"] = module
