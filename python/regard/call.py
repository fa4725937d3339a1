"""Makes a `_core.Problem` of a user's arrays and options; the shapes of its results.

All functions of the package, and the operators of the frameworks, make their calls of the library
here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _core
from .arrays import framework_of
from .checks import shown
from .errors import Error, InvalidArgument, WrongType, refuse
from .options import ARRAYS, DEFAULTS, OPTIONS
from .repair import advised, layout_advice


@dataclass
class Call:
    """One problem in a user's terms.

    options: every option of the table except the layout, checked; arrays as given, or None.
    read: turns an array and its argument's name into a `_core.Array`.
    """

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    layout: str
    read: Callable[[Any, str], _core.Array]
    packed: bool = field(init=False)
    rows_first: bool = field(init=False)  # q is (B, Sq, Hq, D)

    def __post_init__(self) -> None:
        self.packed = self.options["cu_seqlens_q"] is not None
        self.rows_first = self.layout == "bshd" and not self.packed

    def is_ragged(self) -> bool:
        """Whether rows may lie outside of every sequence. The library does not write these."""
        return (self.packed or self.options["seqused_q"] is not None
                or self.options["seqused_k"] is not None)

    def problem(self) -> _core.Problem:
        read, options = self.read, self.options
        arrays: dict[str, _core.Array | int] = {
            name: read(options[name], name) for name in ARRAYS if options[name] is not None}
        seed = options["dropout_seed"]
        if not isinstance(seed, int):
            arrays["dropout_seed"] = framework_of(seed, "dropout_seed").seed(seed, "dropout_seed")
        q, k, v = read(self.q, "q"), read(self.k, "k"), read(self.v, "v")
        return _core.Problem(self.rows(q), self.rows(k), self.rows(v),
                             options | arrays if arrays else options)

    def rows(self, array: _core.Array) -> _core.Array:
        """(B, H, S, D), or packed, of q, k, v, out or the gradient of one of them."""
        return array.swapped(1, 2) if self.rows_first else array

    def advised(self, error: InvalidArgument, dense: str) -> InvalidArgument:
        """The library's error, with advice where the shapes tell what was meant."""
        shapes = {name: x.shape for name, x in self.options.items() if hasattr(x, "shape")}
        return advised(error, self.q.shape, self.k.shape, self.v.shape, self.layout, shapes,
                       dense)

    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq), whatever the layout; packed (Hq, total_q)."""
        if self.packed:
            return self.q.shape[1], self.q.shape[0]
        heads, length = (2, 1) if self.rows_first else (1, 2)
        return self.q.shape[0], self.q.shape[heads], self.q.shape[length]


def call_of(q: Any, k: Any, v: Any, read: Callable[[Any, str], _core.Array],
            given: Mapping[str, Any]) -> Call:
    """given: options by name. Errors: InvalidArgument, WrongType."""
    options = checked_options(q, k, v, given)
    return Call(q, k, v, options, options.pop("layout"), read)


def checked_options(q: Any, k: Any, v: Any, given: Mapping[str, Any],
                    defaults: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Every option, in the form that the binding takes; and what else `defaults` holds, in its
    order. Errors: InvalidArgument, WrongType."""
    options = dict(defaults)
    for name, value in given.items():
        row = OPTIONS.get(name)
        if row is None:
            raise unknown_option(name, value, OPTIONS)
        if value is not row.default:
            options[name] = row.check(name, value)
    layout, packed = options["layout"], options["cu_seqlens_q"] is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require_rows(name, x, layout, packed)
    if packed:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if given.get(name) is None:
                raise refuse(name, None, "must be given with cu_seqlens_q: the longest sequence")
    if options["causal"] is True and (options["q_positions"] is not None or options["k_position"]):
        options["causal"] = "top_left"
    if options["causal"] is True:
        axis = 1 if layout == "bshd" else 2
        lengths = ((options["max_seqlen_q"], options["max_seqlen_k"]) if packed else
                   (q.shape[axis], k.shape[axis]))
        if lengths[0] != lengths[1]:
            advice = "" if packed else layout_advice(q.shape, k.shape, v.shape, layout)
            raise refuse("causal", True, f"with {lengths[0]} queries and {lengths[1]} keys say "
                         "'top_left' (query i sees keys up to i) or 'bottom_right' (the last query "
                         "sees all)" + advice)
        for name, other in (("seqused_q", "seqused_k"), ("seqused_k", "seqused_q")):
            if options[name] is not None and options[other] is None:
                raise refuse("causal", True, f"with {name} alone, sequences may have other lengths "
                             "of queries than of keys: say 'top_left' (query i sees keys up to i) "
                             "or 'bottom_right' (the last query sees all)")
        options["causal"] = "bottom_right"
    return options


def unknown_option(name: str, value: Any, known: Iterable[str]) -> Error:
    near = difflib.get_close_matches(name, list(known), 2)  # torch.compile cannot trace 1
    return refuse(name, shown(value), "is no option of attention" +
                  (f"; did you mean {near[0]}?" if near else ""), WrongType)


def _require_rows(name: str, x: Any, layout: str, packed: bool) -> None:
    shape = getattr(x, "shape", None)
    if shape is None:
        raise refuse(name, f"a {type(x).__name__}", "must be an array", WrongType)
    if len(shape) != (3 if packed else 4):
        wanted = ("3 dimensions, (total, H, D), because cu_seqlens_q is given" if packed else
                  f"4 dimensions, ({', '.join(layout.upper())}), or 3 with cu_seqlens_q")
        raise refuse(name, f"an array of shape {tuple(shape)}", f"must have {wanted}")
