"""tools/test.py: lanes, budgets and the table, with stages that take a moment."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from testing import counters, lanes, stage, stages, table  # noqa: E402

COUNTED = "print('3 passed, 0 failed')"


def python(name, code, budget=20, **more):
    return stage.Stage(name, "", [sys.executable, "-c", code], budget, counters.count_check, **more)


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "LOGS", tmp_path)
    monkeypatch.setattr(lanes, "LOGS", tmp_path)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)


def run(*which, slack=1.0):
    runner = lanes.Lanes(slack)
    runner.run(list(which))
    return {result.stage.name: result for result in runner.results}


def test_a_stage_over_its_budget_is_ended_with_its_children(tmp_path, capsys):
    child = "import time; time.sleep(60)"
    code = ("import subprocess, sys, time; print('3 passed, 0 failed', flush=True)\n"
            f"p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); time.sleep(60)")
    began = time.monotonic()
    result = run(python("slow", code, budget=1))["slow"]
    assert time.monotonic() - began < 20
    assert (result.passed, result.failed) == (3, 1)
    assert "over its budget of 1 s" in result.note
    deadline = time.monotonic() + 5
    while is_alive(int((tmp_path / "child").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int((tmp_path / "child").read_text()))
    assert "over its budget" in capsys.readouterr().out


def test_a_run_that_is_told_to_end_ends_its_stages(tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
            "from testing import lanes, stage\n"
            "sleep = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); "
            "time.sleep(60)']\n"
            f"stage.LOGS = lanes.LOGS = lanes.ROOT = __import__('pathlib').Path({str(tmp_path)!r})\n"
            "lanes.Lanes(1).run([stage.Stage('sleeps', '', sleep, 60)])")
    runner = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "sleeps.log"
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    runner.terminate()
    assert runner.wait(20) == 128 + signal.SIGTERM
    assert not is_alive(int(log.read_text()))


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_slack_multiplies_the_budget():
    code = f"import time; time.sleep(1.5); {COUNTED}"
    assert run(python("a", code, budget=1), slack=10)["a"].failed == 0


def test_one_lane_stages_run_side_by_side_and_others_alone(tmp_path):
    code = """import time
def note(): open("times", "a").write(f"NAME {time.monotonic()}\\n")
note(); time.sleep(0.5); note(); """ + COUNTED
    run(*(python(name, code.replace("NAME", name), lanes=count)
          for name, count in [("a", 1), ("b", 1), ("c", 2), ("d", 2)]))
    times = {}
    for line in (tmp_path / "times").read_text().splitlines():
        times.setdefault(line.split()[0], []).append(float(line.split()[1]))
    assert times["a"][0] < times["b"][1] and times["b"][0] < times["a"][1]
    assert times["c"][0] > max(times["a"][1], times["b"][1]) and times["d"][0] > times["c"][1]


def test_failures_are_counted_and_what_needs_them_is_not_run(capsys):
    results = run(python("before", COUNTED), python("broken", "raise SystemExit('no such thing')"),
                  python("after", COUNTED, needs=("before", "broken")),
                  python("silent", "pass"), python("other", COUNTED, needs=("not asked for",)))
    assert {name: (r.passed, r.failed) for name, r in results.items()} == {
        "before": (3, 0), "broken": (0, 1), "after": (0, 1), "silent": (0, 1), "other": (3, 0)}
    assert results["after"].note == "not run: broken failed"
    assert "counted no tests" in results["silent"].note
    assert "no such thing" in capsys.readouterr().out


def test_cpu_seconds_are_of_children_too():
    work = "sum(i * i for i in range(3_000_000))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); {COUNTED}"
    result = run(python("a", code))["a"]
    assert 0.05 < result.cpu < 20


def test_the_table_aligns():
    stages_run = python("a", COUNTED), python("a longer name", "raise SystemExit(1)")
    results = list(run(*stages_run).values())
    lines = table.table(results, 1.0, 12.3, 480).splitlines()
    columns = [line.index(word) + len(word) for line in lines[:1]
               for word in ("passed", "failed", "seconds", "budget", "CPU s")]
    for line in lines[1:]:
        for column in columns:
            assert line[column - 1] != " " and line[column:column + 1] in ("", " ")
    assert lines[-1].startswith("together") and len(lines) == 4
    assert table.totals(results) == (3, 1)


def test_tiers_repeat_nothing_and_every_group_is_in_one():
    core, rest = (stages.stages(tier, 30) for tier in (stages.CORE, stages.REST))
    commands = [tuple(s.command) for s in core + rest]
    assert len(set(commands)) == len(commands)
    assert len({s.log for s in core + rest}) == len(commands)
    names = {s.name for s in core + rest}
    assert {name for s in core + rest for name in s.needs} <= names
    assert sum(s.budget for s in core) > stages.BUDGET  # budgets of stages are twice what they take


def test_progress_of_what_runs():
    assert counters.progress("...s [ 42%]\n.. [ 57%]") == "57 %"
    assert counters.progress("compiling for sm_90: 17 of 60 kernels") == "17 of 60"
    assert counters.progress("[11/168] Building") == "11 of 168"
    assert counters.progress("hello") == ""


@pytest.mark.parametrize("log, counts", [
    ("100% tests passed, 0 tests failed out of 31\n", (31, 0)),
    ("94% tests passed, 2 tests failed out of 31\n", (29, 2)), ("", (0, 0))])
def test_ctest_is_counted(log, counts):
    assert counters.count_ctest(log) == counts


@pytest.mark.parametrize("last, counts", [
    ("120 passed, 3 skipped in 4.20s", (120, 0)), ("1 failed, 2 passed, 1 error in 1s", (2, 2)),
    ("no tests ran in 0.1s", (0, 0))])
def test_pytest_is_counted(last, counts):
    assert counters.count_pytest("....\n" + last + "\n") == counts


@pytest.mark.exhaustive
def test_the_gpu_suite_runs_dry_on_the_cpu():
    """Its stages and its table; without a GPU all but a few tests are skipped."""
    tools = pathlib.Path(__file__).resolve().parents[2] / "tools"
    done = subprocess.run(
        [sys.executable, tools / "test_gpu.py", "--device", "host", "--only", "alone", "--jobs", "1",
         "-k", "no_such_test"], capture_output=True, text=True, timeout=60)
    assert re.search(r"^tests/gpu, alone +0 +0 ", done.stdout, re.MULTILINE), done.stderr
    assert done.returncode == 1  # nothing passed


def test_a_share_is_named_and_shares_are_all_tests(tmp_path, monkeypatch):
    """Of the exhaustive tests each is in one share, and the others are in every share."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(40))\n@pytest.mark.exhaustive\n"
        "def test_rare(n): pass\ndef test_always(): pass\n")
    shutil.copy(TOOLS.parent / "tests/conftest.py", tmp_path)

    def chosen(share):
        out = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
             "-W", "ignore", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"REGARD_TEST_SHARE": share}).stdout
        return re.findall("test_some.py::(.*)", out)

    shares = [chosen(f"{n}/3") for n in range(3)]
    assert all(share.count("test_always") == 1 and 4 < len(share) < 30 for share in shares)
    assert sorted(set(sum(shares, []))) == sorted(chosen("0/1")) and len(sum(shares, [])) == 43
    monkeypatch.setattr(stages, "number_of_commit", lambda share: 2)
    named = {one.name: one for one in stages.stages(stages.REST, 30, 3)}
    emulated = named["emulated, exhaustive, 1 of 3"]
    assert emulated.environment["REGARD_TEST_SHARE"] == "2/3"
    assert "REGARD_EMULATOR_CACHE" in emulated.environment
    assert "kernels compile for sm_86, sm_120, few spill" in named
