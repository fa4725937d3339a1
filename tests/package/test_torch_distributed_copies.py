"""regard.torch.distributed.copies: wide elements change no bit, whatever the layouts; and steps of copy
engines that cannot be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import regard  # noqa: E402
from regard import _core  # noqa: E402
from regard.torch.distributed import copies  # noqa: E402

TYPES = [torch.bfloat16, torch.float32, torch.float64, torch.bool]


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [16, 13], ids=["whole", "odd"])
@pytest.mark.parametrize("first", [0, 16, 1])
def test_layouts(dtype: torch.dtype, size: int, first: int) -> None:
    x = random(torch.int8, 3, 4, 5, 64 * dtype.itemsize).view(dtype)[..., first:first + size]
    x = x.movedim(2, 0)
    to = torch.zeros(5, 3, 4, 2 * size, dtype=dtype)
    copies.copy(to[..., size:], x)
    as_bytes = [one.contiguous().view(torch.int8) for one in (to[..., size:], x)]
    assert torch.equal(*as_bytes)
    assert not to[..., :size].any()


def test_which_are_wide() -> None:
    x = torch.zeros(4, 6, 16, dtype=torch.bfloat16)
    for one, is_wide in ((x, True), (x.transpose(0, 1), True), (x[..., 8:], True), (x[:0], True),
                         (x[..., 1:9], False), (x.transpose(1, 2), False), (x[..., :4], False),
                         (torch.zeros(4, 12).to(torch.bfloat16), False), (x[0, 0, 0], False)):
        assert (copies._widened(one) is not None) == is_wide, (one.shape, one.stride())


def test_lazily_negated_and_graded() -> None:
    negated = torch.complex(torch.ones(4, 8), torch.ones(4, 8)).conj().imag
    to = torch.empty(4, 8)
    copies.copy(to, negated)
    assert (to == -1).all()
    graded = torch.ones(4, 8, requires_grad=True)
    with torch.no_grad():
        copies.copy(to, graded)
    assert (to == 1).all()


def test_steps_name_addresses_that_a_run_has() -> None:
    steps = _core.GpuSteps()
    steps.copy((0, 0, 4), (2, 0, 4), 4, 1)
    with pytest.raises(regard.InvalidArgument, match="addresses = 2 of them: are too few for address 2"):
        steps.run([0, 0], 1, 0, 0)
    with pytest.raises(TypeError):
        steps.write((0, -1))
