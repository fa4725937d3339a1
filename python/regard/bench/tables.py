"""The lines and tables that the benchmark prints."""

from __future__ import annotations

from typing import Any

from .sides import PEERS

Row = dict[str, Any]
NAMES_OF_PEERS = {name for peers in PEERS.values() for name in peers}


def is_ours(name: str) -> bool:
    return name not in NAMES_OF_PEERS


def rates(row: Row) -> tuple[str, dict[str, float]]:
    """The unit of a row, and its rates by side; for decoding, bytes of keys and values."""
    name, unit = ("tbytes", "B/s") if row["group"] == "decode" else ("tflops", "FLOP/s")
    if "threads" not in row:
        return "T" + unit, row[name]
    return "G" + unit, {side: 1e3 * rate for side, rate in row[name].items()}


def number(value: float | None, width: int) -> str:
    """With about four digits."""
    if value is None:
        return f"{'-':>{width}}"
    digits = 0 if value >= 1000 else 1 if value >= 10 else 3
    return f"{value:>{width}.{digits}f}"


def header(columns: list[str], unit: str) -> str:
    names = " ".join(f"{name[-10:]:>10}" for name in columns)
    title = f"{unit}, and ours over the best peer's"
    return (f"{title}\n{'case':<34} {'pass':<4} {names} {'ours/best':>9} {'ours, ms':>9} "
            f"{'error':>8}")


def line_of(row: Row, columns: list[str]) -> str:
    _, found = rates(row)
    cells = " ".join(number(found.get(name), 10) for name in columns)
    mine = max(filter(is_ours, found), key=lambda name: found[name], default=None)
    best = max((found[name] for name in found if not is_ours(name)), default=None)
    ratio = f"{found[mine] / best:>8.2f}x" if best and mine else f"{'-':>9}"
    error = row["error"].get(mine)
    text = (f"{row['case']:<34} {row['pass']:<4} {cells} {ratio} "
            f"{number(row['ms'][mine] if mine else None, 9)} "
            f"{f'{error:.1e}' if error is not None else '-':>8}")
    if (price := price_of(row)) is not None:
        text += f"  {price:.2f} of plain"
    if row["wrong"]:
        text += "  WRONG: " + ", ".join(row["wrong"])
    for name, why in row["why_not"].items():
        if is_ours(name):
            text += f"\n      {name}: {why}"
    return text


def our_time(row: Row) -> float | None:
    return next((time for name, time in row["ms"].items() if is_ours(name)), None)


def price_of(row: Row) -> float | None:
    """Our time over that of the same problem without the case's features."""
    ours = our_time(row)
    return ours / row["plain_ms"] if ours and "plain_ms" in row else None


def left_out(rows: list[Row]) -> str:
    """Why peers did not run: each reason once, and how often."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        for name, why in row["why_not"].items():
            if not is_ours(name):
                key = name, why.split(":")[0] if why.startswith("unfused") else why
                reasons[key] = reasons.get(key, 0) + 1
    lines = [f"{name:>10} {count:>4} x  {why}" for (name, why), count in sorted(reasons.items())]
    return "\nleft out:\n" + "\n".join(lines) if lines else ""


def feature_table(rows: list[Row]) -> str:
    """The time of each feature, absolute and relative to the plain problem in the same turns."""
    found = {(row["case"], row["pass"]): row for row in rows}
    lines = [f"\n{'feature':<24} {'fwd ms':>9} {'x plain':>8} {'bwd ms':>9} {'x plain':>8}"]
    for name in dict.fromkeys(row["case"] for row in rows):
        cells = ""
        for which in ("fwd", "bwd"):
            row = found.get((name, which), {"ms": {}})
            price = price_of(row)
            cells += f" {number(our_time(row), 9)}"
            cells += f" {price:>7.2f}x" if price else f" {'-':>8}"
        lines.append(f"{name.removeprefix('feature-'):<24}{cells}")
    return "\n".join(lines)


def tuned_table(row: Row) -> str:
    """The sides of one case, the fastest first."""
    unit, found = rates(row)
    order = sorted(row["ms"], key=lambda name: float(row["ms"][name]))
    best = row["ms"][order[0]] if order else 0
    lines = [f"\n{row['case']}-{row['pass']}, {row['type']}, sizes {row['sizes']}",
             f"{'ms':>10} {unit:>8} {'x best':>7} {'error':>8}  backend"]
    for name in order:
        error = row["error"].get(name)
        wrong = [text for text in row["wrong"] if text.startswith(name + " ")]
        lines.append(
            f"{row['ms'][name]:>10.4f} {number(found[name], 8)} {row['ms'][name] / best:>6.3f}x "
            f"{f'{error:.1e}' if error is not None else '-':>8}  {name}"
            + (f"  WRONG: {'; '.join(wrong)}" if wrong else "")
            + (f"\n{'':>38}{row['kernel'][name]}" if row["kernel"].get(name) else ""))
    lines += [f"{'-':>10} {'':>8} {'':>7} {'':>8}  {name}: {why}"
              for name, why in row["why_not"].items()]
    return "\n".join(lines)
