"""Forward, f32 above head sizes of 128 (family wgmma) on the emulated machine, against the oracle.

These tests need the environment of test_emulated.py. P V of a block of keys is computed in chunks of
columns there, and most tiles have one stage of K and V.
"""

import itertools

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import one_in
from solve import normal, solve, with_values
from test_emulated import judge_forward

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

BACKEND = "emulated:wgmma+sm_90+mixed"

# One for each line of the table of tiles at least, with tails of rows, keys and columns.
CASES = [  # features, (Sq, Sk), D, Dv
    (("top_left", "gaps"), (191, 300), 256, 256),
    (("grouped", "dropout", "sink", "reversed"), (129, 257), 192, 176),
    (("packed", "bottom_right"), (193, 200), 136, 136),
    (("bias", "mask"), (150, 304), 248, 256),
    (("window", "bottom_right", "alibi"), (130, 400), 192, 128),
    (("softcap", "bias_infinite", "dropout", "mask"), (70, 200), 192, 192),
    (("seqused", "f32_outputs"), (140, 300), 40, 192),
    (("row_spans", "top_left"), (150, 290), 256, 64),
    (("bias", "mask", "negative_scale"), (70, 200), 160, 192),
    (("mask_keys", "bias_keys", "packed"), (100, 133), 128, 256),
    (("softcap", "scale", "alibi_batch", "dropout", "seqused", "window", "bottom_right", "grouped",
      "gaps", "odd", "sink"), (70, 233), 224, 200),
    (("bias_infinite", "seqused", "top_left"), (140, 296), 176, 248),
    (("stride_0", "bshd"), (70, 130), 17, 201),
    (("key_spans", "packed"), (140, 150), 192, 256),
    (("bias", "dropout"), (100, 200), 208, 224),
]


@pytest.mark.parametrize("features, sizes, dim, dim_v", one_in(3, CASES), ids=str)
def test_heads_of_f32(features, sizes, dim, dim_v):
    base = {"heads": (2, 2)} if "grouped" not in features else {}
    case = cases.make(features, "f32", sizes=sizes, dim=dim, dim_v=dim_v, **base)
    judge_forward(case, BACKEND + "+" + str(dim))


@pytest.mark.parametrize("features, dim, dim_v", one_in(3, [
    (("packed", "bottom_right"), 16, 256), (("top_left",), 192, 192), (("window",), 256, 144)]),
    ids=str)
def test_more_tiles_than_multiprocessors(features, dim, dim_v):
    """Blocks go on from tile to tile: each time another Q, and the last P V of the tile before."""
    case = cases.make(features, "f32", sizes=(34, 70), dim=dim, dim_v=dim_v, batch=9,
                      heads=(15, 3))
    judge_forward(case, BACKEND)


@pytest.mark.parametrize("keys, stages, dim", one_in(3, [
    (16, 2, 256), (32, 1, 144), (48, 1, 256), (80, 1, 192), (32, 2, 160), (64, 1, 128)]))
def test_forced_tiles(keys, stages, dim):
    case = cases.make(("bottom_right",), "f32", sizes=(150, 333), dim=dim)
    judge_forward(case, f"emulated:wgmma@keys={keys},stages={stages}+sm_90+mixed")


@pytest.mark.parametrize("name, spoilt", one_in(4, itertools.product(
    "qkv", [np.nan, np.inf, 3e38])))
def test_what_is_not_finite(name, spoilt):
    """What one row holds is not felt by rows that do not see it."""
    given = {n: normal(1, 2, 150, 200, type="f32", seed=i) for i, n in enumerate("qkv")}
    want = solve(**given, backend="emulated:simt", causal="top_left")
    given[name] = with_values(given[name], np.s_[:, :, 77], spoilt)
    got = solve(**given, backend=BACKEND, causal="top_left")
    apart = np.abs(got["out"] - want["out"])
    assert apart[:, :, :77].max() < 2e-6
    if name == "q":
        assert apart[:, :, 78:].max() < 2e-6
    assert not np.isfinite(got["out"][:, :, 77]).all() or spoilt == 3e38


def test_columns_far_apart():
    """Each chunk of columns is as exact as the others, whatever their sizes are."""
    given = {n: normal(1, 1, 140, 256, type="f32", seed=i) for i, n in enumerate("qkv")}
    given["v"] *= np.float32(2.0) ** (np.arange(256) // 64 * 4 - 6).astype(np.float32)
    exact = solve(**{n: x.astype(np.float64) for n, x in given.items()}, backend="emulated:simt")
    got = solve(**given, backend=BACKEND)
    for first in range(0, 256, 64):
        columns = np.s_[..., first : first + 64]
        size = np.abs(exact["out"][columns]).max()
        assert np.abs(got["out"][columns] - exact["out"][columns]).max() < 2e-6 * size, first
