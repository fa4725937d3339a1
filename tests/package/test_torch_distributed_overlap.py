"""What regard.torch.distributed computes while keys arrive, and copies in place of collectives."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_compiling as compiling  # noqa: E402
from distributed_cases import (FEATURES, WHOLE, Case, attend, error, joined,  # noqa: E402
                               split_scheme, takes, whole_results)
from distributed_files import Steps, attend_by_rows, results_by_copies  # noqa: E402
from distributed_pool import Pool, Raised  # noqa: E402

from regard.torch import distributed as rd  # noqa: E402
from regard.torch.distributed import (costs, documents, head_groups, peer_layout, peers,  # noqa: E402
                                       shared_memory, symmetric, watch, whole_rows)
from regard.torch.distributed.call import Call, Pair, Wanted  # noqa: E402

APART = Case("apart", 1152, pairs={"cu_seqlens": [0, 384, 768, 1152], "causal": True})
BY_AREA = Case("by_area", 1152, pairs={"cu_seqlens": [0, 60, 570, 700, 1000], "causal": True},
               features=("sink",))
CASES = {str(case): case for case in (*FEATURES, *WHOLE, APART, BY_AREA)}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(3)
    yield found
    found.close()


@lru_cache(maxsize=None)
def truth_of(name: str) -> dict[str, torch.Tensor]:
    return whole_results(CASES[name], CASES[name].tensors())


def compare(found: dict[str, torch.Tensor], case: Case) -> None:
    truth = truth_of(str(case))
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        assert error(found[name], x) <= (1e-6 if name == "dsink" else 1e-12), name


def results(pool: Pool, case: Case, scheme: str, world: int) -> dict[str, torch.Tensor]:
    plain, more = split_scheme(scheme)
    parts = pool.run(world, attend, case, plain, more)
    assert not [part for part in parts if isinstance(part, Raised)], parts
    return joined(case, case.plan(world, plain), parts)


def test_nothing_to_copy(pool: Pool) -> None:
    """Documents that end where ranks do. It is the first test, so that these are its group's first
    copies."""
    for scheme in ("halo", "halo by heads", "halo by documents"):
        assert max(APART.plan(3, "halo").needed.moved[0]) == 0
        compare(results_by_copies(pool, APART, scheme, 3), APART)


@pytest.mark.parametrize("scheme", ["gather", "halo", "gather by heads", "halo by heads"])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_by_copies(pool: Pool, case: Case, scheme: str) -> None:
    """Where ranks reach each other's memory."""
    if takes(case, scheme):
        compare(results_by_copies(pool, case, scheme, 3), case)


@pytest.mark.parametrize("scheme", ["gather", "halo by heads", "halo by documents"])
def test_many_runs_of_rows(pool: Pool, scheme: str) -> None:
    """Rows are copied and added by their indices then."""
    case = CASES["whole_causal" if scheme.endswith("documents") else "near_dropout"]
    compare(results_by_copies(pool, case, scheme, 3, attend_by_rows), case)


@pytest.mark.parametrize("by_copies", [False, True])
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole_documents(pool: Pool, case: Case, by_copies: bool) -> None:
    """Rows whose documents are on one rank are calls of their own."""
    is_dealt = str(case) == "whole_dealt"
    scheme = "gather by documents" if is_dealt else "halo by documents"
    plan = case.plan(3, scheme.split()[0])
    runs = [len(whole_rows.runs(plan, rank)) for rank in range(3)]
    assert plan.has_whole_documents and (max(runs) > 1) == is_dealt, runs
    assert max(plan.needed.moved[0]) > 0
    compare((results_by_copies if by_copies else results)(pool, case, scheme, 3), case)


@pytest.mark.parametrize("how", ["", " by heads", " in stages", " by documents"])
@pytest.mark.parametrize("by_copies", [False, True])
def test_contiguous_rows_by_area(pool: Pool, by_copies: bool, how: str) -> None:
    """Ranks have different numbers of rows."""
    case = CASES["by_area"]
    plan = case.plan(3, "halo/by_area")
    assert [plan.rows(rank) for rank in range(3)] == [384, 256, 512]
    if not (by_copies and how == " in stages"):  # which moves keys by collectives alone
        compare((results_by_copies if by_copies else results)(pool, case, "halo/by_area" + how, 3), case)


@pytest.mark.parametrize("name,scheme,overlap", [
    ("whole_causal", "halo", False), ("whole_causal", "halo", "documents"),
    ("full", "gather", False), ("full", "gather", "heads")])
def test_a_plan_that_compiled_programs_use_first(pool: Pool, name: str, scheme: str, overlap: Any
                                                 ) -> None:
    found = pool.run(2, compiling.compiled_first, CASES[name], scheme, {"overlap": overlap},
                     seconds=120)
    assert all(isinstance(one, float) and one < 1e-12 for one in found), found


# ------------------------------------------------------------------------------------------ choices

def test_overlap_that_cannot_be(pool: Pool) -> None:
    """What is asked for is not left undone."""
    slopes = next(case for case in FEATURES if str(case) == "far_alibi")
    for case, scheme, overlap, kind in (
            (slopes, "gather", "keys", "Unsupported"), (FEATURES[0], "ring", "heads", "Unsupported"),
            (FEATURES[0], "ulysses", "keys", "Unsupported"),
            (Case("one_head", 300, heads=(8, 1)), "gather", "heads", "Unsupported"),
            (FEATURES[0], "gather", "documents", "Unsupported"),
            (FEATURES[0], "gather", "rows", "InvalidArgument")):
        for one in pool.run(2, attend, case, scheme, {"overlap": overlap}):
            assert isinstance(one, Raised)
            assert (one.kind, one.argument) == (kind, "overlap"), one


@pytest.mark.parametrize("rows", [21376, 300])
def test_groups_of_heads_are_those_of_all_ranks(rows: int) -> None:
    """Also where ranks have other numbers of rows."""
    for scheme, heads in (("gather", (16, 16)), ("gather", (32, 8)), ("halo", (6, 2))):
        plan = rd.plan(rows, world_size=2, heads_q=heads[0], heads_kv=heads[1], head_size=8,
                       causal=True, window=(50, None), scheme=scheme)
        call: Any = SimpleNamespace(plan=plan, overlaps="heads", by_position=False, options={})
        found = []
        for rank in range(2):
            q, k = (torch.empty(1, n, plan.rows(rank), 8, device="meta") for n in heads)
            tensors: Any = SimpleNamespace(q=q, k=k)
            found.append([head_groups.forward(call, tensors),
                          head_groups.backward(call, tensors, wants_bias=False)])
            assert len(found[-1][0]) == 2
        assert found[0] == found[1] and plan.rows(0) != plan.rows(1)


def test_a_plan_says_what_is_done_by_default() -> None:
    slow = rd.Bandwidth(all_gather=1e9, all_to_all=1e9)
    sizes: dict[str, Any] = {"world_size": 2, "head_size": 128, "heads_q": 32}
    cuts = [0, 6000, 12000, 20000, 26000, 32768]
    said = {}
    for name, more in {
            "heads": {"length": 32768, "heads_kv": 8, "causal": True, "bandwidth": slow},
            "keys": {"length": 32768, "heads_kv": 1, "causal": True, "bandwidth": slow},
            "documents": {"length": 32768, "heads_kv": 8, "cu_seqlens": cuts, "scheme": "halo"},
            "": {"length": 2048, "heads_kv": 8, "cu_seqlens": [0, 1000, 2048], "scheme": "halo"}
    }.items():
        plan = rd.plan(**{"scheme": "gather"} | sizes | more)
        assert costs.overlap_on_gpus(plan) == name
        said[name] = [line for line in plan.explain().splitlines() if "on GPUs" in line]
    assert [len(lines) for lines in said.values()] == [1, 1, 1, 0]
    assert len({*map(str, said.values())}) == 4
    empty = rd.plan(65536, cu_seqlens=[0, 48000], **sizes, scheme="halo")
    assert not empty.has_whole_documents  # rows that see nothing are no work


# ----------------------------------------------------------------------------------------- lifetimes

class OneRank:
    """In place of SharedMemory, of rank 0 of two whose other one does nothing."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(1 << 20, dtype=torch.uint8)

    def begin(self, keys: int, sums: int) -> None:
        assert keys + sums < 1 << 20

    def sums(self, begin: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[begin:begin + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    keys, steps = sums, Steps

    def kept(self, owner: Any, key: Any, make: Any) -> Any:
        return make()

    def __getattr__(self, name: str) -> Any:
        assert name in ("wait_for", "run", "run_aside", "lanes"), name
        return lambda *arguments: nullcontext() if name == "lanes" else None


def test_sums_live_until_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of them may still be queued, on another stream than the one that would reuse them."""
    monkeypatch.setattr(peers, "memory_of", lambda ranks, like: OneRank())
    plan = rd.plan(256, world_size=2, heads_q=2, head_size=8, causal=True, scheme="gather")
    k = torch.zeros(1, 2, 128, 8)
    call = Call(plan, SimpleNamespace(rank=0), {}, False, {}, None, False, True, "")
    part: Any = SimpleNamespace(k=k, v=k)
    exchange = peers.exchange(call, part, [part], has_sums=True)
    assert exchange is not None and exchange.begin_keys(0)().k.shape == (1, 2, 256, 8)
    sums = exchange.empty_sums(0)
    alive = weakref.ref(sums.k)
    wait = exchange.begin_sums(0, sums, lambda came: None)
    del sums
    assert alive() is not None
    wait()
    assert alive() is None


def test_copies_of_keys_live_until_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where own keys are placed before."""
    monkeypatch.setattr(peers, "memory_of", lambda ranks, like: OneRank())
    plan = rd.plan(256, world_size=2, heads_q=2, head_size=8, causal=True, scheme="gather")
    call = Call(plan, SimpleNamespace(rank=0), {}, False, {}, None, False, True, "")
    k = torch.zeros(1, 128, 2, 8).transpose(1, 2)
    part: Any = SimpleNamespace(k=k, v=k)
    copies: list[Any] = []
    with_dense_rows = peers._with_dense_rows

    def copied(x: torch.Tensor) -> torch.Tensor:
        found = with_dense_rows(x)
        copies.append(weakref.ref(found))
        return found

    monkeypatch.setattr(peers, "_with_dense_rows", copied)
    exchange = peers.exchange(call, part, [part], has_sums=False)
    assert exchange is not None
    came = exchange.begin_keys(0)
    with exchange.side_by_side(2):
        assert len(copies) == 2 and all(copy() is not None for copy in copies)
        came()
        assert all(copy() is None for copy in copies)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_comes_first(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls are one after the other, sums travel next to whole documents."""
    plan = rd.plan(600, world_size=2, heads_q=2, head_size=8, causal=True,
                   cu_seqlens=[0, 100, 420, 600], scheme="halo")
    call = Call(plan, SimpleNamespace(rank=1), {}, False, {}, None, False, True, "documents")
    rows = torch.zeros(1, 2, 344, 8)
    keys = Pair(*(torch.zeros(1, 2, 600, 8) for _ in range(2)))
    order: list[Any] = []
    exchange = SimpleNamespace(
        at_once=at_once, begin_keys=lambda part: lambda: keys, empty_sums=lambda part: keys,
        side_by_side=lambda count: nullcontext(lambda number: nullcontext()),
        begin_sums=lambda *_: order.append("sums") or (lambda: order.append("waits")))
    monkeypatch.setattr(documents.gather, "exchange", lambda *_: exchange)
    monkeypatch.setattr(documents.local_pass, "backward", lambda call, tensors, *_: order.append(
        "shared" if tensors.k is keys.k else "whole"))
    kept = (rows, rows[..., 0], rows, rows, rows, *5 * [None])
    documents.backward(call, kept, rows, None, Wanted(True, True, True, False, False))
    assert order == (["whole", "shared", "sums", "waits"] if at_once else
                     ["shared", "sums", "whole", "waits"])


# ------------------------------------------------------------------------------------- shared memory

def test_rows_that_copy_engines_take() -> None:
    x = torch.arange(2 * 6 * 5 * 8).view(2, 6, 5, 8).float()
    for one, is_dense in ((x, True), (x[:, 2:4], True), (x[:, :, 1:3], True), (x[..., :4], False),
                          (x[:, :1].expand(2, 6, 5, 8), False), (x.transpose(1, 2), False),
                          (x[:1].expand(2, 6, 5, 8), True)):
        found = peers._with_dense_rows(one)
        assert (found is one) == is_dense and torch.equal(found, one)
        assert found.stride()[2:] == (one.shape[-1], 1)


def test_a_rank_writes_only_where_others_have_told_it_to() -> None:
    """The steps of a pass of two parts: words of arrival, the first part's copies, its words, ..."""
    plan = rd.plan(512, world_size=4, heads_q=4, head_size=8, causal=True, scheme="gather")
    k = torch.zeros(1, 2, 128, 8)
    call = Call(plan, SimpleNamespace(rank=1), {}, False, {}, None, False, True, "heads")
    part: Any = SimpleNamespace(k=k, v=k)
    layout = peer_layout.Layout(call, [part, part])
    first, second, returned = Steps(), Steps(), Steps()
    layout.give_keys(first, 0, k, k)
    layout.give_keys(second, 1, k, k)
    layout.return_sums(returned, 1, k, k)

    def kinds(steps: Steps) -> list[str]:
        return [step[0] if isinstance(step[0], str) else "copy" for step in steps.steps]

    words, copies = ["write"] * 3 + ["wait"] * 3, ["copy"] * (len(second.steps) - 6)
    assert copies and kinds(first) == words + copies + words
    assert kinds(second) == copies + words and kinds(returned)[-6:] == words
    places = [[step[1] for step in steps.steps if isinstance(step[0], str)]
              for steps in (first, second)]
    assert not {*places[0][:6]} & {*places[0][6:]} and places[0][6:] == places[1]


def test_views_are_kept_until_there_is_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(size: int) -> list[torch.Tensor]:
        made.append(size)
        with torch.inference_mode(False):
            return [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    owner = Moment(True)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(shared_memory.torch, "cuda", SimpleNamespace(
        Stream=lambda *_, **__: stream, current_stream=lambda _: stream, synchronize=lambda _: None))
    memory = shared_memory.SharedMemory(1, torch.device("cpu"), make, lambda: None, 1)

    def view() -> torch.Tensor:
        return memory.kept(owner, "keys", lambda: memory.keys(16, (2, 3), torch.float32))

    with torch.inference_mode():
        memory.begin(100, 0)
        first = view()
    assert not first.is_inference() and view() is first and first.shape == (2, 3)
    memory.begin(50, 0)
    assert view() is first and len(made) == 1
    memory.begin(100, 5 << 20)
    assert view() is not first and len(made) == 2 and made[1] > (5 << 20) + 100


def test_lanes_begin_and_end_with_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a call raises. Earlier calls come first: lower numbers are higher priorities."""
    order: list[tuple[Any, ...]] = []

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.priority = priority

        def record_event(self, event: Any = None) -> Any:
            return self

        def wait_event(self, event: Any) -> None:
            order.append((self, "waits for", event))

    main, used = Stream(), []
    monkeypatch.setattr(shared_memory.torch, "cuda", SimpleNamespace(
        Stream=Stream, Event=object, current_stream=lambda _: main, stream=lambda stream: nullcontext(
            used.append(stream)), synchronize=lambda _: None))
    memory = shared_memory.SharedMemory(
        0, torch.device("cpu"), lambda size: [torch.zeros(size, dtype=torch.uint8)], lambda: None, 1)
    memory.begin(1, 0)
    with pytest.raises(ValueError), memory.lanes(3) as lane:
        for number in range(3):
            with lane(number):
                assert memory._now is (used[-1] if number < 2 else main)
            assert memory._now is main
        with lane(0):
            raise ValueError
    first, second, again = used
    assert again is first and len({first, second, main}) == 3
    assert first.priority < second.priority < 0
    assert order == [(second, "waits for", main), (first, "waits for", main),
                     (main, "waits for", second), (main, "waits for", first)]
    order.clear()
    with memory.lanes(1) as lane, lane(0):
        assert memory._now is main
    assert not order


REFUSALS = {"": True, "host": False, "same GPU": False, "same index": False, "atomics": False,
            "rendezvous": False, "switch": False, "gloo": False, "backend": False, "hidden": False,
            "memory": False, "words": False, "other": False}


@pytest.mark.parametrize("wrong", REFUSALS)
def test_where_memory_is_shared(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, each with a GPU of its own on one machine, and what may be otherwise."""
    import hashlib
    import socket

    names = {0: "first", 1: "second"}
    other = b"".join(hashlib.sha256(text.encode()).digest() for text in (
        "elsewhere" if wrong == "host" else socket.gethostname(),
        {"hidden": "unseen", "same GPU": names[0]}.get(wrong, names[1])))
    other += (0 if wrong == "same index" else 1).to_bytes(2, "little")
    handle = SimpleNamespace(rank=0, world_size=2, barrier=lambda *_: None, put_signal=lambda *_: None,
                             wait_signal=lambda *_: None,
                             get_buffer=lambda *_: None)

    def run(memory: Any, words: Any) -> bool:
        if wrong == "words":
            raise RuntimeError
        return True

    def told(said: bytes, device: Any) -> list[bytes]:
        return [said, other if len(said) == len(other) else bytes([wrong != "other"])]

    def empty(*arguments: Any, **more: Any) -> Any:
        if wrong == "memory":
            raise RuntimeError
        return SimpleNamespace(zero_=lambda: None)

    def rendezvous(*arguments: Any) -> Any:
        if wrong == "rendezvous":
            raise RuntimeError
        return handle

    def attribute(found: Any, *arguments: Any) -> int:
        found._obj.value = int(wrong != "atomics")
        return 0

    cuda, memory = symmetric.torch.cuda, SimpleNamespace(
        get_backend=lambda device: "NVSHMEM" if wrong == "backend" else "CUDA")
    monkeypatch.setattr(symmetric, "_run", run)
    monkeypatch.setattr(symmetric, "symmetric", SimpleNamespace(
        empty=empty, rendezvous=rendezvous, _SymmetricMemory=memory))
    monkeypatch.setattr(symmetric.dist, "get_backend_config", lambda group: (
        "cpu:gloo" if wrong == "gloo" else "cpu:gloo,cuda:nccl"))
    monkeypatch.setattr(symmetric.ctypes, "CDLL", lambda name: SimpleNamespace(
        cuDeviceGetP2PAttribute=attribute))
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=names[n]))
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(cuda, "synchronize", lambda *_: None)
    monkeypatch.setenv("REGARD_COPIES_BETWEEN_GPUS", "0" if wrong == "switch" else "1")
    ranks = SimpleNamespace(rank=0, size=2, group=None, told=told, process_group=torch.Generator())
    like = SimpleNamespace(device=torch.device("cuda", 0))
    found = symmetric._is_there(ranks, like)  # type: ignore[arg-type]
    assert found == REFUSALS[wrong]


class Moment:
    """In place of an event of a GPU."""

    def __init__(self, is_past: bool) -> None:
        self.is_past = is_past

    def query(self) -> bool:
        return self.is_past


def test_a_watch_fails_once_something_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, now = [], [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    one = watch.Watch(lambda: failures.append(now[0]), 10)
    calls = [(Moment(False), Moment(False)) for _ in range(2)]
    for begun, done in calls:
        one.add(begun, done)

    def at(seconds: float) -> bool:
        now[0] = seconds
        return one.has_failed()

    assert not at(0) and not at(50)  # not begun: other work of the GPU is before it
    calls[0][0].is_past = True
    assert not at(51) and not at(59)
    calls[0][1].is_past = calls[1][0].is_past = True
    assert not at(70) and not at(79)  # the second one has just begun
    assert at(80) and failures == [80]
    calls[1][1].is_past = True
    assert not at(200) and failures == [80]


def test_a_watch_is_there_while_something_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nobody else has it."""
    monkeypatch.setattr(watch.ctypes, "CDLL", lambda name: SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: 0))
    begun, done = Moment(True), Moment(False)
    one = watch.Watch(lambda: None, 0.04)
    one.seconds = 1e6
    monkeypatch.setattr(watch.time, "sleep", lambda seconds, wait=threading.Event().wait: wait(0.01))
    one.add(begun, done)
    alive = weakref.ref(one)
    del one
    threading.Event().wait(0.1)
    assert alive() is not None
    done.is_past = True
    for _ in range(500):
        if alive() is None:
            break
        threading.Event().wait(0.01)
    assert alive() is None
