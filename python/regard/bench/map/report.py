"""What a map says: the best peer's time over ours, in four columns, and where it is smallest."""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]  # of a problem and pass
COLUMNS = [(which, state) for which in ("fwd", "bwd") for state in ("queued", "idle")]
WORST = 10


def ratio(row: Row, state: str) -> float | None:
    """The best peer's time over ours; None where either did not run."""
    times = row[state]
    best = min((us for name, us in times.items() if name != row["ours"]), default=None)
    return best / times[row["ours"]] if best and row["ours"] in times else None


def line_of(rows: list[Row]) -> str:
    """One problem, in the order of COLUMNS."""
    by_pass = {row["pass"]: row for row in rows}
    cells = []
    for which, state in COLUMNS:
        found = ratio(by_pass[which], state) if which in by_pass else None
        cells.append("-" if found is None else f"{found:.2f}")
    text = f"{rows[0]['case']:<58}" + "".join(f"{cell:>8}" for cell in cells)
    for row in rows:
        if row["wrong"]:
            text += f"\n      {row['pass']} WRONG: " + ", ".join(row["wrong"])
        if why := row["why_not"].get(row["ours"]):
            text += f"\n      {row['pass']} FAILED: {why}"
    return text


def header() -> str:
    return (f"{'the best peer over ours':<58}"
            + "".join(f"{f'{which} {state[0]}':>8}" for which, state in COLUMNS)
            + "   (q: queued, i: from an idle device)")


def summary(rows: list[Row]) -> str:
    """The table: a line for each column."""
    lines = [f"{'':<12}{'problems':>9}{'geomean':>9}{'>= 1.0':>8}{'worst tenth':>13}{'worst':>8}"]
    for which, state in COLUMNS:
        found = sorted(value for row in rows if row["pass"] == which
                       and (value := ratio(row, state)) is not None)
        name = f"{which} {state}"
        if not found:
            lines.append(f"{name:<12}{0:>9}")
            continue
        mean = math.exp(sum(map(math.log, found)) / len(found))
        share = sum(value >= 1 for value in found) / len(found)
        tenth = found[(len(found) - 1) // 10]  # a tenth of the problems is at or below it
        lines.append(f"{name:<12}{len(found):>9}{mean:>9.2f}{share:>8.0%}{tenth:>13.2f}"
                     f"{found[0]:>8.2f}")
    return "\n".join(lines)


def worst(rows: list[Row]) -> str:
    """The problems with the smallest ratios: the column, the kernel, and a command that repeats it."""
    found: dict[str, tuple[float, str, Row]] = {}
    for row in rows:
        for state in ("queued", "idle"):
            value = ratio(row, state)
            if value is not None and value < found.get(row["case"], (math.inf,))[0]:
                found[row["case"]] = value, state, row
    lines = []
    for value, state, row in sorted(found.values(), key=lambda one: one[0])[:WORST]:
        times = row[state]
        best = min((name for name in times if name != row["ours"]), key=lambda name: times[name])
        lines.append(f"{value:>6.2f}  {row['pass']} {state}, {times[row['ours']]:.1f} us, {best} "
                     f"{times[best]:.1f} us: {row['case']}\n        {row['kernel']}\n"
                     f"        {row['repeat']}")
    return "\n".join(lines)


def left_out(rows: list[Row]) -> str:
    """Why peers did not run, and how often."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for name, why in row["why_not"].items():
            key = name, why.split(":")[0] if why.startswith("another result") else why[:100]
            counts[key] = counts.get(key, 0) + 1
    return "\n".join(f"{name:>10} {count:>4} x  {why}" for (name, why), count in counts.items())
