"""Calls on NumPy's arrays go directly to the binding: what a steady call enters, and that results and
errors are the general path's. What is written to: test_numpy_direct_outputs.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import regard
from direct_cases import (CALL, NOT_PLAIN, Mine, arrays, backward_of, both, counts, entered, normal,
                          read_only, reversed_rows, spread, succeeded, unaligned)


def test_a_steady_call_enters_few_functions():
    q, k, v = arrays()
    out, lse = regard.attention(q, k, v, return_lse=True)
    used = counts(2)
    assert entered(lambda: regard.attention(q, k, v)) == (2, 0)
    assert entered(lambda: regard.attention(q, k, v, out=out, lse=lse)) == (2, 0)
    assert entered(lambda: regard.attention(q, k, v, causal=True)) <= (3, 1)
    assert entered(lambda: regard.attention(q, k, v, seqused_k=used)) <= (3, 1)
    # The last function makes the Gradients, of five fields.
    assert entered(lambda: regard.attention_backward(q, q, k, v, out, lse)) <= (4, 5)


# ----------------------------------------------------------------------------------------- results

OPTIONS = [
    {}, {"return_lse": True}, {"causal": True, "window": (1, None)}, {"layout": "bshd"},
    {"layout": "bshd", "return_lse": True}, {"dropout_p": 0.5, "dropout_seed": 9},
    {"dropout_p": 0.5}, {"out_type": np.float32}, {"threads": 1},
    {"backend": "reference"}, {"bias": normal(3, 3), "softcap": 2.0, "scale": 0.3},
    {"sink": normal(2), "mask": normal(3, 3) > -1}, {"alibi_slopes": normal(2), "mask": None},
    {"row_spans": counts(0, 2, 1, 3, 0, 3).reshape(3, 2)},
    {"key_spans": counts(0, 2, 1, 3, 0, 3).reshape(3, 2), "sink": normal(2)},
    {"q_positions": counts(5), "k_position": 4, "causal": "top_left"},
    {"seqused_k": counts(2), "return_lse": True}, {"seqused_q": counts(2), "return_lse": True},
    {"seqused_q": counts(0), "seqused_k": counts(0), "return_lse": True, "sink": normal(2)},
    {"seqused_q": counts(2), "seqused_k": counts(2), "causal": True, "bias": normal(1, 2, 3, 3)},
    {"seqused_q": counts(1), "layout": "bshd", "return_lse": True, "out_type": np.float32}]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("type", [np.float16, np.float32, np.float64])
def test_both_ways_give_the_same_bits(options, type):
    q, k, v = arrays(type)
    if options.get("layout") == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {name: x.astype(type) if name == "bias" else x for name, x in options.items()}
    found, is_direct = both(lambda: regard.attention(q, k, v, **options))
    assert is_direct and succeeded(found)
    options = {name: x for name, x in options.items() if name != "return_lse"}
    options["gradient_type"] = options.pop("out_type", None)
    given = backward_of(q, k, v, type, **{x: y for x, y in options.items() if x != "gradient_type"})
    found, is_direct = both(lambda: regard.attention_backward(*given, **options))
    assert is_direct and succeeded(found)
    assert (found[3] is not None, found[4] is not None) == ("bias" in options, "sink" in options)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"layout": "bshd", "out_type": np.float32}, {"alibi_slopes": normal(2)},
    {"seqused_q": counts(1, 2), "seqused_k": counts(1, 0)}, {"sink": normal(2)},
    {"max_seqlen_q": 4, "max_seqlen_k": 5}], ids="-".join)
def test_packed_sequences_too(options):
    q, k, v = normal(6, 2, 8), normal(6, 1, 8), normal(6, 1, 4)  # the last row is of no sequence
    packed = {"cu_seqlens_q": counts(0, 3, 5), "cu_seqlens_k": counts(0, 2, 5), "max_seqlen_q": 3,
              "max_seqlen_k": 3, **options}
    for return_lse in (False, True):
        found, is_direct = both(lambda: regard.attention(q, k, v, return_lse=return_lse, **packed))
        assert is_direct and succeeded(found)
        assert not found[0][5].any()
    assert (found[1][:, 5] == -np.inf).all()
    packed["gradient_type"] = packed.pop("out_type", None)
    given = backward_of(q, k, v, **{x: y for x, y in packed.items() if x != "gradient_type"})
    found, is_direct = both(lambda: regard.attention_backward(*given, **packed))
    assert is_direct and succeeded(found)
    assert not any(x[5].any() for x in found[:3])


def test_nan_and_infinity():
    q, k, v = arrays()
    q[0, 0, 0, 3], k[0, 1, 1, 2], v[0, :, 2] = np.inf, np.nan, np.nan  # v: hidden
    options = {"seqused_k": counts(2)}
    found, is_direct = both(lambda: regard.attention(q, k, v, return_lse=True, **options))
    assert is_direct and np.isnan(found[0]).any() and not np.isnan(found[0]).all()
    given = backward_of(q, k, v, **options)
    for change in (lambda lse: lse, lambda lse: np.full_like(lse, -np.inf), lambda lse: lse * np.nan):
        given[5] = change(given[5])
        _, is_direct = both(lambda: regard.attention_backward(*given, **options))
        assert is_direct


# -------------------------------------------------------------------------- what arrays may be like

@pytest.mark.parametrize("change", [*NOT_PLAIN, lambda x: None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_plain_takes_the_general_path(change, place):
    given = arrays()
    given[place] = change(given[place])
    _, is_direct = both(lambda: regard.attention(*given))
    assert not is_direct


@pytest.mark.parametrize("change", NOT_PLAIN)
@pytest.mark.parametrize("name", [*CALL[:5]])
def test_what_is_not_plain_takes_the_general_path_backward(change, name):
    given = dict(zip(CALL, backward_of(*arrays())))
    given[name] = change(given[name])
    _, is_direct = both(lambda: regard.attention_backward(**given))
    assert not is_direct


@pytest.mark.parametrize("name", CALL)
def test_none_takes_the_general_path_backward(name):
    given = dict(zip(CALL, backward_of(*arrays()))) | {name: None}
    found, is_direct = both(lambda: regard.attention_backward(**given))
    assert issubclass(found[0], regard.InvalidArgument) and not is_direct


@pytest.mark.parametrize("change", [
    lambda x: x.view(Mine), unaligned, lambda x: x.astype(">f4"), np.ma.masked_array,
    lambda x: x[:, :, :2], lambda x: x[0], lambda x: x.astype(np.float64), lambda x: x.tolist()])
@pytest.mark.parametrize("name", ["lse", "dlse", "delta"])
def test_one_number_a_row_is_read_as_the_general_path_reads_it(change, name):
    given = dict(zip(CALL, backward_of(*arrays())))
    more = {} if name == "lse" else {name: normal(1, 2, 3)}
    if name == "delta":
        given["out"] = None
    _, is_direct = both(lambda: regard.attention_backward(**given | more))
    assert is_direct
    for same in (lambda x: x[..., ::-1], read_only, lambda x: np.repeat(x, 2, -1)[..., ::2]):
        _, is_direct = both(lambda: regard.attention_backward(**given | more | {
            name: same((given | more)[name].copy())}))
        assert is_direct
    more[name] = change((given | more)[name])
    _, is_direct = both(lambda: regard.attention_backward(**given | more))
    assert not is_direct


@pytest.mark.parametrize("change", [spread, reversed_rows, read_only, lambda x: x[:, ::-1]])
@pytest.mark.parametrize("name", CALL[:5])
def test_other_strides_are_read_directly(change, name):
    given = dict(zip(CALL, backward_of(*arrays())))
    given[name] = change(given[name].copy())
    found, is_direct = both(lambda: regard.attention_backward(**given))
    assert is_direct and succeeded(found)


OPTION_SHAPES = {"bias": (3, 3), "mask": (3, 3), "row_spans": (3, 2), "key_spans": (3, 2),
                 "v": (1, 2, 3, 8), "sink": (2,), "alibi_slopes": (2,), "q_positions": (1,),
                 "seqused_q": (1,), "seqused_k": (1,)}
ELEMENT_TYPES = [np.float16, np.float32, np.float64, bool, np.int32, np.int64, np.uint32, ">i4"]


@pytest.mark.parametrize("name", OPTION_SHAPES)
@pytest.mark.parametrize("type", ELEMENT_TYPES)
def test_each_element_type_has_the_general_paths_outcome(name, type):
    for own in (np.float32, np.float64):
        plain = dict(zip(CALL, backward_of(*arrays(own), own)))
        wrong = {name: np.ones(OPTION_SHAPES[name], type)}
        both(lambda: regard.attention(**{x: plain[x] for x in "qkv"} | wrong))
        both(lambda: regard.attention_backward(**plain | wrong))


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse", "delta"])
@pytest.mark.parametrize("type", ELEMENT_TYPES)
def test_each_element_type_backward(name, type):
    for own in (np.float16, np.float32, np.float64):
        given = dict(zip(CALL, backward_of(*arrays(own), own))) | {"dlse": None, "delta": None}
        given[name] = (normal(1, 2, 3) if given[name] is None else given[name]).astype(type)
        if name == "delta":
            given["out"] = None
        both(lambda: regard.attention_backward(**given))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
@pytest.mark.parametrize("change", [
    lambda x: x.astype(np.int64), lambda x: x.astype(np.uint32), lambda x: x.astype(">i4"),
    lambda x: x[:1], lambda x: x[None], lambda x: x[:0], lambda x: x + 9, lambda x: x - 9,
    lambda x: x.tolist(), lambda x: x.view(Mine), lambda x: np.repeat(x, 2)[::2],
    lambda x: x[::-1], lambda x: None], ids=range(13))
def test_tables_of_sequences(name, change):
    q, k, v = normal(6, 2, 8), normal(6, 1, 8), normal(6, 1, 4)
    given = {"cu_seqlens_q": counts(0, 3, 5), "cu_seqlens_k": counts(0, 2, 5), "max_seqlen_q": 3,
             "max_seqlen_k": 3, "seqused_q": counts(3, 1), "seqused_k": counts(1, 3)}
    arguments = backward_of(q, k, v, **given)
    given[name] = change(given[name])
    found, is_direct = both(lambda: regard.attention(q, k, v, **given))
    assert not is_direct or succeeded(found)
    found, is_direct = both(lambda: regard.attention_backward(*arguments, **given))
    assert not is_direct or succeeded(found)


@pytest.mark.parametrize("more", [
    {"max_seqlen_q": None}, {"max_seqlen_k": None}, {"max_seqlen_q": 0, "max_seqlen_k": 0},
    {"max_seqlen_q": True}, {"max_seqlen_q": 2, "causal": True}, {"seqused_q": counts(0)},
    {"seqused_q": counts(0), "causal": True}, {"mask": np.ones((3, 3), bool)}], ids="-".join)
def test_what_packed_sequences_need(more):
    q = normal(3, 2, 8)
    given = {"cu_seqlens_q": counts(0, 0), "cu_seqlens_k": counts(0, 0), "max_seqlen_q": 3,
             "max_seqlen_k": 3}
    arguments = backward_of(q, q, q, **given)
    both(lambda: regard.attention(q, q, q, **given | more))
    both(lambda: regard.attention_backward(*arguments, **given | more))


# --------------------------------------------------------------------------------- values of options

WRONG = [
    {"cause": True}, {"causal": 1}, {"window": (1, True)}, {"softcap": True}, {"threads": True},
    {"threads": -1}, {"backend": "gpu"}, {"dropout_p": 1.5}, {"scale": np.float32(0.5)},
    {"window": [1, 2]}, {"mask": np.ones((2, 2), bool)}, {"seqused_q": counts(4)},
    {"seqused_k": counts(2), "causal": True}, {"seqused_q": [2]}, {"max_seqlen_q": -1},
    {"layout": "sbhd"}, {"multiprocessors": False}, {"multiprocessors": 0.0},
    {"multiprocessors": 1}, {"multiprocessors": np.zeros(2)}, {"k_position": 4, "causal": True},
    {"threads": np.int64(1)}, {"scale": 0.0}, {"scale": -0.0}]


def refused_or_general(call):
    q, k, v = arrays()
    regard.attention(q, k, v, causal=True, window=(1, 1), softcap=1.0, threads=1)  # is kept
    _, is_direct = both(call)
    assert not is_direct


@pytest.mark.parametrize("options", [
    *WRONG, {"return_lse": 1}, {"out_type": "int8"}, {"out_type": "bf16"}, {"continue_from": 0},
    {"out_type": np.float32, "out": normal(1, 2, 3, 8)}], ids="-".join)
def test_refused_calls_have_the_general_paths_outcome(options):
    q, k, v = arrays()
    refused_or_general(lambda: regard.attention(q, k, v, **options))


@pytest.mark.parametrize("options", [
    *WRONG, {"gradients": "dq"}, {"gradients": ("cause",)}, {"gradients": ("dbias",)},
    {"gradients": (1,)}, {"gradients": ([],)}, {"gradients": np.array(["dq"])},
    {"gradients": [np.array("dq")]}, {"gradients": (np.array(["dk"]),)},
    {"gradient_type": "int8"}, {"gradient_type": "bf16"}, {"accumulate": True}, {"accumulate": 0},
    {"accumulate": 1, "into": regard.Gradients(dq=normal(1, 2, 3, 8))},
    {"into": (normal(1, 2, 3, 8),)},
    {"into": SimpleNamespace(dq=normal(1, 2, 3, 8), dk=None, dv=None, dbias=None, dsink=None)},
    {"into": regard.Gradients(dbias=normal(3, 3))},
    {"into": regard.Gradients(dq=normal(1, 2, 3, 8)), "gradients": ("dk",)},
    {"into": regard.Gradients(dq=normal(1, 2, 3, 8)), "gradient_type": np.float32},
    {"into": regard.Gradients(dq=normal(1, 2, 3, 8)), "gradient_type": np.float64},
    {"delta": normal(1, 2, 3)}, {"dlse": 1.0}], ids="-".join)
def test_refused_gradients_have_the_general_paths_outcome(options):
    given = backward_of(*arrays())
    refused_or_general(lambda: regard.attention_backward(*given, **options))


def test_an_iterator_of_gradients_is_read_once():
    given = backward_of(*arrays())
    found, is_direct = both(lambda: regard.attention_backward(*given, gradients=iter(["dv", "dq"])))
    assert not is_direct and [x is None for x in found] == [False, True, False, True, True]


def test_a_number_that_changes_in_place_is_read_each_time():
    q, k, v = arrays()
    scale = np.array(0.5)
    first = regard.attention(q, k, v, scale=scale)
    scale[...] = 2.0
    assert not np.array_equal(regard.attention(q, k, v, scale=scale), first)
