"""The block table by hand: allocate, append, fork and free as pure functions of a value.

No model and no pages, only the books. The 542-token sequence is one the PagedAttention paper (SOSP
2023) reckons with: 34 blocks of 16, of which the last has two slots empty.
"""

import jax

from paged_jax import CacheConfig, allocate_slots, check_integrity, fork, free, init_cache
from paged_jax.cache.block_pool import free_queue

CONFIG = CacheConfig(num_blocks=64, num_rows=4, max_blocks_per_row=40, block_size=16)


def show(name, cache, row):
    count = int(cache.tables.num_blocks[0, row])
    tokens = int(cache.tables.num_tokens[row])
    slots = count * CONFIG.block_size
    print(
        f"{name}: {tokens} tokens in {count} blocks, waste {100 * (slots - tokens) / slots:.2f} %"
    )
    print("   ", *cache.tables.blocks[0, row, :count].tolist())


def main():
    cache = init_cache(CONFIG)
    cache, ok = allocate_slots(cache, 0, 100)
    assert ok
    show("row 0", cache, 0)
    cache, ok = allocate_slots(cache, 1, 542)
    assert ok
    show("row 1", cache, 1)

    print("\nOne token more for row 0: 100 of 112 slots were filled, so no block is taken.")
    cache, ok = allocate_slots(cache, 0, 1)
    show("row 0", cache, 0)

    print("\nRow 2 forks row 0: the same blocks, now with two references each.")
    cache, ok = fork(cache, 0, 2)
    show("row 2", cache, 2)
    print("    references", cache.pool.ref_count[cache.tables.blocks[0, 2, :7]].tolist())

    print(f"\nA row that does not fit changes nothing: {int(cache.pool.num_free)} blocks are free.")
    before = cache
    cache, ok = allocate_slots(cache, 3, 640)
    same = all(
        bool((a == b).all())
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True)
    )
    print(f"    ok: {bool(ok)}, state unchanged: {same}")

    cache, _ = free(cache, [0, 1])
    print(
        f"\nRows 0 and 1 freed: {int(cache.pool.num_free)} blocks are free; "
        "row 2 still holds what it shared."
    )
    show("row 2", cache, 2)
    print("    next to be handed out:", *free_queue(cache.pool)[:8])

    # The same functions inside a jit of one's own: rows and counts may be traced.
    @jax.jit
    def append(cache, rows, counts):
        return allocate_slots(cache, rows, counts)

    cache, ok = append(cache, jax.numpy.array([0, 1]), jax.numpy.array([5, 30]))
    show("\nrow 1, allocated inside a jit", cache, 1)
    print("\nintegrity:", check_integrity(cache) or "sound")


if __name__ == "__main__":
    main()
