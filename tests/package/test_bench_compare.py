"""Two builds of the library in one process: python -m regard.bench compare."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from numpy.linalg import _umath_linalg

from regard.bench import __main__ as bench
from regard.bench import cases
from regard.bench.libraries import Library
from regard.bench.problem import Problem
from regard.bench.side import Side

BUILT = os.environ.get("REGARD_LIBRARY", "build/release/libregard.so")
CASES = (cases.Case("tiny", "grid", 1, 2, 1, 33, 47, 16, "f32", True),
         cases.Case("terms", "grid", 2, 2, 2, 50, 50, 16, "bf16", options={
             "bias": ("1", "h", "q", "k"), "mask": ("b", "1", "q", "k"), "sink": True,
             "alibi": True, "seqused": True, "window": (9, 4), **cases.DROPOUT}),
         cases.Case("packed", "grid", 2, 2, 2, 20, 20, 16, "f16",
                    options={"packed": True, "softcap": 2.0, "scale": 0.3}))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(cases, "cpu_cases", lambda: list(CASES))
    monkeypatch.setitem(cases.PRESETS["cpu"], "small", "")
    return [str(shutil.copy(BUILT, tmp_path / name)) for name in ("old.so", "new.so")]


def test_the_same_build_twice(builds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = bench.main(["compare", *builds, "--rounds", "2", "--most", "50"])
    text = capsys.readouterr().out
    assert status == 0, text
    assert text.count("same bits") == 6 and "6 compared, 0 slower, wrong or failed" in text


def test_what_is_slower_or_wrong(builds: list[str], monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    right = Library.side

    def planted(self: Library, problem: Problem, which: str, backend: str, threads: int) -> Side:
        side = right(self, problem, which, backend, threads)
        call = side.call

        def off() -> None:
            for _ in range(1 if self.name == "old" else 5):
                call()
            if self.name == "new" and which == "bwd":
                problem.gradients["dv"][..., -1, 3] += 0.5

        side.call = off
        return side

    monkeypatch.setattr(Library, "side", planted)
    status = bench.main(["compare", *builds, "--only", "tiny", "--rounds", "1", "--most", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]
    assert status == 1 and all("SLOWER than 2" in line for line in lines)
    assert "same bits" in lines[0] and "WRONG: new dv" in lines[1] and "old dv" not in lines[1]


def test_builds_in_the_working_directory(builds: list[str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.main(["compare", "old.so", "new.so", "--only", "tiny-fwd", "--rounds", "1",
                       "--most", "50"]) == 0


def test_what_cannot_be_compared(builds: list[str], tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    (text := tmp_path / "text.so").write_text("no library")
    foreign = _umath_linalg.__file__
    for bad, why in (("no-such.so", "No such file"), (str(text), "cannot be loaded"),
                     (foreign, "is no build of Regard: .*regard_version")):
        with pytest.raises(SystemExit, match=f"^{re.escape(bad)}: .*{why}") as stopped:
            bench.main(["compare", builds[0], bad])
        assert "\n" not in str(stopped.value)
    for wrong in (["--most", "nan"], ["--most", "-1"], ["--only", "["], ["--rounds", "0"]):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["compare", "no-such.so", "no-such.so", *wrong])
        assert stopped.value.code == 2 and f"{wrong[0]} = " in capsys.readouterr().err
    assert bench.main(["compare", *builds, "--only", "tiny", "--backend", "cuda"]) == 1
    assert "left out: backend" in capsys.readouterr().out
