"""The documents' programs run, and build against an installed library; that the documents show these
very programs is tested in tests/docs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build/release"


def output_of(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_cpp(text: str) -> None:
    found = re.search(r"sum of dv: ([\d.]+) of (\d+)", text)
    assert found, text
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-5)


def check_c(text: str) -> None:
    assert re.search(r"^regard \d+\.\d+\.\d+: a mean of ones is 1\.00000\d$", text.strip()), text


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation that a consumer may find."""
    folder = tmp_path_factory.mktemp("prefix")
    output_of("cmake", "--install", BUILD, "--prefix", folder)
    return folder


def library_folder(prefix: Path) -> Path:
    return next(prefix.rglob("libregard.so")).parent


def test_cpp_example_runs() -> None:
    check_cpp(output_of(BUILD / "examples/example_forward_cpp"))


def test_c_example_runs() -> None:
    check_c(output_of(BUILD / "examples/example_forward_c"))


def test_guide_runs() -> None:
    """Each of its programs checks what it computed."""
    text = output_of(BUILD / "examples/example_guide_cpp")
    assert text.endswith("the guide's programs are right\n")


def test_gpu_example_runs() -> None:
    text = output_of(BUILD / "examples/example_gpu_cpp")
    assert re.match(r"no GPU to use: |a mean of ones on the GPU is off by \d\.\de-0[6-9]", text), text


def test_find_package(prefix: Path, tmp_path: Path) -> None:
    output_of(
        "cmake",
        "-S",
        EXAMPLES / "consumer",
        "-B",
        tmp_path,
        "-G",
        "Ninja",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_BUILD_TYPE=Release",
    )
    output_of("cmake", "--build", tmp_path)
    check_cpp(output_of(tmp_path / "consumer_cpp"))
    check_c(output_of(tmp_path / "consumer_c"))


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config")
def test_pkg_config(prefix: Path, tmp_path: Path) -> None:
    path = {"PKG_CONFIG_PATH": str(library_folder(prefix) / "pkgconfig")}
    ask = ("pkg-config", "--define-prefix")  # the prefix is where the file was found
    flags = output_of(*ask, "--cflags", "--libs", "regard", **path).split()
    assert output_of(*ask, "--modversion", "regard", **path).strip() == "0.1.0"
    program = tmp_path / "forward"
    output_of("g++", "-std=c++20", EXAMPLES / "forward.cpp", *flags, "-o", program)
    check_cpp(output_of(program, LD_LIBRARY_PATH=str(library_folder(prefix))))


def test_installed_tool(prefix: Path) -> None:
    text = output_of(prefix / "bin/regard", "info", LD_LIBRARY_PATH=str(library_folder(prefix)))
    assert "cpu" in text
