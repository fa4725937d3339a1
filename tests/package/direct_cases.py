"""What the tests of direct calls on NumPy's arrays share: arrays, and both ways of a call."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import regard
from regard import direct

rng = np.random.default_rng(3)
CALL = ("dout", "q", "k", "v", "out", "lse")  # of attention_backward
PASSES = ("attention", "attention_backward")


def normal(*shape, type=np.float32):
    return rng.standard_normal(shape).astype(type)


def arrays(type=np.float32):
    return [normal(1, 2, 3, 8, type=type) for _ in range(3)]


def counts(*values):
    return np.array(values, np.int32)


def backward_of(q, k, v, type=np.float32, **options):
    """dout, q, k, v, out and lse of a call."""
    out, lse = regard.attention(q, k, v, return_lse=True, **options)
    return [normal(*out.shape, type=type), q, k, v, out, lse]


def entered(call):
    """Functions of Python that a steady call enters, and functions of C that Python calls."""
    for _ in range(3):
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


def outcome(call, passes=PASSES):
    """The results, or the error's class and text; and whether a direct path gave them."""
    taken = []

    def recorded(original):
        def function(*arguments):
            result = original(*arguments)
            taken.append(result is not None)
            return result

        return function

    with pytest.MonkeyPatch.context() as patch:
        for name in PASSES:
            original = getattr(direct, name) if name in passes else lambda *_: None
            patch.setattr(direct, name, recorded(original))
        try:
            result = call()
        except regard.Error as error:
            return (type(error), re.sub("0x[0-9a-f]+", "an address", str(error))), taken == [True]
    if isinstance(result, regard.Gradients):
        result = tuple(vars(result).values())
    return result if isinstance(result, tuple) else (result,), taken == [True]


def both(call):
    """The direct path's outcome, after it has been compared with the general path's."""
    found, is_direct = outcome(call)
    wanted, _ = outcome(call, passes=())
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        if isinstance(b, np.ndarray):
            assert (type(a), a.dtype, a.shape, a.strides) == (type(b), b.dtype, b.shape, b.strides)
            assert a.tobytes() == b.tobytes()
        else:
            assert a == b
    return found, is_direct


def succeeded(found):
    return isinstance(found[0], np.ndarray)


# ---------------------------------------------------------------- arrays that are changed in one way

class Mine(np.ndarray):
    pass


def unaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    return memory


def with_strided_rows(x):
    return x.swapaxes(-2, -1).copy().swapaxes(-2, -1)


def spread(x):
    """The same elements, other strides."""
    memory = np.zeros([2 * size for size in x.shape], x.dtype)
    view = memory[tuple(slice(None, size) if axis == x.ndim - 1 else slice(None, None, 2)
                        for axis, size in enumerate(x.shape))]
    view[...] = x
    return view


def reversed_rows(x):
    return x[..., ::-1, :].copy()[..., ::-1, :]


def read_only(x):
    x.flags.writeable = False
    return x


NOT_PLAIN = [
    lambda x: x.view(Mine), unaligned, lambda x: x.astype(x.dtype.newbyteorder()),
    lambda x: np.ma.masked_array(x), with_strided_rows,
    lambda x: x[:, :, :0], lambda x: x[0], lambda x: x[None], lambda x: x.astype(np.int8),
    lambda x: x.astype(np.longdouble), lambda x: x.astype(np.complex64), lambda x: x.view("V4"),
    lambda x: x.astype(object), lambda x: x.tolist(), lambda x: np.float32(1),
    lambda x: np.broadcast_to(x[..., :1], x.shape), lambda x: x[..., ::-1]]
