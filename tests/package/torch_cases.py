"""Problems for the tests of regard.torch: tensors, options, and the oracle's answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import philox
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# Largest error of a tensor in norm, relative to the truth's.
LIMITS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**63 + 11, "dropout_offset": 5}


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (5, 7)
    sizes: tuple[int, int] = (4, 4)  # of q and k, and of v
    bias: tuple[int, ...] | None = None
    sink: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    cu_seqlens: tuple[list[int], list[int]] | None = None

    def __str__(self) -> str:
        return self.name


BATCH = 2
CASES = [
    Case("plain", sizes=(4, 6)),
    Case("top_left", options={"causal": "top_left", "scale": 0.3}),
    Case("window", options={"causal": "bottom_right", "window": (2, -1)}),
    Case("grouped", heads=(6, 2), options={"softcap": 1.5, "alibi_slopes": True}),
    Case("bias", bias=(BATCH, 2, 5, 7), options={"causal": "bottom_right"}),
    Case("bias_of_rows", bias=(2, 5, 1)),
    Case("bias_of_keys", bias=(BATCH, 1, 1, 7), options={"mask": True}),
    Case("bias_of_one", bias=(1,)),
    Case("row_spans", options={"row_spans": [[0, 4, 6, 7], [3, 7, 9, 2]] * 2 + [[2, 2, 5, 6]], "causal": "bottom_right"}),
    Case("key_spans", heads=(4, 2), options={"key_spans": [[1, 3, 4, 5], [0, 2, 2, 5]] * 3 + [[1, 1, 5, 9]]}),
    Case("sink", sink=True, options={"causal": "top_left", "window": (1, 0)}),
    Case("dropout", bias=(2, 1, 1), options=DROPOUT),
    Case("seqused", options={"seqused_q": [5, 2], "seqused_k": [3, 0]}),
    Case("positions", options={"q_positions": [[33], [35]], "k_position": 32, "causal": "top_left",
                               "alibi_slopes": True, "batch_begin": 1, "head_begin": 4,
                               **DROPOUT}),
    Case("empty_rows", lengths=(7, 3), options={"causal": "bottom_right"}),
    Case("packed", heads=(4, 2), lengths=(4, 5), cu_seqlens=([0, 4, 4, 6], [0, 2, 5, 10]),
         options={"causal": "bottom_right", **DROPOUT}),
]


@dataclass
class Problem:
    """tensors: q, k, v, bias, sink, where given; options: what else `attention` takes."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    dout: torch.Tensor
    dlse: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone().requires_grad_() for name, x in self.tensors.items()}

    def truth(self) -> dict[str, np.ndarray]:
        """float64, from the tensors' rounded values. Padding is 0 (lse: -inf) as in the results."""
        arrays = {name: to_numpy(x) for name, x in self.tensors.items()}
        options = {name: to_numpy(x) if isinstance(x, torch.Tensor) else x
                   for name, x in self.options.items()}
        p = options.pop("dropout_p", 0.0)
        seed, offset = options.pop("dropout_seed", 0), options.pop("dropout_offset", 0)
        begins = options.get("cu_seqlens_q")
        places = {name: options.get(name, 0) for name in ("k_position", "batch_begin", "head_begin")}
        options = {name: x for name, x in options.items() if not name.endswith("_begin")}
        if p > 0:
            batch = BATCH if begins is None else len(begins) - 1
            q, k = arrays["q"], arrays["k"]
            lengths = ((q.shape[2], k.shape[2]) if begins is None else
                       (options["max_seqlen_q"], options["max_seqlen_k"]))
            if "q_positions" in options:
                places["row_positions"] = oracle.row_positions(options["q_positions"], BATCH,
                                                               lengths[0])
            options["keep"] = philox.keep_mask(p, seed, offset, batch, q.shape[1], *lengths,
                                               **places)
            options["p"] = philox.realised(p)
        result = oracle.attention(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"),
                                  to_numpy(self.dout), to_numpy(self.dlse), **arrays, **options)
        used = options.get("seqused_q")
        for b, length in enumerate([] if used is None else used):
            result["lse"][b, :, length:] = -np.inf
        if begins is not None:
            result["lse"][:, begins[-1]:] = -np.inf
        return result


def problem(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Problem:
    draw = torch.Generator().manual_seed(sum(map(ord, case.name)))

    def normal(*shape: int, type: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, type)

    rows = case.lengths
    if case.cu_seqlens is not None:
        totals = [begins[-1] + 1 for begins in case.cu_seqlens]  # one row belongs to no sequence
        shapes = {name: (totals[i], case.heads[i], case.sizes[s])
                  for name, i, s in (("q", 0, 0), ("k", 1, 0), ("v", 1, 1), ("out", 0, 1))}
    else:
        shapes = {name: (BATCH, case.heads[i], rows[i], case.sizes[s])
                  for name, i, s in (("q", 0, 0), ("k", 1, 0), ("v", 1, 1), ("out", 0, 1))}
    tensors = {name: normal(*shapes[name]) for name in ("q", "k", "v")}
    options = dict(case.options)
    if case.bias is not None:
        tensors["bias"] = normal(*case.bias)
    if case.sink:
        tensors["sink"] = normal(case.heads[0], type=torch.float32)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = normal(case.heads[0], type=torch.float32).abs()
    if "mask" in options:
        options["mask"] = normal(BATCH, 1, *rows) > -0.5
    for name in ("seqused_q", "seqused_k", "row_spans", "key_spans", "q_positions"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32, device=device)
    lse_shape = shapes["out"][:3]
    if case.cu_seqlens is not None:
        lse_shape = (case.heads[0], shapes["q"][0])
        for i, side in enumerate("qk"):
            begins = case.cu_seqlens[i]
            options[f"cu_seqlens_{side}"] = torch.tensor(begins, dtype=torch.int32, device=device)
            options[f"max_seqlen_{side}"] = max(np.diff(begins).tolist())
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(tensors, options, normal(*shapes["out"]), normal(*lse_shape, type=sums))


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return x.double().numpy() if x.is_floating_point() else x.numpy()


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the bit on the CPU; on a GPU strides choose kernels, and dq is summed in any order."""
    limit = 1e-5 if found.is_cuda else 0
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


def error(found: torch.Tensor, truth: np.ndarray) -> float:
    """In norm, relative to the truth's; infinities must be the same ones."""
    value = to_numpy(found)
    assert value.shape == truth.shape
    infinite = np.isinf(truth)
    np.testing.assert_array_equal(np.isinf(value), infinite)
    np.testing.assert_array_equal(value[infinite], truth[infinite])
    truth, value = np.where(infinite, 0, truth), np.where(infinite, 0, value)
    return float(np.linalg.norm(value - truth) / max(np.linalg.norm(truth), 1e-30))
