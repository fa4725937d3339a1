"""Backward blocks of Hopper's kernel that take a tile of rows of every query head before the next tile
of rows, on the emulated machine.

These tests need the environment of test_emulated.py. So few multiprocessors that no tile of keys is
split, which would come first.
"""

import pytest

import cases
import regard_ctypes as regard
from selection import one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

# Tiles of keys that fewer row tiles see than there are tiles before them begin within the walk.
PROBLEMS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    ("bf16", ("bottom_right", "dlse"), (6, 1), (390, 400), 64, 64),
    ("f16", ("packed", "top_left", "accumulate"), (14, 2), (300, 400), 48, 80),
    ("bf16", ("top_left", "alibi", "f32_outputs"), (8, 1), (400, 400), 128, 128),
    ("f16", ("bottom_right", "dropout", "seqused"), (7, 1), (390, 400), 128, 64),
    ("bf16", ("top_left", "softcap", "sink"), (6, 1), (330, 300), 192, 136),
    ("bf16", ("bottom_right", "delta"), (6, 1), (550, 400), 256, 256),  # pairs of blocks
    ("f32", ("bottom_right",), (12, 2), (300, 350), 64, 48)]


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", one_in(3, PROBLEMS), ids=str)
def test_rows_outer(type, features, heads, sizes, dim, dim_v):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    how = {"backend": f"emulated:wgmma+sm_90+mixed+{dim}", "multiprocessors": 1}
    text, _ = regard.explain(case.attention(), "backward", **how)
    assert "query heads of a row tile in turn" in text, text
    cases.compare(case, cases.run(case, **how))
