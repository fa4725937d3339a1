"""Whether each feature of a case moves the oracle's answer by far more than a result may be off.

A case in which a feature moves nothing would be passed by a library that ignores the feature.
"""

import numpy as np

import cases
import oracle

FAR = 8  # times the tolerance

# What the oracle is given where a feature is off, by the feature's key in cases.FEATURES.
OFF = {
    "causal": {"causal": "none"},
    "window": {"window": (-1, -1)},
    "softcap": {"softcap": 0.0},
    "scale": {"scale": None},
    "bias": {"bias": None},
    "mask": {"mask": None},
    "row_spans": {"row_spans": None},
    "key_spans": {"key_spans": None},
    "alibi": {"alibi_slopes": None},
    "sink": {"sink": None},
    "dropout": {"keep": None, "p": 0.0},
    "seqused": {"seqused_q": None, "seqused_k": None},
    "dlse": {"dlse": None},
    "continued": {"given_out": None, "given_lse": None},
    "positions": {"q_positions": None, "k_position": 0},
}


def cannot_move(case, key):
    """Where all scores are 0, a cap changes nothing, and dlse no gradient of q and k. Positions are
    read by few features; of dropout, the oracle is given the mask."""
    if key == "positions":
        return not any(case.spec.get(reader) for reader in ("causal", "window", "alibi"))
    return key in ("softcap", "dlse") and case.spec.get("scale") == 0


def moved(case, name, other):
    """By how many tolerances, at most, a result moves to the oracle's other answer."""
    want = case.truth[name]
    with np.errstate(invalid="ignore"):
        apart = np.abs(want - other)
    apart = np.where(np.isnan(apart), 0, apart)  # infinite in both
    where = cases.written(case, name)
    limit = np.broadcast_to(cases.tolerance(case, name, case.result_type(name)), want.shape)
    return (apart[where] / np.maximum(limit[where], 1e-300)).max(initial=0)


def check(case, results=None):
    """Fails where a feature of the case moves none of the results (by default any) far enough."""
    if case.is_sensitive:
        return
    names = results or list(case.truth)
    for key, values in OFF.items():
        if not case.spec.get(key) and case.spec.get(key) != 0.0 or cannot_move(case, key):
            continue
        other = oracle.attention(**(case.values | values))
        most = max(moved(case, name, other[name]) for name in names if name in other)
        assert most > FAR, (
            f"the case does not test {key}: without it no result moves by more than {most:.2g} "
            "tolerances")
    case.is_sensitive = True
