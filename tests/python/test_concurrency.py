"""Calls from many threads, from inside an executor's task, and after a fork."""

import os
import threading

import numpy as np

import cases
import regard_ctypes as regard
from solve import same_bits


def a_case():
    return cases.make(("grouped", "bias_head", "sink", "bottom_right"), "f32", sizes=(120, 250))


def test_calls_from_many_threads(backend):
    want = cases.run(a_case(), backend, threads=2)
    failures = []

    def work():
        try:
            for _ in range(5):
                same_bits(cases.run(a_case(), backend, threads=2), want)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


def test_a_call_from_inside_a_task(backend):
    """An executor whose tasks themselves call the library."""
    case = a_case()
    want = cases.run(case, backend, threads=2)
    inner = []

    def run(self, tasks, task, context):
        for index in range(tasks):
            if not inner:
                inner.append(None)
                inner[0] = cases.run(a_case(), backend, threads=2)
            task(context, index)

    same_bits(cases.run(case, backend, threads=2, executor=regard.EXECUTOR(run)), want)
    same_bits(inner[0], want)


def test_after_a_fork(backend):
    """The child has none of the parent's threads, and must not wait for them."""
    case = a_case()
    want = cases.run(case, backend, threads=2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same_bits(cases.run(case, backend, threads=2), want)
            status = 0
        finally:
            os._exit(status)
    timer = threading.Timer(60, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert status == 0
    same_bits(cases.run(case, backend, threads=2), want)


def test_last_error_is_the_thread_s_own():
    attention = regard.Attention(scale=np.nan)
    assert regard.C.regard_forward(attention, regard.ForwardTensors(), None) != 0
    mine = regard.C.regard_last_error()
    seen = []

    def other():
        seen.append(regard.C.regard_last_error())
        regard.C.regard_dropout_probability(2.0, None)
        seen.append(regard.C.regard_last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == b"" and seen[1] != b"" and regard.C.regard_last_error() == mine
