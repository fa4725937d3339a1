#!/usr/bin/env python3
"""Runs every stage of the test suite, also after a failure, and sums them up.

The last line of the output is "N passed, M failed"; the exit status is 0 only where M is 0.
The whole output of each stage is kept in build/test/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import backends

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/test"
PROBLEMS = 3000  # random problems of `regard check`, over all instruction sets together
SANITIZED_PROBLEMS = 200
# What the thread sanitizer is for; c_api_test is left out because g++ 12's knows no thrd_create.
THREADED_TESTS = "threads|forcing|invariance"
SEED = 1
TAIL_LINES = 60
MOST_KERNELS = 3000  # kept compiled in build/kernels; one state of the texts has about 600

Counter = Callable[[str], tuple[int, int]]


# ----------------------------------------------------------------------- how many passed and failed


def count_ctest(log: str) -> tuple[int, int]:
    """Older versions of CTest name the failed ones even where there are none."""
    total = re.search(r"tests passed.* out of (\d+)", log)
    failed = re.search(r"(\d+) tests? failed out of", log)
    count = int(failed[1]) if failed else 0
    return (int(total[1]) - count, count) if total else (0, 0)


def count_pytest(log: str) -> tuple[int, int]:
    last = log.strip().splitlines()[-1] if log.strip() else ""
    numbers = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)", last)}
    return numbers.get("passed", 0), sum(n for word, n in numbers.items() if word != "passed")


def count_check(log: str) -> tuple[int, int]:
    found = re.findall(r"^(\d+) passed, (\d+) failed$", log, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def count_one(log: str) -> tuple[int, int]:
    return 1, 0


# ----------------------------------------------------------------------------------------- stages


@dataclass
class Stage:
    name: str
    group: str
    command: list[str]
    counter: Counter = count_one
    needs: str = ""  # the stage that must have passed
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    stage: Stage
    passed: int
    failed: int
    seconds: float
    note: str


def build_stage(preset: str) -> Stage:
    group = "release" if preset == "release" else preset
    return Stage(f"build {preset}", group, ["tools/build.sh", preset])


def ctest_stage(preset: str, group: str, only: str = "") -> Stage:
    """only: a regular expression of the tests' names."""
    command = [*steady_addresses(preset), "ctest", "--test-dir", f"build/{preset}"]
    command += ["--output-on-failure", *(["-R", only] if only else [])]
    return Stage(
        f"C++ and C tests, {preset}",
        group,
        command,
        count_ctest,
        needs=f"build {preset}",
        environment=sanitizer_options(preset),
    )


def pytest_stage(name: str, paths: str, environment: dict[str, str] | None = None,
                 more: tuple[str, ...] = ()) -> Stage:
    """paths: a folder, or a pattern of files."""
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(paths))
    return Stage(
        name,
        name,
        [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *more,
         *found],
        count_pytest,
        needs="build release",
        environment={"REGARD_LIBRARY": str(backends.library()), **(environment or {})},
    )


def check_stage(preset: str, group: str, backend: str, problems: int, seed: int) -> Stage:
    """backend "" is the one that the library would choose."""
    command = steady_addresses(preset)
    command += [f"build/{preset}/cli/regard", "check", "--problems", str(problems)]
    command += ["--seed", str(seed), *(["--backend", backend] if backend else [])]
    return Stage(
        f"check {backend or 'the default'}, {preset}, {problems} problems",
        group,
        command,
        count_check,
        needs=f"build {preset}",
        environment=sanitizer_options(preset),
    )


def steady_addresses(preset: str) -> list[str]:
    """The thread sanitizer of g++ 12 cannot live with more than 28 random bits of address."""
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    if preset != "tsan" or not bits.exists() or int(bits.read_text()) <= 28:
        return []
    return ["setarch", "--addr-no-randomize"]


def sanitizer_options(preset: str) -> dict[str, str]:
    return {
        "asan": {
            "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
        "tsan": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
    }.get(preset, {})


def sanitizer_stages(preset: str) -> list[Stage]:
    """One build, the C++ tests, and random problems on the backend that would be chosen."""
    return [
        build_stage(preset),
        ctest_stage(preset, preset, THREADED_TESTS if preset == "tsan" else ""),
        check_stage(preset, preset, "", SANITIZED_PROBLEMS, SEED),
    ]


def fuzz_stages(seconds: int) -> list[Stage]:
    return [
        build_stage("fuzz"),
        Stage(
            f"fuzz, {seconds} s a target",
            "fuzz",
            ["tools/fuzz.sh", str(seconds)],
            needs="build fuzz",
        ),
    ]


def emulated_stage() -> Stage:
    """The API on the emulated GPU, against the oracle; the C++ tests of it are among CTest's. A
    process each core, since it computes with one."""
    emulator = {
        "REGARD_LIBRARY": str(ROOT / "build/release/tests/cuda/libregard_emulator.so"),
        "REGARD_EMULATOR_CACHE": str(ROOT / "build/release/emulated_kernels"),
    }
    return pytest_stage("emulated", "tests/python/test_emulated*.py", emulator, ("-n", "auto"))


def kernel_stages() -> list[Stage]:
    """The GPU's kernels compile for every chip; NVRTC needs none of them."""
    tool = "build/release/cli/regard"
    cache = ROOT / "build/kernels"
    if cache.exists() and len(list(cache.iterdir())) > MOST_KERNELS:
        shutil.rmtree(cache)  # of texts that were changed since
    check = [tool, "prebuild", "--check", "--devices", "all", "--known", "tools/known_spills.txt"]
    return [
        Stage(
            "kernels compile for every chip, few spill",
            "kernels",
            check,
            count_check,
            needs="build release",
            environment={"REGARD_CACHE_DIR": str(cache), "VIRTUAL_ENV": str(ROOT / "build/venv")},
        ),
        Stage(
            "kernels compile for old chips, NVRTC 12",
            "kernels",
            [tool, "prebuild", "--devices", "sm_50,sm_61,sm_70"],
            needs="build release",
            environment={
                "REGARD_CACHE_DIR": str(cache),
                "LD_LIBRARY_PATH": str(ROOT / "build/nvrtc12/nvidia/cuda_nvrtc/lib"),
            },
        ),
    ]


def package_stages() -> list[Stage]:
    """The wheel as users get it, installed into build/venv, with the frameworks on the CPU."""
    # PyTorch's threads wait by spinning, which two cores with other work cannot afford.
    tests = pytest_stage("package", "tests/package", {"GOMP_SPINCOUNT": "0"})
    tests.needs = "build python"
    return [Stage("build python", "package", ["tools/build.sh", "python"]), tests]


def first_stages() -> list[Stage]:
    return [
        Stage("format", "format", ["tools/format.sh", "--check"]),
        build_stage("release"),
        ctest_stage("release", "ctest"),
        pytest_stage("python", "tests/python"),
        emulated_stage(),
        pytest_stage("cli", "tests/cli"),
        pytest_stage("examples", "examples"),
        pytest_stage("docs", "tests/docs"),
        pytest_stage("install", "tests/install"),
        *package_stages(),
        *kernel_stages(),
    ]


def check_stages() -> list[Stage]:
    """Known only once the library is built: which instruction sets this machine has."""
    names = backends.available()
    share = -(-PROBLEMS // len(names))
    return [
        check_stage("release", "check", name, share, SEED + index)
        for index, name in enumerate(names)
    ]


# ------------------------------------------------------------------------------------ running them


def show(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def wait(process: subprocess.Popen[bytes], name: str, begin: float) -> int:
    """On a terminal the line counts the seconds; elsewhere it stays as it is."""
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                show(f"\rtest: {name:<52} {time.monotonic() - begin:6.0f} s", end="")


def run(stage: Stage) -> Result:
    path = LOGS / (re.sub(r"\W+", "-", stage.name).strip("-") + ".log")
    begin = time.monotonic()
    show(f"test: {stage.name:<52}", end="")
    with path.open("wb") as log:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **stage.environment},
        )
        status = wait(process, stage.name, begin)
    seconds = time.monotonic() - begin
    text = path.read_text(errors="replace")
    passed, failed = stage.counter(text)
    if status == 0 and passed == 0:
        status, text = 1, text + "\n(the stage counted no tests)"
    if status and failed == 0:
        passed, failed = (0, 1) if stage.counter is count_one else (passed, 1)
    start = "\r" + f"test: {stage.name:<52}" if sys.stdout.isatty() else ""
    show(f"{start} {'FAILED' if failed else 'passed'} {seconds:6.1f} s")
    if failed:
        show("".join(f"    {line}\n" for line in text.splitlines()[-TAIL_LINES:]), end="")
    return Result(
        stage, passed, failed, seconds, "" if not failed else f"see {path.relative_to(ROOT)}"
    )


def run_all(stages: list[Stage], results: list[Result]) -> None:
    for stage in stages:
        broken = {result.stage.name for result in results if result.failed}
        if stage.needs in broken:
            show(f"test: {stage.name:<52} not run: {stage.needs} failed")
            results.append(Result(stage, 0, 1, 0.0, f"not run: {stage.needs} failed"))
        else:
            results.append(run(stage))


def summary(results: list[Result]) -> None:
    show(f"\n{'stage':<52} {'passed':>7} {'failed':>7} {'seconds':>8}")
    for r in results:
        show(f"{r.stage.name:<52} {r.passed:>7} {r.failed:>7} {r.seconds:>8.1f}  {r.note}".rstrip())
    total = sum(result.seconds for result in results)
    show(f"{'together':<52} {'':>7} {'':>7} {total:>8.1f}\n")
    show(f"{sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        default="",
        help="groups, with commas: format, release, ctest, "
        "python, emulated, cli, examples, docs, install, package, kernels, check, asan, tsan, fuzz",
    )
    parser.add_argument("--fuzz-seconds", type=int, default=30)
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    # pytest and check use the release build; asking for them builds it.
    if wanted & {"ctest", "python", "emulated", "cli", "examples", "docs", "install",
                 "kernels", "check"}:
        wanted.add("release")

    def chosen(stages: list[Stage]) -> list[Stage]:
        return [stage for stage in stages if not wanted or stage.group in wanted]

    LOGS.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    run_all(chosen(first_stages()), results)
    if not wanted or "check" in wanted:
        if any(result.failed for result in results if result.stage.name == "build release"):
            results.append(Result(Stage("check", "check", []), 0, 1, 0.0, "not run"))
        else:
            run_all(check_stages(), results)
    run_all(
        chosen(
            [
                *sanitizer_stages("asan"),
                *sanitizer_stages("tsan"),
                *fuzz_stages(arguments.fuzz_seconds),
            ]
        ),
        results,
    )
    summary(results)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
