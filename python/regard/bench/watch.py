"""Runs the benchmark in a child process, so that a peer that hangs or crashes loses only its
results.

The child writes each step to a file before it begins. The parent ends a child that stays in one
step for too long, and starts another one, which leaves out that step and continues after the last
result. A signal that ends the parent lets the child write what it has measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HANG_SECONDS = 60  # one side's first call, compilation included, or a case's timing beyond its own
LOST = 9           # a child's exit status: a kernel failed, and this process can do no more
MOST_LOST = 20
INTERRUPTED = 130  # the exit status, as shells give it
STOP_SECONDS = 20  # for a child to end after a signal


class Progress:
    """The child's side: announces each step, and knows which to leave out. path: "" = no parent."""

    def __init__(self, path: str, lost: list[str]) -> None:
        self.path, self.lost = path, set(lost)

    def begin(self, what: str, seconds: float = HANG_SECONDS) -> None:
        """A step begins, and must end, or another one begin, within so many seconds."""
        if self.path:
            Path(self.path).write_text(f"{time.time() + seconds}|{what}")

    def end(self) -> None:
        if self.path:
            Path(self.path).write_text("")

    def give_up(self) -> None:
        """Ends this process if it has a parent; otherwise the caller raises its error."""
        if self.path:
            sys.stdout.flush()
            os._exit(LOST)


def interrupt_once() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the main thread; those that follow do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return

    def interrupt(*_: Any) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        raise KeyboardInterrupt

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, interrupt)


def watch(command: list[str]) -> int:
    """Runs children until all is done, or a signal comes; returns the exit status of the last one."""
    interrupt_once()
    with tempfile.TemporaryDirectory() as folder:
        progress, done = Path(folder) / "progress", Path(folder) / "done"
        done.write_text("[]")
        lost: list[str] = []
        while True:
            progress.write_text("")
            more = ["--progress", str(progress), "--done", str(done)]
            for what in lost:
                more += ["--lost", what]
            status = wait_for(subprocess.Popen(command + more), progress)
            _, _, what = progress.read_text().partition("|")
            if status in (0, 1, 2, INTERRUPTED) or not what or what in lost or len(lost) >= MOST_LOST:
                return status if status >= 0 else 128 - status
            print(f"      lost in {what} (status {status}); going on without it", flush=True)
            lost.append(what)


def wait_for(child: subprocess.Popen[bytes], progress: Path) -> int:
    """The child's exit status; ends the child if a step is overdue, or a signal comes."""
    try:
        while True:
            try:
                return child.wait(1.0)
            except subprocess.TimeoutExpired:
                until = progress.read_text().partition("|")[0]
                if until and time.time() > float(until):
                    child.kill()
    except KeyboardInterrupt:
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        return INTERRUPTED
    except BaseException:
        child.kill()
        raise
