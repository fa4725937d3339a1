"""Rows with positions on the emulated GPU: several blocks of 128 rows with gaps between them."""

import pytest

import cases
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


@pytest.mark.parametrize("family, type, dim, features, deterministic", one_in(4, (
    (*family, features, deterministic) for family in FAMILIES for features in FEATURES
    for deterministic in (False, True))))
def test_blocks_apart(family, type, dim, features, deterministic):
    case = cases.make(features, type, sizes=(330, 420), dim=dim, batch=2)
    sensitivity.check(case)
    chip = "sm_90" if family == "wgmma" else "sm_80"
    judge(case, f"emulated:{family}+{chip}+mixed+3", deterministic)
