"""What signatures name: arrays of any framework, and the keywords of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from .settings import Causal, Layout, Precision, Window

if TYPE_CHECKING:  # of Python 3.11; type checkers bring their own before
    from typing_extensions import Unpack as Unpack


class Array(Protocol):
    """An array of NumPy, PyTorch, JAX, CuPy, or anything with a shape and an element type."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


Pass = Literal["forward", "backward"]
ArrayT = TypeVar("ArrayT", bound=Array)


class AttentionOptions(TypedDict, total=False):
    """What `attention` computes, beside q, k and v; `attention` says what each means."""

    bias: Array | None
    mask: Array | None
    causal: Causal
    window: Window
    scale: float | None
    softcap: float
    alibi_slopes: Array | None
    sink: Array | None
    dropout_p: float
    dropout_seed: Any
    dropout_offset: int
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    layout: Layout
    precision: Precision
    deterministic: bool


class SdpaExtensions(TypedDict, total=False):
    """What `regard.torch.scaled_dot_product_attention` takes beside PyTorch's arguments."""

    bias: Array | None
    causal: Causal
    window: Window
    softcap: float
    alibi_slopes: Array | None
    sink: Array | None
    dropout_seed: int | None
    dropout_offset: int
    precision: Precision
    deterministic: bool
    out_type: Any
    threads: int
    backend: str
