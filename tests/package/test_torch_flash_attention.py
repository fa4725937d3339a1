"""The functions with flash-attn's signatures, against the oracle's formula in PyTorch's float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from torch_cases import DEVICES, assert_same  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)


def plain(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """out (S, H, D) and lse (H, S) of one sequence, on whole matrices."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    score = q @ k.mT * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    i, j = torch.meshgrid(torch.arange(q.shape[1]), torch.arange(k.shape[1]), indexing="ij")
    distance = (j - i - k.shape[1] + q.shape[1]).to(q.device)
    if slopes is not None:
        score = score - slopes.double()[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(2)
    weights = torch.exp(score - lse.masked_fill(lse.isinf(), 0)[..., None])
    return (weights @ v).transpose(0, 1), lse


OPTIONS = [
    {},
    {"causal": True, "softmax_scale": 0.4},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (2, -1), "softcap": 1.5},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.3])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)], ids=str)
def test_sequences(lengths, options):
    q = normal(2, lengths[0], 4, 8).requires_grad_()
    k, v = (normal(2, lengths[1], 2, 8, seed=seed).requires_grad_() for seed in (1, 2))
    out, lse, mask = rt.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert mask is None
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    wanted = [plain(*x, **{names.get(name, name): value for name, value in options.items()})
              for x in zip(q, k, v)]
    wanted_out, wanted_lse = (torch.stack(x) for x in zip(*wanted))
    torch.testing.assert_close(out, wanted_out, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-7)
    dout = normal(*out.shape, seed=3)
    seen = wanted_lse.isfinite().transpose(1, 2)[..., None]  # autograd of the formula is NaN there
    for found, truth in zip(torch.autograd.grad(out, (q, k, v), dout * seen),
                            torch.autograd.grad(wanted_out[seen.expand_as(out)], (q, k, v),
                                                dout[seen.expand_as(out)])):
        torch.testing.assert_close(found, truth.nan_to_num(), rtol=1e-6, atol=1e-7)


def test_stacked_tensors_are_views(device):
    qkv = normal(2, 6, 3, 4, 8, device=device).requires_grad_()
    out = rt.flash_attn_qkvpacked_func(qkv, causal=True)
    q, k, v = qkv.unbind(2)
    assert torch.equal(out, rt.flash_attn_func(q, k, v, causal=True))
    assert torch.equal(out, rt.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True))
    out.square().sum().backward()
    separate = qkv.detach().requires_grad_()
    rt.flash_attn_func(*separate.unbind(2), causal=True).square().sum().backward()
    assert_same(qkv.grad, separate.grad)
    with pytest.raises(regard.InvalidArgument):
        rt.flash_attn_qkvpacked_func(qkv[:, :, :2])


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (3, 0)}], ids=str)
def test_packed_sequences(options, device):
    begins_q, begins_k = [0, 3, 3, 8], [0, 5, 6, 10]
    q = normal(8, 4, 8, device=device).requires_grad_()
    k, v = (normal(10, 2, 8, seed=seed, device=device).requires_grad_() for seed in (1, 2))
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (begins_q, begins_k)]
    out, lse, _ = rt.flash_attn_varlen_func(q, k, v, *tables, 5, 5, **options,
                                            return_attn_probs=True)
    # The longest may be rounded up, past all rows together.
    for longest in (128, torch.tensor(7), np.int64(2**40)):
        assert torch.equal(rt.flash_attn_varlen_func(q, k, v, *tables, longest, longest, **options),
                           out)
    names = {"window_size": "window"}
    options = {names.get(name, name): value for name, value in options.items()}
    parts = [plain(q[a:b], k[c:d], v[c:d], **options) for a, b, c, d in
             zip(begins_q, begins_q[1:], begins_k, begins_k[1:])]
    wanted_out, wanted_lse = torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts], 1)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(lse, wanted_lse)
    seen = wanted_lse.isfinite().T[..., None].expand_as(out)
    dout = normal(8, 4, 8, seed=3, device=device) * seen
    for found, truth in zip(torch.autograd.grad(out, (q, k, v), dout),
                            torch.autograd.grad(wanted_out[seen], (q, k, v), dout[seen])):
        torch.testing.assert_close(found, truth.nan_to_num())


def test_what_differs_from_flash_attn():
    q, k = normal(1, 4, 2, 8), normal(1, 2, 2, 8)
    _, lse, _ = rt.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()
    begins = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(regard.Unsupported, match="block_table"):
        rt.flash_attn_varlen_func(q[0], q[0], q[0], begins, begins, 4, 4, block_table=begins)
    for argument, value in (("causal", "none"), ("window_size", None), ("window_size", (3,)),
                            ("window_size", (0.5, 1)), ("softmax_scale", "1")):
        with pytest.raises(regard.WrongType, match=f"^{argument} = "):
            rt.flash_attn_func(q, k, k, **{argument: value})
    with pytest.raises(regard.WrongType, match="qkv"):
        rt.flash_attn_qkvpacked_func(np.zeros((1, 2, 3, 4, 8)))
    torch.manual_seed(0)
    first = rt.flash_attn_func(q, k, k, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, rt.flash_attn_func(q, k, k, dropout_p=0.5))
