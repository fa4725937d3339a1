"""The documents' programs run; that the documents show these very programs is tested in tests/docs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build/release"


def output_of(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_cpp(text: str) -> None:
    found = re.search(r"sum of dv: ([\d.]+) of (\d+)", text)
    assert found, text
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-5)


def check_c(text: str) -> None:
    assert re.search(r"^regard \d+\.\d+\.\d+: a mean of ones is 1\.00000\d$", text.strip()), text


def test_cpp_example_runs() -> None:
    check_cpp(output_of(BUILD / "examples/example_forward_cpp"))


def test_c_example_runs() -> None:
    check_c(output_of(BUILD / "examples/example_forward_c"))


def test_c_mask_runs() -> None:
    text = output_of(BUILD / "examples/example_mask_c")
    assert text == "both layers have the results of the spans\n"


def test_guide_runs() -> None:
    """Each of its programs checks what it computed."""
    text = output_of(BUILD / "examples/example_guide_cpp")
    assert text.endswith("the guide's programs are right\n")


def test_gpu_example_runs() -> None:
    text = output_of(BUILD / "examples/example_gpu_cpp")
    assert re.match(r"no GPU to use: |a mean of ones on the GPU is off by \d\.\de-0[6-9]", text), text


def test_distributed_example_runs() -> None:
    """Both processes compare their rows with one call over the whole sequence."""
    text = output_of(BUILD / "examples/example_distributed_cpp")
    found = dict(re.findall(r"rank (\d): (\d+) rows, at most \d\.\de-0[6-9] from one process", text))
    assert sum(map(int, found.values())) == 1000 and sorted(found) == ["0", "1"], text
    assert text.count("gather over 2 ranks, 1000 rows dealt zigzag") == 1, text


def test_distributed_gpu_example_runs() -> None:
    """Both GPUs compare their rows with one call on the CPU, by each of three schemes."""
    text = output_of(BUILD / "examples/example_distributed_gpu_cpp")
    if not re.match(r"two GPUs are needed, \d found|NCCL is needed: ", text):
        assert len(re.findall(r"GPU [01]: at most \d\.\de-0[5-9]", text)) == 6, text
