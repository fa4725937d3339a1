"""The mask functions of transformers, as causal patterns and as spans.

A mask function says whether a query sees a key, by their positions. transformers composes its own
from closures: what these hold says which keys each query sees, and no pair has to be asked for. Any
other function is asked for all pairs, some rows at a time. Spans come as a table (mask_tables.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .mask_tables import span_table
from .masks.library import library_of
from .masks.matrices import runs

FEWEST_ASKED = 1024 * 1024  # pairs; smaller matrices are not worth asking for runs
_ASKED_AT_ONCE = 2**19  # pairs
_MOST_UNMERGED = 64  # spans of a query
_UNBOUNDED = 2**31 - 1


class CausalPattern(NamedTuple):
    """A causal mask without a matrix. segments: (B, S), equal for the keys of one sequence."""

    window: int | None
    segments: torch.Tensor | None


class Spans(NamedTuple):
    """Intervals of visible keys for each query, (B or 1, Sq or 1, n) int64 both."""

    begin: torch.Tensor
    end: torch.Tensor

    def cut(self, other: Spans) -> Spans:
        """What both show."""
        begin = torch.maximum(self.begin[..., :, None], other.begin[..., None, :])
        end = torch.minimum(self.end[..., :, None], other.end[..., None, :])
        return Spans(begin.flatten(-2), end.flatten(-2))

    def joined(self, other: Spans) -> Spans:
        """What one of them shows."""
        rows = (self.begin[..., 0] + other.begin[..., 0]).shape
        return Spans(*(torch.cat([one.expand(*rows, -1), two.expand(*rows, -1)], -1)
                       for one, two in zip(self, other, strict=True)))

    def moved(self, steps: torch.Tensor) -> Spans:
        """To later keys; steps (B or 1, Sq)."""
        return Spans(self.begin + steps[..., None], self.end + steps[..., None])


def pattern_of(function: Callable[..., Any] | None) -> CausalPattern | None:
    """The causal pattern of a function of transformers.masking_utils, read from its closure."""
    maker, inside = _opened(function)
    if maker == "causal_mask_function":
        return CausalPattern(None, None)
    parts = inside.get("mask_functions", ())
    if maker != "and_masks" or len(parts) != 2:
        return None
    window = _inside(parts[0], "sliding_window_overlay").get("sliding_window")
    if (isinstance(window, int) and window > 0
            and _opened(parts[1])[0] == "causal_mask_function"):
        return CausalPattern(window, None)
    # Packed sequences: one part compares the numbers of the sequences, the other one is the mask
    # within a sequence. It may count positions from the beginning of the row or of the sequence; a
    # causal mask is the same for both.
    for numbers, inner in (parts, reversed(parts)):
        segments = _inside(numbers, "packed_sequence_mask_function").get("packed_sequence_mask")
        if segments is not None:
            remapped = _inside(inner, "remap_positions_for_packed_sequence")
            pattern = pattern_of(remapped.get("mask_function", inner))
            if pattern is not None and pattern.segments is None:
                return CausalPattern(pattern.window, segments)
    return None


def is_plain(function: Callable[..., Any] | None) -> bool:
    """Whether a model has added nothing (images, packing, its own function) to a mask of one of the
    usual kinds. transformers then says by an option whether the model needs the matrix."""
    plain = ("causal_mask_function", "bidirectional_mask_function")
    maker, inside = _opened(function)
    parts = [_opened(part)[0] for part in inside.get("mask_functions", ())]
    return maker in plain or (maker == "and_masks" and len(parts) == 2 and parts[1] in plain
                              and parts[0].endswith("_overlay"))


def table_of_closures(options: dict[str, Any]) -> torch.Tensor | None:
    """The table of a mask function that transformers has made, in linear time.

    options: the keywords of a mask function's interface.

    Returns:
        (B or 1, 1, Sq, 2 + 2 n); None for other functions, and for masks that spans cannot say.
    """
    queries, keys = options["q_length"], options["kv_length"]
    device = torch.device(options.get("device", "cpu"))
    found = _spans_of(options.get("mask_function"),
                      torch.arange(queries, device=device)[None] + options.get("q_offset", 0))
    padding = options.get("attention_mask")
    if found is not None and padding is not None:
        real = runs(padding.to(device).bool(), library_of(padding.to(device)), waits=True)
        found = None if real is None else found.cut(
            Spans(real[:, None, 0::2].long(), real[:, None, 1::2].long()))
    if found is None or found.begin.shape[-1] > _MOST_UNMERGED:
        return None
    offset = options.get("kv_offset", 0)
    merged = _merged(Spans(found.begin - offset, found.end - offset), keys)
    if merged.begin.shape[0] not in (1, options["batch_size"]):
        return None
    spans = torch.stack(merged, -1).flatten(-2)
    return span_table(spans.expand(-1, queries, -1)[:, None].int(), keys)


def table_of_pairs(options: dict[str, Any]) -> torch.Tensor | None:
    """The table of any mask function, which is asked for every pair, some rows at a time: quadratic
    time, linear memory. Arguments and result as of `table_of_closures`."""
    from transformers.masking_utils import sdpa_mask

    queries, keys = options["q_length"], options["kv_length"]
    step = max(1, _ASKED_AT_ONCE // (options["batch_size"] * keys))
    found = []
    for begin in range(0, queries, step):
        rows = sdpa_mask(**options | {
            "q_length": min(step, queries - begin), "q_offset": options.get("q_offset", 0) + begin,
            "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        spans = runs(rows, library_of(rows), waits=True)
        if spans is None:
            return None
        found.append(spans)
    most = max(spans.shape[-1] for spans in found)
    padded = [torch.nn.functional.pad(spans, (0, most - spans.shape[-1])) for spans in found]
    return span_table(torch.cat(padded, -2), keys)


# --------------------------------------------------------------------------------------- functions


def _opened(function: Callable[..., Any] | None) -> tuple[str, dict[str, Any]]:
    """What made a closure of transformers.masking_utils, and its variables. Of a function that is
    no closure, its own name; of another module's, ("", {})."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    maker = str(getattr(function, "__qualname__", "")).split(".<locals>.")[0]
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if function is not None and cells else ()
    return maker, {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _inside(function: Callable[..., Any], maker: str) -> dict[str, Any]:
    """The variables of the closure that `maker` has made; empty for another function."""
    found, variables = _opened(function)
    return variables if found == maker else {}


def _spans_of(function: Callable[..., Any] | None, at: torch.Tensor) -> Spans | None:
    """The positions that queries at the positions `at`, (B or 1, Sq), see. None for a function that
    is not known."""
    match _opened(function):
        case "causal_mask_function", _:
            return _span(0 * at, at + 1)
        case "bidirectional_mask_function", _:
            return _span(0 * at, 0 * at + _UNBOUNDED)
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return _span(at - size + 1, 0 * at + _UNBOUNDED)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return _span(at - size, at + size + 1)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": torch.Tensor() as left}:
            first = left.to(at.device)[:, None]
            begin = first + (at - first) // size * size
            return _span(begin, begin + size)
        case "blockwise_overlay", {"block_sequence_ids": torch.Tensor() as numbers}:
            return _run_of(numbers.to(at.device), at)
        case "packed_sequence_mask_function", {"packed_sequence_mask": torch.Tensor() as numbers}:
            return _run_of((numbers - numbers.amin()).to(at.device), at)
        case "or_masks", {"mask_functions": parts}:
            return _combined(parts, at, Spans.joined)
        case "and_masks", {"mask_functions": parts}:
            packed = _packed(parts, at)
            return packed if packed is not None else _combined(parts, at, Spans.cut)
    return None


def _span(begin: torch.Tensor, end: torch.Tensor) -> Spans:
    return Spans(begin[..., None], end[..., None])


def _combined(parts: Any, at: torch.Tensor,
              combine: Callable[[Spans, Spans], Spans]) -> Spans | None:
    found: Spans | None = None
    for part in parts:
        spans = _spans_of(part, at)
        if spans is None:
            return None
        found = spans if found is None else combine(found, spans)
    return found


def _packed(parts: Any, at: torch.Tensor) -> Spans | None:
    """The spans of packed sequences, within which the mask is a function of the positions in the
    sequence; `at` are indices of the row. None for another mask."""
    if len(parts) != 2:
        return None
    numbers = _inside(parts[0], "packed_sequence_mask_function").get("packed_sequence_mask")
    remapped = _inside(parts[1], "remap_positions_for_packed_sequence")
    if numbers is None or not remapped:
        return None
    positions = remapped["position_ids"].to(at.device)
    is_next = (positions.diff(dim=1) == 1) | (numbers.to(at.device).diff(dim=1) != 0)
    own = _spans_of(parts[0], at)
    if own is None or not bool(is_next.all()):
        return None
    there = _taken(positions, at)
    inner = _spans_of(remapped["mask_function"], there)
    return None if inner is None else own.cut(inner.moved(at - there))


def _run_of(numbers: torch.Tensor, at: torch.Tensor) -> Spans | None:
    """The keys that have the query's number; none for a negative one.

    numbers: (B, keys). at: (B or 1, Sq), the indices of the queries. None where the keys of a
    number do not follow each other. The host reads whether they do.
    """
    numbers = numbers.clamp(min=-1)
    differs = torch.ones_like(numbers, dtype=torch.bool)
    differs[:, 1:] = numbers.diff(dim=1) != 0
    ordered = numbers.sort(dim=1).values
    is_other = torch.ones_like(differs)
    is_other[:, 1:] = ordered.diff(dim=1) != 0
    if not torch.equal((differs & (numbers >= 0)).sum(1), (is_other & (ordered >= 0)).sum(1)):
        return None
    index = torch.arange(numbers.shape[1], device=numbers.device)
    begin = torch.where(differs, index, 0).cummax(1).values
    ends = torch.where(differs.roll(-1, 1), index + 1, numbers.shape[1])
    end = torch.where(numbers >= 0, ends.flip(1).cummin(1).values.flip(1), 0)
    return _span(_taken(begin, at), _taken(end, at))


def _taken(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x[b, at[b]], (B, Sq), of x (B, keys) and at (B or 1, Sq)."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], at]


def _merged(spans: Spans, length: int) -> Spans:
    """Disjoint spans of [0, length), as few as say the same. The host reads how many there are."""
    begin, end = spans.begin.clamp(min=0), spans.end.clamp(max=length)
    is_empty = end <= begin
    # Empty spans come last and reach nowhere, so that they change no other.
    begin, order = torch.where(is_empty, length, begin).sort(dim=-1)
    end = torch.where(is_empty, 0, end).gather(-1, order)
    if begin.shape[-1] == 1:
        return Spans(begin, end)
    is_apart = (begin[..., 1:] > end.cummax(-1).values[..., :-1]) & (begin[..., 1:] < length)
    place = torch.nn.functional.pad(is_apart.cumsum(-1), (1, 0))
    shape = (*place.shape[:-1], int(place.max()) + 1)
    return Spans(begin.new_full(shape, length).scatter_reduce(-1, place, begin, "amin"),
                 end.new_zeros(shape).scatter_reduce(-1, place, end, "amax"))
