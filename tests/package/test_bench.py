"""regard.bench on the CPU: what it writes, prints and draws, and that it notices wrong results."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from regard.bench import __main__ as bench
from regard.bench import cases, exact, host, sides, tables, timing, watch
from regard.bench.memory import GpuMemory, HostMemory, NoMemory
from regard.bench.problem import Problem
from regard.bench.side import LeftOut, Side

FIELDS = {"case", "pass", "group", "type", "sizes", "mask", "ms", "tflops", "tbytes", "error",
          "errors", "wrong", "why_not", "backend", "kernel", "share", "device", "regard", "threads",
          "commit"}
TINY = (
    cases.Case("tiny-full", "grid", 1, 2, 2, 96, 96, 16, "f32", peers=("torch", "jax", "numpy")),
    cases.Case("tiny-causal", "grid", 1, 2, 2, 96, 96, 16, "bf16", True, peers=("numpy",)),
    cases.Case("decode-tiny", "decode", 2, 4, 2, 1, 128, 16, "f32", passes=("fwd",)),
)


def small_features() -> list[cases.Case]:
    plain = {"batch": 2, "heads": 4, "heads_kv": 4, "rows": 70, "columns": 70, "dim": 16,
             "type": "f32"}
    return cases.feature_cases(plain, window=20, without=("f32-outputs",))


class TensorsOnHost(GpuMemory):
    """A GPU's arrays and their order, on the CPU."""

    cuda = False

    def stream(self) -> int:
        return 0

    def wait(self) -> None:
        pass


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "cpu_cases", lambda: list(TINY))
    monkeypatch.setitem(cases.PRESETS["cpu"], "small", "")


def run(path: Path, *more: str) -> tuple[int, list[tables.Row]]:
    status = bench.main(["--device", "cpu", "--one-process", "--seconds", "0.01", "--peers",
                         "numpy", "--out", str(path), *more])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
def test_writes_prints_and_draws(tiny: None, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plots/cpu.svg"
    status, rows = run(tmp_path / "rows.jsonl", "--plot", str(picture))
    text = capsys.readouterr().out
    assert status == 0, text
    assert [(row["case"], row["pass"]) for row in rows] == [
        ("tiny-full", "fwd"), ("tiny-full", "bwd"), ("tiny-causal", "fwd"), ("tiny-causal", "bwd"),
        ("decode-tiny", "fwd")]
    for row in rows:
        assert FIELDS <= set(row), FIELDS - set(row)
        assert row["ms"]["cpu"] > 0 and not row["wrong"]
        assert 0 < row["error"]["cpu"] < exact.TOLERANCE["cpu"][row["type"]]
        assert row["backend"]["cpu"].startswith("cpu:")
    assert set(rows[0]["ms"]) == {"cpu", "numpy"}
    assert 0 < rows[0]["error"]["numpy"] < 2e-6
    assert "16-bit" in rows[2]["why_not"]["numpy"] and "16-bit" in text
    expected = 4 * 2 * 96 * 96 * 16 * 1e-9 / rows[0]["ms"]["cpu"]
    assert rows[0]["tflops"]["cpu"] == pytest.approx(expected, rel=1e-3)
    assert "GB/s" in text and "GFLOP/s" in text and "5 rows, 0 with a wrong result" in text
    drawn = picture.read_text()
    assert "<svg" in drawn and "NumPy unfused" in drawn and "float32, backward" in drawn


def test_a_wrong_result_is_reported(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    right = sides.ours

    def wrong(problem: Problem, which: str, backend: str, threads: int) -> Side:
        side = right(problem, which, backend, threads)
        call = side.call

        def slightly_off() -> None:
            call()
            if which == "bwd":
                problem.gradients["dk"][..., -1, 3] += 0.1

        side.call = slightly_off
        return side

    monkeypatch.setattr("regard.bench.measure.ours", wrong)
    status, rows = run(tmp_path / "rows.jsonl", "--only", "tiny-full")
    assert status == 1
    assert rows[0]["wrong"] == []
    assert [text.split()[:2] for text in rows[1]["wrong"]] == [["cpu", "dk"]]
    text = capsys.readouterr().out
    assert "WRONG: cpu dk" in text and "1 with a wrong result" in text


@pytest.mark.exhaustive
def test_a_case_that_fails_costs_itself_alone(tiny: None, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    right = Problem.__init__

    def failing(self: Problem, case: cases.Case, memory: HostMemory) -> None:
        if case.name == "tiny-full":
            raise MemoryError("no room for it")
        right(self, case, memory)

    monkeypatch.setattr(Problem, "__init__", failing)
    status, rows = run(tmp_path / "rows.jsonl")
    assert status == 1 and {row["case"] for row in rows} == {"tiny-causal", "decode-tiny"}
    assert "tiny-full: MemoryError: no room for it" in capsys.readouterr().out


def test_a_side_that_writes_nothing_is_wrong(tiny: None, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    right = sides.ours

    def idle(*arguments: object) -> Side:
        side = right(*arguments)  # type: ignore[arg-type]
        side.call = lambda: None
        return side

    monkeypatch.setattr("regard.bench.measure.ours", idle)
    status, rows = run(tmp_path / "rows.jsonl", "--only", "tiny-full-fwd")
    assert status == 1 and len(rows[0]["wrong"]) == 2  # out, lse


def test_a_feature_is_timed_in_turns_with_the_plain_problem(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is checked too."""
    some = [case for case in small_features() if case.name in ("feature-plain", "feature-softcap")]
    monkeypatch.setattr(cases, "cpu_cases", lambda: some)
    monkeypatch.setitem(cases.PRESETS["cpu"], "small", "")
    path = tmp_path / "rows.jsonl"
    status, rows = run(path)
    text = capsys.readouterr().out
    assert status == 0, text
    assert [row.get("plain_ms", 0) > 0 for row in rows] == [False, False, True, True]
    prices = [row["ms"]["cpu"] / row["plain_ms"] for row in rows[2:]]
    assert text.count(" of plain") == 2 and f"{prices[1]:.2f} of plain" in text
    assert f"{prices[0]:>7.2f}x" in text.partition("x plain")[2]
    monkeypatch.setattr("regard.bench.measure.errors", lambda exact, results, problem: (
        {"out": 1.0} if problem.case.name == "feature-plain" else {}))
    status, rows = run(path, "--only", "softcap-fwd")
    assert status == 1 and rows[0]["wrong"] == ["plain out 1.0e+00"]
    narrow = [case.plain and replace(case, plain=replace(case.plain, type="bf16")) for case in some]
    monkeypatch.setattr(cases, "cpu_cases", lambda: [case for case in narrow if case])
    monkeypatch.setattr("regard.bench.measure.errors", lambda exact, results, problem: (
        {"out": 1e-3} if problem.case.type == "bf16" else {}))
    status, rows = run(path, "--only", "softcap-fwd")
    assert status == 0 and not rows[0]["wrong"]


@pytest.mark.parametrize("memory", [HostMemory, functools.partial(TensorsOnHost, "cpu")],
                         ids=["arrays", "tensors"])
def test_the_lse_of_rows_without_keys_is_right(memory: Callable[[], HostMemory]) -> None:
    pytest.importorskip("torch")
    case = cases.Case("none", "given", 2, 2, 2, 70, 70, 16, "f32", True, {"seqused": True})
    problem = Problem(case, memory())
    side = sides.ours(problem, "fwd", "cpu", 1)
    side.call()
    assert not np.isfinite(np.asarray(side.results()["lse"])).all()
    assert exact.errors(exact.exact_parts(problem), side.results(), problem)["lse"] < 1e-6
    side.results()["lse"][-1, -1, 3] = 0.0
    assert not exact.errors(exact.exact_parts(problem), side.results(), problem)["lse"] < 1


def test_options_are_relative_to_none() -> None:
    one, = cases.given_cases("1x2x64x16", "f16", 1, 0, 0, ["causal", "softcap=30"])
    assert one.plain == replace(one, name="f16-1x2x64x16", causal=False, options={}, plain=None)
    alone, = cases.given_cases("1x2x64x16", "f16", 1, 0, 0, [])
    assert alone.plain is None and alone.name == "f16-1x2x64x16"


@pytest.mark.parametrize("case", small_features(), ids=lambda case: case.name)
def test_every_feature_agrees_with_float64(case: cases.Case) -> None:
    problem = Problem(case, HostMemory())
    parts = exact.exact_parts(problem)
    for which in case.passes:
        side = sides.ours(problem, which, "cpu", 1)
        side.call()
        found = exact.errors(parts, side.results(), problem)
        assert set(found) == set(side.results())
        assert max(found.values()) < exact.TOLERANCE["cpu"][case.type], found


@pytest.mark.parametrize("name", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_peers_agree_with_float64(name: str, which: str) -> None:
    if name not in sides.installed("cpu"):
        pytest.skip(f"{name} is not installed")
    for causal in (False, True):
        case = cases.Case("peer", "grid", 2, 3, 3, 64, 64, 16, "f32", causal)
        problem = Problem(case, HostMemory())
        side = sides.peer(problem, which, name)
        with side.around():
            side.call()
        found = exact.errors(exact.exact_parts(problem), side.results(), problem)
        assert set(found) == ({"out"} if which == "fwd" else {"dq", "dk", "dv"})
        assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("name", ["openvino", "onnx-rt"])
@pytest.mark.parametrize("type, limit", [("f32", 2e-6), ("f16", 2e-3), ("bf16", 1e-2)])
def test_engines_agree_with_float64(name: str, type: str, limit: float) -> None:
    if name not in sides.installed("cpu", [name]):
        pytest.skip(f"{name} is not installed: tools/setup.sh bench does it")
    for causal in (False, True):
        case = cases.Case("peer", "grid", 2, 3, 3, 64, 64, 16, type, causal)
        problem = Problem(case, HostMemory())
        with pytest.raises(LeftOut, match="no gradients"):
            sides.peer(problem, "bwd", name)
        if name == "onnx-rt" and type != "f32":
            with pytest.raises(LeftOut, match="float32"):
                sides.peer(problem, "fwd", name)
            continue
        side = sides.peer(problem, "fwd", name)
        side.call()
        found = exact.errors(exact.exact_parts(problem), side.results(), problem)
        assert set(found) == {"out"} and found["out"] < limit, found


@pytest.mark.parametrize("case", small_features(), ids=lambda case: case.name)
def test_tensors_agree_with_float64(case: cases.Case) -> None:
    pytest.importorskip("torch")
    problem = Problem(case, TensorsOnHost("cpu"))
    parts = exact.exact_parts(problem)
    for which in case.passes:
        side = sides.ours(problem, which, "cpu", 1)
        side.call()
        found = exact.errors(parts, side.results(), problem)
        assert set(found) == set(side.results())
        assert max(found.values()) < exact.TOLERANCE["cpu"][case.type], found


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_peers_on_tensors_agree_with_float64(name: str, heads_kv: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip(name)
    case = cases.Case("peer", "grid", 2, 4, heads_kv, 64, 64, 16, "f32", True)
    for which in case.passes:
        problem = Problem(case, TensorsOnHost("cpu"))
        side = sides.peer(problem, which, name)
        with side.around():
            side.call()
        found = exact.errors(exact.exact_parts(problem), side.results(), problem)
        assert set(found) == ({"out"} if which == "fwd" else {"dq", "dk", "dv"})
        assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_a_gpu_takes_every_case(which: str) -> None:
    """Without memory, as kernels are compiled before anything runs."""
    for case in cases.gpu_cases():
        if which in case.passes:
            core = Problem(case, NoMemory()).core
            plan = core.explain(cases.PASSES[which], "sm_90", 0, "cuda")
            assert plan["supported"], f"{case.name}: {plan['text']}"


def test_unfused_peers_are_left_out_of_long_cases() -> None:
    case = cases.Case("long", "grid", 1, 1, 1, 20000, 20000, 1, "f32")
    with pytest.raises(LeftOut, match="1.5 GiB"):
        sides.peer(Problem(case, HostMemory()), "fwd", "numpy")


def test_tuning_sorts_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cases, "cpu_cases", lambda: list(TINY))
    status = bench.main(["--device", "cpu", "--one-process", "--seconds", "0.01", "--tune",
                         "--case", "tiny-full-fwd", "--backends", "reference;cpu;cpu:none"])
    text = capsys.readouterr().out
    lines = [line.split()[-1] for line in text.splitlines() if line.endswith(("cpu", "reference"))]
    assert status == 0 and lines == ["cpu", "reference"], text
    assert "cpu:none:" in text and "tiny-full-bwd" not in text


def test_one_problem(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "rows.jsonl", "--q", "1x4x40x16", "--kv-heads", "2", "--kv-len",
                       "50", "--dim-v", "8", "--type", "f32,bf16", "--only", "fwd|f32", "--with",
                       "causal", "window=30,4", "bias=1h1k", "softcap=20", "sink")
    assert status == 0
    assert [(row["type"], row["pass"]) for row in rows] == [
        ("f32", "fwd"), ("f32", "bwd"), ("bf16", "fwd")]
    for row in rows:
        assert row["sizes"] == [1, 4, 2, 40, 50, 16, 8] and row["mask"] == "causal"
        assert row["ms"]["cpu"] > 0 and not row["wrong"] and set(row["ms"]) == {"cpu"}
    assert set(rows[1]["errors"]["cpu"]) >= {"dq", "dk", "dv", "dbias", "dsink"}
    _, [plain] = run(tmp_path / "rows.jsonl", "--q", "1x2x40x16", "--type", "f32", "--only", "fwd")
    assert set(plain["ms"]) == {"cpu", "numpy"}


def test_list_and_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--preset", "full", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert "f32-b1-h16-s512-d64-causal-bwd" in listed and len(listed) == len(set(listed)) > 60
    for wrong, named in ((["--only", "nothing"], "nothing"), (["--only", "("], "--only"),
                         (["--device", "gpu"], "--device"), (["--threads", "-1"], "--threads"),
                         (["--tune"], "--case"), (["--q", "1x2x3"], "--q"),
                         (["--seconds", "nan"], "--seconds"), (["--seconds", "-1"], "--seconds"),
                         (["--seconds", "0"], "--seconds"), (["--seconds", "inf"], "--seconds"),
                         (["--pause", "nan"], "--pause"),
                         (["--type", "f32"], "--type needs --q"),
                         (["--with", "causal"], "--with needs --q"),
                         (["--kv-heads", "2"], "--kv-heads needs --q"),
                         (["--kv-len", "0"], "--kv-len needs --q"),
                         (["--dim-v", "8"], "--dim-v needs --q"),
                         (["--q", "0x1x16x16"], "--q = 0x1x16x16"),
                         (["--q", "1x1x16x00"], "--q = 1x1x16x00"),
                         (["--q", "1x1x8x8", "--kv-heads", "0"], "--kv-heads = 0"),
                         (["--q", "1x1x8x8", "--kv-len", "-1"], "--kv-len = -1"),
                         (["--q", "1x1x8x8", "--dim-v", "0"], "--dim-v = 0"),
                         (["--q", "1x1x8x8", "--type", "f8"], "--type"),
                         (["--q", "1x1x8x8", "--with", "softcap"], "--with softcap"),
                         (["--q", "1x1x8x8", "--with", "bias=hq"], "b1qk")):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["--device", "cpu", *wrong, "--list"])
        assert stopped.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["scaling"], ["map", "--device", "cpu"]])
@pytest.mark.parametrize("path", ["", "file/rows.jsonl"])
def test_a_file_that_cannot_be_written(command: list[str], path: str, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is measured."""
    (tmp_path / "file").write_text("kept")
    (folder := tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(SystemExit) as stopped:
        bench.main([*command, "--out", str(tmp_path / path if path else folder)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "argument --out" in error and "folder" in error
    assert (tmp_path / "file").read_text() == "kept"


def test_a_run_leaves_no_file_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--device", "cpu", "--one-process", "--seconds", "0.01", "--peers", "none",
                       "--q", "1x1x8x8", "--type", "f32"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_peer_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    """The child hangs in "first", unless it is told to leave that out; the parent tells it."""
    program = tmp_path / "child.py"
    program.write_text(
        "import argparse, time, pathlib\n"
        "from regard.bench.watch import Progress\n"
        "p = argparse.ArgumentParser()\n"
        "p.add_argument('--progress'); p.add_argument('--done')\n"
        "p.add_argument('--lost', action='append', default=[])\n"
        "a = p.parse_args()\n"
        "progress = Progress(a.progress, a.lost)\n"
        "for what in ('first', 'second'):\n"
        "    if what not in progress.lost:\n"
        "        progress.begin(what, 1.0)\n"
        "        if what == 'first': time.sleep(60)\n"
        f"        pathlib.Path({str(tmp_path / 'reached')!r}).write_text(what)\n"
        "progress.end()\n")
    began = time.perf_counter()
    assert watch.watch([sys.executable, str(program)]) == 0
    assert (tmp_path / "reached").read_text() == "second"
    assert time.perf_counter() - began < 20


@pytest.mark.exhaustive
def test_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard.bench", "--quick", "--device", "cpu", "--only", "full-fwd",
         "--peers", "none", "--seconds", "0.01", "--out", str(tmp_path)], capture_output=True,
        text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [written] = tmp_path.glob("cpu_*.jsonl")
    assert len(written.read_text().splitlines()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [[], ["--one-process"]])
def test_a_signal_keeps_what_was_measured(tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "some.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-u", "-m", "regard.bench", "--device", "cpu", "--preset", "full", "--peers",
         "none", "--seconds", "0.01", "--out", str(out), *more], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("f32-b1-h16-s512-d64-full"):
            break
    run.send_signal(signal.SIGTERM)
    rest = run.stdout.read()
    assert run.wait(30) == watch.INTERRUPTED
    assert "interrupted" in rest
    assert 1 <= len(out.read_text().splitlines()) < 100


def test_errors_are_relative_norms() -> None:
    case = cases.Case("norm", "grid", 1, 1, 1, 8, 8, 4, "f32")
    problem = Problem(case, HostMemory())
    want = np.array([3.0, 4.0])
    parts: list[exact.Part] = [("out", lambda x: x, want, 5.0)]
    assert exact.errors(parts, {"out": np.array([3.0, 4.5])}, problem) == {"out": 0.1}
    assert np.isnan(exact.errors(parts, {"out": np.array([3.0, np.nan])}, problem)["out"])


def test_a_gpu_turn_fits_its_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides come and go, and a new one often takes the address of one that is gone."""
    clock = timing.CudaClock(cast(GpuMemory, NoMemory()), 0)
    monkeypatch.setattr(clock, "wait", lambda: None)
    turns = []

    def mean(side: Side, calls: int) -> Callable[[], float]:
        turns.append(calls)
        return lambda: float(side.name)

    monkeypatch.setattr(clock, "_mean", mean)
    for seconds in 10 * ("4e-3", "1e-4"):
        side = Side(seconds, lambda: None, dict)
        clock.turn(side)
        clock.turn(side)
        del side
    assert turns == 10 * [1, 1, 1, 1, 40, 40]  # the first finds how many calls fit


@pytest.mark.exhaustive
def test_behind_another_operator(monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from regard.bench import behind

    calls = []
    sides = {name: functools.partial(calls.append, name) for name in "ab"}
    behind.medians(sides, lambda: calls.append("before"), 1)
    assert calls[:8] == ["before", "a", "before", "b", "before", "b", "before", "a"]
    monkeypatch.setattr(behind, "SHAPES", ((1, 2, 8, 16),))
    assert bench.main(["behind", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["PyTorch", "Regard", "own", "threads"] and len(lines) == 4
    for line in lines:
        times = [float(number) for number in line.split()[-6::2]]
        assert len(times) == 3 and min(times) > 0


def test_host_times_have_a_row_for_each_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(host, "BURST", 1)
    monkeypatch.setattr(host, "ROUNDS", 1)
    rows = {line[:32].strip(): line[32:].split() for line in host.table("cpu", False).splitlines()}
    assert all(float(cells[0]) > 0 for side, cells in rows.items() if not side.startswith("us of"))
    for side, passes in {"attention": 3, "NumPy": 2, "jitted regard.jax.attention": 1}.items():
        assert len(rows[side]) == 2 * passes
    assert rows["PyTorch"][1] == rows["jitted JAX"][1] == "1.00x"
