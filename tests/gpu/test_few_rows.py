"""Decoding: few rows after many keys, the problems of the emulated machine's tests."""

import pytest

import cases
from test_emulated import FEW_ROWS, judge_forward
from test_emulated_stream_k import STREAMS, run


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", FEW_ROWS, ids=str)
@pytest.mark.parametrize("backend", ["cuda:mma"])
def test_few_rows(type, features, heads, sizes, dim, dim_v, backend):
    case = cases.make(features, type, sizes=sizes, heads=heads, dim=dim, dim_v=dim_v)
    judge_forward(case, backend)


@pytest.mark.parametrize("type, features, batch, heads, sizes, dim, dim_v, multiprocessors", STREAMS,
                         ids=str)
@pytest.mark.parametrize("backend", ["cuda:mma"])
def test_stream_k(type, features, batch, heads, sizes, dim, dim_v, multiprocessors, backend):
    case = cases.make(features, type, batch=batch, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    cases.compare(case, run(case, backend=backend, multiprocessors=multiprocessors))
