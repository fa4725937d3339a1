"""All pairs of features, forward and backward, on every backend and type, against the oracle.

Each backend and type meets all pairs in the sets of cover.py. Each pair by itself, which tells more
of a fault, is for bf16 by the kernels that the library would choose here, and for the reference in
float64; for the other backends and types those tests are exhaustive.
"""

import functools
import itertools

import pytest

import cases
import cover
import sensitivity
from selection import host_backends, is_repeated

TYPES = ["f64", "f32", "bf16", "f16"]
PAIRS = [pair for pair in itertools.combinations(cases.FEATURES, 2) if cases.compatible(*pair)]
SETS = cover.cover()
LARGE = {"sizes": (150, 333), "dim": 40}  # what no tile divides, over several tiles
SHAPES = [{}, {"sizes": (70, 133), "dim": 40}]


@functools.lru_cache(maxsize=8)
def made(features, type, **base):
    return cases.make(features, type, **base)


def chosen(type):
    """The backend of which a type has each pair by itself."""
    if type == "f64":
        return "reference"
    kernels = [name for name in host_backends() if not is_repeated(name, type)]
    return kernels[0] if type in ("f32", "bf16") else None


def check_features(case):
    """Each moves the results; of other types the cases are the same and their tolerances narrower."""
    if case.type == "bf16":
        sensitivity.check(case)


def one_by_one():
    """Each type and backend; the ones that are not chosen, and f32, are exhaustive."""
    return [pytest.param(type, backend, marks=() if backend == chosen(type) and type != "f32" else
                         pytest.mark.exhaustive)
            for type in TYPES for backend in host_backends()]


def shaped(features, shape):
    """Sizes that features do not set themselves; hashable."""
    fixed = {key for feature in features for key in cases.FEATURES[feature]}
    fixed |= {"dim"} if "dim_v" in fixed else set()
    return {name: value for name, value in shape.items() if name not in fixed}


@pytest.mark.parametrize("type, backend", one_by_one())
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pair(pair, type, backend):
    case = made(pair, type)
    check_features(case)
    cases.compare(case, cases.run(case, backend, guard=True))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("index", range(len(SETS)), ids=lambda index: "+".join(SETS[index]))
def test_set_of_features(index, type, backend):
    case = made(SETS[index], type, **shaped(SETS[index], SHAPES[index % len(SHAPES)]))
    check_features(case)
    cases.compare(case, cases.run(case, backend, threads=2, guard=True))


@pytest.mark.parametrize("type, kernel", [
    pytest.param(type, kernel, marks=() if kernel == chosen(type) else pytest.mark.exhaustive)
    for type in TYPES for kernel in host_backends() if kernel != "reference"])
@pytest.mark.parametrize("feature", [name for name in cases.FEATURES if name != "odd"])
def test_feature_across_tiles(feature, type, kernel):
    case = made((feature,), type, **shaped((feature,), LARGE))
    check_features(case)
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
