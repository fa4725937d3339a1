"""Every feature alone across tiles, and all pairs of features in a few sets, against the oracle."""

import functools

import pytest

import cases
import cover
import sensitivity

TYPES = ["f64", "f32", "bf16", "f16"]
SETS = cover.cover()
SHAPES = [{}, {"sizes": (150, 333), "dim": 40}, {"sizes": (90, 260), "dim": 128}]
LEVEL_SETS = [s for s in SETS if len(s) > 6 and "odd" not in s and "value_size" not in s][::2]
EVERYTHING = ("bias_head", "sink", "grouped", "bottom_right", "window", "softcap", "scale", "mask",
              "alibi_batch", "dropout", "seqused", "value_size", "odd", "dlse", "gaps")


@functools.lru_cache(maxsize=8)
def made(features, type, shape):
    base = {} if "odd" in features else SHAPES[shape]
    if "value_size" in features:
        base = {name: value for name, value in base.items() if name != "dim"}
    return cases.make(features, type, **base)


def judge(case, backend, deterministic=False, **how):
    if deterministic:
        case.options["deterministic"] = 1
    else:
        case.options.pop("deterministic", None)
    cases.compare(case, cases.run(case, backend, **how))


def skip_some(index, type, backend, mma_turns=1):
    """Compiling takes the time: simt has each case with half of the types, as it is one code."""
    turn = index + TYPES.index(type)
    if turn % 2 if backend == "cuda:simt" else mma_turns > 1 and turn % mma_turns == 0:
        pytest.skip("other types have it")


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("feature", [name for name in cases.FEATURES if name != "odd"])
def test_feature_across_tiles(feature, type, backend):
    """Lengths that no tile divides, over several tiles."""
    skip_some(list(cases.FEATURES).index(feature), type, backend)
    case = made((feature,), type, 1)
    sensitivity.check(case)
    judge(case, backend)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("index", range(len(SETS)), ids=lambda index: "+".join(SETS[index]))
def test_set_of_features(index, type, backend):
    skip_some(index, type, backend, mma_turns=3)
    case = made(SETS[index], type, index % 3)
    sensitivity.check(case)
    judge(case, backend, deterministic=index % 2 == 1)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("index", range(len(LEVEL_SETS)),
                         ids=lambda index: "+".join(LEVEL_SETS[index]))
def test_as_on_another_chip(index, type, level):
    """The kernels and tiles that older and smaller chips get; each set with one type."""
    if level != "cuda:mma75" and TYPES[1 + index % 3] != type:
        pytest.skip("another type has this set")
    judge(made(LEVEL_SETS[index], type, 2), level, deterministic=index % 2 == 0)


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dbias", "dsink"])
@pytest.mark.parametrize("type", TYPES)
def test_one_gradient_alone(wanted, type, backend):
    case = made(("bias_head", "sink", "grouped", "bottom_right"), type, 0)
    judge(case, backend, wanted=[wanted])


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("type", TYPES)
def test_everything_at_once(type, deterministic, backend):
    judge(made(EVERYTHING, type, 0), backend, deterministic)
