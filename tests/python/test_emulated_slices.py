"""Hopper's forward kernel for head sizes above 256, on the emulated machine.

These tests need the environment of test_emulated.py. Above 256 columns of out two blocks share a tile of
rows, each with half of the columns.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import close, problem, solve, with_values
from test_emulated import judge_forward, refused

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

WGMMA = "emulated:wgmma+sm_90+mixed"
# Slices that end within a panel of 64 columns, or with columns that do not exist.
PROBLEMS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    ("bf16", ("bottom_right", "dlse"), (2, 1), (200, 150), 512, 512),
    ("f16", (), (2, 2), (130, 90), 320, 320),
    ("bf16", ("packed", "top_left", "f32_outputs"), (2, 1), (140, 150), 264, 296),
    ("f16", ("window", "sink", "seqused"), (2, 1), (150, 200), 384, 360),
    ("bf16", ("bias_shared", "mask", "bottom_right"), (2, 1), (140, 136), 512, 272),
    ("f16", ("softcap", "alibi", "dropout"), (2, 1), (100, 133), 320, 320),
    ("bf16", ("dropout", "bshd"), (2, 1), (140, 133), 448, 512),
    ("f16", ("row_spans", "key_spans", "packed"), (2, 1), (150, 200), 320, 400),
    ("bf16", ("positions", "top_left", "negative_scale"), (2, 1), (280, 170), 300, 500),
    ("f16", ("bias_keys", "gaps"), (2, 1), (130, 70), 401, 311),
    # Columns of one block.
    ("bf16", ("bottom_right", "grouped"), (4, 2), (140, 150), 512, 256),
    ("f16", ("packed", "bias_head"), (2, 1), (140, 150), 384, 128),
    ("bf16", ("mask_keys", "softcap"), (2, 1), (140, 150), 304, 64),
    # Columns of two next to few of q.
    ("f16", ("bottom_right",), (2, 1), (140, 150), 64, 512),
    ("bf16", ("window", "seqused"), (2, 1), (140, 150), 128, 272)]


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", one_in(5, PROBLEMS), ids=str)
def test_wide_heads(type, features, heads, sizes, dim, dim_v):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    backend = f"{WGMMA}+{dim}"
    text, _ = regard.explain(case.attention(), "forward", backend=backend)
    assert ("x 2 slices" in text) == (dim_v > 256), text
    judge_forward(case, backend)


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("column", mostly_exhaustive([7, 250]))
def test_hidden_nan(column):
    """A value of NaN in either slice, which the last rows alone see, reaches no other row."""
    given = problem(1, 2, 1, 200, 300, 264, type="bf16")
    given["v"] = with_values(given["v"], np.s_[:, :, 290, column], np.nan)
    got, want = (solve(**given, backend=backend, causal="bottom_right", gradients=False)
                 for backend in (WGMMA, "emulated:simt"))
    out = regard.load(got["out"])
    assert np.isfinite(out[:, :, :190]).all() and np.isnan(out[:, :, 190:, column]).all()
    close(got["out"], want["out"], "out")


@pytest.mark.parametrize("features, type, reason", [
    ((), "f32", "no tile for head sizes of f32 above 256"),
    (("continued",), "bf16", "continue no call with a head size above 256")])
def test_what_is_left_to_mma(features, type, reason):
    case = cases.make(features, type, sizes=(70, 90), dim=264, dim_v=64)
    assert reason in refused(case, WGMMA)
