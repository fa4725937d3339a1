"""The library on a GPU for tests that speak NumPy.

forward, backward, workspace and explain stand in for those of regard_ctypes (see install). A call
copies the whole memory behind every array (gaps, padding and all) side by side into one block of
device memory, with guards of NaN between them, and the workspace behind them, full of NaN as well.
Afterwards everything comes back: what is no output must not have changed by a byte.
"""

import ctypes
import threading
from ctypes import byref, c_void_p

import numpy as np

import driver
import regard_ctypes as regard

GUARD = 512      # bytes, at least, before, between and after what a call is given
ALIGNMENT = 256  # of the beginning of each room
POISON = 0xFF    # a NaN in every float type

OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
CPU = {name: getattr(regard, name) for name in ("forward", "backward", "workspace", "explain",
                                                "backends")}


class State:
    """How calls are made; tests change it through the fixtures of conftest.py."""

    driver = None
    deterministic = None     # True or False: overrides what the attention says
    own_workspace = True     # give a workspace of exactly the bytes asked for; else the library's
    on_host = frozenset()    # names of tensors whose pointers stay the host's: errors to be found


STATE = State()
LOCAL = threading.local()


def is_host():
    return isinstance(STATE.driver, driver.HostDriver)


# ------------------------------------------------------------------------------------ the memory


def bounds(array):
    """Addresses of an array's first byte and of the one after its last."""
    low = array.ctypes.data
    if array.size == 0:
        return low, low
    high = low + array.itemsize
    for size, stride in zip(array.shape, array.strides):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return low, high


def extent(array):
    """The memory that an array is a view of."""
    low, high = bounds(array)
    owner = array.base
    while owner is not None:
        if isinstance(owner, np.ndarray) and owner.size:
            begin, end = bounds(owner)
            low, high = (begin, end) if low == high else (min(low, begin), max(high, end))
        owner = getattr(owner, "base", None)
    return low, high


def memory(begin, end):
    return np.frombuffer((ctypes.c_ubyte * (end - begin)).from_address(begin), np.uint8)


class Rooms:
    """Where the memory behind each array lies in the block of a call."""

    def __init__(self, arrays):
        self.names = {name: extent(array) for name, array in arrays.items() if array.size}
        merged = []
        for begin, end in sorted(self.names.values()):
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.places, offset = [], GUARD
        for begin, end in merged:
            offset += -offset % ALIGNMENT
            self.places.append((begin, end, offset))
            offset += end - begin + GUARD
        self.workspace = offset + -offset % ALIGNMENT
        self.outputs = set()

    def offset(self, address):
        """Of a byte of an array's; an empty array has none, and gets a place in a guard."""
        for begin, end, offset in self.places:
            if begin <= address < end:
                return offset + address - begin
        return 0

    def place_of(self, name):
        begin, _ = self.names[name]
        return next(place for place in self.places if place[0] <= begin < place[1])

    def name_at(self, offset):
        for begin, end, start in self.places:
            names = [name for name, (low, _) in self.names.items() if begin <= low < end]
            if start <= offset < start + end - begin:
                return f"byte {offset - start} of {'/'.join(names)}"
            if offset < start:
                return f"{start - offset} bytes before {'/'.join(names)}"
        return f"byte {offset}, after everything"


class Block:
    """Device memory that grows; one for each thread."""

    def __init__(self):
        self.address, self.size = 0, 0

    def reserve(self, size):
        if size > self.size:
            if self.address:
                STATE.driver.free(self.address)
                self.address = self.size = 0
            size = size * 5 // 4
            self.address = STATE.driver.allocate(size)
            self.size = size
        return self.address


def block():
    if not hasattr(LOCAL, "block"):
        STATE.driver.attach()
        LOCAL.block = Block()
    return LOCAL.block


# --------------------------------------------------------------------------------------- a call


def arrays_of(*structs):
    """The NumPy arrays that the structs' tensors are views of, by name; the first of a name."""
    found = {}
    for struct in structs:
        for name, array in struct.keep.items():
            if getattr(struct, name).data == array.ctypes.data:
                found.setdefault(name, array)
    return found


def moved(struct, rooms, base):
    """A copy of a struct whose tensors lie in the block at base; null pointers without one."""
    copy = type(struct).from_buffer_copy(struct)
    for name, array in struct.keep.items():
        tensor = getattr(copy, name)
        if name in STATE.on_host:
            continue
        if tensor.data == array.ctypes.data and tensor.type != regard.NONE:
            offset = rooms.offset(tensor.data if array.size else -1)
            tensor.data = base + offset if base else None
    return copy


def run_fields(backend="", threads=0, executor=None, device=None, **fields):
    """Run's fields; what only the CPU takes is left out (kept on a dry run)."""
    if is_host():
        more = {"threads": threads} | ({} if executor is None else {"executor": executor})
        return {"backend": backend, "device": device or 0} | more | fields
    fields.setdefault("stream", STATE.driver.stream())
    return {"backend": backend, "device": 1 if device is None else device} | fields


def workspace_size(attention, which, run):
    size = ctypes.c_size_t()
    status = regard.C.regard_workspace(byref(attention), regard.PASS[which], byref(run),
                                       byref(size))
    return size.value if status == 0 else 0  # what is refused is refused again by the call


def call(which, attention, tensors, backend="", **fields):
    """cuda:wgmma may refuse, for a reason of NOT_WGMMA: then the library's own choice must do."""
    try:
        return call_once(which, attention, tensors, backend=backend, **fields)
    except regard.RegardError as error:
        explained = error.argument == "backend" and any(why in str(error) for why in NOT_WGMMA)
        if backend != "cuda:wgmma" or not explained:
            raise
    return call_once(which, attention, tensors, backend="cuda", **fields)


def call_once(which, attention, tensors, **fields):
    machine = STATE.driver
    fields = run_fields(**fields)
    rooms = Rooms(arrays_of(attention, tensors))
    own = STATE.own_workspace and "workspace" not in fields
    size = 0
    if own:
        asked = moved(attention, rooms, None)
        adjust(asked)
        size = workspace_size(asked, which, regard.Run(**fields))
    total = rooms.workspace + size + GUARD
    base = block().reserve(total)
    sent = np.full(total, POISON, np.uint8)
    for begin, end, offset in rooms.places:
        sent[offset : offset + end - begin] = memory(begin, end)
    stream = fields.get("stream")
    machine.upload(base, sent, stream)
    there = moved(attention, rooms, base), moved(tensors, rooms, base)
    adjust(there[0])
    if own and size:
        fields |= {"workspace": c_void_p(base + rooms.workspace), "workspace_size": size}
    run = regard.Run(**fields)
    status = getattr(regard.C, "regard_" + which)(byref(there[0]), byref(there[1]), byref(run))
    error = regard.RegardError(status) if status else None
    got = np.empty_like(sent)
    machine.download(got, base, stream)
    take_back(rooms, tensors, sent, got, size, error)
    if error:
        raise error


def adjust(attention):
    if STATE.deterministic is not None:
        attention.deterministic = int(STATE.deterministic)


def take_back(rooms, tensors, sent, got, workspace, error):
    """Copies the outputs' rooms to the host; what is no element of theirs must be as before."""
    may_change = np.zeros(len(sent), bool)
    may_change[rooms.workspace : rooms.workspace + workspace] = True
    written = {name: array for name, array in tensors.keep.items()
               if name in OUTPUTS and name in rooms.names and is_output(tensors, name)}
    for name, array in {} if error else written.items():
        begin, end, offset = rooms.place_of(name)
        part = slice(offset, offset + end - begin)
        np.ndarray((*array.shape, array.itemsize), bool, may_change[part],
                   array.ctypes.data - begin, (*array.strides, 1))[...] = True
        memory(begin, end)[...] = got[part]
    changed = np.flatnonzero((sent != got) & ~may_change)
    if len(changed):
        what = f"after an error ({error})" if error else "that are no output's"
        raise AssertionError(f"{len(changed)} bytes {what} were written; the first: "
                             + rooms.name_at(int(changed[0])))


def is_output(tensors, name):
    return isinstance(tensors, regard.ForwardTensors) or name not in ("out", "lse")


# ------------------------------------------------------------------- in place of regard_ctypes'


def forward(attention, out, lse=None, **run):
    call("forward", attention, regard.ForwardTensors(out=out, lse=lse), **run)


def backward(attention, out, lse, dout, dlse=None, accumulate=False, gradients=None, delta=None,
             **run):
    call("backward", attention,
         regard.BackwardTensors(out=out, lse=lse, dout=dout, dlse=dlse, accumulate=accumulate,
                                delta=delta, **(gradients or {})), **run)


def workspace(attention, which, **run):
    return CPU["workspace"](attention, which, **run_fields(**run))


def explain(attention, which, **run):
    return CPU["explain"](attention, which, **run_fields(**run))


def install(chosen):
    """Makes the tests of tests/python call the GPU. Returns why that cannot be, or ""."""
    try:
        STATE.driver = driver.HostDriver() if chosen == "host" else driver.Driver()
    except driver.CudaError as error:
        return str(error)
    for function in (forward, backward, workspace, explain):
        setattr(regard, function.__name__, function)
    regard.backends = lambda available=True: backends()
    if is_host():
        return ""
    try:
        tiny = np.ones((1, 1, 1, 8), np.float32)
        forward(regard.Attention(tiny, tiny, tiny), tiny.copy(), backend="cuda:simt")
    except regard.RegardError as error:
        return str(error) if error.status == "unavailable" else ""
    except driver.CudaError:
        return ""
    return ""


# ---------------------------------------------------------------------------------- the backends

# Each is tested by the tests that take `backend`; those of LEVELS by fewer.
FAMILIES = {"cuda:mma": ("f32", "bf16", "f16"), "cuda:simt": ("f64", "f32", "bf16", "f16")}
HOPPER = {"cuda:wgmma": ("f32", "bf16", "f16")}  # of capability 9.0 alone
NOT_WGMMA = ("f64 is computed without", "wgmma kernels compute f32 in full precision",
             "wgmma kernels have no tile", "no tile of these head sizes fits",
             "TMA cannot load", "there is no key to load")
LEVELS = {"cuda:mma75": ("f16",), "cuda:mma80": ("f32", "bf16", "f16"),
          "cuda:mma/99": ("f32", "bf16", "f16"), "cuda:mma/163": ("f32", "bf16", "f16")}


def backends():
    if is_host():
        return [name for name in CPU["backends"]() if name in ("cpu:avx2", "reference")]
    machine = STATE.driver
    hopper = machine is not None and machine.capability() == 90
    return list(FAMILIES | HOPPER if hopper else FAMILIES)


def levels():
    return ["cpu:avx2"] if is_host() else list(LEVELS)


def takes(backend, type):
    return type in types_of(backend)


def types_of(backend):
    return (FAMILIES | HOPPER | LEVELS).get(backend, ("f64", "f32", "bf16", "f16"))
