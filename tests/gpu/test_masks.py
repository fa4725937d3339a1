"""Masks with hidden, partial and full tiles: the patterns of test_emulated_tile_map.py on a GPU."""

import pytest

from test_emulated_tile_map import MANY_TILES, PATTERNS, masked, uneven
from test_features import judge

SHAPES = [(64, 64, (2, 2)), (128, 128, (2, 1)), (192, 128, (2, 1))]  # D, Dv, heads of q and k


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("type", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern, type, deterministic, backend):
    index = list(PATTERNS).index(pattern) + deterministic
    judge(masked(pattern, (), type, *SHAPES[index % len(SHAPES)]), backend, deterministic)


@pytest.mark.parametrize("features", [("dropout",), ("softcap", "sink"), ("alibi", "dlse")],
                         ids="+".join)
@pytest.mark.parametrize("pattern", ["causal documents", "tree", "a matrix for each head"])
def test_pattern_and_features(pattern, features, backend):
    judge(masked(pattern, features, "bf16", 64, 64, (2, 2)), backend)


@pytest.mark.parametrize("rows, columns", MANY_TILES)
def test_order_of_tiles(rows, columns, backend):
    judge(uneven(rows, columns), backend)
