"""Exact fused attention, forward and backward, for NumPy, PyTorch, JAX and CuPy.

    import regard
    out = regard.attention(q, k, v, causal=True)

`attention` takes and returns the arrays of any of these frameworks. Frameworks' own interfaces,
with gradients: `regard.torch`, `regard.transformers`, `regard.jax`. `regard.masks` makes masks,
`regard.bench` measures.
"""

from . import masks
from ._core import allow_compilation, version
from .attention import (Explanation, attention, attention_backward, dropout_mask,
                        dropout_probability, explain, prepare)
from .checking import Check, CheckedOutput, check
from .errors import (DeviceFailure, Error, InternalError, InvalidArgument, OutOfMemory, Unavailable,
                     Unsupported, WrongType)
from .gradients import Gradients
from .machine import Backend, Gpu, Info, info, trim_memory

__version__ = version()

__all__ = [
    "Backend", "Check", "CheckedOutput", "DeviceFailure", "Error", "Explanation", "Gpu",
    "Gradients", "Info", "InternalError", "InvalidArgument", "OutOfMemory", "Unavailable",
    "Unsupported", "WrongType", "__version__", "allow_compilation", "attention",
    "attention_backward", "check", "dropout_mask", "dropout_probability", "explain", "info",
    "masks", "prepare", "trim_memory", "version",
]
