"""Drawing of the benchmark's results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from regard.bench import __main__ as bench

pytest.importorskip("matplotlib")


def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (foreign := tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    (empty := tmp_path / "empty.jsonl").write_text("")
    for command, named in ((["--device", "cpu", "--q", "1x1x8x8", "--plot"], "--plot"),
                           (["--device", "cpu", "--plot", "rows.gif"], "rows.gif"),
                           (["plot", str(tmp_path / "absent.jsonl")], "absent.jsonl"),
                           (["plot", str(foreign)], "not the benchmark's"),
                           (["plot", str(empty)], "no rows of the grid"),
                           (["plot", str(empty), "--out", str(tmp_path)], "is a folder")):
        with pytest.raises(SystemExit) as stopped:
            bench.main(command)
        assert stopped.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu_avx512bf16", "gpu_h200", "gpu_h200_mma"])
def test_committed_results_are_drawn(name: str, tmp_path: Path) -> None:
    """A CPU's bars carry ratios to the best peer; a GPU's curves are named."""
    results = Path(__file__).resolve().parents[2] / f"bench/results/{name}.jsonl"
    assert bench.main(["plot", str(results), "--out", str(tmp_path / "plot.svg")]) == 0
    text = (tmp_path / "plot.svg").read_text()
    if name.startswith("gpu"):
        assert "FlashAttention-2" in text
        return
    rates = [row["tflops"] for row in map(json.loads, results.read_text().splitlines())
             if row["group"] == "grid"]
    ratios = [rate.pop("cpu") / max(rate.values()) for rate in rates if len(rate) > 1]
    assert len(ratios) > 10
    assert sorted(re.findall(r"[0-9.]+(?=×)", text)) == sorted(f"{ratio:.1f}" for ratio in ratios)
