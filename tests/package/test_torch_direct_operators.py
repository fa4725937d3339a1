"""The operators of PyTorch, called from Python: directly where that is possible, else by PyTorch's
dispatcher, with the same results and errors."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard import _core  # noqa: E402
from regard.torch import direct  # noqa: E402
from regard.torch.kernels import ARGUMENTS  # noqa: E402
from regard.torch.operators import backward, forward  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import CASES, problem  # noqa: E402

pytestmark = pytest.mark.skipif(direct._direct is None, reason="PyTorch before 2.10")

DISPATCHED = SimpleNamespace(**{
    name: torch._C._get_operation_overload(f"regard::{name}", "")[0]
    for name in ("forward", "backward")})


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(**options):
    return [normal(1, 2, 3, 8, seed=seed).requires_grad_(**options) for seed in range(3)]


def arguments(*qkv, **options):
    return *qkv, *(ARGUMENTS | options).values()


def of_backward(given, wanted=(True, True, True, False, False), dlse=None):
    """Arguments of the backward pass of a forward one."""
    out, lse = DISPATCHED.forward(*given)
    return wanted, normal(*out.shape, seed=4).to(out.dtype), dlse, out, lse, *given


@pytest.fixture
def calls():
    """forward and backward, as operators call them; `seen` names those that entered the dispatcher."""
    seen = []

    def watched(name):
        return lambda *given, **named: seen.append(name) or getattr(DISPATCHED, name)(*given, **named)

    made = direct.operators_calls(watched("forward"), watched("backward"))
    return SimpleNamespace(forward=made.forward, backward=made.backward, seen=seen)


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits(case, calls):
    given = problem(case)
    leaves = {name: x.detach() for name, x in given.leaves().items()}
    options = dict(given.options)
    seed = options.pop("dropout_seed", 0)
    options |= {name: leaves[name] for name in ("bias", "sink") if name in leaves}
    if seed:
        options["dropout_seed"] = seed % 2**62
    call = arguments(*(leaves[name] for name in "qkv"), **options)
    wanted = DISPATCHED.forward(*call)
    same(calls.forward(*call), wanted)
    flags = tuple(x is not None for x in call[:5])
    for dlse in (None, torch.ones_like(wanted[1])):
        back = of_backward(call, flags, dlse)
        same(calls.backward(*back), DISPATCHED.backward(*back))
    assert calls.seen == []


@torch.no_grad()
def test_only_wanted_gradients_in_a_list(calls):
    q, k, v = tensors(requires_grad=False)
    bias = normal(3, 3, seed=5)
    back = of_backward(arguments(q, k, v, bias=bias), [False, True, False, True, True])
    found = calls.backward(*back)
    assert type(found) is list and len(found) == 2
    same(found, DISPATCHED.backward(*back))
    assert calls.seen == []


def test_a_compiled_program_enters_no_python_of_the_package():
    for operator in (forward, backward):
        assert {operator: 1}[operator] and isinstance(operator._op.__self__, _core.DirectOperators)
    compiled = torch.compile(lambda q, k, v: rt.attention(q, k, v, causal=True), fullgraph=True,
                             backend="aot_eager")
    leaves, dout = tensors(), torch.ones(1, 2, 3, 8)

    def run(function):
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    run(compiled)
    entered = set()

    def profile(frame, event, argument):
        if event == "call" and "regard/torch" in frame.f_code.co_filename:
            entered.add(frame.f_code.co_name)

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        found = run(compiled)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert entered <= {"<lambda>"}  # which asks whether there are tangents
    same(found, run(lambda *given: rt.attention(*given, causal=True)))


def test_a_compiled_program_does_not_check_every_default():
    q, k, v = tensors(requires_grad=False)
    guards = torch._dynamo.explain(rt.attention)(q, k, v).out_guards
    assert 0 < len(guards) < 70 and not any("ARGUMENTS" in guard.name for guard in guards)


# ------------------------------------------------------------------------- what the dispatcher takes

def test_gradients_are_recorded(calls):
    q, k, v = tensors()
    out, lse = calls.forward(*arguments(q, k, v))
    assert out.requires_grad and lse.requires_grad and calls.seen == ["forward"]
    with torch.no_grad():
        assert not calls.forward(*arguments(q, k, v))[0].requires_grad
    assert calls.seen == ["forward"]
    with pytest.raises(regard.Unsupported, match="alibi_slopes"):
        calls.forward(*arguments(*(x.detach() for x in (q, k, v)), alibi_slopes=torch.ones(2).requires_grad_()))


def test_gradients_of_gradients_are_refused(calls):
    given = of_backward(arguments(*tensors()))
    with pytest.raises(regard.Unsupported, match="create_graph"):
        calls.backward(*given)[0].sum().backward()
    assert calls.seen == ["backward"]


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.seen.append(function)
        return function(*given, **(named or {}))


def test_modes_profiles_and_subclasses_see_the_operators(calls):
    call = arguments(*tensors(requires_grad=False))
    with Seeing() as mode:
        calls.forward(*call)
    assert mode.seen == [forward]
    with torch.profiler.profile() as profile:
        calls.forward(*call)
        calls.backward(*of_backward(call))
    assert {"regard::forward", "regard::backward"} <= {event.name for event in profile.events()}

    class Mine(torch.Tensor):
        pass

    assert type(calls.forward(call[0].as_subclass(Mine), *call[1:])[0]) is Mine


def test_other_tensors(calls):
    q, k, v = tensors(requires_grad=False)
    out, lse = calls.forward(*arguments(*(x.to("meta") for x in (q, k, v))))
    assert out.is_meta and lse.is_meta
    functional = torch._to_functional_tensor(q)
    torch._enable_functionalization(reapply_views=True)
    try:
        out, _ = calls.forward(*arguments(functional, k, v))
    finally:
        torch._disable_functionalization()
    assert torch._is_functional_tensor(out)
    assert calls.seen == ["forward", "forward"]


def test_autocast(calls):
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = calls.forward(*arguments(*tensors(requires_grad=False)))
    assert out.dtype == torch.bfloat16


def test_transforms_and_tangents_are_refused(calls):
    q, k, v = tensors(requires_grad=False)
    with pytest.raises(regard.Unsupported, match="torch.func"):
        torch.func.grad(lambda x: calls.forward(*arguments(x, k, v))[0].sum())(q)
    with forward_ad.dual_level(), pytest.raises(regard.Unsupported, match="tangent"), torch.no_grad():
        calls.forward(*arguments(forward_ad.make_dual(q, torch.ones_like(q)), k, v))


def outcome(call):
    try:
        return [x.tolist() for x in call()]
    except Exception as error:
        return type(error), str(error)


def test_arguments_that_the_schema_converts_or_refuses(calls):
    q, k, v = tensors(requires_grad=False)
    wanted, _ = calls.forward(*arguments(q, k, v, softcap=2.0, scale=1.0))
    assert torch.equal(calls.forward(*arguments(q, k, v, softcap=2, scale=1))[0], wanted)
    calls.forward(*arguments(q, k, v, window=(1, 1)))  # which (1, True) below must not find
    named = dict(zip(["q", "k", "v", *ARGUMENTS], arguments(q, k, v, softcap=2.0, scale=1.0)))
    assert torch.equal(calls.forward(**named)[0], wanted)
    assert calls.seen == ["forward", "forward"]
    for number, options in enumerate(({"causal": True}, {"window": 3.0}, {"window": (1, True)},
                                      {"out_type": 0.5}, {"backend": None}, {"threads": "1"},
                                      {"deterministic": 2.0}, {"sink": 1.0}), 3):
        outcomes = [outcome(lambda: function(*arguments(q, k, v, **options)))
                    for function in (calls.forward, DISPATCHED.forward)]
        assert outcomes[0] == outcomes[1] and len(calls.seen) == number
    back = of_backward(arguments(q, k, v))
    calls.seen.clear()
    with torch.no_grad():
        same(calls.backward([1, 1, 1, 0, 0], *back[1:]), calls.backward(*back))
    for wanted in ([True] * 4, None, (True, True, True, 0, 0)):
        outcomes = [outcome(lambda: function(wanted, *back[1:]))
                    for function in (calls.backward, DISPATCHED.backward)]
        assert outcomes[0] == outcomes[1]
    assert len(calls.seen) == 4


def test_a_list_is_read_each_time(calls):
    q, k, v = tensors(requires_grad=False)
    window = [0, 0]
    first, _ = calls.forward(*arguments(q, k, v, window=window))
    window[0] = 1
    second, _ = calls.forward(*arguments(q, k, v, window=window))
    assert not torch.equal(first, second)
    assert torch.equal(second, rt.attention(q, k, v, window=(1, 0))) and calls.seen == []


def test_many_combinations_of_options(calls):
    """More than are kept."""
    q, k, v = tensors(requires_grad=False)
    for _ in range(2):
        for number in range(100):
            scale = (1 + number) / 50
            assert torch.equal(calls.forward(*arguments(q, k, v, scale=scale))[0],
                               rt.attention(q, k, v, scale=scale))
    assert calls.seen == []


def test_errors_name_the_argument(calls):
    q, k, v = tensors(requires_grad=False)
    for call, argument in ((arguments(q, k, v, bias=torch.zeros(5, 1, 1, 1)), "bias"),
                           (arguments(q, k[..., :4], v), "k"),
                           (arguments(q, k, v, mask=torch.zeros(3, 3)), "mask"),
                           (arguments(q, k, v, backend="other"), "backend")):
        errors = []
        for function in (calls.forward, DISPATCHED.forward):
            with pytest.raises(regard.Error) as caught:
                function(*call)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1] and argument in errors[0][1]
