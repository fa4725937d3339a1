"""Arrays of the frameworks: views for reading and writing, and new arrays for results.

A framework is recognised by the module of an array's class, so that none is imported unless the
program has imported it already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from . import _core
from .checks import class_name, word64
from .element_types import NAMES, TYPE_NAMES, element_type, refuse_foreign
from .errors import Unsupported, WrongType, refuse


class Framework:
    """Any object with DLPack: it can be read and written, but no new array can be made."""

    name = "DLPack"
    dense = "a copy of {} with dense rows"

    def array(self, x: Any, argument: str) -> _core.Array:
        """A view without a copy. Errors: WrongType."""
        return _core.Array.of(x, argument)

    def output(self, x: Any, argument: str) -> _core.Array:
        """A view to write to. Errors: as `array`; InvalidArgument for a read-only array."""
        return _core.Array.of(x, argument, writable=True)

    def seed(self, x: Any, argument: str) -> int | _core.Array:
        """The integer in an array of one; its two words where kernels can read them from a GPU's
        memory. Errors: WrongType."""
        return self.seed_number(x, argument)

    def seed_number(self, x: Any, argument: str) -> int:
        """The integer, as a word64, once the device has computed it. Errors: WrongType."""
        _require_integer(x, argument, _INTEGERS)
        return word64(argument, int(x.item()) % 2**64)

    def written(self, x: Any) -> None:
        """The caller has written to x."""

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        """A dense, uninitialised array on the device of `like`."""
        raise refuse("q", f"an array of {class_name(like)}",
                     "results cannot be made in this framework; give out", WrongType)

    def stream(self, x: Any) -> int:
        """The framework's current stream on the device of x; 0 on the CPU."""
        return 0

    def on_threads(self, threads: int) -> dict[str, Any]:
        """Keywords of a pass: so many threads of the CPU; 0 is the framework's own."""
        return {"threads": threads}


class NumPy(Framework):
    name = "NumPy"
    dense = "np.ascontiguousarray({})"

    def array(self, x: Any, argument: str) -> _core.Array:
        return self._view(x, argument, False)

    def output(self, x: Any, argument: str) -> _core.Array:
        if not x.flags.writeable:
            raise refuse(argument, "a read-only array", "must be writable")
        return self._view(x, argument, True)

    def _view(self, x: Any, argument: str, writable: bool) -> _core.Array:
        refuse_masked(x, argument)
        type = element_type(x, argument)
        if type == "bf16":  # a type of ml_dtypes, which NumPy does not export
            return _core.Array.of(x.view("uint16"), argument, "bf16", writable)
        return _core.Array.of(x, argument, writable=writable)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        numpy = sys.modules["numpy"]
        if type == "bf16":
            import ml_dtypes

            return numpy.empty(shape, ml_dtypes.bfloat16)
        return numpy.empty(shape, NAMES[type])


class CuPy(Framework):
    name = "CuPy"
    dense = "cupy.ascontiguousarray({})"

    def array(self, x: Any, argument: str) -> _core.Array:
        type = element_type(x, argument)
        strides = [stride // x.itemsize for stride in x.strides]
        return _core.Array.at(argument, x.data.ptr, type, x.shape, strides, x.device.id, x)

    output = array

    def seed(self, x: Any, argument: str) -> _core.Array:
        _require_integer(x, argument, _WORDS64)
        return _core.Array.at(argument, x.data.ptr, "i32", [2], [1], x.device.id, x)

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
    dense = "{}.contiguous()"

    def array(self, x: Any, argument: str) -> _core.Array:
        kind = x.device.type
        if kind not in ("cpu", "cuda"):
            raise refuse(argument, f"a tensor on {x.device}", "must be on the CPU or a CUDA GPU")
        if x.layout is not sys.modules["torch"].strided:
            raise refuse(argument, f"a tensor of layout {x.layout}", "must be strided", WrongType)
        type = element_type(x, argument)
        x = x.resolve_neg()  # the memory of a lazily negated view has the other sign
        return _core.Array.at(argument, x.data_ptr(), type, x.shape, x.stride(),
                              x.device.index if kind == "cuda" else -1, x)

    def output(self, x: Any, argument: str) -> _core.Array:
        if x.is_neg():
            raise refuse(argument, "a lazily negated tensor", "must be written to as it is; "
                         f"give {argument}.resolve_neg()")
        if x.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise refuse(argument, "a tensor that requires grad",
                         f"is written to, which has no gradient; give {argument}.detach()")
        return self.array(x, argument)

    def seed(self, x: Any, argument: str) -> int | _core.Array:
        if x.device.type != "cuda":
            return self.seed_number(x, argument)
        _require_integer(x, argument, _WORDS64)
        return _core.Array.at(argument, x.data_ptr(), "i32", [2], [1], x.device.index, x)

    def written(self, x: Any) -> None:
        if not x.is_inference():  # autograd must see that a tensor has changed
            sys.modules["torch"].autograd.graph.increment_version(x)

    def empty(self, shape: Sequence[int], type: str, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, NAMES[type]), device=like.device)

    def stream(self, x: Any) -> int:
        if x.device.type != "cuda":
            return 0
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)

    def on_threads(self, threads: int) -> dict[str, Any]:
        from .torch.threads import on_threads

        return on_threads(threads)


class Jax(Framework):
    name = "JAX"

    def array(self, x: Any, argument: str) -> _core.Array:
        from jax.core import Tracer

        element_type(x, argument)
        if isinstance(x, Tracer):
            raise refuse(argument, "a traced array of JAX", "has no elements yet: give q as an array "
                         "of JAX too, jnp.asarray(q)", Unsupported)
        return _core.Array.of(x, argument)

    def output(self, x: Any, argument: str) -> _core.Array:
        raise refuse(argument, "an array of JAX", "cannot be written to", Unsupported)

    def seed_number(self, x: Any, argument: str) -> int:
        from .jax.seeds import seed_words

        low, high = seed_words(x).tolist()
        return word64(argument, high << 32 | low)


_WORDS64 = ("int64", "uint64")
_INTEGERS = (*_WORDS64, "int32", "uint32", "int16", "uint16", "int8", "uint8")


def _require_integer(x: Any, argument: str, types: tuple[str, ...]) -> None:
    """Errors: WrongType for what is no array of one number of these types."""
    refuse_masked(x, argument)
    refuse_foreign(x, argument)
    if math.prod(x.shape) != 1 or str(x.dtype).rpartition(".")[2] not in types:
        raise refuse(argument, f"{x.dtype} {list(x.shape)}",
                     f"must be an integer, or an array with one {' or '.join(types[:2])}",
                     WrongType)


FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(), "ml_dtypes": NumPy(), "cupy": CuPy(), "torch": PyTorch(), "jax": Jax(),
    "jaxlib": Jax(),
}
_DLPACK = Framework()


def framework_of(x: Any, argument: str) -> Framework:
    """Errors: WrongType for an object that is no array."""
    for base in type(x).__mro__:
        framework = FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None and hasattr(x, "shape"):
            return framework
    if hasattr(x, "__dlpack__"):
        return _DLPACK
    raise refuse(argument, f"a {class_name(x)}",
                 "must be an array of NumPy, PyTorch, JAX or CuPy, or speak DLPack", WrongType)


def view(x: Any, argument: str) -> _core.Array:
    return framework_of(x, argument).array(x, argument)


def output(x: Any, argument: str) -> _core.Array:
    """A view to write to; call `written(x)` after the write."""
    return framework_of(x, argument).output(x, argument)


def written(x: Any) -> None:
    framework_of(x, "out").written(x)


def refuse_masked(x: Any, argument: str) -> None:
    """The library would read the masked elements of a numpy.ma array like all others."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise refuse(argument, f"a masked array of shape {x.shape}",
                     f"must be a plain array: {argument}.filled(0), and hide keys by mask",
                     WrongType)


def shape_only(x: Any, argument: str) -> _core.Array:
    """The shape and the type of an object, without its memory: enough for `explain`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise refuse(argument, f"a {class_name(x)}", "must have a shape and a dtype", WrongType)
    type = element_type(x, argument)
    strides: list[int] = []
    stride = 1
    for size in reversed(x.shape):
        strides.insert(0, stride)
        stride *= max(1, int(size))
    most = 2**63 - 1  # refused later, as more than the memory that there is
    return _core.Array.at(argument, 0, type, [min(int(size), most) for size in x.shape],
                          [min(one, most) for one in strides])
