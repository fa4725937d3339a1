"""python -m regard.bench scaling."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from regard.bench import scaling

ROWS = [{"type": "f32", "pass": "fwd", "threads": threads, "sizes": [1, 2, 2, 64, 64, 16],
         "mask": "full", "device": "a CPU", "regard": "0",
         "tflops": {"cpu": ours, "numpy": numpy}}
        for threads, ours, numpy in ((1, 0.1, 0.05), (2, 0.19, 0.06), (4, 0.3, 0.07))]


def test_efficiency_is_relative_to_the_fewest_threads() -> None:
    assert scaling.efficiency({4: 3.0, 2: 2.0}) == {2: 1.0, 4: 0.75}
    assert scaling.rates(ROWS)["f32", "fwd"]["ours"] == {1: 100.0, 2: 190.0, 4: 300.0}
    text = scaling.table(ROWS)
    assert "190.0 (0.95)" in text and "300.0 (0.75)" in text and "70.0 (0.35)" in text


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scaling.draw(ROWS, tmp_path / "some" / "scaling.svg")
    assert "ONNX" not in (text := (tmp_path / "some" / "scaling.svg").read_text())
    assert "Regard" in text and "NumPy" in text


def test_an_earlier_run_is_printed_and_drawn(tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "scaling.svg"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert scaling.main(["--from", str(rows), "--plot", str(picture)]) == 0
    assert "190.0 (0.95)" in capsys.readouterr().out and "Regard" in picture.read_text()
    for text, why in (("", "no rows"), ("no JSON", "not the lines"), ("{}", "KeyError"), ("3", "TypeError")):
        rows.write_text(text)
        with pytest.raises(SystemExit, match=f"--from = {rows}: .*{why}"):
            scaling.main(["--from", str(rows)])
    with pytest.raises(SystemExit, match="nowhere: No such file"):
        scaling.main(["--from", "nowhere"])


def test_runs_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counts = sorted({1, len(os.sched_getaffinity(0))})
    out = tmp_path / "scaling.jsonl"
    assert scaling.main(["--threads", ",".join(map(str, counts)), "--q", "1x2x64x16", "--type",
                         "f32", "--peers", "none", "--seconds", "0.05", "--with", "causal",
                         "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["threads"] for row in rows] == [n for n in counts for _ in range(2)]
    assert all(row["mask"] == "causal" and not row["wrong"] for row in rows)
    assert "f32, backward" in capfd.readouterr().out


def test_numbers_of_threads_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("0", "1,x", str(len(os.sched_getaffinity(0)) + 1)):
        with pytest.raises(SystemExit):
            scaling.main(["--threads", given])
        assert f"--threads = {given}: must be" in capsys.readouterr().err
    assert scaling.counts_up_to(12) == [1, 2, 4, 8, 12] and scaling.counts_up_to(1) == [1]
