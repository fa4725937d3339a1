"""Tiles of the mma family for short sequences, forced by name, on the emulated machine.

These tests need the environment of test_emulated.py.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import problem, solve, with_values
from test_emulated import judge_forward

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

ONE_WARP, TWO_TILES = "rows=16,keys=16,warps=1,stages=2", "rows=16,keys=32,warps=1,stages=1"
MANY_KEYS, HIGH = "rows=16,keys=64,warps=1,stages=1", "rows=32,keys=32,warps=1,stages=1"
TWO_WARPS, LOW = "rows=32,keys=64,warps=2,stages=1", "rows=16,keys=16,warps=1,stages=1"
FOUR_BLOCKS = "rows=64,keys=64,warps=4,stages=1,min_blocks=4"
EIGHT_KEY_WARPS = "rows=16,keys=16,warps=8,stages=2,key_warps=8"
NARROW_KEYS = "rows=32,keys=16,warps=2,stages=1"
F32_FOUR, F32_TWO = ("rows=16,keys=16,warps=4,stages=1,slices=4",
                     "rows=32,keys=16,warps=4,stages=1,slices=2")
FOUR_SHARES, TWO_SHARES = ("rows=16,keys=32,warps=4,stages=1,slices=4",
                           "rows=32,keys=32,warps=4,stages=1,slices=2")
SQUARE = "rows=32,keys=32,warps=2,stages=1"
SLICED = "rows=64,keys=64,warps=4,stages=1,slices=2"

FORWARD = [  # tiling, type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    (ONE_WARP, "bf16", ("bottom_right",), (2, 2), (12, 40), 64, 64),
    (TWO_TILES, "f16", ("packed", "odd"), (4, 2), (15, 60), 33, 61),
    (LOW, "bf16", ("window", "dropout"), (2, 1), (16, 50), 200, 136),
    (MANY_KEYS, "f16", ("mask", "sink"), (4, 1), (4, 150), 64, 64),
    (HIGH, "bf16", ("top_left", "alibi", "gaps"), (2, 2), (31, 70), 96, 128),
    (TWO_WARPS, "f16", ("bias", "softcap"), (2, 1), (25, 100), 128, 72),
    (FOUR_BLOCKS, "bf16", ("row_spans", "seqused", "f32_outputs"), (2, 2), (64, 90), 64, 64),
    (TWO_WARPS, "bf16", ("positions", "top_left", "bshd"), (2, 2), (30, 77), 64, 64),
    (EIGHT_KEY_WARPS, "bf16", ("bottom_right", "window"), (24, 1), (1, 900), 64, 72),
    (NARROW_KEYS, "f16", ("packed", "top_left"), (4, 2), (48, 47), 240, 200),
    (F32_FOUR, "f32", ("window", "dropout"), (2, 2), (90, 70), 200, 256),
    (F32_TWO, "f32", ("bottom_right", "mask"), (2, 1), (50, 60), 256, 136),
    (FOUR_SHARES, "bf16", ("window", "dropout"), (2, 2), (90, 70), 248, 200),
    (TWO_SHARES, "f16", ("bottom_right", "mask"), (2, 1), (54, 60), 200, 136),
    (TWO_SHARES, "bf16", ("packed", "top_left"), (2, 1), (60, 90), 512, 264),
    (NARROW_KEYS, "f32", ("packed", "alibi"), (2, 2), (40, 90), 248, 248),
    (SQUARE, "f32", ("window",), (4, 2), (70, 75), 64, 56)]
BACKWARD = [
    (LOW, "bf16", ("bottom_right", "dlse"), (2, 2), (14, 16), 128, 128),
    (LOW, "f16", ("sink", "accumulate", "padded"), (4, 2), (12, 15), 33, 61),
    (HIGH, "f16", ("top_left", "packed"), (4, 2), (30, 31), 64, 64),
    (SLICED, "bf16", ("window", "dropout", "f32_outputs"), (2, 1), (60, 64), 128, 104)]


@pytest.mark.parametrize("pass_, row", one_in(
    3, [("forward", row) for row in FORWARD] + [("backward", row) for row in BACKWARD]), ids=str)
@pytest.mark.parametrize("chip", mostly_exhaustive(["sm_90", "sm_80"], "sm_90"))
def test_tile(chip, pass_, row):
    tiling, type, features, heads, sizes, dim, dim_v = row
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    backend = f"emulated:mma@{tiling}+{chip}+mixed+{dim}"
    if pass_ == "forward":
        judge_forward(case, backend)
    else:
        cases.compare(case, cases.run(case, backend))


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("tiling", one_in(
    2, [(ONE_WARP,), (HIGH,), (TWO_WARPS,), (FOUR_BLOCKS,), (FOUR_SHARES,), (TWO_SHARES,)]))
def test_hidden_nan(tiling):
    """A value of NaN that the last rows alone see reaches no other row."""
    given = problem(1, 2, 2, 40, 60, 64, type="bf16")
    del given["dout"]
    given["v"] = with_values(given["v"], np.s_[:, :, 50, 7], np.nan)
    got, want = (solve(**given, backend=backend, causal="bottom_right")
                 for backend in (f"emulated:mma@{tiling}+sm_90+mixed", "emulated:simt"))
    out, true = (regard.load(x["out"]) for x in (got, want))
    assert np.isnan(out[:, :, 30:, 7]).all() and np.isfinite(out[:, :, :30]).all()
    assert np.abs(out[:, :, :30] - true[:, :, :30]).max() < 0.02
