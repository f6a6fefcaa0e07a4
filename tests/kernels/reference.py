"""What `ragged_paged_attention` means, in plain NumPy.

Every key of a sequence is gathered, and each query row and head has one softmax over what it sees.
"""

import numpy as np
from jax.experimental import pallas as pl


def reference_attention(
    q,
    k_pages,
    v_pages,
    kv_lens,
    block_tables,
    cu_q_lens,
    num_seqs,
    *,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    """Compute (out[T, H, D], lse[T, H]) in float64 from arguments of `ragged_paged_attention`."""
    q, k_pages, v_pages = (np.asarray(x).astype(np.float64) for x in (q, k_pages, v_pages))
    k_pages, v_pages = _scaled(k_pages, k_scale), _scaled(v_pages, v_scale)
    kv_lens, block_tables, cu_q_lens = map(np.asarray, (kv_lens, block_tables, cu_q_lens))
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_pages.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for s in range(int(np.asarray(num_seqs).reshape(()))):
        start, stop, kv_len = int(cu_q_lens[s]), int(cu_q_lens[s + 1]), int(kv_lens[s])
        blocks = block_tables[s, : pl.cdiv(kv_len, block_size)]
        keys, values = (x[blocks].reshape(-1, kv_heads, head_dim) for x in (k_pages, v_pages))
        for row in range(start, stop):
            position = kv_len - (stop - row)
            first = 0 if window is None else max(position - window + 1, 0)
            if position < first:
                continue
            for h in range(num_heads):
                k, v = (x[first : position + 1, h * kv_heads // num_heads] for x in (keys, values))
                sink = None if sinks is None else sinks[h]
                out[row, h], lse[row, h] = _softmax(k @ q[row, h] * scale, v, soft_cap, sink)
    return out, lse


def _softmax(scores, values, soft_cap, sink):
    """Compute the softmax-weighted mean of the values and the log of the denominator."""
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    logits = scores if sink is None else np.append(scores, sink)
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    return np.exp(scores - lse) @ values, lse


def _scaled(pages, scale):
    if scale is None:
        return pages
    scale = np.asarray(scale).astype(pages.dtype)
    return pages * (scale[..., None] if scale.ndim else scale)
