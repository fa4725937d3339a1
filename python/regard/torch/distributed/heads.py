"""Ulysses: which query heads each rank computes, and which heads of keys it needs for them."""

from __future__ import annotations


def dealt(heads_q: int, ranks: int) -> list[range]:
    """The query heads of each rank: neighbours, their numbers differ by one at most."""
    cuts = [rank * heads_q // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in zip(cuts, cuts[1:])]


def of_keys(own: range, heads_q: int, heads_kv: int) -> range:
    """The heads of keys that these query heads read."""
    share = heads_q // heads_kv
    return range(own.start // share, -(-own.stop // share)) if own else range(0, 0)


def repeats(own: range, heads_q: int, heads_kv: int) -> list[int] | None:
    """For each of these query heads, the place of its head of keys in `of_keys`; None where a call
    with grouped heads finds them itself, because all heads of keys are read equally often."""
    share = heads_q // heads_kv
    keys = of_keys(own, heads_q, heads_kv)
    places = [head // share - keys.start for head in own]
    if all(places.count(place) * len(keys) == len(own) for place in range(len(keys))):
        return None
    return places
