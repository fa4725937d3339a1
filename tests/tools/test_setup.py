"""What is installed from PyPI is pinned with hashes; what is missing is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tools/requirements"


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def pinned(lock: Path) -> dict[str, str]:
    """The version of each package; every one has a hash at least."""
    packages = [text for text in re.split(r"\n(?=\S)", lock.read_text()) if text[0] != "#"]
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), f"{lock.name}: {package}"
    return dict(re.match(r"([\w.-]+)==([\w.+]+)", package).groups() for package in packages)  # type: ignore


@pytest.mark.parametrize("name", sorted(path.stem for path in REQUIREMENTS.glob("*.in")))
def test_a_lock_is_as_new_as_what_it_is_made_from(name: str) -> None:
    wanted = (REQUIREMENTS / f"{name}.in").read_text().split()
    found = pinned(REQUIREMENTS / f"{name}.txt") | pinned(REQUIREMENTS / "torch.txt")
    while "-r" in wanted:
        at = wanted.index("-r")
        wanted[at : at + 2] = (REQUIREMENTS / wanted[at + 1]).read_text().split()
    for requirement in wanted:
        package, _, version = requirement.partition("==")
        assert found[canonical(package)] == version, "python3 tools/lock.py writes the locks"


def test_all_locks_fit_into_one_environment() -> None:
    versions: dict[str, str] = {}
    for lock in REQUIREMENTS.glob("*.txt"):
        if lock.stem != "torch-cpu":
            for package, version in pinned(lock).items():
                assert versions.setdefault(package, version) == version, f"{lock.name}: {package}"


def test_pytorch_has_one_version() -> None:
    cpu = pinned(REQUIREMENTS / "torch-cpu.txt")["torch"]
    assert cpu == pinned(REQUIREMENTS / "torch.txt")["torch"] + "+cpu"


def test_setup_installs_from_locks_alone() -> None:
    script = (ROOT / "tools/setup.sh").read_text()
    for call in re.findall(r"-m pip install(?:[^\n]|\\\n)*", script):
        assert "--require-hashes" in call
    assert "-m pip install" in script


def test_format_names_the_program_that_is_missing(tmp_path: Path) -> None:
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    done = subprocess.run(
        [ROOT / "tools/format.sh", "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "clang-format-16 is missing" in done.stderr
    assert "not formatted" not in done.stdout
