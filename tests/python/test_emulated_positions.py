"""Rows with positions on the emulated GPU: several blocks of 128 rows with gaps between them."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
import sensitivity
from selection import one_in
from test_emulated import judge
from test_emulated import pytestmark as pytestmark

# Each with what reads positions: intervals, ALiBi, dropout; and with other walks over tiles.
FEATURES = [
    ("positions", "top_left"),
    ("positions", "window", "grouped"),
    ("positions", "top_left", "alibi_batch", "softcap"),
    ("positions", "window", "dropout", "sink"),
    ("positions", "top_left", "mask", "row_span"),
    ("positions", "window", "alibi", "dropout", "seqused", "bias_head"),
]
FAMILIES = [("wgmma", "bf16", 64), ("wgmma", "f32", 64), ("mma", "f16", 64), ("mma", "bf16", 128),
            ("wgmma", "f16", 128), ("simt", "f32", 40)]


@pytest.mark.parametrize("family, type, dim, features, deterministic", one_in(5, (
    (*family, features, deterministic) for family in FAMILIES for features in FEATURES
    for deterministic in (False, True))))
def test_blocks_apart(family, type, dim, features, deterministic):
    case = cases.make(features, type, sizes=(330, 420), dim=dim, batch=2)
    sensitivity.check(case)
    chip = "sm_90" if family == "wgmma" else "sm_80"
    judge(case, f"emulated:{family}+{chip}+mixed+3", deterministic)


@pytest.mark.parametrize("family, type, dim", [("wgmma", "bf16", 64), ("mma", "f16", 64)])
@pytest.mark.parametrize("starts", [[512, 0, 100], [-2**31, 2**31 - 1, 0]])
def test_a_wrong_table_ends(starts, family, type, dim):
    """On a GPU nobody checks the table: results are undefined, but no block waits for a turn that
    never comes, and no memory is touched that is not the call's."""
    case = cases.make(("positions", "top_left"), type, sizes=(330, 1000), dim=dim)
    case.inputs["q_positions"] = np.int32(starts)
    case.options |= {"deterministic": 1, "k_position": 0}
    chip = "sm_90" if family == "wgmma" else "sm_80"
    results = cases.run(case, f"emulated:{family}+{chip}+mixed", guard=True)
    assert all(results.keeps_between(name) for name in results)
    assert regard.load(results["out"]).shape == case.truth["out"].shape
