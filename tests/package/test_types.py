"""The installed package is typed: mypy --strict finds nothing, in it or in a user's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import regard

pytest.importorskip("mypy")

USER = """
import numpy as np
import numpy.typing as npt
import regard
from typing import assert_type

q: npt.NDArray[np.float32] = np.ones((1, 2, 8, 16), np.float32)
explanation: regard.Explanation = regard.explain(q, q, q, causal="top_left")
workspace: int = explanation.workspace
gradients: regard.Gradients = regard.attention_backward(q, q, q, q, q, q[..., 0], threads=1)
out: npt.NDArray[np.float32] = regard.attention(q, q, q, causal=True, window=(3, None))
out, lse = regard.attention(q, q, q, return_lse=True)
assert_type(out, npt.NDArray[np.float32])
regard.attention(q, q, q, out_type="float64", return_lse=bool(lse[0, 0, 0] > 1)).anything
check: regard.Check = regard.check(q, q, q, backward=True, softcap=2.0)
right: bool = check.outputs[0].right
mask: regard.masks.Mask = regard.masks.chunks(8, 4) & regard.masks.documents([0, 3, 8])
regard.attention(q, q, q, mask=mask, softcap=2.0)
picture: bytes = mask.show()
full: int = mask.tiles(4, 4).full
names: list[str] = [backend.name for backend in regard.info().backends]
regard.attention(q, q, q, causal="diagonal")  # wrong
regard.explain(q, q, q).workspace.append(1)  # wrong
regard.attention(1, 2, 3)  # wrong
regard.attention(q, q, q, causl=True)  # wrong
regard.attention_backward(q, q, q, q, q, q, causl=True)  # wrong
regard.attention_backward(q, q, q, q, q, q, softcap="1")  # wrong
regard.explain(q, q, q, pass_="sideways")  # wrong
regard.check(q, q, q, layout="sbhd")  # wrong
regard.attention(q, q, q, mask=True)  # wrong
regard.masks.chunks(8, "4")  # wrong
mask.len_q = 3  # wrong
first: npt.NDArray[np.float32] = regard.attention(q, q, q, return_lse=True)  # wrong
"""


TORCH_USER = """
import torch
import regard
import regard.torch as rt
from regard.torch import distributed as rd
from typing import assert_type

q = torch.ones(1, 2, 8, 16)
assert_type(regard.attention(q, q, q), torch.Tensor)
assert_type(rt.attention(q, q, q, causal="top_left"), torch.Tensor)
assert_type(rt.attention(q, q, q, return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(rt.scaled_dot_product_attention(q, q, q, is_causal=True), torch.Tensor)
rt.scaled_dot_product_attention(q, q, q, None, 0.0, True, return_lse=True, softcap=1.0)[1].sum()
assert_type(rt.scaled_dot_product_attention(q, q, q, regard.masks.chunks(8, 4)), torch.Tensor)
plan = rd.plan(8, world_size=1, heads_q=2, head_size=16, causal=True)
assert_type(rd.attention(q, q, q, plan, softcap=1.0), torch.Tensor)
assert_type(rd.attention(q, q, q, plan, return_lse=True), tuple[torch.Tensor, torch.Tensor])
balance: float = plan.balance
rd.attention(q, q, q, plan, causl=True)  # wrong
rd.plan(8, world_size=1, heads_q=2, head_size=16, causal="diagonal")  # wrong
rt.attention(q, q, q, return_lse=True).sum()  # wrong
rt.attention(q, q, q, causl=True)  # wrong
rt.scaled_dot_product_attention(q, q, q, causl=True)  # wrong
"""


def mypy(*arguments: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary",
                           "--cache-dir", str(folder / "cache"), *arguments],
                          cwd=folder, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


@pytest.mark.exhaustive
def test_package_and_its_use(tmp_path: Path) -> None:
    assert (Path(regard.__file__).parent / "py.typed").exists()
    pytest.importorskip("torch")
    for text in (USER, TORCH_USER):
        (tmp_path / "user.py").write_text(text)
        errors = mypy("--python-version", "3.11", "user.py", folder=tmp_path)
        wrong = [n for n, line in enumerate(text.splitlines(), 1) if "# wrong" in line]
        assert sorted({int(line.split(":")[1]) for line in errors}) == wrong, errors
    assert mypy("-p", "regard", folder=tmp_path) == []
