"""Backward passes that split the query rows of a tile of keys over blocks, on the emulated machine.

These tests need the environment of test_emulated.py. Few tiles of keys, with more iterations over tiles
of rows and query heads than repay the sum of the parts.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from solve import close, problem, solve, with_values
from selection import mostly_exhaustive, one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

# Heads, rows of heads, and both; parts that begin within a head, and whole heads; blocks without rows.
SPLITS = [  # family, type, features, (Hq, Hkv), (Sq, Sk), D, Dv, deterministic
    ("wgmma", "bf16", (), (8, 1), (300, 150), 64, 64, False),
    ("mma", "f16", ("top_left",), (8, 2), (330, 300), 64, 40, False),
    ("wgmma", "f16", ("top_left", "dlse"), (8, 1), (390, 300), 128, 64, True),
    ("mma", "bf16", ("window", "bottom_right"), (6, 1), (500, 300), 128, 128, True),
    ("wgmma", "bf16", ("packed", "bottom_right", "f32_outputs"), (8, 2), (400, 200), 64, 128, False),
    ("mma", "bf16", ("packed", "accumulate"), (8, 2), (300, 100), 40, 24, False),
    ("wgmma", "bf16", ("seqused", "window", "dropout"), (8, 2), (400, 500), 128, 128, False),
    ("mma", "f32", ("seqused", "bottom_right", "sink"), (8, 1), (330, 100), 48, 64, False),
    ("wgmma", "bf16", ("bias_shared", "top_left"), (8, 1), (200, 136), 64, 64, True),
    ("mma", "f16", ("bias_head", "bottom_right"), (8, 1), (200, 136), 64, 64, False),
    ("wgmma", "f16", ("bias_batch", "mask"), (8, 1), (200, 136), 64, 64, False),
    ("mma", "f16", ("bias_queries", "dropout"), (8, 1), (200, 100), 64, 64, False),
    ("wgmma", "bf16", ("bias_keys", "window"), (8, 1), (250, 136), 128, 64, False),
    ("mma", "bf16", ("bias_keys", "seqused"), (8, 1), (250, 100), 64, 64, False),
    ("wgmma", "f32", ("grouped", "bottom_right"), (8, 1), (330, 200), 64, 64, False),
    ("wgmma", "f32", ("softcap", "packed", "accumulate"), (8, 1), (330, 100), 96, 64, False),
    ("wgmma", "f32", ("dropout",), (8, 1), (200, 100), 40, 64, True),
    ("wgmma", "bf16", ("top_left", "alibi"), (4, 1), (400, 200), 192, 136, False),
    ("wgmma", "f16", ("packed", "softcap", "accumulate"), (4, 1), (400, 100), 256, 256, True),
    # Blocks in pairs.
    ("wgmma", "bf16", ("top_left", "dlse"), (4, 1), (560, 130), 256, 256, False),
    ("wgmma", "f16", ("window", "bottom_right"), (8, 1), (520, 300), 256, 64, True),
    # One head: its rows alone.
    ("wgmma", "bf16", ("top_left", "odd"), (1, 1), (1500, 70), 33, 33, False),
    ("mma", "bf16", ("odd", "gaps"), (1, 1), (1500, 70), 33, 61, False)]


@pytest.mark.parametrize("family, type, features, heads, sizes, dim, dim_v, deterministic",
                         one_in(12, SPLITS), ids=str)
def test_splits(family, type, features, heads, sizes, dim, dim_v, deterministic):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    case.options["deterministic"] = int(deterministic)
    backend = f"emulated:{family}+sm_90+mixed+{dim}"
    of_f32 = type == "f32" and family == "wgmma"
    no_dbias = {"wanted": ["dq", "dk", "dv"]} if of_f32 else {}
    cases.compare(case, cases.run(case, backend, **no_dbias))


@pytest.mark.parametrize("wanted", mostly_exhaustive(["dq", "dk", "dv"], "dv"))
@pytest.mark.parametrize("family", mostly_exhaustive(["mma", "wgmma"], "mma"))
def test_one_gradient_alone(family, wanted):
    case = cases.make(("top_left",), "bf16", heads=(8, 1), sizes=(300, 150), dim=64)
    cases.compare(case, cases.run(case, f"emulated:{family}+sm_90+mixed", wanted=[wanted]))


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("accumulate", mostly_exhaustive([False, True], True))
@pytest.mark.parametrize("name", mostly_exhaustive(["q", "dout"], "q"))
@pytest.mark.parametrize("family, type", mostly_exhaustive(
    [("wgmma", "bf16"), ("mma", "f16"), ("wgmma", "f32")], ("wgmma", "bf16")))
def test_hidden_nan(family, type, name, accumulate):
    """A NaN that most keys do not see spoils the sums of tiles; keys that see it keep it."""
    given = problem(1, 8, 1, 130, 130, 48, type=type)
    given[name] = with_values(given[name], np.s_[:, 3, 10], np.nan)
    got, want = (
        solve(**given, backend=backend, causal="top_left", accumulate=accumulate,
              into={"d" + x: with_values(given[x], np.s_[:], 1) for x in "qkv"} if accumulate else {})
        for backend in (f"emulated:{family}+sm_90+mixed", "emulated:simt"))
    for gradient in ("dq", "dk", "dv"):
        assert np.isfinite(regard.load(want[gradient][:, :, 11:])).all()
        close(got[gradient], want[gradient], gradient)
