"""Static sizes: frozen, hashable, validated when made."""

from dataclasses import dataclass
from typing import Self

import jax.numpy as jnp

from paged_jax.errors import ConfigError


def require_int(name: str, value: object, least: int) -> int:
    """`value`, which must be an int of at least `least`. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: an int is needed, got {type(value).__name__}")
    if value < least:
        raise ConfigError(f"{name}={value}: must be at least {least}")
    if value > 2**30:  # positions and counts are 32 bits wide on the device
        raise ConfigError(f"{name}={value}: must be at most {2**30}")
    return value


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of a paged KV cache.

    `windows` has one entry for each KV-cache group: None for full attention, else the sliding window in tokens.
    `num_layers` counts page pairs: the layers of the largest group. 0 keeps the books without pages. With `prefix_caching`
    blocks whose content is known are found again (`prefix_directory`).
    """

    num_blocks: int
    max_rows: int
    max_blocks_per_row: int
    block_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    num_layers: int = 0
    num_kv_heads: int = 1
    head_dim: int = 1
    dtype: str = "float32"
    prefix_caching: bool = False

    def __post_init__(self):
        for name in ("num_blocks", "max_rows", "max_blocks_per_row", "block_size", "num_kv_heads", "head_dim"):
            require_int(name, getattr(self, name), 1)
        require_int("num_layers", self.num_layers, 0)
        if not isinstance(self.windows, tuple) or not self.windows:
            raise ConfigError(
                f"windows={self.windows!r}: a tuple with one entry (None or tokens) for each group is needed"
            )
        for window in self.windows:
            if window is not None:
                require_int("windows", window, 1)
        try:
            if self.dtype is None:  # numpy takes it for float64
                raise TypeError("None")
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        except TypeError as error:
            raise ConfigError(f"dtype={self.dtype!r}: a floating-point dtype is needed") from error
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching={self.prefix_caching!r}: a bool is needed")
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ConfigError(f"dtype={self.dtype!r}: a floating-point dtype is needed")

    @classmethod
    def for_decoder(
        cls,
        model,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_rows: int = 1,
        max_blocks_per_row: int = 1,
        prefix_caching: bool = False,
    ) -> Self:
        """What `model`, a `paged_jax.models.Decoder`, stores its K and V in."""
        return cls(
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_blocks_per_row=max_blocks_per_row,
            block_size=block_size,
            windows=tuple(group.window for group in model.kv_groups),
            num_layers=max(group.num_layers for group in model.kv_groups),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            prefix_caching=prefix_caching,
        )

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.windows)

    def window_blocks(self, window: int, max_chunk: int) -> int:
        """Blocks that a sliding window and a chunk of `max_chunk` tokens behind it can lie in at once."""
        return -(-(window - 1 + max_chunk) // self.block_size) + 1

    @property
    def num_slots(self) -> int:
        """Slots of the pool; a slot index of this or more is dropped by a write."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine: what it holds, and how much it computes in one step.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        max_model_len: tokens of one sequence, prompt and output.
        max_num_seqs: sequences running at once (S); a decode step computes one token of each.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        num_rows: sequence rows on the device (R), running and waiting; None means 2 S.
        block_size: tokens of a block.
        max_stop_ids: end-of-text and stop token ids that a request may have.
        widths: token counts T that a step is compiled for, ascending; a step takes the first that holds what it computes.
            None means a decode step of S tokens and a mixed one of the whole budget. A narrower one first makes a step of few
            tokens cheaper, and on a GPU splits their contexts over its multiprocessors; it costs one more compilation.
        max_beam_width: of a beam search, 0 for none; what it costs is compiled in where it is above.
        enable_prefix_caching: keep full blocks findable by their content, also after their request has ended.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_rows: int | None = None
    block_size: int = 16
    max_stop_ids: int = 8
    widths: tuple[int, ...] | None = None
    max_beam_width: int = 0
    enable_prefix_caching: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_stop_ids"):
            require_int(name, getattr(self, name), 1)
        require_int("num_blocks", self.num_blocks, 2)
        require_int("max_model_len", self.max_model_len, 2)
        if self.num_rows is None:
            object.__setattr__(self, "num_rows", 2 * self.max_num_seqs)
        require_int("num_rows", self.num_rows, 1)
        if self.rows < self.max_num_seqs:
            raise ConfigError(f"num_rows={self.num_rows}: must be at least max_num_seqs={self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least max_num_seqs={self.max_num_seqs}, "
                "so that a step can compute one token of every running sequence"
            )
        if self.widths is None:
            object.__setattr__(self, "widths", tuple(sorted({self.max_num_seqs, self.max_num_batched_tokens})))
        self._check_widths()
        require_int("max_beam_width", self.max_beam_width, 0)
        if self.max_beam_width > self.max_num_seqs:
            raise ConfigError(
                f"max_beam_width={self.max_beam_width}: must be at most max_num_seqs={self.max_num_seqs}: beams run together"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching={self.enable_prefix_caching!r}: a bool is needed")

    def _check_widths(self):
        widths = self.widths
        if not isinstance(widths, tuple) or not widths:
            raise ConfigError(f"widths={widths!r}: an ascending tuple of token counts is needed")
        for width in widths:
            require_int("widths", width, 1)
        if list(widths) != sorted(set(widths)):
            raise ConfigError(f"widths={widths!r}: an ascending tuple of token counts is needed")
        if widths[-1] != self.max_num_batched_tokens:
            raise ConfigError(
                f"widths={widths!r}: the last must be max_num_batched_tokens={self.max_num_batched_tokens}"
            )

    @property
    def rows(self) -> int:
        """`num_rows`, resolved."""
        assert self.num_rows is not None  # set when made
        return self.num_rows

    @property
    def max_blocks_per_row(self) -> int:
        """Table columns: blocks of a sequence of `max_model_len`."""
        return -(-self.max_model_len // self.block_size)
