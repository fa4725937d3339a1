"""Calls of PyTorch's tensors on the CPU run on PyTorch's own threads, as many as PyTorch uses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from ctypes import c_int32, c_int64, c_void_p

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard import _core  # noqa: E402
from regard.torch import direct, operators, threads  # noqa: E402

pytestmark = pytest.mark.skipif(threads.TORCH_THREADS is None, reason="PyTorch before 2.10")

RANGE = ctypes.CFUNCTYPE(None, c_int64, c_int64, c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(c_int32, c_int64, c_int64, c_int64, c_void_p, c_void_p)
SUCCESS, FAILURE = 0, 1
WAYS = ("direct", "operators", "arrays")


def torch_parallel_for(tasks, body):
    """body(begin, end) on PyTorch's threads."""
    function = ctypes.CDLL(torch._C.__file__).torch_parallel_for
    function.argtypes = [c_int64, c_int64, c_int64, RANGE, c_void_p]
    return function(0, tasks, 1, RANGE(lambda begin, end, _: body(begin, end)), None)


class Watched:
    """Stands between the library and PyTorch's parallel_for."""

    def __init__(self):
        self.calls = []       # tasks of each call
        self.threads = set()  # that ran a task
        self.status = SUCCESS
        self.function = PARALLEL_FOR(self.parallel_for)
        self.torch_threads = _core.TorchThreads(ctypes.cast(self.function, c_void_p).value)

    def parallel_for(self, begin, end, grain, body, context):
        assert (begin, grain) == (0, 1)
        self.calls.append(end)

        def run(first, last):
            self.threads.add(threading.get_native_id())
            RANGE(body)(first, last, context)

        return torch_parallel_for(end, run) if self.status == SUCCESS else FAILURE


@pytest.fixture
def watched(monkeypatch):
    made = Watched()
    monkeypatch.setattr(threads, "TORCH_THREADS", made.torch_threads)
    monkeypatch.setattr(direct, "TORCH_THREADS", made.torch_threads)
    monkeypatch.setattr(direct, "_direct", direct._made())
    yield made
    monkeypatch.undo()
    direct._made()  # the operator's kernels run on PyTorch's threads again


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def tensors():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 100, 16, generator=generator) for _ in range(4)]


def results(way, threads=0):
    """out and the gradients of q, k and v."""
    *qkv, dout = tensors()
    if way == "arrays":
        out = torch.empty_like(dout)
        _, lse = regard.attention(*qkv, out=out, return_lse=True, threads=threads)
        found = regard.attention_backward(dout, *qkv, out, lse, threads=threads)
        return out, found.dq, found.dk, found.dv
    leaves = [x.requires_grad_() for x in qkv]
    with pytest.MonkeyPatch.context() as patch:
        if way == "operators":
            patch.setattr(direct, "_direct", None)
            for operator in (operators.forward, operators.backward):
                patch.setattr(operator, "_op", torch._C._get_operation_overload(operator.name(), "")[0])
        out = rt.attention(*leaves, threads=threads)
        return (out, *torch.autograd.grad(out, leaves, dout))


def same_bits(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_tasks_run_on_pytorchs_threads(way, watched, three_threads):
    same_bits(results(way), results(way, threads=1))
    own = set()
    torch_parallel_for(3, lambda *_: own.add(threading.get_native_id()))
    assert watched.threads == own and len(own) == 3
    assert watched.calls.count(3) >= 2  # forward, and backward on the thread of autograd


@pytest.mark.parametrize("way", WAYS)
def test_number_of_threads(way, watched):
    before, wanted = torch.get_num_threads(), results(way, threads=1)
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            watched.calls.clear()
            same_bits(results(way), wanted)
            assert max(watched.calls, default=1) == number
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
def test_a_given_number_is_of_the_librarys_threads(way, watched, three_threads):
    same_bits(results(way, threads=2), results(way, threads=1))
    assert watched.calls == []


def test_within_a_parallel_region(watched, three_threads):
    wanted, found = results("direct", threads=1), []
    assert torch_parallel_for(3, lambda *_: found.append(results("direct"))) == SUCCESS
    assert len(found) == 3
    for one in found:
        same_bits(one, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_is_an_error(way, watched, three_threads):
    watched.status = FAILURE
    with pytest.raises(regard.Error, match="executor = 3: of 3 tasks were not called"):
        results(way)


@pytest.mark.parametrize("way", WAYS)
def test_pytorch_without_the_function(way, monkeypatch, three_threads):
    monkeypatch.setattr(threads, "TORCH_THREADS", None)
    monkeypatch.setattr(direct, "TORCH_THREADS", None)
    monkeypatch.setattr(direct, "_direct", direct._made())
    same_bits(results(way), results(way, threads=1))


FORKED = """
import os, signal, torch, regard.torch as rt
torch.set_num_threads(3)
q = torch.ones(2, 4, 100, 16)
wanted = rt.attention(q, q, q)  # OpenMP has threads now
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(not torch.equal(rt.attention(q, q, q), wanted))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_in_a_forked_process():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
