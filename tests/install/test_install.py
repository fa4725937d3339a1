"""What `cmake --install` leaves starts, is complete, and serves every kind of program."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HERE = ROOT / "tests/install"
BUILD = ROOT / "build/release"


def run(*command: object, **environment: str) -> str:
    """What the command printed; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def configure(source: Path, build: Path, *options: str) -> None:
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options)


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
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def libraries(prefix: Path) -> Path:
    return next(prefix.rglob("libregard.so")).parent


def test_the_tool_starts_where_it_lies(prefix: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    prefix.rename(moved)
    try:
        assert "cpu" in run(moved / "bin/regard", "info", LD_LIBRARY_PATH="")
    finally:
        moved.rename(prefix)


@pytest.mark.parametrize("command, place", [
    ("manual", "man/man1/regard.1"),
    ("completion bash", "bash-completion/completions/regard"),
    ("completion zsh", "zsh/site-functions/_regard"),
    ("completion fish", "fish/vendor_completions.d/regard.fish"),
])  # fmt: skip
def test_the_texts_are_the_tools_own(prefix: Path, command: str, place: str) -> None:
    (text,) = prefix.rglob(place)
    assert text.read_text() == run(prefix / "bin/regard", *command.split())


def test_a_plug_in_exports_nothing_of_the_static_library() -> None:
    names = run("nm", "-D", "--defined-only", BUILD / "tests/libregard_test_plugin.so")
    assert names and not re.search(r"regard_(forward|version)|_ZN6regard", names)


def test_the_licence_is_there(prefix: Path) -> None:
    (licence,) = prefix.rglob("LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()


def test_the_shared_library(libraries: Path) -> None:
    """Its name holds the minor version, and its tables of addresses are read-only."""
    dynamic = run("readelf", "-dW", libraries / "libregard.so")
    assert "Library soname: [libregard.so.0.2]" in dynamic
    assert re.search(r"FLAGS.*NOW", dynamic)
    assert "GNU_RELRO" in run("readelf", "-lW", libraries / "libregard.so")


def test_find_package(prefix: Path, tmp_path: Path) -> None:
    configure(EXAMPLES / "consumer", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    check_cpp(run(tmp_path / "consumer_cpp"))
    check_c(run(tmp_path / "consumer_c"))


def test_find_package_without_cpp(prefix: Path, tmp_path: Path) -> None:
    configure(HERE / "c_only", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DEXAMPLES={EXAMPLES}")
    run("cmake", "--build", tmp_path)
    check_c(run(tmp_path / "with_regard"))
    check_c(run(tmp_path / "with_regard_static"))


@pytest.mark.parametrize("version, accepted", [("0.2", True), ("0.3", False), ("0.1.9", False)])
def test_find_package_keeps_minor_versions_apart(
    prefix: Path, tmp_path: Path, version: str, accepted: bool
) -> None:
    (tmp_path / "ask.cmake").write_text(
        f"set(PACKAGE_FIND_VERSION {version})\n"
        f"string(REPLACE . [[;]] parts {version})\n"
        "list(GET parts 0 PACKAGE_FIND_VERSION_MAJOR)\n"
        "list(GET parts 1 PACKAGE_FIND_VERSION_MINOR)\n"
        f"include({next(prefix.rglob('regard-config-version.cmake'))})\n"
        "message(STATUS compatible=${PACKAGE_VERSION_COMPATIBLE})\n"
    )
    said = run("cmake", "-P", tmp_path / "ask.cmake")
    assert ("compatible=TRUE" in said) == accepted, said


def test_pkg_config(libraries: Path, tmp_path: Path) -> None:
    path = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "regard", **path).split()
    assert run("pkg-config", "--modversion", "regard", **path).strip() == "0.2.0"
    run("g++", "-std=c++20", EXAMPLES / "forward.cpp", *flags, "-o", tmp_path / "cpp")
    check_cpp(run(tmp_path / "cpp", LD_LIBRARY_PATH=str(libraries)))


def test_pkg_config_static_c(libraries: Path, tmp_path: Path) -> None:
    path = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    flags = run("pkg-config", "--static", "--cflags", "--libs", "regard", **path).split()
    flags = ["-l:libregard.a" if flag == "-lregard" else flag for flag in flags]
    run("gcc", EXAMPLES / "forward.c", *flags, "-o", tmp_path / "c")
    check_c(run(tmp_path / "c", LD_LIBRARY_PATH=""))


@pytest.mark.parametrize("folder", ["lib", "lib/x86_64-linux-gnu"])
def test_pkg_config_knows_its_prefix(tmp_path: Path, folder: str) -> None:
    """Also where the libraries' folder has two parts, as Debian's has."""
    options = ("-DREGARD_BUILD_CLI=OFF", f"-DCMAKE_INSTALL_LIBDIR={folder}")
    configure(ROOT, tmp_path / "build", *options, "-DCMAKE_INSTALL_PREFIX=/opt/regard")
    home = tmp_path / "prefix" / folder / "pkgconfig"
    home.mkdir(parents=True)
    (tmp_path / "build/regard.pc").rename(home / "regard.pc")
    said = run("pkg-config", "--variable=includedir", "regard", PKG_CONFIG_PATH=str(home))
    assert Path(said.strip()).resolve() == tmp_path / "prefix/include"


def test_pkg_config_of_folders_elsewhere(tmp_path: Path) -> None:
    elsewhere = {"LIBDIR": "/opt/libraries", "INCLUDEDIR": "/opt/headers"}
    configure(ROOT, tmp_path, "-DREGARD_BUILD_CLI=OFF", "-DCMAKE_INSTALL_PREFIX=/opt/regard",
              *(f"-DCMAKE_INSTALL_{name}={folder}" for name, folder in elsewhere.items()))
    for name, folder in elsewhere.items():
        said = run("pkg-config", f"--variable={name.lower()}", "regard", PKG_CONFIG_PATH=str(tmp_path))
        assert said.strip() == folder


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inside")
    configure(HERE / "inside", folder, f"-DREGARD={ROOT}")
    return folder


def test_as_a_subfolder(inside: Path) -> None:
    """No tool, no rules to install the library, no merged sources, headers that warn nobody."""
    commands = run("ninja", "-C", inside, "-t", "commands", "all")
    assert f"-isystem {ROOT}/include" in commands
    compiled = next(line for line in commands.splitlines() if "-c " in line and "src/api.cpp" in line)
    assert " -w " in compiled  # what the project makes of warnings is about its own sources
    assert "cli/main.cpp" not in commands
    assert "src/api.cpp" in run("ninja", "-C", inside, "-t", "commands", "regard_static")
    assert "libregard" not in (inside / "regard/cmake_install.cmake").read_text()


@pytest.mark.exhaustive
def test_a_whole_project_with_a_subfolder(inside: Path) -> None:
    run("cmake", "--build", inside, "--target", "inside")
    check_cpp(run(inside / "inside"))


def test_big_endian_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DCMAKE_CXX_ABI_COMPILED=TRUE",
         "-DCMAKE_CXX_BYTE_ORDER=BIG_ENDIAN"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and "is big-endian" in done.stderr
