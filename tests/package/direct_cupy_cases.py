"""Direct calls on CuPy's arrays, on the emulated GPU: `python direct_cupy_cases.py`, in a process of
its own, because the driver is found by LD_LIBRARY_PATH."""

from __future__ import annotations

import fake_cupy
import numpy as np
import regard
from direct_cases import counts, normal, outcome
from fake_cupy import to_gpu, to_host


def both(call):
    """The results, which the direct path gave, and which the general path gives too."""
    found, is_direct = outcome(call)
    wanted, _ = outcome(call, passes=())
    assert is_direct and len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert to_host(a).tobytes() == to_host(b).tobytes()
    return found


def passes(q, k, v, **options):
    """Both passes, with results of their own and with the caller's; these are the same."""
    made = both(lambda: regard.attention(q, k, v, return_lse=True, **options))
    out, lse = (x.copy() for x in made)
    both(lambda: regard.attention(q, k, v, out=out, lse=lse, **options))
    assert all(to_host(x).tobytes() == to_host(y).tobytes() for x, y in zip(made, (out, lse)))
    backward = (q, q, k, v, out, lse)
    options["deterministic"] = True
    found = both(lambda: regard.attention_backward(*backward, **options))
    into = regard.Gradients(*(None if x is None else x.copy() for x in found))
    again = both(lambda: regard.attention_backward(*backward, into=into, **options))
    assert again == (into.dq, into.dk, into.dv, into.dbias, into.dsink)
    assert all(x is None or to_host(x).tobytes() == to_host(y).tobytes()
               for x, y in zip(found, again))
    return made, found


def main():
    before = fake_cupy.launches()
    rows = [to_gpu(normal(1, 2, 5, 32)) for _ in range(3)]
    passes(*rows)
    passes(*rows, bias=to_gpu(normal(5, 5)), sink=to_gpu(normal(2)), layout="bhsd")
    (out, lse), found = passes(*rows, seqused_q=to_gpu(counts(3)), seqused_k=to_gpu(counts(4)))
    assert not to_host(out)[:, :, 3:].any() and (to_host(lse)[:, :, 3:] == -np.inf).all()
    assert not to_host(found[0])[:, :, 3:].any() and not to_host(found[1])[:, :, 4:].any()
    packed = [to_gpu(normal(6, 2, 32)) for _ in range(3)]
    begins = to_gpu(counts(0, 2, 5))  # the last row is of no sequence
    (out, lse), _ = passes(*packed, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=3,
                           max_seqlen_k=3, causal=True)
    assert not to_host(out)[5].any() and (to_host(lse)[:, 5] == -np.inf).all()
    assert fake_cupy.launches() > before


if __name__ == "__main__":
    main()
