"""The table of options is the binding's, and what users see; values of any type are taken or refused."""

from __future__ import annotations

import fractions
import importlib
import inspect
import re

import numpy as np
import pytest
import regard
from regard import _core
from regard.options import DEFAULTS, OPTIONS, SDPA_OPTIONS

Q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), dtype=np.float32)

SURFACES = {
    "regard": ["attention", "attention_backward", "check", "explain", "prepare"],
    "regard.torch": ["attention"],
    "regard.jax": ["attention", "attention_backward"],
}


def test_the_binding_has_the_same_options_and_defaults():
    ours = {name: repr(value) for name, value in DEFAULTS.items() if name != "layout"}
    assert ours == {name: repr(value) for name, value in _core.option_defaults().items()}
    q = _core.Array.of(Q, "q")
    for options in ({"softcup": 1.0}, {"softcap": "1"}, {"bias": 1.0}, {"dropout_seed": 0.5},
                    {"causal": "diagonal"}, {"window": (1, 2, 3)}):
        with pytest.raises(regard.InvalidArgument) as caught:
            _core.Problem(q, q, q, options)
        assert caught.value.argument == next(iter(options))


@pytest.mark.parametrize(("module", "name"), [
    (module, name) for module, names in SURFACES.items() for name in names])
def test_signatures_show_every_option(module, name):
    pytest.importorskip(module.partition(".")[2] or "numpy")
    function = getattr(importlib.import_module(module), name)
    shown = inspect.signature(function).parameters
    for option, row in OPTIONS.items():
        own = None if (module, option) == ("regard.torch", "dropout_seed") else row.default
        assert shown[option].kind is shown[option].KEYWORD_ONLY and shown[option].default == own
    if name == "attention":
        assert_described(function, OPTIONS)


def test_the_shims_of_pytorch_describe_their_options():
    pytest.importorskip("torch")
    import regard.torch as rt

    shim = rt.scaled_dot_product_attention
    assert inspect.signature(shim).parameters.keys() >= SDPA_OPTIONS.keys()
    assert_described(shim, SDPA_OPTIONS)
    assert_described(rt.flash_attn_func, ["softcap", "alibi_slopes", "deterministic"])
    assert_described(rt.flash_attn_varlen_func, ["cu_seqlens_q", "cu_seqlens_k"])


def assert_described(function, names):
    """Each once, and no placeholder is left."""
    described = re.findall(r"^ +(\w+): ", function.__doc__, re.MULTILINE)
    assert not [name for name in names if described.count(name) != 1]
    assert not re.search(r"^ *\{", function.__doc__, re.MULTILINE)


WRONG = {
    "scale": ["x", [1.0], np.ones(2), {}, True, 1j, 10**400],
    "softcap": [None, "1", (1,), -1.0],
    "dropout_p": [None, "0.1", 1.0, -0.1],
    "dropout_seed": [-1, 2**64, 1.5, "1", None, [1]],
    "dropout_offset": [-1, 2**64, 0.0],
    "threads": [2**40, -1, 1.5, "2", None],
    "precision": [None, "high", 16, ["full"], np.ones(3)],
    "deterministic": [None, 1, "yes"],
    "return_lse": [None, 1, "yes"],
    "layout": [None, "sbhd", 3, ["bhsd"], np.ones(3)],
    "causal": ["diagonal", 3, np.ones(3), ["top_left"]],
    "window": [1.5, "ab", (1, 2, 3), (1.5, 2), ("a", "b"), -2, (0, -7), 2**63, {}, np.ones(3)],
    "backend": [None, 3, b"reference"],
    "max_seqlen_q": [1.5, "3", -1, 2**63],
    "out_type": [3, "int8", object()],
}


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("argument", WRONG)
def test_wrong_types_are_refused_by_name(argument, surface):
    q = arrays(surface, Q)
    for value in WRONG[argument]:
        if (surface, argument, value is None) == ("torch", "dropout_seed", True):
            continue  # drawn by PyTorch's generator
        with pytest.raises(regard.InvalidArgument) as caught:
            regard.attention(q, q, q, **{"dropout_p": 0.1} | {argument: value})
        assert caught.value.argument == argument
        assert str(caught.value).startswith(f"{argument} = {caught.value.value}: ")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
def test_causal_is_no_flag_where_lengths_may_differ(surface):
    q, used = arrays(surface, Q), arrays(surface, np.array([3], np.int32))
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(regard.InvalidArgument, match=f"causal = True: .*{name} alone.*top_left"):
            regard.attention(q, q, q, causal=True, **{name: used})
    both = regard.attention(q, q, q, causal=True, seqused_q=used, seqused_k=used)
    plain = regard.attention(q[:, :, :3], q[:, :, :3], q[:, :, :3], causal="top_left")
    np.testing.assert_array_equal(np.asarray(both)[:, :, :3], np.asarray(plain))


def arrays(surface, x):
    if surface == "torch":
        return pytest.importorskip("torch").from_numpy(x)
    if surface == "jax":
        return pytest.importorskip("jax.numpy").asarray(x)
    return x


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
def test_numbers_of_any_kind_are_taken(surface):
    q = arrays(surface, Q)

    def same(given, plain):
        found, wanted = (np.asarray(regard.attention(q, q, q, **x)) for x in (given, plain))
        assert (found == wanted).all()

    same({"window": np.int64(3)}, {"window": 3})
    same({"window": np.array([1, 2])}, {"window": (1, 2)})
    same({"window": [None, np.int32(0)]}, {"window": (-1, 0)})
    same({"scale": np.float64(0.3)}, {"scale": 0.3})
    same({"scale": 1}, {"scale": 1.0})
    same({"softcap": np.float32(1.5)}, {"softcap": 1.5})
    same({"scale": fractions.Fraction(1, 4)}, {"scale": 0.25})
    same({"causal": np.True_, "threads": np.int8(1)}, {"causal": True})
    same({"deterministic": np.False_}, {})
    same({"dropout_p": 0.5, "dropout_seed": np.uint64(2**63)},
         {"dropout_p": 0.5, "dropout_seed": 2**63})


def test_wrong_options_of_the_other_functions():
    out, lse = regard.attention(Q, Q, Q, return_lse=True)
    for changes in ({"accumulate": "no"}, {"threads": 1.5}, {"gradients": 3}, {"gradients": [3]},
                    {"into": Q}, {"backend": 1}, {"scale": "x"}, {"gradient_type": 3}):
        with pytest.raises(regard.InvalidArgument) as caught:
            regard.attention_backward(Q, Q, Q, Q, out, lse, **changes)
        assert caught.value.argument == next(iter(changes))
    for changes in ({"pass_": "sideways"}, {"pass_": 1}, {"device": 3}, {"threads": "x"}):
        with pytest.raises(regard.InvalidArgument) as caught:
            regard.explain(Q, Q, Q, **changes)
        assert caught.value.argument == next(iter(changes))
    for arguments in ((-1, 1, 1, 1, 0.1), (1, 1.5, 1, 1, 0.1), (1, 1, 1, 1, "x")):
        with pytest.raises(regard.InvalidArgument):
            regard.dropout_mask(*arguments)


def test_a_wrong_keyword_is_named():
    out, lse = regard.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(TypeError, match="causl"):
        regard.attention(Q, Q, Q, causl=True)
    for call in (lambda: regard.attention_backward(Q, Q, Q, Q, out, lse, causl=True),
                 lambda: regard.explain(Q, Q, Q, causl=True)):
        with pytest.raises(regard.WrongType, match="causl = True: .* did you mean causal?"):
            call()


def test_tensors_are_no_options():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(Q)
    with pytest.raises(regard.WrongType, match=r"scale = a tensor that requires grad"):
        regard.attention(q, q, q, scale=torch.tensor(0.3, requires_grad=True))
    with pytest.raises(regard.WrongType, match="dropout_offset = a torch.Tensor of shape"):
        regard.attention(q, q, q, dropout_p=0.1, dropout_offset=torch.tensor(3))
    assert torch.equal(regard.attention(q, q, q, scale=torch.tensor(0.5)),
                       regard.attention(q, q, q, scale=0.5))
