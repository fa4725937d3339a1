"""Tile maps on the emulated machine: masks with hidden, partial and full tiles, and what they spare.

Needs REGARD_LIBRARY to name libregard_emulator.so, as test_emulated.py does.
"""

import ctypes
import itertools
import mmap

import numpy as np
import pytest

import cases
from selection import one_in
from test_emulated import judge
from test_emulated import pytestmark as pytestmark

LENGTH = 400
WGMMA, MMA = "emulated:wgmma+sm_90+mixed", "emulated:mma+sm_80+mixed"


def spans(*ends):
    return np.stack([np.broadcast_to(x, LENGTH) for x in ends], axis=-1).astype(np.int32)


def patterns():
    """Name: what a call gets, and the same mask as a matrix, which the oracle gets."""
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    row = np.arange(LENGTH)
    cuts = np.array([0, 130, 140, 256, LENGTH])
    document = np.searchsorted(cuts, row, side="right") - 1
    same = document[:, None] == document
    own = spans(cuts[document], cuts[document + 1])
    end = np.where(row < 100, LENGTH, np.where(row < 250, 250, LENGTH))  # two branches of a tree
    heads = np.stack([same, i // 128 >= j // 128])[None]
    return {
        "documents": ({"row_spans": own}, {"mask": same}),
        "causal documents": ({"row_spans": own, "causal": "top_left"},
                             {"mask": same, "causal": "top_left"}),
        "documents by keys": ({"key_spans": own}, {"mask": same}),
        "tree": ({"key_spans": spans(row, end)}, {"mask": (i >= j) & (i < end)}),
        "blocks": ({"row_spans": spans(0, (row // 128 + 1) * 128)}, {"mask": j // 128 <= i // 128}),
        "window and sinks": ({"row_spans": spans(0, 4, row - 60, row + 1)},
                             {"mask": ((j < 4) | (j >= i - 60) & (j <= i))}),
        "both, in a window": (
            {"row_spans": own, "key_spans": spans(row, LENGTH), "window": (100, 30)},
            {"mask": same & (j <= i), "window": (100, 30)}),
        "a matrix for each head": ({"mask": heads}, {"mask": heads}),
        "nothing": ({"row_spans": spans(9, 3)}, {"mask": np.zeros((LENGTH, LENGTH), bool)}),
    }


PATTERNS = patterns()
HOW = [  # type, backend, D, Dv, heads of q and k
    ("bf16", WGMMA, 64, 64, (2, 2)), ("f16", WGMMA, 128, 64, (2, 1)), ("f32", WGMMA, 64, 64, (2, 2)),
    ("bf16", WGMMA, 192, 128, (2, 1)), ("bf16", MMA, 64, 64, (2, 1)), ("f32", MMA, 32, 32, (2, 2))]


def masked(pattern, features, type, dim, dim_v, heads):
    case = cases.make(features, type, sizes=(LENGTH, LENGTH), batch=1, heads=heads, dim=dim,
                      dim_v=dim_v)
    given, meant = PATTERNS[pattern]
    for name, value in given.items():
        is_array = isinstance(value, np.ndarray)
        (case.inputs if is_array else case.options)[name] = value
    case.values |= {name: np.broadcast_to(value, (1, heads[0], LENGTH, LENGTH))
                    if name == "mask" else value for name, value in meant.items()}
    return case


@pytest.mark.parametrize("pattern, type, backend, dim, dim_v, heads", one_in(7, (
    (name, *how) for name in PATTERNS for how in HOW)), ids=str)
def test_the_same_as_the_matrix(pattern, type, backend, dim, dim_v, heads):
    judge(masked(pattern, (), type, dim, dim_v, heads), backend)


@pytest.mark.parametrize("pattern, type, backend, dim, dim_v, heads", one_in(7, (
    (name, *how) for name in PATTERNS for how in HOW)), ids=str)
def test_deterministic(pattern, type, backend, dim, dim_v, heads):
    """The machine reports a semaphore whose value nobody sets, as where a visiting tile is missed."""
    judge(masked(pattern, (), type, dim, dim_v, heads), backend, deterministic=True)


@pytest.mark.parametrize("backend", [WGMMA, MMA])
@pytest.mark.parametrize("rows, columns", [(140, 4400), (2300, 140)])
def test_hidden_words(rows, columns, backend):
    """A row of the map has several words, and a word that hides all its tiles lies between others."""
    case = cases.make((), "bf16", sizes=(rows, columns), batch=1, heads=(1, 1), dim=64)
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    ends = np.stack([np.zeros(rows, int), 70 + np.arange(rows) % 9, columns - 60 + np.arange(rows) % 7,
                     np.full(rows, columns)], axis=-1).astype(np.int32)
    far = (i < 80) | (i > rows - 50)
    ends[~far[:, 0]] = 0
    case.inputs["row_spans"] = ends
    shown = far & ((j < ends[:, 1:2]) | (j >= ends[:, 2:3]))
    case.values["mask"] = shown[None, None]
    judge(case, backend)


MANY_TILES = [(140, 8400), (12400, 140)]  # rows, columns


def uneven(rows, columns, heads=2, heads_kv=1):
    """So many tiles that long ones begin first; some are empty."""
    case = cases.make((), "bf16", sizes=(rows, columns), batch=1, heads=(heads, heads_kv), dim=64)
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    shown, ends = [], []
    for head in range(heads):
        begin = i * 7919 * (head + 3) // 150 * 150 % columns
        end = np.minimum(begin + i * 31 // 97 * 97 % columns, columns)
        shown.append((begin <= j) & (j < end))
        ends.append(np.concatenate([begin, end], axis=1))
    case.inputs["row_spans"] = np.array(ends, np.int32)[None]
    case.values["mask"] = np.array(shown)[None]
    return case


@pytest.mark.parametrize("rows, columns", MANY_TILES)
def test_order_of_tiles(rows, columns):
    judge(uneven(rows, columns), WGMMA)


def test_the_last_heads_begin_together():
    """Tiles of keys of the last two of three heads: the machine says that it has 64 multiprocessors."""
    judge(uneven(140, 8600, 3, 3), WGMMA)


@pytest.mark.parametrize("backend", [WGMMA, MMA])
def test_deterministic_with_many_tiles(backend):
    judge(uneven(140, 8400), backend, deterministic=True)


OTHERS = [("dropout",), ("softcap", "sink", "dlse"), ("alibi", "dropout"),
          ("bias_keys", "f32_outputs")]


@pytest.mark.parametrize("backend, pattern, features", one_in(4, itertools.product(
    (WGMMA, MMA), ("causal documents", "tree"), OTHERS)), ids=str)
def test_with_other_features(backend, pattern, features):
    case = masked(pattern, features, "bf16", 64, 64, (2, 2))
    wanted = ["dq", "dk", "dv"] if "bias_keys" in features else None  # dbias would need every tile
    judge(case, backend, wanted=wanted)


@pytest.mark.parametrize("backend", [WGMMA, MMA])
def test_a_tile_that_nobody_sees_is_not_read(backend):
    """Its keys and values lie in pages that nobody may read."""
    case = masked("documents", (), "bf16", 128, 128, (2, 1))
    shown = spans(0, 128, 256, LENGTH)
    case.inputs["row_spans"] = shown
    j = np.arange(LENGTH)
    case.values["mask"] = np.broadcast_to((j < 128) | (j >= 256), (1, 2, LENGTH, LENGTH))
    libc = ctypes.CDLL(None, use_errno=True)
    row_bytes = 128 * 2
    for name in "kv":
        memory = mmap.mmap(-1, case.inputs[name].nbytes)
        array = np.frombuffer(memory, case.inputs[name].dtype).reshape(case.inputs[name].shape)
        array[...] = case.inputs[name]
        case.inputs[name] = array
        hidden = ctypes.c_void_p(array.ctypes.data + 128 * row_bytes)
        assert libc.mprotect(hidden, 128 * row_bytes, 0) == 0
    judge(case, backend)
