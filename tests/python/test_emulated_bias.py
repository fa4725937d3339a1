"""The bias that TMA loads in family wgmma, and what dbias holds, on the emulated machine.

As test_emulated.py, whose environment these tests need.
"""


import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import normal, problem, solve

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")


def judge(case, backend):
    """out and lse against the oracle."""
    results = cases.Outputs()
    results.add("out", case.dout.shape, case.dout.dtype, case.spec["layout"])
    results.add("lse", case.truth["lse"].shape, np.dtype(np.float32), case.spec["layout"])
    regard.forward(case.attention(), results["out"], results["lse"], backend=backend)
    cases.compare(case, results)


# Rows of a multiple of eight keys; shapes by what is broadcast.
SHAPES = [(1, "h", "q", "k"), ("b", 1, "q", "k"), ("b", "h", "q", "k"), ("q", "k")]
TERMS = [(), ("top_left",), ("bottom_right", "window"), ("bias_infinite", "bottom_right"),
         ("softcap", "alibi"), ("dropout", "sink"), ("grouped", "gaps")]


SIZES = {64: (140, 264), 128: (70, 400), 192: (70, 200), 256: (130, 136)}  # 192: without TMA


@pytest.mark.parametrize("turn, dim", one_in(4, (
    (turn, dim) for turn in range(len(TERMS)) for dim in ([128, 256, 192][turn % 3], 64))))
def test_bias_by_tma(turn, dim):
    features, sizes = TERMS[turn], SIZES[dim]
    turn += dim // 64
    type = ["bf16", "f16"][turn % 2]
    named = () if "bias_infinite" in features else ("bias",)
    more = {} if "bias_infinite" in features else {"bias": SHAPES[turn % len(SHAPES)]}
    case = cases.make(named + features, type, sizes=sizes, dim=dim, dim_v=dim, batch=2, **more)
    judge(case, f"emulated:wgmma+sm_90+mixed+{dim}")


# More tiles than multiprocessors: blocks go on from one to the next.
@pytest.mark.parametrize("order", mostly_exhaustive(["forward", "backward", "mixed"], "mixed"))
@pytest.mark.parametrize("features, sizes, dim, tiling", one_in(4, [
    (("top_left",), (136, 264), 16, "rows=128,keys=128,stages=2"),
    (("window",), (130, 200), 16, "rows=128,keys=64,stages=2"),
    ((), (200, 136), 16, "rows=192,keys=128,stages=2"),
    (("top_left",), (130, 264), 128, "rows=128,keys=128,stages=2")]), ids=str)
def test_the_bias_of_tile_after_tile(features, sizes, dim, tiling, order):
    more = {"window": (40, 9)} if "window" in features else {}
    heads = (15, 15) if dim == 16 else (7, 7)
    case = cases.make(("bias",) + features, "bf16", sizes=sizes, dim=dim, dim_v=dim, batch=10,
                      heads=heads, bias=(1, "h", "q", "k"), **more)
    judge(case, f"emulated:wgmma@{tiling}+sm_90+{order}")


@pytest.mark.parametrize("family, bias", [
    ("simt", (2, 1, 21, 39)), ("mma", (2, 2, 21, 39)), ("mma", (1, 2, 21, 39))])
def test_what_an_f64_dbias_holds_is_not_rounded(family, bias):
    """Gradients of 0 are added to it, by each kernel that takes a bias of f64."""
    given = problem(2, 2, 2, 21, 39, 16, type="f16") | {"bias": normal(*bias)}
    given["dout"] = np.zeros_like(given["dout"])
    held = normal(*bias, seed=1)
    dbias = solve(**given, backend=f"emulated:{family}+sm_80", accumulate=True,
                  into={"dq": given["q"].copy(), "dk": given["k"].copy(), "dv": given["v"].copy(),
                        "dbias": held.copy()})["dbias"]
    assert np.array_equal(dbias, held)
