"""Masks on the tests' own GPUs, which count launches: `python mask_map_cases.py NAME`, in a
process of its own, because the driver is found by LD_LIBRARY_PATH."""

from __future__ import annotations

import copy
import gc
import pickle
import sys

import fake_cupy
import numpy as np
import regard
from fake_cupy import ndarray, to_gpu, to_host

LENGTH = 256
KEPT = "tile map: that of the Mask, made before the call"


def rows(heads=2, dim=64):
    return [ndarray((1, heads, LENGTH, dim), np.float16) for _ in range(3)]


def mask_of(**more):
    return regard.masks.Mask(LENGTH, LENGTH, row_spans=ndarray((LENGTH, 2), np.int32), **more)


def launched(function, *arguments, **options):
    before = fake_cupy.launches()
    function(*arguments, **options)
    return fake_cupy.launches() - before


def forward(mask, dim=64, **options):
    return launched(regard.attention, *rows(dim=dim), mask=mask, **options)


def backward(mask):
    q, k, v = rows()
    lse = ndarray((1, 2, LENGTH), np.float32)
    return launched(regard.attention_backward, q, q, k, v, q, lse, mask=mask)


def plain(passes=forward, **options):
    """The launches of a call whose mask keeps nothing."""
    q, k, v = rows()
    spans = ndarray((LENGTH, 2), np.int32)
    if passes is forward:
        return launched(regard.attention, q, k, v, row_spans=spans, **options)
    lse = ndarray((1, 2, LENGTH), np.float32)
    return launched(regard.attention_backward, q, q, k, v, q, lse, row_spans=spans)


def says_kept(mask, pass_="forward"):
    return KEPT in regard.explain(*rows(), row_spans=mask.row_spans, pass_=pass_).text


def reused():
    mask = mask_of()
    assert not says_kept(mask)
    assert forward(mask) == plain() - 1 + 2  # the maps of both passes
    assert says_kept(mask) and says_kept(mask, "backward")
    for _ in range(3):
        assert forward(mask) == plain() - 1
        assert backward(mask) == plain(backward) - 1
    assert forward(mask, out=ndarray((1, 2, LENGTH, 64), np.float16)) == plain() - 1
    assert forward(mask, return_lse=True) == plain() - 1
    assert forward(mask, softcap=2.0) > plain() - 1  # another geometry
    assert forward(mask_of()) == plain() + 1


def on_streams():
    mask = mask_of()
    forward(mask)
    assert forward(mask) == plain() - 1
    with fake_cupy.on(fake_cupy.Stream()):
        assert forward(mask) == plain() + 1  # its own maps, made in its own order
        assert forward(mask) == plain() - 1
    assert forward(mask) == plain() - 1


def while_captured():
    """What is captured neither makes maps for later calls nor reads those of earlier ones."""
    stream = fake_cupy.Stream()
    with fake_cupy.on(stream):
        mask = mask_of()
        for before in (False, True):
            if before:
                forward(mask)
            fake_cupy.capturing.add(stream.ptr)
            assert forward(mask) == forward(mask) == plain()
            assert says_kept(mask) == before
            fake_cupy.capturing.clear()
        assert forward(mask) == plain() - 1


def bounded():
    mask = mask_of()
    forward(mask)
    before = len(fake_cupy.live)
    for n in range(20):
        forward(mask, softcap=float(n + 1))
    assert len(fake_cupy.live) <= before + 8
    assert forward(mask) == plain() + 1  # the first was dropped


def memory_goes_with_the_mask():
    before = len(fake_cupy.live)
    mask = mask_of()
    forward(mask)
    assert len(fake_cupy.live) > before
    del mask
    gc.collect()
    assert len(fake_cupy.live) == before


def copies():
    mask = mask_of()
    forward(mask)
    same = copy.copy(mask)
    assert same.row_spans is mask.row_spans and forward(same) == plain() - 1
    del mask
    gc.collect()
    assert forward(same) == plain() - 1
    both = same & regard.masks.Mask(LENGTH, LENGTH, causal=True)
    assert forward(both) == plain() + 1 and forward(both) == plain() - 1


def pickled():
    mask = regard.masks.Mask(LENGTH, LENGTH, row_spans=np.zeros((LENGTH, 2), np.int32))
    again = pickle.loads(pickle.dumps(mask))
    assert np.array_equal(again.row_spans, mask.row_spans) and again.causal == "none"


def matrices_are_not_kept():
    """Nothing counts the changes of a matrix of CuPy's, which belongs to the caller."""
    mask = regard.masks.Mask(LENGTH, LENGTH, dense=ndarray((LENGTH, LENGTH), np.bool_))
    assert forward(mask) == forward(mask) == plain()


def positions():
    """Tables in memory may change, and a map with them."""
    mask, table = mask_of(), ndarray((2,), np.int32)
    for _ in range(2):
        assert forward(mask, q_positions=table) == plain(q_positions=table)
    assert forward(mask) == plain() + 1


def changed():
    """A version that has changed is another mask."""
    spans, version = ndarray((LENGTH, 2), np.int32), [0]

    def allocate(size):
        memory = ndarray(size, np.uint8)
        return memory.data.ptr, memory

    kept = regard._core.KeptMaps.of(0, spans.data.ptr, 0, {
        "version": lambda: version[0], "may_keep": lambda: True, "allocate": allocate})
    q, k, v = rows()

    def call():
        return launched(regard.attention, q, k, v, row_spans=spans)

    assert call() == plain() + 1 and call() == plain() - 1 and kept.made == 1
    version[0] += 1
    assert call() == plain() + 1 and call() == plain() - 1 and kept.made == 2
    del kept
    gc.collect()
    assert call() == plain()


def no_memory():
    """A call whose map cannot be kept makes its own."""
    spans = ndarray((LENGTH, 2), np.int32)

    def allocate(size):
        raise MemoryError

    kept = regard._core.KeptMaps.of(0, spans.data.ptr, 0, {
        "version": lambda: 0, "may_keep": lambda: True, "allocate": allocate})
    q, k, v = rows()
    for _ in range(2):
        assert launched(regard.attention, q, k, v, row_spans=spans) == plain()
    assert kept.made == 0


def same_results():
    """On a GPU that computes: a call that reads a kept map has the bits of one that makes its own."""
    random = np.random.default_rng(3)
    q, k, v = (to_gpu(random.standard_normal((1, 2, LENGTH, 64)).astype(np.float16))
               for _ in range(3))
    spans = regard.masks.causal_documents([0, 70, 150, LENGTH]).row_spans
    mask = regard.masks.Mask(LENGTH, LENGTH, row_spans=to_gpu(spans), causal="top_left")

    def results(**options):
        out, lse = regard.attention(q, k, v, return_lse=True, **options)
        found = regard.attention_backward(v, q, k, v, out, lse, deterministic=True, **options)
        return [to_host(x) for x in (out, lse, found.dq, found.dk, found.dv)]

    want = results(row_spans=to_gpu(spans), causal="top_left")
    for _ in range(2):
        assert all(np.array_equal(x, y) for x, y in zip(results(mask=mask), want))
    assert KEPT in regard.explain(q, k, v, row_spans=mask.row_spans, causal="top_left").text


if __name__ == "__main__":
    globals()[sys.argv[1]]()
