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
import regard

q = np.ones((1, 2, 8, 16), np.float32)
explanation: regard.Explanation = regard.explain(q, q, q, causal="top_left")
workspace: int = explanation.workspace
gradients: regard.Gradients = regard.attention_backward(q, q, q, q, q, q[..., 0], threads=1)
names: list[str] = [backend.name for backend in regard.info().backends]
regard.attention(q, q, q, causal="diagonal")  # wrong
regard.explain(q, q, q).workspace.append(1)  # wrong
"""


def mypy(*arguments: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary",
                           "--cache-dir", str(folder / "cache"), *arguments],
                          cwd=folder, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


def test_package_and_its_use(tmp_path: Path) -> None:
    assert (Path(regard.__file__).parent / "py.typed").exists()
    (tmp_path / "user.py").write_text(USER)
    errors = mypy("user.py", folder=tmp_path)
    wrong = [n for n, line in enumerate(USER.splitlines(), 1) if "# wrong" in line]
    assert [int(line.split(":")[1]) for line in errors] == wrong, errors
    assert mypy("-p", "regard", folder=tmp_path) == []
