"""The meaning of attention in NumPy: docs/semantics.md on whole matrices, one head at a time.

Shares no code and no shape of computation with the library: no blocks, no online softmax, no
intervals. In float64 it is the truth that tests compare with. With another `work` type, and a
`rnd` that rounds every intermediate matrix to the storage type, the same lines are the plain
unfused computation whose error is the yardstick of the chapter "Accuracy".

Values must be finite, except a bias of -inf. Whatever lies outside the real lengths comes back as
0 and means "not written".
"""

import numpy as np


class Head:
    """One (batch entry, query head): its matrices, scores and probabilities."""

    def __init__(self, q, k, v, bias, mask, slope, sink, z, scale, softcap, causal, window, places,
                 given, rnd):
        sq, sk = len(q), len(k)
        self.q, self.k, self.v, self.z, self.softcap, self.rnd = q, k, v, z, softcap, rnd
        self.scale = q.dtype.type(1 / np.sqrt(q.shape[1]) if scale is None else scale)
        i = np.arange(sq)[:, None]
        j = np.arange(sk)[None, :]
        # How far row i is ahead of key j: for ALiBi, and for what is visible.
        distance = i + sk - sq - j
        ahead = i - j if causal == "top_left" else distance
        if places is not None:
            distance = ahead = places[0][:, None] - places[1][None, :]
        # 1 and 2: the scaled, capped score and the slope of the cap.
        s = rnd(rnd(q @ k.T) * self.scale)
        if softcap > 0:
            s = rnd(softcap * np.tanh(s / softcap))
            self.slope = 1 - (s / softcap) ** 2
        # 3: bias and ALiBi.
        if bias is not None:
            s = rnd(s + bias)
        if slope is not None:
            s = rnd(s - slope * np.abs(distance).astype(s.dtype))
        # 4: visibility.
        visible = np.ones((sq, sk), bool)
        if causal != "none":
            visible &= ahead >= 0
        if window[0] >= 0:
            visible &= ahead <= window[0]
        if window[1] >= 0:
            visible &= -ahead <= window[1]
        if mask is not None:
            visible &= mask
        visible &= s != -np.inf
        # 5: lse and probabilities.
        s = np.where(visible, s, -np.inf)
        logits = s if sink is None else np.hstack([s, np.full((sq, 1), sink, s.dtype)])
        if given is not None:  # a result over other keys is one more logit, and its value is out
            logits = np.hstack([logits, given[1][:, None]])
        top = logits.max(axis=1, initial=-np.inf)
        safe = np.where(np.isfinite(top), top, 0)[:, None]
        with np.errstate(divide="ignore"):
            self.lse = np.log(np.exp(logits - safe).sum(axis=1)) + safe[:, 0]
        finite = np.where(np.isfinite(self.lse), self.lse, 0)[:, None]
        self.p = rnd(np.where(visible, np.exp(s - finite), 0))
        self.sink_p = None if sink is None else np.exp(sink - self.lse)
        # 6 and 7: dropout and the output.
        self.zp = self.p if z is None else rnd(z * self.p)
        self.out = rnd(self.zp @ v)
        if given is not None:
            self.given_p = rnd(np.exp(given[1][:, None] - finite))
            self.out = rnd(self.out + self.given_p * given[0])

    def backward(self, dout, dlse):
        """dq, dk, dv, ds (of the score after the cap) and dsink of this head."""
        rnd = self.rnd
        delta = rnd((dout * self.out).sum(axis=1)) - dlse
        dp = rnd(dout @ self.v.T)
        if self.z is not None:
            dp = rnd(self.z * dp)
        ds = rnd(self.p * (dp - delta[:, None]))
        dr = rnd(ds * self.slope) if self.softcap > 0 else ds
        dsink = None if self.sink_p is None else -(self.sink_p * delta).sum()
        return (rnd(self.scale * (dr @ self.k)), rnd(self.scale * (dr.T @ self.q)),
                rnd(self.zp.T @ dout), ds, dsink)


def shown(spans, length):
    """Which of `length` indices each row's spans hold: (..., 2 n) to (..., length)."""
    x = np.arange(length)
    begin, end = spans[..., 0::2, None], spans[..., 1::2, None]
    return ((begin <= x) & (x < end)).any(axis=-2)


def row_positions(blocks, batch, rows):
    """Of each row, (batch, rows), from those of the first of each 128."""
    each = np.repeat(np.asarray(blocks, np.int64), 128, axis=-1) + np.tile(
        np.arange(128), np.shape(blocks)[-1])
    return np.broadcast_to(each, (batch, each.shape[-1]))[:, :rows]


def attention(q, k, v, dout=None, dlse=None, *, bias=None, mask=None, row_spans=None,
              key_spans=None, alibi_slopes=None, sink=None,
              cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, seqused_q=None,
              seqused_k=None, scale=None, softcap=0.0, causal="none", window=(-1, -1), keep=None,
              p=0.0, q_positions=None, k_position=0, given_out=None, given_lse=None,
              work=np.float64, rnd=lambda x: x,
              head_type=Head):
    """A dict of out, lse and, given dout (and dlse), dq, dk, dv, dbias, dsink.

    q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D or Dv); packed: (total, H, D), lse (Hq, total).
    keep (B, Hq, Sq, Sk) is dropout's mask and p its realised probability. row_spans and key_spans
    broadcast to (B, Hq, Sq or Sk, 2 n); packed: to (Hq, total, 2 n). q_positions (blocks of 128) or
    (B, blocks). given_out and given_lse, as out and lse, are a result over other keys, which the
    call continues.
    """
    packed = cu_seqlens_q is not None
    q, k, v = (np.asarray(x).astype(work) for x in (q, k, v))
    heads = q.shape[1]
    group = heads // k.shape[1]
    batch = len(cu_seqlens_q) - 1 if packed else len(q)
    rows, cols = (max_seqlen_q, max_seqlen_k) if packed else (q.shape[2], k.shape[2])
    whole = (batch, heads, rows, cols)
    lse_shape = (heads, len(q)) if packed else q.shape[:3]
    result = {"out": np.zeros(q.shape[:-1] + v.shape[-1:], work), "lse": np.zeros(lse_shape, work)}
    if dout is not None:
        dout = np.asarray(dout).astype(work)
        dlse = np.zeros(lse_shape, work) if dlse is None else np.asarray(dlse).astype(work)
        result |= {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
        if sink is not None:
            result["dsink"] = np.zeros(heads, work)
        if bias is not None:
            result["dbias"] = np.zeros(bias.shape, work)

    def broadcast(x):
        return None if x is None else np.broadcast_to(x, whole)

    full_bias = broadcast(None if bias is None else np.asarray(bias).astype(work))
    full_mask, keep = broadcast(mask), broadcast(keep)
    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(np.asarray(alibi_slopes).astype(work), (batch, heads))

    def part(cu, used, b, length):
        start, end = (int(cu[b]), int(cu[b + 1])) if packed else (0, length)
        return slice(start, end if used is None else start + int(used[b]))

    positions = None if q_positions is None else row_positions(q_positions, batch, rows)
    for b in range(batch):
        at_q, at_k = part(cu_seqlens_q, seqused_q, b, rows), part(cu_seqlens_k, seqused_k, b, cols)
        pair = np.s_[: at_q.stop - at_q.start, : at_k.stop - at_k.start]
        for h in range(heads):
            g = h // group
            rows_at, keys_at = ((at_q, h), (at_k, g)) if packed else ((b, h, at_q), (b, g, at_k))
            lse_at = (h, at_q) if packed else rows_at
            seen = None if full_mask is None else full_mask[b, h][pair]
            for spans, at, length, axes in ((row_spans, at_q, at_k, (0, 1)),
                                            (key_spans, at_k, at_q, (1, 0))):
                if spans is None:
                    continue
                if packed:
                    of_head = np.broadcast_to(spans, (heads, *spans.shape[1:]))[h, at]
                else:
                    whole_axis = rows if axes == (0, 1) else cols
                    of_head = np.broadcast_to(
                        spans, (batch, heads, whole_axis, spans.shape[-1]))[b, h, at]
                by_spans = shown(of_head, length.stop - length.start).transpose(axes)
                seen = by_spans if seen is None else seen & by_spans
            z = None if keep is None else (keep[b, h][pair] / (1 - p)).astype(work)
            head = head_type(
                q[rows_at], k[keys_at], v[keys_at],
                None if full_bias is None else full_bias[b, h][pair],
                seen,
                None if alibi_slopes is None else alibi_slopes[b, h],
                None if sink is None else work(sink[h]), z, scale, softcap, causal, window,
                None if positions is None else
                (positions[b][pair[0]], k_position + np.arange(cols)[pair[1]]),
                None if given_out is None else
                (given_out[rows_at].astype(work), given_lse[lse_at].astype(work)), rnd)
            result["out"][rows_at] = head.out
            result["lse"][lse_at] = head.lse
            if dout is None:
                continue
            dq, dk, dv, ds, dsink = head.backward(dout[rows_at], dlse[lse_at])
            result["dq"][rows_at] = dq
            result["dk"][keys_at] += dk
            result["dv"][keys_at] += dv
            if sink is not None:
                result["dsink"][h] += dsink
            if bias is not None:
                # Summed over what bias broadcasts: an axis of size 1, or one that it lacks.
                at = np.zeros((1, 1, rows, cols), work)
                at[0, 0][pair] = ds
                shape = (1,) * (4 - bias.ndim) + bias.shape
                for axis in (2, 3):
                    if shape[axis] == 1:
                        at = at.sum(axis=axis, keepdims=True)
                view = result["dbias"].reshape(shape)
                view[b if shape[0] > 1 else 0, h if shape[1] > 1 else 0] += at[0, 0]
    return result
