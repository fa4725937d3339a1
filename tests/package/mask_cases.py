"""What the tests of masks share: masks, and their matrices by definition."""

from __future__ import annotations

import numpy as np
import regard
from regard import masks
from regard.masks import Mask

S = 60
RANDOM = np.random.default_rng(5)
I, J = np.arange(S)[:, None], np.arange(S)[None, :]


def matrix(visible, len_q=S, len_k=S):
    """By definition: visible(i, j) of each pair."""
    return np.array([[bool(visible(i, j)) for j in range(len_k)] for i in range(len_q)],
                    bool).reshape(len_q, len_k)


CUTS = [0, 13, 13, 14, 40, 60]
DOCUMENT = [sum(cut <= i for cut in CUTS[1:]) for i in range(S)]
# Two roots; 20 and 30 are children of 10, 31 of 5.
PARENTS = [i - 1 for i in range(S)]
PARENTS[20], PARENTS[30], PARENTS[31], PARENTS[50] = 10, 10, 5, -1
BLOCKS = RANDOM.random((6, 6)) < 0.5
MANY_RUNS = np.arange(20)[:, None] % 2 == np.arange(20) % 2
MANY_RUNS[3, 5] = False


def is_ancestor(i, j):
    while i > j:
        i = PARENTS[i]
    return i == j


def near(x, y, size, kernel):
    """Whether y lies in x's window on one axis."""
    first = min(max(x - kernel // 2, 0), size - kernel)
    return first <= y < first + kernel


def grid(sizes, kernels):
    def visible(i, j):
        return all(near(*pair, size, kernel) for *pair, size, kernel in zip(
            np.unravel_index(i, sizes), np.unravel_index(j, sizes), sizes, kernels))

    return matrix(visible)


def ends_of_subtrees():
    return [max(i for i in range(S) if is_ancestor(i, j)) + 1 for j in range(S)]


# Name: the mask, the matrix, and what the mask holds.
CASES = {
    "documents": (lambda: masks.documents(CUTS), lambda i, j: DOCUMENT[i] == DOCUMENT[j],
                  "row_spans"),
    "documents, padding": (lambda: masks.documents(np.array([0, 20, 50]), S),
                           lambda i, j: i // 20 == j // 20 < 1 or 20 <= min(i, j) <= max(i, j) < 50,
                           "row_spans"),
    "causal documents": (lambda: masks.causal_documents(CUTS),
                         lambda i, j: DOCUMENT[i] == DOCUMENT[j] and j <= i, "row_spans"),
    "prefix": (lambda: masks.prefix_lm(17, S), lambda i, j: j <= i or j < 17, "row_spans"),
    "long prefix": (lambda: masks.prefix_lm(170, S), lambda i, j: True, "row_spans"),
    "tree": (lambda: masks.tree(range(S), ends_of_subtrees()), is_ancestor, "key_spans"),
    "tree from parents": (lambda: masks.tree_from_parents(PARENTS), is_ancestor, "key_spans"),
    "chunks": (lambda: masks.chunks(S, 16), lambda i, j: i // 16 == j // 16 and j <= i, "row_spans"),
    "window": (lambda: masks.sliding(S, 9), lambda i, j: i - 9 < j <= i, ""),
    "window, sinks": (lambda: masks.sliding(S, 9, 3), lambda i, j: j <= i and (j < 3 or i - 9 < j),
                      "row_spans"),
    "wide window": (lambda: masks.sliding(S, 900, 300), lambda i, j: j <= i, "row_spans"),
    "2-D": (lambda: masks.neighbourhood_2d(6, 10, (3, 4)), grid((6, 10), (3, 4)), "row_spans"),
    "2-D, whole rows": (lambda: masks.neighbourhood_2d(12, 5, (9, 5)), grid((12, 5), (9, 5)),
                        "row_spans"),
    "2-D, many rows": (lambda: masks.neighbourhood_2d(12, 5, (9, 3)), grid((12, 5), (9, 3)), "dense"),
    "3-D": (lambda: masks.neighbourhood_3d(3, 4, 5, (2, 3, 2)), grid((3, 4, 5), (2, 3, 2)),
            "row_spans"),
    "3-D, whole rows": (lambda: masks.neighbourhood_3d(4, 3, 5, (2, 3, 5)),
                        grid((4, 3, 5), (2, 3, 5)), "row_spans"),
    "3-D, many rows": (lambda: masks.neighbourhood_3d(5, 4, 3, 3), grid((5, 4, 3), (3, 3, 3)),
                       "row_spans"),
    "3-D, dense": (lambda: masks.neighbourhood_3d(4, 5, 3, (3, 3, 2)), grid((4, 5, 3), (3, 3, 2)),
                   "dense"),
    "blocks": (lambda: masks.blocks(BLOCKS, 10), lambda i, j: BLOCKS[i // 10, j // 10], "row_spans"),
    "blocks, cut": (lambda: masks.blocks(BLOCKS, (11, 13), S),
                    lambda i, j: BLOCKS[i // 11, j // 13], "row_spans"),
    "blocks, wide": (lambda: masks.blocks(np.tri(20, dtype=bool), 3),
                     lambda i, j: j // 3 <= i // 3, "row_spans"),
    "blocks by columns": (lambda: masks.blocks(MANY_RUNS[:4], (15, 3)),
                          lambda i, j: MANY_RUNS[i // 15, j // 3], "key_spans"),
    "blocks, dense": (lambda: masks.blocks(MANY_RUNS, 3), lambda i, j: MANY_RUNS[i // 3, j // 3],
                      "dense"),
    "matrix": (lambda: masks.from_dense(I * J % 3 == 0), lambda i, j: i * j % 3 == 0, "dense"),
    "causal": (lambda: Mask(S, S, causal=True), lambda i, j: j <= i, ""),
    "both ways": (lambda: Mask(S, S, window=(3, 5)), lambda i, j: i - 3 <= j <= i + 5, ""),
}


def wanted(name):
    definition = CASES[name][1]
    return definition if isinstance(definition, np.ndarray) else matrix(definition)


def problem(random, batch=1, heads=2, len_q=S, len_k=S):
    shapes = [(batch, heads, length, 8) for length in (len_q, len_k, len_k, len_q)]
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def all_results(q, k, v, dout, **options):
    out, lse = regard.attention(q, k, v, return_lse=True, **options)
    found = regard.attention_backward(dout, q, k, v, out, lse, **options)
    return [out, lse, found.dq, found.dk, found.dv]


def assert_same_bits(arrays, mask, dense, **options):
    ours, theirs = all_results(*arrays, mask=mask), all_results(*arrays, mask=dense, **options)
    assert all(np.array_equal(x, y) for x, y in zip(ours, theirs))
