"""Random problems against PyTorch's attention: python -m regard.bench map."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from regard.bench import __main__ as bench
from regard.bench import cases, sides
from regard.bench.map import check, draw, measure, report
from regard.bench.map.peers import peer
from regard.bench.memory import HostMemory, NoMemory
from regard.bench.problem import Problem
from regard.bench.side import LeftOut, Side

UNEVEN = cases.Case("uneven", "packed", 3, 4, 2, 30, 41, 16, "f32", True, {
    "packed": ((30, 1, 17), (41, 20, 17))})


def run(path: Path, *more: str) -> tuple[int, list[report.Row]]:
    status = bench.main(["map", "--device", "cpu", "--one-process", "--out", str(path), *more])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(draw.MOST_FLOPS, "cpu", (2e7, 2e7))


def test_a_run_and_its_repetition(tiny: None, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    status, rows = run(tmp_path / "map.jsonl", "--seed", "7", "--count", "3")
    text = capsys.readouterr().out
    assert status == 0, text
    assert [row["number"] for row in rows] == [0, 0, 1, 1, 2, 2]
    for row in rows:
        assert row["checked"].startswith(("torch ", "float64 ")) and not row["wrong"]
        for state in ("queued", "idle"):
            assert row[state].keys() == {"cpu", "torch"} and min(row[state].values()) > 0
    assert "3 problems, 6 passes, 0 with a wrong result" in text
    repeat = rows[2]["repeat"].split()
    assert " ".join(repeat) in text and repeat[:4] == ["python", "-m", "regard.bench", "map"]
    _, again = run(tmp_path / "one.jsonl", *repeat[4:])
    assert [(row["case"], row["sizes"]) for row in again] == [
        (row["case"], row["sizes"]) for row in rows[2:4]]


def test_a_wrong_result_is_reported(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    right = sides.ours

    def wrong(problem: Problem, which: str, *how: Any) -> Side:
        side = right(problem, which, *how)
        call = side.call

        def off() -> None:
            call()
            if which == "bwd":
                problem.gradients["dv"][0, 0, -1] += 3.0

        side.call = off
        return side

    monkeypatch.setattr(measure, "ours", wrong)
    status, rows = run(tmp_path / "map.jsonl", "--seed", "7", "--count", "1")
    assert status == 1 and [bool(row["wrong"]) for row in rows] == [False, True]
    assert rows[1]["wrong"][0].startswith("dv ") and "bwd WRONG: dv" in capsys.readouterr().out


def test_float64_judges_where_no_peer_agrees() -> None:
    problem = Problem(cases.Case("one", "square", 1, 1, 1, 9, 9, 8, "f32"), HostMemory())
    side = sides.ours(problem, "fwd", "cpu", 1)
    side.call()
    ours = side.results()
    near, far = {"out": ours["out"] * (1 + 1e-6)}, {"out": ours["out"] + 1}
    verdict = check.judged(problem, ours, {"near": near, "far": far})
    assert verdict.against.startswith("near ") and not verdict.wrong and list(verdict.odd) == ["far"]
    verdict = check.judged(problem, ours, {"far": far})
    assert verdict.against.startswith("float64 ") and not verdict.wrong and "far" in verdict.odd
    ours["out"][0, 0, 3, 3] = float("nan")
    verdict = check.judged(problem, ours, {"near": near})
    assert len(verdict.wrong) == 1 and verdict.wrong[0].startswith("out nan")


def test_packed_sequences_of_uneven_length() -> None:
    problem = Problem(UNEVEN, HostMemory())
    assert problem.given["q"].shape == (48, 4, 16) and problem.given["k"].shape == (78, 2, 16)
    for which in UNEVEN.passes:
        side = sides.ours(problem, which, "cpu", 1)
        side.call()
        verdict = check.judged(problem, side.results(), {})
        assert verdict.against.startswith("float64 ") and not verdict.wrong


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_drawn(device: str) -> None:
    """Every kind, within the bounds; a GPU can plan each problem."""
    found = [draw.drawn(device, 3, number) for number in range(100)]
    assert {case.group for case in found} == draw.KINDS[device].keys()
    assert {case.type for case in found} == {"f32", "f16", "bf16"}
    assert len({case.name for case in found}) == 100 and found[5] != draw.drawn(device, 4, 5)
    for case in found:
        assert 1 <= case.heads // case.heads_kv <= 32 and case.heads % case.heads_kv == 0
        assert 32 <= case.dim <= 256 and case.dim % 8 == 0 and case.bytes() <= draw.MOST_BYTES
        if packed := case.options.get("packed"):
            assert 8 <= case.batch == len(packed[0]) == len(packed[1]) <= 64
        if device == "cuda":
            for which in case.passes:
                core = Problem(case, NoMemory()).core
                plan = core.explain(cases.PASSES[which], "sm_90", 0, "cuda")
                assert plan["supported"], f"{case.name}: {plan['text']}"


def test_the_table() -> None:
    def row(number: int, which: str, ours: float, peer: float | None) -> report.Row:
        times = {"cuda": ours} | ({} if peer is None else {"flash": 3 * peer, "cudnn": peer})
        return {"case": f"case {number}", "pass": which, "ours": "cuda", "queued": times,
                "idle": {"cuda": 10.0, "cudnn": 10.0}, "kernel": "k", "wrong": [], "why_not": {},
                "repeat": f"repeat {number}"}

    rows = [row(0, "fwd", 1.0, 4.0), row(1, "fwd", 2.0, 2.0), row(2, "fwd", 4.0, 1.0),
            row(3, "fwd", 1.0, None), row(0, "bwd", 10.0, 5.0)]
    lines = report.summary(rows).splitlines()
    assert lines[1].split() == ["fwd", "queued", "3", "1.00", "67%", "0.25", "0.25"]
    assert lines[2].split() == ["fwd", "idle", "4", "1.00", "100%", "1.00", "1.00"]
    assert lines[3].split() == ["bwd", "queued", "1", "0.50", "0%", "0.50", "0.50"]
    worst = report.worst(rows).splitlines()
    assert worst[0].startswith("  0.25  fwd queued, 4.0 us, cudnn 1.0 us: case 2")
    assert worst[2].strip() == "repeat 2" and worst[3].startswith("  0.50  bwd queued")


def test_what_no_operator_of_pytorch_takes() -> None:
    pytest.importorskip("torch")
    with pytest.raises(LeftOut, match="packed"):
        peer(Problem(UNEVEN, HostMemory()), "fwd", "torch")


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--device", "gpu"], ["--seconds", "0"], ["--seconds", "inf"], ["--count", "-1"],
                  ["--count", "0"], ["--threads", "0"]):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["map", *wrong])
        assert stopped.value.code == 2 and f"{wrong[0]} = " in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("REGARD_TEST_CUDA"), reason="REGARD_TEST_CUDA is not set")
def test_peers_on_a_gpu_agree() -> None:
    """Flash takes every kind of problem in 16 bits, and cuDNN and efficient what is plain."""
    from regard.bench.memory import GpuMemory

    plain = cases.Case("plain", "square", 2, 4, 2, 65, 65, 64, "bf16", True)
    for case, names in (
            (plain, ["flash", "efficient", "cudnn"]),
            (cases.Case("window", "window", 2, 4, 2, 65, 65, 64, "bf16", options={
                "window": (9, 0)}), ["flash"]),
            (cases.Case("cross", "cross", 2, 4, 2, 33, 65, 64, "bf16", True), ["flash"]),
            (cases.Case("uneven", "packed", 3, 4, 2, 30, 41, 64, "bf16", True, UNEVEN.options),
             ["flash"])):
        problem = Problem(case, GpuMemory("cuda:0"))
        for which in case.passes:
            side = sides.ours(problem, which, "cuda", 1)
            side.call()
            for name in names:
                other = peer(problem, which, name)
                with other.around():
                    other.call()
                verdict = check.judged(problem, side.results(), {name: other.results()})
                assert verdict.against.startswith(name), (case.name, which, verdict)
