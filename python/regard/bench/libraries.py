"""Builds of the library, several in one process: the C API (include/regard/regard.h) by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import Error
from ..options import ARRAYS
from .memory import Memory
from .problem import Problem
from .side import Side

VERSION = "0.2."  # of the API whose structs stand below
TYPES = {"f64": 1, "f32": 2, "f16": 3, "bf16": 4, "bool": 5, "i32": 6}
CAUSAL = ("none", "top_left", "bottom_right")
PRECISION = ("full", "tf32", "bf16")


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int32), ("rank", c_int32), ("sizes", c_int64 * 4),
                ("strides", c_int64 * 4)]


def _fields(type: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, type) for name in names.split()]


class Sized(ctypes.Structure):
    def __init__(self, **values: Any) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), **values)


class Attention(Sized):
    _fields_ = [
        ("size", c_size_t),
        *_fields(Tensor, "q k v bias mask alibi_slopes sink cu_seqlens_q cu_seqlens_k seqused_q "
                         "seqused_k"),
        *_fields(c_int64, "max_seqlen_q max_seqlen_k"),
        *_fields(c_double, "scale softcap dropout_p"),
        *_fields(c_uint64, "dropout_seed dropout_offset"),
        *_fields(c_int64, "window_left window_right"),
        *_fields(c_int32, "has_scale causal precision deterministic")]


class ForwardTensors(Sized):
    _fields_ = [("size", c_size_t), *_fields(Tensor, "out lse")]


class BackwardTensors(Sized):
    _fields_ = [("size", c_size_t), *_fields(Tensor, "out lse dout dlse dq dk dv dbias dsink"),
                *_fields(c_int32, "accumulate reserved")]


class Run(Sized):
    _fields_ = [("size", c_size_t), *_fields(c_int32, "device device_index"),
                ("device_name", c_char_p), *_fields(c_void_p, "stream workspace"),
                ("workspace_size", c_size_t), *_fields(c_void_p, "executor executor_self"),
                ("backend", c_char_p), *_fields(c_int32, "threads reserved")]


def tensor(name: str, x: Any, memory: Memory) -> Tensor:
    """A view of an argument's array in this memory; of None, a tensor that is not given."""
    if x is None:
        return Tensor()
    array: _core.Array = memory.view(x, name)
    rank = len(array.shape)
    pad = (0,) * (4 - rank)
    return Tensor(x.data_ptr() if memory.cuda else x.ctypes.data, TYPES[array.type], rank,
                  (*array.shape, *pad), (*array.strides, *pad))


class Library:
    """One build. Errors: ValueError that names the file where it is no library, or of another API."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        try:  # by its whole path, because dlopen looks for a name without "/" in the system's folders
            self.c = ctypes.CDLL(str(Path(path).resolve(strict=True)), mode=ctypes.RTLD_LOCAL)
            for function in ("regard_version", "regard_last_error"):
                getattr(self.c, function).restype = c_char_p
        except AttributeError as error:
            raise ValueError(f"{path}: is no build of Regard: {error}") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            why = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"{path}: cannot be loaded: {why}") from error
        self.version = self.c.regard_version().decode()
        if not self.version.startswith(VERSION):
            raise ValueError(f"{path}: version {self.version}, and only {VERSION}* can be compared")

    def check(self, status: int) -> None:
        if status:
            raise Error(self.c.regard_last_error().decode())

    def side(self, problem: Problem, which: str, backend: str, threads: int) -> Side:
        """A call of "fwd" or "bwd". Results are NaN until it is called."""
        memory, p = problem.memory, problem
        attention = attention_of(problem)
        written = {"out": p.out, "lse": p.lse} if which == "fwd" else p.gradients
        given = {} if which == "fwd" else {"out": p.out, "lse": p.lse, "dout": p.dout,
                                           "dlse": p.dlse}
        kind, call = ((ForwardTensors, self.c.regard_forward) if which == "fwd" else
                      (BackwardTensors, self.c.regard_backward))
        tensors = kind(**{name: tensor(name, x, memory) for name, x in (given | written).items()})
        how = Run(backend=backend.encode(), threads=threads)
        room = None
        if memory.cuda:
            how.device, how.device_index = 1, int(memory.device.partition(":")[2])
            how.stream = memory.stream()
            size = c_size_t()
            self.check(self.c.regard_workspace(byref(attention), int(which == "bwd"), byref(how),
                                               byref(size)))
            room = memory.xp.empty(max(size.value, 1), dtype=memory.xp.uint8, device=memory.device)
            how.workspace, how.workspace_size = room.data_ptr(), size.value
        for x in written.values():
            x[...] = float("nan")
        return Side(self.name, self._bound(call, attention, tensors, how), lambda: written,
                    keep=(problem, room))

    def _bound(self, call: Any, *structs: Any) -> Callable[[], None]:
        pointers = [byref(struct) for struct in structs]  # they keep the structs
        return lambda: self.check(call(*pointers))


def attention_of(problem: Problem) -> Attention:
    options, memory = dict(problem.call.options), problem.memory
    left, right = options.pop("window")
    scale = options.pop("scale")
    words = {"causal": CAUSAL.index(options.pop("causal")),
             "precision": PRECISION.index(options.pop("precision"))}
    arrays = {name: x for name in ARRAYS if (x := options.pop(name)) is not None}
    tensors = {name: tensor(name, x, memory) for name, x in (problem.given | arrays).items()}
    return Attention(window_left=left, window_right=right, has_scale=scale is not None,
                     scale=scale or 0.0, **words, **tensors, **options)
