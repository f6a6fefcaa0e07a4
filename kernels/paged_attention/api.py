"""The public call: checks its arguments and picks an implementation."""

from functools import partial
from typing import Literal, overload

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from . import dispatch
from .checks import check_attention, check_factor, check_scales, check_window
from .plan import AttentionPlan, Planned, plan_attention
from .refuse import refuse
from .scoring import Scales, Scoring

type Implementation = Literal["xla", "mosaic_gpu", "triton"]


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
        num_seqs: how many of the S sequences are live; a scalar, or one number in an array [1]. An integer of this or of the
            three before it that int32 does not hold counts as the nearest one that it does.
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

    There is no reverse-mode derivative: the loops are as long as the contexts are.

    Returns:
        [T, H, D] in the dtype of q, and [T, H] float32 if `return_lse`. Sums are float32 for all input dtypes.

    Raises:
        ValueError: a shape or a parameter is not as above, or the plan was made for others.
        TypeError: a dtype is not as above, or k_pages and v_pages differ in dtype.
        NotImplementedError: the named implementation does not cover the arguments, or the device.
    """
    _check_implementation(implementation)
    check_attention(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks)
    check_scales(k_pages, k_scale, v_scale)
    check_window(window)
    check_factor("scale", scale, positive=False)
    check_factor("soft_cap", soft_cap, positive=True)
    window = None if window is None else int(window)
    if not isinstance(plan, AttentionPlan | None):
        raise TypeError(f"plan is a {type(plan).__name__}; expected what plan_attention made, or None")
    problem = dispatch.Problem.of(q, k_pages, k_scale, v_scale)
    device_kind = None if interpret else dispatch.target_device_kind()
    if implementation is not None and (reason := dispatch.why_not(implementation, problem, device_kind)):
        raise NotImplementedError(f"implementation={implementation!r} cannot run this: {reason}; use 'xla' or None")
    num_tokens, num_heads, head_dim = q.shape
    if 0 in (num_tokens, kv_lens.shape[0], block_tables.shape[1], k_pages.shape[0], k_pages.shape[1]):
        out, lse = jnp.zeros_like(q), jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    else:
        planned = Planned(num_tokens, *block_tables.shape, *k_pages.shape[:2], window)
        if plan is None:
            plan = plan_attention(
                num_tokens,
                kv_lens,
                block_tables,
                cu_q_lens,
                num_seqs,
                num_blocks=planned.num_blocks,
                block_size=planned.block_size,
                window=window,
            )
        elif plan.planned != planned:
            raise ValueError(f"plan was made for {plan.planned}; expected {planned}")
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
        lse = lse.astype(jnp.float32)
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
