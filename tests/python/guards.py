"""Guard bands: memory before and behind what a call may write, which must stay as it is."""

import ctypes

import numpy as np

BAND = 256      # bytes
PATTERN = 0xA5
POISON = 0xFF   # a NaN in every float type: what a workspace holds before a call
ALIGNMENT = 256  # bytes; as much as any backend asks for


def guarded(array, owner):
    """The same view of a copy of its owner's memory that has a band before it and one behind it."""
    bands = np.full(owner.nbytes + 2 * BAND + ALIGNMENT, PATTERN, np.uint8)
    begin = BAND + (owner.ctypes.data - bands.ctypes.data - BAND) % ALIGNMENT
    bands[begin : begin + owner.nbytes] = np.frombuffer(owner.tobytes("A"), np.uint8)
    offset = begin + array.ctypes.data - owner.ctypes.data
    return np.ndarray(array.shape, array.dtype, bands, offset, array.strides)


class Workspace:
    """Memory of exactly so many bytes for one call."""

    def __init__(self, size):
        self.size = size
        self.memory = np.full(size + 2 * BAND + ALIGNMENT, PATTERN, np.uint8)
        self.begin = BAND + (-self.memory.ctypes.data - BAND) % ALIGNMENT
        self.memory[self.begin : self.begin + size] = POISON

    def arguments(self):
        if self.size == 0:
            return {}
        return {"workspace": ctypes.c_void_p(self.memory.ctypes.data + self.begin),
                "workspace_size": self.size}

    def check(self, what):
        outside = np.delete(self.memory, np.s_[self.begin : self.begin + self.size])
        places = np.flatnonzero(outside != PATTERN)
        if places.size:
            first = places[0] - self.begin + (self.size if places[0] >= self.begin else 0)
            raise AssertionError(f"{what}: {places.size} bytes outside its workspace of {self.size} "
                                 f"bytes were written, the first at byte {first}")
