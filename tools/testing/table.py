"""The table at the end of a run, and the line that says how many tests passed."""

from __future__ import annotations

from testing.stage import Result

HEAD = ("stage", "passed", "failed", "seconds", "budget", "CPU s")


def table(results: list[Result], slack: float, seconds: float, budget: float) -> str:
    """seconds: of the whole run, whose budget comes last; 0 where it has none."""
    rows = [(r.stage.name, str(r.passed), str(r.failed), f"{r.seconds:.1f}",
             f"{r.stage.budget * slack:.0f}", f"{r.cpu:.1f}", r.note) for r in results]
    passed, failed = totals(results)
    rows.append(("together", str(passed), str(failed), f"{seconds:.1f}",
                 f"{budget:.0f}" if budget else "", f"{sum(r.cpu for r in results):.1f}", ""))
    widths = [max(len(row[i]) for row in [*rows, HEAD]) for i in range(len(HEAD))]

    def line(row: tuple[str, ...]) -> str:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        return f"{row[0]:<{widths[0]}}  {numbers}  {''.join(row[len(HEAD):])}".rstrip()

    return "\n".join(map(line, [HEAD, *rows]))


def totals(results: list[Result]) -> tuple[int, int]:
    return sum(r.passed for r in results), sum(r.failed for r in results)
