"""The tests' own guards: bands round outputs and workspaces, and features that move nothing."""

import ctypes

import numpy as np
import pytest

import cases
import guards
import sensitivity


@pytest.mark.parametrize("layout", ["bhsd", "gaps", "reversed"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_byte_beside_an_output_is_noticed(place, layout):
    outputs = cases.Outputs()
    outputs.add("out", (2, 3, 4, 5), np.dtype(np.float32), layout)
    array = outputs["out"]
    assert np.isnan(array).all() and outputs.keeps_between("out")
    array[...] = 1
    assert outputs.keeps_between("out")
    low, high = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else (
        np.byte_bounds(array))
    ctypes.memset(low - 1 if place == "before" else high, 0x5B, 1)
    assert not outputs.keeps_between("out")


@pytest.mark.parametrize("offset", [-1, 100, -guards.BAND, 99 + guards.BAND])
def test_a_byte_beside_a_workspace_is_noticed(offset):
    workspace = guards.Workspace(100)
    address = workspace.arguments()["workspace"].value
    assert address % guards.ALIGNMENT == 0
    ctypes.memset(address, 0, 100)
    workspace.check("forward")
    ctypes.memset(address + offset, 0, 1)
    with pytest.raises(AssertionError, match=f"forward: 1 bytes outside .* at byte {offset}$"):
        workspace.check("forward")


@pytest.mark.parametrize("feature, name, value", [
    ("sink", "sink", -1e4), ("bias", "bias", 0), ("alibi", "alibi_slopes", 0),
    ("mask", "mask", True), ("dropout", "keep", True)])
def test_a_feature_without_effect_is_noticed(feature, name, value):
    sensitivity.check(cases.make((feature,), "bf16"))
    case = cases.make((feature,), "bf16")
    case.values[name] = np.full_like(case.values[name], value)
    case.values["p"] = 0.0
    with pytest.raises(AssertionError, match=f"the case does not test {feature}"):
        sensitivity.check(case)


def test_a_window_wider_than_its_sequence_is_noticed():
    case = cases.make(("window",), "f32", window=(100, 100))
    with pytest.raises(AssertionError, match="the case does not test window"):
        sensitivity.check(case)
