"""Which stages there are, in two tiers: `core` is `make test`, `rest` what `make test-all` adds.

pytest and ctest tests are in `core` unless they are marked, or labelled, "exhaustive". A budget is
about twice the seconds that a stage takes on two idle cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import backends
from testing.counters import count_check, count_ctest, count_pytest
from testing.stage import ROOT, Stage

CORE, REST = "core", "rest"
BUDGET = 900  # seconds of all stages of `core` together: 775 on two slow cores; the aim is 480
PROBLEMS = {CORE: 60, REST: 700}  # of `regard check`, for each instruction set
SEED = {CORE: 1, REST: 101}
SANITIZED_PROBLEMS = 200
# What the thread sanitizer is for; c_api_test is left out because g++ 12's knows no thrd_create.
THREADED_TESTS = "threads|forcing|invariance"


def stages(tier: str, fuzz_seconds: int) -> list[Stage]:
    """Of a tier, in the order in which they run."""
    if tier == REST:
        return [*tests(REST), *check(REST), *kernels(), *old_kernels(), site(),
                *sanitizer("asan"), *sanitizer("tsan"), *fuzz(fuzz_seconds)]
    return [
        Stage("format", "format", ["tools/format.sh", "--check"], budget=10, lanes=1),
        build("release", 300),
        *tests(CORE),
        *check(CORE),
    ]


def tests(tier: str) -> list[Stage]:
    """What ctest and pytest run; the package's wheel is built into build/venv on the way."""
    core = tier == CORE
    suffix = "" if core else ", exhaustive"
    # PyTorch's threads wait by spinning, which two cores with other work cannot afford.
    others = "" if core else " tests/cli tests/tools"
    package = pytest("package", "tests/package" + others, tier, 200 if core else 900,
                     {"GOMP_SPINCOUNT": "0"})
    package.needs = "build python"
    both = [
        ctest("release", tier, 90 if core else 300),
        pytest(f"python{suffix}", "tests/python", tier, 100 if core else 200),
        emulated(tier, 280 if core else 1200),
        pytest(f"install{suffix}", "tests/install", tier, 100 if core else 400),
    ]
    if not core:
        package.name = "package, cli and tools, exhaustive"
        return [*both, package]
    return [
        *both,
        pytest("cli", "tests/cli", tier, 90),
        pytest("examples", "examples", tier, 60),
        pytest("docs and tools", "tests/docs tests/tools", tier, 60),
        Stage("build python", "package", ["tools/build.sh", "python"], budget=60),
        package,
    ]


def build(preset: str, budget: int) -> Stage:
    return Stage(f"build {preset}", preset, ["tools/build.sh", preset], budget=budget)


def ctest(preset: str, tier: str, budget: int, only: str = "") -> Stage:
    """only: a regular expression of the tests' names."""
    labels = ["-LE" if tier == CORE else "-L", "exhaustive"]
    command = [*steady_addresses(preset), "ctest", "--test-dir", f"build/{preset}"]
    command += ["--output-on-failure", "--parallel", "2"]
    command += ["-R", only] if only else [] if preset != "release" else labels
    suffix = "" if tier == CORE or preset != "release" else ", exhaustive"
    return Stage(
        f"C++ and C tests, {preset}{suffix}",
        "ctest" if preset == "release" else preset,
        command,
        budget,
        count_ctest,
        needs=f"build {preset}",
        environment=sanitizer_options(preset),
    )


def pytest(name: str, paths: str, tier: str, budget: int,
           environment: dict[str, str] | None = None) -> Stage:
    """paths: folders, or patterns of files. Neighbours share cases: they go to one process."""
    found = sorted(str(path.relative_to(ROOT)) for pattern in paths.split()
                   for path in ROOT.glob(pattern))
    marks = "not exhaustive" if tier == CORE else "exhaustive"
    return Stage(
        name,
        name.split(",")[0].split()[0],
        [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-n", "auto",
         "--dist", "worksteal", "--durations", "20", "-m", marks, *found],
        budget,
        count_pytest,
        needs="build release",
        environment={"REGARD_LIBRARY": str(backends.library()), **(environment or {})},
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


def check(tier: str) -> list[Stage]:
    """Random problems, on each instruction set of this machine."""
    command = ["tools/check_backends.py", "--problems", str(PROBLEMS[tier])]
    return [
        Stage(
            f"check, {PROBLEMS[tier]} problems on each instruction set",
            "check",
            [sys.executable, *command, "--seed", str(SEED[tier])],
            60 if tier == CORE else 400,
            count_check,
            needs="build release",
        )
    ]


def kernels() -> list[Stage]:
    """The GPU's kernels compile for one chip of each kind; NVRTC needs none of them. sm_87, sm_89,
    sm_103 and sm_121 have the texts and tiles of a chip that is here."""
    chips = "sm_75,sm_80,sm_86,sm_90,sm_100,sm_120"
    command = ["build/release/cli/regard", "prebuild", "--check", "--devices", chips]
    return [
        Stage(
            "kernels compile for each kind of chip, few spill",
            "kernels",
            [*command, "--known", "tools/known_spills.txt"],
            900,
            count_check,
            needs="build release",
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
            needs="build release",
            environment={
                "REGARD_CACHE_DIR": str(ROOT / "build/kernels"),
                "LD_LIBRARY_PATH": str(ROOT / "build/nvrtc12/nvidia/cuda_nvrtc/lib"),
            },
        )
    ]


def site() -> Stage:
    """Guides and API reference without a warning; installs what it needs, as `make docs` does."""
    return Stage("site of the documents", "docs", ["make", "docs"], budget=200)


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
            needs=f"build {preset}",
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
            needs="build fuzz",
        ),
    ]
