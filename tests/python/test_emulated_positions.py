"""Rows with positions on the emulated GPU: several blocks of 128 rows with gaps between them."""

import ctypes
import mmap

import numpy as np
import pytest

import cases
import regard_ctypes as regard
import sensitivity
from selection import one_in
from solve import normal, problem, solve
from test_emulated import judge
from test_emulated import pytestmark as pytestmark

# Each with what reads positions: intervals, ALiBi, dropout; and with other walks over tiles.
FEATURES = [
    ("positions", "top_left"),
    ("positions", "window", "grouped"),
    ("positions", "top_left", "alibi_batch", "softcap"),
    ("positions", "window", "dropout", "sink"),
    ("positions", "top_left", "mask", "row_span"),
    ("positions", "window", "alibi", "dropout", "seqused", "bias_head"),
]
FAMILIES = [("wgmma", "bf16", 64), ("wgmma", "f32", 64), ("mma", "f16", 64), ("mma", "bf16", 128),
            ("wgmma", "f16", 128), ("simt", "f32", 40)]


@pytest.mark.parametrize("family, type, dim, features, deterministic", one_in(5, (
    (*family, features, deterministic) for family in FAMILIES for features in FEATURES
    for deterministic in (False, True))))
def test_blocks_apart(family, type, dim, features, deterministic):
    case = cases.make(features, type, sizes=(330, 420), dim=dim, batch=2)
    sensitivity.check(case)
    chip = "sm_90" if family == "wgmma" else "sm_80"
    judge(case, f"emulated:{family}+{chip}+mixed+3", deterministic)


@pytest.mark.parametrize("family, type, dim", [("wgmma", "bf16", 64), ("mma", "f16", 64)])
@pytest.mark.parametrize("starts", [[512, 0, 100], [-2**31, 2**31 - 1, 0]])
def test_a_wrong_table_ends(starts, family, type, dim):
    """On a GPU nobody checks the table: results are undefined, but no block waits for a turn that
    never comes, and no memory is touched that is not the call's."""
    case = cases.make(("positions", "top_left"), type, sizes=(330, 1000), dim=dim)
    case.inputs["q_positions"] = np.int32(starts)
    case.options |= {"deterministic": 1, "k_position": 0}
    chip = "sm_90" if family == "wgmma" else "sm_80"
    results = cases.run(case, f"emulated:{family}+{chip}+mixed", guard=True)
    assert all(results.keeps_between(name) for name in results)
    assert regard.load(results["out"]).shape == case.truth["out"].shape


@pytest.mark.parametrize("sizes, starts, options", [
    ((130, 130), [[0, 128], [200, 400]], {"causal": "top_left"}),
    ((256, 128), [[936, 2000], [0, 1000]], {"window": (10, 10), "k_position": 1000})])
def test_dbias_where_batch_entries_have_positions_of_their_own(sizes, starts, options):
    """Blocks that sum dbias over the batch in a cluster must walk the same tiles."""
    arrays = problem(2, 1, 1, *sizes, 64, type="bf16")
    arrays["bias"] = normal(1, 1, sizes[0], round_up(sizes[1], 8), type="bf16", seed=9)[..., :sizes[1]]
    arrays["q_positions"] = np.int32(starts)
    wanted, found = (solve(**arrays, **options, backend=backend)
                     for backend in ("reference", "emulated:wgmma+sm_90+mixed"))
    for name in ("out", "dq", "dk", "dv", "dbias"):
        exact = regard.load(wanted[name])
        assert np.abs(regard.load(found[name]) - exact).max() < 0.03 * np.abs(exact).max(), name


@pytest.mark.parametrize("rows, length", [(192, 200), (256, 300)])
def test_rows_past_the_last_read_no_position(rows, length):
    """Tiles of more rows than a block of positions; the table ends at a page that nobody may read."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    behind = ctypes.c_void_p(begin + mmap.PAGESIZE)
    no_access = 0
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), no_access) == 0
    blocks = round_up(length, 128) // 128
    starts = np.frombuffer(pages, np.int32, blocks, mmap.PAGESIZE - 4 * blocks)
    starts[:] = 128 * np.arange(blocks)
    arrays = problem(1, 1, 1, length, length, 32, type="bf16")
    del arrays["dout"]
    wanted, found = (solve(**arrays, causal="top_left", q_positions=starts, backend=backend)["out"]
                     for backend in ("reference", f"emulated:wgmma@rows={rows}+sm_90+mixed"))
    assert np.abs(regard.load(found) - regard.load(wanted)).max() < 0.02


def round_up(x, step):
    return -(-x // step) * step
