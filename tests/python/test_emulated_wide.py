"""Hopper's backward kernel for head sizes above 128, on the emulated machine.

These tests need the environment of test_emulated.py. One warpgroup has weights and dv, another dk, and
from 256 rows on two blocks are a CTA pair.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import normal, solve, with_values
from test_emulated import judge
from test_emulated import pytestmark as pytestmark

WGMMA = "emulated:wgmma+sm_90"
WIDE = [  # type, features, (Sq, Sk), D, Dv, deterministic
    ("bf16", (), (200, 130), 256, 256, False),
    ("f16", ("bottom_right", "grouped"), (130, 200), 192, 128, True),
    ("bf16", ("top_left", "window", "softcap"), (200, 190), 136, 40, False),
    ("f16", ("packed", "bottom_right"), (140, 150), 64, 256, False),
    ("bf16", ("seqused", "dlse", "sink", "mask"), (100, 150), 192, 192, True),
    ("bf16", ("accumulate", "alibi", "dropout"), (70, 130), 256, 200, False),
    ("f16", ("f32_outputs", "negative_scale"), (65, 65), 168, 144, False),
    ("f16", ("softcap", "dropout", "packed", "mask_keys"), (100, 133), 256, 144, True),
    ("bf16", ("bias_infinite", "mask", "bottom_right"), (100, 136), 256, 256, False),
    ("bf16", ("bias_batch", "grouped", "dropout"), (100, 152), 192, 192, False),
    ("f16", ("bias_keys", "seqused", "alibi"), (70, 133), 256, 256, True),
    # From 256 rows on blocks are pairs: an odd tile of keys, and one that no row sees.
    ("bf16", ("bottom_right", "grouped"), (520, 130), 256, 256, False),
    ("f16", ("window",), (513, 200), 248, 64, False),
    ("bf16", ("sink", "dlse", "f32_outputs"), (515, 70), 256, 128, False),
    ("bf16", ("grouped",), (515, 300), 256, 256, True),
    ("f16", ("window", "bottom_right"), (520, 460), 256, 96, True),
    ("bf16", ("top_left", "accumulate"), (700, 330), 248, 128, True),
    # 96 columns of dq each.
    ("bf16", ("bottom_right",), (300, 200), 192, 128, False),
    ("f16", ("grouped", "dlse"), (257, 330), 184, 192, True),
    ("bf16", ("window", "top_left", "f32_outputs"), (400, 270), 177, 64, False),
    ("f16", ("packed", "bottom_right", "grouped"), (350, 230), 192, 128, False),
    ("bf16", ("packed", "f32_outputs"), (350, 300), 256, 256, True),
    ("f16", ("seqused", "top_left"), (300, 330), 248, 64, True)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v, deterministic", one_in(6, WIDE), ids=str)
def test_gradients_of_wide_heads(type, features, sizes, dim, dim_v, deterministic):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v)
    no_dbias = {"wanted": ["dq", "dk", "dv"]} if any("bias" in x for x in features) else {}
    judge(case, WGMMA + "+mixed+" + str(dim), deterministic, **no_dbias)


@pytest.mark.parametrize("wanted", ["dk", "dv"])
def test_one_gradient_of_wide_heads(wanted):
    case = cases.make(("top_left", "grouped"), "bf16", sizes=(200, 140), dim=192)
    judge(case, WGMMA + "+mixed", wanted=[wanted])


def gradients_of(case, backend):
    results = cases.run(case, backend, wanted=["dq", "dk", "dv"])
    return {name: regard.load(results[name]) for name in ("dq", "dk", "dv")}


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("spoilt", mostly_exhaustive([0.0, np.inf, np.nan]))
def test_pairs_of_an_odd_grid(spoilt):
    """One head and nine tiles of rows; and what is not finite of dlse is felt as by other kernels."""
    case = cases.make(("dlse",), "bf16", batch=1, heads=(1, 1), sizes=(520, 130), dim=256)
    if not spoilt:
        judge(case, WGMMA + "+mixed", wanted=["dq", "dk", "dv"])
        return
    case.dlse[0, 0, 77] = spoilt
    got, want = (gradients_of(case, name) for name in (WGMMA + "+mixed", "emulated:simt"))
    for name, array in got.items():
        assert np.array_equal(np.isfinite(array), np.isfinite(want[name])), name


@pytest.mark.parametrize("causal", mostly_exhaustive(["none", "bottom_right"], "none"))
def test_pairs_do_not_feel_keys_of_other_sequences(causal):
    """Of pairs of blocks, one has no keys of its own, and some have none at all."""
    begins_q, begins_k = [0, 290, 420, 500], [0, 200, 200, 250, 330]
    tables = {"cu_seqlens_q": np.array(begins_q, np.int32), "max_seqlen_q": 290,
              "cu_seqlens_k": np.array(begins_k[:-1], np.int32), "max_seqlen_k": 200,
              "deterministic": True, "causal": causal}
    given = {name: normal(rows, 1, 192, type="bf16", seed=seed)
             for seed, (name, rows) in enumerate({"q": 500, "k": 330, "v": 330, "dout": 500}.items())}
    attention = regard.Attention(**{x: given[x] for x in "qkv"}, **tables)
    text, _ = regard.explain(attention, "backward", backend=WGMMA)
    assert "clusters of two blocks" in text, text
    want = solve(**given, backend=WGMMA, **tables)
    for name in ("k", "v"):
        spoilt = given | {name: with_values(given[name], np.s_[200:], np.nan)}
        got = solve(**spoilt, backend=WGMMA, **tables)
        for gradient, last in {"dq": 420, "dk": 200, "dv": 200}.items():
            assert got[gradient][:last].tobytes() == want[gradient][:last].tobytes(), gradient
