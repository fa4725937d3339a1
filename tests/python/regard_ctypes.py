"""A small ctypes binding of include/regard/regard.h for the tests: NumPy arrays in and out.

The library is the shared object that the environment variable REGARD_LIBRARY names, by default
that of the release build. Arrays keep their strides; bf16 has a tagged dtype, BF16.
"""

import ctypes
import os
import pathlib
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t
from ctypes import c_uint64, c_void_p

import numpy as np

# ------------------------------------------------------------------------------------------ types

BF16 = np.dtype([("bf16", np.uint16)])
NONE, F64, F32, F16, BF16_CODE, BOOL, I32 = range(7)
CODES = {np.dtype(np.float64): F64, np.dtype(np.float32): F32, np.dtype(np.float16): F16,
         BF16: BF16_CODE, np.dtype(bool): BOOL, np.dtype(np.int32): I32}
DTYPES = {"f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
          "bf16": BF16, "bool": np.dtype(bool), "i32": np.dtype(np.int32)}
CAUSAL = {"none": 0, "top_left": 1, "bottom_right": 2}
PASS = {"forward": 0, "backward": 1}
DEVICE = {"cpu": 0, "cuda": 1, "chip": 2}


def to_bf16(values):
    """Round to nearest even; the result has dtype BF16."""
    values = np.ascontiguousarray(np.asarray(values, np.float32))
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded).reshape(values.shape).view(BF16)


def from_bf16(array):
    return (np.ascontiguousarray(array["bf16"]).astype(np.uint32) << 16).view(np.float32)


def store(values, dtype):
    """values as an array of dtype, rounded to nearest even."""
    return to_bf16(values) if dtype == BF16 else np.asarray(values).astype(dtype)


def load(array):
    """The exact values of a float array of any type, in float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is no news here
        return (from_bf16(array) if array.dtype == BF16 else array).astype(np.float64)


# ---------------------------------------------------------------------------------------- structs


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int32), ("rank", c_int32), ("sizes", c_int64 * 4),
                ("strides", c_int64 * 4)]


class Sized(ctypes.Structure):
    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(type(self)))
        self.keep = {}
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        """Arrays become tensors; the struct keeps them alive."""
        if isinstance(value, np.ndarray):
            self.keep[name] = value
            value = tensor(value)
        elif value is None and dict(self._fields_).get(name) is Tensor:
            value = Tensor()
        super().__setattr__(name, value)


class Attention(Sized):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, Tensor) for name in ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink",
                                       "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")]
        + [("max_seqlen_q", c_int64), ("max_seqlen_k", c_int64), ("scale", c_double),
           ("softcap", c_double), ("dropout_p", c_double), ("dropout_seed", c_uint64),
           ("dropout_offset", c_uint64), ("window_left", c_int64), ("window_right", c_int64),
           ("has_scale", c_int32), ("causal", c_int32), ("precision", c_int32),
           ("deterministic", c_int32), ("dropout_seed_words", c_void_p),
           ("row_spans", Tensor), ("key_spans", Tensor), ("q_positions", Tensor),
           ("k_position", c_int64), ("batch_begin", c_int64), ("head_begin", c_int64),
           ("visible", c_void_p), ("continue_from", c_int32), ("reserved", c_int32)])

    def __init__(self, q=None, k=None, v=None, *, causal="none", window=(-1, -1), scale=None,
                 dropout=(0.0, 0, 0), **fields):
        """dropout: p, seed and offset; the seed is a number, or an array that the call reads."""
        p, seed, offset = dropout
        if isinstance(seed, np.ndarray):
            fields |= {"dropout_seed_words": seed.ctypes.data}
            seed = 0
        super().__init__(q=q, k=k, v=v, causal=CAUSAL.get(causal, causal), window_left=window[0],
                         window_right=window[1], has_scale=scale is not None,
                         scale=scale if scale is not None else 0.0, dropout_p=p,
                         dropout_seed=seed, dropout_offset=offset, **fields)


class ForwardTensors(Sized):
    _fields_ = [("size", c_size_t), ("out", Tensor), ("lse", Tensor)]


class BackwardTensors(Sized):
    _fields_ = ([("size", c_size_t)]
                + [(name, Tensor) for name in ("out", "lse", "dout", "dlse", "dq", "dk", "dv",
                                               "dbias", "dsink")]
                + [("accumulate", c_int32), ("reserved", c_int32), ("delta", Tensor)])


EXECUTOR_TASK = ctypes.CFUNCTYPE(None, c_void_p, c_int)
EXECUTOR = ctypes.CFUNCTYPE(None, c_void_p, c_int, EXECUTOR_TASK, c_void_p)


class Run(Sized):
    _fields_ = [("size", c_size_t), ("device", c_int32), ("device_index", c_int32),
                ("device_name", c_char_p), ("stream", c_void_p), ("workspace", c_void_p),
                ("workspace_size", c_size_t), ("executor", EXECUTOR), ("executor_self", c_void_p),
                ("backend", c_char_p), ("threads", c_int32), ("gradients_follow", c_int32),
                ("allocator", c_void_p), ("allocator_self", c_void_p),
                ("multiprocessors", c_int32), ("reserved", c_int32)]

    def __init__(self, backend="", **fields):
        super().__init__(backend=backend.encode(), **fields)


class Explanation(Sized):
    _fields_ = [("size", c_size_t), ("supported", c_int32), ("reserved", c_int32),
                ("workspace", c_size_t), ("pairs", c_double), ("flops", c_double),
                ("backend", c_char * 64), ("kernel", c_char * 256)]


def tensor(array):
    """A view of a NumPy array of at most 4 dimensions; strides in elements."""
    result = Tensor(array.ctypes.data, CODES[array.dtype], array.ndim)
    for axis in range(array.ndim):
        assert array.strides[axis] % array.itemsize == 0
        result.sizes[axis] = array.shape[axis]
        result.strides[axis] = array.strides[axis] // array.itemsize
    if array.size == 0:  # NumPy gives such arrays strides of 0
        result.strides[:] = [1] * 4
    return result


# -------------------------------------------------------------------------------------- functions

LIBRARY = os.environ.get("REGARD_LIBRARY") or str(
    pathlib.Path(__file__).resolve().parents[2] / "build/release/libregard.so")
C = ctypes.CDLL(LIBRARY)
for _name, _types in {
    "forward": [POINTER(Attention), POINTER(ForwardTensors), POINTER(Run)],
    "backward": [POINTER(Attention), POINTER(BackwardTensors), POINTER(Run)],
    "workspace": [POINTER(Attention), c_int32, POINTER(Run), POINTER(c_size_t)],
    "explain": [POINTER(Attention), c_int32, POINTER(Run), POINTER(Explanation), c_char_p, c_size_t,
                POINTER(c_size_t)],
    "dropout_mask": [POINTER(Attention), POINTER(Tensor)],
    "dropout_probability": [c_double, POINTER(c_double)],
}.items():
    getattr(C, "regard_" + _name).argtypes = _types
for _name, _types in {
    "version": [], "status_name": [c_int32], "backend_name": [c_int32], "backend_note": [c_int32],
    "last_error": [], "last_error_argument": [], "last_error_value": [],
}.items():
    getattr(C, "regard_" + _name).argtypes = _types
    getattr(C, "regard_" + _name).restype = c_char_p


class RegardError(Exception):
    """A failed call: status ("invalid_argument", ...), argument and value."""

    def __init__(self, status):
        super().__init__(C.regard_last_error().decode())
        self.status = C.regard_status_name(status).decode()
        self.argument = C.regard_last_error_argument().decode()
        self.value = C.regard_last_error_value().decode()


def check(status):
    if status != 0:
        raise RegardError(status)


def forward(attention, out, lse=None, **run):
    tensors = ForwardTensors(out=out, lse=lse)
    check(C.regard_forward(byref(attention), byref(tensors), byref(Run(**run))))


def backward(attention, out, lse, dout, dlse=None, accumulate=False, gradients=None, delta=None,
             **run):
    """gradients: a dict of dq, dk, dv, dbias, dsink; each may be absent."""
    tensors = BackwardTensors(out=out, lse=lse, dout=dout, dlse=dlse, accumulate=accumulate,
                              delta=delta, **(gradients or {}))
    check(C.regard_backward(byref(attention), byref(tensors), byref(Run(**run))))


def workspace(attention, which, **run):
    size = c_size_t()
    check(C.regard_workspace(byref(attention), PASS[which], byref(Run(**run)), byref(size)))
    return size.value


def explain(attention, which, **run):
    """The text and the numbers."""
    numbers, needed = Explanation(), c_size_t()
    arguments = byref(attention), PASS[which], byref(Run(**run)), byref(numbers)
    check(C.regard_explain(*arguments, None, 0, byref(needed)))
    text = ctypes.create_string_buffer(needed.value)
    check(C.regard_explain(*arguments, text, needed.value, None))
    return text.value.decode(), numbers


def dropout_mask(attention, keep):
    check(C.regard_dropout_mask(byref(attention), byref(tensor(keep))))


def dropout_probability(p):
    realised = c_double()
    check(C.regard_dropout_probability(p, byref(realised)))
    return realised.value


def backends(available=True):
    """The names of the backends that this machine can run (or of all)."""
    return [C.regard_backend_name(index).decode() for index in range(C.regard_backend_count())
            if C.regard_backend_available(index) or not available]
