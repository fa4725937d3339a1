"""Dropout with a seed that a GPU's kernels read from memory, on the emulated machine: the bits of a
call with the same seed as a number."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import one_in
from solve import same_bits

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

SEED, OFFSET = 0xFEDCBA9876543210, 0x89ABCDEF

# Where the bits are drawn: by the lanes that apply them, by a warpgroup of their own, and for rows
# that are computed again, because a NaN lies in a hidden key.
CASES = [  # type, backend, features, options
    ("bf16", "mma", (), {}),
    ("bf16", "wgmma", (), {"sizes": (70, 133), "dim": 64}),
    ("f32", "simt", ("grouped",), {}),
    ("f16", "wgmma", ("bottom_right", "sink"), {"sizes": (40, 90), "dim": 128}),
    ("bf16", "wgmma", ("packed",), {"dim": 256}),
    ("f32", "wgmma", ("bottom_right",), {"sizes": (70, 133), "dim": 40}),
    ("f32", "mma", ("softcap",), {}),
    ("f16", "mma", ("seqused",), {"sizes": (6, 600), "dim": 48, "heads": (4, 2)}),
    ("f64", "simt", (), {}),
]


def results(case, seed, backend):
    case.options["dropout"] = 0.3, seed, OFFSET
    return cases.run(case, f"emulated:{backend}+sm_90")


@pytest.mark.parametrize("type, backend, features, sizes", one_in(5, CASES), ids=str)
def test_seed_in_memory(type, backend, features, sizes):
    case = cases.make(("dropout", *features), type, **sizes)
    case.options["deterministic"] = 1
    if "bottom_right" in features:  # rows that do not see the last key are computed again
        case.inputs["v"][..., -1, :1] = np.nan
    words = np.array([SEED & 0xFFFFFFFF, SEED >> 32], np.uint32)
    want = results(case, SEED, backend)
    same_bits(results(case, words, backend), want)
    words[1] ^= 1
    assert results(case, words, backend)["out"].tobytes() != want["out"].tobytes()
