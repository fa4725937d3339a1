"""regard.torch.distributed over 2, 3 and 4 gloo processes, compared with one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_compiling as compiling  # noqa: E402
import distributed_faults as faults  # noqa: E402
import distributed_tasks as tasks  # noqa: E402
from distributed_cases import (DOCUMENTS, FEATURES, OVERLAPPING, SCHEMES, TWO_LEVELS,  # noqa: E402
                               Case, attend, error, joined, local_tensors, split_scheme, takes,
                               whole_results)
from distributed_pool import COLLECTIVE_SECONDS, Pool, Raised  # noqa: E402

from regard.torch import distributed as rd  # noqa: E402

LIMIT = 1e-12  # of float64, in norm; dsink is float32
FELT = 1e-2  # what leaving a feature out changes at least, in norm

pytestmark = pytest.mark.usefixtures("one_thread")


class Pools:
    """One pool, and a new one where a test has broken it."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def run(self, *arguments: Any, **more: Any) -> list[Any]:
        if self.pool is None or not self.pool.alive:
            self.pool = Pool(4)
        return self.pool.run(*arguments, **more)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    if found.pool is not None:
        found.pool.close()


@lru_cache(maxsize=None)
def truth_of(case_text: str) -> dict[str, torch.Tensor]:
    case = next(case for case in ALL if str(case) == case_text)
    return whole_results(case, case.tensors())


def results(pools: Pools, case: Case, scheme: str, world: int, **more: Any
            ) -> dict[str, torch.Tensor]:
    scheme, stages = split_scheme(scheme)
    parts = pools.run(world, attend, case, scheme, stages | more)
    assert not [part for part in parts if isinstance(part, Raised)], parts
    return joined(case, case.plan(world, scheme), parts)


def compare(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        assert x.double().where(x.isfinite(), torch.zeros(())).norm() > 0, name
        assert error(found[name], x) <= (1e-6 if name == "dsink" else LIMIT), name


LENGTHS = [Case(f"length_{length}_{kind}", length, heads=heads, pairs=pairs, features=("sink",))
           for length in (1, 130, 300, 517)
           for kind, heads, pairs in (("causal", (4, 2), {"causal": True}),
                                      ("near", (3, 1), {"window": (40, 3)}))]
HEADS = [Case("one_head_of_keys", 300, heads=(8, 1)), Case("odd_heads", 300, heads=(5, 5)),
         Case("odd_groups", 300, heads=(10, 5)), Case("few_heads", 300, heads=(2, 1))]
ALL = FEATURES + LENGTHS + HEADS


@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_each_feature(pools: Pools, case: Case, scheme: str) -> None:
    if takes(case, scheme):
        compare(results(pools, case, scheme, 3), truth_of(str(case)))


@pytest.mark.parametrize("scheme", [*TWO_LEVELS, *(f"ulysses+{how}" for how in OVERLAPPING[:2])])
@pytest.mark.parametrize("case", FEATURES + LENGTHS + HEADS, ids=str)
def test_two_levels(pools: Pools, case: Case, scheme: str) -> None:
    if takes(case, scheme):
        compare(results(pools, case, scheme, 4), truth_of(str(case)))


def test_bytes_moved_at_two_levels(pools: Pools) -> None:
    """Those within the node, of whole heads; and those among nodes, of own heads."""
    case = Case("levels", 900, heads=(8, 4), dtype=torch.bfloat16, pairs={"causal": True}, lse=False)
    for scheme in ("ulysses+gather", "ulysses+ring"):
        plan = case.plan(4, scheme)
        for rank, (*counted, _) in enumerate(pools.run(4, tasks.bytes_received, case, scheme, False)):
            assert tuple(counted) == plan.moved(rank)[:2], rank


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_each_feature_is_felt(case: Case) -> None:
    """Without one of its features, a case has other results: the comparisons above can fail."""
    truth = truth_of(str(case))
    for feature in case.all_features():
        tensors = {name: x for name, x in case.tensors().items() if name != feature}
        other = whole_results(case.without(feature), tensors)
        assert max(error(other[name].nan_to_num(neginf=0), truth[name].nan_to_num(neginf=0))
                   for name in ("out", "dq", "dv")) > FELT, feature


@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_lengths_that_do_not_divide(pools: Pools, case: Case, scheme: str) -> None:
    for world in (2, 4) if takes(case, scheme) else ():
        compare(results(pools, case, scheme, world), truth_of(str(case)))


@pytest.mark.parametrize("scheme", ["gather", *OVERLAPPING[:2], "ring", "ulysses"])
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_heads_that_do_not_divide(pools: Pools, case: Case, scheme: str) -> None:
    """Fewer heads of keys than ranks; with Ulysses also fewer query heads than ranks."""
    for world in (3, 4) if takes(case, scheme) else ():
        compare(results(pools, case, scheme, world), truth_of(str(case)))


def test_against_the_definition(pools: Pools) -> None:
    """Softmax over a matrix of scores, differentiated by autograd, which shares no code."""
    for name in ("everything", "causal_documents", "bias_of_keys"):
        case = next(case for case in FEATURES if str(case) == name)
        truth = tasks.by_definition(case)
        for scheme in SCHEMES:
            compare(results(pools, case, scheme, 2), truth)


# ---------------------------------------------------------------------------------------- precision

TYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-4}


@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_error_does_not_grow_with_the_world(pools: Pools, dtype: torch.dtype, scheme: str) -> None:
    """At most 1.5 times one process's, from float64. A bias may have another type."""
    case = Case(f"types_{dtype}", 517, dtype=dtype, bias=("S", "S"), features=("sink",),
                pairs={"causal": True, "window": (400, None)}, dtype_of_bias=torch.float32)
    truth = whole_results(case, case.tensors(), torch.float64)
    alone = whole_results(case, case.tensors())
    found = results(pools, case, scheme, 4)
    for name, x in truth.items():
        assert found[name].dtype == alone[name].dtype
        limit = 1.5 * error(alone[name], x) + (1e-7 if name == "lse" else TYPES[dtype] / 10)
        assert error(found[name], x) <= limit, (name, error(found[name], x), limit)


def test_float32_results_of_bfloat16(pools: Pools) -> None:
    case = Case("wide_out", 300, dtype=torch.bfloat16, pairs={"causal": True}, lse=False)
    truth = whole_results(case, case.tensors(), torch.float64)["out"]
    rounded = error(truth.bfloat16(), truth)
    for scheme in ("gather", "ring", "ulysses"):
        parts = pools.run(3, tasks.forward_only, case, scheme, {"out_type": "float32"})
        found = joined(case, case.plan(3, scheme), [{"out": part} for part in parts])["out"]
        assert found.dtype == torch.float32 and error(found, truth) < 0.8 * rounded


# --------------------------------------------------------------------------------------- parts of it

def test_only_what_is_asked_for_is_differentiated(pools: Pools) -> None:
    case = Case("some_gradients", 300, bias=(1, 4, "S", "S"), features=("sink",))
    truth = whole_results(case, case.tensors())
    for scheme in ("gather", "ring", "ulysses"):
        for names in (("q",), ("v",), ("bias",), ("sink",), ("k", "sink")):
            parts = pools.run(2, tasks.some_gradients, case, scheme, names)
            found = joined(case, case.plan(2, scheme), parts)
            assert set(found) == {f"d{name}" for name in names}
            for name, x in found.items():
                assert error(x, truth[name]) <= (1e-6 if name == "dsink" else LIMIT)


@pytest.mark.parametrize("scheme", ["gather", "ring", "ulysses"])
def test_gradients_of_any_layout_and_of_one_result(pools: Pools, scheme: str) -> None:
    """(B, S, H, D) memory, strided last axes, a gradient of stride 0; out or lse alone."""
    case = Case("layouts", 300, pairs={"causal": True})
    for used in ("out", "lse"):
        truth = tasks.gradients_of_sum(case, None, used)
        parts = pools.run(3, tasks.gradients_of_shards, case, scheme, used)
        found = joined(case, case.plan(3, scheme), parts)
        for name, x in truth.items():
            if used == "lse" and name == "dv":
                assert not found[name].any()
            else:
                assert error(found[name], x) <= LIMIT


@pytest.mark.parametrize("scheme", [*SCHEMES, *TWO_LEVELS])
def test_a_rank_that_uses_nothing(pools: Pools, scheme: str) -> None:
    case = Case("unused", 300, pairs={"causal": True, "window": (200, 0)}, lse=False)
    world = 4 if scheme in TWO_LEVELS else 2
    assert all(pools.run(world, tasks.where_a_rank_uses_nothing, case, scheme))


@pytest.mark.parametrize("scheme, more", [
    ("gather", {}), ("gather", {"overlap": "keys"}), ("halo", {}), ("ring", {}), ("ulysses", {})])
def test_scalar_biases_and_masks(pools: Pools, scheme: str, more: dict[str, Any]) -> None:
    case = Case("scalars", 300, pairs={"causal": True, "window": (200, 0)}, lse=False)
    assert all(pools.run(2, tasks.with_scalars, case, scheme, more))


def test_sink_gradients_by_rank(pools: Pools) -> None:
    case = Case("sink_parts", 517, pairs={"causal": True}, features=("sink",))
    truth = whole_results(case, case.tensors())["dsink"]
    for scheme in ("gather", "ring", "ulysses"):
        parts = pools.run(3, attend, case, scheme, {"sum_sink_gradient": False})
        sinks = [part["dsink"] for part in parts]
        assert error(sum(sinks), truth) <= 1e-6  # type: ignore[arg-type]
        assert min(error(sink, truth) for sink in sinks) > FELT


def test_results_repeat_to_the_bit(pools: Pools) -> None:
    case = Case("repeat", 517, dtype=torch.bfloat16, bias=("S", 1), features=("sink",),
                pairs={"cu_seqlens": DOCUMENTS})
    for scheme in SCHEMES + OVERLAPPING:
        first, again = (results(pools, case, scheme, 4, deterministic=True) for _ in range(2))
        for name, x in first.items():
            torch.testing.assert_close(again[name], x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scheme", ["gather", "gather by heads"])
def test_gather_has_the_bits_of_one_process(pools: Pools, scheme: str) -> None:
    """On the CPU, for what each row computes alone."""
    for name in ("causal", "documents", "sink"):
        case = next(case for case in FEATURES if str(case) == name)
        found, truth = results(pools, case, scheme, 4), truth_of(name)
        for x in ("out", "lse", "dq"):
            torch.testing.assert_close(found[x], truth[x], rtol=0, atol=0)


def test_one_rank_needs_no_group() -> None:
    case = next(case for case in FEATURES if str(case) == "everything")
    for scheme in SCHEMES:
        plan = case.plan(1, scheme)
        tensors = local_tensors(case, plan, 0)
        truth = truth_of("everything")["out"]
        del tensors["dout"], tensors["dlse"]
        out = rd.attention(**tensors, plan=plan, **case.options)
        assert error(out, truth) <= LIMIT


def test_autocast(pools: Pools) -> None:
    """q, k and v are rounded before they are sent; gradients have the types of the inputs."""
    case = Case("autocast", 300, dtype=torch.float32, pairs={"causal": True}, lse=False)
    truth = whole_results(case, case.tensors())
    for scheme in ("gather", "ring", "ulysses"):
        parts = pools.run(2, tasks.under_autocast, case, scheme)
        found = joined(case, case.plan(2, scheme), parts)
        assert found["out"].dtype == torch.bfloat16 and found["dk"].dtype == torch.float32
        for name, x in truth.items():
            assert 1e-4 < error(found[name], x) < 2e-2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_seed_in_memory_is_that_number(pools: Pools, scheme: str) -> None:
    case = next(case for case in FEATURES if str(case) == "near_dropout")
    found, wanted = (pools.run(2, tasks.of_a_seed, case, scheme, "cpu", in_memory)
                     for in_memory in (True, False))
    for parts in zip(found, wanted):
        assert all(parts[0][name].equal(x) for name, x in parts[1].items())


@pytest.mark.parametrize("scheme", ["gather", "halo"])
def test_gradients_hold_no_more_than_their_rows(pools: Pools, scheme: str) -> None:
    case = Case("held", 1000, heads=(2, 2), lse=False, pairs={"window": (300, 300)})
    assert pools.run(2, tasks.bytes_held_by_gradients, case, scheme) == [1.0, 1.0]


def test_accepted_calls_excuse_no_others(pools: Pools) -> None:
    """A rank remembers what it has checked, except the seed."""
    assert pools.run(2, faults.refused_after_others) == 2 * [
        ["dropout_seed", "dropout_seed", "dropout_seed", "return_lse", "softcap", "threads",
         "softcat"]]


def test_data_parallel_averages(pools: Pools) -> None:
    """The weight's gradient and the sink's."""
    found = pools.run(3, tasks.data_parallel)
    assert all(one[0] < LIMIT and one[1] < 1e-6 for one in found), found


COMPILED = [Case("compiled", 300, pairs={"causal": True}, lse=False),
            Case("compiled_narrow", 300, dtype=torch.bfloat16, bias=(4, "S", "S"), features=("sink",),
                 pairs={"window": (200, 100)}, options={"softcap": 5.0})]


@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
def test_compiled(pools: Pools, scheme: str) -> None:
    """A program with a call is one graph, and changes no bit."""
    plain, more = split_scheme(scheme)
    for case in COMPILED:
        if takes(case, scheme):
            found = pools.run(2, compiling.compiled, case, plain, more, seconds=120)
            assert found == [0.0, 0.0], found


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_for_many_numbers(pools: Pools, dynamic: bool) -> None:
    case = Case("numbers", 300, pairs={"causal": True}, lse=False)
    assert max(pools.run(2, compiling.compiled_for_many_numbers, case, "gather", dynamic,
                         seconds=120)) == 0


def test_compiled_around_what_no_operator_takes(pools: Pools) -> None:
    """Such calls end the compiled part, and come to what they come to without it."""
    found = pools.run(2, compiling.texts_of_broken, COMPILED[0], "gather", seconds=120)
    errors = ["dropout_seed = -1:", "threads = 'a':", "cu_seqlens = ", "group = a DeviceMesh:",
              "sink = a DTensor:"]
    for ranks in found:
        assert all(plain == compiled for plain, compiled in ranks), ranks
        assert [text.startswith("(") for text, _ in ranks] == 4 * [True] + len(errors) * [False]
        assert all(text.startswith(start) for (text, _), start in zip(ranks[4:], errors)), ranks


@pytest.mark.parametrize("scheme", ["gather", "ring", "ulysses"])
def test_operators_for_the_compiler(pools: Pools, scheme: str) -> None:
    case = next(case for case in FEATURES if str(case) == "everything")
    for found in pools.run(3, compiling.checked_operators, replace(case, options={}), scheme, seconds=120):
        assert isinstance(found, dict) and set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_are_as_the_compiler_was_told(pools: Pools, dtype: torch.dtype, scheme: str) -> None:
    plain, more = split_scheme(scheme)
    case = replace(COMPILED[1], dtype=dtype, lse=True)
    assert pools.run(2, compiling.broken_promises, case, plain, more) == [[], []]


@pytest.mark.parametrize("scheme", ["gather", "ring", "ulysses"])
def test_sharded_parameters_and_checkpoints(pools: Pools, scheme: str) -> None:
    found = pools.run(2, tasks.in_fsdp, scheme, seconds=120)
    assert all(not isinstance(one, Raised) and max(one) < LIMIT for one in found), found


# ------------------------------------------------------------------------------------ communication

@pytest.mark.parametrize("scheme", SCHEMES + OVERLAPPING)
def test_bytes_moved_are_those_of_the_plan(pools: Pools, scheme: str) -> None:
    cases = [Case("moved", 517, heads=(4, 2), dtype=torch.bfloat16, lse=False,
                  pairs={"cu_seqlens": DOCUMENTS, "window": (90, 20)}),
             Case("moved_odd", 900, heads=(5, 5), dtype=torch.float64, lse=False)]
    scheme, more = split_scheme(scheme)
    for case in cases[:1] if scheme == "halo" else cases:
        plan, overlap = case.plan(3, scheme), more.get("overlap", False)
        for rank, (*counted, by_gather) in enumerate(
                pools.run(3, tasks.bytes_received, case, scheme, overlap)):
            assert tuple(counted) == plan.moved(rank)[:2], rank
            assert by_gather == plan.moved(rank).all_gather, rank


def test_a_halo_moves_near_keys_only(pools: Pools) -> None:
    """A window over more than a rank's rows takes keys of several; a small one of neighbours."""
    near = Case("near", 128 * 8, pairs={"window": (100, 0)}, lse=False)
    far = Case("far", 128 * 8, pairs={"window": (300, 260)}, lse=False)
    for case, most in ((near, 128), (far, 5 * 128)):
        plan = case.plan(4, "halo")
        assert max(len(plan.keys(rank)) - plan.rows(rank) for rank in range(4)) == most
        compare(results(pools, case, "halo", 4), whole_results(case, case.tensors()))


def test_gather_moves_parts_of_keys(pools: Pools) -> None:
    """Documents of few blocks, dealt to any ranks: most keys stay, and owners are out of order."""
    cuts = [0, 256, 384, 640, 700, 1024, 1152, 1280, 1500]
    case = Case("parts", 1500, pairs={"cu_seqlens": cuts}, bias=(1, 1, "S", "S"), lse=False)
    placed = Case("placed", 1500, pairs={"cu_seqlens": cuts}, features=("alibi_slopes",))
    plan = case.plan(3, "gather")
    orders = [torch.cat([plan.positions(owner)[plan.needed.rows(rank, owner)]
                         for owner in range(3)]) for rank in range(3)]
    assert not plan.moves_all and any((order.diff() < 0).any() for order in orders)
    assert all(0 < plan.moved(rank).forward < 700 * 2 * 2 * 14 * 8 for rank in range(3))
    for one in (case, placed):
        compare(results(pools, one, "gather", 3), whole_results(one, one.tensors()))


def test_unshard_is_the_inverse_of_shard(pools: Pools) -> None:
    for case in (LENGTHS[0], LENGTHS[2], FEATURES[1], FEATURES[4]):
        found = pools.run(3, tasks.round_trip, case)
        assert found == [True] * 3, found


def test_bandwidth_is_equal_on_all_ranks(pools: Pools) -> None:
    found = pools.run(3, tasks.bandwidth)
    assert found[0] == found[1] == found[2]
    assert all(1e6 < rate < 1e12 and math.isfinite(rate) for rate in found[0])


# ------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("fault, argument, text", [
    ("rows", "q", "rank 1 has 128 rows"), ("heads", "k", "must be (2, 2, 128, 8)"),
    ("type", "v", "must be torch.float64"), ("array", "q", "must be a tensor of PyTorch"),
    ("device", "q", "the group moves tensors on cpu"), ("mixed", "k", "must be on cpu"),
    ("bias", "bias", "this rank's rows, all keys"), ("mask", "mask", "must be torch.bool"),
    ("spans", "row_spans", "this rank's rows"), ("sink", "sink", "must be (4,)"),
    ("number", "softcap", "must be a number"), ("unknown", "softcat", "did you mean softcap?"),
    ("causal", "causal", "the plan says"), ("dropout", "dropout_seed", "must be given"),
    ("softcap", "softcap", "must be finite and not negative"), ("certain", "dropout_p", "[0, 1)"),
    ("backend", "backend", "no backend has this name"), ("span_heads", "row_spans", "(2, 4, 128"),
    ("odd_spans", "row_spans", "must be 2 n"), ("many_spans", "row_spans", "n from 1 to 8"),
    ("result", "out_type", "must be float32 or q's type"), ("plan", "plan", "must be a Plan"), ("world", "group", "the plan is for 2"),
])
def test_one_rank_is_wrong(pools: Pools, fault: str, argument: str, text: str) -> None:
    """It raises its error, and the others tell of it: no rank waits for another."""
    found = pools.run(3, faults.with_fault, f"first_{fault}", fault, 1, seconds=COLLECTIVE_SECONDS / 2)
    assert isinstance(found[1], Raised) and found[1].argument == argument, found
    assert text in found[1].text
    for other in (found[0], found[2]):
        assert isinstance(other, Raised) and other.argument == "group", other
        assert f"rank 1 refused: {argument} = " in other.text


def test_second_derivatives_are_refused(pools: Pools) -> None:
    assert pools.run(2, faults.twice_differentiated) == ["create_graph"] * 2


def test_any_strides(pools: Pools) -> None:
    assert pools.run(2, faults.strided, seconds=COLLECTIVE_SECONDS / 2) == [True] * 2


@pytest.mark.parametrize("option", ["softcap", "backend"])
@pytest.mark.parametrize("wrong", [0, 1, 9])
def test_a_rank_without_heads_is_wrong(pools: Pools, wrong: int, option: str) -> None:
    found = pools.run(3, faults.without_heads, wrong, option, seconds=COLLECTIVE_SECONDS / 2)
    for rank, one in enumerate(found):
        assert isinstance(one, Raised)
        assert one.argument == (option if wrong in (rank, 9) else "group"), found


@pytest.mark.parametrize("fault", ["rows", "causal", "mask"])
def test_all_ranks_are_wrong_later(pools: Pools, fault: str) -> None:
    """After a right call, each rank notices before it communicates; the group works on."""
    found = pools.run(3, faults.with_later_fault, fault, seconds=COLLECTIVE_SECONDS / 2)
    assert found == [True] * 3, found


@pytest.mark.parametrize("scheme", [*OVERLAPPING[:1], "ring", "ulysses"])
@pytest.mark.parametrize("where, text", [("option", "softcap = -1"), ("call", "a local call failed")])
def test_the_group_works_after_an_error(pools: Pools, scheme: str, where: str, text: str) -> None:
    found = pools.run(3, faults.works_after_an_error, scheme, where, seconds=COLLECTIVE_SECONDS / 2)
    assert all(text in said and works for said, works in found), found


@pytest.mark.parametrize("difference", ["plan", "option", "gradient", "mask"])
def test_ranks_that_differ(pools: Pools, difference: str) -> None:
    found = pools.run(3, faults.that_differ, difference, seconds=COLLECTIVE_SECONDS / 2)
    assert all(isinstance(one, Raised) and one.argument == "plan" for one in found), found
    assert all("has another plan, or other" in one.text for one in found)


def test_a_group_of_another_size(pools: Pools) -> None:
    case = FEATURES[0]
    found = pools.run(2, faults.in_wrong_group, case, 3, seconds=COLLECTIVE_SECONDS / 2)
    for one in found:
        assert isinstance(one, Raised) and one.argument == "group"
        assert "a group of 2 ranks" in one.text and "the plan is for 3" in one.text
    with pytest.raises(rd_error(), match="has not been initialised"):
        tensors = local_tensors(case, case.plan(3, "gather"), 0)
        rd.attention(tensors["q"], tensors["k"], tensors["v"], case.plan(3, "gather"))
    with pytest.raises(rd_error(), match="must be a Plan"):
        rd.attention(tensors["q"], tensors["k"], tensors["v"], "gather")  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["gather", "ring", "ulysses"])
def test_an_empty_batch(pools: Pools, scheme: str) -> None:
    for found in pools.run(2, faults.without_entries, scheme):
        assert [shape[0] for shape in found] == [0] * 5 and found[0][3] == 6, found


def test_what_is_no_group_or_has_another_batch(pools: Pools) -> None:
    for one in pools.run(2, faults.in_a_mesh):
        assert one.kind == "WrongType" and "give its get_group(...)" in one.text, one
    for one in pools.run(2, faults.of_another_batch):
        assert one.argument == "q" and "for a batch of 3" in one.text, one


def rd_error() -> type[Exception]:
    import regard

    return regard.InvalidArgument
