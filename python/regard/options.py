"""The options of a call: one row for each, with its type, default, check and documentation.

From these rows come the signatures and docstrings of all functions (docstrings.py), the schema of
PyTorch's operators, the attributes of JAX's calls and the values that the binding takes. The
binding has one row for each option too, in binding/problem.hpp; a test compares the two.
"""

# The rows are read from the annotations, which therefore must be values: no `import annotations`.
from typing import (Annotated, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Union,
                    get_type_hints)

from .checks import (Check, as_given, causal, flag, length, number, one_of, optional_number, position, seed,
                     window, word64)
from .mask_value import Mask


class Array(Protocol):
    """An array of NumPy, PyTorch, JAX, CuPy, or anything with a shape and an element type."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)
Causal = Union[bool, Literal["none", "top_left", "bottom_right"]]
Window = Union[None, int, tuple[Union[int, None], Union[int, None]]]
Precision = Literal["full", "tf32", "bf16"]
Layout = Literal["bhsd", "bshd"]
Pass = Literal["forward", "backward"]

FLOATS = ("float64", "float32", "float16", "bfloat16")


class Option(NamedTuple):
    """types: the element types that an array may have; empty for an option that is no array."""

    default: Any
    check: Check
    text: str
    types: tuple[str, ...] = ()


def array(text: str, *types: str) -> Option:
    return Option(None, as_given, text, types)


class SdpaOptions(TypedDict, total=False):
    """What PyTorch's scaled_dot_product_attention has no argument for."""

    bias: Annotated[Array | None, array(
        "any float type, broadcasts to (B, Hq, Sq, Sk); added to the scores.", *FLOATS)]
    sink: Annotated[Array | None, array(
        "(Hq) float32; a logit that is added to the denominator of each row's softmax and has no "
        "value vector.", "float32")]
    alibi_slopes: Annotated[Array | None, array(
        "(Hq) or (B, Hq) float32; slope |i + Sk - Sq - j| is subtracted from the score of query i "
        "and key j. Slopes have no gradient.", "float32")]
    causal: Annotated[Causal, Option(
        False, causal, '"top_left": query i sees the keys up to i; "bottom_right": up to '
        "i + Sk - Sq, of the real lengths; True: \"top_left\" with q_positions or k_position, "
        'otherwise "bottom_right", and only where Sq = Sk.')]
    window: Annotated[Window, Option(
        None, window, "(left, right): query i sees the keys from diag - left to diag + right; diag "
        'is i with causal="top_left", else i + Sk - Sq. One number is for both sides; None or -1 '
        "is unbounded.")]
    softcap: Annotated[float, Option(
        0.0, number, "c > 0 replaces each score s by c tanh(s / c), before the bias; 0 is off.")]
    dropout_seed: Annotated[Any, Option(
        0, seed, "64 bits: an integer, or an array of one. Whether dropout keeps a weight depends on "
        "(dropout_seed, dropout_offset, b, h, i, j) alone: see `regard.dropout_mask`. An array of "
        "int64 or uint64 on q's GPU is read by the kernels when they run.")]
    dropout_offset: Annotated[int, Option(
        0, word64, "64 bits, below 2^32 with a seed on a GPU; another one drops other weights.")]
    precision: Annotated[Precision, Option(
        "full", one_of("full", "tf32", "bf16"), "how a GPU's tensor cores may round float32 "
        'inputs: "full", "tf32" or "bf16".')]
    deterministic: Annotated[bool, Option(
        False, flag, "True: a GPU's gradients repeat to the bit, as a CPU's always do.")]


class AttentionOptions(SdpaOptions, total=False):
    """What `regard.attention` computes, next to q, k and v."""

    mask: Annotated[Array | Mask | None, array(
        "bool, broadcasts to (B, Hq, Sq, Sk), True = visible; or a `regard.masks.Mask`, which may hold "
        "spans, causal and window too.", "bool")]
    row_spans: Annotated[Array | None, array(
        "int32, broadcasts to (B, Hq, Sq, 2 n), n from 1 to 8; packed: (Hq or 1, total_q, 2 n). Query i "
        "sees the keys of its n spans, each a begin and an end: begin <= j < end. The last stride is "
        "1.", "int32")]
    key_spans: Annotated[Array | None, array(
        "int32, broadcasts to (B, Hq, Sk, 2 n); packed: (Hq or 1, total_k, 2 n). Key j is seen by the "
        "queries of its n spans.", "int32")]
    scale: Annotated[float | None, Option(
        None, optional_number, "the factor of q k^T; None is 1 / sqrt(D).")]
    dropout_p: Annotated[float, Option(
        0.0, number, "the probability to drop a weight, below 1; realised in steps of 1/65536.")]
    cu_seqlens_q: Annotated[Array | None, array(
        "(B + 1) int32; where each packed sequence of q begins, and where the last one ends.",
        "int32")]
    cu_seqlens_k: Annotated[Array | None, array("(B + 1) int32; the same for k and v.", "int32")]
    seqused_q: Annotated[Array | None, array(
        "(B) int32; how many rows of each sequence of q are real.", "int32")]
    seqused_k: Annotated[Array | None, array("(B) int32; the same for k and v.", "int32")]
    max_seqlen_q: Annotated[int | None, Option(
        None, length, "the length of the longest packed sequence of q; needed with cu_seqlens_q.")]
    max_seqlen_k: Annotated[int | None, Option(None, length, "the same for k and v.")]
    q_positions: Annotated[Array | None, array(
        "(ceil(Sq / 128)) or (B, ceil(Sq / 128)) int32: the call has rows and keys of a longer "
        "sequence, and row i stands at q_positions[i // 128] + i % 128 there. Not negative; each at "
        "least 128 above the one before. causal (not \"bottom_right\"), window, alibi_slopes and "
        "dropout go by positions; everything else by the call's own indices.", "int32")]
    k_position: Annotated[int, Option(
        0, position, "key j stands at k_position + j; a multiple of 32 under dropout.")]
    batch_begin: Annotated[int, Option(0, position, "is added to b where dropout counts it.")]
    head_begin: Annotated[int, Option(0, position, "is added to h where dropout counts it.")]
    layout: Annotated[Layout, Option(
        "bhsd", one_of("bhsd", "bshd"), '"bshd": q, k, v and out are (B, S, H, D) instead of '
        "(B, H, S, D).")]


_HINTS = get_type_hints(AttentionOptions, include_extras=True)
TYPES: dict[str, Any] = {name: hint.__origin__ for name, hint in _HINTS.items()}
OPTIONS: dict[str, Option] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
SDPA_OPTIONS = {name: OPTIONS[name] for name in SdpaOptions.__annotations__}
# As the binding takes them, except for the layout, which only Python knows.
DEFAULTS: dict[str, Any] = {name: option.check(name, option.default)
                            for name, option in OPTIONS.items()}
ARRAYS = tuple(name for name, option in OPTIONS.items() if option.types)
