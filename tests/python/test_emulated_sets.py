"""All pairs of features on the emulated machine, met in a few sets."""

import itertools

import pytest

import cases
import cover
import sensitivity
from selection import mostly_exhaustive
from test_emulated import FAMILIES, ORDERS, TYPES, judge, made, runs
from test_emulated import pytestmark as pytestmark

SETS = cover.cover()
CHIPS = ["sm_86", "sm_80", "sm_90"]


def meetings():
    """Of sets, types and families: each family meets each set with a type, simt some with two. In
    `make test` a set is met by one family."""
    met = []
    for index in range(len(SETS)):
        for type, family in itertools.product(TYPES, FAMILIES):
            if runs(family, type) and (index + TYPES.index(type) + FAMILIES.index(family)) % 3 == 0:
                in_core = family == FAMILIES[(index + index // 3) % 3] and not (family == "simt" and type == "f64")
                name = "-".join(["+".join(SETS[index]), type, family])
                met.append(pytest.param(index, type, family, id=name,
                                        marks=() if in_core else pytest.mark.exhaustive))
    return met


def pairs_of(meetings):
    return {pair for meeting in meetings
            for pair in itertools.combinations(SETS[meeting.values[0]], 2)}


def test_all_pairs_are_met():
    """By each family in `make test-all`, by the families together in `make test`."""
    pairs = {pair for pair in itertools.combinations(cases.FEATURES, 2) if cases.compatible(*pair)}
    assert pairs_of(meeting for meeting in meetings() if not meeting.marks) == pairs
    for family in FAMILIES:
        assert pairs_of(meeting for meeting in meetings() if meeting.values[2] == family) == pairs


@pytest.mark.parametrize("index, type, family", meetings())
def test_set_of_features(index, type, family):
    chip = "sm_90" if family == "wgmma" else CHIPS[index % 3]
    name = f"emulated:{family}+{chip}+{ORDERS[index // 3 % 3]}+{index}"
    case = made(SETS[index], type, index // 2 % 3)
    sensitivity.check(case)
    judge(case, name, deterministic=index // 2 % 2 == 1)


@pytest.mark.parametrize("index", mostly_exhaustive(range(0, len(SETS), 3), 9, 36),
                         ids=lambda index: "+".join(SETS[index]))
def test_on_the_oldest_chip_with_tensor_cores(index):
    judge(made(SETS[index], "f16", index % 3), "emulated:mma+sm_75+mixed")
