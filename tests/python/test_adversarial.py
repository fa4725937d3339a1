"""What random draws never meet: scores far below zero, empty sequences, half tiles, odd strides."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard

TYPES = ["f64", "f32", "bf16", "f16"]
DEEP = [(), ("bottom_right", "dlse"), ("sink",), ("mask", "dropout"), ("seqused", "grouped"),
        ("bias_head", "alibi"), ("packed", "top_left")]
FORMS = [(), ("bottom_right",), ("packed",), ("window", "grouped")]
STRIDES = [0, 3331333, 99990001, -99990001]  # of axes of size 1, which must not be felt


def judge(case, backend):
    cases.compare(case, cases.run(case, backend))


def deepen(case, depth):
    """Lowers every score by depth: the last column of q and k multiply to it. A score is then rounded
    once at this size, in kernels as in the yardstick, whatever the order of their sums."""
    scale = case.spec.get("scale") or 1 / np.sqrt(case.spec["dim"])
    root = np.sqrt(depth / scale)
    for name, value in (("q", root), ("k", -root)):
        case.values[name] = case.values[name].copy()
        case.values[name][..., -1] = regard.load(regard.store(value, case.inputs[name].dtype))
        case.inputs[name] = cases.lay_out(
            regard.store(case.values[name], case.inputs[name].dtype), case.spec["layout"])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("features", DEEP, ids="+".join)
@pytest.mark.parametrize("depth", [100, 2000])
def test_rows_far_below_zero(depth, features, type, backend):
    """Every lse below -88: exp() of it, and of each score, is 0 or a denormal in f32."""
    case = cases.make(features, type, sizes=(70, 133), dim=32)
    deepen(case, depth)
    if "sink" in features:
        case.inputs["sink"] = (case.inputs["sink"] - depth).astype(np.float32)
        case.values["sink"] = case.inputs["sink"].astype(np.float64)
    lse = case.truth["lse"][cases.written(case, "lse")]
    assert lse[np.isfinite(lse)].max() < -88
    judge(case, backend)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("features", FORMS, ids="+".join)
@pytest.mark.parametrize("sizes", [(64, 192), (192, 64), (320, 320)], ids=str)
def test_half_a_tile_behind_whole_ones(sizes, features, type, kernel):
    """Lengths that leave 64 rows or keys of a tile of 128."""
    judge(cases.make(features, type, sizes=sizes, dim=24, batch=1), kernel)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_a_tenth_of_the_sequences_is_empty(side, type, backend):
    """Packed, of 20 sequences; one side of a sequence empty, or both; two empty ones in a row."""
    rng = np.random.default_rng(len(side))
    lengths = {name: rng.integers(1, 40, 20) for name in "qk"}
    empty = [0, 7, 8, 19]
    for name in "qk" if side == "both" else side:
        lengths[name][empty] = 0
    case = cases.make(("packed", "bottom_right", "sink", "dlse"), type, dim=16)
    begins = {name: np.concatenate([[0], np.cumsum(lengths[name])]).astype(np.int32)
              for name in "qk"}
    for name, part in (("q", "q"), ("k", "k"), ("v", "k")):
        shape = (begins[part][-1],) + case.values[name].shape[1:]
        case.inputs[name] = regard.store(rng.standard_normal(shape), regard.DTYPES[type])
        case.values[name] = regard.load(case.inputs[name])
    case.dout = regard.store(rng.standard_normal(case.inputs["q"].shape), regard.DTYPES[type])
    case.dlse = rng.standard_normal(case.inputs["q"].shape[1::-1]).astype(cases.lse_type(type))
    case.values |= {"dout": regard.load(case.dout), "dlse": regard.load(case.dlse)}
    for name in "qk":
        case.inputs["cu_seqlens_" + name] = case.values["cu_seqlens_" + name] = begins[name]
        case.options["max_seqlen_" + name] = case.values["max_seqlen_" + name] = int(
            lengths[name].max())
    judge(case, backend)


def with_strides(array, stride):
    """The same array; the axes of size 1 have another stride, in elements."""
    strides = [stride * array.itemsize if size == 1 else own
               for size, own in zip(array.shape, array.strides)]
    return np.lib.stride_tricks.as_strided(array, strides=strides)


# Batch, heads, rows or keys of 1.
ONES = [{"batch": 1, "heads": (1, 1)}, {"heads": (2, 1), "sizes": (1, 39)},
        {"sizes": (21, 1), "heads": (1, 1)}, {"batch": 1, "sizes": (1, 1)}]


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("base", ONES, ids=str)
def test_strides_of_axes_of_one(base, stride, type, backend):
    case = cases.make(("bias", "sink"), type, **base)
    plain = cases.run(case, backend)
    cases.compare(case, plain)
    for name, array in case.inputs.items():
        case.inputs[name] = with_strides(array, stride)
    case.dout = with_strides(case.dout, stride)
    results = {name: with_strides(cases.sentinel(array.shape, array.dtype), stride)
               for name, array in plain.items()}
    attention = case.attention()
    regard.forward(attention, results["out"], results["lse"], backend=backend)
    regard.backward(attention, results["out"], results["lse"], case.dout, None, backend=backend,
                    gradients={n: x for n, x in results.items() if n not in ("out", "lse")})
    for name, array in plain.items():
        assert results[name].tobytes() == array.tobytes(), name
