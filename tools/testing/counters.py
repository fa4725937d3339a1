"""How many tests passed and failed, according to what a stage printed."""

from __future__ import annotations

import re
from collections.abc import Callable

Counter = Callable[[str], tuple[int, int]]


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
    """Of a stage that is one test, which its exit status decides."""
    return 1, 0


def progress(log: str) -> str:
    """How far a running stage is, where it says so: "42 %", or "17 of 90"."""
    shares = re.findall(r"\[ *(\d+)%\]", log)
    if shares:
        return f"{shares[-1]} %"
    counts = re.findall(r"\[?(\d+)(?:/| of )(\d+)\b", log)
    return f"{counts[-1][0]} of {counts[-1][1]}" if counts else ""
