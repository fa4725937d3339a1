"""The operators under what PyTorch wraps around them: compilers, autocast, checkpoints, threads."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard.masks import Mask  # noqa: E402
from regard.torch.kernels import ARGUMENTS, VALUES  # noqa: E402
from regard.torch.operators import backward, forward  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch._vmap_internals import _vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import CASES, DEVICES, assert_same, problem  # noqa: E402

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def normal(*shape, seed=0, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(device)


def leaves(*shape, device="cpu"):
    return [normal(*shape, seed=seed, device=device).requires_grad_() for seed in range(3)]


def operator_arguments(case, transposed=False):
    """As the surface gives them to the operator."""
    given = problem(case)
    tensors, options = given.leaves(), dict(given.options)
    q, k, v = (tensors[name] for name in "qkv")
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    seed = options.pop("dropout_seed", None)
    if seed is not None:
        options["seed_tensor"] = torch.tensor(seed - 2**64)
    options |= {name: tensors[name] for name in ("bias", "sink") if name in tensors}
    return q, k, v, *(ARGUMENTS | options).values()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["plain", "bias", "sink", "dropout", "packed"])
def test_opcheck(name, transposed):
    if name == "packed" and transposed:
        pytest.skip("packed tensors have no batch beside which to transpose")
    arguments = operator_arguments(BY_NAME[name], transposed)
    torch.library.opcheck(forward, arguments)
    with torch.no_grad():
        out, lse = forward(*arguments)
    wanted = [x is not None for x in arguments[:5]]
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    dlse = torch.ones_like(lse)
    torch.library.opcheck(backward, (wanted, torch.ones_like(out), dlse, out, lse, *detached))


def test_shapes_without_memory():
    q = normal(2, 6, 4, 8).to("meta").transpose(1, 2)
    out, lse = rt.attention(q, q, q[..., :5], return_lse=True, out_type=torch.float32)
    real = rt.attention(*(torch.empty(2, 6, 4, 8).transpose(1, 2),) * 2,
                        torch.empty(2, 6, 4, 5).transpose(1, 2), return_lse=True)
    for found, wanted in zip((out, lse), real):
        assert found.shape == wanted.shape and found.stride() == wanted.stride()
    assert out.device.type == "meta"
    windows = normal(6, 2, 8).unfold(0, 4, 1).permute(0, 1, 3, 2)  # two axes have equal strides
    for q in (normal(1, 2, 4, 8).expand(3, -1, -1, -1), windows):
        q.requires_grad_()
        out = rt.attention(q, q, q)
        gradient = torch.autograd.grad(out.sum(), q)[0]
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            found = rt.attention(fake, fake, fake)
            assert found.stride() == out.stride()
            assert torch.autograd.grad(found.sum(), fake)[0].stride() == gradient.stride()


def options_of_tensors(packed):
    """Each option that takes a tensor, for 2 heads and 4 rows in one sequence."""
    def integers(*shape):
        return torch.full(shape, 4, dtype=torch.int32)

    if packed:
        return {"cu_seqlens_q": integers(2) * torch.arange(2, dtype=torch.int32),
                "cu_seqlens_k": integers(2) * torch.arange(2, dtype=torch.int32)}
    return {"mask": torch.ones(4, 4, dtype=torch.bool), "bias": torch.zeros(4, 4),
            "sink": torch.zeros(2), "alibi_slopes": torch.ones(2), "seqused_q": integers(1),
            "seqused_k": integers(1), "row_spans": integers(1, 1, 4, 2),
            "key_spans": integers(1, 1, 4, 2), "q_positions": integers(1, 1),
            "dropout_seed": torch.tensor(3)}


ELSEWHERE = [*("k", "v"), *options_of_tensors(False), *options_of_tensors(True)]


@pytest.mark.parametrize("own, other", [("cpu", "meta"), ("meta", "cpu"), *(
    (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "meta")) if "cuda" in DEVICES else ())])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_tensor_on_another_device(name, grad, own, other):
    """By the direct call, which refuses it, by the operator, and where shapes alone are found."""
    packed = name.startswith("cu_seqlens")
    options = options_of_tensors(packed)
    options = {n: options[n] for n in (options if packed else (name,)) if n in options}
    fixed = {"max_seqlen_q": 4, "max_seqlen_k": 4} if packed else {}
    if name == "dropout_seed":
        if other == "cpu":
            pytest.skip("a seed may be on the CPU")
        fixed["dropout_p"] = 0.5
    rows = {n: normal(*((4, 2, 8) if packed else (1, 2, 4, 8)), seed=3) for n in "qkv"}

    def call(others):
        given = {n: x.to(other if n in others else own) for n, x in (rows | options).items()}
        given["q"].requires_grad_(grad)
        return rt.attention(**given, **fixed)

    assert call(()).device.type == own
    with pytest.raises(regard.InvalidArgument) as caught:
        call((name,))
    assert caught.value.argument == name
    assert f"a tensor on {other}" in str(caught.value) and f"be on {own}" in str(caught.value)
    with FakeTensorMode():  # the same of a compiler's tensors
        rows = {n: torch.empty(x.shape) for n, x in rows.items()}
        options = {n: torch.empty(x.shape, dtype=x.dtype) for n, x in options.items()}
        assert call(()).device.type == own
        with pytest.raises(regard.InvalidArgument, match=f"^{name} = a tensor on {other}"):
            call((name,))


@pytest.mark.parametrize("name", ["dout", "dlse", "out", "lse"])
def test_a_result_on_another_device(name):
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x
                      for x in operator_arguments(BY_NAME["plain"]))
    out, lse = forward(q, k, v, *rest)
    given = {"dout": out, "dlse": lse, "out": out, "lse": lse}
    given[name] = given[name].to("meta")
    with pytest.raises(regard.InvalidArgument, match=f"^{name} = a tensor on meta"):
        backward([True, True, True, False, False], *given.values(), q, k, v, *rest)


def everything(q, k, v, bias, sink, mask):
    return rt.attention(q, k, v, bias=bias, sink=sink, mask=mask, causal="top_left",
                        window=(3, None), softcap=2.0, return_lse=True)


def dropping(q, k, v, bias, sink, mask):
    return rt.attention(q, k, v, bias=bias, sink=sink, dropout_p=0.5, return_lse=True)


def in_stock_terms(q, k, v, bias, sink, mask):
    out = rt.scaled_dot_product_attention(q, k, v, bias, sink=sink, dropout_p=0.3,
                                          dropout_seed=2**63 + 1)
    return rt.flash_attn_func(out, k, v, causal=True, return_attn_probs=True)[:2]


@pytest.mark.parametrize("function", [everything, dropping, in_stock_terms])
def test_compiled_whole(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for length in (6, 9):  # the second time with sizes as symbols
        given = [*leaves(2, 2, length, 8), normal(2, 1, length, seed=5).requires_grad_(),
                 normal(2, seed=6).requires_grad_(), normal(length, length, seed=7) > -1]
        results = []
        for run in (function, compiled):
            torch.manual_seed(4)
            out, lse = run(*given)
            total = out.square().sum() + lse.sum()
            results.append((out, lse, *torch.autograd.grad(total, given[:5])))
        for found, wanted in zip(results[1], results[0]):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("modes", [(Passing, nullcontext), (nullcontext, Passing)])
@pytest.mark.parametrize("function", [
    lambda *given: everything(*given)[0], lambda *given: dropping(*given)[0],
    lambda q, k, v, *more: rt.attention(q, k, v),
    lambda q, k, v, bias, sink, mask: rt.attention(q, k, v, mask=mask, bias=bias)])
def test_checkpoints_with_a_mode_in_one_of_their_passes(function, modes):
    """What a checkpoint saves must not depend on how a call comes to its kernel."""
    given = [*leaves(2, 2, 6, 8), normal(2, 1, 6, seed=5).requires_grad_(),
             normal(2, seed=6).requires_grad_(), normal(6, 6, seed=7) > -1]
    torch.manual_seed(4)
    wanted = torch.autograd.grad(function(*given).square().sum(), given[:3])
    torch.manual_seed(4)
    with modes[0]():
        out = checkpoint(function, *given, use_reentrant=False)
    with modes[1]():
        found = torch.autograd.grad(out.square().sum(), given[:3])
    assert all(map(torch.equal, found, wanted))


@pytest.mark.exhaustive
def test_compiled_by_inductor():
    def layer(x, weight):
        qkv = (x @ weight).view(2, 5, 3, 2, 8)
        return rt.flash_attn_qkvpacked_func(qkv, causal=True).reshape(2, 5, 16) @ weight[:, :16]

    x, weight = normal(2, 5, 16).requires_grad_(), normal(16, 48, seed=1).requires_grad_()
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        out = function(x, weight)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for wanted, found in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def packed(q, k, v, begins):
    return rt.flash_attn_varlen_func(q, k, v, begins, begins, 6, 6, causal=True)


def packed_by_flash_attention(q, k, v, begins):
    longest = begins.diff().max().item()
    return rt.flash_attn_varlen_func(q, k, v, begins, begins, longest, longest, causal=True)


def packed_by_attention(q, k, v, begins):
    longest = begins.diff().max().item()
    return rt.attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=longest,
                        max_seqlen_k=longest, causal=True)


@pytest.mark.parametrize("function", [packed, packed_by_flash_attention, packed_by_attention])
def test_compiled_packed_sequences(function):
    given = leaves(10, 2, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for begins in (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 10], [0, 5, 10])):
            found, wanted = compiled(*given, begins), function(*given, begins)
            assert torch.equal(found, wanted)
            for a, b in zip(torch.autograd.grad(found.square().sum(), given),
                            torch.autograd.grad(wanted.square().sum(), given)):
                assert torch.equal(a, b)


def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return rt.attention(q, k, v, causal="bottom_right")

    given = tuple(x.detach() for x in leaves(1, 2, 6, 8))
    program = torch.export.export(Module(), given)
    assert any(node.target is forward for node in program.graph.nodes)
    assert torch.equal(program.module()(*given), Module()(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    given = leaves(2, 2, 6, 8, device=device)
    bias = normal(6, 6, seed=5, device=device).requires_grad_()
    with torch.autocast(device, dtype):
        out, lse = rt.attention(*given, bias=bias, return_lse=True)
        stock = torch.nn.functional.scaled_dot_product_attention(*given)
        wide = rt.attention(*(x.double() for x in given))
    assert out.dtype == stock.dtype == dtype and lse.dtype == torch.float32
    assert wide.dtype == torch.float64
    assert torch.equal(out, rt.attention(*(x.to(dtype) for x in given), bias=bias))
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in (*given, bias))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_drop_the_same_weights_again(use_reentrant, compiled, device):
    if compiled and use_reentrant:
        pytest.skip("torch.compile takes no reentrant checkpoints")

    def block(q, k, v):
        return rt.attention(q, k, v, dropout_p=0.5).sin()

    def kept(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=use_reentrant)

    given = leaves(2, 2, 6, 8, device=device)
    results = []
    for function in (block, torch.compile(kept, fullgraph=True, backend="aot_eager")
                     if compiled else kept):
        torch.manual_seed(5)
        tensors = [x.detach().requires_grad_() for x in given]
        out = function(*tensors)
        torch.manual_seed(6)
        out.sum().backward()
        results.append((out, *(x.grad for x in tensors)))
    for wanted, found in zip(*results):
        assert_same(found, wanted)


def test_anomaly_mode_and_hooks_see_the_function():
    q, k, v = leaves(1, 1, 3, 4)
    with torch.autograd.detect_anomaly(check_nan=True):
        out = rt.attention(q, k, v)
        assert out.grad_fn.name() in ("ScaledDotProductEfficientAttentionBackward0",
                                      "RegardAttentionBackward")
        out.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        saved = rt.attention(q, k, v)
    assert torch.equal(torch.autograd.grad(saved.sum(), q)[0], q.grad)


@pytest.mark.parametrize("batched", [
    lambda out, q, dout: torch.autograd.grad(out, q, dout, is_grads_batched=True)[0],
    lambda out, q, dout: torch.func.vmap(lambda x: torch.autograd.grad(out, q, x)[0], 0, 1)(
        dout).movedim(1, 0),
    lambda out, q, dout: _vmap(_vmap(lambda x, unused: torch.autograd.grad(out, q, x)[0],
                                     (None, 0)), (0, None))(dout, torch.zeros(4))[:, 3]],
    ids=["is_grads_batched", "torch.func", "nested"])
def test_batched_gradients(batched):
    q, k, v = leaves(1, 2, 3, 8)
    mask, dout = torch.ones(3, 3, dtype=torch.bool).tril(), normal(2, 1, 2, 3, 8, seed=4)
    found = batched(rt.attention(q, k, v, mask=mask), q, dout)
    for row, x in zip(found, dout, strict=True):
        assert torch.equal(row, torch.autograd.grad(rt.attention(q, k, v, mask=mask), q, x)[0])


@pytest.mark.parametrize("name", ["mask", "alibi_slopes", "seqused_k", "row_spans", "cu_seqlens"])
@pytest.mark.parametrize("direct", [True, False])
def test_options_that_were_made_in_inference_mode(name, direct):
    given = leaves(*((4, 2, 8) if name == "cu_seqlens" else (1, 2, 4, 8)))
    results = []
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            options = options_of_tensors(name == "cu_seqlens")
        if name == "cu_seqlens":
            options |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
        else:
            options = {name: options[name]}
        q = given[0] if direct else given[0].mT.contiguous().mT
        out = rt.attention(q, *given[1:], **options)
        results.append(torch.autograd.grad(out.square().sum(), given))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_deterministic_algorithms_reach_the_library(monkeypatch):
    seen = []
    original = rt.direct._direct.forward

    class Recording:
        def forward(self, options, *arguments):
            seen.append(dict(zip(VALUES, options.values))["deterministic"])
            return original(options, *arguments)

    monkeypatch.setattr(rt.direct, "_direct", Recording())
    q = normal(1, 1, 3, 4)
    rt.attention(q, q, q)
    rt.attention(q, q, q, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        rt.attention(q, q, q), rt.scaled_dot_product_attention(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True, True, True]


def test_eight_threads_and_every_thread_count_give_the_same_bits(device):
    given = [normal(2, 4, 70, 16, seed=seed, device=device) for seed in range(3)]

    def results(threads=0):
        tensors = [x.clone().requires_grad_() for x in given]
        out = rt.attention(*tensors, causal=True, dropout_p=0.2, dropout_seed=1, threads=threads,
                           deterministic=True)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    wanted = results()
    found, failures = [], []

    def work():
        try:
            found.extend(results() for _ in range(5))
        except BaseException as failure:  # noqa: BLE001 - told by the assertion below
            failures.append(failure)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures and len(found) == 40
    found += [results(1), results(3)]
    for result in found:
        assert all(torch.equal(a, b) for a, b in zip(result, wanted))


def test_errors_of_the_library_come_through_compiled_code():
    compiled = torch.compile(rt.attention, backend="aot_eager")
    q = normal(1, 2, 3, 4)
    with pytest.raises(ValueError, match="bias"):
        compiled(q, q, q, bias=torch.zeros(5, 1, 1, 1))


REFUSED_WHILE_COMPILING = {
    "number": (dict(window=1.5), "window = 1.5: must be an integer"),
    "word": (dict(causal="left"), "causal = 'left': must be False, True"),
    "lengths": (dict(k=torch.ones(1, 2, 5, 4), v=torch.ones(1, 2, 5, 4), causal=True),
                "causal = True: with 3 queries and 5 keys say 'top_left'"),
    "no tensor": (dict(v=None), "v = a NoneType: must be a tensor of PyTorch"),
    "unknown": (dict(is_causal=True), "is_causal = True: is no option of attention; did you mean"),
    "Mask": (dict(mask=Mask(4, 4)), r"mask = a Mask\(4 x 4\): the call has 3 queries"),
}


@pytest.mark.parametrize("change, text", REFUSED_WHILE_COMPILING.values(),
                         ids=REFUSED_WHILE_COMPILING)
def test_refusals_are_shown_where_a_program_must_be_one_graph(change, text):
    q = normal(1, 2, 3, 4)
    given = {"q": q, "k": q, "v": q, **change}
    with pytest.raises(regard.InvalidArgument, match=text):
        rt.attention(**given)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
        torch.compile(rt.attention, backend="eager", fullgraph=True)(**given)


def test_a_refusal_in_one_graph_has_the_callers_name():
    compiled = torch.compile(rt.scaled_dot_product_attention, backend="eager", fullgraph=True)
    q = normal(1, 2, 3, 4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attn_mask = a Mask\(4 x 4\)"):
        compiled(q, q, q, Mask(4, 4))
