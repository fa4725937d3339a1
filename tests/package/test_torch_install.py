"""regard.torch.install: who is caught by it, what is left to PyTorch, and that it can be undone."""

from __future__ import annotations

import pickle
import sys
import threading
import types
import warnings

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
import regard.torch.direct as direct  # noqa: E402
import regard.torch.limits as limits  # noqa: E402
import regard.torch.replacement as replacement  # noqa: E402
import regard.torch.surface as surface  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from regard.masks import Mask  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch_cases import DEVICES  # noqa: E402

STOCK = [F.scaled_dot_product_attention]  # a name for it would be found and replaced


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def undone():
    yield
    rt.uninstall()
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch):
    """The calls that Regard took, directly or by its operator."""
    count = []

    def counted(function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            if result is not None:
                count.append(arguments)
            return result

        return call

    for module, name in ((direct, "scaled_dot_product_attention"), (surface, "forward")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return count


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_twice(module, *inputs, **options):
    """Outputs and gradients of every parameter, by PyTorch and under install."""
    results = []
    for install in (False, True):
        if install:
            rt.install()
        torch.manual_seed(1)
        module.zero_grad()
        out = module(*inputs, **options)
        out = out[0] if isinstance(out, tuple) else out
        gradients = []
        if torch.is_grad_enabled() and out.requires_grad:
            out.square().sum().backward()
            gradients = [x.grad.clone() for x in module.parameters()]
        results.append([out, *gradients])
    for wanted, found in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_install_and_undo(calls):
    q = normal(1, 2, 4, 8)
    importer = types.ModuleType("importer")
    importer.attention = F.scaled_dot_product_attention
    sys.modules["importer"] = importer
    try:
        rt.install()
        rt.install()
        assert F.scaled_dot_product_attention is not STOCK[0]
        assert importer.attention is F.scaled_dot_product_attention
        importer.attention(q, q, q, is_causal=True, scale=0.5)
        assert len(calls) == 1
        rt.uninstall()
        assert F.scaled_dot_product_attention is STOCK[0]
        assert importer.attention is STOCK[0]
        rt.uninstall()
        with rt.installed():
            with rt.installed():
                pass
            assert F.scaled_dot_product_attention is not STOCK[0]
        assert F.scaled_dot_product_attention is STOCK[0]
        with pytest.raises(ZeroDivisionError), rt.installed():
            1 / 0
        assert F.scaled_dot_product_attention is STOCK[0]
    finally:
        del sys.modules["importer"]


def test_the_name_is_that_of_pytorch(monkeypatch):
    """torch's context_parallel replaces the attribute of this name; pickle looks for it."""
    with rt.installed():
        ours = F.scaled_dot_product_attention
        assert ours.__qualname__ == "scaled_dot_product_attention"
        assert pickle.loads(pickle.dumps(ours)) is ours
        wrapper = object()
        monkeypatch.setattr(F, ours.__name__, wrapper)
        assert F.scaled_dot_product_attention is wrapper
        monkeypatch.undo()


def test_the_last_of_two_threads_ends_it():
    entered, leave = threading.Event(), threading.Event()

    def work():
        with rt.installed():
            entered.set()
            leave.wait()

    other = threading.Thread(target=work)
    other.start()
    entered.wait()
    with rt.installed():
        leave.set()
        other.join()
        assert F.scaled_dot_product_attention is not STOCK[0]
    assert F.scaled_dot_product_attention is STOCK[0]
    with rt.installed():
        rt.install()
    assert F.scaled_dot_product_attention is not STOCK[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention(training, masked, calls, device):
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).train(training).to(device)
    x = normal(3, 5, 16).to(device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5).to(device) if masked else None
    padding = torch.zeros(3, 5, device=device).masked_fill(torch.arange(5, device=device) > 3,
                                                           -torch.inf) if masked else None
    with torch.set_grad_enabled(training):
        run_twice(module, x, x, x, need_weights=False, attn_mask=mask, key_padding_mask=padding)
    assert len(calls) == 1


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(training, calls):
    module = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.set_grad_enabled(training):
        run_twice(module.train(training), normal(2, 5, 16))
    assert len(calls) == 1


def test_dropout_of_modules_is_drawn_by_the_generator():
    module = torch.nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x = normal(3, 5, 16)
    with rt.installed():
        torch.manual_seed(1)
        first = module(x, x, x, need_weights=False)[0]
        second = module(x, x, x, need_weights=False)[0]
        torch.manual_seed(1)
        again = module(x, x, x, need_weights=False)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", [
    pytest.param("aot_eager", marks=pytest.mark.exhaustive), "eager"])
def test_compiled_code_looks_the_function_up_again(backend, calls):
    q = normal(1, 2, 4, 8).requires_grad_()
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
                             fullgraph=True, backend=backend)
    wanted = compiled(q)
    with rt.installed():
        found = compiled(q)
        (gradient,) = torch.autograd.grad(found.sum(), q)
        assert found.grad_fn is not None
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), q)[0])
    assert calls  # while it was traced
    assert torch.equal(compiled(q), wanted)


def test_subclasses_keep_their_own_attention(calls):
    from torch.nn.attention.bias import causal_lower_right

    q, k = normal(1, 2, 4, 8), normal(1, 2, 6, 8, seed=1)
    wanted = F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6))

    class Plain(torch.Tensor):
        pass

    with rt.installed():
        found = F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6))
        mine = F.scaled_dot_product_attention(q.as_subclass(Plain), k, k)
    torch.testing.assert_close(found, wanted)
    assert isinstance(mine, Plain) and calls
    torch.testing.assert_close(mine.as_subclass(torch.Tensor), STOCK[0](q, k, k))


class OfTable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is STOCK[0]:
            return "by the table"
        return super().__torch_function__(func, types, args, kwargs)


class Seeing(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_overrides_are_offered_the_function_of_pytorch(calls):
    q = normal(1, 2, 4, 8)
    with rt.installed():
        assert F.scaled_dot_product_attention(q.as_subclass(OfTable), q, q) == "by the table"
        with Seeing() as outer, Seeing() as inner:
            assert F.scaled_dot_product_attention(q.as_subclass(OfTable), q, q) == "by the table"
            assert not calls
            found = F.scaled_dot_product_attention(q, q, q)
        assert outer.seen == inner.seen == [STOCK[0]] * 2
        assert len(calls) == 1
        with torch.device("cpu"):
            masked = F.scaled_dot_product_attention(q, q, q, Mask(4, 4, causal=True))
    torch.testing.assert_close(found, STOCK[0](q, q, q))
    torch.testing.assert_close(masked, STOCK[0](q, q, q, is_causal=True))


def test_compiled_overrides():
    class Plain(torch.Tensor):
        pass

    q = normal(1, 2, 4, 8)
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True,
                             backend="eager")
    with rt.installed():
        found = compiled(q.as_subclass(Plain))
    assert type(found) is Plain
    torch.testing.assert_close(found.as_subclass(torch.Tensor), STOCK[0](q, q, q))


def test_what_regard_cannot_take_goes_to_pytorch(calls, monkeypatch):
    monkeypatch.setattr(limits, "_told", set())
    q = normal(2, 3, 2, 8)
    nested = torch.nested.nested_tensor([x for x in q.transpose(1, 2)],
                                        layout=torch.jagged).transpose(1, 2)
    with rt.installed():
        with pytest.warns(UserWarning, match="nested tensors"):
            out = F.scaled_dot_product_attention(nested, nested, nested)
        assert out.is_nested
        with pytest.warns(UserWarning, match="torch.func"):
            batched = torch.vmap(F.scaled_dot_product_attention)(q, q, q)
        torch.testing.assert_close(batched, STOCK[0](q, q, q))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="regard.*")
            F.scaled_dot_product_attention(nested, nested, nested)  # told already
        assert not calls
        with pytest.raises(TypeError, match="key"):
            F.scaled_dot_product_attention(q, None, q)
        meta = q.to("meta")
        assert F.scaled_dot_product_attention(meta, meta, meta).device.type == "meta"
        assert len(calls) == 1


@pytest.mark.parametrize("reason, options", [
    ("dropout_p=1", {"dropout_p": 1.0}), ("not finite", {"scale": float("inf")}),
    ("not finite", {"scale": -2.0**121}), ("other heads", {"enable_gqa": True})])
def test_options_that_regard_refuses_go_to_pytorch(reason, options, calls, monkeypatch):
    monkeypatch.setattr(limits, "_told", set())
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(2, 4, 6, 8, seed=2)
    if "enable_gqa" not in options:
        k = q
    with rt.installed(), pytest.warns(UserWarning, match=reason):
        found = F.scaled_dot_product_attention(q, k, v, **options)
    assert not calls
    torch.testing.assert_close(found, STOCK[0](q, k, v, **options), equal_nan=True)


def test_unaligned_memory_goes_to_pytorch(calls, monkeypatch):
    monkeypatch.setattr(limits, "_told", set())
    q = torch.frombuffer(bytearray(385), dtype=torch.float32, offset=1).view(1, 2, 6, 8)
    with rt.installed(), pytest.warns(UserWarning, match="not aligned"):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), STOCK[0](q, q, q))
    assert not calls
    with pytest.raises(regard.InvalidArgument, match="q = 0x.*must be aligned"):
        rt.attention(q, q, q)


def test_stock_signature(calls):
    q, mask = normal(2, 2, 4, 8), normal(4, 4, seed=1)
    with rt.installed():
        ours = F.scaled_dot_product_attention
        for arguments, options in (((q, q, q, mask, 0.0, False), {"scale": 0.3}),
                                   ((q,), {"key": q, "value": q, "attn_mask": mask > 0}),
                                   ((q, q[:, :1], q[:, :1]), {"enable_gqa": True}),
                                   ((q, q, q), {"dropout_p": False})):
            wanted = STOCK[0](*arguments, **options)
            torch.testing.assert_close(ours(*arguments, **options), wanted)
    assert len(calls) == 4
