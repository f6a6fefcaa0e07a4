"""In float32 a request's tokens depend on nothing but the request: not on neighbours, chunks,
preemption or what pages held.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from engines import make_engine, news
from paged_jax import SamplingParams, check_integrity
from paged_jax.models import load_model
from toy_decoder import random_prompts

TINY = pathlib.Path(__file__).parent / "data" / "tiny"
PROMPTS = random_prompts(11, [9, 30, 17, 3, 41, 12, 22, 5, 14, 8, 26, 19] * 2, vocab_size=256)
PARAMS = [
    SamplingParams(
        temperature=(i % 2) * 0.9,
        top_k=(0, 40, 0, 12)[i % 4],
        top_p=(1, 0.95, 1)[i % 3],
        seed=i,
        max_tokens=12,
    )
    for i in range(24)
]


@pytest.fixture(scope="module")
def model():
    return nnx.split(load_model(TINY / "llama", "float32")[0])


def run(engine, count, between=None):
    """Tokens of the first `count` requests, run together."""
    ids = [engine.add_request(p, s) for p, s in zip(PROMPTS[:count], PARAMS[:count], strict=True)]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        if between is not None:
            between(engine)
        for update in news(engine, 1 if between else 32):
            tokens[update.request_id] += update.token_ids
    return [tokens[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself, a whole prompt a step."""
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=64, block_size=4)
    engine = make_engine(model, 40, 64, widths=(64,), **sizes)
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
        outputs.append([token for update in news(engine, 100) for token in update.token_ids])
        assert not engine.has_unfinished()
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "running", "num_blocks", "widths"),
    [(16, 16, 400, None), (64, 24, 400, None), (512, 24, 400, (512,)), (64, 24, 30, (64,))],
    ids=["16 a step", "64 a step", "512 a step", "preempted"],
)
def test_tokens_are_the_same_alone_and_in_batches(
    model, alone, budget, running, num_blocks, widths
):
    sizes = dict(max_num_seqs=running, max_num_batched_tokens=budget, block_size=4)
    engine = make_engine(model, num_blocks, 64, widths=widths, **sizes)
    for count in (2, 7, 24):
        assert run(engine, count) == alone[:count]
    counters = engine.counters
    assert counters is not None
    assert (int(counters.preemptions) >= 2) == (num_blocks == 30)
    assert check_integrity(engine.state) == []


def poison(engine):
    """Write NaN to every page position that is not a computed token of a running sequence."""
    cache, seqs = engine.state.cache, jax.device_get(engine.state.seqs)
    tables = jax.device_get(cache.tables)
    shape = cache.kv.k_pages[0].shape[:2]
    live = np.zeros(shape, bool)
    for row in seqs.running[: seqs.num_running]:
        positions = np.arange(seqs.num_computed[row])
        for g, group in enumerate(cache.config.groups):
            low = int(group.first_live_block(jnp.int32(len(positions)), shape[1]))
            window = getattr(group, "window", len(positions) + 1)
            seen = positions[max(len(positions) - window + 1, 0) :]
            assert low * shape[1] <= (seen[0] if len(seen) else len(positions))
            live[tables.blocks[g, row, seen // shape[1]], seen % shape[1]] = True
    assert not live[0].any(), "the null block holds no token"
    mask = jnp.asarray(live)[:, :, None, None]
    k, v = (
        tuple(jnp.where(mask, p, jnp.nan) for p in pages)
        for pages in (cache.kv.k_pages, cache.kv.v_pages)
    )
    engine.state = engine.state.replace(
        cache=cache.replace(kv=cache.kv.replace(k_pages=k, v_pages=v))
    )
    assert check_integrity(engine.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_what_unused_pages_hold_never_matters(name):
    model = nnx.split(load_model(TINY / name, "float32")[0])
    sizes = dict(max_num_seqs=6, max_num_batched_tokens=16, block_size=4)
    engine = make_engine(model, 30, 64, widths=(16,), **sizes)
    clean = run(engine, 7)
    assert run(engine, 7, between=poison) == clean
