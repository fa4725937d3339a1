"""libcuda through ctypes: memory, streams and the context that PyTorch and the library share."""

import ctypes
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR = 75, 76
NON_BLOCKING = 1

FUNCTIONS = {
    "cuInit": [c_uint],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxCreate_v2": [POINTER(c_void_p), c_uint, c_int],
    "cuCtxDestroy_v2": [c_void_p],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamSynchronize": [c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class CudaError(Exception):
    """A failed call of the driver. After a fault in a kernel every later call fails like this."""


class Driver:
    """One GPU's primary context. Every thread must call attach() before it does anything else."""

    def __init__(self, index=0):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no NVIDIA driver: {error}") from None
        for name, types in FUNCTIONS.items():
            getattr(self.library, name).argtypes = types
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value <= index:
            raise CudaError(f"no GPU {index}: there are {count.value}")
        device = c_int()
        self.call("cuDeviceGet", byref(device), index)
        self.device = device.value
        self.context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), self.device)
        self.local = threading.local()
        self.attach()

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            text = c_char_p()
            self.library.cuGetErrorName(status, byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({status})")

    # ------------------------------------------------------------------------------ the device

    def name(self):
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, self.device)
        return text.value.decode()

    def capability(self):
        values = []
        for attribute in (ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR):
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), attribute, self.device)
            values.append(value.value)
        return 10 * values[0] + values[1]

    def free_bytes(self):
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    # ---------------------------------------------------------------------------- the context

    def attach(self):
        self.call("cuCtxSetCurrent", self.context)

    def detach(self):
        self.call("cuCtxSetCurrent", None)

    def current(self):
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        return context.value

    def another_context(self):
        """A second context on the same GPU; the current one stays what it was."""
        context = c_void_p()
        self.call("cuCtxCreate_v2", byref(context), 0, self.device)
        self.attach()
        return context

    def is_broken(self):
        """Whether a kernel has faulted: then nothing works in this process any more."""
        return self.library.cuCtxSynchronize() != 0

    # ----------------------------------------------------------------------------- streams

    def stream(self):
        """A stream of the calling thread, made once."""
        if not hasattr(self.local, "stream"):
            if self.current() is None:  # a thread that is new to the GPU
                self.attach()
            self.local.stream = self.new_stream()
        return self.local.stream

    def new_stream(self):
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), NON_BLOCKING)
        return stream

    def wait(self, stream):
        self.call("cuStreamSynchronize", stream)

    # ------------------------------------------------------------------------------ memory

    def allocate(self, size):
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), max(size, 256))
        return address.value

    def free(self, address):
        self.call("cuMemFree_v2", address)

    def upload(self, address, array, stream):
        self.call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, stream)

    def download(self, array, address, stream):
        self.call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, stream)
        self.wait(stream)

    def fill(self, address, byte, size, stream):
        if size:
            self.call("cuMemsetD8Async", address, byte, size, stream)


class HostDriver:
    """The same words for the host's memory: a dry run of the tests' own machinery on the CPU."""

    def __init__(self):
        self.blocks = {}

    def name(self):
        return "host memory (a dry run)"

    def capability(self):
        return 0

    def attach(self):
        pass

    def is_broken(self):
        return False

    def stream(self):
        return None

    def wait(self, stream):
        pass

    def allocate(self, size):
        block = ctypes.create_string_buffer(size + 256)
        address = ctypes.addressof(block)
        address += -address % 256
        self.blocks[address] = block
        return address

    def free(self, address):
        del self.blocks[address]

    def upload(self, address, array, stream):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array, address, stream):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def fill(self, address, byte, size, stream):
        ctypes.memset(address, byte, size)
