"""What signatures name: arrays of any framework, and the options of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Array as Array
from .options import ArrayT as ArrayT
from .options import AttentionOptions as AttentionOptions
from .options import Causal as Causal
from .options import Layout as Layout
from .options import Pass as Pass
from .options import Precision as Precision
from .options import SdpaOptions
from .options import Window as Window

if TYPE_CHECKING:  # of Python 3.11; type checkers bring their own before
    from typing_extensions import Unpack as Unpack


class SdpaExtensions(SdpaOptions, total=False):
    """The keywords of `regard.torch.scaled_dot_product_attention` that PyTorch's does not have."""

    out_type: Any
    threads: int
    backend: str
