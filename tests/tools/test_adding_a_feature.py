"""A scalar feature is added to a copy of the tree: the compiler or a test names every place that its
author forgets, no kernel changes, and the feature then works on every backend and kernel family.
Then an element type: the compiler names the files that must know it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_feature import LIBRARY, TESTS, apply

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("CMakeLists.txt", "CMakePresets.json", "bench", "cmake", "include", "src", "tests",
           "tools")
COMPILER = ["g++", "-std=c++20", "-O1", "-w", "-Isrc", "-Iinclude", "-I."]
# What is forgotten, and the file that no longer compiles.
COMPILED = {
    "field": "src/c_api.cpp", "C field": "src/c_api.cpp", "C size": "src/c_api.cpp",
    "feature": "src/problem/describe.cpp", "parameter": "src/problem/describe.cpp",
    "shortcuts name": "src/problem/describe.cpp", "narrowed name": "src/problem/describe.cpp",
    "record name": "src/cuda/record.cpp", "ranks name": "src/distributed/part.cpp",
    "list": "src/plan/cuda/config_text.cpp",
}
# What tests/semantics/score_test.cpp finds, and what the oracle does. (A score() without the term
# gives the results of a value that is lost.)
IN_THE_SCORE = ("plain", "narrowed", "shortcuts")
IN_RESULTS = ("value", "bit", "C value")

pytestmark = pytest.mark.exhaustive


def run(tree, *command, **environment):
    return subprocess.run(command, cwd=tree, capture_output=True, text=True,
                          env={**os.environ, **environment}, check=False)


def copied(folder):
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def tree(tmp_path):
    return copied(tmp_path)


def test_the_library_changes_in_few_files_and_no_kernel():
    files = {edit.file for edit in LIBRARY.values()}
    assert len(files) <= 11  # five more are Python's and the tool's: docs/extending.md
    assert not any("kernels" in file for file in files)
    assert set(COMPILED) | set(IN_THE_SCORE) | set(IN_RESULTS) == set(LIBRARY) - {
        "score", "check", "print", "record", "ranks"}


@pytest.mark.parametrize("forgotten, file", COMPILED.items())
def test_the_compiler_names(tree, forgotten, file):
    apply(tree, [edit for name, edit in LIBRARY.items() if name != forgotten])
    result = run(tree, *COMPILER, "-DREGARD_VERSION=\"0\"", "-fsyntax-only", file)
    assert result.returncode != 0 and "error" in result.stderr


@pytest.mark.parametrize("forgotten", [*IN_THE_SCORE, None])
def test_the_tests_of_the_score_name(tree, forgotten):
    apply(tree, [edit for name, edit in LIBRARY.items() if name != forgotten])
    build = run(tree, *COMPILER, "tests/semantics/score_test.cpp", "tests/structure/main.cpp", "-o",
                "score_test")
    assert build.returncode == 0, build.stderr
    assert (run(tree, "./score_test").returncode == 0) == (forgotten is None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    tree = copied(tmp_path_factory.mktemp("tree"))
    apply(tree, [*LIBRARY.values(), *TESTS.values()])
    configured = run(tree, "cmake", "--preset", "release", "-DREGARD_BUILD_CLI=OFF",
                     "-DREGARD_BUILD_EXAMPLES=OFF")
    assert configured.returncode == 0, configured.stderr
    return tree


def build_and_test(tree, target, library, *arguments):
    """Builds a library, and runs tests of the made-up feature on it."""
    build = run(tree, "cmake", "--build", "build/release", "--target", target)
    assert build.returncode == 0, build.stdout[-4000:]
    return run(tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto",
               "-k", "shift", *arguments, REGARD_LIBRARY=str(tree / "build/release" / library),
               REGARD_EMULATOR_CACHE=str(tree / "build/emulated_kernels"))


def test_it_works_on_every_backend(built):
    result = build_and_test(built, "regard_shared", "libregard.so", "-m", "not exhaustive",
                            "tests/python/test_pairs.py", "tests/python/test_gradients.py")
    assert result.returncode == 0, result.stdout[-4000:]


def test_it_works_in_every_kernel_family(built):
    result = build_and_test(built, "regard_emulator", "tests/cuda/libregard_emulator.so",
                            "tests/python/test_emulated_sets.py")
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.parametrize("forgotten", IN_RESULTS)
def test_the_oracle_names(built, forgotten):
    edit = LIBRARY[forgotten]
    file = built / edit.file
    whole = file.read_text()
    assert edit.text in whole
    file.write_text(whole.replace(edit.text, "", 1))
    result = build_and_test(built, "regard_shared", "libregard.so", "-m", "not exhaustive", "-x",
                            "tests/python/test_pairs.py")
    file.write_text(whole)
    # pytest's status is 1, or 2 where -x ended several processes.
    assert result.returncode in (1, 2) and "FAILED tests/python/test_pairs.py" in result.stdout


# Those that need NVRTC or a package's headers to compile state kTypeCount as well.
KNOW_TYPES = ("src/c_api.cpp", "src/problem/describe.cpp", "src/plan/cuda/config_text.cpp",
              "src/cuda/tensor_maps.cpp", "src/cpu/peak.cpp", "src/rows/rows.cpp")
STATE_TYPES = ("src/cuda/kernels/element.cuh", "src/cuda/kernels/tile/row_terms.cuh",
               "src/cuda/kernels/tile/score_tile.cuh", "src/plan/cuda/kernel/mma_layout.h",
               "cli/files/npy.cpp", "cli/files/safetensors.cpp", "python/binding/array.cpp")


def test_the_compiler_names_what_knows_every_type(tree):
    header = tree / "include/regard/type.hpp"
    text = header.read_text().replace("boolean, i32 }", "boolean, i32, f8 }")
    header.write_text(text.replace("kTypeCount = 7", "kTypeCount = 8"))
    for file in KNOW_TYPES:
        result = run(tree, *COMPILER[:-4], "-Werror=switch", *COMPILER[-3:], "-DREGARD_VERSION=\"0\"", "-fsyntax-only", file)
        # Where its switches are.
        own = file.replace("rows.cpp", "element.hpp").replace("c_api.cpp", "c_layout.hpp")
        assert any(f"{own}:" in line and "error" in line for line in result.stderr.splitlines()), file
    for file in STATE_TYPES:
        assert "static_assert(kTypeCount == 7" in (ROOT / file).read_text(), file
