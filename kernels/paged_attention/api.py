"""The public call: checks its arguments and picks an implementation."""

import math
import numbers
from functools import partial
from typing import Literal, overload

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from . import dispatch
from .plan import AttentionPlan, plan_attention
from .refuse import refuse
from .scoring import Scales, Scoring

type Implementation = Literal["xla", "mosaic_gpu", "triton"]

_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


@overload
def ragged_paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Num[Array, "N B KV D"],
    v_pages: Num[Array, "N B KV D"],
    kv_lens: Int[Array, "S"],
    block_tables: Int[Array, "S M"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, ""] | int,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Float[Array, "H"] | None = ...,
    k_scale: Float[Array, "..."] | float | None = ...,
    v_scale: Float[Array, "..."] | float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
    interpret: bool = ...,
    plan: AttentionPlan | None = ...,
) -> Float[Array, "T H D"]: ...


@overload
def ragged_paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Num[Array, "N B KV D"],
    v_pages: Num[Array, "N B KV D"],
    kv_lens: Int[Array, "S"],
    block_tables: Int[Array, "S M"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, ""] | int,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Float[Array, "H"] | None = ...,
    k_scale: Float[Array, "..."] | float | None = ...,
    v_scale: Float[Array, "..."] | float | None = ...,
    return_lse: Literal[True],
    implementation: Implementation | None = ...,
    interpret: bool = ...,
    plan: AttentionPlan | None = ...,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]: ...


def ragged_paged_attention(
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
    return_lse=False,
    implementation=None,
    interpret=False,
    plan=None,
):
    """Causal attention of T flattened query tokens over the paged K and V of the sequences they belong to.

    Sequence s owns the query rows `cu_q_lens[s]` to `cu_q_lens[s + 1]`: the last of its `kv_lens[s]` tokens, whose K
    and V are in the pages that `block_tables[s]` names in order. Meaning and argument order are those of JAX's TPU op
    of this name. H is a multiple of KV; query head h reads KV head h // (H / KV).

    Sequences from `num_seqs` on are ignored. A query row that no sequence owns, or that sees no key, gives 0 and a
    log-sum-exp of -inf. What lies in a page at a position that no live sequence's tokens occupy never matters, NaN
    included; table entries past a sequence's length may be anything.

    Args:
        q: [T, H, D].
        k_pages: [N, B, KV, D], N blocks of B token positions; in the dtype of q, a narrower floating dtype, or int8.
        v_pages: as `k_pages`.
        kv_lens: [S] tokens of each sequence.
        block_tables: [S, M] physical block ids in logical order.
        cu_q_lens: [S + 1], non-decreasing up to `num_seqs`, from 0.
        num_seqs: how many of the S sequences are live; a scalar, or one number in an array [1].
        scale: factor of the scores; 1 / sqrt(D) where None.
        window: a query at position p sees the keys p - window + 1 to p; all up to p where None.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: [H] a logit for each head that counts in the softmax's denominator and has no value.
        k_scale: what the numbers in `k_pages` are to be multiplied by: a scalar, or [N, B, KV] for each token and KV head.
        v_scale: as `k_scale`, for `v_pages`.
        return_lse: also return the log of the denominator (sinks included) of each row and head, float32.
        implementation: "xla", "triton", "mosaic_gpu", or None for what `dispatch.py` has for the platform it is compiled for.
        interpret: run the named Pallas implementation in its interpreter, on any platform; no meaning for "xla" and None.
        plan: `plan_attention` of the same tables, lengths and window, for layers that share them; made here where None.

    Returns:
        [T, H, D] in the dtype of q, and [T, H] float32 if `return_lse`. Sums are float32 for all input dtypes.

    Raises:
        ValueError: a shape or a parameter is not as above.
        TypeError: a dtype is not as above, or k_pages and v_pages differ in dtype.
        NotImplementedError: the named implementation does not cover the arguments, or the device.
    """
    _check_implementation(implementation)
    _check_arrays(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks)
    _check_scales(k_pages, k_scale, v_scale)
    _check_parameters(scale, window, soft_cap)
    window = None if window is None else int(window)
    problem = dispatch.Problem.of(q, k_pages, k_scale, v_scale)
    device_kind = None if interpret else dispatch.target_device_kind()
    if implementation is not None and (reason := dispatch.why_not(implementation, problem, device_kind)):
        raise NotImplementedError(f"implementation={implementation!r} cannot run this: {reason}; use 'xla' or None")
    num_tokens, num_heads, head_dim = q.shape
    if 0 in (num_tokens, kv_lens.shape[0], block_tables.shape[1], k_pages.shape[0], k_pages.shape[1]):
        out, lse = jnp.zeros_like(q), jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    else:
        as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
        if plan is None:
            plan = plan_attention(
                num_tokens,
                as_int(kv_lens),
                as_int(block_tables),
                as_int(cu_q_lens),
                as_int(num_seqs).reshape(()),
                num_blocks=k_pages.shape[0],
                block_size=k_pages.shape[1],
                window=window,
            )
        scoring = Scoring(
            head_dim**-0.5 if scale is None else float(scale), window, None if soft_cap is None else float(soft_cap)
        )
        scales = Scales(*(None if x is None else jnp.asarray(x, jnp.float32) for x in (k_scale, v_scale)))
        args = (q, k_pages, v_pages, plan, sinks, scales)
        if implementation is None:
            on_cuda = dispatch.pick("cuda", problem, device_kind)
            default = _bind("xla", scoring)
            # Chosen when the program is lowered: it may be compiled on one platform for another.
            out, lse = lax.platform_dependent(*args, cuda=_bind(on_cuda, scoring), default=default)
        elif implementation == "xla" or interpret:
            out, lse = _bind(implementation, scoring, interpret)(*args)
        else:
            named = _bind(implementation, scoring)
            out, lse = lax.platform_dependent(*args, cuda=named, default=partial(_only_cuda, implementation))
    return (out, lse) if return_lse else out


def _bind(implementation: str, scoring: Scoring, interpret: bool = False):
    """The implementation as a function of arrays."""
    module = dispatch.load(implementation)
    interpreted = {} if implementation == "xla" else dict(interpret=interpret)

    def attend(q, k_pages, v_pages, plan, sinks, scales):
        return module.attend(q, k_pages, v_pages, plan, sinks, scoring, scales=scales, **interpreted)

    return attend


def _only_cuda(implementation: str, q, *_):
    reason = "it runs on CUDA GPUs; use 'xla', None or interpret=True"
    out = refuse(q, f"implementation={implementation!r} cannot run on the platform this is lowered for: {reason}")
    return out, out[..., 0].astype(jnp.float32)


def _check_implementation(implementation) -> None:
    if implementation not in (None, "xla", "mosaic_gpu", "triton"):
        raise ValueError(f"implementation={implementation!r}; expected 'xla', 'mosaic_gpu', 'triton' or None")


def _check_scales(k_pages, k_scale, v_scale) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if jnp.shape(scale) not in ((), k_pages.shape[:3]):
            raise ValueError(
                f"{name} has shape {jnp.shape(scale)}; expected a scalar or {k_pages.shape[:3]},"
                " one for each token and KV head of the pages"
            )
        if not jnp.issubdtype(jnp.result_type(scale), jnp.floating):
            raise TypeError(f"{name} has dtype {jnp.result_type(scale)}; expected a floating dtype")


def _check_parameters(scale, window, soft_cap) -> None:
    if scale is not None and not _is_number(scale):
        raise TypeError(f"scale={scale!r}; expected a Python number or None (multiply q by one that is an array)")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale!r}; expected a finite number, or None for 1 / sqrt(head_dim)")
    if window is not None and (isinstance(window, bool) or not isinstance(window, numbers.Integral)):
        raise TypeError(f"window={window!r}; expected an int of at least 1, or None")
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"window={window}; expected at least 1 and below 2**31, or None for all keys")
    if soft_cap is not None and not _is_number(soft_cap):
        raise TypeError(f"soft_cap={soft_cap!r}; expected a Python number or None (it is static)")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap={soft_cap!r}; expected a finite number above 0, or None")


def _is_number(x) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _check_arrays(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks) -> None:
    ranks = dict(q=(q, "[T, H, D]"), k_pages=(k_pages, "[N, block_size, KV, D]"), kv_lens=(kv_lens, "[S]"))
    ranks |= dict(block_tables=(block_tables, "[S, M]"), cu_q_lens=(cu_q_lens, "[S + 1]"))
    arrays = {name: x for name, (x, _) in ranks.items()} | dict(v_pages=v_pages)
    for name, x in (arrays if sinks is None else arrays | dict(sinks=sinks)).items():
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} is a {type(x).__name__}; expected an array")
    for name, (x, expected) in ranks.items():
        if jnp.ndim(x) != expected.count(",") + 1:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected {expected}")
    num_heads, head_dim = q.shape[1:]
    kv_heads, kv_head_dim = k_pages.shape[2:]
    if kv_head_dim != head_dim:
        raise ValueError(f"k_pages has head_dim {kv_head_dim}; expected {head_dim}, the head_dim of q")
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(f"q has {num_heads} heads; expected a multiple of the {kv_heads} KV heads of k_pages")
    seqs = kv_lens.shape[0]
    for name, x, expected in (
        ("v_pages", v_pages, k_pages.shape),
        ("block_tables", block_tables, (seqs, block_tables.shape[1])),
        ("cu_q_lens", cu_q_lens, (seqs + 1,)),
    ):
        if jnp.shape(x) != expected:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected {expected}")
    if jnp.shape(num_seqs) not in ((), (1,)):
        raise ValueError(f"num_seqs has shape {jnp.shape(num_seqs)}; expected a scalar or (1,)")
    if sinks is not None and jnp.shape(sinks) != (num_heads,):
        raise ValueError(f"sinks has shape {jnp.shape(sinks)}; expected ({num_heads},), one for each head of q")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q has dtype {q.dtype}; expected a floating dtype")
    narrower = jnp.issubdtype(k_pages.dtype, jnp.floating) and k_pages.dtype.itemsize < q.dtype.itemsize
    if not (k_pages.dtype == q.dtype or narrower or k_pages.dtype.name in _QUANTISED):
        raise TypeError(
            f"k_pages has dtype {k_pages.dtype}; expected {q.dtype}, the dtype of q, a narrower floating dtype, or int8"
        )
    if v_pages.dtype != k_pages.dtype:
        raise TypeError(f"v_pages has dtype {v_pages.dtype}; expected {k_pages.dtype}, the dtype of k_pages")
    integers = dict(kv_lens=kv_lens, block_tables=block_tables, cu_q_lens=cu_q_lens, num_seqs=num_seqs)
    for name, x in integers.items():
        if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise TypeError(f"{name} has dtype {jnp.result_type(x)}; expected an integer dtype")
