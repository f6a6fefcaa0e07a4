"""Static sizes: frozen, hashable, validated when made. Each is a static field of what it sizes."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from paged_jax.arrays import ceil_div
from paged_jax.checks import MOST, check_bool, check_float, check_int, show
from paged_jax.errors import ConfigError
from paged_jax.kv_group import FullAttention, KVGroup
from paged_jax.unknown_options import answers_unknown_options

MOST_BLOCKS = 2**28  # places of the free queue, twice as many, are added up in 32 bits


@answers_unknown_options
@dataclass(frozen=True)
class CacheConfig:
    """Sizes of a paged KV cache (`PagedCache.config`).

    Attributes:
        num_blocks: blocks of the pool (N), the null block included.
        num_rows: rows of the block tables (R).
        max_blocks_per_row: columns of the block tables (M).
        block_size: tokens of a block.
        groups: kind and layers of each KV-cache group (G of them). Groups without layers keep
            tables without pages.
        num_kv_heads, head_dim, dtype: of the pages.
        enable_prefix_caching: keep full blocks findable by their content.

    Raises ConfigError naming the field that cannot work.
    """

    num_blocks: int
    num_rows: int
    max_blocks_per_row: int
    block_size: int = 16
    groups: tuple[KVGroup, ...] = (FullAttention(),)
    num_kv_heads: int = 1
    head_dim: int = 1
    dtype: str = "float32"
    enable_prefix_caching: bool = False

    def __post_init__(self):
        sizes = ("num_blocks", "num_rows", "max_blocks_per_row", "block_size")
        _check_ints(self, (*sizes, "num_kv_heads", "head_dim"), 1)
        is_groups = isinstance(self.groups, tuple) and len(self.groups) > 0
        if not is_groups or not all(isinstance(group, KVGroup) for group in self.groups):
            raise ConfigError(
                f"groups={show(self.groups)}: a tuple of KV-cache groups is needed, "
                "(FullAttention(),)"
            )
        object.__setattr__(self, "dtype", _page_dtype(self.dtype))
        check_bool("enable_prefix_caching", self.enable_prefix_caching, error=ConfigError)
        check_int("num_blocks", self.num_blocks, 1, MOST_BLOCKS, error=ConfigError)
        for name in ("num_blocks", "max_blocks_per_row"):
            if getattr(self, name) * self.block_size > MOST:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: of {self.block_size} tokens each; "
                    f"must hold at most {MOST} tokens"
                )

    @classmethod
    def for_decoder(
        cls,
        model: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_rows: int = 1,
        max_blocks_per_row: int = 1,
        enable_prefix_caching: bool = False,
    ) -> "CacheConfig":
        """Return the config of the cache for `model`, a `paged_jax.models.Decoder`."""
        return cls(
            num_blocks=num_blocks,
            num_rows=num_rows,
            max_blocks_per_row=max_blocks_per_row,
            block_size=block_size,
            groups=tuple(model.kv_groups),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            enable_prefix_caching=enable_prefix_caching,
        )

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.groups)

    @property
    def num_layers(self) -> int:
        """Pairs of page arrays: the layers of the largest group."""
        return max(group.num_layers for group in self.groups)

    @property
    def num_slots(self) -> int:
        """Slots of the pool. A write to a slot index of this or more is dropped."""
        return self.num_blocks * self.block_size

    @property
    def max_tokens_per_row(self) -> int:
        """Tokens that a row's block table has slots for."""
        return self.max_blocks_per_row * self.block_size


@answers_unknown_options
@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine (`EngineState.config`): what it holds, and how much it computes in a step.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        max_model_len: tokens of one sequence, prompt and output (L).
        max_num_seqs: sequences running at once (S). A decode step computes one token of each.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        num_rows: sequence rows on the device (R), running and waiting; 0 means 2 S.
        block_size: tokens of a block.
        max_stop_ids: end-of-text and stop token ids that a request may have.
        max_beam_width: of a beam search, 0 for none. Above 0 its cost is compiled in.
        enable_prefix_caching: keep full blocks findable by their content, also after their request
            has ended.
        watermark: share of the blocks that stays free when a sequence starts beside others, from 0
            to 1. More of it, and fewer sequences are preempted, but fewer run at once.

    Raises ConfigError naming the field that cannot work.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_rows: int = 0
    block_size: int = 16
    max_stop_ids: int = 8
    max_beam_width: int = 0
    enable_prefix_caching: bool = False
    watermark: float = 0.0

    def __post_init__(self):
        _check_ints(self, ("max_num_seqs", "max_num_batched_tokens", "block_size"), 1)
        _check_ints(self, ("max_stop_ids",), 1)
        _check_ints(self, ("num_blocks", "max_model_len"), 2)
        _check_ints(self, ("num_rows", "max_beam_width"), 0)
        if self.num_rows == 0:
            object.__setattr__(self, "num_rows", 2 * self.max_num_seqs)
        if self.num_rows < self.max_num_seqs:
            raise ConfigError(
                f"num_rows={self.num_rows}: must be at least max_num_seqs={self.max_num_seqs}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that a step can compute one token of every "
                "running sequence"
            )
        if self.max_beam_width > self.max_num_seqs:
            raise ConfigError(
                f"max_beam_width={self.max_beam_width}: must be at most "
                f"max_num_seqs={self.max_num_seqs}: beams run together"
            )
        check_bool("enable_prefix_caching", self.enable_prefix_caching, error=ConfigError)
        share = check_float(
            "watermark", self.watermark, "in [0, 1]", lambda x: 0 <= x <= 1, error=ConfigError
        )
        object.__setattr__(self, "watermark", share)

    @property
    def max_blocks_per_row(self) -> int:
        """Table columns: blocks of a sequence of `max_model_len`."""
        return ceil_div(self.max_model_len, self.block_size)

    def cache_config(self, model: Any) -> CacheConfig:
        """Return the sizes of the KV cache for `model`, a `paged_jax.models.Decoder`."""
        return CacheConfig.for_decoder(
            model,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_rows=self.num_rows,
            max_blocks_per_row=self.max_blocks_per_row,
            enable_prefix_caching=self.enable_prefix_caching,
        )


def token_widths(
    config: EngineConfig, widths: tuple[int, ...] | None = None, name: str = "widths"
) -> tuple[int, ...]:
    """Return the token counts that a decoder is compiled for, ascending.

    None means S tokens, for decode steps, and the whole budget. More widths make steps that fall
    between them cheaper, and each costs a compilation of the decoder. A step that no width holds is
    computed in several passes (`engine.passes`).

    Raises ConfigError, with `name`, for what is not ascending or passes the budget.
    """
    budget = config.max_num_batched_tokens
    if widths is None:
        return tuple(sorted({config.max_num_seqs, budget}))
    if not isinstance(widths, tuple) or not widths:
        raise ConfigError(f"{name}={show(widths)}: an ascending tuple of token counts is needed")
    widths = tuple(check_int(name, width, 1, error=ConfigError) for width in widths)
    if list(widths) != sorted(set(widths)):
        raise ConfigError(f"{name}={show(widths)}: an ascending tuple of token counts is needed")
    if widths[-1] > budget:
        raise ConfigError(f"{name}={show(widths)}: must be at most max_num_batched_tokens={budget}")
    return widths


def _page_dtype(dtype: Any) -> str:
    """Return the name of a dtype that pages can have. Raises ConfigError."""
    wrong = ConfigError(f"dtype={show(dtype)}: a floating-point dtype is needed")
    try:
        if dtype is None:  # numpy takes it for float64
            raise wrong
        given = jnp.dtype(dtype)
        if not jnp.issubdtype(given, jnp.floating):
            raise wrong
        usable = jnp.empty(0, given).dtype if given.itemsize <= 4 else jnp.result_type(float)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if usable.name != given.name:
        raise ConfigError(
            f"dtype={show(dtype)}: arrays of JAX are not of {given.name} here; at most "
            f"{usable.name} is accepted (float64 where jax_enable_x64 is on)"
        )
    return given.name


def _check_ints(config: Any, names: tuple[str, ...], least: int) -> None:
    """Check fields of a config being made, and store them as plain ints."""
    for name in names:
        value = check_int(name, getattr(config, name), least, error=ConfigError)
        object.__setattr__(config, name, value)
