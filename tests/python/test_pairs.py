"""All pairs of features, forward and backward, on every backend and type, against the oracle."""

import functools
import itertools

import pytest

import cases

TYPES = ["f64", "f32", "bf16", "f16"]
PAIRS = [pair for pair in itertools.combinations(cases.FEATURES, 2) if cases.compatible(*pair)]


@functools.lru_cache(maxsize=8)
def made(features, type, large=False):
    return cases.make(features, type, **({"sizes": (150, 333), "dim": 40} if large else {}))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pair(pair, type, backend):
    case = made(pair, type)
    cases.compare(case, cases.run(case, backend))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("feature", [name for name in cases.FEATURES if name != "odd"])
def test_feature_across_tiles(feature, type, kernel):
    """Lengths and head sizes that no tile divides, over several tiles."""
    case = made((feature,), type, large=True)
    cases.compare(case, cases.run(case, kernel, threads=2))


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dbias", "dsink"])
@pytest.mark.parametrize("type", TYPES)
def test_one_gradient_alone(wanted, type, backend):
    case = made(("bias_head", "sink", "grouped", "bottom_right"), type)
    cases.compare(case, cases.run(case, backend, wanted=[wanted]))


@pytest.mark.parametrize("type", TYPES)
def test_everything_at_once(type, backend):
    case = made(("bias_head", "sink", "grouped", "bottom_right", "window", "softcap", "scale",
                 "mask", "alibi_batch", "dropout", "seqused", "value_size", "odd", "dlse", "gaps"),
                type)
    cases.compare(case, cases.run(case, backend))
