"""PyTorch's own threads. Calls on the CPU run on them, because they wait for the next operator by
spinning on the cores that the library's own threads would need."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from .. import _core


def _found() -> _core.TorchThreads | None:
    """None where PyTorch's stable C ABI has no parallel_for: before 2.10."""
    function = getattr(ctypes.CDLL(torch._C.__file__), "torch_parallel_for", None)
    address = ctypes.cast(function, ctypes.c_void_p).value if function else None
    if address is None:
        return None
    found = _core.TorchThreads(address)
    os.register_at_fork(after_in_child=found.leave)
    return found


TORCH_THREADS = _found()


def on_threads(threads: int) -> dict[str, Any]:
    """Keywords of a pass on the CPU: 0 is PyTorch's threads, another number the library's own."""
    if threads:
        return {"threads": threads}
    return {"threads": torch.get_num_threads(), "torch_threads": TORCH_THREADS}
