"""Plans of regard.torch.distributed: pure values, tested without processes."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import regard  # noqa: E402
from regard import masks  # noqa: E402
from regard.torch import distributed as rd  # noqa: E402
from regard.torch.distributed import costs, dealing, heads, whole_rows  # noqa: E402
from regard.torch.distributed.plan_names import plan_of  # noqa: E402

HEADS: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "head_size": 64}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 70)},
    "causal_window": {"causal": True, "window": (150, None)},
    "documents": {"cu_seqlens": [0, 40, 40, 333, 420]},
    "causal_documents": {"cu_seqlens": [0, 40, 333, 420], "causal": "bottom_right"},
    "sliding": {"mask": masks.sliding(517, 60, sinks=4)},
    "all": {"mask": masks.sliding(517, 60, sinks=4), "cu_seqlens": [0, 300, 500], "window": 40},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(length: int, pairs: dict[str, Any]) -> torch.Tensor:
    """(S, S) bool from the definition of each mask, without spans."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = torch.ones(length, length, dtype=torch.bool)
    if pairs.get("causal"):
        seen &= j <= i
    if "window" in pairs:
        sides = pairs["window"] if isinstance(pairs["window"], tuple) else (pairs["window"],) * 2
        left, right = sides
        seen &= (i - j <= left) if left is not None else True
        seen &= (j - i <= right) if right is not None else True
    if "cu_seqlens" in pairs:
        cuts = pairs["cu_seqlens"]
        documents = torch.full((length,), -1)
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:])):
            documents[begin:end] = number
        seen &= (documents[:, None] == documents) & (documents[:, None] >= 0)
    if "mask" in pairs:
        seen &= (j <= i) & ((j < 4) | (i - j < 60))
    return seen


def schemes_of(pairs: dict[str, Any]) -> list[str]:
    return ["gather", "ring", "ulysses"] + (["halo"] if pairs and pairs != {"causal": True} else [])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_row_once_and_every_visible_key_there(name: str, world: int) -> None:
    seen = dense(517, MASKS[name])
    for scheme in schemes_of(MASKS[name]):
        plan = rd.plan(517, world_size=world, scheme=scheme, **HEADS, **MASKS[name])
        positions = [plan.positions(rank) for rank in range(world)]
        assert torch.cat(positions).sort().values.equal(torch.arange(517))
        for rank, own in enumerate(positions):
            assert len(own) == plan.rows(rank)
            local = torch.arange(len(own))
            first = plan.first_positions(rank).long()
            assert own.equal(first[local // 128] + local % 128 if len(own) else own)
            assert own.sort().values.equal(own)
            if scheme == "ulysses":
                continue
            assert plan.areas[rank] == seen[own].sum()
            needed = seen[own].any(0).nonzero()[:, 0]
            assert torch.isin(needed, plan.keys(rank)).all()
            for other in range(world):
                sees = bool(seen[own][:, positions[other]].any())
                assert sees <= plan.needed.sees_rank(rank, other)
                found = positions[other][plan.needed.rows(rank, other)]
                assert torch.isin(plan.keys(rank), positions[other]).sum() == len(found)


@pytest.mark.parametrize("name", MASKS)
def test_spans_show_what_the_masks_show(name: str) -> None:
    """Over the whole sequence, and over the keys of one rank, in their order."""
    seen = dense(517, MASKS[name])
    for scheme in schemes_of(MASKS[name])[:-1]:
        plan = rd.plan(517, world_size=3, scheme=scheme, **HEADS, **MASKS[name])
        for rank in range(3):
            for owner in (None, 0, 1, 2):
                keys = plan.needed.part(rank, owner, "cpu")
                spans = plan.needed.spans_of_part(rank, owner, "cpu")
                wanted = seen[plan.positions(rank)]
                wanted = wanted if keys is None else wanted[:, keys]
                if spans is None:
                    assert wanted.all()
                    continue
                mask = masks.Mask(*wanted.shape, row_spans=spans)
                assert torch.as_tensor(mask.to_dense()).equal(wanted)


def test_halo_by_area() -> None:
    """Contiguous rows with even areas, as in C++; rows that see nothing are dealt by their number."""
    pairs = {"causal": True, "cu_seqlens": [0, 100, 1500, 1501, 4700]}
    equal, cut = (rd.plan(5000, world_size=3, scheme="halo", rows=rows, **HEADS, **pairs)
                  for rows in ("equal", "by_area"))
    assert [cut.rows(rank) for rank in range(3)] == [2944, 1024, 1032]
    assert cut.balance < 1.02 < 1.6 < equal.balance
    assert cut.blocks[0] + cut.blocks[1] + cut.blocks[2] == tuple(range(40))
    assert cut.explain().startswith("halo over 3 ranks, 5000 rows dealt contiguous by area, balance 1.01")
    unseen = rd.plan(5000, world_size=3, scheme="halo", rows="by_area", cu_seqlens=[0, 0], **HEADS)
    assert unseen.blocks == equal.blocks
    near = rd.plan(2**20, world_size=8, causal=True, window=(1024, None), rows="by_area", **HEADS)
    assert near.dealing == "contiguous by area" and near.balance < 1.001


def test_windows_that_hide_nothing_and_rows_behind_the_last_document() -> None:
    """As in C++."""
    for length in (1000, 1024, 2000):
        halo = rd.plan(length, world_size=2, scheme="halo", causal=True, window=(1023, 0), **HEADS)
        assert halo.dealing == "contiguous"
    wide = rd.plan(2000, world_size=2, scheme="gather", causal=True, window=(2000, 0), **HEADS)
    assert wide.dealing == "zigzag"
    behind = rd.plan(2000, world_size=3, scheme="gather", causal=True, window=(43, None),
                     cu_seqlens=[0, 907], **HEADS)
    assert behind.dealing == "documents" and behind.blocks[1] == (2, 5, 7, 11, 12)


def test_keys_that_no_row_sees_do_not_move() -> None:
    """Documents that lie within ranks: what moves is far less than all."""
    cuts = list(range(0, 128 * 64 + 1, 128))
    plan = rd.plan(cu_seqlens=cuts, world_size=4, scheme="gather", **HEADS)
    assert not plan.moves_all
    assert all(plan.moved(rank) == (0, 0, 0) for rank in range(4))
    whole = rd.plan(128 * 64, world_size=4, scheme="gather", **HEADS)
    assert whole.moves_all and whole.moved(0).forward == 3 * 128 * 16 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_zigzag_is_balanced(world: int) -> None:
    draw = random.Random(world)
    for _ in range(6):
        length = draw.randrange(64 * 128 * world, 100 * 128 * world)
        plan = rd.plan(length, world_size=world, causal=True, scheme="gather", **HEADS)
        assert plan.dealing == "zigzag"
        assert plan.balance <= 1.02
        rows = [plan.rows(rank) for rank in range(world)]
        assert max(rows) - min(rows) <= 3 * 128
        contiguous = rd.plan(length, world_size=world, scheme="gather", **HEADS)
        own = contiguous.positions(world - 1)
        assert float((own + 1).sum()) > 1.4 * length * (length + 1) / 2 / world  # what it is for


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_balanced(world: int, causal: bool) -> None:
    draw = random.Random(world)
    for _ in range(4):
        cuts = [0]
        while cuts[-1] < 40 * 128 * world:
            cuts.append(cuts[-1] + int(2 ** draw.uniform(5, 12)))
        plan = rd.plan(cu_seqlens=cuts, world_size=world, causal=causal, scheme="gather", **HEADS)
        assert plan.dealing in ("documents", "greedy")  # by their lengths
        assert plan.balance <= 1.1
        blocks = [len(blocks) for blocks in plan.blocks]
        assert max(blocks) - min(blocks) <= 1


def test_long_documents_have_few_owners() -> None:
    """Areas are even, and a rank receives a part of what an all-gather would bring."""
    draw = random.Random(1)
    for world in (16, 32, 64):
        cuts = [0]
        while cuts[-1] < 64 * 128 * world:
            cuts.append(cuts[-1] + draw.randrange(1024, 8192))
        plan = rd.plan(cu_seqlens=cuts, world_size=world, causal=True, scheme="gather", **HEADS)
        assert plan.dealing == "documents" and plan.balance <= 1.1
        assert max(plan.needed.moved[0]) < 6 * cuts[-1] / world


def test_greedy_deals_as_many_blocks_to_all() -> None:
    """Also where one block outweighs all others."""
    for count in range(1, 14):
        found = dealing.greedy([100.0, *[1.0] * (count - 1)], 4)
        assert sorted(block for own in found for block in own) == list(range(count))
        assert max(map(len, found)) - min(map(len, found)) <= 1
    assert dealing.greedy([5.0, 4.0, 3.0, 3.0, 2.0, 1.0], 2) == ((0, 3, 5), (1, 2, 4))


def test_auto_chooses_by_time() -> None:
    long: dict[str, Any] = {"length": 65536, "head_size": 128, "world_size": 8}
    halo = rd.plan(**long, heads_q=32, heads_kv=8, causal=True, window=(1024, None))
    assert halo.scheme == "halo"
    assert rd.plan(**long, heads_q=32, causal=True).scheme == "ulysses"  # as many heads of keys
    assert rd.plan(**long, heads_q=32, heads_kv=1, causal=True).scheme == "gather"
    assert rd.plan(**long, heads_q=4, causal=True).scheme == "gather"  # fewer heads than ranks
    slow = rd.Bandwidth(all_gather=3e11, all_to_all=1e9)
    assert rd.plan(**long, heads_q=32, causal=True, bandwidth=slow).scheme == "ulysses"  # sums
    gather = rd.plan(**long, heads_q=32, causal=True, scheme="gather")
    row = 32 * 2 * 128  # one key and its value; keys come by all-gather, sums by all-to-all
    assert gather.moved(0).all_gather == 2 * 7 * 8192 * row * 2
    assert costs.seconds(gather, costs.Rates(slow, slow, 1e30)) == pytest.approx(
        2 * 7 * 8192 * row * 2 / 3e11 + 7 * 8192 * row * 4 / 1e9, rel=1e-6)
    text = halo.explain()
    assert text.splitlines()[0].startswith("halo over 8 ranks, 65536 rows dealt contiguous")
    assert "halo: the least time" in text and "assumed" in text and str(halo) == text
    table = {line.split()[0]: line for line in text.splitlines() if line[:4].strip().isdigit()}
    assert len(table) == 8 and "8192" in table["3"] and "192-255" in table["3"]


def test_auto_knows_nodes() -> None:
    """Keys cross a slow network once for each node, and again for each rank where it is fast."""
    long: dict[str, Any] = {"length": 65536, "head_size": 128, "world_size": 16, "heads_q": 8}
    two = rd.plan(**long, causal=True, ranks_per_node=8)
    assert two.scheme == "ulysses+gather" and "ulysses+gather: the least time" in two.explain()
    near = rd.plan(**long, causal=True, window=(300, None), ranks_per_node=8)
    assert near.scheme == "halo"  # few keys cross any network
    assert rd.plan(**long, causal=True).scheme == "gather"  # nothing is known of nodes
    fast, slow = (rd.Bandwidth(all_gather=rate, all_to_all=rate) for rate in (1e15, 1e9))
    one = rd.plan(**long, causal=True, ranks_per_node=8, bandwidth=fast, node_bandwidth=slow)
    assert one.scheme == "gather"
    assert rd.plan(**long, causal=True, ranks_per_node=16).scheme == "gather"  # one node
    within, among = two.within_node(0).moved(3), two.nodes.moved(0)
    assert costs.seconds(two, costs.Rates(slow, fast, 1e30)) == pytest.approx(
        (among.forward + among.backward) / 8 / 1e9 + sum(within[:2]) / 1e15, rel=1e-6)


@pytest.mark.parametrize("heads_kv,fast,said", [(8, 6e11, "some heads after the other"),
                                                (1, 1e11, "own keys first")])
def test_long_moves_are_hidden(heads_kv: int, fast: float, said: str) -> None:
    sizes: dict[str, Any] = {"length": 16384, "world_size": 2, "heads_q": 32, "heads_kv": heads_kv,
                             "head_size": 128, "causal": True}
    quick, slow = (rd.Bandwidth(all_gather=rate, all_to_all=rate) for rate in (fast, 1e9))
    near, far = (rd.plan(**sizes, scheme="gather", bandwidth=rate) for rate in (quick, slow))
    assert (near.moves_long, far.moves_long) == (False, True)
    assert near.digest != far.digest  # calls differ
    assert said in far.explain() and "on GPUs" not in near.explain()
    if heads_kv > 1:  # as measured
        assert [rd.plan(**sizes | {"length": ranks * 32768, "world_size": ranks}, scheme="gather").moves_long
                for ranks in (2, 4)] == [False, True]
    for scheme in ("ring", "ulysses"):
        one, other = (rd.plan(**sizes, scheme=scheme, bandwidth=rate) for rate in (None, slow))
        assert one.digest == other.digest


def test_heads_are_dealt_with_their_keys() -> None:
    for heads_q, heads_kv in ((8, 8), (8, 2), (6, 3), (5, 1), (12, 4)):
        share = heads_q // heads_kv
        for ranks in range(1, 15):
            dealt = heads.dealt(heads_q, ranks)
            assert [head for own in dealt for head in own] == list(range(heads_q))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
            for own in dealt:
                keys = heads.of_keys(own, heads_q, heads_kv)
                assert {head // share for head in own} == set(keys)
                places = heads.repeats(own, heads_q, heads_kv)
                group = len(own) // max(1, len(keys))
                if places is None:
                    places = [n // group for n in range(len(own))]
                assert [keys[place] for place in places] == [head // share for head in own]


def test_digests_tell_plans_apart() -> None:
    plans = [rd.plan(517, world_size=2, **HEADS, **pairs) for pairs in MASKS.values()]
    plans += [rd.plan(517, world_size=3, **HEADS), rd.plan(516, world_size=2, **HEADS),
              rd.plan(517, world_size=2, scheme="ring", **HEADS)]
    assert len({plan.digest for plan in plans}) == len(plans)
    again = rd.plan(517, world_size=2, **HEADS, **MASKS["all"])
    assert again.digest in {plan.digest for plan in plans}
    spans = torch.tensor([[0, 100], [50, 200]], dtype=torch.int32)[:, None].expand(2, 200, 2)
    by_batch, by_head = (rd.plan(200, world_size=2, heads_q=2, head_size=8, batch=2,
                                 mask=masks.Mask(200, 200, row_spans=shaped))
                         for shaped in (spans[:, None], spans[None]))
    assert by_batch.digest != by_head.digest


def test_a_name_finds_a_plan_as_long_as_one_lives() -> None:
    first, second = (rd.plan(517, world_size=2, **HEADS) for _ in range(2))
    name = first.name
    assert second.name == name
    del second
    assert plan_of(name) is first
    second = pickle.loads(pickle.dumps(first))
    del first
    assert plan_of(name) is second
    del second
    with pytest.raises(regard.InvalidArgument, match="not a plan of this process"):
        plan_of(name)


@pytest.mark.parametrize("argument, value, more", [
    ("length", 0, {}), ("length", None, {}), ("world_size", 0, {}), ("heads_q", 7, {}),
    ("scheme", "star", {}), ("rows", "even", {}), ("scheme", "halo", {}), ("scheme", "halo", {"causal": True}),
    ("element_bytes", 1, {}), ("element_bytes", 3, {}), ("flops", -1.0, {}), ("bandwidth", 3e11, {}),
    ("node_bandwidth", 3e11, {}), ("ranks_per_node", 2, {"scheme": "gather"}),
    ("ranks_per_node", None, {"scheme": "ulysses+gather"}), ("ranks_per_node", 3, {}),
    ("mask", torch.ones(300, 300, dtype=torch.bool), {}),
    ("mask", masks.sliding(200, 8), {}),
    ("mask", masks.tree_from_parents([-1, *range(299)]), {}),
    ("mask", masks.from_dense(torch.ones(300, 300, dtype=torch.bool)), {}),
    ("mask", masks.Mask(300, 300, row_spans=torch.ones(3, 300, 2, dtype=torch.int32)), {}),
    ("window", (1, 2, 3), {}), ("causal", "diagonal", {}),
    ("cu_seqlens", [0, 20, 10], {}), ("cu_seqlens", [], {"length": None}),
    ("scheme", "halo", {"causal": True, "window": (-1, 3)}),
    ("bandwidth", rd.Bandwidth(0.0, 1.0), {}), ("node_bandwidth", rd.Bandwidth(1.0, math.nan), {}),
])
def test_errors_name_the_argument(argument: str, value: Any, more: dict[str, Any]) -> None:
    given = {"length": 300, "world_size": 2, **HEADS, **more, argument: value}
    with pytest.raises(regard.Error) as caught:
        rd.plan(**given)
    assert caught.value.argument == argument, caught.value


def test_shards_need_the_whole() -> None:
    plan = rd.plan(300, world_size=2, **HEADS)
    x = torch.randn(2, 300, 5, requires_grad=True)
    parts = [plan.shard(x, rank, 1) for rank in range(2)]
    assert torch.cat(parts, 1).equal(x)  # contiguous
    parts[1].sum().backward()
    assert x.grad is not None and x.grad[:, plan.positions(1)].eq(1).all() and x.grad.sum() == 1720
    with pytest.raises(regard.InvalidArgument, match="300 rows along dim 2"):
        plan.shard(x, 0, 2)
    with pytest.raises(regard.InvalidArgument, match="rank = 2"):
        plan.rows(2)


@pytest.mark.parametrize("name", ["full", "causal", "documents", "all"])
@pytest.mark.parametrize("scheme", ["gather", "ring", "ulysses"])
def test_plans_are_made_in_any_mode(name: str, scheme: str) -> None:
    """What a plan keeps is on the CPU and serves autograd, whatever was set when it was made."""
    def made() -> tuple[Any, ...]:
        plan = rd.plan(517, world_size=2, scheme=scheme, **HEADS, **MASKS[name])
        parts = [plan.needed.part(1, 0, "cpu"), plan.needed.part(1, None, "cpu", True)]
        return (plan, plan.positions(0), plan.first_positions(1), plan.keys(1),
                plan.needed.rows(0, 1), *parts, plan.needed.spans_of_part(1, 0, "cpu"), plan.digest,
                plan.areas, plan.needed.counts, plan.needed.sees_rank(0, 1), plan.moved(1))

    plan, *usual = made()
    with torch.inference_mode():
        inferred, *tensors = made()
    with torch.device("meta"):
        assert_equal(usual, made()[1:])
    torch.set_default_device("meta")
    try:
        assert_equal(usual, made()[1:])
    finally:
        torch.set_default_device(None)
    assert_equal(usual, tensors)
    assert not any(x.is_inference() for x in tensors if isinstance(x, torch.Tensor))
    x = torch.randn(517, requires_grad=True)
    inferred.shard(x, 0, 0).sum().backward()
    q = torch.randn(1, 8, 517, 64)
    alone = rd.plan(517, world_size=1, scheme=scheme, **HEADS, **MASKS[name])
    with torch.inference_mode():
        rd.attention(q, q[:, :2], q[:, :2], alone)
    rd.attention(q.requires_grad_(), q[:, :2], q[:, :2], alone).sum().backward()
    assert plan.digest == inferred.digest


def assert_equal(usual: Any, others: Any) -> None:
    for one, other in zip(usual, others, strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else one == other


def test_keys_that_follow_each_other_go_by_positions() -> None:
    """Kernels take a band of positions faster than spans."""
    causal = rd.plan(1000, world_size=2, heads_q=1, head_size=8, causal=True, scheme="gather")
    assert causal.visible.band == {"causal": "top_left", "window": (-1, -1)}
    first = [causal.needed.first_if_adjacent(0, owner, False, rows) for owner, rows in (
        (None, slice(None)), (0, slice(None)), (0, causal.dealt.runs(0)[1]), (-1, slice(None)))]
    assert first == [0, None, int(causal.positions(0)[causal.dealt.runs(0)[1].start]), 256]
    packed = rd.plan(1000, world_size=2, heads_q=1, head_size=8, cu_seqlens=[0, 400, 1000])
    assert packed.visible.band is None


def test_components_of_positions() -> None:
    """A row without keys is one of its own; a row joins all positions from itself to its keys."""
    spans = torch.tensor([[0, 2], [0, 2], [5, 5], [4, 5], [4, 5], [6, 8], [0, 0], [6, 7]])
    plan = rd.plan(8, world_size=1, heads_q=1, head_size=8,
                   mask=masks.Mask(8, 8, row_spans=spans.int()))
    assert whole_rows._components(plan).tolist() == [0, 0, 1, 2, 2, 3, 3, 3]
