"""docs/cli.md names commands and options that the tool has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "build/release/cli/regard"
PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
CHAPTERS = dict(re.findall(r"^## regard (\w+)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def help_of(*command: str) -> str:
    return subprocess.run([TOOL, *command, "--help"], capture_output=True, text=True,
                          check=True).stdout


def test_every_command_has_a_chapter() -> None:
    commands = re.findall(r"^  (\w+) {2,}", help_of().split("Subcommands:")[1], re.MULTILINE)
    assert set(commands) == set(CHAPTERS)


@pytest.mark.parametrize("command", CHAPTERS)
def test_options_exist(command: str) -> None:
    text = help_of(command)
    for line in re.findall(r"^    (regard .*)$", CHAPTERS[command], re.MULTILINE):
        assert line.startswith(f"regard {command}")
    for option in set(re.findall(r"--[a-z-]+", CHAPTERS[command])):
        assert re.search(rf"{option}\b", text), f"regard {command} has no {option}"


def plans() -> list[str]:
    """The commands of all pages that need neither files nor time."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return sorted({line.split("  #")[0].strip() for page in pages for line in re.findall(
        r"^    (regard (?:info|explain) *.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)})


@pytest.mark.parametrize("command", plans())
def test_plans_run(command: str) -> None:
    done = subprocess.run([TOOL, *command.split()[1:]], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
