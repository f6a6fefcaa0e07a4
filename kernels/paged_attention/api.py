"""The public call: checks its arguments and picks an implementation."""

from collections.abc import Callable
from functools import partial
from typing import Literal, overload

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, Num

from ..target_device import target_device_kind
from . import dispatch
from .checks import AnyArray, check_attention, check_factor, check_scales, check_window
from .dispatch import Implementation
from .plan import AttentionPlan, Planned, plan_attention
from .refuse import refuse
from .scoring import Scales, Scoring


@overload
def ragged_paged_attention(
    q: Float[AnyArray, "T H D"],
    k_pages: Num[AnyArray, "N B KV D"],
    v_pages: Num[AnyArray, "N B KV D"],
    kv_lens: Integer[AnyArray, "S"],
    block_tables: Integer[AnyArray, "S M"],
    cu_q_lens: Integer[AnyArray, "S+1"],
    num_seqs: Integer[AnyArray, "..."] | int,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Float[AnyArray, "H"] | None = ...,
    k_scale: Float[AnyArray, "..."] | float | None = ...,
    v_scale: Float[AnyArray, "..."] | float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
    interpret: bool = ...,
    plan: AttentionPlan | None = ...,
) -> Float[Array, "T H D"]: ...


@overload
def ragged_paged_attention(
    q: Float[AnyArray, "T H D"],
    k_pages: Num[AnyArray, "N B KV D"],
    v_pages: Num[AnyArray, "N B KV D"],
    kv_lens: Integer[AnyArray, "S"],
    block_tables: Integer[AnyArray, "S M"],
    cu_q_lens: Integer[AnyArray, "S+1"],
    num_seqs: Integer[AnyArray, "..."] | int,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Float[AnyArray, "H"] | None = ...,
    k_scale: Float[AnyArray, "..."] | float | None = ...,
    v_scale: Float[AnyArray, "..."] | float | None = ...,
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
    """Attend causally from T flattened query tokens to the paged K and V of their sequences.

    Sequence s owns the query rows `cu_q_lens[s]` to `cu_q_lens[s + 1] - 1`: the last of its
    `kv_lens[s]` tokens. Their K and V are in the pages `block_tables[s]`, in order. Meaning and
    argument order are those of JAX's TPU op of this name. H is a multiple of KV; query head h
    reads KV head h // (H / KV).

    Sequences from `num_seqs` on are ignored. A query row that has no owner, or that sees no key,
    gives 0 and a log-sum-exp of -inf. Page contents at a position that no live sequence's tokens
    occupy never matter, NaN included; table entries past a sequence's length may be anything.

    There is no reverse-mode derivative: the loops are as long as the contexts are.

    Example, B = 2: cu_q_lens [0, 3, 4] and kv_lens [5, 8] are the tokens 2 to 4 of a prompt and
    the decoding token 7; block_tables [[8, 3, 9, 0], [4, 1, 7, 2]] has them in blocks 3, 9 and 2.

    Args:
        q: [T, H, D].
        k_pages: [N, B, KV, D], N blocks of B token positions, in the dtype of q, a narrower
            floating dtype, or int8.
        v_pages: as `k_pages`.
        kv_lens: [S] tokens of each sequence.
        block_tables: [S, M] physical block ids in logical order.
        cu_q_lens: [S + 1], non-decreasing up to `num_seqs`, from 0.
        num_seqs: how many of the S sequences are live: a scalar, or one number in an array [1].
            An integer of this or of the three before it that int32 does not hold is clamped.
        scale: factor of the scores; 1 / sqrt(D) where None.
        window: a query at position p sees the keys p - window + 1 to p; all up to p where None.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: [H] a logit for each head that counts in the softmax's denominator, without a value.
        k_scale: factor of the numbers in `k_pages`: a scalar, or [N, B, KV] by token and KV head.
        v_scale: as `k_scale`, for `v_pages`.
        return_lse: also return the log of the denominator (sinks included) of each row and head.
        implementation: "xla", "triton", "mosaic_gpu", or None for what `dispatch.py` picks for the
            platform that is compiled for.
        interpret: run the Pallas implementation in its interpreter, on any platform; without a
            meaning for "xla" and None.
        plan: `plan_attention` of the same tables, lengths and window, for layers that share them;
            made here where None.

    Returns:
        [T, H, D] in the dtype of q, and [T, H] float32 if `return_lse`. Sums are float32 for all
        input dtypes.

    Raises:
        ValueError: a shape or a parameter is not as above, or the plan was made for others.
        TypeError: a dtype is not as above, or k_pages and v_pages differ in dtype.
        NotImplementedError: the implementation does not cover the arguments, or the device.
    """
    _check_implementation(implementation)
    check_attention(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks)
    check_scales(k_pages, k_scale, v_scale)
    scoring = _make_scoring(q.shape[2], scale, window, soft_cap)
    _check_is_plan(plan)
    problem = dispatch.Problem.of(q, k_pages, k_scale, v_scale)
    on_cuda, elsewhere = _choose(implementation, interpret, problem, scoring)
    sizes = q.shape[0], *block_tables.shape, *k_pages.shape[:2]
    planned = Planned._make((*sizes, scoring.window))
    if 0 in sizes:
        out, lse = jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
        return (out, lse) if return_lse else out
    plan = _find_plan(plan, planned, (kv_lens, block_tables, cu_q_lens, num_seqs))
    arrays = (q, k_pages, v_pages, plan, sinks, _make_scales(k_scale, v_scale))
    if on_cuda is elsewhere:
        out, lse = on_cuda(*arrays)
    else:
        # Chosen when the program is lowered: it may be compiled on one platform for another.
        out, lse = lax.platform_dependent(*arrays, cuda=on_cuda, default=elsewhere)
    return (out, lse.astype(jnp.float32)) if return_lse else out


def _check_implementation(implementation) -> None:
    if implementation not in (None, *dispatch.PREFERENCE):
        names = ", ".join(map(repr, dispatch.PREFERENCE))
        raise ValueError(f"implementation={implementation!r}; expected {names} or None")


def _check_is_plan(plan) -> None:
    if not isinstance(plan, AttentionPlan | None):
        kind = type(plan).__name__
        raise TypeError(f"plan is a {kind}; expected what plan_attention made, or None")


def _make_scoring(head_dim: int, scale, window, soft_cap) -> Scoring:
    check_window(window)
    check_factor("scale", scale, is_positive=False)
    check_factor("soft_cap", soft_cap, is_positive=True)
    return Scoring(
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=None if window is None else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def _make_scales(*scales) -> Scales:
    return Scales(*(None if x is None else jnp.asarray(x, jnp.float32) for x in scales))


def _find_plan(plan: AttentionPlan | None, planned: Planned, index: tuple) -> AttentionPlan:
    """Return the plan that was given, or make one."""
    if plan is None:
        sizes = dict(num_blocks=planned.num_blocks, block_size=planned.block_size)
        return plan_attention(planned.num_tokens, *index, **sizes, window=planned.window)
    if plan.planned != planned:
        raise ValueError(f"plan was made for {plan.planned}; expected {planned}")
    return plan


def _choose(
    implementation: str | None, interpret: bool, problem: dispatch.Problem, scoring: Scoring
) -> tuple[Callable, Callable]:
    """Return what runs on CUDA and what runs elsewhere, as functions of the arrays.

    They are one function where the platform does not matter.
    """
    device_kind = None if interpret else target_device_kind()
    if implementation is None:
        on_cuda = dispatch.pick_for_cuda(problem, device_kind)
        return partial(_run, on_cuda, scoring, False), partial(_run, "xla", scoring, False)
    if reason := dispatch.why_not(implementation, problem, device_kind):
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run this: {reason}; use 'xla' or None"
        )
    run = partial(_run, implementation, scoring, interpret)
    is_for_any = implementation == "xla" or interpret
    return run, run if is_for_any else partial(_refuse_platform, implementation)


def _run(implementation: str, scoring: Scoring, interpret: bool, *arrays):
    """Return (out, lse) of an implementation; `arrays` are the first of its `attend`."""
    options = {} if implementation == "xla" else dict(interpret=interpret)
    return dispatch.load(implementation).attend(*arrays, scoring, **options)


def _refuse_platform(implementation: str, q, *_):
    """Return (out, lse) that raise when lowered: a kernel for CUDA has no other platform."""
    reason = "it runs on CUDA GPUs; use 'xla', None or interpret=True"
    message = f"implementation={implementation!r} cannot run on the platform this is lowered for"
    out = refuse(q, f"{message}: {reason}")
    return out, out[..., 0].astype(jnp.float32)
