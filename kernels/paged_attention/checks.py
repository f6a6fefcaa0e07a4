"""What the public calls ask of their arguments.

Each check raises a TypeError or ValueError that names the argument and its value.
"""

import math
import numbers

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

type AnyArray = Array | np.ndarray  # what the public calls accept

_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_COMPUTED = ("float32", "bfloat16", "float16", "float64")
_LARGEST = float(jnp.finfo(jnp.float32).max)
_INT32 = jnp.iinfo(jnp.int32)


def check_attention(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks) -> None:
    """Check the arrays of `ragged_paged_attention`."""
    check_ranks(q=(q, "[T, H, D]"), k_pages=(k_pages, "[N, block_size, KV, D]"))
    check_index(kv_lens, block_tables, cu_q_lens, num_seqs)
    _check_heads(q, k_pages)
    _check_is_array("v_pages", v_pages)
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages has shape {v_pages.shape}; expected {k_pages.shape}")
    _check_dtypes(q, k_pages, v_pages)
    if sinks is not None:
        _check_sinks(sinks, q.shape[1])


def _check_heads(q, k_pages) -> None:
    num_heads, head_dim = q.shape[1:]
    kv_heads, kv_head_dim = k_pages.shape[2:]
    if 0 in (num_heads, head_dim):
        raise ValueError(f"q has shape {q.shape}; expected at least one head and one dimension")
    if kv_head_dim != head_dim:
        raise ValueError(
            f"k_pages has head_dim {kv_head_dim}; expected {head_dim}, the head_dim of q"
        )
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(
            f"q has {num_heads} heads; expected a multiple of the {kv_heads} KV heads of k_pages"
        )


def _check_dtypes(q, k_pages, v_pages) -> None:
    if q.dtype.name not in _COMPUTED:
        raise TypeError(f"q has dtype {q.dtype}; expected {', '.join(_COMPUTED)}")
    is_floating = jnp.issubdtype(k_pages.dtype, jnp.floating)
    is_narrower = is_floating and k_pages.dtype.itemsize < q.dtype.itemsize
    if not (k_pages.dtype == q.dtype or is_narrower or k_pages.dtype.name in _QUANTISED):
        raise TypeError(
            f"k_pages has dtype {k_pages.dtype}; expected {q.dtype}, the dtype of q,"
            " a narrower floating dtype, or int8"
        )
    if v_pages.dtype != k_pages.dtype:
        raise TypeError(
            f"v_pages has dtype {v_pages.dtype}; expected {k_pages.dtype}, the dtype of k_pages"
        )


def _check_sinks(sinks, num_heads: int) -> None:
    _check_is_array("sinks", sinks)
    if sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}; expected ({num_heads},), one for each head of q"
        )
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {sinks.dtype}; expected a floating dtype")


def check_index(kv_lens, block_tables, cu_q_lens, num_seqs) -> None:
    """Check the index arrays, which `plan_attention` takes too."""
    check_ranks(
        kv_lens=(kv_lens, "[S]"),
        block_tables=(block_tables, "[S, M]"),
        cu_q_lens=(cu_q_lens, "[S + 1]"),
    )
    if not isinstance(num_seqs, numbers.Integral):
        _check_is_array("num_seqs", num_seqs, "a scalar or (1,)")
        if num_seqs.shape not in ((), (1,)):
            raise ValueError(f"num_seqs has shape {num_seqs.shape}; expected a scalar or (1,)")
    seqs = kv_lens.shape[0]
    if block_tables.shape[0] != seqs:
        expected = (seqs, block_tables.shape[1])
        raise ValueError(f"block_tables has shape {block_tables.shape}; expected {expected}")
    if cu_q_lens.shape != (seqs + 1,):
        raise ValueError(f"cu_q_lens has shape {cu_q_lens.shape}; expected {(seqs + 1,)}")
    integers = dict(
        kv_lens=kv_lens, block_tables=block_tables, cu_q_lens=cu_q_lens, num_seqs=num_seqs
    )
    for name, x in integers.items():
        if not isinstance(x, numbers.Integral) and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {x.dtype}; expected an integer dtype")


def check_write(k_pages, v_pages, k, v, slots) -> None:
    """Check the arguments of `write_kv`."""
    layout = "[N, block_size, kv_heads, head_dim]"
    check_ranks(k_pages=(k_pages, layout), v_pages=(v_pages, layout), slots=(slots, "[T]"))
    check_ranks(k=(k, "[T, kv_heads, head_dim]"), v=(v, "[T, kv_heads, head_dim]"))
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"v_pages has shape {v_pages.shape};"
            f" expected {k_pages.shape[:3]} and a head_dim, as k_pages"
        )
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots has dtype {slots.dtype}; expected an integer dtype")
    for name, new, pages in (("k", k, k_pages), ("v", v, v_pages)):
        expected = (slots.shape[0], *pages.shape[2:])
        if new.shape != expected:
            raise ValueError(
                f"{name} has shape {new.shape}; expected {expected} to match slots and {name}_pages"
            )
        if new.dtype != pages.dtype:
            raise TypeError(
                f"{name} has dtype {new.dtype}; expected {pages.dtype}, the dtype of {name}_pages"
            )


def check_ranks(**arrays) -> None:
    """Check that each `name=(x, "[A, B]")` is an array of as many axes."""
    for name, (x, expected) in arrays.items():
        _check_is_array(name, x, expected)
        if x.ndim != expected.count(",") + 1:
            raise ValueError(f"{name} has shape {x.shape}; expected {expected}")


def _check_is_array(name: str, x, expected: str = "") -> None:
    if not all(hasattr(x, attribute) for attribute in ("dtype", "shape", "ndim")):
        raise TypeError(f"{name} is a {type(x).__name__}; expected an array {expected}".rstrip())


def check_scales(k_pages, k_scale, v_scale) -> None:
    """Check the scales of `ragged_paged_attention`."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None or isinstance(scale, float):
            continue
        if isinstance(scale, int):
            raise TypeError(f"{name} has dtype int32; expected a floating dtype")
        _check_is_array(name, scale, f"or a number: a scalar or {k_pages.shape[:3]}")
        if scale.shape not in ((), k_pages.shape[:3]):
            raise ValueError(
                f"{name} has shape {scale.shape}; expected a scalar or {k_pages.shape[:3]},"
                " one for each token and KV head of the pages"
            )
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {scale.dtype}; expected a floating dtype")


def check_window(window) -> None:
    """Check a sliding window."""
    if window is not None:
        check_size("window", window, "at least 1 and below 2**31, or None for all keys")


def check_size(name: str, value, expected: str = "at least 1 and below 2**31") -> None:
    """Check a static size."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}; expected an int of {expected}")
    if not 1 <= value < 2**31:
        raise ValueError(f"{name}={value}; expected {expected}")


def check_factor(name: str, value, *, is_positive: bool) -> None:
    """Check a static number of Python's or NumPy's that float32 holds, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}; expected a Python number or None (it is static)")
    holds = abs(value) <= _LARGEST and not math.isnan(value)
    if not holds or (is_positive and not value > 0):
        raise ValueError(
            f"{name}={value!r}; expected a finite number{' above 0' * is_positive}"
            " that float32 holds, or None"
        )


def to_int32(x) -> Array:
    """Return integers as int32. One that does not fit is clamped, which is outside of every array.

    Example: [2**31, -(2**40), 7] -> [2**31 - 1, -(2**31), 7].
    """
    if isinstance(x, int):
        return jnp.int32(min(max(x, _INT32.min), _INT32.max))
    limits = jnp.iinfo(x.dtype)
    if limits.max > _INT32.max:
        clip = np.clip if isinstance(x, np.ndarray | np.generic) else jnp.clip
        x = clip(x, max(limits.min, _INT32.min), _INT32.max)
    return jnp.asarray(x, jnp.int32)
