"""regard::backward under vmap: a call for each index of the batched dimension.

PyTorch loops over other operators itself, but not over one that returns a list of tensors. There
are two kinds of vmap: that of torch.func, and an older one, which torch.autograd still uses for
is_grads_batched and for vectorize=True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_vmap_of_autograd: Any = torch._C


def register(library: Any, backward: Callable[..., list[Tensor]]) -> None:
    """library: of regard::backward, which `backward` calls."""
    def by_func(info: Any, axes: Sequence[Any], *arguments: Any) -> tuple[list[Tensor], int]:
        slices = [x.movedim(axis, 0) if isinstance(x, Tensor) and axis is not None else None
                  for x, axis in zip(arguments, axes)]
        return _stacked(_looped(backward, arguments, slices)), 0

    def by_autograd(*arguments: Any) -> list[Tensor]:
        level = _vmap_of_autograd._vmapmode_decrement_nesting() + 1
        try:
            # A tensor that has no dimension of this level is given one of size 1.
            slices = [torch._remove_batch_dim(x, level, 1, 0) if isinstance(x, Tensor) else None
                      for x in arguments]
            found = _looped(backward, arguments, slices)
            if len(found) == 1:
                return found[0]
            return [torch._add_batch_dim(x, 0, level) for x in _stacked(found)]
        finally:
            _vmap_of_autograd._vmapmode_increment_nesting()

    torch.library.register_vmap("regard::backward", by_func, lib=library)
    library.impl("backward", by_autograd, "Batched")


def _looped(backward: Callable[..., list[Tensor]], arguments: Sequence[Any],
            slices: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """slices: of a batched argument, along its first dimension."""
    size = max(len(x) for x in slices if x is not None)
    return [backward(*(x if along is None else along[min(i, len(along) - 1)]
                       for x, along in zip(arguments, slices))) for i in range(size)]


def _stacked(found: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(gradients) for gradients in zip(*found)]
