"""Two thousand random requests, with all that people do to an engine on the way."""

import random

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import engines
from compilations import compilations
from interrupt import run_interrupted
from paged_jax import BeamSearchParams, SamplingParams, check_integrity
from toy_decoder import ToyDecoder

NUM_REQUESTS, MAX_LEN = 2000, 40
SIZES = dict(max_num_seqs=5, max_num_batched_tokens=12, num_rows=8, block_size=4)
SIZES |= dict(enable_prefix_caching=True, max_beam_width=4)
MODELS = {"full": ((None,), 26), "windows": ((7,), 20), "mixed": ((None, 7), 44)}  # windows, blocks
STARTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 1, 2, 3, 4], []]  # what prompts share


class ShiftedDecoder(ToyDecoder):
    """A decoder with params: the next token is `shift` further."""

    def __init__(self, windows):
        super().__init__(windows=windows, max_model_len=MAX_LEN)
        self.shift = nnx.Param(jnp.float32(0))

    def logits(self, hidden):
        return super().logits((hidden + self.shift[...]) % self.vocab_size)


def random_request(draw):
    start = draw.choice(STARTS)
    prompt = start + [draw.randrange(97) for _ in range(draw.randint(1, 12))]
    count = draw.randint(1, MAX_LEN - len(prompt))
    kind = draw.random()
    if kind < 0.4:
        return prompt, SamplingParams(temperature=0, max_tokens=count)
    if kind < 0.6:
        filters = dict(top_k=draw.choice([0, 5]), top_p=draw.choice([1.0, 0.8]))
        return prompt, SamplingParams(
            temperature=3.0, seed=draw.randrange(99), max_tokens=count, **filters
        )
    if kind < 0.75:
        n = draw.randint(2, 4)
        return prompt, SamplingParams(temperature=9.0, n=n, seed=draw.randrange(9), max_tokens=7)
    if kind < 0.85:
        return prompt, BeamSearchParams(draw.randint(1, 3), max_tokens=min(count, 6))
    stops = draw.sample(range(97), 6)
    return prompt, SamplingParams(
        temperature=5.0, seed=3, max_tokens=count, stop_token_ids=stops, min_tokens=min(2, count)
    )


class Client:
    """Adds, reads, aborts; knows what each output has, and how it ended."""

    def __init__(self, engine, draw):
        self.engine, self.draw = engine, draw
        self.requests, self.outputs, self.aborted, self.open = {}, {}, set(), {}
        self.interrupts = self.resets = 0

    def add(self):
        prompt, params = random_request(self.draw)
        request_id, salt = f"r{len(self.requests)}", self.draw.choice([None, None, "a", "b"])

        def add():
            self.engine.add_request(prompt, params, request_id=request_id, cache_salt=salt)

        self.maybe_interrupted(add)
        if self.engine._requests.live.get(request_id) is None:
            add()  # interrupted before it was in
        self.requests[request_id] = prompt, params
        self.open[request_id] = getattr(params, "n", None) or params.beam_width

    def maybe_interrupted(self, operation):
        if self.draw.random() < 0.1:
            self.interrupts += run_interrupted(operation, self.draw.randrange(500)) is not None
        else:
            operation()
        if self.engine.is_closed():
            self.engine.reset()
            self.resets += 1

    def turn(self):
        draw, engine = self.draw, self.engine
        steps = draw.choice([1, 2, 7, 32])
        self.maybe_interrupted(
            draw.choice([lambda: engine.run(steps), lambda: engine.advance(steps)])
        )
        if self.open and draw.random() < 0.06:
            request_id = draw.choice([*self.open])
            self.maybe_interrupted(lambda: engine.abort(request_id))
            self.aborted.add(request_id)
        if self.open and draw.random() < 0.04:
            request_id = draw.choice([*self.open])
            engine.abandon([request_id])
            self.aborted.add(request_id)
            del self.open[request_id]
        if draw.random() < 0.05:
            self.maybe_interrupted(lambda: engine.update_params(engine.params))
        for request_id in [r for r in self.open if draw.random() < 0.7]:
            self.read(request_id)

    def read(self, request_id):
        for update in self.engine.take(request_id):
            key = request_id, update.index
            tokens, reason = self.outputs.get(key, ([], None))
            assert reason is None, "an update after the end"
            self.outputs[key] = tokens + update.token_ids, update.finish_reason
            self.open[request_id] -= update.finish_reason is not None
        if self.open[request_id] == 0:
            del self.open[request_id]

    def finish(self):
        while self.open:
            self.turn()
        self.engine.collect_all()
        self.engine.run(1)


def check_alone(alone, client, request_ids):
    """Each request that was not aborted has the outputs that it has alone."""
    for request_id in request_ids:
        prompt, params = client.requests[request_id]
        if request_id in client.aborted:
            continue
        solo = alone.add_request(prompt, params)
        while not alone.is_finished(solo):
            alone.run(32)
        for update in alone.take(solo):
            got = client.outputs[request_id, update.index]
            assert got == (update.token_ids, update.finish_reason), (request_id, update.index)


def memory(engine):
    """What is held on the device, and by the engine on the host."""
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    requests = engine._requests
    host = [len(x) for x in vars(requests).values()] + [len(engine._flying)]
    return len(arrays), sum(array.nbytes for array in arrays), host


@pytest.mark.soak
@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("name", MODELS)
def test_two_thousand_requests_leave_no_trace_and_each_is_as_alone(name):
    windows, num_blocks = MODELS[name]
    model = ShiftedDecoder(windows)
    engine = engines.make_engine(model, num_blocks, MAX_LEN, **SIZES)
    alone = engines.make_engine(model, num_blocks, MAX_LEN, **SIZES)
    draw = random.Random(0)
    client, warm, held = Client(engine, draw), [], None
    # Everything once, so that nothing is left to compile.
    for target in (engine, alone):
        first = target.add_request([1], SamplingParams(max_tokens=1))
        target.run(2)
        target.take(first)
        target.reset()
        target.update_params(target.params)
        target.reset_prefix_cache()
    done = 0
    with compilations() as compiled:
        while done < NUM_REQUESTS:
            shift = jnp.float32(draw.randrange(9))  # real news for the params, when all have ended
            for target in (engine, alone):
                params = jax.tree.map(lambda x: x, target.params)
                params["shift"][...] = shift
                target.update_params(params)
            for _ in range(100):
                client.add()
                if draw.random() < 0.5:
                    client.turn()
            client.finish()
            assert int(engine.state.cache.pool.num_free) == num_blocks - 1
            assert check_integrity(engine.state) == []
            batch = list(client.requests)[done : done + 100]
            check_alone(alone, client, batch)
            done += 100
            if done == 200:
                warm, held = list(compiled), memory(engine)
    assert compiled == warm and memory(engine) == held
    assert client.interrupts > 20 and client.resets > 2 and len(client.aborted) > 50
    assert int(engine.counters.hit_tokens) > 100
    assert name == "windows" or int(engine.counters.preemptions) > 10  # such rows never are
