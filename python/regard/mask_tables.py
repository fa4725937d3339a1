"""Masks of linear size, which travel through transformers and its models in place of matrices.

transformers and models pass on masks of four dimensions as they are, and cut them to rows and to a
number of columns. A table therefore has a row for each query, which stands alone:

    (B, 1, Sq, 3) int32        a header, and how many keys the query sees, from the first one on: a
                               causal mask, while no row has been cut off
    (B or 1, 1, Sq, 2 + 2 n)   a header, and n spans of the keys that the query sees

A table has fewer columns than there are keys, so that a model that takes it for a matrix fails. The
header is Sk and -Sk - columns, which tells a table from other numbers. A table of a causal mask
with a window, with padding or with packed sequences is one of spans, and says so in an attribute
(`CausalKeys`), which is lost where a model copies or cuts it: the spans alone say the same, more
slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from .errors import Unsupported, WrongType, refuse
from .mask_maps import keep_maps_of_tensors
from .mask_value import MOST_SPANS
from .masks.band import Band, options_of

HEADER = 2
CAUSAL = HEADER + 1  # columns


class CausalKeys(NamedTuple):
    """A causal mask of as many queries as keys. rows: (B, S), bool (real keys) or integers (equal
    for the keys of one sequence); None for all keys."""

    length: int
    window: int | None
    rows: torch.Tensor | None


class Packed(NamedTuple):
    """Packed sequences: where each begins and the last one ends (int32), and the longest length."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int


# ------------------------------------------------------------------------------------------ making


def causal_table(batch: int, queries: int, keys: int, device: Any) -> torch.Tensor | None:
    """The mask by which query i sees the keys 0 to i. None for no more keys than columns."""
    if keys <= CAUSAL:
        return None
    ends = torch.arange(1, queries + 1, dtype=torch.int32, device=device)
    table = _with_header(ends[None, None, :, None], keys).expand(batch, -1, -1, -1)
    if not torch.compiler.is_compiling():
        table.regard_causal = queries, keys  # type: ignore[attr-defined]
    return table


def span_table(spans: torch.Tensor, keys: int) -> torch.Tensor | None:
    """spans: (B or 1, 1, Sq, 2 n) int32. None for more than 8, and for a table with as many columns
    as there are keys."""
    if spans.shape[-1] > 2 * MOST_SPANS or HEADER + spans.shape[-1] >= keys:
        return None
    return _with_header(spans, keys)


def _with_header(rows: torch.Tensor, keys: int) -> torch.Tensor:
    first = torch.full_like(rows[..., :1], keys)
    return torch.cat([first, -first - (HEADER + rows.shape[-1]), rows], -1)


# ----------------------------------------------------------------------------------------- reading


def add_table(options: dict[str, Any], table: torch.Tensor, query: torch.Tensor,
              key: torch.Tensor, packed: Packed | None) -> Packed | None:
    """Adds what a table says to the options of a call, and returns the packed sequences that are
    left for the call to say. Errors: WrongType for what is no table for such queries and keys."""
    queries, keys = query.shape[2], key.shape[2]
    if table.shape[2] != queries or table.shape[3] < CAUSAL:
        raise _no_table(table, queries, keys)
    if table.shape[3] == CAUSAL and _is_whole(table, queries, keys):
        options.update(causal="top_left")
        return packed
    known: CausalKeys | None = getattr(table, "regard_keys", None)
    if known is not None and known.length == queries == keys:
        if known.rows is None or known.rows.dtype == torch.bool:
            return _add_causal_keys(options, known, packed)
        own = _packed_by_segments(table, known.rows)
        if options["bias"] is None and (packed is None or _are_same(table, own, packed)):
            return _add_causal_keys(options, known, own)
    if packed is None:
        options.update(_span_options(table, queries, keys))
    else:
        spans = _span_options(table, queries, keys)["row_spans"]
        bounds = spans_of_sequences(packed, query.shape[0], queries, keys)
        options["row_spans"] = torch.stack(
            [torch.maximum(spans[..., 0::2], bounds[..., :1]),
             torch.minimum(spans[..., 1::2], bounds[..., 1:])], -1).flatten(-2)
    return None


def spans_of_sequences(packed: Packed, batch: int, queries: int, keys: int) -> torch.Tensor:
    """(B, 1, Sq, 2) int32: the keys of each query's sequence. The rows of all batch entries follow
    each other."""
    row = torch.arange(batch * queries, device=packed.starts_q.device)
    sequence = torch.searchsorted(packed.starts_q, row, right=True, out_int32=False) - 1
    is_behind = row >= packed.starts_q[-1]
    sequence = sequence.clamp(0, len(packed.starts_q) - 2)
    first = torch.arange(batch, device=row.device)[:, None] * keys
    begin, end = ((packed.starts_k[sequence + n].view(batch, queries) - first).clamp(0, keys)
                  for n in (0, 1))
    end = torch.where(is_behind.view(batch, queries), begin, end)
    return torch.stack([begin, end], -1).to(torch.int32)[:, None]


def _is_whole(table: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether no row of a causal table has been cut off. While compiling, as many rows as keys are
    all rows; otherwise nothing is known of a copy."""
    made = getattr(table, "regard_causal", None)
    if made is None:
        return torch.compiler.is_compiling() and queries == keys
    return bool(made[0] == queries and made[1] >= keys)


def _add_causal_keys(options: dict[str, Any], known: CausalKeys,
                     packed: Packed | None) -> Packed | None:
    window = None if known.window is None else (known.window - 1, None)
    options.update(causal="top_left", window=window)
    if known.rows is None or known.rows.dtype != torch.bool:
        return packed
    if packed is not None:
        raise refuse("cu_seq_lens_q", list(packed.starts_q.shape),
                     "packed sequences cannot have padding", Unsupported)
    options["mask"] = known.rows[:, None, None, :]
    return None


def _packed_by_segments(table: torch.Tensor, segments: torch.Tensor) -> Packed:
    """Reads values, and therefore keeps the result in the table, which all layers of a pass
    share."""
    kept: Packed | None = getattr(table, "regard_packed", None)
    if kept is not None:
        return kept
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = first.flatten().nonzero().flatten()
    starts = torch.cat((starts, starts.new_tensor([segments.numel()]))).to(torch.int32)
    longest = int(starts.diff().max())
    packed = Packed(starts, starts, longest, longest)
    table.regard_packed = packed  # type: ignore[attr-defined]
    return packed


def _are_same(table: torch.Tensor, one: Packed, other: Packed) -> bool:
    """Reads values, and therefore keeps the answer, as above."""
    kept = getattr(table, "regard_same", None)
    if kept is None or kept[0] is not other.starts_q or kept[1] is not other.starts_k:
        is_same = (torch.equal(one.starts_q, other.starts_q.to(one.starts_q.device))
                   and torch.equal(one.starts_k, other.starts_k.to(one.starts_k.device)))
        kept = other.starts_q, other.starts_k, is_same
        table.regard_same = kept  # type: ignore[attr-defined]
    return bool(kept[2])


def _span_options(table: torch.Tensor, queries: int, keys: int) -> dict[str, Any]:
    """row_spans of a table, and causal and window that hide no more, by which kernels skip tiles.
    Reads values of the table, and therefore keeps the result in it. A table that a model has
    computed with is found by its first numbers. While compiling, a causal table is not read."""
    kept = getattr(table, "regard_spans", None)
    if kept is not None and kept[0] == (queries, keys):
        return cast(dict[str, Any], kept[1])
    spans = table[..., HEADER:]
    if table.shape[3] == CAUSAL:
        spans = torch.cat([torch.zeros_like(spans), spans], -1)
        if torch.compiler.is_compiling():
            return {"row_spans": spans}
    if spans.shape[-1] % 2 or spans.shape[-1] > 2 * MOST_SPANS or 0 in table.shape:
        raise _no_table(table, queries, keys)
    begin, end = spans[..., 0::2], spans[..., 1::2]
    row = torch.arange(queries, device=table.device)[:, None]
    is_empty = end <= begin
    low = torch.where(is_empty, keys, begin - row).amin()
    high = torch.where(is_empty, -queries, end - 1 - row).amax()
    *header, left, right = torch.stack([*table[0, 0, 0, :HEADER], low, high]).tolist()
    if header[0] + header[1] != -table.shape[3] or header[0] < keys:
        raise _no_table(table, queries, keys)
    band = Band(None if left <= 1 - queries else left, None if right >= keys - 1 else right)
    options = {"row_spans": spans, **(options_of(band, queries, keys) or {})}
    if type(table) is torch.Tensor:
        keep_maps_of_tensors(row_spans=options["row_spans"])
    table.regard_spans = (queries, keys), options  # type: ignore[attr-defined]
    return options


def _no_table(table: torch.Tensor, queries: int, keys: int) -> Exception:
    return refuse("attention_mask", f"int32 {list(table.shape)}",
                  f"is no table that Regard has made for {queries} queries and {keys} keys; "
                  "register(key_tables=False) makes matrices, with which models can compute",
                  WrongType)
