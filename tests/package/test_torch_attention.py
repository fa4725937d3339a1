"""regard.torch.attention: values, gradients, strides, dropout's seeds, and what it refuses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard.gradients import GRADIENTS  # noqa: E402
from torch.nn.attention.bias import causal_upper_left  # noqa: E402
from torch_cases import CASES, DEVICES, LIMITS, assert_same, error, problem  # noqa: E402

BY_NAME = {case.name: case for case in CASES}
# On a GPU every set of features is a kernel to compile: few, but all ways to them.
ON_GPU = {"grouped", "sink", "dropout", "packed"}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, **options):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(**options) if options else torch.randn(
        *shape, generator=draw)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_values_and_gradients_are_the_oracles(case, dtype, device):
    if device == "cuda" and (case.name not in ON_GPU
                             or dtype not in (torch.float32, torch.bfloat16)):
        pytest.skip("few kernels on a GPU")
    given = problem(case, dtype, device)
    leaves = given.leaves()
    out, lse = rt.attention(**leaves, **given.options, return_lse=True)
    assert out.dtype == dtype and out.device.type == device
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [given.dout, given.dlse])
    truth = given.truth()
    assert error(out, truth["out"]) < LIMITS[dtype]
    assert error(lse, truth["lse"]) < LIMITS[torch.float32 if dtype != torch.float64 else dtype] \
        + (LIMITS[dtype] if dtype in (torch.float16, torch.bfloat16) else 0)
    for (name, leaf), gradient in zip(leaves.items(), gradients):
        assert gradient.dtype == leaf.dtype
        # The sink is float32 whatever q is.
        limit = max(LIMITS[dtype], LIMITS[leaf.dtype] if name == "sink" else 0)
        assert error(gradient, truth["d" + name]) < 3 * limit, name


@pytest.mark.parametrize("case", [case for case in CASES if not case.sink], ids=str)
def test_gradcheck(case):
    given = problem(case)
    names = list(given.tensors)

    def function(*tensors):
        out, lse = rt.attention(**dict(zip(names, tensors)), **given.options, return_lse=True)
        return out, torch.where(lse.isinf(), 0, lse)

    assert torch.autograd.gradcheck(function, list(given.leaves().values()), fast_mode=True)


def test_gradcheck_of_the_sink():
    given = problem(BY_NAME["sink"])
    sink = given.tensors.pop("sink").double().mul(64).round().div(64).requires_grad_()
    # The sink is read as float32, in which these steps are exact.
    assert torch.autograd.gradcheck(
        lambda sink: rt.attention(**given.tensors, sink=sink, **given.options, return_lse=True),
        [sink], eps=2**-10, atol=1e-5)


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_the_whole_sum_agrees_with_pytorchs_math(causal, device):
    q, k, v = (normal(2, 3, 9, 8, seed=seed).to(device).double().requires_grad_()
               for seed in range(3))
    dout = normal(2, 3, 9, 8, seed=4).to(device).double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    out = rt.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(torch.autograd.grad(out, (q, k, v), dout),
                             torch.autograd.grad(truth, (q, k, v), dout)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_both_layouts_are_the_same_numbers(device):
    q, k, v = (normal(2, 5, 3, 8, seed=seed).to(device).requires_grad_() for seed in range(3))
    across = rt.attention(q, k, v, layout="bshd", return_lse=True)
    along = rt.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True)
    assert_same(across[0], along[0].transpose(1, 2))
    assert_same(across[1], along[1])
    assert across[0].is_contiguous() and along[0].transpose(1, 2).is_contiguous()
    first = torch.autograd.grad(across[0].square().sum(), (q, k, v))
    second = torch.autograd.grad(along[0].square().sum(), (q, k, v))
    for a, b in zip(first, second):
        assert_same(a, b)


def test_any_strides_are_read(device):
    base = normal(2, 6, 3, 4, 8, seed=1).to(device)
    views = {
        "part of a packed tensor": base[:, :, 1].transpose(1, 2),
        "expanded heads": base[:, :, 0, :1].transpose(1, 2).expand(-1, 4, -1, -1),
        "one row for all": base[:, :1, 0].transpose(1, 2).expand(-1, -1, 6, -1),
        "last stride not 1": base[:, :, 0].permute(0, 2, 3, 1).contiguous().transpose(2, 3),
        "every other element": normal(2, 4, 6, 16, seed=2).to(device)[..., ::2],
    }
    for view in views.values():
        strided, dense = view.detach().requires_grad_(), view.detach().clone().contiguous()
        dense.requires_grad_()
        key = normal(2, 4, 6, 8, seed=3).to(device)
        found, wanted = (rt.attention(x, key, x, causal=True) for x in (strided, dense))
        assert_same(found, wanted)
        # The gradient of a sum arrives expanded, with stride 0.
        for out, x in ((found, strided), (wanted, dense)):
            out.sum().backward()
        torch.testing.assert_close(strided.grad, dense.grad, rtol=1e-5, atol=1e-6)


def test_tables_of_any_strides():
    q = normal(2, 2, 6, 8)
    used = torch.tensor([4, 0, 3, 0], dtype=torch.int32)
    spans = torch.tensor([[0, 9, 3], [1, 9, 5]] * 3, dtype=torch.int32)[None, None]
    for name, table in {"seqused_k": used[::2], "seqused_q": used[:1].expand(2),
                        "row_spans": spans[..., ::2]}.items():
        found = rt.attention(q, q, q, **{name: table})
        assert torch.equal(found, rt.attention(q, q, q, **{name: table.contiguous()}))


class Stop(torch.autograd.Function):
    """The identity, whose input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(1, 1, 5, 5)}, {"softcap": 2.0}])
def test_a_gradient_that_is_not_defined(options):
    q = normal(1, 2, 5, 8).requires_grad_()
    (Stop.apply(rt.attention(q, q, q, **options)).sum() + (q**2).sum()).backward()
    torch.testing.assert_close(q.grad, 2 * q.detach())


def test_arriving_gradients_of_any_strides():
    q, k, v = (normal(2, 3, 5, 8, seed=seed).double().requires_grad_() for seed in range(3))
    out, lse = rt.attention(q, k, v, return_lse=True)
    for dout in (normal(8, 5, 3, 2).double().permute(3, 2, 1, 0), torch.ones(()).double().expand(
            2, 3, 5, 8), normal(2, 1, 1, 8).double().expand(2, 3, 5, 8)):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        wanted = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    dlse = torch.ones(()).double().expand(2, 3, 5)
    found = torch.autograd.grad(lse, (q, k), dlse, retain_graph=True)
    wanted = torch.autograd.grad(torch.logsumexp(q @ k.mT / 8**0.5, 3).sum(), (q, k))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_only_wanted_gradients_are_computed(monkeypatch):
    asked = []
    original = regard.torch.direct._direct

    class Recording:
        forward, record = original.forward, original.record

        def backward(self, *arguments):
            results = original.backward(*arguments)
            asked.append({name for name, x in zip(GRADIENTS, results) if x is not None})
            return results

    monkeypatch.setattr(regard.torch.direct, "_direct", Recording())
    for wanted in ({"q"}, {"k", "bias"}, {"v", "sink"}):
        given = {"q": normal(1, 2, 3, 4), "k": normal(1, 2, 3, 4), "v": normal(1, 2, 3, 4),
                 "bias": normal(3, 3), "sink": normal(2)}
        for name in wanted:
            given[name].requires_grad_()
        rt.attention(**given).sum().backward()
        assert asked.pop() == {"d" + name for name in wanted}
        for name, x in given.items():
            assert (x.grad is not None) == (name in wanted)
    with torch.no_grad():
        assert not rt.attention(**given).requires_grad


def test_rows_past_the_end_are_zeros_in_results_and_gradients(device):
    case = BY_NAME["seqused"]
    given = problem(case, torch.float32, device)
    hostile = {name: x.clone() for name, x in given.tensors.items()}
    hostile["q"][1, :, 2:] = hostile["k"][0, :, 3:] = hostile["v"][1] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in hostile.items()}
    out, lse = rt.attention(**leaves, **given.options, return_lse=True)
    (out.sum() + lse[0].sum()).backward()
    assert (out[1, :, 2:] == 0).all() and (lse[1, :, 2:] == -torch.inf).all()
    assert (leaves["q"].grad[1] == 0).all()
    assert (leaves["k"].grad[0, :, 3:] == 0).all() and (leaves["v"].grad[1] == 0).all()


def test_seeds(device):
    q = normal(2, 2, 16, 8).to(device)
    weights = torch.eye(16, device=device).expand(2, 2, 16, 16)

    def dropped(**options):
        return rt.attention(q, q, weights, dropout_p=0.5, **options) == 0

    keep = regard.dropout_mask(2, 2, 16, 16, 0.5, seed=2**64 - 1, offset=2**63)
    found = dropped(dropout_seed=2**64 - 1, dropout_offset=2**63)
    np.testing.assert_array_equal(found.cpu().numpy(), ~keep)
    torch.manual_seed(1)
    first, second = dropped(), dropped()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(dropped(), first) and torch.equal(dropped(), second)
    # The common surface has a seed of its own.
    assert torch.equal(regard.attention(q, q, weights, dropout_p=0.5) == 0, dropped(dropout_seed=0))
    state = torch.random.get_rng_state()
    rt.attention(q, q, q), dropped(dropout_seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_seed_in_a_tensor(device):
    """Backward draws the weights of forward, and refuses a seed that has changed in between."""
    q, k, v = (normal(2, 2, 16, 8, seed=seed).to(device).requires_grad_() for seed in range(3))

    def found(seed, run=rt.attention):
        out = run(q, k, v, dropout_p=0.5, dropout_seed=seed, dropout_offset=7)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    wanted = found(2**64 - 5)
    seed = torch.tensor([-5], device=device)
    compiled = torch.compile(rt.attention, fullgraph=True, backend="aot_eager")
    for run in (rt.attention, regard.attention, compiled):
        assert all(torch.equal(a, b) for a, b in zip(found(seed, run), wanted))
    np.testing.assert_array_equal(regard.dropout_mask(1, 2, 3, 4, 0.5, seed=seed),
                                  regard.dropout_mask(1, 2, 3, 4, 0.5, seed=2**64 - 5))
    out = rt.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    for bad in (torch.tensor([1, 2], device=device), torch.tensor(1.0, device=device)):
        with pytest.raises(regard.WrongType) as caught:
            found(bad)
        assert caught.value.argument == "dropout_seed"
    torch._dynamo.reset()


def test_a_wider_out_and_narrow_sinks():
    given = {name: normal(1, 2, 6, 8, seed=seed).bfloat16().requires_grad_()
             for seed, name in enumerate("qkv")}
    sink, slopes = normal(2).bfloat16().requires_grad_(), normal(2).abs().bfloat16()
    out = rt.attention(**given, sink=sink, alibi_slopes=slopes, out_type="float32")
    assert out.dtype == torch.float32
    assert out.bfloat16().equal(rt.attention(**given, sink=sink, alibi_slopes=slopes))
    out.sum().backward()
    assert sink.grad.dtype == torch.bfloat16 and given["q"].grad.dtype == torch.bfloat16


Q = normal(2, 4, 6, 8)


@pytest.mark.parametrize("kind, argument, change", [
    (regard.WrongType, "q", {"q": np.zeros((2, 4, 6, 8))}),
    (regard.WrongType, "q", {"q": Q.to_sparse()}),
    (regard.WrongType, "mask", {"mask": np.ones((6, 6), bool)}),
    (regard.WrongType, "k", {"k": Q.to(torch.complex64)}),
    (regard.WrongType, "out_type", {"out_type": torch.int32}),
    (regard.InvalidArgument, "out_type", {"out_type": torch.float16}),
    (regard.InvalidArgument, "q", {name: Q.int() for name in "qkv"}),
    (regard.InvalidArgument, "k", {"k": Q.half()}),
    (regard.InvalidArgument, "mask", {"mask": Q[0, 0, :, :6]}),
    (regard.InvalidArgument, "q", {"q": Q[0]}),
    (regard.InvalidArgument, "k", {"k": Q[:, :3], "v": Q[:, :3]}),
    (regard.InvalidArgument, "k", {"k": Q[..., :7]}),
    (regard.InvalidArgument, "v", {"v": Q[:, :, :5]}),
    (regard.InvalidArgument, "bias", {"bias": torch.zeros(3, 1, 1, 1)}),
    (regard.InvalidArgument, "sink", {"sink": torch.zeros(3)}),
    (regard.InvalidArgument, "layout", {"layout": "sbhd"}),
    (regard.InvalidArgument, "causal", {"causal": "left"}),
    (regard.InvalidArgument, "causal", {"causal": True, "q": Q[:, :, :5]}),
    (regard.InvalidArgument, "window", {"window": (1, 2, 3)}),
    (regard.InvalidArgument, "precision", {"precision": "low"}),
    (regard.InvalidArgument, "scale", {"scale": float("nan")}),
    (regard.InvalidArgument, "dropout_p", {"dropout_p": 1.0}),
    (regard.InvalidArgument, "dropout_seed", {"dropout_p": 0.1, "dropout_seed": -1}),
    (regard.InvalidArgument, "dropout_seed", {"dropout_p": 0.1, "dropout_seed": 2**64}),
    (regard.InvalidArgument, "cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 2]),
                                              "cu_seqlens_k": torch.tensor([0, 2]),
                                              "max_seqlen_q": 2, "max_seqlen_k": 2,
                                              "q": Q[0], "k": Q[0], "v": Q[0]}),
    (regard.InvalidArgument, "max_seqlen_k", {"cu_seqlens_q": torch.zeros(2).int(),
                                              "cu_seqlens_k": torch.zeros(2).int(),
                                              "max_seqlen_q": 2, "q": Q[0], "k": Q[0], "v": Q[0]}),
    (regard.Unsupported, "alibi_slopes", {"alibi_slopes": torch.ones(4, requires_grad=True)}),
    (regard.Unavailable, "backend", {"backend": "none"}),
    (regard.WrongType, "bias", {"bias": causal_upper_left(6, 6)}),
])
def test_refusals(kind, argument, change):
    with pytest.raises(kind) as caught:
        rt.attention(**({"q": Q, "k": Q, "v": Q} | change))
    assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["q", "v", "mask", "bias", "sink", "seqused_k", "row_spans",
                                  "dropout_seed"])
@pytest.mark.parametrize("made, reason", [
    (lambda x: x.to_sparse(), "sparse_coo"),
    (lambda x: torch.nested.nested_tensor([x]), "nested"),
    (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "quantised")])
@pytest.mark.filterwarnings("ignore")  # these kinds of tensors are prototypes, or deprecated
def test_what_is_not_dense_is_refused_by_name(name, made, reason):
    given = {"q": Q, "k": Q, "v": Q, "dropout_p": 0.5, name: made(torch.zeros(6, 6))}
    with pytest.raises(regard.WrongType, match=f"^{name} = a .*{reason}"):
        rt.attention(**given)


def test_transforms_that_do_not_exist_are_refused():
    with pytest.raises(regard.Unsupported, match="torch.func"):
        torch.func.grad(lambda q: rt.attention(q, Q, Q).sum())(Q)
    with pytest.raises(regard.Unsupported, match="forward-mode"):
        with torch.autograd.forward_ad.dual_level():
            rt.attention(torch.autograd.forward_ad.make_dual(Q, Q), Q, Q)
    for name, x in (("scale", torch.ones(())), ("softcap", torch.ones(())),
                    ("alibi_slopes", torch.ones(4)), ("sink", torch.ones(4))):
        with torch.autograd.forward_ad.dual_level():
            with pytest.raises(regard.Unsupported, match="forward-mode") as caught:
                rt.attention(Q, Q, Q, **{name: torch.autograd.forward_ad.make_dual(x, x)})
        assert caught.value.argument == name
    q = Q.clone().requires_grad_()
    out, _ = rt.attention(q, Q, Q, return_lse=True)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(regard.Unsupported, match="gradients of attention's gradients"):
        gradient.sum().backward()


def test_vmap_is_the_loop():
    q, k, v = (normal(3, 1, 2, 5, 4, seed=seed).requires_grad_() for seed in range(3))
    bias = normal(5, 5, seed=3).requires_grad_()

    def attend(q, k, v, bias):
        return rt.attention(q, k, v, bias=bias, return_lse=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a missing batching rule
        found = torch.vmap(attend, in_dims=(0, 0, None, None))(q, k, v[0], bias)
    wanted = [torch.stack(x) for x in zip(*(attend(q[i], k[i], v[0], bias) for i in range(3)))]
    results = [(*x, *torch.autograd.grad(x[0].square().sum() + x[1].sum(), (q, k, v, bias)))
               for x in (found, wanted)]
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
    empty = torch.vmap(rt.attention)(*(x[:0] for x in (q, k, v)))
    assert empty.shape == (0, 1, 2, 5, 4) and torch.autograd.grad(empty.sum(), q)[0].shape == q.shape
