"""Masks from matrices: of blocks, of pairs, of PyTorch's FlexAttention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..checks import class_name, for_each, integer
from ..errors import WrongType, refuse
from ..mask_value import MOST_SPANS, Mask
from .library import Library, library_of

_AXES = ("queries", "keys")
_PAIRS_AT_ONCE = 2**24


def blocks(block_map: Any, size: int | tuple[int, int], length: int | tuple[int, int] | None = None,
           *, like: Any = None) -> Mask:
    """Blocks of queries that see blocks of keys.

    The mask has spans where each row of the map has at most 8 runs of visible blocks, or each
    column; otherwise it is a matrix. The host waits for a map of more than 16 columns that is on a
    GPU.

    Args:
        block_map: (rows, columns) bool, also with (B, Hq) in front; True = visible.
        size: of a block, in tokens: one number, or (queries, keys).
        length: Sq and Sk, one number or both; None is as many tokens as the blocks hold. The last
            blocks may be cut.
        like: an array, in whose framework and on whose device the mask is made; None is block_map.

    Raises:
        InvalidArgument: a shape or length that does not fit. WrongType: the map is not bool.
    """
    library = library_of(like, block_map)
    shown = library.bools(block_map, "block_map")
    if not 2 <= len(shown.shape) <= 4:
        raise refuse("block_map", f"an array of shape {tuple(shown.shape)}",
                     "must be (rows, columns), or with B and Hq in front")
    rows, keys = (integer("size", one, 1, 2**31 - 1) for one in for_each("size", size, _AXES))
    most = shown.shape[-2] * rows, shown.shape[-1] * keys
    len_q, len_k = (
        integer("length", one, 0, min(limit, 2**31 - 1))
        for one, limit in zip(most if length is None else for_each("length", length, _AXES), most))
    row_block, key_block = library.order(0, len_q) // rows, library.order(0, len_k) // keys
    spans = runs(shown, library)
    if spans is not None:
        return Mask(len_q, len_k, row_spans=_tokens(spans, keys, len_k, library)[..., row_block, :])
    spans = runs(shown.swapaxes(-1, -2), library)
    if spans is not None:
        return Mask(len_q, len_k, key_spans=_tokens(spans, rows, len_q, library)[..., key_block, :])
    return Mask(len_q, len_k, dense=shown[..., row_block, :][..., key_block])


def _tokens(spans: Any, size: int, length: int, library: Library) -> Any:
    """Spans of blocks of this size as spans of tokens, cut to the length: products beyond it might
    be no int32."""
    return library.xp.where(spans > length // size, spans * 0 + length, spans * size)


def from_dense(array: Any) -> Mask:
    """A matrix (..., Sq, Sk) bool, True = visible, with (B or 1, Hq or 1) or less in front; kept by
    reference. Errors: InvalidArgument for another shape, WrongType for another element type."""
    shape: Any = getattr(array, "shape", ())
    if len(shape) < 2:
        raise refuse("array", f"a {class_name(array)}", "must be an array (..., Sq, Sk)", WrongType)
    return Mask(shape[-2], shape[-1], dense=array)


def from_flex(block_mask: Any) -> Mask:
    """The mask of PyTorch's FlexAttention, a BlockMask.

    Its mask_mod is called with index tensors that broadcast, (rows, 1) queries and (1, Sk) keys, and
    scalars for batch entry and head: it must consist of operations on tensors. It is asked for every
    pair, some rows at a time: making the mask takes quadratic time, and the host waits for the
    device. The mask holds row spans if no row has more than 8 runs of visible keys, and a matrix
    otherwise.

    Raises:
        WrongType: block_mask is no BlockMask.
    """
    import torch

    mask_mod, shape = getattr(block_mask, "mask_mod", None), getattr(block_mask, "shape", ())
    if not callable(mask_mod) or len(shape) != 4:
        raise refuse("block_mask", f"a {class_name(block_mask)}",
                     "must be a BlockMask of torch.nn.attention.flex_attention", WrongType)
    batch, heads, len_q, len_k = (int(size) for size in shape)
    library = library_of(block_mask.kv_num_blocks)

    def parts() -> Iterator[Any]:
        """The matrix, some rows of one head at a time."""
        step = max(1, _PAIRS_AT_ONCE // max(1, len_k))
        index = torch.arange(max(batch, heads), device=library.device)
        keys = torch.arange(len_k, device=library.device)[None, :]
        for b in range(batch):
            for h in range(heads):
                for begin in range(0, len_q, step):
                    rows = torch.arange(begin, min(begin + step, len_q), device=library.device)
                    found = mask_mod(index[b], index[h], rows[:, None], keys)
                    yield found.bool().expand(rows.shape[0], len_k)

    spans = []
    for part in parts():
        spans.append(runs(part, library, waits=True))
        if spans[-1] is None:
            dense = torch.cat([*parts()]).reshape(batch, heads, len_q, len_k)
            return Mask(len_q, len_k, dense=dense)
    most = max((one.shape[-1] for one in spans), default=2)
    # A pair of zeros is an empty span.
    rows = [torch.nn.functional.pad(one, (0, most - one.shape[-1])) for one in spans]
    table = torch.cat(rows) if rows else torch.zeros((0, 2), dtype=torch.int32)
    return Mask(len_q, len_k, row_spans=table.reshape(batch, heads, len_q, most))


def runs(shown: Any, library: Library, waits: bool = False) -> Any:
    """The runs of each row of a bool array (..., n) as spans (..., 2 m); None for more than 8.

    waits: the host may ask how many there are, even where the columns bound their number.
    """
    columns = shown.shape[-1]
    follows = library.order(1, columns + 1) < columns  # all but the last one
    next_shown = library.xp.roll(shown, -1, -1) & follows
    ends = shown & ~next_shown  # the last one of each run
    most = (columns + 1) // 2
    if waits or most > MOST_SPANS:
        most = int(ends.sum(-1).max()) if ends.reshape(-1).shape[0] else 0
    if most > MOST_SPANS:
        return None
    order = library.order(0, columns)
    end = library.full((*shown.shape[:-1], 1), 0)
    found = []
    for _ in range(max(most, 1)):
        begin = _least(shown & (order >= end), order, columns, library)
        end = _least(ends & (order >= begin), order, columns - 1, library) + 1
        found += [begin[..., 0], end[..., 0]]
    return library.last_of(found)


def _least(among: Any, order: Any, otherwise: int, library: Library) -> Any:
    """(..., 1): the first true column of each row."""
    found = library.xp.where(among, order, order * 0 + otherwise)
    if not found.shape[-1]:
        return library.full((*found.shape[:-1], 1), otherwise)
    return library.xp.amin(found, -1)[..., None]
