"""What may be written to: read-only memory is refused by name, PyTorch's tensors keep their books."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
import regard
from regard import _core

SHAPE = (1, 2, 8, 16)


def rows(seed=0):
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def read_only_arrays(tmp_path):
    flagged = np.zeros(SHAPE, np.float32)
    flagged.flags.writeable = False
    path = tmp_path / "rows"
    path.write_bytes(bytes(4 * 256))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {"flag": flagged, "bytes": np.frombuffer(bytes(4 * 256), np.float32).reshape(SHAPE),
            "memmap": np.memmap(path, np.float32, "r", shape=SHAPE),
            "mmap": np.frombuffer(mapped, np.float32).reshape(SHAPE),
            "broadcast": np.broadcast_to(np.zeros(SHAPE[2:], np.float32), SHAPE)}


@pytest.mark.parametrize("kind", ["flag", "bytes", "memmap", "mmap", "broadcast"])
def test_read_only_memory_is_refused(kind, tmp_path):
    array, q = read_only_arrays(tmp_path)[kind], rows()
    with pytest.raises(regard.InvalidArgument, match="out = a read-only array: must be writable"):
        regard.attention(q, q, q, out=array)
    with pytest.raises(ValueError, match="lse = a read-only array"):
        regard.attention(q, q, q, lse=array[..., 0])
    out, lse = regard.attention(q, q, q, return_lse=True)
    for name in ("dq", "dk", "dv"):
        with pytest.raises(regard.InvalidArgument, match=f"{name} = a read-only array"):
            regard.attention_backward(q, q, q, q, out, lse, into=regard.Gradients(**{name: array}))
    assert not array.any()


class Speaks:
    """An array known by DLPack alone."""

    def __init__(self, array, device=None):
        self.array, self.shape, self.dtype, self.device = array, array.shape, array.dtype, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_read_only_dlpack_is_refused():
    array, q = np.zeros(SHAPE, np.float32), rows()
    regard.attention(q, q, q, out=Speaks(array))
    assert array.any()
    before = array.copy()
    array.flags.writeable = False
    with pytest.raises(regard.InvalidArgument, match="out = a read-only array"):
        regard.attention(q, q, 2 * q, out=Speaks(array))
    assert (array == before).all()


def test_a_gpu_without_a_number_is_no_host_memory():
    """A capsule by hand: its device is (CUDA, -1), its memory this process's own."""
    import ctypes

    class Managed(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                    ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                    ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                    ("shape", ctypes.POINTER(ctypes.c_int64)),
                    ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
                    ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p,
                                                     ctypes.c_void_p]
    memory = np.zeros(SHAPE, np.float32)
    sizes = (ctypes.c_int64 * 4)(*SHAPE)
    tensor = Managed(memory.ctypes.data, 2, -1, 4, 2, 32, 1, sizes, None, 0, None, None)

    class Hostile:
        shape = SHAPE

        def __dlpack__(self, **options):
            return make(ctypes.addressof(tensor), b"dltensor", None)

        def __dlpack_device__(self):
            return (2, -1)

    with pytest.raises(regard.InvalidArgument, match=r"q = device \(2, -1\) of DLPack"):
        _core.Array.of(Hostile(), "q")


def test_jax_arrays_are_never_written():
    jnp = pytest.importorskip("jax.numpy")
    q, out = rows(), jnp.zeros(SHAPE)
    with pytest.raises(regard.Unsupported, match="out = an array of JAX: cannot be written to"):
        regard.attention(q, q, q, out=out)
    assert not np.asarray(out).any()


# ----------------------------------------------------------------------------------------- PyTorch

torch = pytest.importorskip("torch")


def tensors(count):
    return [torch.from_numpy(rows(seed)) for seed in range(count)]


def test_lazily_negated_tensors_are_resolved():
    q, k, v = tensors(3)
    negated = [torch._neg_view(x) for x in (q, k, v)]
    bias = torch.randn(8, 8)
    out, lse = torch.empty(SHAPE), torch.empty(SHAPE[:3])
    regard.attention(*negated, bias=torch._neg_view(bias), out=out, lse=lse)
    want, want_lse = regard.attention(-q, -k, -v, bias=-bias, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    got = regard.attention_backward(torch._neg_view(q), *negated, out, lse, bias=bias)
    wanted = regard.attention_backward(-q, -q, -k, -v, out, lse, bias=bias)
    assert all(torch.equal(getattr(got, name), getattr(wanted, name))
               for name in ("dq", "dk", "dv", "dbias"))
    with pytest.raises(regard.InvalidArgument, match="out = a lazily negated tensor"):
        regard.attention(q, k, v, out=torch._neg_view(out))


def test_autograd_notices_a_write():
    q, k, v, out = tensors(4)
    lse = torch.empty(SHAPE[:3])
    weight = torch.ones(SHAPE, requires_grad=True)
    kept = (weight * out).sum() + (weight[..., 0] * lse).sum()  # autograd keeps out and lse
    regard.attention(q, k, v, out=out, lse=lse)
    assert (out._version, lse._version) == (1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    dq = torch.zeros(SHAPE)
    regard.attention_backward(q, q, k, v, out, lse, into=regard.Gradients(dq=dq))
    assert dq._version == 1
    with torch.inference_mode():
        regard.attention(q, k, v, out=torch.empty(SHAPE))


def test_outputs_carry_no_gradient():
    q, k, v = tensors(3)
    leaf = torch.zeros(SHAPE, requires_grad=True)
    for x in (leaf, leaf * 1):
        with pytest.raises(regard.InvalidArgument, match="out = a tensor that requires grad"):
            regard.attention(q, k, v, out=x)
    with torch.no_grad():
        regard.attention(q, k, v, out=leaf)
    assert torch.equal(leaf, regard.attention(q, k, v))


# ------------------------------------------------------------------------------------- the process

def run(text):
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)


def test_subinterpreters_are_refused_and_do_no_harm():
    done = run("""
import sys
import numpy as np
import regard
try:
    import _interpreters as interpreters
    new = lambda: interpreters.create("legacy")
    run = lambda one, text: print(interpreters.exec(one, text))
except ImportError:
    import _xxsubinterpreters as interpreters
    new = lambda: interpreters.create(**({"isolated": False} if sys.version_info < (3, 13) else {}))
    run = interpreters.run_string
for _ in range(2):
    one = new()
    try:
        run(one, f"import sys; sys.path[:0] = {sys.path!r}; import regard")
    except Exception as error:
        print(error)
    interpreters.destroy(one)
q = np.ones((1, 1, 4, 8), np.float32)
assert (regard.attention(q, q, q) == 1).all()
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("main interpreter only") == 2, done.stdout


def test_a_daemon_thread_does_not_end_the_process():
    """It computes while the interpreter ends, and comes back to one that is no longer there."""
    for _ in range(3):
        done = run("""
import threading, time
import numpy as np
import regard
q = np.ones((1, 4, 256, 64), np.float32)
def work():
    while True:
        regard.attention(q, q, q)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("at the end")
""")
        assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")
