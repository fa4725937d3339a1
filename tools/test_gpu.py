#!/usr/bin/env python3
"""Runs the GPU's tests on a machine that has one, and sums them up like tools/test.py.

The tests of tests/gpu run in as many processes as there are cores, since each test compiles
kernels, spread over all GPUs (CUDA_VISIBLE_DEVICES limits them). A process that a kernel spoils or
holds is followed by another that goes on behind the test in question. Then come the tests that
need the GPU for themselves, random problems of `regard check`, and both under NVIDIA's
compute-sanitizer. Nothing is downloaded.

The last line is "N passed, M failed". Whole outputs are kept in build/test/.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from testing.counters import count_check
from testing.lanes import Lanes, show
from testing.stage import LOGS, ROOT, Result, Stage
from testing.table import table, totals

ENDED_EARLY = 9     # of tests/gpu/conftest.py
MAX_RESTARTS = 6    # of one share
MAX_SHOWN = 40      # failures that are named on the terminal
TORCH = "tests/gpu/test_torch.py"  # apart: importing PyTorch takes seconds
SHARE_SECONDS = 400  # of each stage, and of each process of the suite
PROGRESS_SECONDS = 30  # how often the suite says how far it is
MOST_JOBS = 14      # processes that share a GPU
CHECK_PROBLEMS = 20  # of each process of `regard check`
FOLLOWED = "^(?!.*pairs)"  # by racecheck: of pairs of blocks a lane hands over for its warp
TOOLS = {"memcheck": ["--leak-check", "no"], "racecheck": [], "initcheck": [], "synccheck": []}


def run(stage: Stage) -> Result:
    """One stage, by itself."""
    lanes = Lanes(slack=1)
    lanes.run([stage])
    return lanes.results[0]


# ------------------------------------------------------------------------------------- the library


def build(arguments: argparse.Namespace) -> Result | None:
    """REGARD_LIBRARY is used as it is; else the library is built, without what needs more tools."""
    if os.environ.get("REGARD_LIBRARY"):
        return None
    if arguments.device == "host":
        os.environ["REGARD_LIBRARY"] = str(ROOT / "build/release/libregard.so")
        return None
    folder = ROOT / "build/gpu"
    os.environ["REGARD_LIBRARY"] = str(folder / "libregard.so")
    configure = f"cmake -S . -B {folder} -G Ninja -DCMAKE_BUILD_TYPE=Release"
    configure += " -DREGARD_BUILD_CLI=OFF -DREGARD_BUILD_TESTS=OFF -DREGARD_BUILD_EXAMPLES=OFF"
    command = ["bash", "-c", f"{configure} && cmake --build {folder}"]
    return run(Stage("build", "build", command, SHARE_SECONDS))


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each of them; one name at least."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ["0"]
    return [str(n) for n in range(len(re.findall(r"^GPU ", found.stdout, re.MULTILINE)))] or ["0"]


def on(gpu: str) -> dict[str, str]:
    """The environment of a process that sees this GPU alone."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}


def tool() -> Path | None:
    """The command line tool, where it was built and knows GPUs."""
    named = os.environ.get("REGARD_TOOL")
    places = [Path(named)] if named else [
        ROOT / "build" / folder / "cli/regard" for folder in ("gpu", "library", "release")]
    for place in places:
        if place.exists():
            try:
                text = subprocess.run([place, "check", "--help"], capture_output=True, text=True,
                                      timeout=20).stdout
            except (OSError, subprocess.TimeoutExpired):
                continue
            if "--device" in text:
                return place
    return None


# --------------------------------------------------------------------------------------- the suite


class Share:
    """One of the processes' parts of tests/gpu."""

    def __init__(self, name: str, index: int, count: int, marker: str, more: list[str],
                 gpu: str) -> None:
        self.gpu = gpu
        name = f"gpu-{name}-{index}"
        self.record, self.log = LOGS / f"{name}.jsonl", LOGS / f"{name}.log"
        self.record.unlink(missing_ok=True)
        self.command = [
            sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider",
            "--tb=short", "-m", marker, "--shard", f"{index}/{count}", "--record",
            str(self.record), *more]

    def lines(self) -> list[dict]:
        if not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def finished(self) -> list[dict]:
        return [line for line in self.lines() if "outcome" in line]

    def run(self) -> list[dict]:
        begin = time.monotonic()
        with self.log.open("wb") as log:
            for _ in range(MAX_RESTARTS):
                left = SHARE_SECONDS - (time.monotonic() - begin)
                try:
                    status = subprocess.run(
                        self.command, cwd=ROOT, env=on(self.gpu), stdout=log, stderr=log,
                        stdin=subprocess.DEVNULL, timeout=max(1, left)).returncode
                except subprocess.TimeoutExpired:
                    self.lose(f"no end after {SHARE_SECONDS} s; the rest was not run")
                    return self.finished()
                if status in (0, 1, 5):  # all done: passed, failed, nothing to do
                    return self.finished()
                if status != ENDED_EARLY:
                    self.lose(f"the process ended with {status}; see {self.log.relative_to(ROOT)}")
                if status in (2, 3, 4):  # pytest's own: it would only happen again
                    return self.finished()
        self.lose(f"{MAX_RESTARTS} processes were lost; the rest was not run", False)
        return self.finished()

    def lose(self, message: str, in_a_test: bool = True) -> None:
        """A failure of the test that had begun, if any, else of the share."""
        lines = self.lines()
        begun = in_a_test and lines and "outcome" not in lines[-1]
        name = lines[-1]["test"] if begun else f"tests/gpu, share {self.record.stem}"
        with self.record.open("a") as file:
            file.write(json.dumps({"test": name, "outcome": "failed", "message": message,
                                   "seconds": 0}) + "\n")


def suite_result(name: str, shares: list[Share], workers: int, may_be_empty: bool) -> Result:
    begin = said = time.monotonic()
    tests: list[dict] = []
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(Share.run, share) for share in shares]
        for ended, future in enumerate(as_completed(running), 1):
            tests += future.result()
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                show(f"test: ... {name} {said - begin:.0f} s, {ended} of {len(shares)} shares, "
                     f"{len(tests)} tests")
    seconds = time.monotonic() - begin
    count = collections.Counter(test["outcome"] for test in tests)
    failed = [test for test in tests if test["outcome"] == "failed"]
    if not count["passed"] and not failed and not may_be_empty:
        failed.append({"test": name, "message": "nothing ran; is there a GPU? see "
                       f"{shares[0].log.relative_to(ROOT)}", "outcome": "failed"})
    show(f"test: {name:<52} {'FAILED' if failed else 'passed'} {seconds:6.1f} s")
    show_failures(failed)
    skipped = f"{count['skipped']} skipped" if count["skipped"] else ""
    (LOGS / f"failures-{re.sub(r'[^a-z]+', '-', name)}.jsonl").write_text(
        "".join(json.dumps(test) + "\n" for test in failed))
    return Result(Stage(name, "suite", [], SHARE_SECONDS), count["passed"], len(failed), seconds,
                  note=skipped)


def show_failures(failed: list[dict]) -> None:
    """By test function: how many failed, and what the first ones said."""
    groups: dict[str, list[dict]] = {}
    for test in failed:
        groups.setdefault(test["test"].split("[")[0].replace("tests/gpu/", ""), []).append(test)
    shown = 0
    for function, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        show(f"    {len(tests):>4} x {function}")
        for test in tests[: max(1, min(3, MAX_SHOWN - shown))]:
            parameters = test["test"].partition("[")[2].removesuffix("]")
            show(f"           [{parameters}] {test['message'][:200]}")
            shown += 1


# ------------------------------------------------------------------------- random problems, memory


def is_hopper(place: Path) -> bool:
    text = subprocess.run([place, "info"], capture_output=True, text=True, timeout=60).stdout
    return bool(re.search(r"^cuda:0 .*: sm_90\b", text, re.MULTILINE))


def check_command(place: Path, backend: str, problems: int, seed: int, *more: str) -> list[str]:
    command = [str(place), "check", "--device", "cuda:0", "--problems", str(problems), "--seed",
               str(seed), *more]
    return command + (["--backend", backend] if backend else [])


def together(stages: list[Stage], workers: int) -> list[Result]:
    """Stages side by side, spread over the GPUs; the lines of each come when it ends."""
    places = gpus()

    def run_one(index: int, stage: Stage) -> Result:
        begin = time.monotonic()
        try:
            done = subprocess.run(
                stage.command, cwd=ROOT, env=on(places[index % len(places)]), capture_output=True,
                text=True, errors="replace", timeout=stage.budget)
            text, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode(errors="replace") + "\n(no end)"
            status = 1
        stage.log.write_text(text)
        passed, failed = stage.counter(text)
        if failed == 0 and (status != 0 or passed == 0):
            failed = 1
        seconds = time.monotonic() - begin
        lines = [f"test: {stage.name:<52} {'FAILED' if failed else 'passed'} {seconds:6.1f} s"]
        if failed:
            lines += [f"    {line}" for line in text.splitlines()[-20:]]
        show("\n".join(lines))
        return Result(stage, passed, failed, seconds,
                      note=f"see {stage.log.relative_to(ROOT)}" if failed else "")

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run_one, range(len(stages)), stages))


def check_stages(place: Path, problems: int) -> list[Stage]:
    forced = [("", 1), ("", 2), ("", 3), ("cuda:simt", 4), ("cuda:simt", 5)]
    typed = [("cuda:mma", "bf16"), ("cuda:mma", "f16"), ("cuda:mma", "f32"), ("cuda:mma75", "f16"),
             ("cuda:mma80", "bf16"), ("cuda:mma/99", "bf16")]
    if is_hopper(place):  # half of its problems are left out: the copy engine does not take them
        typed += [("cuda:wgmma", "bf16"), ("cuda:wgmma", "f16")]
    stages = [Stage(f"check {backend or 'the default'}, seed {seed}", "check",
                    check_command(place, backend, problems, seed, "--max-len", "1500"),
                    SHARE_SECONDS, count_check) for backend, seed in forced]
    stages += [Stage(f"check {backend} {type}", "check",
                     check_command(place, backend, problems, 10 + index, "--type", type,
                                   "--max-len", "1500"), SHARE_SECONDS, count_check)
               for index, (backend, type) in enumerate(typed)]
    return stages


def count_sanitizer(log: str) -> tuple[int, int]:
    """The tool's errors (racecheck: also its hazards); else the problems that it looked at."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    hazards = re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log)
    if not found and not hazards:
        return 0, 1
    errors = sum(map(int, found + hazards))
    passed, failed = count_check(log)
    if not passed and not failed:
        smoke = re.search(r"^\d+ passed, \d+ failed in", log, re.MULTILINE)
        passed, failed = count_smoke(log) if smoke else pytest_counts(log)
    return passed, failed + errors


def pytest_counts(log: str) -> tuple[int, int]:
    found = re.findall(r"^(?:(\d+) failed, )?(\d+) passed", log, re.MULTILINE)
    return (int(found[-1][1]), int(found[-1][0] or 0)) if found else (0, 0)


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (path for path in ("/usr/local/cuda/bin/compute-sanitizer",) if Path(path).exists()), None)


def sanitizer_stages(program: str, place: Path | None, problems: int) -> list[Stage]:
    """Random problems, with backends that cover every family; else a few tests. On Hopper races of
    the smoke test's problems too."""
    stages = []
    backends = [("", []), ("cuda:simt", [])]
    if place and is_hopper(place):
        backends.append(("cuda:wgmma", ["--type", "bf16"]))
    for name, options in TOOLS.items():
        prefix = [program, "--tool", name, *options, "--print-limit", "5"]
        if place:
            for backend, more in backends:
                check = check_command(place, backend, problems, 3, "--max-len", "300", *more)
                stages.append(Stage(f"{name}, check {backend or 'the default'}", "sanitizer",
                                    [*prefix, *check], SHARE_SECONDS, count_sanitizer))
        else:
            stages.append(Stage(
                f"{name}, some tests", "sanitizer",
                [*prefix, sys.executable, "-m", "pytest", "-q", "--color=no", "-p",
                 "no:cacheprovider", "tests/gpu/test_features.py", "-k",
                 "test_everything_at_once or test_one_gradient_alone"], SHARE_SECONDS,
                count_sanitizer))
    if place and is_hopper(place):
        # Longer than the random problems, so that every place in shared memory is used again.
        stages.append(Stage(
            "racecheck, smoke cuda:wgmma", "sanitizer",
            [program, "--tool", "racecheck", "--target-processes", "all", "--kernel-name",
             "kns=regard_kernel", "--print-limit", "5", sys.executable, "tests/gpu/smoke.py",
             "--families", "wgmma", "--only", FOLLOWED, "--workers", "4"], SHARE_SECONDS,
            count_sanitizer))
    return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="smoke,suite,alone,check,sanitizer",
                        help="parts, with commas; build: only that (default %(default)s)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's, for the suite")
    parser.add_argument("--all-pairs", action="store_true", help="of features, each by itself")
    parser.add_argument("--jobs", type=int, help=f"default: a core each, {MOST_JOBS} a GPU at most")
    parser.add_argument("--problems", type=int, default=CHECK_PROBLEMS, help="of each check")
    parser.add_argument("--sanitized-problems", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "host"],
                        help="host: a dry run of the suite on the CPU")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    places = gpus()
    jobs = arguments.jobs or max(1, min(MOST_JOBS * len(places), os.cpu_count() or 1))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quicker, and nothing foreign
    LOGS.mkdir(parents=True, exist_ok=True)
    wanted = set(arguments.only.split(","))
    begin = time.monotonic()
    results: list[Result] = []
    built = build(arguments)
    if built:
        results.append(built)
        if built.failed:
            return summary(results, begin)
    if wanted == {"build"}:
        return 0
    if "smoke" in wanted:
        command = [sys.executable, "tests/gpu/smoke.py", "--workers", str(min(10, jobs))]
        command += ["--device", "cpu"] if arguments.device == "host" else []
        results.append(run(Stage("smoke", "smoke", command, SHARE_SECONDS, count_smoke)))
    more = ["--device", arguments.device, *(["-k", arguments.k] if arguments.k else []),
            *(["--all-pairs"] if arguments.all_pairs else [])]
    if "suite" in wanted:
        count = 2 * jobs
        shares = [Share("torch", n, 2, "not alone", [TORCH, *more], places[n % len(places)])
                  for n in range(2)]
        shares += [Share("numpy", n, count, "not alone", ["tests/gpu", f"--ignore={TORCH}", *more],
                         places[n % len(places)]) for n in range(count)]
        results.append(suite_result("tests/gpu", shares, jobs, False))
    if "alone" in wanted:
        shares = [Share("alone", 0, 1, "alone", ["tests/gpu", *more], places[0])]
        results.append(suite_result("tests/gpu, alone", shares, 1, bool(arguments.k)))
    place = tool() if wanted & {"check", "sanitizer"} else None
    if "check" in wanted:
        if place:
            results += together(check_stages(place, arguments.problems), jobs)
        else:
            show("test: check: not run: no command line tool that knows --device (REGARD_TOOL)")
    if "sanitizer" in wanted and arguments.device == "cuda":
        program = sanitizer()
        if program:
            stages = sanitizer_stages(program, place, arguments.sanitized_problems)
            results += together(stages, min(4 * len(places), jobs))
        else:
            show("test: sanitizer: not run: compute-sanitizer is not installed")
    return summary(results, begin)


def summary(results: list[Result], begin: float) -> int:
    """Prints the table of stages; returns the exit status."""
    passed, failed = totals(results)
    show("\n" + table(results, 1, time.monotonic() - begin, 0) + "\n")
    show(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def count_smoke(log: str) -> tuple[int, int]:
    found = re.findall(r"^(\d+) passed, (\d+) failed", log, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 1)


if __name__ == "__main__":
    sys.exit(main())
