"""A watch over what a GPU waits for: copy engines wait for other ranks without end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import ref

_RELAXED = 2  # a mode of CUDA: this thread asks for events while another one may capture a graph


class Watch:
    """Calls `fail`, once, where a GPU is not done with what it began so many seconds ago."""

    def __init__(self, fail: Callable[[], None], seconds: float) -> None:
        self._fail, self.seconds = fail, seconds
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._oldest: Any = None
        self._since = 0.0
        self._has_thread = False

    def add(self, begun: Any, done: Any) -> None:
        """Events of the GPU, which is done in the order in which they are added."""
        with self._lock:
            self._drop_done()
            self._waiting.append((begun, done))
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_keep_watch, args=(ref(self),), name="regard ranks",
                             daemon=True).start()

    def has_failed(self) -> bool:
        """Looks once, and calls `fail` if it is time."""
        with self._lock:
            self._drop_done()
            oldest = self._waiting[0] if self._waiting else None
            if oldest is None or oldest is not self._oldest or not oldest[0].query():
                self._oldest, self._since = oldest, time.monotonic()
                return False
            if time.monotonic() - self._since < self.seconds:
                return False
        self._fail()
        return True

    def is_idle(self) -> bool:
        """Whether the GPU has done all that was added."""
        with self._lock:
            self._drop_done()
            return not self._waiting

    def _drop_done(self) -> None:
        while self._waiting and self._waiting[0][1].query():
            self._waiting.popleft()


def _keep_watch(find: ref[Watch]) -> None:
    """Until the watch has failed, or nobody has it any more. While a GPU waits, the thread has it, and
    with it the memory that others write to."""
    try:
        mode = ctypes.c_int(_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return  # no GPU
    while (watch := find()) is not None:
        seconds = min(5.0, watch.seconds / 4)
        while not watch.is_idle():
            if watch.has_failed():
                return
            time.sleep(seconds)
        del watch
        time.sleep(seconds)
