"""regard.check: right results are called right, whatever the call; wrong ones are not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import regard
from regard import checking

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 21, 37, 16, 24
CASES = {
    "plain": {},
    "causal": {"causal": "bottom_right", "window": (9, None)},
    "top left": {"causal": "top_left", "scale": 0.3},
    "scores": {"bias": (1, HQ, SQ, SK), "alibi_slopes": (HQ,), "softcap": 1.5},
    "mask and sink": {"mask": (SQ, SK), "sink": (HQ,)},
    "bias of keys": {"bias": (SK,)},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 2**40 + 7, "dropout_offset": 2**33 + 1},
    "lengths": {"seqused_q": [20, 3], "seqused_k": [0, 37]},
    "spans": {"row_spans": [[0, 9, 20, 30]] * 7 + [[5, 2, 3, 11]] * 13 + [[-4, 99, 0, 0]],
              "key_spans": [[[[0, 12, 4, 21]]], [[[3, 8, 9, 9]]]], "causal": "top_left"},
    "positions": {"q_positions": [[70], [3]], "k_position": 32, "causal": "top_left",
                  "window": (50, None), "alibi_slopes": (HQ,), "dropout_p": 0.25,
                  "batch_begin": 2, "head_begin": 1},
    "packed": {"cu_seqlens_q": [0, 9, 9, 30], "cu_seqlens_k": [0, 4, 15, 40], "max_seqlen_q": 21,
               "max_seqlen_k": 25, "causal": "bottom_right", "dropout_p": 0.5},
}


def arrays(case, dtype, make=lambda x: x, layout="bhsd"):
    draw = np.random.default_rng(3)
    shapes = ([(31, HQ, D), (40, HKV, D), (40, HKV, DV)] if "cu_seqlens_q" in case else
              [(B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, DV)])
    rows = [draw.standard_normal(shape) for shape in shapes]
    if layout == "bshd":
        rows = [x.swapaxes(1, 2) for x in rows]
    options = dict(case)
    for name, value in case.items():
        if name in ("bias", "alibi_slopes", "sink", "mask"):
            x = draw.standard_normal(value)
            options[name] = make(x > -0.5 if name == "mask" else
                                 abs(x).astype(dtype if name == "bias" else np.float32))
        elif name.startswith(("cu_", "seqused")) or name.endswith(("_spans", "_positions")):
            options[name] = make(np.array(value, np.int32))
    return [make(x.astype(dtype)) for x in rows], options


def made_by(package):
    if package == "torch":
        return pytest.importorskip("torch").from_numpy
    return pytest.importorskip("jax.numpy").asarray if package == "jax" else lambda x: x


@pytest.mark.parametrize("package", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", CASES)
def test_right_results(name, package):
    rows, options = arrays(CASES[name], np.float32, made_by(package))
    found = regard.check(*rows, backward=True, show=False, **options)
    assert found, str(found)
    names = ["out", "lse", "dq", "dk", "dv"]
    names += [f"d{extra}" for extra in ("bias", "sink") if extra in options]
    assert [x.name for x in found.outputs] == names
    assert all(0 < x.error < 1e-4 or x.name in ("dbias", "dsink") for x in found.outputs)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_types_and_layouts(dtype, layout):
    rows, options = arrays(CASES["scores"], dtype, layout=layout)
    found = regard.check(*rows, backward=True, layout=layout, show=False, **options)
    assert found, str(found)
    wide = regard.check(*rows, layout=layout, show=False, out_type="float64"
                        if dtype is np.float64 else "float32", **options)
    assert wide, str(wide)


WRONG = {
    "one element": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, x + 0.01, x),
    "a bit too large": lambda x: x * 1.001,
    "a row of another": lambda x: np.roll(x, 1, axis=2),
    "not a number": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x),
    "nothing": lambda x: 0 * x,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results(name, monkeypatch, capsys):
    rows, options = arrays(CASES["causal"], np.float32)

    def wrong_forward(*arguments, **keywords):
        out, lse = regard.attention(*arguments, **keywords)
        return WRONG[name](out).astype(np.float32), lse

    def wrong_backward(*arguments, **keywords):
        right = regard.attention_backward(*arguments, **keywords)
        return regard.Gradients(right.dq, WRONG[name](right.dk).astype(np.float32), right.dv)

    with monkeypatch.context() as patched:
        patched.setattr(checking, "attention", wrong_forward)
        found = regard.check(*rows, **options)
    assert not found and {x.name: x.right for x in found.outputs} == {"out": False, "lse": True}
    assert "WRONG" in capsys.readouterr().out
    monkeypatch.setattr(checking, "attention_backward", wrong_backward)
    found = regard.check(*rows, backward=True, show=False, **options)
    assert [x.name for x in found.outputs if not x.right] == ["dk"]


@pytest.mark.parametrize("dtype, size", [(np.float64, 1e-14), (np.float64, 1), (np.float32, 1)])
def test_few_terms(dtype, size):
    """A sink's gradient, or one query, has so few terms that an unfused error may be small by luck."""
    sums = {"sink": np.float32([0.3]), "bias": np.zeros((1, 1, 1, 20), np.float32)}
    for seed in range(20):
        draw = np.random.default_rng(seed)
        q, k, v = (draw.standard_normal((1, 1, 20, 16)).astype(dtype) for _ in range(3))
        for rows, options in ((q, sums), (q[:, :, :1], {})):
            found = regard.check(rows, k, v * size, backward=True, show=False, **options)
            assert found, f"seed {seed}\n{found}"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_gradients_whose_terms_cancel(dtype, monkeypatch):
    """They are 0 but for rounding, and an unfused computation may have none."""
    bias = {"bias": np.zeros((1, 1), np.float32)}
    cases = [(1, {}), (30, {"bias": np.zeros((30, 1), np.float32)}), (30, bias),
             (30, bias | {"sink": np.float32([0.5, 0.1])})]
    for seed in range(8):
        draw = np.random.default_rng(seed)
        q, k, v = (draw.standard_normal((1, 2, 30, 64)).astype(dtype) for _ in range(3))
        for keys, options in cases:
            found = regard.check(q, k[:, :, :keys], v[:, :, :keys], backward=True, show=False,
                                 **options)
            assert found, f"seed {seed}\n{found}"

    def wrong_backward(*arguments, **keywords):
        right = regard.attention_backward(*arguments, **keywords)
        return regard.Gradients(right.dq + dtype(2e-3), right.dk + dtype(2e-3), right.dv)

    monkeypatch.setattr(checking, "attention_backward", wrong_backward)
    found = regard.check(q, k[:, :, :1], v[:, :, :1], backward=True, show=False)
    assert [x.name for x in found.outputs if not x.right] == ["dq", "dk"], str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_of_small_values(name, monkeypatch):
    q, k, v = arrays({}, np.float64)[0]
    monkeypatch.setattr(checking, "attention", lambda *rows, **keywords: (
        1e-14 * WRONG[name](1e14 * regard.attention(*rows, **keywords)[0]), np.zeros((B, HQ, SQ))))
    assert not regard.check(q, k, 1e-14 * v, show=False).outputs[0].right


def test_dropout_of_another_seed_is_wrong(monkeypatch):
    rows, options = arrays(CASES["dropout"], np.float32)
    monkeypatch.setattr(checking, "attention", lambda *rows, **keywords: regard.attention(
        *rows, **(keywords | {"dropout_seed": 5})))
    assert not regard.check(*rows, show=False, **options)


def test_what_is_printed_and_returned(capsys):
    rows, _ = arrays({}, np.float32)
    found = regard.check(*rows)
    assert capsys.readouterr().out == f"{found}\n"
    lines = str(found).splitlines()
    assert lines[0].startswith("attention of f32 q [2, 4, 21, 16], k [2, 2, 37, 16]")
    assert lines[1].split()[:3] == ["output", "type", "max"] and len(lines) == 4
    assert found.right and bool(found) and found.outputs[0].name == "out"


def test_given_gradients_and_tensors_that_require_them():
    torch = pytest.importorskip("torch")
    rows, options = arrays(CASES["scores"], np.float32, torch.from_numpy)
    leaves = [x.requires_grad_() for x in rows]
    options["bias"].requires_grad_()
    dout, dlse = torch.ones(B, HQ, SQ, DV), torch.ones(B, HQ, SQ)
    found = regard.check(*leaves, dout=dout, dlse=dlse, show=False, **options)
    assert found and len(found.outputs) == 6


def test_refusals():
    rows, _ = arrays({}, np.float32)
    rows[1][0, 0, 0, 0] = np.inf
    with pytest.raises(regard.InvalidArgument, match="k = an array with NaN or infinity"):
        regard.check(*rows)
    with pytest.raises(regard.WrongType, match="causl"):
        regard.check(*rows, causl=True)
    with pytest.raises(regard.WrongType, match="backward = 1"):
        regard.check(*rows, backward=1)
