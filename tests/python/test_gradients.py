"""Gradients in f64 against differences of the library's own forward, one feature at a time."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard

# The direction's derivative by the four-point rule: the error is of order step^4.
STEPS = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))
STEP = 2.0**-8


def loss(case, inputs, backend):
    """sum of out * dout and lse * dlse over what the library writes."""
    out = cases.sentinel(case.dout.shape, np.dtype(np.float64))
    lse = cases.sentinel(case.truth["lse"].shape, np.dtype(np.float64))
    if case.spec.get("continued"):
        out[...], lse[...] = cases.held(case, "out"), cases.held(case, "lse")
    regard.forward(regard.Attention(**inputs, **case.options), out, lse, backend=backend)
    total = np.where(np.isnan(out), 0, out * case.dout).sum()
    return total + np.where(np.isfinite(lse), lse * case.dlse, 0).sum()


def plus(array, step):
    """array + step in the layout of array."""
    result = cases.lay_out(array, "bhsd")
    result[...] = np.where(np.isfinite(array), array + step, array)
    return result


@pytest.mark.parametrize("feature", [
    name for name in cases.FEATURES if name not in ("f32_outputs", "accumulate", "dlse")])
def test_gradient_is_the_slope_of_forward(feature, backend):
    spec = {"dlse": True} | ({"bias_type": "f64"} if "bias" in cases.FEATURES[feature] else {})
    case = cases.make((feature,), "f64", sizes=(9, 14), dim=5, **spec)
    gradients = cases.run(case, backend)
    rng = np.random.default_rng(8)
    for name in ("q", "k", "v", "bias", "sink"):
        if name not in case.inputs:
            continue
        array = case.inputs[name]
        array = np.round(array * 64) / 64 if name == "sink" else array  # exact steps in f32
        case.inputs[name] = array.copy(order="C")
        if name == "sink":
            gradients = cases.run(case, backend)
        for _ in range(3):
            direction = rng.integers(-2, 3, array.shape).astype(array.dtype)
            slope = sum(weight * loss(case, case.inputs | {name: plus(array, n * STEP * direction)},
                                      backend) for n, weight in STEPS) / STEP
            gradient = gradients["d" + name]
            gradient = np.where(np.isnan(gradient), 0, gradient)
            got = (gradient * direction).sum()
            size = 1 + np.abs(gradient * direction).sum()
            limit = 2e-6 if name == "sink" else 2e-7
            assert abs(got - slope) < limit * size, f"d{name}: {got} and the slope {slope}"
