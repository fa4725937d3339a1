"""A stage of the tests: one command, what counts its tests, and the seconds that it may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from testing.counters import Counter, count_one

ROOT = Path(__file__).resolve().parent.parent.parent
LOGS = ROOT / "build/test"
PYTHON = ROOT / "build/venv/bin/python"  # made by stage "set-up"
LINE_WIDTH = 240
LANES = 2  # stages that run side by side


@dataclass
class Stage:
    """budget: seconds on two idle cores, of which the stage uses as many as it has lanes."""

    name: str
    group: str
    command: list[str]
    budget: int
    counter: Counter = count_one
    needs: tuple[str, ...] = ()  # stages that must have passed
    environment: dict[str, str] = field(default_factory=dict)
    lanes: int = LANES

    @property
    def log(self) -> Path:
        return LOGS / (re.sub(r"\W+", "-", self.name).strip("-") + ".log")

    def tail(self, lines: int) -> str:
        """The last lines of its output, indented and at most LINE_WIDTH wide."""
        text = self.log.read_text(errors="replace")
        return "".join(f"    {line[:LINE_WIDTH]}\n" for line in text.splitlines()[-lines:])


@dataclass
class Result:
    """seconds: by the clock; cpu: of all cores together, of the command and all that it started."""

    stage: Stage
    passed: int
    failed: int
    seconds: float = 0.0
    cpu: float = 0.0
    note: str = ""
