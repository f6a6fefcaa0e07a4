"""The scheduler in plain Python: one step at a time, each rule where it applies, over `PlainCache`."""

from dataclasses import dataclass, field

from plain_cache import PlainCache


@dataclass
class PlainRequest:
    prompt: list
    max_len: int
    stop_ids: tuple = ()
    computed: int = 0
    finish_reason: str | None = None
    tokens: list = field(init=False)

    def __post_init__(self):
        self.tokens = list(self.prompt)


class PlainScheduler:
    """Predicts every step of an engine whose decoder can be asked for its next token."""

    def __init__(self, config, windows, next_token):
        self.config, self.next_token = config, next_token
        self.cache = PlainCache(config.num_blocks, config.rows, config.max_blocks_per_row, config.block_size, windows)
        self.requests, self.running, self.waiting = {}, [], []
        self.preemptions = 0

    def add(self, row, request):
        self.requests[row] = request
        self.waiting.append(row)

    def abort(self, row):
        if row in self.waiting + self.running and self.requests[row].finish_reason is None:
            self.requests[row].finish_reason = "abort"
            self.waiting = [other for other in self.waiting if other != row]

    def is_busy(self):
        return bool(self.waiting) or any(self.requests[row].finish_reason is None for row in self.running)

    def run_one(self):
        """A step if there is anything to do; then the rows that ended give their blocks back. Returns the tokens computed."""
        take = self.step() if self.is_busy() else {}
        self.release_finished()
        return take

    def step(self):
        self.release_finished()
        take, preempted = self.plan(), False
        while self.needed(take) > self.num_free():
            self.preempt_last()
            take, preempted = self.plan(), True
        reserved, left = self.needed(take), self.config.max_num_batched_tokens - sum(take.values())
        while not preempted and left > 0 and self.can_admit(reserved):
            left -= self.admit_first(left)
        take = self.plan()
        for row, count in take.items():
            self.grow(row, self.requests[row].computed + count)
        for row, count in take.items():
            self.compute(row, count)
        for row, count in take.items():
            after = self.requests[row].computed
            self.cache.release_below_window(row, after - count, after)
        return take

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
        return sum(sum(self.cache.missing(row, self.requests[row].computed + count)) for row, count in take.items())

    def grow(self, row, num_tokens):
        self.cache.grow(row, self.cache.missing(row, num_tokens), num_tokens)

    def release_finished(self):
        self.cache.free([row for row in self.running if self.requests[row].finish_reason is not None])
        self.running = [row for row in self.running if self.requests[row].finish_reason is None]

    def preempt_last(self):
        row = self.running.pop()
        self.cache.free([row])
        self.requests[row].computed = 0
        self.waiting.insert(0, row)
        self.preemptions += 1

    def can_admit(self, reserved):
        if not self.waiting or len(self.running) == self.config.max_num_seqs:
            return False
        whole, chunk = len(self.requests[self.waiting[0]].tokens), self.config.max_num_batched_tokens
        blocks = 0
        for window in self.cache.windows:
            most = self.cache.blocks_for(whole)
            blocks += most if window is None else min(most, self.cache.blocks_for(window - 1 + chunk) + 1)
        return blocks <= self.num_free() - reserved

    def admit_first(self, left):
        """All blocks at once where every token stays visible, those of the first chunk where a window passes."""
        row = self.waiting.pop(0)
        self.running.append(row)
        whole = len(self.requests[row].tokens)
        chunk = min(whole, left)
        targets = [whole if window is None else chunk for window in self.cache.windows]
        self.cache.grow(row, [self.cache.blocks_for(target) for target in targets], whole)
        return chunk

    def compute(self, row, count):
        request = self.requests[row]
        request.computed += count
        if request.computed == len(request.tokens):
            request.tokens.append(self.next_token(request.tokens))
            if request.tokens[-1] in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.tokens) == request.max_len:
                request.finish_reason = "length"
