"""Every pair of features by itself; test_features.py has all pairs in a few larger sets.

Collected with --all-pairs only: thousands of kernels are compiled.
"""

import itertools

import pytest

import cases
from test_features import TYPES, judge, made

PAIRS = [pair for pair in itertools.combinations(cases.FEATURES, 2) if cases.compatible(*pair)]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pair(pair, type, backend):
    judge(made(pair, type, 0), backend)
