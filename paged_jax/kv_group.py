"""The kinds of KV-cache groups: layers that share one block table, and what their blocks follow.

A decoder names its groups (`Decoder.kv_groups`), a cache keeps them (`CacheConfig.groups`). What
depends on the kind of a group is answered here and nowhere else. A new kind is a class here and the
decoder that has it.

    tokens computed: 11    blocks of 4    # held, . released
    full attention         # # #
    window of 6            . # #          the query at 11 sees 6 to 11
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import ceil_div, minimum
from paged_jax.checks import check_int
from paged_jax.errors import ConfigError


class KVGroup(ABC):
    """Layers that share one block table. Numbers of tokens may be Python ints or arrays.

    Attributes:
        num_layers: layers of the group. 0 keeps the block table without pages.
        releases_blocks: whether a running sequence gives leading blocks back.
        allocates_whole: whether admission allocates the whole sequence; otherwise blocks are
            allocated chunk by chunk.
    """

    num_layers: int
    releases_blocks: ClassVar[bool]
    allocates_whole: ClassVar[bool]

    def __post_init__(self):
        num_layers = check_int("num_layers", self.num_layers, 0, error=ConfigError)
        object.__setattr__(self, "num_layers", num_layers)

    @abstractmethod
    def first_live_block(self, num_computed: Any, block_size: int) -> Any:
        """Count the leading blocks that no query from position `num_computed` on reads."""

    @abstractmethod
    def blocks_to_admit(self, num_tokens: Any, max_chunk: Any, block_size: int) -> Any:
        """Count the blocks that must be free to admit a sequence of `num_tokens`.

        That is also the most that it holds at once while it has no more tokens and computes
        `max_chunk` in a step.
        """

    @abstractmethod
    def tokens_at_admission(self, num_tokens: Any, chunk_end: Any) -> Any:
        """Return up to which token admission allocates; the first chunk ends at `chunk_end`."""

    @abstractmethod
    def max_new_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Bound the blocks that admitted rows newly need in a step of `num_tokens` tokens."""

    @abstractmethod
    def max_passed_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Bound the blocks that the rows release in a step of `num_tokens` tokens."""


@dataclass(frozen=True)
class FullAttention(KVGroup):
    """Layers in which a query sees every token before it: all blocks stay."""

    num_layers: int = 0
    releases_blocks: ClassVar[bool] = False
    allocates_whole: ClassVar[bool] = True

    def first_live_block(self, num_computed: Any, block_size: int) -> Any:
        """Return 0: every block stays live."""
        return num_computed * 0

    def blocks_to_admit(self, num_tokens: Any, max_chunk: Any, block_size: int) -> Any:
        """Count the blocks of the whole sequence, so that half-computed prompts cannot thrash."""
        return ceil_div(num_tokens, block_size)

    def tokens_at_admission(self, num_tokens: Any, chunk_end: Any) -> Any:
        """Return all of them."""
        return num_tokens

    def max_new_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Return one block a row: the prompt's were allocated at admission."""
        return num_rows

    def max_passed_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class SlidingWindow(KVGroup):
    """Layers in which the query at position p sees the tokens p - window + 1 to p."""

    window: int
    num_layers: int = 0
    releases_blocks: ClassVar[bool] = True
    allocates_whole: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "window", check_int("window", self.window, 1, error=ConfigError))

    def first_live_block(self, num_computed: Any, block_size: int) -> Any:
        """Return the block of the first token that the query at `num_computed` sees."""
        return jnp.maximum(num_computed - self.window + 1, 0) // block_size

    def blocks_to_admit(self, num_tokens: Any, max_chunk: Any, block_size: int) -> Any:
        """Count the blocks that the window and one chunk behind it can lie in, if not fewer.

        Window 6, chunks of 7, blocks of 4: 12 tokens, which can touch 4 blocks.
        """
        at_once = ceil_div(self.window - 1 + max_chunk, block_size) + 1
        return minimum(ceil_div(num_tokens, block_size), at_once)

    def tokens_at_admission(self, num_tokens: Any, chunk_end: Any) -> Any:
        """Return the end of the first chunk."""
        return chunk_end

    def max_new_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Return what the rows' chunks can begin."""
        return _max_blocks_begun(num_tokens, num_rows, block_size)

    def max_passed_blocks(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Return what the window's lower end can complete: it moves as the tokens do."""
        return _max_blocks_begun(num_tokens, num_rows, block_size)


type KVGroups = tuple[KVGroup, ...]


def attention_group(window: int | None, num_layers: int = 0) -> KVGroup:
    """Return a sliding window of that many tokens, or full attention for None."""
    if window is None:
        return FullAttention(num_layers)
    return SlidingWindow(window, num_layers)


def _max_blocks_begun(num_tokens: int, num_rows: int, block_size: int) -> int:
    """Bound the blocks that `num_tokens` tokens of `num_rows` rows begin or complete."""
    return min(num_tokens, num_tokens // block_size + num_rows)


# ---------------------------------------------------------------- all groups of a cache


def first_live_blocks(
    groups: KVGroups, num_computed: Int[Array, "*k"], block_size: int
) -> Int[Array, "G *k"]:
    """Return each group's first live block."""
    return jnp.stack([group.first_live_block(num_computed, block_size) for group in groups])


def blocks_to_admit(groups: KVGroups, num_tokens: Any, max_chunk: int, block_size: int) -> Any:
    """Count the blocks that must be free to admit a sequence, in all groups together."""
    counts = [group.blocks_to_admit(num_tokens, max_chunk, block_size) for group in groups]
    return sum(counts[1:], start=counts[0])


def most_held(
    groups: KVGroups, num_tokens: Int[Array, "k"], max_chunk: Int[Array, "k"], block_size: int
) -> Int[Array, "G k"]:
    """Return the most blocks that each group holds at once; see `KVGroup.blocks_to_admit`."""
    return jnp.stack([group.blocks_to_admit(num_tokens, max_chunk, block_size) for group in groups])


def max_new_blocks(groups: KVGroups, num_tokens: int, num_rows: int, block_size: int) -> int:
    """Bound the blocks that a step of `num_tokens` tokens newly needs, in all groups together."""
    rows = min(num_tokens, num_rows)
    return sum(group.max_new_blocks(num_tokens, rows, block_size) for group in groups)


def releasing_groups(groups: KVGroups) -> tuple[int, ...]:
    """Return the indices of the groups that give blocks back while a sequence runs."""
    return tuple(g for g, group in enumerate(groups) if group.releases_blocks)


def key_group(groups: KVGroups) -> int:
    """Return the group of the prefix directory's blocks: the first that keeps all of them."""
    keeping = [g for g, group in enumerate(groups) if not group.releases_blocks]
    return keeping[0] if keeping else 0


def longest_start(
    groups: KVGroups,
    is_cached: Bool[Array, "G C"],
    num_tokens: Int[Array, ""],
    num_cached: Int[Array, ""],
    block_size: int,
) -> tuple[Int[Array, ""], Int[Array, "G"]]:
    """Return the most leading blocks that every group can start from.

    They are among the first `num_cached`. Also returns each group's first live block then. A group
    needs its blocks from that one on. The last token is always computed.

        full    # # # #      c = 4: the window reads blocks 2 and 3, and block 3 is missing
        window  . # # .      c = 3: the window reads blocks 1 and 2, which are there -> 3, [0, 1]
    """
    counts = jnp.arange(is_cached.shape[1] + 1, dtype=jnp.int32)
    computed = jnp.clip(counts * block_size, 0, jnp.maximum(num_tokens - 1, 0))
    low = first_live_blocks(groups, computed, block_size)
    lost = jnp.cumsum(~is_cached, axis=1, dtype=jnp.int32)
    lost = jnp.pad(lost, ((0, 0), (1, 0)))
    before_low = jnp.take_along_axis(lost, jnp.minimum(low, counts[None]), axis=1)
    is_whole = jnp.all(lost == before_low, axis=0)
    count = jnp.max(jnp.where(is_whole & (counts <= num_cached), counts, 0))
    return count, low[:, count]
