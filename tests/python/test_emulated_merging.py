"""Continued forward passes and given deltas on the emulated GPU, in each family's ways to a result."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
import sensitivity
from selection import one_in
from solve import with_values
from test_emulated import judge
from test_emulated import pytestmark as pytestmark

FEATURES = [
    ("continued",),
    ("continued", "delta", "top_left", "grouped", "dlse"),
    ("continued", "delta", "mask", "sink", "dropout"),
    ("continued", "delta", "packed", "bottom_right", "accumulate", "f32_outputs"),
    ("continued", "seqused", "bias_head", "softcap", "gaps"),
    ("continued", "delta", "positions", "window", "alibi"),
    ("continued", "delta", "row_spans", "odd"),
]
# Tiles of rows, keys split over blocks, a tile for each warp, few rows; more columns than a warp takes.
SHAPES = [  # family, type, (Hq, Hkv), (Sq, Sk), D, Dv
    ("wgmma", "bf16", (2, 2), (150, 300), 64, 64),
    ("wgmma", "f16", (4, 2), (200, 150), 128, 128),
    ("wgmma", "f32", (2, 2), (150, 300), 64, 40),
    ("mma", "f16", (4, 2), (300, 330), 64, 64),
    ("mma", "bf16", (2, 2), (70, 900), 128, 200),
    ("mma", "f32", (2, 1), (70, 150), 40, 200),
    ("mma", "bf16", (4, 1), (6, 600), 128, 128),
    ("simt", "f64", (2, 2), (70, 100), 40, 24),
    ("simt", "f32", (4, 2), (70, 100), 72, 136),
]


@pytest.mark.parametrize("family, type, heads, sizes, dim, dim_v, features", one_in(5, (
    (*shape, features) for shape in SHAPES for features in FEATURES)))
def test_features(family, type, heads, sizes, dim, dim_v, features):
    fixed = {key for feature in features for key in cases.FEATURES[feature]}
    base = {"heads": heads, "sizes": sizes, "dim": dim, "dim_v": dim_v}
    case = cases.make(features, type, **{name: x for name, x in base.items()
                                         if name not in fixed})
    if type == "bf16":
        sensitivity.check(case)
    chip = "sm_90" if family == "wgmma" else "sm_80"
    judge(case, f"emulated:{family}+{chip}+mixed+{dim}")


@pytest.mark.parametrize("family, type, sizes, dim", [
    ("wgmma", "bf16", (150, 300), 64), ("wgmma", "f32", (150, 300), 64),
    ("mma", "f16", (150, 300), 64), ("mma", "bf16", (70, 300), 256), ("mma", "bf16", (6, 600), 128),
    ("simt", "f32", (70, 100), 40)])
def test_rows_with_hidden_nan_keep_what_they_held(family, type, sizes, dim):
    """Such rows are computed again, from what out and lse held before the call; also those that see no
    key. NaN and infinity in the given results stay in their row."""
    case = cases.make(("continued", "mask"), type, sizes=sizes, dim=dim)
    case.inputs["mask"][0, 0, :, 5] = False
    assert case.values["mask"] is case.inputs["mask"]
    truth = case.truth
    for name in "kv":
        case.inputs[name] = with_values(case.inputs[name], (0, 0, 5), np.nan)
    results = {name: case.values["given_" + name].copy() for name in ("out", "lse")}
    results["out"][1, 1, 1, 3] = results["lse"][1, 0, 1] = np.nan
    results["lse"][1, 0, 3] = np.inf
    chip = "sm_90" if family == "wgmma" else "sm_80"
    regard.forward(case.attention(), results["out"], results["lse"],
                   backend=f"emulated:{family}+{chip}+mixed")
    assert np.isnan(results["out"][1, 1, 1, 3]) and np.isnan(results["lse"][1, 0, 1])
    assert results["lse"][1, 0, 3] == np.inf
    assert np.isnan(results["out"][1, 0, [1, 3]]).all()
    for name, row in (("out", (1, 1, 1, 3)), ("out", (1, 0, 1)), ("lse", (1, 0, 1)),
                      ("out", (1, 0, 3)), ("lse", (1, 0, 3))):
        results[name][row] = truth[name][row]
    cases.compare(case, results)


@pytest.mark.parametrize("type, features, dim, limit", one_in(3, [
    ("bf16", ("continued", "top_left"), 64, 1),
    ("f16", ("continued", "packed", "dropout"), 64, 3),
    ("f32", ("top_left", "grouped"), 64, 2),
    ("f16", ("seqused", "window", "mask"), 128, 2),
    ("bf16", ("packed", "row_spans"), 192, 2),
    ("bf16", ("packed", "bottom_right"), 128, 2),  # whole heads of short sequences at once
    ("f32", ("packed", "grouped"), 64, 1),
    ("f32", ("f32_outputs", "sink"), 96, 3),
    ("bf16", ("bias_batch", "top_left"), 64, 2),
    ("bf16", ("accumulate", "f32_outputs", "seqused"), 128, 1),
    ("f16", ("grouped", "top_left", "alibi"), 256, 3)]))
def test_few_multiprocessors(type, features, dim, limit):
    """Blocks of the persistent kernels take several tiles each."""
    case = cases.make(features, type, sizes=(330, 300), dim=dim)
    judge(case, "emulated:wgmma+sm_90+mixed", multiprocessors=limit)
