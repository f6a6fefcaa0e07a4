"""What `ragged_paged_attention` means, in plain numpy: gather every key of a sequence, then one softmax a query row."""

import numpy as np


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
    dtype=np.float64,
):
    """The arguments of `ragged_paged_attention`, computed in `dtype`: (out[T, H, D], lse[T, H]), both of `dtype`."""
    q, k_pages, v_pages = (np.asarray(x).astype(dtype) for x in (q, k_pages, v_pages))
    k_pages, v_pages = _scaled(k_pages, k_scale), _scaled(v_pages, v_scale)
    kv_lens, block_tables, cu_q_lens = (np.asarray(x) for x in (kv_lens, block_tables, cu_q_lens))
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = k_pages.shape[1:3]
    group = num_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros(q.shape, dtype)
    lse = np.full((num_tokens, num_heads), -np.inf, dtype)
    for s in range(int(np.asarray(num_seqs).reshape(()))):
        start, stop, kv_len = int(cu_q_lens[s]), int(cu_q_lens[s + 1]), int(kv_lens[s])
        blocks = block_tables[s, : -(-kv_len // block_size)]
        keys = k_pages[blocks].reshape(-1, kv_heads, head_dim)
        values = v_pages[blocks].reshape(-1, kv_heads, head_dim)
        for row in range(start, stop):
            position = kv_len - (stop - row)
            first = 0 if window is None else max(position - window + 1, 0)
            if position < first:
                continue
            for h in range(num_heads):
                scores = keys[first : position + 1, h // group] @ q[row, h] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                logits = scores if sinks is None else np.append(scores, np.asarray(sinks, dtype)[h])
                lse[row, h] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
                out[row, h] = np.exp(scores - lse[row, h]) @ values[first : position + 1, h // group]
    return out, lse


def _scaled(pages, scale):
    if scale is None:
        return pages
    scale = np.asarray(scale).astype(pages.dtype)
    return pages * (scale[..., None] if scale.ndim else scale)
