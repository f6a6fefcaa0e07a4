"""The scheduler in plain Python: a step at a time, each rule where it applies, on `PlainCache`."""

from dataclasses import dataclass, field

from plain_cache import PlainCache


@dataclass
class PlainRequest:
    prompt: list
    max_len: int
    stop_ids: tuple = ()
    computed: int = 0
    finish_reason: str | None = None
    known: int = 0  # full blocks that are registered
    content: int = -1  # what the next one's content follows
    was_admitted: bool = False
    tokens: list = field(init=False)

    def __post_init__(self):
        self.tokens = list(self.prompt)


class PlainScheduler:
    """Predicts every step of an engine whose decoder can be asked for its next token."""

    def __init__(self, config, windows, next_token):
        self.config, self.next_token = config, next_token
        sizes = (config.num_blocks, config.num_rows, config.max_blocks_per_row, config.block_size)
        self.cache = PlainCache(*sizes, windows, config.enable_prefix_caching)
        self.requests, self.running, self.waiting = {}, [], []
        self.preemptions, self.queried, self.hits = 0, 0, 0

    def add(self, row, request):
        self.requests[row] = request
        self.waiting.append(row)

    def abort(self, row):
        if row in self.waiting + self.running and self.requests[row].finish_reason is None:
            self.requests[row].finish_reason = "abort"
            self.waiting = [other for other in self.waiting if other != row]

    def is_busy(self):
        return bool(self.waiting) or any(
            self.requests[row].finish_reason is None for row in self.running
        )

    def has_finished(self):
        return any(self.requests[row].finish_reason is not None for row in self.running)

    def step(self, eventful):
        """Returns the tokens that each row computes. `eventful`: whether the engine says that
        anything but decoding happened: then, and not before, it registers what rows have computed.
        """
        assert eventful or not self.has_finished()
        if eventful:
            self.register({})
        self.release_finished()
        take, preempted = self.plan(), False
        while self.needed(take) > self.num_free():
            self.preempt_last()
            take, preempted = self.plan(), True
        left = self.config.max_num_batched_tokens - sum(take.values())
        assert eventful or not preempted
        while (
            not preempted
            and left > 0
            and self.waiting
            and len(self.running) < self.config.max_num_seqs
        ):
            if eventful:
                self.register(self.plan())
            chunk = self.admit_first(self.reserved(), left)
            if chunk is None:
                break
            assert eventful
            left -= chunk
        take = self.plan()
        for row, count in take.items():
            self.grow(row, self.requests[row].computed + count)
        if eventful and any(self.cache.windows):
            self.register(take)
        for row, count in take.items():
            self.compute(row, count)
        after = [self.requests[row].computed for row in take]
        before = [tokens - count for tokens, count in zip(after, take.values(), strict=True)]
        self.cache.release_below_window(list(take), before, after)
        return take

    def drain(self):
        """What has finished gives its blocks back."""
        self.register({})
        self.release_finished()

    def register(self, take):
        """Make all full blocks known that rows have, or will have in this step: block by block, in
        each round one of every row.
        """
        size = self.config.block_size

        def full(row):
            there = min(len(table[row]) for table in self.cache.tables)
            return min((self.requests[row].computed + take.get(row, 0)) // size, there)

        while self.cache.directory is not None:
            pending = [row for row in self.running if self.requests[row].known < full(row)]
            if not pending:
                break
            for row in pending:
                request = self.requests[row]
                start = request.known * size
                blocks = [table[row][request.known] for table in self.cache.tables]
                tokens = request.tokens[start : start + size]
                request.content = self.cache.directory.register(request.content, tokens, blocks)
                request.known += 1

    def num_free(self):
        return len(self.cache.pool.queue)

    def plan(self):
        """First come, first served."""
        take, left = {}, self.config.max_num_batched_tokens
        for row in self.running:
            request = self.requests[row]
            take[row] = min(len(request.tokens) - request.computed, left)
            left -= take[row]
        return {row: count for row, count in take.items() if count > 0}

    def needed(self, take):
        return sum(
            sum(self.cache.missing(row, self.requests[row].computed + count))
            for row, count in take.items()
        )

    def reserved(self):
        """What running rows will still need to compute the tokens that they have; where they have
        all of that since they started, this step's.
        """
        if not any(self.cache.windows):
            return self.needed(self.plan())
        return sum(
            max(self.most_held(window, row) - sum(block != 0 for block in table[row]), 0)
            for window, table in zip(self.cache.windows, self.cache.tables, strict=True)
            for row in self.running
        )

    def most_held(self, window, row):
        request, cache = self.requests[row], self.cache
        whole = cache.blocks_for(len(request.tokens))
        if window is None:
            return whole
        left = len(request.tokens) - request.computed
        chunk = min(left, self.config.max_num_batched_tokens)
        return min(whole, cache.blocks_for(window - 1 + chunk) + 1)

    def grow(self, row, num_tokens):
        self.cache.grow(row, self.cache.missing(row, num_tokens), num_tokens)

    def release_finished(self):
        self.cache.free(
            [row for row in self.running if self.requests[row].finish_reason is not None]
        )
        self.running = [row for row in self.running if self.requests[row].finish_reason is None]

    def preempt_last(self):
        row = self.running.pop()
        self.cache.free([row])
        self.requests[row].computed = 0
        self.waiting.insert(0, row)
        self.preemptions += 1

    def admit_first(self, reserved, left):
        """The first chunk's tokens if the head fits: all blocks at once where every token stays
        visible, those of the first chunk where a window passes. What is found in the cache it
        shares, as far as the windows' groups have theirs.
        """
        row, most = self.waiting[0], self.config.max_num_batched_tokens
        request, cache = self.requests[row], self.cache
        whole = len(request.tokens)
        found = cache.directory.find(-1, request.tokens) if cache.directory is not None else []
        count, shared = self.usable(found, whole)
        hits = count * self.config.block_size
        computed = min(hits, whole - 1)
        chunk = min(whole - computed, left)
        blocks = 0
        for window in cache.windows:
            all_of_it = cache.blocks_for(whole)
            blocks += (
                all_of_it
                if window is None
                else min(all_of_it, cache.blocks_for(window - 1 + most) + 1)
            )
        named = [block for table in shared for block in table if block]
        waking = sum(cache.pool.ref_count[block] == 0 for block in named)
        if blocks - len(named) + waking > self.num_free() - reserved:
            return None
        self.running.append(self.waiting.pop(0))
        cache.share(row, shared, hits)
        targets = [whole if window is None else computed + chunk for window in cache.windows]
        cache.grow(row, [max(cache.blocks_for(target) - count, 0) for target in targets], whole)
        request.computed, request.known = computed, count
        request.content = found[count - 1][0] if count else -1
        if not request.was_admitted:
            self.queried, self.hits, request.was_admitted = (
                self.queried + len(request.prompt),
                self.hits + hits,
                True,
            )
        return chunk

    def usable(self, found, whole):
        """How many of the blocks found can be used, and the tables that begin with them."""
        cache, size = self.cache, self.config.block_size
        for count in range(len(found), -1, -1):
            tables = []
            for g, window in enumerate(cache.windows):
                low = min(cache.first_live_block(min(count * size, whole - 1), window), count)
                tables.append([0] * low + [hit[1][g] for hit in found[low:count]])
                live = cache.directory.contents if count else {}
                if any(live.get(hit[1][g]) != hit[0] for hit in found[low:count]):
                    break
            else:
                return count, tables
        raise AssertionError("no block at all can always be used")

    def compute(self, row, count):
        request = self.requests[row]
        request.computed += count
        if request.computed == len(request.tokens):
            request.tokens.append(self.next_token(request.tokens))
            if request.tokens[-1] in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.tokens) == request.max_len:
                request.finish_reason = "length"
