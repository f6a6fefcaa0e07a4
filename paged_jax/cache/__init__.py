"""The paged KV cache: blocks, tables, pages, the prefix directory, and what changes them together.

block_pool        reference counts and the free queue
block_table       which blocks hold a row's tokens
pages             the arrays that K and V are stored in
prefix_directory  which block holds which content (content_hash, registration)
paged_cache       all of it as one value; allocate, share, exchange, release
copy_on_write     who writes into a shared block, and the copy it gets
by_hand           `allocate_slots`, `fork`, `free`: the same for programs without a scheduler
integrity         a checker of the invariants
"""
