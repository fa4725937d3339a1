"""regard.attention of NumPy's arrays goes directly to the binding: what a steady call enters, and
that results and errors are the general path's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import regard
from regard import direct

rng = np.random.default_rng(3)


def normal(*shape, type=np.float32):
    return rng.standard_normal(shape).astype(type)


def arrays(type=np.float32):
    return [normal(1, 2, 3, 8, type=type) for _ in range(3)]


def entered(call):
    """Functions of Python that a steady call enters, and functions of C that Python calls."""
    call()
    count = {"call": 0, "c_call": 0}

    def profile(frame, event, argument):
        if event in count:
            count[event] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count["call"] - 1, count["c_call"] - 1  # without `call` itself and setprofile


def outcome(call):
    """The results, or the error's class and text; and whether the direct path gave them."""
    taken = []
    original = direct.attention

    def recorded(*arguments):
        result = original(*arguments)
        taken.append(result is not None)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "attention", recorded)
        try:
            result = call()
        except regard.Error as error:
            return (type(error), str(error)), taken == [True]
    return result if isinstance(result, tuple) else (result,), taken == [True]


def both(call):
    """The direct path's outcome, after it has been compared with the general path's."""
    found, is_direct = outcome(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "attention", lambda *_: None)
        wanted, _ = outcome(call)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and a.strides == b.strides and np.array_equal(a, b)
        else:
            assert a == b
    return found, is_direct


def test_a_steady_call_enters_two_functions():
    q, k, v = arrays()
    assert entered(lambda: regard.attention(q, k, v)) == (2, 0)
    assert entered(lambda: regard.attention(q, k, v, causal=True)) <= (3, 1)


@pytest.mark.parametrize("options", [
    {}, {"return_lse": True}, {"causal": True, "window": (1, None)}, {"layout": "bshd"},
    {"layout": "bshd", "return_lse": True}, {"dropout_p": 0.5, "dropout_seed": 9},
    {"dropout_p": 0.5}, {"out_type": np.float32}, {"threads": 1},
    {"backend": "reference"}, {"bias": normal(3, 3), "softcap": 2.0, "scale": 0.3},
    {"sink": normal(2), "mask": normal(3, 3) > -1}, {"alibi_slopes": normal(2), "mask": None}],
    ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("type", [np.float16, np.float32, np.float64])
def test_both_ways_give_the_same_bits(options, type):
    q, k, v = arrays(type)
    if options.get("layout") == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {name: x.astype(type) if name == "bias" else x for name, x in options.items()}
    found, is_direct = both(lambda: regard.attention(q, k, v, **options))
    assert is_direct and isinstance(found[0], np.ndarray)


def unaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    return memory


class Mine(np.ndarray):
    pass


@pytest.mark.parametrize("change", [
    lambda x: x.view(Mine), unaligned, lambda x: x.astype(x.dtype.newbyteorder()),
    lambda x: np.ma.masked_array(x), lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3),
    lambda x: x[:, :, :0],
    lambda x: x[0], lambda x: x[None], lambda x: x.astype(np.int8),
    lambda x: x.astype(np.longdouble),
    lambda x: x.tolist(), lambda x: None, lambda x: np.float32(1)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_plain_takes_the_general_path(change, place):
    given = arrays()
    given[place] = change(given[place])
    _, is_direct = both(lambda: regard.attention(*given))
    assert not is_direct


@pytest.mark.parametrize("options", [
    {"cause": True}, {"causal": 1}, {"window": (1, True)}, {"softcap": True}, {"threads": True},
    {"threads": -1}, {"backend": "gpu"}, {"return_lse": 1}, {"out_type": "int8"},
    {"out_type": "bf16"}, {"dropout_p": 1.5}, {"scale": np.float32(0.5)}, {"window": [1, 2]},
    {"mask": np.ones((2, 2), bool)}, {"seqused_q": np.array([2], np.int32)}, {"layout": "sbhd"}],
    ids=str)
def test_refused_calls_have_the_general_paths_outcome(options):
    q, k, v = arrays()
    regard.attention(q, k, v, causal=True, window=(1, 1), softcap=1.0, threads=1)  # is kept
    _, is_direct = both(lambda: regard.attention(q, k, v, **options))
    assert not is_direct


@pytest.mark.parametrize("name", ["bias", "mask", "sink", "alibi_slopes", "v"])
@pytest.mark.parametrize("type", [np.float16, np.float32, np.float64, bool, np.int32, np.int64])
def test_each_element_type_has_the_general_paths_outcome(name, type):
    for own in (np.float32, np.float64):
        given = dict(zip("qkv", arrays(own)))
        shape = {"bias": (3, 3), "mask": (3, 3), "v": (1, 2, 3, 8)}.get(name, (2,))
        given[name] = np.ones(shape, type)
        both(lambda: regard.attention(**given))


def test_a_number_that_changes_in_place_is_read_each_time():
    q, k, v = arrays()
    scale = np.array(0.5)
    first = regard.attention(q, k, v, scale=scale)
    scale[...] = 2.0
    assert not np.array_equal(regard.attention(q, k, v, scale=scale), first)
