"""Forward passes of Hopper's kernel that split the keys of a tile of rows, on the emulated machine.

These tests need the environment of test_emulated.py. Few tiles of rows, with more keys than repay the
merge of the parts.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import close, problem, solve, with_values
from test_emulated import judge_forward

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

# Intervals, lengths and maps leave some splits without a block of keys.
SPLITS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    ("bf16", ("bottom_right", "sink"), (2, 1), (300, 1500), 128, 128),
    ("f16", ("bottom_right", "scale"), (1, 1), (300, 1500), 64, 128),
    ("bf16", ("packed", "bottom_right", "f32_outputs"), (2, 1), (300, 1500), 64, 128),
    ("f16", ("seqused", "dropout", "bottom_right"), (2, 1), (200, 1500), 256, 256),
    ("bf16", ("mask", "grouped"), (4, 2), (300, 1500), 128, 64),
    ("f32", ("bottom_right",), (2, 1), (200, 1000), 64, 64),
    ("f16", ("packed", "alibi"), (2, 1), (200, 2500), 72, 40),
    ("bf16", (), (2, 1), (150, 1500), 64, 64),
    ("bf16", ("bottom_right", "softcap"), (2, 1), (300, 1500), 64, 64),
    ("bf16", ("seqused", "dropout"), (2, 1), (200, 1500), 128, 128),
    ("bf16", ("bias_shared", "bottom_right"), (2, 1), (200, 1504), 64, 64),
    ("f16", ("bias_head",), (2, 1), (200, 1400), 128, 64),
    ("bf16", ("bias_keys", "seqused"), (2, 1), (200, 1400), 128, 64),
    ("f16", ("odd", "gaps"), (1, 1), (200, 1500), 33, 61),
    ("f16", ("row_spans", "key_spans", "packed"), (2, 1), (200, 1500), 64, 64),
    ("bf16", ("mask_keys", "bottom_right", "seqused", "sink"), (2, 1), (200, 1500), 64, 64),
    ("bf16", ("positions", "alibi", "dropout"), (2, 1), (300, 1700), 64, 64),
    ("f32", ("seqused", "alibi", "sink"), (2, 1), (200, 1000), 128, 96),
    ("f32", ("packed", "softcap"), (1, 1), (200, 1000), 200, 136),
    ("f32", ("key_spans", "dropout"), (2, 1), (200, 1000), 64, 64)]


def is_split(case, backend):
    text, _ = regard.explain(case.attention(), "forward", backend=backend)
    return "the keys of each go to" in text


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", one_in(6, SPLITS), ids=str)
def test_key_splits(type, features, heads, sizes, dim, dim_v):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    backend = f"emulated:wgmma+sm_90+mixed+{dim}"
    assert is_split(case, backend)
    judge_forward(case, backend)


def test_continued():
    """Combine merges the parts, and what out and lse hold."""
    case = cases.make(("continued", "bottom_right"), "bf16", heads=(2, 1), sizes=(200, 1500), dim=64)
    backend = "emulated:wgmma+sm_90+mixed"
    assert is_split(case, backend)
    cases.compare(case, cases.run(case, backend, wanted=["dv"]))


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("type", mostly_exhaustive(["bf16", "f32"], "bf16"))
def test_hidden_nan(type):
    """A value of NaN that the last rows alone see reaches no other row."""
    given = problem(1, 2, 1, 200, 1000, 48, type=type)
    given["v"] = with_values(given["v"], np.s_[:, :, 990, 7], np.nan)
    got, want = (solve(**given, backend=backend, causal="bottom_right", gradients=False)
                 for backend in ("emulated:wgmma+sm_90+mixed", "emulated:simt"))
    out = regard.load(got["out"])
    assert np.isfinite(out[:, :, :190]).all() and np.isnan(out[:, :, 190:, 7]).all()
    close(got["out"], want["out"], "out")
