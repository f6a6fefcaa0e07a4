"""The host's work for a request does not grow with the number of requests."""

import sys
from pathlib import Path

import engines
from paged_jax import SamplingParams
from toy_decoder import ToyDecoder

ROOT = str(Path(__file__).parents[2] / "paged_jax")
MODEL, TOOL = ToyDecoder(), 4


def lines_of(operation):
    """How many lines of ours an operation runs."""
    count = 0

    def see(code, _):
        nonlocal count
        count += code.co_filename.startswith(ROOT)

    monitoring = sys.monitoring
    monitoring.use_tool_id(TOOL, "lines")
    monitoring.register_callback(TOOL, monitoring.events.LINE, see)
    monitoring.set_events(TOOL, monitoring.events.LINE)
    try:
        operation()
    finally:
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.LINE, None)
        monitoring.free_tool_id(TOOL)
    return count


def work(engine, count):
    """Lines run to add requests, to abort every other of them, to serve and to take the rest, and
    to abandon as many."""
    ids, params = [], SamplingParams(temperature=0, max_tokens=1)

    def add():
        ids.extend(engine.add_request([1], params) for _ in range(count))

    def abort():
        assert all(engine.abort(request_id) for request_id in reversed(ids[::2]))

    def serve():
        while engine.has_unfinished():
            engine.run(32)

    def take():
        assert all(engine.take(request_id) for request_id in ids)

    def abandon():
        more = [engine.add_request([1], params) for _ in range(count)]
        engine.abandon(more)
        engine.run(1)
        assert not engine._requests.live and not engine._requests.queue

    return [lines_of(operation) for operation in (add, abort, serve, take, abandon)]


def test_twice_the_requests_are_twice_the_work():
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, num_rows=6, block_size=4)
    engine = engines.make_engine(MODEL, 30, 40, **sizes)
    work(engine, 10)
    once, twice = work(engine, 300), work(engine, 600)
    for first, second in zip(once, twice, strict=True):
        assert second < 2.3 * first, (once, twice)
