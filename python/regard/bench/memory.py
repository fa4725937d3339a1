"""The memory of a case's arrays: NumPy's on the host, PyTorch's on a GPU, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from ..arrays import view
from ..element_types import NAMES

SEED = 1


def numpy_type(type: str) -> Any:
    if type == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(NAMES[type])


class HostMemory:
    """NumPy. Heads lie as (B, H, S, D)."""

    device = "cpu"
    cuda = False
    xp: Any = np

    def __init__(self) -> None:
        self.random = np.random.default_rng(SEED)

    def normal(self, shape: Sequence[int], type: str) -> Any:
        return self.random.standard_normal(shape, np.float32).astype(numpy_type(type), copy=False)

    def kept(self, shape: Sequence[int], share: float) -> Any:
        """bool; about this share is True."""
        return self.random.random(shape, np.float32) < share

    def empty(self, shape: Sequence[int], type: str) -> Any:
        return np.empty(shape, numpy_type(type))

    def placed(self, values: Any) -> Any:
        """A NumPy array in this memory."""
        return values

    def heads(self, shape: Sequence[int], type: str) -> Any:
        return self.normal(shape, type)

    def loosened(self, x: Any) -> Any:
        """A copy with one unused element at the end of each row."""
        room = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)[..., :-1]
        room[...] = x
        return room

    def double(self, x: Any) -> Any:
        return x.astype(np.float64)

    def workspace(self) -> None:
        """None: the library allocates its own."""

    def stream(self) -> int:
        return 0

    def wait(self) -> None:
        """Nothing is queued."""

    def view(self, x: Any, argument: str) -> _core.Array:
        return view(x, argument)


class GpuMemory:
    """PyTorch on one GPU. Heads are (B, H, S, D) views of (B, S, H, D), as models have them."""

    cuda = True

    def __init__(self, device: str) -> None:
        import torch

        self.xp = self.torch = torch
        self.device = device
        torch.manual_seed(SEED)

    def type(self, type: str) -> Any:
        return getattr(self.torch, NAMES[type])

    def normal(self, shape: Sequence[int], type: str) -> Any:
        return self.torch.randn(tuple(shape), dtype=self.type(type), device=self.device)

    def kept(self, shape: Sequence[int], share: float) -> Any:
        return self.torch.rand(tuple(shape), device=self.device) < share

    def empty(self, shape: Sequence[int], type: str) -> Any:
        return self.torch.empty(tuple(shape), dtype=self.type(type), device=self.device)

    def placed(self, values: Any) -> Any:
        return self.torch.from_numpy(values).to(self.device)

    def heads(self, shape: Sequence[int], type: str) -> Any:
        batch, heads, length, dim = shape
        return self.normal((batch, length, heads, dim), type).transpose(1, 2)

    def loosened(self, x: Any) -> Any:
        """As for the host; keeps the order of the axes in memory."""
        dense = x.transpose(1, 2)
        room = self.torch.empty((*dense.shape[:-1], dense.shape[-1] + 1), dtype=x.dtype,
                                device=self.device)
        return room[..., :-1].copy_(dense).transpose(1, 2)

    def double(self, x: Any) -> Any:
        return x.double()

    def workspace(self) -> Callable[[int], int]:
        """A function that returns the address of a workspace, the same one at each call."""
        held: list[Any] = []

        def allocate(size: int) -> int:
            if not held or held[0].numel() < size:
                held[:] = [self.torch.empty(size, dtype=self.torch.uint8, device=self.device)]
            return int(held[0].data_ptr())

        return allocate

    def stream(self) -> int:
        return self.torch.cuda.current_stream(self.device).cuda_stream

    def wait(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def view(self, x: Any, argument: str) -> _core.Array:
        return view(x, argument)


class NoMemory:
    """Sizes and types without memory: enough to compile a case's kernels."""

    device = ""
    cuda = False

    def normal(self, shape: Sequence[int], type: str) -> _core.Array:
        strides: list[int] = []
        stride = 1
        for size in reversed(shape):
            strides.insert(0, stride)
            stride *= size
        return _core.Array.at("shape", 0, type, list(shape), strides)

    def kept(self, shape: Sequence[int], share: float) -> _core.Array:
        return self.normal(shape, "bool")

    def placed(self, values: Any) -> _core.Array:
        return self.normal(values.shape, {"int32": "i32", "float32": "f32"}[values.dtype.name])

    def heads(self, shape: Sequence[int], type: str) -> _core.Array:
        batch, heads, length, dim = shape
        return self.normal((batch, length, heads, dim), type).swapped(1, 2)

    def loosened(self, x: _core.Array) -> _core.Array:
        """As x, with one unused element at the end of each row."""
        row = x.shape[-1]
        return _core.Array.at("x", 0, x.type, x.shape,
                              [step if step < row else step // row * (row + 1)
                               for step in x.strides])

    def view(self, x: _core.Array, argument: str) -> _core.Array:
        return x


Memory = HostMemory | GpuMemory
