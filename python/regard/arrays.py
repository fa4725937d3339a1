"""Arrays of the frameworks: read in place, and made where results go.

A framework is known by the module of its arrays' class, so that none is imported before its arrays
are there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import _core
from .errors import WrongType, refuse
from .settings import TYPE_NAMES

NAMES = {short: name for name, short in TYPE_NAMES.items()}


class Framework:
    """Anything that speaks DLPack: it can be read, but nothing can be made."""

    name = "DLPack"

    def array(self, x: Any, argument: str) -> _core.Array:
        """A view without a copy. Errors: WrongType."""
        return _core.Array.of(x, argument)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        """A dense array where `like` is, with nothing in it yet."""
        raise refuse("q", f"an array of {_class_name(like)}",
                     "results cannot be made in this framework; give out", WrongType)

    def stream(self, x: Any) -> int:
        """The framework's current stream on x's device; 0 on the CPU."""
        return 0


class NumPy(Framework):
    name = "NumPy"

    def array(self, x: Any, argument: str) -> _core.Array:
        if x.dtype.name == "bfloat16":  # of ml_dtypes; NumPy does not export it
            return _core.Array.of(x.view("uint16"), argument, "bf16")
        return _core.Array.of(x, argument)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        numpy = sys.modules["numpy"]
        if type == "bf16":
            import ml_dtypes

            return numpy.empty(shape, ml_dtypes.bfloat16)
        return numpy.empty(shape, NAMES[type])


class CuPy(Framework):
    name = "CuPy"

    def array(self, x: Any, argument: str) -> _core.Array:
        type = TYPE_NAMES.get(x.dtype.name)
        if type is None:
            raise refuse(argument, f"an array of {x.dtype}",
                         "must hold float64, float32, float16, bfloat16, bool or int32", WrongType)
        strides = [stride // x.itemsize for stride in x.strides]
        return _core.Array.at(x.data.ptr, type, x.shape, strides, x.device.id, x)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        cupy = sys.modules["cupy"]
        dtype = like.dtype if TYPE_NAMES[like.dtype.name] == type else NAMES[type]
        with like.device:
            return cupy.empty(tuple(shape), dtype)

    def stream(self, x: Any) -> int:
        with x.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


class PyTorch(Framework):
    name = "PyTorch"

    def array(self, x: Any, argument: str) -> _core.Array:
        kind = x.device.type
        if kind not in ("cpu", "cuda"):
            raise refuse(argument, f"a tensor on {x.device}", "must be on the CPU or a CUDA GPU")
        if x.layout is not sys.modules["torch"].strided:
            raise refuse(argument, f"a tensor of layout {x.layout}", "must be strided", WrongType)
        type = TYPE_NAMES.get(str(x.dtype)[6:])  # torch.float32
        if type is None:
            raise refuse(argument, f"a tensor of {x.dtype}",
                         "must hold float64, float32, float16, bfloat16, bool or int32", WrongType)
        return _core.Array.at(x.data_ptr(), type, x.shape, x.stride(),
                              x.device.index if kind == "cuda" else -1, x)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, NAMES[type]), device=like.device)

    def stream(self, x: Any) -> int:
        if x.device.type != "cuda":
            return 0
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)


class Jax(Framework):
    name = "JAX"


FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(), "ml_dtypes": NumPy(), "cupy": CuPy(), "torch": PyTorch(), "jax": Jax(),
    "jaxlib": Jax(),
}
_DLPACK = Framework()


def framework_of(x: Any, argument: str) -> Framework:
    """Errors: WrongType for what is no array."""
    for base in type(x).__mro__:
        framework = FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None and hasattr(x, "shape"):
            return framework
    if hasattr(x, "__dlpack__"):
        return _DLPACK
    raise refuse(argument, f"a {_class_name(x)}",
                 "must be an array of NumPy, PyTorch, JAX or CuPy, or speak DLPack", WrongType)


def view(x: Any, argument: str) -> _core.Array:
    return framework_of(x, argument).array(x, argument)


def shape_only(x: Any, argument: str) -> _core.Array:
    """Sizes and type of anything with shape and dtype, without its memory: enough to explain."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise refuse(argument, f"a {_class_name(x)}", "must have a shape and a dtype", WrongType)
    dtype = getattr(x.dtype, "name", str(x.dtype).rpartition(".")[2])
    type = TYPE_NAMES.get(dtype)
    if type is None:
        raise refuse(argument, dtype, "is no element type of the library", WrongType)
    strides: list[int] = []
    stride = 1
    for size in reversed(x.shape):
        strides.insert(0, stride)
        stride *= max(1, int(size))
    return _core.Array.at(0, type, [int(size) for size in x.shape], strides)


def _class_name(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
