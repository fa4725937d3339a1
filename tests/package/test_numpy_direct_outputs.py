"""As test_numpy_direct.py, where calls write to arrays of the caller, and which gradients there are."""

from __future__ import annotations

import numpy as np
import pytest
import regard
from direct_cases import (CALL, NOT_PLAIN, Mine, arrays, backward_of, both, counts, normal, read_only,
                          reversed_rows, spread, succeeded)

NAMES = ("dq", "dk", "dv", "dbias", "dsink")


def filled(*shape, type=np.float32):
    return np.full(shape, 7, type)


def out_of(change=lambda x: x, type=np.float32):
    return lambda: change(filled(1, 2, 3, 8, type=type))


def lse_of(change=lambda x: x, type=np.float32):
    return lambda: change(filled(1, 2, 3, type=type))


def overlapping(x):
    return np.lib.stride_tricks.as_strided(x, strides=(0, *x.strides[1:-2], 4, x.strides[-1]))


WRITABLE = [lambda x: x, spread, reversed_rows, lambda x: x[:, ::-1]]
NOT_WRITABLE = [*NOT_PLAIN, read_only, overlapping, lambda x: np.broadcast_to(x[:, :1], x.shape)]


def held(x):
    """What is in an array, or in each one of Gradients."""
    parts = vars(x).values() if isinstance(x, regard.Gradients) else (x,)
    return [np.array(part) for part in parts if isinstance(part, np.ndarray)]


def written(call, **makers):
    """`both` of a call with new arrays to write to. The results are followed by what these hold; an
    error must leave that alone."""
    def run():
        given = {name: make() for name, make in makers.items()}
        before = [x.tobytes() for target in given.values() for x in held(target)]
        try:
            result = call(**given)
        except regard.Error:
            assert before == [x.tobytes() for target in given.values() for x in held(target)]
            raise
        if isinstance(result, regard.Gradients):
            into = given["into"]
            assert result is not into
            assert all(x is None or x is getattr(into, name) for name, x in vars(result).items())
            result = tuple(vars(result).values())
        elif not isinstance(result, tuple):
            result = (result,)
        assert all(given.get(name, x) is x for name, x in zip(("out", "lse"), result))
        return (*result, *(x for target in given.values() for x in held(target)))

    return both(run)


# ------------------------------------------------------------------------------------------ forward

@pytest.mark.parametrize("change", WRITABLE)
@pytest.mark.parametrize("more", [{}, {"seqused_q": counts(2)}, {"layout": "bshd"}],
                         ids=["plain", "ragged", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_outputs_are_written_directly(change, more, return_lse):
    given = arrays()
    out = out_of(change)
    if "layout" in more:
        given, out = [x.swapaxes(1, 2) for x in given], lambda: change(filled(1, 3, 2, 8))
    for makers in ({"out": out}, {"out": out, "lse": lse_of(change)}, {"lse": lse_of(change)}):
        found, is_direct = written(
            lambda **to: regard.attention(*given, **to, **more, return_lse=return_lse), **makers)
        assert is_direct and succeeded(found)


@pytest.mark.parametrize("change", NOT_WRITABLE)
def test_other_outputs_take_the_general_path(change):
    given = arrays()
    _, is_direct = written(lambda **to: regard.attention(*given, **to), out=out_of(change))
    assert not is_direct


@pytest.mark.parametrize("change", [
    read_only, lambda x: x.view(Mine), lambda x: x.astype(np.float64), lambda x: x.astype(">f4"),
    lambda x: x[:, :1], lambda x: x[..., :0], lambda x: np.broadcast_to(x[:, :1], x.shape)])
def test_an_lse_that_is_not_plain_takes_the_general_path(change):
    given = arrays()
    _, is_direct = written(lambda **to: regard.attention(*given, **to), out=out_of(),
                           lse=lse_of(change))
    assert not is_direct


@pytest.mark.parametrize("name", "qkv")
def test_an_output_must_not_lie_in_an_input(name):
    memory = normal(1, 2, 4, 8)
    before = memory.copy()
    given = dict(zip(CALL, backward_of(*arrays()))) | {name: memory[:, :, 1:]}
    inputs = {one: given[one] for one in "qkv"}
    for call in (lambda: regard.attention(**inputs, out=memory[:, :, :3]),
                 lambda: regard.attention_backward(
                     **given, into=regard.Gradients(dv=memory[:, :, :3]))):
        found, is_direct = both(call)
        assert found[0] is regard.InvalidArgument and "must not share its memory" in found[1]
        assert not is_direct
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("type", [np.float32, np.float64, np.float16, np.int32])
@pytest.mark.parametrize("own", [np.float32, np.float64, np.float16])
def test_types_of_outputs(own, type):
    given = arrays(own)
    written(lambda **to: regard.attention(*given, **to), out=out_of(type=type))
    written(lambda **to: regard.attention(*given, **to), out=out_of(type=own), lse=lse_of(type=type))
    for asked in (np.float32, np.float64):
        written(lambda **to: regard.attention(*given, **to, out_type=asked), out=out_of(type=type))


@pytest.mark.parametrize("type", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("continue_from", [True, 1, np.True_, None])
def test_results_are_continued(type, continue_from):
    q, k, v = arrays(type)
    out, lse = regard.attention(q, k, v, return_lse=True,
                                out_type=np.float64 if type == np.float64 else np.float32)
    found, is_direct = written(
        lambda **to: regard.attention(q, 2 * k, v, **to, continue_from=continue_from),
        out=out.copy, lse=lse.copy)
    assert is_direct == (continue_from is True)
    assert succeeded(found) == isinstance(continue_from, (bool, np.bool_))
    assert not succeeded(found) or not np.array_equal(found[0], out)


@pytest.mark.parametrize("makers", [{}, {"out": out_of()}, {"lse": lse_of()}], ids="-".join)
def test_what_is_continued_must_be_given(makers):
    q, k, v = arrays()
    found, is_direct = written(lambda **to: regard.attention(q, k, v, **to, continue_from=True),
                               **makers)
    assert found[0] is regard.InvalidArgument and not is_direct


# ---------------------------------------------------------------------------------------- gradients

SCORES = {"bias": normal(2, 3, 3), "sink": normal(2)}


def into_of(**changes):
    """A gradient for each input, with changes by name; None leaves one out."""
    shapes = dict(zip(NAMES, (*[(1, 2, 3, 8)] * 3, (2, 3, 3), (2,))))
    changes = dict.fromkeys(NAMES, lambda x: x) | changes
    return lambda: regard.Gradients(**{name: None if change is None else change(filled(*shapes[name]))
                                       for name, change in changes.items()})


def gradients_outcome(into, **more):
    given = backward_of(*arrays(), **SCORES)
    return written(lambda into: regard.attention_backward(*given, **SCORES, into=into, **more),
                   into=into)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("change", WRITABLE)
@pytest.mark.parametrize("left_out", [(), ("dq",), ("dv", "dbias", "dsink")], ids="-".join)
def test_gradients_are_written_directly(accumulate, change, left_out):
    into = into_of(**{"dq": change, "dk": change, "dbias": change} | dict.fromkeys(left_out))
    found, is_direct = gradients_outcome(into, accumulate=accumulate)
    assert is_direct and [x is None for x in found[:5]] == [name in left_out for name in NAMES]


def test_gradients_of_into_that_are_asked_for():
    found, is_direct = gradients_outcome(into_of(dv=None), gradients=["dsink", "dq"])
    assert is_direct and [x is None for x in found[:5]] == [False, True, True, True, False]
    assert (found[6] == 7).all()  # dk, which was not asked for


@pytest.mark.parametrize("name", ["dq", "dv"])
@pytest.mark.parametrize("change", [*NOT_WRITABLE, lambda x: True, lambda x: x.astype(np.float64)])
def test_other_gradients_take_the_general_path(name, change):
    _, is_direct = gradients_outcome(into_of(**{name: change}))
    assert not is_direct


@pytest.mark.parametrize("name", ["dbias", "dsink"])
@pytest.mark.parametrize("change", [read_only, lambda x: x.view(Mine), lambda x: x.astype(">f4"),
                                    lambda x: x[:1], lambda x: x.astype(np.float16),
                                    lambda x: np.broadcast_to(x[:1], x.shape)])
def test_other_gradients_of_scores_take_the_general_path(name, change):
    _, is_direct = gradients_outcome(into_of(**{name: change}))
    assert not is_direct


@pytest.mark.parametrize("more", [
    {"gradients": ()}, {"gradients": ("dq",)}, {"gradients": ["dv", "dv", "dsink"]},
    {"gradients": ("dbias", "dk")}, {"gradients": (np.str_("dk"),)}, {"gradient_type": "f16"},
    {"gradient_type": np.float32}, {"gradient_type": np.dtype("f8")}, {"threads": 1},
    {"backend": "reference"}, {"dlse": normal(1, 2, 3)}], ids="-".join)
def test_gradients_that_are_asked_for(more):
    given = backward_of(*arrays(np.float16), np.float16)
    scores = {"bias": normal(2, 3, 3, type=np.float16), "sink": normal(2)}
    found, is_direct = both(lambda: regard.attention_backward(*given, **scores, **more))
    assert is_direct == (more != {"gradient_type": np.dtype("f8")})
    found, is_direct = both(lambda: regard.attention_backward(*given, **more))
    assert is_direct == (found[0] is not regard.InvalidArgument)
    assert is_direct or {"dbias", "dsink"} & {*more.get("gradients", ())} or "gradient_type" in more
