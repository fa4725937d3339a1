"""What is refused, and how it is said: the argument, its value, and a fitting class."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import regard

Q = np.ones((2, 4, 6, 8), np.float32)
K = np.ones((2, 2, 6, 8), np.float32)


def attention(**changes):
    arguments = {"q": Q, "k": K, "v": K} | changes
    return regard.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


REFUSED = [
    ("q", {"q": Q.astype(np.int64)}, regard.InvalidArgument),
    ("q", {"q": [[1.0]]}, regard.WrongType),
    ("q", {"q": None}, regard.WrongType),
    ("q", {"q": Q[0]}, regard.InvalidArgument),
    ("q", {"q": Q[..., ::2], "k": K[..., :4], "v": K}, regard.InvalidArgument),
    ("k", {"k": K.astype(np.float64)}, regard.InvalidArgument),
    ("k", {"k": K[..., :7]}, regard.InvalidArgument),
    ("k", {"k": "keys"}, regard.WrongType),
    ("k", {"k": np.ones((2, 3, 6, 8), np.float32), "v": np.ones((2, 3, 6, 8), np.float32)},
     regard.InvalidArgument),
    ("v", {"v": K[:, :1]}, regard.InvalidArgument),
    ("bias", {"bias": np.ones((3, 1, 6, 6), np.float32)}, regard.InvalidArgument),
    ("bias", {"bias": np.ones((1, 1, 1, 6, 6), np.float32)}, regard.InvalidArgument),
    ("bias", {"bias": np.ones((6, 6), bool)}, regard.InvalidArgument),
    ("bias", {"bias": 3.0}, regard.WrongType),
    ("mask", {"mask": np.ones((6, 6), np.float32)}, regard.InvalidArgument),
    ("sink", {"sink": np.ones(3, np.float32)}, regard.InvalidArgument),
    ("alibi_slopes", {"alibi_slopes": np.ones(4)}, regard.InvalidArgument),
    ("scale", {"scale": float("nan")}, regard.InvalidArgument),
    ("softcap", {"softcap": -1.0}, regard.InvalidArgument),
    ("dropout_p", {"dropout_p": 1.0}, regard.InvalidArgument),
    ("causal", {"causal": "diagonal"}, regard.InvalidArgument),
    ("causal", {"causal": True, "k": K[:, :, :5], "v": K[:, :, :5]}, regard.InvalidArgument),
    ("window", {"window": (1, 2, 3)}, regard.InvalidArgument),
    ("window", {"window": (1.5, 2)}, regard.InvalidArgument),
    ("layout", {"layout": "sbhd"}, regard.InvalidArgument),
    ("precision", {"precision": "low"}, regard.InvalidArgument),
    ("backend", {"backend": "cpu:neon"}, regard.Unavailable),
    ("backend", {"backend": "cuda:mma"}, regard.Unavailable),
    ("out", {"out": np.ones((2, 4, 6, 9), np.float32)}, regard.InvalidArgument),
    ("out", {"out": np.ones((2, 4, 6, 8))}, regard.InvalidArgument),
    ("lse", {"lse": np.ones((2, 4, 6))}, regard.InvalidArgument),
    ("out_type", {"out_type": "int8"}, regard.WrongType),
    ("max_seqlen_q", {"q": Q[0], "k": K[0], "v": K[0], "cu_seqlens_q": np.zeros(2, np.int32)},
     regard.InvalidArgument),
    ("cu_seqlens_q", {"q": Q[0], "k": K[0], "v": K[0], "max_seqlen_q": 2, "max_seqlen_k": 2,
                      "cu_seqlens_q": np.array([0, 2], np.int64),
                      "cu_seqlens_k": np.array([0, 2], np.int32)}, regard.InvalidArgument),
]


@pytest.mark.parametrize(("argument", "changes", "kind"), REFUSED,
                         ids=[f"{argument}-{n}" for n, (argument, *_) in enumerate(REFUSED)])
def test_refusal_names_argument_and_value(argument, changes, kind):
    with pytest.raises(kind) as caught:
        attention(**changes)
    error = caught.value
    assert error.argument == argument
    assert str(error).startswith(f"{argument} = {error.value}: ") and len(str(error)) > 20


def test_classes_are_pythons_own_too():
    assert issubclass(regard.InvalidArgument, ValueError)
    assert issubclass(regard.WrongType, TypeError)
    assert issubclass(regard.Unsupported, NotImplementedError)
    assert issubclass(regard.Unavailable, RuntimeError)
    assert issubclass(regard.OutOfMemory, MemoryError)
    assert issubclass(regard.DeviceFailure, RuntimeError)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="dropout"):
        attention(dropout=0.1)
    with pytest.raises(TypeError, match="dropout"):
        regard.attention_backward(Q, Q, K, K, Q, Q[..., 0], dropout=0.1)


def test_backward_refusals():
    out, lse = attention(return_lse=True)

    def refused(argument, **changes):
        arguments = {"dout": out, "q": Q, "k": K, "v": K, "out": out, "lse": lse} | changes
        with pytest.raises(regard.InvalidArgument) as caught:
            regard.attention_backward(**arguments)
        assert caught.value.argument == argument

    refused("dout", dout=out[..., :7])
    refused("lse", lse=lse.astype(np.float64))
    refused("lse", lse=lse[:, :1])
    refused("gradients", gradients=["dq", "dx"])
    refused("gradients", gradients=["dbias"])
    refused("gradients", gradients="dsink")
    refused("accumulate", accumulate=True)
    refused("into", gradients=["dq"], into=regard.Gradients(dk=K))
    refused("dq", into=regard.Gradients(dq=Q[:, :2]))


def test_arrays_on_different_devices(monkeypatch):
    """What is on another device than q is refused before anything runs."""
    from regard import _core

    here = _core.Array.of(Q, "q")
    there = _core.Array.at(1 << 20, "f32", K.shape, [96, 48, 8, 1], device=1)
    with pytest.raises(regard.InvalidArgument, match="k = an array on cuda:1: must be on cpu"):
        _core.Problem(here, there, there)


def test_errors_survive_pickling():
    with pytest.raises(regard.Error) as caught:
        attention(softcap=-1.0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.argument) == (
        type(caught.value), str(caught.value), "softcap")


def test_nothing_is_written_on_a_refusal():
    out = np.full((2, 4, 6, 8), 7, np.float32)
    with pytest.raises(regard.InvalidArgument):
        attention(out=out, softcap=-1.0)
    assert (out == 7).all()
