"""With Regard installed PyTorch's attention and its modules give what they give without it.

Values, gradients, shapes, strides and kinds of errors, on the kinds of input that PyTorch's own
tests of scaled_dot_product_attention go through.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")

import regard.torch as rt  # noqa: E402
import regard.torch.fast_path as fast_path  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_cases import DEVICES  # noqa: E402

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    rt.uninstall()
    torch._dynamo.reset()


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)


def attend(*tensors, **options):
    """Looked up at each call, as PyTorch's own modules do."""
    return F.scaled_dot_product_attention(*tensors, **options)


def result_of(function, tensors):
    """Its value and its gradients."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    out = function(*leaves)
    assert out.requires_grad == torch.is_grad_enabled()
    if not out.requires_grad:
        return (out,)
    wanted = [x for x in leaves if x.requires_grad]
    dout = normal(*out.shape, seed=9, dtype=out.dtype, device=out.device)
    return (out, *torch.autograd.grad(out, wanted, dout, allow_unused=True))


def pytorch_alone(device):
    """On a GPU PyTorch's plain kernel: its fused ones refuse some of these strides and sizes."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext()


def compare(function, *tensors, strides=False, limit=None):
    """function(*tensors) and its gradients by PyTorch, then with Regard installed."""
    results = []
    for context in (pytorch_alone(tensors[0].device), rt.installed()):
        with context:
            results.append(result_of(function, tensors))
    for by_pytorch, found in zip(*results):
        assert (found is None) == (by_pytorch is None)
        if found is not None:
            off = limit or TOLERANCE[found.dtype]
            torch.testing.assert_close(found, by_pytorch, rtol=off, atol=off)
    if strides:
        assert results[1][0].stride() == results[0][0].stride()
    return results[1][0]


# -------------------------------------------------------------------------------- layouts and types

@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_memory_orders(order, options, device):
    """q, k and v lie in memory in any order of batch, heads and rows; so does out."""
    def made(seed, length):
        sizes = (2, 3, length)
        x = normal(*(sizes[axis] for axis in order), 8, seed=seed, device=device)
        return x.permute(*(order.index(axis) for axis in range(3)), 3)

    compare(lambda q, k, v: attend(q, k, v, **options), made(0, 5), made(1, 7), made(2, 7),
            strides=device == "cpu")


def test_views(device):
    qkv = normal(2, 6, 3, 4, 8, device=device)
    compare(lambda x: attend(*x.permute(2, 0, 3, 1, 4)), qkv)
    compare(lambda x: attend(*x[:, ::2].permute(2, 0, 3, 1, 4)), qkv)
    wide = normal(2, 3, 5, 20, device=device)
    compare(lambda x: attend(x[..., 1:9], x[..., 3:11], x[..., 12:20]), wide)
    one = normal(1, 1, 5, 8, device=device)
    compare(lambda q, k, v: attend(q.expand(2, 3, 5, 8), k.expand(2, 3, 5, 8), v),
            one, one, normal(2, 3, 5, 8, device=device))
    columns = normal(2, 3, 8, 5, device=device)
    compare(lambda x: attend(x.mT, x.mT, x.mT), columns)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_types(dtype, device):
    q, k, v = (normal(2, 4, length, 16, seed=length, dtype=dtype, device=device)
               for length in (9, 13, 13))
    compare(attend, q, k, v)
    compare(lambda *x: attend(*x[:3], x[3]), q, k, v, normal(9, 13, dtype=dtype, device=device))


SHAPES = {
    "one head": ((5, 8), (7, 8), (7, 6)),
    "no batch": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "two batches": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "one row": ((2, 3, 1, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one head and row": ((2, 1, 1, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "wide values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 24)),
    "batch of keys broadcasts": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "no entries": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    "no queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no columns": ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
    "no values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    "nothing at all": ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 0)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, causal, device):
    if name == "no heads" and device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("PyTorch 2.11's own kernel divides by the number of heads")
    tensors = [normal(*shape, seed=n, device=device) for n, shape in enumerate(SHAPES[name])]
    compare(lambda q, k, v: attend(q, k, v, is_causal=causal), *tensors,
            strides=device == "cpu")


def test_grouped_heads(device):
    q, k, v = (normal(2, heads, 5, 8, seed=heads, device=device) for heads in (6, 2, 2))
    compare(lambda *x: attend(*x, enable_gqa=True), q, k, v)
    compare(lambda *x: attend(*x, enable_gqa=True, is_causal=True), q[0], k[0], v[0])


# -------------------------------------------------------------------------------------------- masks

@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7)],
                         ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float with -inf"])
def test_masks(shape, kind, device):
    tensors = [normal(2, 3, length, 8, seed=n, device=device) for n, length in enumerate((5, 7, 7))]
    mask = normal(*shape, seed=5, device=device)
    if kind == "bool":
        mask = mask > -0.5
    elif kind == "float with -inf":
        mask = mask.masked_fill(mask < -0.5, -torch.inf)
    compare(lambda q, k, v, mask: attend(q, k, v, mask), *tensors, mask)


def test_masks_in_any_memory(device):
    q, k, v = (normal(2, 3, length, 8, seed=n, device=device) for n, length in enumerate((5, 7, 7)))
    mask = normal(7, 5, seed=5, device=device)
    for view in (lambda x: x.T, lambda x: x.T[None, None].expand(2, 3, 5, 7),
                 lambda x: x.T[::2].repeat_interleave(2, 0)[:5], lambda x: x.T > 0):
        compare(lambda q, k, v, mask: attend(q, k, v, view(mask)), q, k, v, mask)


def test_a_mask_and_the_causal_one(device):
    """The fused kernel of the CPU takes both; both hold."""
    q, k, v = (normal(2, 3, 5, 8, seed=n, device=device) for n in range(3))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).to(device) > 0.3
    wanted = attend(q, k, v, mask & torch.ones(5, 5, device=device).tril().bool())
    with rt.installed():
        torch.testing.assert_close(attend(q, k, v, mask, is_causal=True), wanted)


def test_rows_that_see_nothing(device):
    q, k, v = (normal(2, 3, 5, 8, seed=n, device=device) for n in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool, device=device)
    mask[2] = False
    out = compare(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    assert (out[:, :, 2] == 0).all()


# ------------------------------------------------------------------------------------------- errors

ERRORS = {
    "head sizes": lambda x: attend(x, x[..., :4], x),
    "heads": lambda x: attend(x, x[:, :2], x[:, :2]),
    "types": lambda x: attend(x, x.double(), x),
    "mask of integers": lambda x: attend(x, x, x, torch.ones(5, 5).long()),
    "shape of a mask": lambda x: attend(x, x, x, torch.ones(4, 5) > 0),
    "one dimension": lambda x: attend(x[0, 0, 0], x, x),
    "no tensor": lambda x: attend(x, None, x),
    "a scale of text": lambda x: attend(x, x, x, scale="x"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_of_pytorchs_kinds(name):
    x = normal(2, 3, 5, 8)
    with pytest.raises(Exception) as by_pytorch:
        ERRORS[name](x)
    kind = TypeError if isinstance(by_pytorch.value, TypeError) else RuntimeError
    with rt.installed(), pytest.raises(kind):
        ERRORS[name](x)


# -------------------------------------------------------------------------- scripted, traced, compiled

class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_torchscript(tmp_path):
    q, k, v = (normal(2, 3, 5, 8, seed=n) for n in range(3))
    wanted = Attention()(q, k, v)
    modules = (nn.MultiheadAttention(8, 2, batch_first=True),
               nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
               nn.TransformerDecoderLayer(8, 2, 16, batch_first=True))
    with rt.installed():
        scripted = torch.jit.script(Attention())
        torch.testing.assert_close(scripted(q, k, v), wanted)
        scripted.save(str(tmp_path / "scripted.pt"))
        torch.testing.assert_close(torch.jit.load(str(tmp_path / "scripted.pt"))(q, k, v), wanted)
        torch.testing.assert_close(torch.jit.trace(Attention(), (q, k, v))(q, k, v), wanted)
        for module in modules:
            torch.jit.script(module.eval())


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    compiled = torch.compile(Attention(), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        tensors = [normal(2, 3, length, 8, seed=n, device=device) for n in range(3)]
        compare(compiled, *tensors)
        with torch.no_grad():
            compare(compiled, *tensors)


@pytest.mark.exhaustive
def test_compiled_encoder(device):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    compiled = torch.compile(layer, backend="aot_eager")
    compare(compiled, normal(3, 5, 16, device=device))
    layer.eval()
    with torch.no_grad():
        compare(compiled, normal(3, 5, 16, device=device))


# ------------------------------------------------------------------------- modules, their fast path

@pytest.fixture
def fast_calls(monkeypatch):
    """How often Regard ran in the fast path."""
    count = []
    original = fast_path.scaled_dot_product_attention

    def counting(*arguments):
        count.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(fast_path, "scaled_dot_product_attention", counting)
    return count


PADDING = torch.arange(6) >= torch.tensor([[6], [4], [1]])
CAUSAL = torch.ones(6, 6).triu(1).bool()
MASKS = {
    "no mask": {},
    "causal": {"mask": CAUSAL},
    "causal of floats": {"mask": torch.zeros(6, 6).masked_fill(CAUSAL, -torch.inf)},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("nested", [False, True])
def test_encoder_in_eval_mode(mask, options, nested, fast_calls, device):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).to(device).eval()
    masks = {name: x.to(device) for name, x in MASKS[mask].items()}
    # PyTorch's own fast path on a GPU has GELU by its tanh approximation, whatever was asked for.
    limit = 1e-3 if device == "cuda" and "activation" in options else None
    with torch.no_grad():
        compare(lambda x: encoder(x, **masks), normal(3, 6, 16, device=device), limit=limit)
    # A padding mask alone makes nested tensors, which are PyTorch's.
    packs = nested and mask == "padding" and "norm_first" not in options
    assert len(fast_calls) == (0 if packs else 2)


def test_fast_path_takes_biases_of_floats(fast_calls):
    """PyTorch's own path in C++ reads them as bool; the one in Python is right."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, bias = normal(3, 6, 16), normal(6, 6, seed=1)
    wanted = layer(x, bias)  # with gradients: not the fast path
    with torch.no_grad(), rt.installed():
        torch.testing.assert_close(layer(x, bias), wanted, rtol=1e-5, atol=1e-5)
    assert len(fast_calls) == 1


def test_nested_inputs(device):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device).eval()
    x = normal(3, 6, 16, device=device)
    nested = torch.nested.nested_tensor([x[0], x[1, :4], x[2, :1]])
    with torch.no_grad():
        wanted = layer(nested).to_padded_tensor(0.0)
        with rt.installed():
            torch.testing.assert_close(layer(nested).to_padded_tensor(0.0), wanted)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(weights, training, fast_calls, device):
    module = nn.MultiheadAttention(16, 2, batch_first=True).to(device).train(training)
    padding = PADDING.to(device)
    with torch.set_grad_enabled(training):
        for options in ({}, {"key_padding_mask": padding}, {"attn_mask": CAUSAL.to(device)}):
            compare(lambda x: module(x, x, x, need_weights=weights, **options)[0],
                    normal(3, 6, 16, device=device))
        compare(lambda x, y: module(x, y, y, need_weights=weights)[0],
                normal(3, 6, 16, device=device), normal(3, 9, 16, seed=1, device=device))
    assert len(fast_calls) == (0 if training or weights else 3)


def test_decoder_and_transformer(device):
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).to(device)
    mask = CAUSAL.to(device)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            compare(lambda x, y: model(x, y, tgt_mask=mask, tgt_is_causal=True),
                    normal(3, 9, 16, device=device), normal(3, 6, 16, seed=1, device=device))


def test_contexts(device):
    q, k, v = (normal(2, 3, 5, 8, seed=n, device=device) for n in range(3))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        compare(attend, q, k, v)
    with torch.inference_mode():
        compare(attend, q, k, v)
    compare(lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False), q, k, v)
    meta = [x.to("meta") for x in (q, k, v)]
    wanted = attend(*meta)
    with rt.installed():
        assert attend(*meta).shape == wanted.shape
