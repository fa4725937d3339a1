"""What is refused, and how it is said: the argument, its value, and a fitting class."""

from __future__ import annotations

import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import regard
import regard.masks

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
    ("window", {"window": {5, 1}}, regard.WrongType),
    ("layout", {"layout": "sbhd"}, regard.InvalidArgument),
    ("precision", {"precision": "low"}, regard.InvalidArgument),
    ("backend", {"backend": "cpu:neon"}, regard.Unavailable),
    ("backend", {"backend": "cuda:mma"}, regard.Unavailable),
    ("backend", {"backend": "cpu:avx2\0x"}, regard.WrongType),
    ("backend", {"backend": "\ud800"}, regard.WrongType),
    ("out", {"out": np.ones((2, 4, 6, 9), np.float32)}, regard.InvalidArgument),
    ("out", {"out": np.ones((2, 4, 6, 8))}, regard.InvalidArgument),
    ("lse", {"lse": np.ones((2, 4, 6))}, regard.InvalidArgument),
    ("out_type", {"out_type": "int8"}, regard.WrongType),
    ("out_type", {"out": np.ones((2, 4, 6, 8), np.float32), "out_type": "float64"},
     regard.InvalidArgument),
    ("multiprocessors", {"out": Q.copy(), "multiprocessors": np.array([1, 2])}, regard.WrongType),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": np.array([5], ">i8")}, regard.WrongType),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": np.ma.array([5])}, regard.WrongType),
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


class Sized:
    """What `explain` takes: a shape and a type."""

    def __init__(self, *shape):
        self.shape, self.dtype = shape, np.dtype(np.float32)


HUGE = Sized(1, 2**31 - 1, 2**31 - 1, 128)
FUNCTIONS = {
    "explain": ("q", lambda: regard.explain(HUGE, HUGE, HUGE)),
    "explain, a device": ("device", lambda: regard.explain(Q, K, K, device="\ud800")),
    "dropout_mask": ("p", lambda: regard.dropout_mask(1, 0, 1, 1, 1.5)),
    "dropout_probability": ("p", lambda: regard.dropout_probability("x")),
    "gradients": ("gradients", lambda: regard.attention_backward(
        Q, Q, K, K, Q, Q[..., 0], gradients=np.array("dq"))),
    "gradient_type": ("gradient_type", lambda: regard.attention_backward(
        Q, Q, K, K, Q, Q[..., 0], into=regard.Gradients(Q.copy(), K.copy(), K.copy()),
        gradient_type="float16")),
    "blocks": ("size", lambda: regard.masks.blocks(np.eye(3) > 0, (1, 2, 3))),
    "documents": ("cu_seqlens", lambda: regard.masks.documents(np.array([0, 3], ">i4"))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_functions_name_their_own_arguments(name):
    argument, call = FUNCTIONS[name]
    with pytest.raises(regard.InvalidArgument) as caught:
        call()
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument} = {caught.value.value}: ")


BSHD = np.ones((2, 6, 4, 8), np.float32)  # (B, S, H, D), where (B, H, S, D) is expected
BEGINS = np.array([0, 6])
ADVICE = {
    "type of out": ({"out_type": "float16"},
                    "out_type = float16: must be float32 or q's type, float32"),
    "type of out, a class": ({"out_type": np.float64}, "out_type = float64: must be float32 or"),
    "mask of numbers": ({"mask": np.ones((6, 6), np.int64)},
                        "mask = int64 [6, 6]: must be bool: mask != 0"),
    "mask of floats": ({"mask": np.ones((6, 6), np.float32)},
                       "must be bool: mask != 0; what is added to the scores is the bias"),
    "mask of keys": ({"mask": np.ones((2, 6), bool)}, "give mask[:, None, None, :]"),
    "bias of keys": ({"bias": np.ones((2, 6), np.float32)}, "give bias[:, None, None, :]"),
    "tables": ({"q": Q[0], "k": K[0], "v": K[0], "cu_seqlens_q": BEGINS, "cu_seqlens_k": BEGINS,
                "max_seqlen_q": 6, "max_seqlen_k": 6},
               "cu_seqlens_q = int64 [2]: must be int32: cu_seqlens_q.astype(np.int32)"),
    "lengths": ({"seqused_k": np.array([6, 6])}, "seqused_k.astype(np.int32)"),
    "slopes": ({"alibi_slopes": np.ones(4)}, "must be float32: alibi_slopes.astype(np.float32)"),
    "integers": ({"q": Q.astype(np.int64)},
                 "q = int64 [2, 4, 6, 8]: must hold float64, float32, float16 or bfloat16"),
    "byte order": ({"q": Q.astype(">f4")}, "q = >f4 [2, 4, 6, 8]: must have this machine's byte"),
    "float8": ({"q": Q.astype(ml_dtypes.float8_e4m3fn)}, "q = float8_e4m3fn [2, 4, 6, 8]: must"),
    "masked array": ({"q": np.ma.masked_less(Q, 0)}, "q = a masked array of shape"),
    "masked tensor of keys": ({"mask": np.ma.ones((6, 6), bool)}, "mask = a masked array"),
    "last stride": ({"q": Q[..., ::2], "k": K[..., :4], "v": K}, "np.ascontiguousarray(q) is"),
    "causal": ({"causal": "diagonal"},
               "must be False, True, 'none', 'top_left' or 'bottom_right'"),
    "heads and lengths": ({"q": BSHD, "k": np.ones((2, 9, 2, 8), np.float32),
                           "v": np.ones((2, 9, 2, 8), np.float32)},
                          "these shapes fit layout='bshd', (B, S, H, D)"),
    "heads and lengths, causal": ({"q": BSHD, "k": BSHD[:, :, :1], "v": BSHD[:, :, :1],
                                   "causal": True}, "these shapes fit layout='bshd'"),
    "heads and lengths, mask": ({"q": BSHD, "k": BSHD, "v": BSHD, "mask": np.ones((6, 6), bool)},
                                "these shapes fit layout='bshd'"),
    "lengths and heads": ({"q": Q, "k": np.ones((2, 2, 9, 8), np.float32),
                           "v": np.ones((2, 2, 9, 8), np.float32), "layout": "bshd"},
                          "these shapes fit layout='bhsd', (B, H, S, D)"),
}


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", ADVICE)
def test_a_refusal_says_what_to_do(name, surface):
    changes, text = ADVICE[name]
    if surface != "numpy":
        if name in ("byte order", "float8", "masked array", "masked tensor of keys",
                    "last stride") or (surface, name) == ("torch", "slopes"):
            return  # NumPy's alone, or taken as it is
        package = pytest.importorskip("torch" if surface == "torch" else "jax.numpy")
        if surface == "jax" and ("int64" in text or "lengths" == name or name == "slopes"):
            return  # JAX has 32 bits by default
        changes = {"q": Q, "k": K, "v": K} | changes
        changes = {key: package.asarray(x) if isinstance(x, np.ndarray) else x
                   for key, x in changes.items()}
        text = text.replace(".astype(np.int32)", ".to(torch.int32)")
    with pytest.raises(regard.InvalidArgument) as caught:
        attention(**changes)
    assert text in str(caught.value), str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.argument} = {caught.value.value}: ")


def test_a_missing_framework_is_named_with_the_way_to_get_it():
    for module, extra in (("torch", "torch"), ("transformers", "torch"), ("jax", "jax")):
        text = f"import sys; sys.modules[{extra!r}] = None; import regard.{module}"
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert f"pip install 'regard[{extra}]'" in done.stderr


def test_classes_are_pythons_own_too():
    assert issubclass(regard.Error, RuntimeError)  # as PyTorch's
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


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
def test_a_wrong_type_of_gradients_is_named(surface):
    arrays = [Q, Q, K, K, Q, Q[..., 0].copy(), np.ones((6, 6), np.float16)]
    if surface != "numpy":
        package = pytest.importorskip("torch" if surface == "torch" else "jax.numpy")
        arrays = [package.asarray(x) for x in arrays]
    *arrays, bias = arrays
    for type, name, text in (("float16", "dq", "q's type, float32"),
                             ("float64", "dbias", "bias's type, float16")):
        with pytest.raises(regard.InvalidArgument) as caught:
            regard.attention_backward(*arrays, bias=bias, gradients=name, gradient_type=type)
        assert str(caught.value) == f"gradient_type = {type}: must be float32 or {text}"
        assert caught.value.argument == "gradient_type" and caught.value.value == type


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
    there = _core.Array.at("k", 1 << 20, "f32", K.shape, [96, 48, 8, 1], device=1)
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


def test_no_copy_is_advised_for_what_is_written():
    """The copy would take the result."""
    with pytest.raises(regard.InvalidArgument, match="the last stride must be 1$"):
        regard.attention(Q, K, K, out=np.empty((2, 4, 8, 6), np.float32).swapaxes(2, 3))
