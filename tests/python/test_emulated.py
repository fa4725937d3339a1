"""The GPU's kernels on the emulated machine (tests/cuda/machine/README.md), against the oracle.

Needs REGARD_LIBRARY to name libregard_emulator.so. All pairs of features are met in a few sets;
kernels are compiled when they are first used, and kept in REGARD_EMULATOR_CACHE.
"""

import functools
import os
import sys

import pytest

sys.path.append(os.path.join(os.path.dirname(__file__), os.pardir, "gpu"))

import cases  # noqa: E402
import cover  # noqa: E402
import regard_ctypes as regard  # noqa: E402

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

TYPES = ["f16", "bf16", "f32", "f64"]
FAMILIES = ["mma", "simt"]
SETS = cover.cover()
SHAPES = [{}, {"sizes": (70, 133), "dim": 40}, {"sizes": (40, 90), "dim": 128}]
CHIPS = ["sm_86", "sm_80", "sm_90"]
ORDERS = ["mixed", "backward", "forward"]
EVERYTHING = ("bias_head", "sink", "grouped", "bottom_right", "window", "softcap", "scale", "mask",
              "alibi_batch", "dropout", "seqused", "value_size", "odd", "dlse", "gaps")


def runs(family, type):
    return family == "simt" or type != "f64"


@functools.lru_cache(maxsize=8)
def made(features, type, shape):
    base = {} if "odd" in features else SHAPES[shape]
    if "value_size" in features:
        base = {name: value for name, value in base.items() if name != "dim"}
    return cases.make(features, type, **base)


def judge(case, backend, deterministic=False, **how):
    case.options["deterministic"] = int(deterministic)
    cases.compare(case, cases.run(case, backend, **how))


BOTH = pytest.mark.parametrize("type, family", [
    (type, family) for type in TYPES for family in FAMILIES if runs(family, type)])


@BOTH
@pytest.mark.parametrize("index", range(len(SETS)), ids=lambda index: "+".join(SETS[index]))
def test_set_of_features(index, type, family):
    """Each type and family meets a third of the sets, each set a third of them."""
    if (index + TYPES.index(type) + FAMILIES.index(family)) % 3:
        pytest.skip("other types meet this set")
    name = f"emulated:{family}+{CHIPS[index % 3]}+{ORDERS[index // 3 % 3]}+{index}"
    judge(made(SETS[index], type, index // 2 % 3), name, deterministic=index // 2 % 2 == 1)


@pytest.mark.parametrize("index", range(0, len(SETS), 3), ids=lambda index: "+".join(SETS[index]))
def test_on_the_oldest_chip_with_tensor_cores(index):
    judge(made(SETS[index], "f16", index % 3), "emulated:mma+sm_75+mixed")


@BOTH
@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dbias", "dsink"])
def test_one_gradient_alone(wanted, type, family):
    case = made(("bias_head", "sink", "grouped", "bottom_right"), type, 0)
    judge(case, f"emulated:{family}", wanted=[wanted])


@BOTH
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_everything_at_once(deterministic, type, family):
    judge(made(EVERYTHING, type, 0), f"emulated:{family}+mixed", deterministic)
