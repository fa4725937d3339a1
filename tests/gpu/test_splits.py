"""Backward passes that split the query rows of a tile of keys over blocks, against the oracle."""

import pytest

import cases
from test_emulated_splits import SPLITS


@pytest.mark.parametrize("family, type, features, heads, sizes, dim, dim_v, deterministic", SPLITS,
                         ids=str)
def test_splits(family, type, features, heads, sizes, dim, dim_v, deterministic, backend):
    if backend.startswith("cuda:") and backend != f"cuda:{family}":
        pytest.skip("another family has this case")
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    case.options["deterministic"] = int(deterministic)
    cases.compare(case, cases.run(case, backend))
