"""What must change no bit: the number of threads, the executor, the rest of the batch."""

import ctypes

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from solve import TYPES, problem, same_bits, solve

SETS = [("plain",), ("grouped", "bias_head", "sink"), ("bottom_right", "dropout", "bias_keys"),
        ("packed", "bias_batch", "sink"), ("window", "seqused", "bias_one", "mask")]


@pytest.mark.parametrize("features", SETS, ids="+".join)
@pytest.mark.parametrize("type", TYPES)
def test_thread_count(type, features, backend):
    case = cases.make(features, type, sizes=(90, 210), dim=24)
    want = cases.run(case, backend, threads=1)
    for threads in (2, 3, 5):
        same_bits(cases.run(case, backend, threads=threads), want)


@pytest.mark.parametrize("type", TYPES)
def test_thread_count_with_one_head_of_a_long_sequence(type, kernel):
    p = problem(1, 1, 1, 700, 900, 16, type=type)
    bias = np.random.default_rng(1).standard_normal((1, 1, 1, 900)).astype(np.float32)
    want = solve(**p, backend=kernel, threads=1, causal="bottom_right", bias=bias)
    for threads in (2, 5):
        same_bits(solve(**p, backend=kernel, threads=threads, causal="bottom_right", bias=bias),
                  want)


def test_executor_in_any_order(backend):
    case = cases.make(("grouped", "bias_head", "sink", "bottom_right"), "f32", sizes=(90, 210))
    want = cases.run(case, backend, threads=3)

    def backwards(self, tasks, task, context):
        for index in reversed(range(tasks)):
            task(context, index)

    def forwards(self, tasks, task, context):
        for index in range(tasks):
            task(context, index)

    for order in (backwards, forwards):
        executor = regard.EXECUTOR(order)
        same_bits(cases.run(case, backend, threads=3, executor=executor), want)


@pytest.mark.parametrize("type", TYPES)
def test_own_workspace(type, backend):
    """With exactly the workspace that was asked for, whatever it holds, the bits are the same."""
    case = cases.make(("grouped", "bias_head", "sink", "bottom_right"), type, sizes=(90, 210))
    want = cases.run(case, backend, threads=2)
    attention = case.attention()
    size = max(regard.workspace(attention, which, backend=backend, threads=2)
               for which in ("forward", "backward"))
    memory = np.full(size + 64, 0xA5, np.uint8)
    start = -memory.ctypes.data % 64
    got = cases.run(case, backend, threads=2, workspace=ctypes.c_void_p(memory.ctypes.data + start),
                    workspace_size=size)
    same_bits(got, want)
    assert np.all(memory[:start] == 0xA5) and np.all(memory[start + size :] == 0xA5)
    for which in ("forward", "backward"):
        least = regard.workspace(attention, which, backend=backend, threads=2)
        if least == 0:
            continue
        with pytest.raises(regard.RegardError) as caught:
            cases.run(case, backend, threads=2, workspace_size=least - 1,
                      workspace=ctypes.c_void_p(memory.ctypes.data + start))
        assert caught.value.argument.startswith("workspace")
        break


@pytest.mark.parametrize("type", TYPES)
def test_the_rest_of_the_batch(type, backend):
    """A sequence alone, in a batch, and packed among others, in tiles of one size."""
    if backend == "cuda:wgmma":
        backend += "@stages=2"  # else packed sequences may have other tiles than a batch
    rows, columns, dim = 45, 130, 24
    p = problem(3, 4, 2, rows, columns, dim, type=type)
    batch = solve(**p, backend=backend, causal="bottom_right")
    for b in range(3):
        one = {name: x[b : b + 1].copy() for name, x in p.items()}
        alone = solve(**one, backend=backend, causal="bottom_right")
        same_bits(alone, {name: x[b : b + 1] for name, x in batch.items()})

    def packed(x):
        return np.concatenate(list(x.swapaxes(1, 2)))

    many = solve(**{name: packed(x) for name, x in p.items()}, backend=backend,
                 causal="bottom_right", max_seqlen_q=rows, max_seqlen_k=columns,
                 cu_seqlens_q=np.arange(4, dtype=np.int32) * rows,
                 cu_seqlens_k=np.arange(4, dtype=np.int32) * columns)
    same_bits(many, {name: packed(x) for name, x in batch.items() if name != "lse"})
    assert np.array_equal(many["lse"], np.concatenate(list(batch["lse"]), axis=1))


@pytest.mark.parametrize("type", TYPES)
def test_heads_of_others(type, backend):
    """A kv head's results do not depend on how many other kv heads there are."""
    p = problem(2, 6, 3, 33, 70, 16, type=type)
    whole = solve(**p, backend=backend)
    for g in range(3):
        heads = {name: np.s_[:, 2 * g : 2 * g + 2] for name in ("q", "dout", "out", "dq", "lse")}
        some = {name: x[heads.get(name, np.s_[:, g : g + 1])].copy() for name, x in p.items()}
        same_bits(solve(**some, backend=backend),
                  {name: x[heads.get(name, np.s_[:, g : g + 1])] for name, x in whole.items()})


@pytest.mark.parametrize("type", TYPES)
def test_lengths_around_a_sequence(type, backend):
    """Padding by seqused, and longer neighbours in a pack, change no bit of a sequence."""
    rows, columns = 37, 91
    p = problem(1, 2, 1, rows, columns, 24, type=type)
    want = solve(**p, backend=backend, causal="bottom_right")
    padded = {name: np.concatenate([x, x], axis=2) for name, x in p.items()}
    got = solve(**padded, backend=backend, causal="bottom_right",
                seqused_q=np.array([rows], np.int32), seqused_k=np.array([columns], np.int32))
    ends = {"k": columns, "v": columns, "dk": columns, "dv": columns}
    same_bits({name: x[:, :, : ends.get(name, rows)] for name, x in got.items()}, want)
    other = problem(1, 2, 1, 200, 300, 24, type=type, seed=7)
    mixed = {name: np.concatenate([other[name][0].swapaxes(0, 1), x[0].swapaxes(0, 1)])
             for name, x in p.items()}
    got = solve(**mixed, backend=backend, causal="bottom_right", max_seqlen_q=200,
                max_seqlen_k=300, cu_seqlens_q=np.array([0, 200, 200 + rows], np.int32),
                cu_seqlens_k=np.array([0, 300, 300 + columns], np.int32))
    begins = {"dk": 300, "dv": 300}
    same_bits({name: x[begins.get(name, 200) :].swapaxes(0, 1)[None] for name, x in got.items()
               if name != "lse"} | {"lse": got["lse"][None, :, 200:]}, want)
