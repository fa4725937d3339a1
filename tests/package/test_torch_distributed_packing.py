"""regard.torch.distributed.packing: which calls see packed sequences, and that these show what spans do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import regard  # noqa: E402
from regard.torch import attention  # noqa: E402
from regard.torch import distributed as rd  # noqa: E402
from regard.torch.distributed import documents, packing  # noqa: E402
from regard.torch.distributed.call import Call  # noqa: E402
from regard.torch.distributed.local_pass import visibility_options  # noqa: E402


def visible_by_cuts(cuts: packing.Cuts, rows: int, keys: int) -> torch.Tensor:
    """(rows, keys) bool."""
    found = torch.zeros(rows, keys, dtype=torch.bool)
    for q, q_end, k, k_end in zip(cuts.q, cuts.q[1:], cuts.k, cuts.k[1:]):
        n, m = int(q_end - q), int(k_end - k)
        seen = torch.ones(n, m, dtype=torch.bool)
        found[q:q_end, k:k_end] = seen.tril(m - n) if cuts.is_causal else seen
    return found


def visible_by_spans(spans: torch.Tensor, keys: int) -> torch.Tensor:
    place = torch.arange(keys)
    begin, end = spans[0, 0, :, 0::2, None], spans[0, 0, :, 1::2, None]
    return ((begin <= place) & (place < end)).any(1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scheme", ["halo", "gather"])
def test_documents_are_packed_sequences(scheme: str, is_causal: bool) -> None:
    """Whatever a rank has of them: ends, beginnings, all, none; with rows that see nothing."""
    draw = torch.Generator().manual_seed(5)
    packed = 0
    for world in (1, 2, 3, 5):
        for _ in range(6):
            cuts = [0, *torch.randint(1, 1500, (7,), generator=draw).sort().values.tolist()]
            plan = rd.plan(1500, world_size=world, heads_q=1, head_size=8, cu_seqlens=cuts,
                           causal=is_causal, scheme=scheme)
            for rank in range(world):
                spans = plan.needed.spans_of_part(rank, None, "cpu")
                part = plan.needed.part(rank, None, "cpu")
                keys = 1500 if part is None else len(part)
                assert spans is not None
                found = packing.cuts_of(spans, keys)
                assert found is not None or scheme == "gather" or not plan.rows(rank)
                if found is None:
                    continue
                packed += 1
                assert (found.q[-1], found.k[-1]) == (plan.rows(rank), keys)
                if world == 1:  # rows after the last document are a sequence, too
                    longest = max(end - begin for begin, end in zip(cuts, [*cuts[1:], 1500]))
                    assert found.most_q == found.most_k == longest
                for most, ends in ((found.most_q, found.q), (found.most_k, found.k)):
                    assert not (ends[1:] > ends[:-1] + most).any()
                assert torch.equal(visible_by_cuts(found, plan.rows(rank), keys),
                                   visible_by_spans(spans, keys))
    assert packed > 20


@pytest.mark.parametrize("spans", [
    [[0, 4], [0, 3]], [[0, 2], [1, 3]], [[2, 4], [0, 2]], [[0, 1], [0, 3]], [[0, 2, 3, 4]] * 2],
    ids=["shorter", "overlap", "backwards", "a jump", "two spans"])
def test_spans_that_are_no_packed_sequences(spans: list[list[int]]) -> None:
    assert packing.cuts_of(torch.tensor([[spans]], dtype=torch.int32), 4) is None


def test_which_calls_are_packed() -> None:
    """Those that may, and have no positions."""
    def options(may_pack: bool, by_position: bool) -> dict[str, Any]:
        plan = rd.plan(600, world_size=2, heads_q=2, head_size=8, causal=True,
                       cu_seqlens=[0, 100, 420, 600], scheme="halo")
        call = Call(plan, SimpleNamespace(rank=1), {}, by_position, {}, None, False, True, "")
        return visibility_options(call, None, None, "cpu", may_pack=may_pack)

    found = options(True, False)
    assert found["cu_seqlens_q"].tolist() == [0, 0, 164, 344] and found["causal"] == "bottom_right"
    assert found["cu_seqlens_k"].tolist() == [0, 100, 420, 600] and "row_spans" not in found
    assert (found["max_seqlen_q"], found["max_seqlen_k"]) == (180, 320)
    for may_pack, by_position in ((False, False), (True, True)):
        assert "row_spans" in options(may_pack, by_position)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_the_tensors_say_how_many_entries_there_are(batch: int) -> None:
    """The plan's batch is for numbers of bytes alone."""
    cuts = [0, 100, 420, 600]
    plan = rd.plan(600, world_size=1, heads_q=2, head_size=8, causal=True, cu_seqlens=cuts)
    draw = torch.Generator().manual_seed(1)
    tensors = [torch.randn(batch, 2, 600, 8, generator=draw, dtype=torch.float64).requires_grad_()
               for _ in range(3)]
    dout = torch.randn(batch, 2, 600, 8, generator=draw, dtype=torch.float64)
    mask = regard.masks.causal_documents(torch.tensor(cuts), like=dout)
    results = [(out, *torch.autograd.grad(out, tensors, dout)) for out in (
        rd.attention(*tensors, plan), attention(*tensors, mask=mask))]
    for found, wanted in zip(*results):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_documents(batch: int) -> None:
    plan = rd.plan(600, world_size=2, heads_q=2, head_size=8, causal=True,
                   cu_seqlens=[0, 100, 420, 600], scheme="halo")
    call = Call(plan, SimpleNamespace(rank=1), {}, False, {}, None, False, True, "documents")
    shared, whole = documents._parts(call, torch.empty(batch, 2, 344, 8))
    name = "cu_seqlens_q" if batch == 1 else "row_spans"
    assert whole and all(name in options for options in (shared.options, *(x for _, x in whole)))
