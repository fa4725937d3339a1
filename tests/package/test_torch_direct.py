"""What a steady call of regard.torch does, counted, so that no weight creeps back; and which calls
leave the direct way, with the same results."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from direct_cases import entered  # noqa: E402
from regard.torch import direct, surface  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.skipif(direct._direct is None, reason="PyTorch before 2.10")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OUT, LSE = 4 * 2 * 3 * 8, 4 * 2 * 3  # bytes of the tensors below


def tensors(**options):
    return [normal(1, 2, 3, 8, seed=seed).requires_grad_(**options) for seed in range(3)]


def allocated(call):
    """The bytes that PyTorch allocates in a call."""
    call()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = call()
    assert result is not None  # whose memory is still there
    return sum(event.self_cpu_memory_usage for event in profile.function_events)


@pytest.mark.parametrize("function", [rt.attention, rt.scaled_dot_product_attention])
def test_forward(function):
    q, k, v = tensors(requires_grad=False)
    functions, builtins = entered(lambda: function(q, k, v))
    assert functions <= 3 and builtins <= 2
    assert allocated(lambda: function(q, k, v)) == OUT


def test_forward_with_options():
    q, k, v = tensors(requires_grad=False)
    functions, builtins = entered(lambda: rt.attention(q, k, v, causal=True, window=(2, 0)))
    assert functions <= 7 and builtins <= 4
    assert allocated(lambda: rt.attention(q, k, v, causal=True, return_lse=True)) == OUT + LSE


def test_installed():
    q, k, v = tensors(requires_grad=False)
    with rt.installed():
        functions, builtins = entered(lambda: F.scaled_dot_product_attention(q, k, v))
    assert functions <= 3 and builtins <= 2


def test_gradients():
    q, k, v = tensors()
    functions, builtins = entered(lambda: rt.attention(q, k, v))
    assert functions <= 3 and builtins <= 2
    assert allocated(lambda: rt.attention(q, k, v)) == OUT + LSE
    dout = torch.ones(1, 2, 3, 8)

    def backward(function):
        out = function(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    assert entered(backward(rt.attention)) == entered(backward(F.scaled_dot_product_attention))
    assert allocated(backward(rt.attention)) == 3 * OUT


IN_CPP = "ScaledDotProductEfficientAttentionBackward0"
IN_PYTHON = "RegardAttentionBackward"


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "bottom_right", "window": (1, 1)}, {"softcap": 2.0},
    {"layout": "bshd", "scale": 0.3}, {"dropout_p": 0.5, "dropout_seed": 3, "dropout_offset": 5},
    {"deterministic": True, "causal": "top_left"}, {"threads": 1},
    {"bias": normal(3, 3, seed=5).requires_grad_()}, {"bias": normal(2, 1, 3, seed=6)}],
    ids=lambda options: ",".join(options))
def test_the_node_in_cpp_gives_the_same_bits(options):
    """Options reach the backward pass. Hooks for saved tensors keep calls from that node."""
    results = []
    for way in (IN_CPP, IN_PYTHON, "hooks"):
        leaves = tensors()
        with (torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)
              if way == "hooks" else nullcontext()):
            out = rt.attention(*leaves, **options, return_lse=way == IN_PYTHON)
        out = out[0] if way == IN_PYTHON else out
        assert out.grad_fn.name() == (IN_CPP if way == IN_CPP else IN_PYTHON)
        if options.get("bias") is not None and options["bias"].requires_grad:
            leaves.append(options["bias"])
        weights = torch.arange(out.numel()).reshape(out.shape) / 7
        results.append((out, *torch.autograd.grad((out * weights).sum(), leaves)))
    for found in results[1:]:
        for a, b in zip(results[0], found, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("kind", ["plain", "grouped", "bshd", "strided", "expanded", "bias"])
def test_fake_gradients_of_the_node_in_cpp(kind):
    """Compiled autograd computes with their shapes and strides."""
    given, bias, layout = tensors(), None, "bhsd"
    if kind == "grouped":
        given[1:] = (normal(1, 1, 3, 8, seed=seed).requires_grad_() for seed in (1, 2))
    elif kind == "bshd":
        layout, given[0] = kind, normal(1, 3, 2, 8).transpose(1, 2).requires_grad_()
    elif kind == "strided":
        given = [normal(2, 3, 2, 16).requires_grad_().transpose(1, 2)[..., :8] for _ in range(3)]
    elif kind == "expanded":
        given = [x.expand(2, -1, -1, -1) for x in given]
    elif kind == "bias":
        bias = normal(2, 1, 3, seed=5).requires_grad_()
    out = rt.attention(*given, bias=bias, layout=layout)
    assert out.grad_fn.name() == IN_CPP
    wanted = torch.autograd.grad(out.sum(), [*given, *([] if bias is None else [bias])])
    with FakeTensorMode() as mode:
        q, k, v, bias = (x if x is None else mode.from_tensor(x) for x in (*given, bias))
        word = torch.empty((), dtype=torch.int64)
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            q, q, k, v, bias, q, q[..., 0], word, word, 0.0, [True] * 4)
    for fake, real in zip(found, wanted):
        assert fake.shape == real.shape and fake.stride() == real.stride()


@pytest.mark.exhaustive
def test_compiled_autograd():
    q, k, v = tensors()
    wanted = torch.autograd.grad(rt.attention(q, k, v).square().sum(), q)[0]
    loss = rt.attention(q, k, v).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile()):
        loss.backward()
    torch.testing.assert_close(q.grad, wanted)


@pytest.mark.parametrize("options", [
    {"return_lse": True}, {"backend": "reference"}, {"out_type": "float32"},
    {"mask": torch.ones(3, 3, dtype=torch.bool)}], ids=lambda options: ",".join(options))
def test_the_node_in_python_takes_the_rest(options):
    out = rt.attention(*tensors(), **options)
    out = out[0] if isinstance(out, tuple) else out
    assert out.grad_fn.name() == IN_PYTHON


def test_only_wanted_gradients_of_rows_in_any_order_in_memory():
    q, k, v = (normal(2, 5, 3, 8, seed=seed).transpose(1, 2) for seed in range(3))
    k.requires_grad_()
    assert q.stride() != q.contiguous().stride()
    out = rt.attention(q, k, v)
    assert out.stride() == q.stride()
    for dout in (torch.ones(()).expand(out.shape), normal(2, 3, 8, 5).mT):
        found, = torch.autograd.grad(out, k, dout, retain_graph=True)
        wanted, = torch.autograd.grad(rt.attention(q, k, v, return_lse=True)[0], k, dout)
        assert torch.equal(found, wanted) and found.stride() == k.stride()


def test_what_the_node_in_cpp_refuses_is_said_by_the_operators():
    q, k, v = tensors()
    with pytest.raises(regard.InvalidArgument, match="must have q's head size"):
        rt.attention(q, k[..., :4], v)
    with pytest.raises(regard.InvalidArgument, match="causal"):
        rt.attention(q, k[:, :, :2], v[:, :, :2], causal=True)
    strided = q.detach().mT.contiguous().mT.requires_grad_()
    assert rt.attention(strided, k, v).grad_fn.name() == IN_PYTHON
    with pytest.raises(RuntimeError, match="called by regard.torch only"):
        torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)


def test_the_node_in_cpp_takes_no_call_of_a_subclass():
    """PyTorch has kernels of its own for it."""
    q, k, v = tensors()
    k = k.detach().as_subclass(type("Named", (torch.Tensor,), {}))
    assert rt.attention(q, k, v).grad_fn.name() != IN_CPP


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


def through_operators(monkeypatch, call):
    """The result of a call, and how often it took the operator."""
    count = []
    original = surface.forward
    monkeypatch.setattr(surface, "forward", lambda *x: count.append(x) or original(*x))
    return call(), len(count)


@pytest.mark.parametrize("change", [
    {"q": "strided rows"}, {"q": "subclass"}, {"v": "empty"}, {"dropout_p": 0.0, "scale": "numpy"},
    {"window": [2, 0]}])
def test_what_is_not_plain_takes_the_operators(change, monkeypatch):
    q, k, v = tensors(requires_grad=False)
    options = {name: x for name, x in change.items() if name not in "qv"}
    if change.get("q") == "strided rows":
        q = q.mT.contiguous().mT
    elif change.get("q") == "subclass":
        q = q.as_subclass(type("Mine", (torch.Tensor,), {}))
    if "v" in change:
        k, v = k[:, :, :0], v[:, :, :0]
    if "scale" in change:
        options["scale"] = np.float64(0.5)
    out, count = through_operators(monkeypatch, lambda: rt.attention(q, k, v, **options))
    assert count == 1 and out.shape == q.shape


def test_modes_see_the_operator():
    q, k, v = tensors(requires_grad=False)
    with Counting() as mode:
        out = rt.attention(q, k, v)
    assert "regard.forward.default" in mode.names
    assert torch.equal(out, rt.attention(q, k, v))


def test_traced_calls_are_in_the_trace():
    q, k, v = tensors(requires_grad=False)
    traced = torch.jit.trace(lambda q, k, v: rt.attention(q, k, v), (q, k, v))
    other = normal(1, 2, 3, 8, seed=9)
    assert torch.equal(traced(other, k, v), rt.attention(other, k, v))


def test_values_that_are_equal_but_of_another_type_are_refused():
    """Parsed options are kept by value: 1 == True must not find what True has left."""
    q, k, v = tensors(requires_grad=False)
    rt.attention(q, k, v, causal=True, deterministic=True, window=(1, 1), softcap=1.0)
    for name, value in (("causal", 1), ("deterministic", 1), ("window", (1, True)),
                        ("softcap", True)):
        with pytest.raises(regard.InvalidArgument, match=name):
            rt.attention(q, k, v, **{name: value})


def test_a_number_that_changes_in_place_is_read_each_time():
    q, k, v = tensors(requires_grad=False)
    scale = np.array(0.5)
    first = rt.attention(q, k, v, scale=scale)
    scale[...] = 2.0
    assert not torch.equal(rt.attention(q, k, v, scale=scale), first)


def test_gradients_of_gradients_are_refused():
    q, k, v = tensors()
    found = torch.autograd.grad(rt.attention(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="derivative for .*attention.* is not implemented"):
        found.sum().backward()
    out, _ = rt.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    with pytest.raises(regard.Unsupported, match="create_graph.*attention under"):
        found.sum().backward(retain_graph=True)
    with rt.installed(), pytest.raises(regard.Unsupported, match=r"regard.torch.uninstall\(\)"):
        found.sum().backward()


def test_both_ways_give_the_same_bits():
    for options in ({"layout": "bshd", "causal": "bottom_right"}, {"return_lse": True},
                    {"bias": normal(3, 3, seed=5).requires_grad_(), "softcap": 2.0},
                    {"sink": normal(2, seed=6).requires_grad_(), "mask": normal(3, 3) > -1},
                    {"dropout_p": 0.5, "dropout_seed": 3}, {"out_type": torch.float64}):
        if options.get("out_type"):
            options["out_type"] = "float32"
        results = []
        for mode in (None, Counting()):
            leaves = tensors()
            arrays = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            if mode is None:
                out = rt.attention(*leaves, **options)
            else:
                with mode:
                    out = rt.attention(*leaves, **options)
            out = out if isinstance(out, tuple) else (out,)
            total = sum((x * torch.arange(float(x.shape[-1]))).sum() for x in out)
            results.append((*out, *torch.autograd.grad(total, [*leaves, *arrays])))
        for a, b in zip(*results):
            assert torch.equal(a, b) and a.stride() == b.stride()
