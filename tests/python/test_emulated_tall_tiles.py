"""Tiles of 128 rows in backward kernels, on the emulated machine: Hopper's for head sizes up to 64, and
mma's above 160.

These tests need the environment of test_emulated.py.
"""

import pytest

import cases
import regard_ctypes as regard
from selection import one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

# A last tile of one row, of a half and of more than a half; rows that see no key.
PROBLEMS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv, options of the call
    ("bf16", ("bottom_right", "dlse"), (4, 2), (449, 390), 64, 40, {}),
    ("f16", ("top_left", "positions", "sink"), (2, 1), (600, 500), 32, 64, {}),
    ("bf16", ("packed", "window", "accumulate"), (4, 2), (560, 400), 48, 64, {}),
    ("f16", ("bottom_right", "seqused", "f32_outputs"), (2, 1), (700, 530), 64, 64,
     {"multiprocessors": 1}),
    ("bf16", ("top_left",), (2, 2), (500, 390), 17, 24, {"deterministic": 1}),
    ("f16", (), (3, 1), (512, 120), 64, 64, {"deterministic": 1}),
    ("f16", (), (2, 1), (450, 260), 64, 64, {"wanted": ["dk"]}),
    ("bf16", ("bottom_right",), (2, 1), (520, 260), 64, 64, {"wanted": ["dq", "dk"]}),
    ("bf16", ("top_left",), (2, 1), (460, 260), 64, 64, {"wanted": ["dv"]}),
    ("bf16", ("bottom_right", "delta"), (6, 1), (550, 300), 32, 64, {"multiprocessors": 1})]


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v, options", one_in(3, PROBLEMS),
                         ids=str)
def test_tall_tiles(type, features, heads, sizes, dim, dim_v, options):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    case.options["deterministic"] = options.get("deterministic", 0)
    how = {"backend": f"emulated:wgmma@rows=128+sm_90+mixed+{dim}",
           "multiprocessors": options.get("multiprocessors", 0)}
    text, _ = regard.explain(case.attention(), "backward", **how)
    assert "tile 128 x 128" in text, text
    cases.compare(case, cases.run(case, wanted=options.get("wanted"), **how))


PROBLEMS_OF_MMA = [  # type, features, (Sq, Sk), D, Dv, deterministic
    ("bf16", ("bottom_right", "dlse", "grouped"), (500, 390), 256, 256, False),
    ("f16", ("packed", "dropout"), (255, 150), 192, 128, False),
    ("bf16", ("top_left", "positions", "accumulate", "sink"), (640, 400), 176, 192, False),
    ("f16", ("bias_head", "seqused"), (250, 136), 192, 192, False),
    ("bf16", ("mask", "bottom_right"), (384, 392), 168, 64, True),
    ("f16", ("alibi", "window", "f32_outputs"), (510, 400), 184, 136, True),
    ("bf16", ("window", "seqused"), (510, 400), 248, 200, True)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v, deterministic",
                         one_in(3, PROBLEMS_OF_MMA), ids=str)
def test_tall_tiles_of_mma(type, features, sizes, dim, dim_v, deterministic):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v)
    case.options["deterministic"] = int(deterministic)
    backend = "emulated:mma+sm_90+mixed"
    text, _ = regard.explain(case.attention(), "backward", backend=backend)
    assert "tile 128 x 64" in text, text
    cases.compare(case, cases.run(case, backend))
