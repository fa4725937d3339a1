"""Which stages there are, in two tiers: `core` is `make test`, `rest` what `make test-all` adds.

pytest and ctest tests are in `core` unless they are marked, or labelled, "exhaustive". A budget is
about twice the seconds that a stage takes on two idle cores.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import backends
from testing.counters import count_check, count_ctest, count_pytest
from testing.stage import LANES, PYTHON, ROOT, Stage

CORE, REST = "core", "rest"
BUDGET = 660  # seconds of all stages of `core` together, set-up included; the aim is 600
PROBLEMS = {CORE: 60, REST: 700}  # of `regard check`, for each instruction set
SEED = {CORE: 1, REST: 101}
SANITIZED_PROBLEMS = 200
# Of two processes of one stage each imports PyTorch, and one waits for the other at the end: on two
# cores a stage of `core` has one process, and two stages run side by side.
SIDE_BY_SIDE = (os.cpu_count() or 1) <= LANES
# What the thread sanitizer is for; c_api_test is left out because g++ 12's knows no thrd_create.
THREADED_TESTS = "threads|forcing|invariance_[a-z0-9]+$|^cuda$|steady"  # the preset builds no more


# The GPU's kernels compile for one chip of each kind; NVRTC needs none of them. sm_87, sm_89,
# sm_103 and sm_121 have the texts and tiles of a chip that is here.
CHIPS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def stages(tier: str, fuzz_seconds: int, share: int = 1) -> list[Stage]:
    """Of a tier, in the order in which they run. share: of the exhaustive Python tests, and of the
    chips that kernels are compiled for, one of so many is taken, by the commit."""
    if tier == REST:
        return [set_up("test-all", 60), *exhaustive_tests(share), *check(REST), *kernels(share),
                *old_kernels(), site(), *sanitizer("asan"), *sanitizer("tsan"),
                *fuzz(fuzz_seconds)]
    beside = build("release", 300)
    beside.lanes = 1  # pip waits for the network and uses one core
    return [
        set_up("test", 150),
        beside,
        Stage("format", "format", ["tools/format.sh", "--check"], budget=30, lanes=1),
        *core_tests(),
        *check(CORE),
    ]


def set_up(purpose: str, budget: int) -> Stage:
    """build/venv. The Debian packages are there: make has installed them."""
    name = "set-up" if purpose == "test" else "set-up, exhaustive"
    return Stage(name, "set-up", ["tools/setup.sh", purpose], budget=budget, lanes=1)


def core_tests() -> list[Stage]:
    """The longest first, so that both lanes end together."""
    return [
        emulated(CORE, 600),
        Stage("build python", "package", ["tools/build.sh", "python"], budget=90, lanes=1,
              needs=("set-up", "build release")),
        package("package", "tests/package", CORE, 360),
        pytest("python", "tests/python", CORE, 280),
        ctest("release", CORE, 200),
        pytest("cli", "tests/cli", CORE, 140),
        pytest("install", "tests/install", CORE, 100),
        pytest("docs and tools", "tests/docs tests/tools", CORE, 60),
        pytest("examples", "examples", CORE, 60),
    ]


def exhaustive_tests(share: int) -> list[Stage]:
    return [
        ctest("release", REST, 300),
        one_of(share, pytest("python, exhaustive", "tests/python", REST, 200)),
        one_of(share, emulated(REST, 1200)),
        *emulated_amx(),
        pytest("install, exhaustive", "tests/install", REST, 400),
        one_of(share, package("package, cli and tools, exhaustive",
                              "tests/package tests/cli tests/tools", REST, 900)),
    ]


def number_of_commit(share: int) -> int:
    """Below share; equal for equal commits."""
    if share == 1:
        return 0
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout or "0", 16) % share


def one_of(share: int, stage: Stage) -> Stage:
    """The stage, of whose tests one of so many runs (tests/conftest.py)."""
    if share == 1:
        return stage
    chosen = {"REGARD_TEST_SHARE": f"{number_of_commit(share)}/{share}"}
    return replace(stage, name=f"{stage.name}, 1 of {share}",
                   environment=stage.environment | chosen)


def package(name: str, paths: str, tier: str, budget: int) -> Stage:
    """PyTorch's threads wait by spinning, which two cores with other work cannot afford."""
    stage = pytest(name, paths, tier, budget, {"GOMP_SPINCOUNT": "0"})
    stage.needs = ("set-up", "build python")
    return stage


def build(preset: str, budget: int) -> Stage:
    return Stage(f"build {preset}", preset, ["tools/build.sh", preset], budget=budget)


def ctest(preset: str, tier: str, budget: int, only: str = "") -> Stage:
    """only: a regular expression of the tests' names."""
    labels = ["-LE" if tier == CORE else "-L", "exhaustive"]
    command = [*steady_addresses(preset), "ctest", "--test-dir", f"build/{preset}"]
    side_by_side = SIDE_BY_SIDE and tier == CORE
    command += ["--output-on-failure", "--parallel", "1" if side_by_side else "2"]
    command += ["-R", only] if only else [] if preset != "release" else labels
    suffix = "" if tier == CORE or preset != "release" else ", exhaustive"
    return Stage(
        f"C++ and C tests, {preset}{suffix}",
        "ctest" if preset == "release" else preset,
        command,
        budget,
        count_ctest,
        needs=(f"build {preset}",),
        environment=sanitizer_options(preset),
        lanes=1 if side_by_side else LANES,
    )


def pytest(name: str, paths: str, tier: str, budget: int,
           environment: dict[str, str] | None = None) -> Stage:
    """paths: folders, or patterns of files. Neighbours share cases: they go to one process."""
    found = sorted(str(path.relative_to(ROOT)) for pattern in paths.split()
                   for path in ROOT.glob(pattern))
    marks = "not exhaustive" if tier == CORE else "exhaustive"
    side_by_side = SIDE_BY_SIDE and tier == CORE
    processes = [] if side_by_side else ["-n", "auto", "--dist", "worksteal"]
    return Stage(
        name,
        name.split(",")[0].split()[0],
        [str(PYTHON), "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider",
         *processes, "--durations", "20", "-m", marks, *found],
        budget,
        count_pytest,
        needs=("set-up", "build release"),
        environment={"REGARD_LIBRARY": str(backends.library()), **(environment or {})},
        lanes=1 if side_by_side else LANES,
    )


def emulated(tier: str, budget: int) -> Stage:
    """The API on the emulated GPU, against the oracle; the C++ tests of it are among CTest's."""
    emulator = {
        "REGARD_LIBRARY": str(ROOT / "build/release/tests/cuda/libregard_emulator.so"),
        "REGARD_EMULATOR_CACHE": str(ROOT / "build/release/emulated_kernels"),
    }
    if tier == CORE:  # kernels of flagged rows are built only where a call flags one
        emulator["REGARD_EMULATOR_FIXUPS"] = "flagged"
    name = "emulated" if tier == CORE else "emulated, exhaustive"
    return pytest(name, "tests/python/test_emulated*.py", tier, budget, emulator)


def emulated_amx() -> list[Stage]:
    """The API with AMX on emulated tiles, against the oracle. Vectors are AVX2's."""
    processor = Path("/proc/cpuinfo")
    if not processor.exists() or "avx2" not in processor.read_text():
        return []
    stage = pytest("emulated AMX", "tests/python", CORE, 200,
                   {"REGARD_LIBRARY": str(backends.emulated_amx())})
    stage.command += ["-k", "amx"]
    return [stage]


def check(tier: str) -> list[Stage]:
    """Random problems, on each instruction set of this machine."""
    command = ["tools/check_backends.py", "--problems", str(PROBLEMS[tier])]
    return [
        Stage(
            f"check, {PROBLEMS[tier]} problems on each instruction set",
            "check",
            [str(PYTHON), *command, "--seed", str(SEED[tier])],
            60 if tier == CORE else 400,
            count_check,
            needs=("set-up", "build release"),
        )
    ]


def kernels(share: int) -> list[Stage]:
    chips = CHIPS[number_of_commit(share)::share]
    command = ["build/release/cli/regard", "prebuild", "--check", "--devices", ",".join(chips)]
    return [
        Stage(
            f"kernels compile for {', '.join(chips)}, few spill",
            "kernels",
            [*command, "--known", "tools/known_spills.txt"],
            900,
            count_check,
            needs=("set-up", "build release"),
            environment={
                "REGARD_CACHE_DIR": str(ROOT / "build/kernels"),
                "VIRTUAL_ENV": str(ROOT / "build/venv"),
            },
        )
    ]


def old_kernels() -> list[Stage]:
    return [
        Stage(
            "kernels compile for old chips, NVRTC 12",
            "kernels",
            ["build/release/cli/regard", "prebuild", "--devices", "sm_50,sm_61,sm_70"],
            120,
            needs=("set-up, exhaustive", "build release"),
            environment={
                "REGARD_CACHE_DIR": str(ROOT / "build/kernels"),
                "LD_LIBRARY_PATH": str(ROOT / "build/nvrtc12/nvidia/cuda_nvrtc/lib"),
            },
        )
    ]


def site() -> Stage:
    """Guides and API reference without a warning; installs what it needs, as `make docs` does."""
    return Stage("site of the documents", "docs", ["make", "docs"], budget=200, needs=("set-up",))


# ------------------------------------------------------------------------- other builds of the code


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


def sanitizer(preset: str) -> list[Stage]:
    """One build, the C++ tests, and random problems on the backend that would be chosen."""
    command = [f"build/{preset}/cli/regard", "check", "--problems", str(SANITIZED_PROBLEMS)]
    return [
        build(preset, 900),
        ctest(preset, REST, 600, THREADED_TESTS if preset == "tsan" else ""),
        Stage(
            f"check, {preset}, {SANITIZED_PROBLEMS} problems",
            preset,
            [*steady_addresses(preset), *command, "--seed", str(SEED[CORE])],
            200,
            count_check,
            needs=(f"build {preset}",),
            environment=sanitizer_options(preset),
        ),
    ]


def fuzz(seconds: int) -> list[Stage]:
    return [
        build("fuzz", 600),
        Stage(
            f"fuzz, {seconds} s a target",
            "fuzz",
            ["tools/fuzz.sh", str(seconds)],
            4 * seconds + 60,
            needs=("build fuzz",),
        ),
    ]
