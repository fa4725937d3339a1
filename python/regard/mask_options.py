"""Where a call is given a Mask: the options that it stands for."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from .arrays import framework_of
from .checks import causal, window
from .errors import Error, refuse
from .mask_value import Mask

_NO_WINDOW = (-1, -1)


def resolved(q: Any, k: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, with a Mask replaced by its spans, matrix, causal and window.

    Every entry of the package calls it where `mask` is given, before it reads an array.
    Errors: InvalidArgument for a mask of other sizes, and for what call and mask both give.
    """
    mask = given.get("mask")
    if type(mask) is not Mask:
        return given
    if given.get("cu_seqlens_q") is not None:
        raise _refused(mask, "is for sequences of one length; packed sequences take row_spans and "
                             "key_spans, causal and window")
    _require_sizes(mask, q, k, given.get("layout", "bhsd"))
    if mask.whole_lengths:
        _require_whole_lengths(mask, given)
    options = {**given, "mask": mask.dense}
    for name, spans in (("row_spans", mask.row_spans), ("key_spans", mask.key_spans)):
        if spans is not None:
            if given.get(name) is not None:
                raise refuse(name, "an array", f"{_text(mask)} holds {name} as well; give one of "
                             f"the two, or mask & Mask(..., {name}={name})")
            options[name] = spans
    if mask.causal != "none" or mask.window != _NO_WINDOW:
        for name, found in (("causal", causal("causal", given.get("causal")) != "none"),
                            ("window", window("window", given.get("window")) != _NO_WINDOW)):
            if found:
                raise refuse(name, given[name], f"{_text(mask)} has causal={mask.causal!r} and "
                             f"window={mask.window}; give one of the two, or mask & Mask(..., "
                             f"{name}={given[name]!r})")
        options["causal"], options["window"] = mask.causal, mask.window
    _require_framework(mask, q)
    return options


def _require_whole_lengths(mask: Mask, given: dict[str, Any]) -> None:
    found = {name: "an array" for name in ("seqused_q", "seqused_k", "q_positions")
             if given.get(name) is not None}
    position = given.get("k_position")
    if isinstance(position, Integral) and position != 0:  # what is no number is refused later
        found["k_position"] = str(position)
    for name, shown in found.items():
        raise refuse(name, shown, f"{_text(mask)} is for whole lengths: it joins masks that follow "
                     "several diagonals, which real lengths and positions move")


def _require_sizes(mask: Mask, q: Any, k: Any, layout: str) -> None:
    """Nothing for arrays of other ranks, which the call refuses by name."""
    shape: Any = getattr(q, "shape", ())
    shape_k: Any = getattr(k, "shape", ())
    if len(shape) != 4 or len(shape_k) != 4:
        return
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    sizes = shape[rows], shape_k[rows]
    if (mask.len_q, mask.len_k) != sizes:
        raise _refused(mask, f"the call has {sizes[0]} queries and {sizes[1]} keys")
    if mask.batch not in (1, shape[0]) or mask.heads not in (1, shape[heads]):
        raise _refused(mask, f"the call has {shape[0]} batch entries and {shape[heads]} query heads")


def _require_framework(mask: Mask, q: Any) -> None:
    """Errors: a mask of NumPy would be copied to PyTorch's or CuPy's device in every call."""
    if type(q).__module__ == "numpy":
        return
    for x in mask.arrays().values():
        if type(x).__module__ == "numpy" and framework_of(q, "q").name in ("PyTorch", "CuPy"):
            raise _refused(mask, "holds arrays of NumPy; make it with like=q, or once by "
                                 "mask.like(q)")


def _refused(mask: Mask, reason: str) -> Error:
    return refuse("mask", _text(mask), reason)


def _text(mask: Mask) -> str:
    """Short, and without reading an array."""
    more = "".join(f", {name}={size}" for name, size in
                   (("batch", mask.batch), ("heads", mask.heads)) if size != 1)
    return f"a Mask({mask.len_q} x {mask.len_k}{more})"
