"""Adversarial inputs on the emulated GPU, of each family: a few of test_adversarial.py's.

As test_emulated.py, whose environment these tests need.
"""

import pytest

import regard_ctypes as regard
import test_adversarial as adversarial
from selection import mostly_exhaustive, one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

FAMILIES = [("mma", "bf16"), ("mma", "f32"), ("wgmma", "bf16"), ("wgmma", "f32"), ("simt", "f64")]


def each_family(first):
    """All families; in `make test` each second one, in turn with that of another kind of input."""
    return pytest.mark.parametrize("family, type", one_in(2, FAMILIES, first))


def backend(family):
    return f"emulated:{family}+sm_90+mixed"


@each_family(0)
@pytest.mark.parametrize("depth", mostly_exhaustive([100, 2000], 2000))
def test_rows_far_below_zero(depth, family, type):
    adversarial.test_rows_far_below_zero(depth, ("sink",), type, backend(family))


@each_family(1)
@pytest.mark.parametrize("sizes", one_in(2, [((64, 192),), ((192, 64),)]), ids=str)
def test_half_a_tile_behind_whole_ones(sizes, family, type):
    adversarial.test_half_a_tile_behind_whole_ones(sizes, ("bottom_right",), type, backend(family))


@each_family(0)
def test_a_tenth_of_the_sequences_is_empty(family, type):
    adversarial.test_a_tenth_of_the_sequences_is_empty("both", type, backend(family))


@each_family(1)
@pytest.mark.parametrize("stride", [0, 99990001])
def test_strides_of_axes_of_one(stride, family, type):
    base = adversarial.ONES[0]
    if family == "wgmma":  # TMA takes strides of whole multiples of 16 bytes
        stride = stride // 8 * 8
    adversarial.test_strides_of_axes_of_one(base, stride, type, backend(family))
