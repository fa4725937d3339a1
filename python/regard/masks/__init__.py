"""Masks as values: made once, and given to calls as `mask`, in every framework.

    mask = regard.masks.causal_documents([0, 90, 120, 300])
    out = regard.attention(q, k, v, mask=mask)
    mask.show("mask.png")

The builders are computed with the array library of what they are given, or of `like`: on a GPU
without waiting for it, unless their docstrings say otherwise. Most masks take memory that is linear
in the sequence. `Mask(len_q, len_k, causal=True)` and the like make others; `&` and `|` combine them.
"""

from ..mask_value import Mask
from .grids import neighbourhood_2d, neighbourhood_3d
from .matrices import blocks, from_dense, from_flex
from .sequences import (causal_documents, chunks, documents, prefix_lm, sliding, tree,
                        tree_from_parents)
from .visible import Tiles

__all__ = [
    "Mask", "Tiles", "blocks", "causal_documents", "chunks", "documents", "from_dense", "from_flex",
    "neighbourhood_2d", "neighbourhood_3d", "prefix_lm", "sliding", "tree", "tree_from_parents",
]
