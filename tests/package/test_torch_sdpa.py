"""regard.torch.scaled_dot_product_attention against PyTorch's, in float64 by its plain formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard.masks import Mask  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_cases import DEVICES  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)


def by_pytorch(*arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*arguments, **options)


def same_with_gradients(q, k, v, mask=None, **options):
    """Both functions on the same leaves; the mask is one where it is a float mask."""
    tensors = [x for x in (q, k, v, mask) if x is not None and x.is_floating_point()]
    results = []
    for function in (rt.scaled_dot_product_attention, by_pytorch):
        leaves = {id(x): x.detach().requires_grad_() for x in tensors}
        out = function(*(leaves.get(id(x), x) for x in (q, k, v, mask)), **options)
        dout = normal(*out.shape, seed=9, device=out.device)
        results.append((out, *torch.autograd.grad(out, list(leaves.values()), dout)))
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


SHAPES = {
    "one head alone": ((5, 8), (7, 8), (7, 6)),
    "heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "batch": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "two batch dimensions": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "three": ((2, 1, 2, 3, 5, 8), (2, 1, 2, 3, 7, 8), (2, 1, 2, 3, 7, 8)),
    "one batch for all": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "one query for all": ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "both broadcast": ((2, 1, 3, 5, 8), (4, 3, 7, 8), (4, 3, 7, 8)),
    "one key head": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one value head": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    "one query head": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no keys' batch": ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "no batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes, causal):
    same_with_gradients(*(normal(*shape, seed=i) for i, shape in enumerate(shapes)),
                        is_causal=causal)


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (3, 5, 7), (3, 1, 1), (2, 1, 5, 7),
                                   (1, 3, 5, 1), (2, 3, 5, 7)], ids=str)
def test_masks(shape, boolean, device):
    mask = normal(*shape, seed=5, device=device)
    if boolean:
        mask = mask > -0.5
    same_with_gradients(normal(2, 3, 5, 8, device=device), normal(2, 3, 7, 8, device=device),
                        normal(2, 3, 7, 8, device=device), mask)


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (1, 4, 2, 5, 7), (3, 4, 1, 1, 7),
                                   (3, 1, 2, 5, 7), (1, 1, 1, 5, 7)], ids=str)
def test_masks_of_five_dimensions(shape):
    q, k, v = (normal(3, 4, 2, length, 8, seed=length) for length in (5, 7, 7))
    same_with_gradients(q, k, v, normal(*shape, seed=5))


def test_grouped_heads(device):
    q, k, v = (normal(2, heads, 5, 8, seed=heads, device=device) for heads in (6, 2, 2))
    same_with_gradients(q, k, v, enable_gqa=True, scale=0.2)
    same_with_gradients(q[0], k[0], v[0], enable_gqa=True)
    with pytest.raises(regard.InvalidArgument, match="enable_gqa"):
        rt.scaled_dot_product_attention(q, k, v)


def test_hidden_rows_are_zero():
    q, k, v = (normal(1, 2, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    for given in (mask, torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, -torch.inf)):
        out = rt.scaled_dot_product_attention(q, k, v, given)
        assert (out[:, :, 1] == 0).all()
        torch.testing.assert_close(out, by_pytorch(q, k, v, mask), rtol=1e-12, atol=1e-12)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_float_mask_need_not_have_the_querys_type():
    q = normal(1, 2, 4, 8).bfloat16()
    mask = normal(4, 4).float()
    out = rt.scaled_dot_product_attention(q, q, q, mask)
    wanted = by_pytorch(q.double(), q.double(), q.double(), mask.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


def test_dropout_follows_the_seed():
    q = normal(2, 2, 6, 8)
    torch.manual_seed(3)
    first = rt.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, rt.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert not torch.equal(first, rt.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    given = rt.scaled_dot_product_attention(q, q, q, dropout_p=0.5, dropout_seed=4)
    assert torch.equal(given, rt.attention(q, q, q, dropout_p=0.5, dropout_seed=4))


def test_extensions_are_those_of_attention():
    q, k, v = (normal(3, 5, 8, seed=seed) for seed in range(3))
    options = {"window": (2, 1), "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.2, 0.1]),
               "sink": torch.tensor([0.1, 0.2, 0.3]), "bias": normal(5, 5)}
    mask = normal(5, 5, seed=6) > -1
    out, lse = rt.scaled_dot_product_attention(q, k, v, mask, return_lse=True, **options)
    wanted = rt.attention(q[None], k[None], v[None], mask=mask, return_lse=True, **options)
    assert torch.equal(out, wanted[0][0]) and torch.equal(lse, wanted[1][0])
    lower_right = rt.scaled_dot_product_attention(q[:, :3], k, v, causal="bottom_right")
    assert torch.equal(lower_right, rt.attention(q[None, :, :3], k[None], v[None],
                                                 causal="bottom_right")[0])
    out, lse = rt.scaled_dot_product_attention(q[0], k[0], v[0], return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q[0] @ k[0].mT / 8**0.5, 1))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch(make):
    """Tensors of a class of their own, whose elements are not initialised."""
    q, k = normal(2, 3, 5, 8).requires_grad_(), normal(2, 3, 7, 8, seed=1)
    found, wanted = (function(q, k, k, attn_mask=make(5, 7)) for function in (
        rt.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention))
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(x.sum(), q) for x in (found, wanted))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("argument, change", [
    ("attn_mask", {"attn_mask": [1]}),
    ("attn_mask", {"attn_mask": causal_upper_left(4, 5)}),
    ("attn_mask", {"attn_mask": causal_upper_left(4, 4), "is_causal": True}),
    ("is_causal", {"is_causal": "none"}),
    ("enable_gqa", {"enable_gqa": 1}),
    ("causal", {"is_causal": True, "causal": "bottom_right"}),
    ("is_causal", {"is_causal": True, "attn_mask": Mask(4, 4, causal=True)}),
    ("attn_mask", {"attn_mask": torch.ones(4, 4).int()}),
    ("attn_mask", {"attn_mask": torch.ones(2, 1, 1, 4, 4), "query": torch.ones(1, 4, 8)}),
    ("attn_mask", {"attn_mask": torch.ones(3, 1, 1) > 0}),
    ("attn_mask", {"attn_mask": torch.ones(3, 1, 1)}),
    ("key", {"key": torch.ones(2, 2, 4, 9)}),
    ("bias", {"attn_mask": torch.ones(4, 4), "bias": torch.ones(4, 4)}),
    ("out_type", {"out_type": torch.float64}),
    ("query", {"query": torch.ones(8)}),
    ("key", {"key": torch.ones(3, 2, 4, 8), "value": torch.ones(3, 2, 4, 8)}),
    ("value", {"value": torch.ones(2, 3, 4, 8)}),
])
def test_refusals(argument, change):
    given = {name: torch.ones(2, 2, 4, 8) for name in ("query", "key", "value")}
    with pytest.raises(regard.InvalidArgument) as caught:
        rt.scaled_dot_product_attention(**(given | change))
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument} = {caught.value.value}: ")
