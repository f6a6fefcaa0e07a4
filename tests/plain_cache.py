"""The pool and the block tables in plain Python, one obvious step after another: what the arrays
must agree with, id for id.
"""


class PlainPool:
    """Reference counts, and a list of the free blocks in the order in which they are handed out."""

    def __init__(self, num_blocks):
        self.queue = list(range(1, num_blocks))
        self.ref_count = [0] * num_blocks

    def pop(self, count):
        """`count` blocks from the head; None, and nothing changed, where fewer are free."""
        if count > len(self.queue):
            return None
        blocks, self.queue = self.queue[:count], self.queue[count:]
        for block in blocks:
            self.ref_count[block] = 1
        return blocks

    def touch(self, blocks, times=1):
        """Add references; a free block leaves the queue from wherever it stands."""
        for block in blocks:
            if block != 0 and times > 0:
                if self.ref_count[block] == 0:
                    self.queue.remove(block)
                self.ref_count[block] += times

    def release(self, blocks, keep=None):
        """Give back one row's references from its last block to its first: the head gets those not
        worth keeping.
        """
        keep = [False] * len(blocks) if keep is None else keep
        heads, tails = [], []
        for block, worth in reversed(list(zip(blocks, keep, strict=True))):
            if block == 0:
                continue
            self.ref_count[block] -= 1
            assert self.ref_count[block] >= 0
            if self.ref_count[block] == 0:
                (tails if worth else heads).append(block)
        self.queue = heads + self.queue + tails


class PlainDirectory:
    """Which block holds which content: tokens, and the identity of what is before them."""

    def __init__(self, block_size):
        self.block_size, self.next_id = block_size, 1
        self.known = {}  # (parent id, tokens) -> (id, block of each group)
        self.contents = {}  # block -> its id

    def evict(self, block):
        self.contents.pop(block, None)
        self.known = {
            content: (i, b)
            for content, (i, b) in self.known.items()
            if self.contents.get(b[0]) == i
        }

    def find(self, root, tokens):
        """Ids and blocks of the longest known beginning, in full blocks."""
        found, parent, size = [], root, self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            hit = self.known.get((parent, tuple(tokens[start : start + size])))
            if hit is None:
                break
            found.append(hit)
            parent = hit[0]
        return found

    def register(self, parent, tokens, blocks):
        """One more block of a row; returns its content's id. `blocks`: its block in each group, the
        first keeps all.
        """
        key = (parent, tuple(tokens))
        if key not in self.known:
            self.known[key] = (self.next_id, list(blocks))
            for block in blocks:
                if block:
                    self.contents[block] = self.next_id
            self.next_id += 1
            return self.next_id - 1
        content, known = self.known[key]
        for g, block in enumerate(blocks):
            if (
                g > 0
                and block
                and block not in self.contents
                and self.contents.get(known[g]) != content
            ):
                known[g] = block
                self.contents[block] = content
        return content


class PlainCache:
    """A pool, and for each group and row a list of block ids."""

    def __init__(self, num_blocks, num_rows, max_blocks, block_size, windows, caching=False):
        self.pool = PlainPool(num_blocks)
        self.directory = PlainDirectory(block_size) if caching else None
        self.max_blocks, self.block_size, self.windows = max_blocks, block_size, windows
        self.tables = [[[] for _ in range(num_rows)] for _ in windows]
        self.num_tokens = [0] * num_rows

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def missing(self, row, num_tokens):
        """Blocks that a row lacks in each group."""
        return [max(self.blocks_for(num_tokens) - len(table[row]), 0) for table in self.tables]

    def pop(self, count):
        blocks = self.pool.pop(count)
        if self.directory is not None:
            for block in blocks:
                self.directory.evict(block)
        return blocks

    def release(self, blocks):
        known = self.directory.contents if self.directory is not None else {}
        self.pool.release(blocks, [block in known for block in blocks])

    def share(self, row, blocks, num_tokens):
        """An empty row begins with blocks, a list for each group."""
        for table, own in zip(self.tables, blocks, strict=True):
            table[row] = list(own)
            self.pool.touch(own)
        self.num_tokens[row] = num_tokens

    def grow(self, row, need, num_tokens):
        for table, count in zip(self.tables, need, strict=True):
            table[row] += self.pop(count)
        self.num_tokens[row] = max(self.num_tokens[row], num_tokens)

    def allocate(self, rows, new, reserved=0, must_fit=0):
        """All rows or none."""
        targets = [self.num_tokens[row] + count for row, count in zip(rows, new, strict=True)]
        whole = sum(
            sum(self.missing(row, max(target, must_fit)))
            for row, target in zip(rows, targets, strict=True)
        )
        writes = [(row, self.num_tokens[row]) for row in rows]
        whole += self.count_copies(writes)
        if (
            whole > len(self.pool.queue) - reserved
            or max(targets) > self.max_blocks * self.block_size
        ):
            return False
        self.copy_on_write(writes)
        for row, target in zip(rows, targets, strict=True):
            self.grow(row, self.missing(row, target), target)
        return True

    def shared_by(self, row, position):
        """The group tables in which the block of a position is there and shared."""
        column = position // self.block_size
        return [
            t[row]
            for t in self.tables
            if column < len(t[row]) and self.pool.ref_count[t[row][column]] > 1
        ]

    def copy_on_write(self, writes):
        """Each row that writes to a position of a shared block gets another block, one row after
        another. Returns the copies.
        """
        copies = []
        for row, position in writes:
            for table in self.shared_by(row, position):
                column = position // self.block_size
                old, (new,) = table[column], self.pop(1)
                self.pool.ref_count[old] -= 1
                table[column] = new
                copies.append((old, new))
        return copies

    def count_copies(self, writes):
        """Of k writers of a block with r references all copy if r > k, all but one if r = k."""
        writers = {}
        for row, position in writes:
            for table in self.shared_by(row, position):
                block = table[position // self.block_size]
                writers[block] = writers.get(block, 0) + 1
        return sum(
            count - (self.pool.ref_count[block] == count) for block, count in writers.items()
        )

    def is_empty(self, row):
        return self.num_tokens[row] == 0 and not any(table[row] for table in self.tables)

    def fork(self, parent, children):
        if parent in children or not all(self.is_empty(child) for child in children):
            return False
        for table in self.tables:
            self.pool.touch(table[parent], len(children))
            for child in children:
                table[child] = list(table[parent])
        for child in children:
            self.num_tokens[child] = self.num_tokens[parent]
        return True

    def free(self, rows):
        """One row after another; a row's groups count as one long table."""
        for row in rows:
            self.release([block for table in self.tables for block in table[row]])
            for table in self.tables:
                table[row] = []
            self.num_tokens[row] = 0

    def first_live_block(self, computed, window):
        return 0 if window is None else max(computed - window + 1, 0) // self.block_size

    def release_below_window(self, rows, before, after):
        """Nulls for the blocks that fell below each row's window as `before` computed tokens became
        `after`.
        """
        gone = []
        for row, first, then in zip(rows, before, after, strict=True):
            for table, window in zip(self.tables, self.windows, strict=True):
                low, high = (self.first_live_block(tokens, window) for tokens in (first, then))
                gone += table[row][low:high]
                table[row][low:high] = [0] * (high - low)
        self.release(gone)


def books(cache):
    """What a fetched `PagedCache` says, in the same words: queue, counts, tables, tokens."""
    pool, tables = cache.pool, cache.tables
    size = len(pool.ring)
    ring = [int(pool.ring[(pool.head + k) % size]) for k in range(pool.span)]
    queue = [block for k, block in enumerate(ring) if pool.stamp[block] == (pool.head + k) % size]
    lists = [
        [blocks[:count].tolist() for blocks, count in zip(*group, strict=True)]
        for group in zip(tables.blocks, tables.num_blocks, strict=True)
    ]
    return queue, pool.ref_count.tolist()[1:], lists, tables.num_tokens.tolist()


def plain_books(cache):
    """The same of a `PlainCache`."""
    return cache.pool.queue, cache.pool.ref_count[1:], cache.tables, cache.num_tokens
