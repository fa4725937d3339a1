"""What the builders of masks need of NumPy, PyTorch, JAX or CuPy: integers on one device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..arrays import framework_of
from ..checks import shown
from ..element_types import refuse_foreign
from ..errors import WrongType, refuse


class Library:
    """One framework on one device; this one is NumPy, and CuPy as `xp`."""

    def __init__(self, xp: Any, device: Any = None) -> None:
        self.xp = xp
        self.device = device

    def order(self, begin: int, end: int) -> Any:
        """begin, begin + 1, ... end - 1, int32."""
        return self.xp.arange(begin, end, dtype=self.xp.int32)

    def here(self, x: Any) -> Any:
        """An array of any framework as one of this one."""
        return x if isinstance(x, self.xp.ndarray) else self.xp.asarray(to_numpy(x))

    def integers(self, x: Any, argument: str) -> Any:
        """An array, list or number as int32. Errors: WrongType for other elements; InvalidArgument
        for numbers that are no int32. Where the host would have to wait for them, it cuts int64 to
        the limits of int32."""
        x = _checked(x, argument)
        if library_of(x).is_read_at_once(x):
            values = to_numpy(x)
            if values.size and not -2**31 <= values.min() <= values.max() < 2**31:
                raise refuse(argument, f"an array that holds {values.min()} to {values.max()}",
                             "must be from -2^31 to below 2^31")
        elif str(x.dtype) in ("int64", "torch.int64"):
            x = x.clip(-2**31, 2**31 - 1)
        return self._cast(self.here(x), self.xp.int32)

    def bools(self, x: Any, argument: str) -> Any:
        """Errors: WrongType for other elements."""
        if not hasattr(x, "shape"):
            import numpy

            x = numpy.asarray(x)
        if not str(x.dtype).endswith("bool"):
            raise refuse(argument, f"{x.dtype} {list(x.shape)}", "must be bool", WrongType)
        return self.here(x)

    def is_read_at_once(self, x: Any) -> bool:
        """Whether the host can look at elements without waiting for a device or a tracer."""
        return type(x).__module__ == "numpy"

    def last_of(self, parts: Sequence[Any]) -> Any:
        """Arrays as the columns of one, after broadcasting; int32."""
        return self._cast(self.xp.stack(self.xp.broadcast_arrays(*parts), -1), self.xp.int32)

    def count_up_to(self, sorted: Any, x: Any) -> Any:
        """How many elements of `sorted` are at most x, for each x."""
        return self.xp.searchsorted(sorted, x, side="right")

    def joined(self, parts: Sequence[Any]) -> Any:
        return self.xp.concatenate(parts)

    def largest_at(self, x: Any, places: Any, values: Any) -> Any:
        """x with x[places[n]] raised to values[n]."""
        x = x.copy()
        self.xp.maximum.at(x, places, values)
        return x

    def sums_at(self, x: Any, places: Any, values: Any) -> Any:
        """x with values[n] added to x[places[n]]."""
        x = x.copy()
        self.xp.add.at(x, places, values)
        return x

    def full(self, shape: tuple[int, ...], value: int) -> Any:
        return self.xp.full(shape, value, dtype=self.xp.int32)

    def _cast(self, x: Any, type: Any) -> Any:
        return x.astype(type)


class JaxLibrary(Library):
    def here(self, x: Any) -> Any:
        return x if framework_of(x, "mask").name == "JAX" else self.xp.asarray(to_numpy(x))

    def is_read_at_once(self, x: Any) -> bool:
        return is_concrete(x) and all(device.platform == "cpu" for device in x.devices())

    def largest_at(self, x: Any, places: Any, values: Any) -> Any:
        return x.at[places].max(values)

    def sums_at(self, x: Any, places: Any, values: Any) -> Any:
        return x.at[places].add(values)


class TorchLibrary(Library):
    def order(self, begin: int, end: int) -> Any:
        return self.xp.arange(begin, end, dtype=self.xp.int32, device=self.device)

    def here(self, x: Any) -> Any:
        if not isinstance(x, self.xp.Tensor):
            x = self.xp.from_numpy(to_numpy(x).copy())
        return x.to(self.device)

    def is_read_at_once(self, x: Any) -> bool:
        return is_concrete(x) and x.is_cpu and not self.xp.compiler.is_compiling()

    def last_of(self, parts: Sequence[Any]) -> Any:
        return self.xp.stack(self.xp.broadcast_tensors(*parts), -1).to(self.xp.int32)

    def count_up_to(self, sorted: Any, x: Any) -> Any:
        return self.xp.searchsorted(sorted.contiguous(), x.contiguous(), right=True)

    def joined(self, parts: Sequence[Any]) -> Any:
        return self.xp.cat(list(parts))

    def largest_at(self, x: Any, places: Any, values: Any) -> Any:
        return x.scatter_reduce(0, places.long(), values, "amax")

    def sums_at(self, x: Any, places: Any, values: Any) -> Any:
        return x.scatter_add(0, places.long(), values)

    def full(self, shape: tuple[int, ...], value: int) -> Any:
        return self.xp.full(shape, value, dtype=self.xp.int32, device=self.device)

    def _cast(self, x: Any, type: Any) -> Any:
        return x.to(type)


def library_of(*given: Any) -> Library:
    """That of the first array which is not NumPy's; otherwise NumPy. Errors: WrongType."""
    for x in given:
        if not hasattr(x, "shape"):
            continue
        name = framework_of(x, "like").name
        if name == "PyTorch":
            return TorchLibrary(sys.modules["torch"], x.device)
        if name == "JAX":
            return JaxLibrary(sys.modules["jax"].numpy)
        if name == "CuPy":
            return Library(sys.modules["cupy"])
        if name != "NumPy":
            raise refuse("like", shown(x), "must be an array of NumPy, PyTorch, JAX or CuPy",
                         WrongType)
    import numpy

    return Library(numpy)


def to_numpy(x: Any) -> Any:
    """An array of any framework, list or number; waits for its device."""
    import numpy

    if hasattr(x, "detach"):
        x = x.detach().cpu()
    return x.get() if type(x).__module__.startswith("cupy") else numpy.asarray(x)


def is_concrete(x: Any) -> bool:
    """Whether an array has elements: tracers of JAX, and tensors that are fake, on the device "meta"
    or in a transform of torch.func, have none."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
        return is_plain and (torch.compiler.is_compiling()  # which cannot trace what follows
                             or not torch._C._functorch.is_functorch_wrapped_tensor(x))
    return jax is None or not isinstance(x, jax.core.Tracer)


def _checked(x: Any, argument: str) -> Any:
    """An array of integers."""
    import numpy

    if not hasattr(x, "shape"):
        try:
            x = numpy.asarray(x)
        except ValueError:  # lists of different lengths
            raise refuse(argument, shown(x), "must be integers", WrongType) from None
        x = x if x.size else x.astype(numpy.int32)
    refuse_foreign(x, argument)
    if "int" not in str(x.dtype):
        raise refuse(argument, f"{x.dtype} {list(x.shape)}", "must be integers", WrongType)
    return x
