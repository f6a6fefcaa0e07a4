"""What both XLA forms do with pages, tiles and tokens: gathers."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .online_softmax import sum_dtype
from .tiles import QueryTiles, Rows

# Pages, and the scales of their numbers.
type Stored = tuple[Num[Array, "N B KV D"], Float[Array, "..."] | None]


def cut_rows(q, tiles: QueryTiles, kv_heads: int) -> Float[Array, "P KV GC D"]:
    """Cut out the query rows of each tile, by KV head, then by head of its group, then by row."""
    row = jnp.minimum(tiles.start[:, None] + tiles.offsets[None], q.shape[0] - 1)
    rows = q[jnp.maximum(row, 0)].astype(sum_dtype(q))
    rows = rows.reshape(*row.shape, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    return rows.transpose(0, 2, 3, 1, 4).reshape(row.shape[0], kv_heads, -1, q.shape[2])


def by_token(x, place: Rows, size: int):
    """Gather [T, H, ...] from [P, KV, G * C, ...], which is by tile."""
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])[place.tile, :, :, place.offset]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def read(stored: Stored, ids, dtype):
    """Gather the numbers of the blocks `ids` in `dtype`. The plan's ids are inside the pool."""
    pages, scale = stored
    numbers = at(pages, ids)
    if scale is None:
        return numbers.astype(dtype)
    factor = at(scale, ids)[..., None] if scale.ndim else scale
    return (numbers.astype(jnp.float32) * factor).astype(dtype)


def at(x, index):
    """Return `x[index]` of an index inside.

    Without the wrap of negative ones a sixth less is compiled for each layer.
    """
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
