"""Masks of sequences: documents, prefixes, trees, chunks, windows."""

from __future__ import annotations

from typing import Any

from ..checks import integer
from ..errors import refuse
from ..mask_value import Mask
from .library import Library, is_concrete, library_of


def documents(cu_seqlens: Any, length: int | None = None, *, like: Any = None) -> Mask:
    """Documents that lie one after another: a token sees the tokens of its own document.

    Args:
        cu_seqlens: (n + 1) integers, where each document begins and where the last one ends; the
            first one is 0. Documents may be empty.
        length: Sq and Sk; None is where the last document ends, for which the host waits if
            cu_seqlens is on a GPU; jit and vmap need a number. Tokens after the last document see
            nothing.
        like: an array, in whose framework and on whose device the mask is made; None is
            cu_seqlens.

    Raises:
        InvalidArgument: cu_seqlens has another shape, or (on the CPU) does not ascend from 0, or
            exceeds length. WrongType: it holds no integers.
    """
    library = library_of(like, cu_seqlens)
    cuts = library.integers(cu_seqlens, "cu_seqlens")
    if len(cuts.shape) != 1 or cuts.shape[0] < 2:
        raise refuse("cu_seqlens", f"an array of shape {tuple(cuts.shape)}",
                     "must be (n + 1), n documents from 1 on")
    if length is None and not is_concrete(cuts):
        raise refuse("length", None, "must be given where nothing can read the end of cu_seqlens: in "
                     "jit and vmap, and without memory")
    length = int(cuts[-1]) if length is None else _length(length)
    if library.is_read_at_once(cuts):
        if int(cuts[0]) != 0 or not bool((cuts[1:] >= cuts[:-1]).all()):
            raise refuse("cu_seqlens", cuts.tolist()[:8], "must ascend, from 0 on")
        if int(cuts[-1]) > length:
            raise refuse("length", length, f"must not be below the end of cu_seqlens, {cuts[-1]}")
    # A token after the last document finds the empty one from the last cut to itself.
    document = library.count_up_to(cuts[1:], library.order(0, length))
    cuts = library.joined([cuts, cuts[-1:]])
    return Mask(length, length, row_spans=library.last_of([cuts[document], cuts[document + 1]]))


def causal_documents(cu_seqlens: Any, length: int | None = None, *, like: Any = None) -> Mask:
    """`documents` in which a token sees the tokens of its document up to itself."""
    mask = documents(cu_seqlens, length, like=like)
    return Mask(mask.len_q, mask.len_k, row_spans=mask.row_spans, causal="top_left")


def prefix_lm(prefix: Any, length: int, *, like: Any = None) -> Mask:
    """A prefix that all tokens see, in front of causal tokens.

    Args:
        prefix: how many tokens the prefix has: a number, or (B) integers, one for each batch entry.
        length: Sq and Sk.
        like: as in `documents`.
    """
    library = library_of(like, prefix)
    prefix = library.integers(prefix, "prefix")
    if len(prefix.shape) > 1:
        raise refuse("prefix", f"an array of shape {tuple(prefix.shape)}", "must be a number or (B)")
    length = _length(length)
    own = library.order(1, length + 1)
    if len(prefix.shape) == 1:
        prefix = prefix[:, None, None]
    end = library.xp.maximum(own, prefix)
    return Mask(length, length, row_spans=library.last_of([end * 0, end]))


def tree(begin: Any, end: Any, *, like: Any = None) -> Mask:
    """A tree of tokens in depth-first order: a token sees its ancestors and itself.

    In this order a token and its descendants follow each other: these are the queries that see it.

    Args:
        begin, end: (S) or (B, S) integers; token j and its descendants are the tokens i with
            begin[j] <= i < end[j]. begin[j] is j, except for a token that does not see itself.
        like: as in `documents`.
    """
    library = library_of(like, begin, end)
    ends = [library.integers(x, name) for name, x in (("begin", begin), ("end", end))]
    shape = tuple(ends[0].shape)
    if shape != tuple(ends[1].shape) or len(shape) not in (1, 2):
        raise refuse("end", f"an array of shape {tuple(ends[1].shape)}",
                     f"must have the shape of begin, {shape}: (S) or (B, S)")
    if len(shape) == 2:
        ends = [x[:, None, :] for x in ends]
    return Mask(shape[-1], shape[-1], key_spans=library.last_of(ends))


def tree_from_parents(parents: Any, *, like: Any = None) -> Mask:
    """`tree` from the parent of each token, in a logarithmic number of passes over the tokens.

    Args:
        parents: (S) integers, each the place of the token's parent, or -1 for a root; in
            depth-first order: before its parent's next child come all descendants of a token.
        like: as in `documents`.

    Raises:
        InvalidArgument: the order is another one. In a GPU's memory, where the host would have to
            wait to notice it, the mask of such parents hides all pairs.
    """
    library = library_of(like, parents)
    given = library.integers(parents, "parents")
    if len(given.shape) != 1:
        raise refuse("parents", f"an array of shape {tuple(given.shape)}", "must be (S)")
    length = given.shape[0]
    order = library.order(0, length)
    is_earlier = (given >= -1) & (given < order)
    last, count = _descendants(library.xp.where(is_earlier, given, -1), order, library)
    is_right = is_earlier & (count == last - order + 1)
    if library.is_read_at_once(given) and not bool(is_right.all()):
        token = int((is_right * 1).argmin())
        raise refuse("parents", f"an array whose element {token} is {int(given[token])}",
                     "must be -1 or an earlier token" if not bool(is_earlier[token]) else
                     "must be in depth-first order; the descendants of this token do not follow it "
                     "one after another")
    return tree(order, library.xp.where(is_right.all(), last + 1, order), like=order)


def _descendants(parents: Any, order: Any, library: Library) -> tuple[Any, Any]:
    """The last token and the number of tokens of each subtree.

    Doubling: after pass n, `last` and `count` are over the descendants of less than 2^n steps, and
    `above` is the ancestor of 2^n steps. S stands above the roots and itself.
    """
    length = order.shape[0]
    where = library.xp.where
    root = library.full((1,), length)
    above = library.joined([where(parents >= 0, parents, root), root])
    last = library.joined([order, root])
    count = library.full((length + 1,), 1)
    for _ in range(max(length - 1, 0).bit_length()):
        last = library.largest_at(last, above, last)
        # S would count itself in each pass.
        count = library.sums_at(count, above, where(above == length, 0 * count, count))
        above = above[above]
    return last[:length], count[:length]


def chunks(length: int, size: int, *, like: Any = None) -> Mask:
    """Causal attention inside chunks of `size` tokens; the last chunk may be shorter.

    Args:
        length: Sq and Sk.
        size: from 1 on.
        like: an array, in whose framework and on whose device the mask is made; None is NumPy.
    """
    length, size = _length(length), integer("size", size, 1, 2**31 - 1)
    library = library_of(like)
    i = library.order(0, length)
    begin = i - i % size
    # The window says what the spans say already, and lets kernels skip tiles by it.
    return Mask(length, length, row_spans=library.last_of([begin, i + 1]), causal="top_left",
                window=(size - 1, None))


def sliding(length: int, window: int, sinks: int = 0, *, like: Any = None) -> Mask:
    """A causal window, and the first tokens of the sequence, which all later tokens see.

    Args:
        length: Sq and Sk.
        window: how many tokens a token sees, its own included; from 1 on.
        sinks: how many tokens at the beginning stay visible. Without them, the mask holds no array.
        like: as in `chunks`.
    """
    length, window = _length(length), integer("window", window, 1, 2**31 - 1)
    sinks = integer("sinks", sinks, 0, 2**31 - 1)
    if sinks == 0:
        return Mask(length, length, causal="top_left", window=(window - 1, None))
    library = library_of(like)
    own = library.order(1, length + 1)
    first = own - min(window, length)
    spans = [own * 0, own * 0 + min(sinks, length), first, own]
    return Mask(length, length, row_spans=library.last_of(spans), causal="top_left")


def _length(length: Any) -> int:
    return integer("length", length, 0, 2**31 - 1)
