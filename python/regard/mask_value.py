"""The value of a mask, which a call takes as `mask` in place of a matrix."""

# `regard.options` imports this module, which therefore imports the others where it needs them.
from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .checks import causal as causal_form
from .checks import flag, integer
from .checks import window as window_form
from .errors import WrongType, refuse

if TYPE_CHECKING:
    from .masks.visible import Tiles

MOST_SPANS = 8


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which pairs of len_q queries and len_k keys are visible; made once, used by many calls.

    A pair is visible if everything that the mask holds shows it. Arrays may be of NumPy, PyTorch,
    JAX or CuPy. Spans are copied; a matrix is kept by reference, and must not change. `&` and `|`
    combine masks of the same sizes. On a GPU, PyTorch's and CuPy's keep their tile maps: at most 8,
    one for each stream and each geometry of calls. The attributes are also the arguments.

    Attributes:
        len_q, len_k: Sq and Sk of the calls that the mask is made for.
        row_spans: int32, broadcasts to (B, Hq, Sq, 2 n), n from 1 to 8; query i sees the keys of its
            spans, each a begin and an end.
        key_spans: int32, broadcasts to (B, Hq, Sk, 2 n); key j is seen by the queries of its spans.
        dense: bool, broadcasts to (B, Hq, Sq, Sk), True = visible.
        causal, window: as `regard.attention` takes them; True, only where Sq = Sk, is what it is in
            the call that has the mask. The attributes are "none", "top_left", "bottom_right" or
            True, and a pair of numbers, of which -1 is unbounded.
        whole_lengths: True: calls with the mask must not give seqused_q, seqused_k, q_positions or a
            k_position other than 0. So are results of `&` and `|` whose parts follow several
            diagonals.

    Raises:
        InvalidArgument: an array has another shape. WrongType: it has another element type.
    """

    len_q: int
    len_k: int
    row_spans: Any = None
    key_spans: Any = None
    dense: Any = None
    causal: Any = False
    window: Any = None
    whole_lengths: bool = False

    def __post_init__(self) -> None:
        sizes = {name: integer(name, getattr(self, name), 0, 2**31 - 1)
                 for name in ("len_q", "len_k")}
        causal = causal_form("causal", self.causal)
        if causal is True and self.len_q != self.len_k:
            raise refuse("causal", True, f"with {self.len_q} queries and {self.len_k} keys say "
                         "'top_left' or 'bottom_right'")
        made = sizes | {"causal": causal, "window": window_form("window", self.window),
                        "whole_lengths": flag("whole_lengths", self.whole_lengths)}
        for name in ("row_spans", "key_spans"):
            x = getattr(self, name)
            if x is not None:
                _require_spans(name, x, self.len_q if name == "row_spans" else self.len_k)
                made[name] = _own(x if len(x.shape) > 1 else x[None])
        if self.dense is not None:
            shape = _require_array("dense", self.dense, "bool", (self.len_q, self.len_k))
            made["dense"] = self.dense if len(shape) > 1 else self.dense[None]
        for name, value in made.items():
            object.__setattr__(self, name, value)
        # Arrays that do not broadcast are refused. torch.compile cannot compute these properties:
        # cached_property takes a lock before Python 3.12.
        for name, axis in (("batch", -4), ("heads", -3)):
            object.__setattr__(self, name, self._broadcast_size(axis))
        self._keep_maps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or from a file: its arrays, but no maps of the original's."""
        self.__dict__.update(state)
        self._keep_maps()

    def _keep_maps(self) -> None:
        if any(hasattr(x, "data_ptr") or type(x).__module__ == "cupy"
               for x in self.arrays().values()):
            from .mask_maps import keep_maps

            keep_maps(self)

    @cached_property
    def batch(self) -> int:
        """B of the calls that the mask is made for; 1 is good for any."""
        return self._broadcast_size(-4)

    @cached_property
    def heads(self) -> int:
        """Hq of the calls that the mask is made for; 1 is good for any."""
        return self._broadcast_size(-3)

    def arrays(self) -> dict[str, Any]:
        """Those of row_spans, key_spans and dense that are given."""
        given = {"row_spans": self.row_spans, "key_spans": self.key_spans, "dense": self.dense}
        return {name: x for name, x in given.items() if x is not None}

    def _broadcast_size(self, axis: int) -> int:
        size = 1
        for name, x in self.arrays().items():
            own = x.shape[axis] if len(x.shape) >= -axis else 1
            if own != 1 and size not in (1, own):
                raise refuse(name, f"an array of shape {tuple(x.shape)}",
                             f"its size {own} does not broadcast to {size}")
            size = own if own != 1 else size
        return size

    # ------------------------------------------------------------------------------------ algebra

    def __and__(self, other: Mask) -> Mask:
        """The pairs that both masks show.

        Bands (causal and window) of one alignment keep it. Where one band is "top_left" and the
        other one is not, the result has `whole_lengths`.

        Errors: InvalidArgument for other sizes, and where the spans of one kind would be more than
        8.
        """
        from .masks.combine import both

        return both(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        """The pairs that one of the masks shows.

        Where the bands (causal and window) or their alignments differ, the result has
        `whole_lengths`, as may that of `&`: spans hold the bands.

        Errors: InvalidArgument for other sizes, and where spans cannot say it: at most 8 spans, of
        one kind, or matrices.
        """
        from .masks.combine import either

        return either(self, other) if isinstance(other, Mask) else NotImplemented

    def like(self, array: Any) -> Mask:
        """This mask with its arrays in the framework of `array`, and on its device."""
        from .masks.library import library_of

        library = library_of(array)
        arrays = {name: library.here(x) for name, x in self.arrays().items()}
        return Mask(self.len_q, self.len_k, causal=self.causal, window=self.window,
                    whole_lengths=self.whole_lengths, **arrays)

    # --------------------------------------------------------------------------------- inspection

    def to_dense(self) -> Any:
        """The matrix, bool; (Sq, Sk), or (B or 1, Hq or 1, Sq, Sk) where batch or heads are not 1.
        In the framework of the mask's arrays, and on their device; NumPy's without arrays."""
        from .masks.visible import to_dense

        return to_dense(self)

    def density(self) -> float:
        """The share of visible pairs; in linear memory, and in linear time for spans of one kind."""
        from .masks.visible import density

        return density(self)

    def tiles(self, rows: int = 128, keys: int = 128) -> Tiles:
        """How many tiles of rows x keys are hidden, partial and full; of spans of one kind without a
        test of each pair.

        A tile is full if each of its pairs is visible, and hidden if none is. The tiles of all
        batch entries and heads that the mask distinguishes are counted.
        """
        from .masks.visible import tiles

        return tiles(self, rows, keys)

    def show(self, path: str | os.PathLike[str] | None = None, pixels: int = 512, *, batch: int = 0,
             head: int = 0) -> bytes:
        """Draws the mask of one batch entry and head: a grey PNG, queries down, keys to the right.

        White hides all pairs of its cell, black shows all; what is between is grey, by its share.

        Args:
            path: of a file to write; None writes none.
            pixels: the length of the longer side at most; a cell is one pixel or more.

        Returns:
            The bytes of the PNG.
        """
        from .masks.picture import cells, png

        picture = png(cells(self, integer("pixels", pixels, 1, 2**14), batch, head))
        if path is not None:
            with open(path, "wb") as file:
                file.write(picture)
        return picture

    def __repr__(self) -> str:
        """The sizes, what the mask holds, and its density where that is quick to find."""
        from .masks.visible import quick_density

        found = [f"{self.len_q} x {self.len_k}"]
        found += [f"{name}={size}" for name, size in
                  (("batch", self.batch), ("heads", self.heads)) if size != 1]
        found += [f"{name} (n={x.shape[-1] // 2})" for name, x in self.arrays().items()
                  if name != "dense"]
        found += ["dense"] if self.dense is not None else []
        found += [f"causal={self.causal!r}"] if self.causal != "none" else []
        found += [f"window={self.window}"] if self.window != (-1, -1) else []
        density = quick_density(self)
        found += [] if density is None else [f"{100 * density:.3g} % visible"]
        return f"Mask({', '.join(found)})"


def _require_spans(name: str, x: Any, length: int) -> None:
    shape = _require_array(name, x, "int32", (length, None))
    if shape[-1] % 2 or not 2 <= shape[-1] <= 2 * MOST_SPANS:
        raise refuse(name, f"an array of shape {shape}",
                     f"its last size must be 2 n, with n from 1 to {MOST_SPANS}")


def _require_array(name: str, x: Any, type: str, sizes: tuple[int, int | None]) -> tuple[int, ...]:
    """The shape. Errors: WrongType; InvalidArgument for what does not broadcast to these sizes."""
    dtype = str(getattr(x, "dtype", "")).rpartition(".")[2]
    if not hasattr(x, "shape") or dtype != type:
        given = f"{dtype} {list(x.shape)}" if dtype else f"a {x.__class__.__name__}"
        raise refuse(name, given, f"must be an array of {type}", WrongType)
    shape = tuple(x.shape)
    fits = 1 <= len(shape) <= 4 and all(
        wanted is None or size in (1, wanted) for size, wanted in zip(shape[::-1], sizes[::-1]))
    if not fits:
        wanted = ", ".join("2 n" if size is None else str(size) for size in sizes)
        raise refuse(name, f"an array of shape {shape}", f"must broadcast to (B, Hq, {wanted})")
    return shape


def _own(x: Any) -> Any:
    """A dense copy, which the caller's later writes do not change."""
    if hasattr(x, "detach"):  # of PyTorch
        return x.detach().clone().contiguous()
    if hasattr(x, "at"):  # of JAX, whose arrays never change
        return x
    copy = x.copy()
    if type(x).__module__ == "numpy":
        copy.flags.writeable = False
    return copy
