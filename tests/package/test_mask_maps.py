"""Masks keep their tile maps: on the tests' own GPUs, and PyTorch's side of it on the CPU."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from fake_process import BUILD, run
from regard import masks


@pytest.mark.parametrize("name", [
    "reused", "on_streams", "while_captured", "bounded", "memory_goes_with_the_mask", "copies",
    "pickled", "matrices_are_not_kept", "positions", "changed", "no_memory"])
def test_on_the_fake_gpu(name, tmp_path):
    run("mask_map_cases.py", name, folders=["fake/driver", "fake/nvrtc"],
        REGARD_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("chip", ["sm_86", "sm_90"])
def test_same_results_on_the_emulated_gpu(chip):
    run("mask_map_cases.py", "same_results", folders=["emulated_gpu"], REGARD_EMULATED_CHIP=chip,
        REGARD_CACHE_DIR=str(BUILD / "emulated_kernels/of_masks"))


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_versions_of_tensors(torch):
    from regard.mask_maps import _of_torch

    spans, dense = torch.zeros((5, 2), dtype=torch.int32), torch.ones((5, 5), dtype=torch.bool)
    version = _of_torch([spans, dense], 0)["version"]
    seen = [version()]
    for change in (lambda: spans.add_(1), lambda: dense[2].fill_(False),
                   lambda: dense.view(-1).copy_(torch.zeros(25))):
        change()
        seen.append(version())
    with torch.inference_mode():
        dense.zero_()
        seen.append(version())
        own = torch.zeros((5, 2), dtype=torch.int32)
    assert len(set(seen)) == len(seen) and version() == version()
    assert _of_torch([own], 0)["version"]() == ()


def test_copies_of_masks(torch):
    mask = masks.documents(torch.tensor([0, 3, 8], dtype=torch.int32), 8)
    dense = masks.from_dense(torch.tril(torch.ones(8, 8, dtype=torch.bool)))
    for one in (mask, dense, masks.Mask(8, 8, causal=True)):
        for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert np.array_equal(same.to_dense(), one.to_dense()) and repr(same) == repr(one)
    assert copy.copy(mask).row_spans is mask.row_spans


def test_masks_made_in_compiled_programs(torch):
    import regard.torch as rt

    def attend(q, cuts):
        made = (masks.causal_documents(cuts, 8), masks.chunks(8, 3, like=q) & masks.sliding(8, 3),
                masks.Mask(8, 8, causal=True))
        return torch.stack([rt.attention(q, q, q, mask=mask) for mask in made])

    q, cuts = torch.randn(1, 2, 8, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, cuts), attend(q, cuts))
