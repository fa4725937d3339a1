"""Runs stages in two lanes: a stage of two lanes alone, two stages of one lane side by side.

A stage over its budget of seconds is ended, with everything that it started, and has failed. What a
stage prints goes to its log; here one line says how each stage ended, and where one failed, the end
of its log follows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from testing.counters import count_one, progress
from testing.stage import LANES, LOGS, ROOT, Result, Stage

TAIL_LINES = 60
POLL_SECONDS = 0.05
NOTICE_SECONDS = 30  # between lines that say what is still running
GRACE_SECONDS = 5  # from SIGTERM to SIGKILL


def show(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


class Running:
    """A stage under way."""

    def __init__(self, stage: Stage, slack: float) -> None:
        self.stage = stage
        self.began = time.monotonic()
        self.limit = stage.budget * slack
        self.over: float | None = None  # when it was told to end
        with stage.log.open("wb") as log:
            self.process = subprocess.Popen(
                stage.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env={**os.environ, **stage.environment},
                start_new_session=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def signal(self, number: int) -> None:
        """To the stage and to all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def keep_budget(self) -> None:
        if self.over is None and self.seconds > self.limit:
            self.over = time.monotonic()
            self.signal(signal.SIGTERM)
        elif self.over is not None and time.monotonic() - self.over > GRACE_SECONDS:
            self.signal(signal.SIGKILL)

    def ended(self) -> Result | None:
        """None while the stage runs."""
        self.keep_budget()
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.over is not None:
            self.signal(signal.SIGKILL)  # what the stage left behind
        return self.result(usage.ru_utime + usage.ru_stime)

    def result(self, cpu: float) -> Result:
        stage, status = self.stage, self.process.returncode
        text = stage.log.read_text(errors="replace")
        passed, failed = stage.counter(text)
        note = ""
        if self.over is not None:
            status, note = 1, f"ended: over its budget of {self.limit:.0f} s; "
        elif status == 0 and passed == 0:
            status, note = 1, "counted no tests; "
        if status and failed == 0:
            passed, failed = (0, 1) if stage.counter is count_one else (passed, 1)
        note += f"see {stage.log.relative_to(ROOT)}" if failed else ""
        return Result(stage, passed, failed, self.seconds, cpu, note)

    def interrupt(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


class Lanes:
    """Runs stages in their order, as far as lanes and what they need allow."""

    def __init__(self, slack: float) -> None:
        self.slack = slack
        self.results: list[Result] = []
        self.running: list[Running] = []
        self.told = time.monotonic()

    def run(self, stages: list[Stage]) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        waiting = list(stages)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            while waiting or self.running:
                self.start(waiting)
                time.sleep(POLL_SECONDS)
                self.collect()
                self.tell()
        finally:
            for running in self.running:
                running.interrupt()
            signal.signal(signal.SIGTERM, before)

    def start(self, waiting: list[Stage]) -> None:
        """Starts what may start now, and takes it out of the list."""
        for stage in list(waiting):
            free = LANES - sum(running.stage.lanes for running in self.running)
            failed = [result.stage.name for result in self.results
                      if result.failed and result.stage.name in stage.needs]
            if failed:
                waiting.remove(stage)
                self.finish(Result(stage, 0, 1, note=f"not run: {failed[0]} failed"))
            elif stage.lanes <= free and not self.is_ahead(stage.needs, waiting):
                waiting.remove(stage)
                self.running.append(Running(stage, self.slack))

    def is_ahead(self, names: tuple[str, ...], waiting: list[Stage]) -> bool:
        """Whether one of them is still to end; one that is not asked for counts as passed."""
        stages = waiting + [running.stage for running in self.running]
        return any(stage.name in names for stage in stages)

    def collect(self) -> None:
        for running in list(self.running):
            result = running.ended()
            if result:
                self.running.remove(running)
                self.finish(result)

    def finish(self, result: Result) -> None:
        self.results.append(result)
        word = "FAILED" if result.failed else "passed"
        clear_line()
        show(f"test: {result.stage.name:<52} {word} {result.seconds:6.1f} s  "
             f"{result.note}".rstrip())
        if result.failed and result.seconds:
            show(result.stage.tail(TAIL_LINES), end="")

    def tell(self) -> None:
        """On a terminal the last line says what is running; elsewhere a line does, now and then."""
        terminal = sys.stdout.isatty()
        pause = 1 if terminal else NOTICE_SECONDS
        if not self.running or time.monotonic() - self.told < pause:
            return
        self.told = time.monotonic()
        parts = []
        for running in self.running:
            far = progress(running.stage.log.read_text(errors="replace"))
            parts.append(f"{running.stage.name} {running.seconds:.0f} s{far and ', ' + far}")
        clear_line()
        show("test: ... " + "; ".join(parts), end="" if terminal else "\n")


def clear_line() -> None:
    if sys.stdout.isatty():
        show("\r\033[K", end="")
