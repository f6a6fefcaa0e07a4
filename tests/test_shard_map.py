"""Inside `jax.shard_map` each device decodes its own share of a batch, as it would alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from engines import QUICK, make_engine, windowed_llama
from paged_jax import (
    BeamSearchParams,
    CacheConfig,
    SamplingParams,
    allocate_slots,
    check_integrity,
    fork,
    free,
    generate,
    init_cache,
)
from paged_jax.engine.step import run

pytestmark = pytest.mark.slow
ALL, SHARE = PartitionSpec(), PartitionSpec("data")
GRAPHDEF, PARAMS = nnx.split(windowed_llama())


def shard(function, in_specs):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=SHARE)
    return jax.jit(mapped, compiler_options=QUICK)


@pytest.mark.parametrize("varies", ["prompts", "params"])
def test_generate_gives_each_device_the_tokens_of_its_share_alone(varies):
    options = dict(max_new_tokens=6, num_samples=2, block_size=4, top_k=5, num_blocks=14)
    options |= dict(max_num_batched_tokens=4, max_num_seqs=2)

    def rollout(params, prompts, lens, key):
        return generate(GRAPHDEF, params, prompts, lens, key, **options).tokens

    prompts, lens = np.array([[1, 2, 3, 4], [4, 5, 0, 0]]), np.array([4, 2])
    key, alone = jax.random.key(0), jax.jit(rollout, compiler_options=QUICK)

    def rollout_share(params, prompts, lens, key):
        return rollout(params, prompts, lens, jax.random.fold_in(key, jax.lax.axis_index("data")))

    def rollout_own(params, *rest):
        return rollout(jax.tree.map(lambda x: x[0], params), *rest)

    if varies == "prompts":
        got = shard(rollout_share, (ALL, SHARE, SHARE, ALL))(PARAMS, prompts, lens, key)
        shares = [(prompts[i : i + 1], lens[i : i + 1], jax.random.fold_in(key, i)) for i in (0, 1)]
        want = [alone(PARAMS, *share) for share in shares]
    else:
        both = jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS)
        got = shard(rollout_own, (SHARE, ALL, ALL, ALL))(both, prompts[:1], lens[:1], key)
        negative = jax.tree.map(jnp.negative, PARAMS)
        want = [alone(params, prompts[:1], lens[:1], key) for params in (PARAMS, negative)]
    np.testing.assert_array_equal(got, np.concatenate(want))


def test_engines_with_all_they_have_go_on_as_each_would_alone():
    # The compiler of jaxlib 0.11.2 crashes on a prefix directory inside a shard_map.
    has_directory = jax.__version_info__ >= (0, 12)
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, max_beam_width=2)
    sizes |= dict(enable_prefix_caching=has_directory)
    states = []
    for prompt in ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5]):
        engine = make_engine((GRAPHDEF, PARAMS), 20, 32, **sizes)
        engine.add_request(prompt, SamplingParams(n=2, seed=1, top_p=0.9, max_tokens=9))
        engine.add_request(prompt, BeamSearchParams(2, max_tokens=6))
        engine.add_request([*prompt, 1], SamplingParams(temperature=0, max_tokens=9))
        engine.dispatch(0)
        engine.collect_all()
        states.append(engine.state)

    kind = jax.tree.structure(states[0])

    def go_on(params, leaves):
        state = jax.tree.unflatten(kind, leaves)
        return jax.tree.leaves(run(nnx.merge(GRAPHDEF, params), state, jnp.int32(50))[0])

    def go_on_share(params, leaves):
        return [x[None] for x in go_on(params, [x[0] for x in leaves])]

    leaves = [jax.tree.leaves(state) for state in states]
    alone = jax.jit(go_on, compiler_options=QUICK)
    want = [alone(PARAMS, one) for one in leaves]
    both = [jnp.stack(pair) for pair in zip(*leaves, strict=True)]
    got = shard(go_on_share, (ALL, SHARE))(PARAMS, both)
    for i in range(2):
        mine = jax.tree.unflatten(kind, [x[i] for x in got])
        assert check_integrity(mine) == [] and (mine.counters.hit_tokens > 0) == has_directory
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mine)]
        for path, x, there in zip(paths, got, want[i], strict=True):
            is_float = x.dtype == jnp.float32
            tolerance = dict(rtol=1e-4, atol=1e-5) if is_float else dict(rtol=0, atol=0)
            np.testing.assert_allclose(x[i], there, **tolerance, err_msg=path)


def test_a_cache_by_hand_follows_rows_that_differ_from_device_to_device():
    def use(rows):
        cache = init_cache(CacheConfig(16, 4, 4, 4, enable_prefix_caching=True))
        cache, _ = allocate_slots(cache, rows, 6)
        cache, _ = fork(cache, rows[0], (rows[:1] + 2) % 4)
        cache, _ = allocate_slots(cache, rows[:1], 1)
        cache, ok = free(cache, rows)
        return ok[None], cache.tables.blocks, cache.pool.ref_count

    rows = np.array([0, 1, 2, 3], np.int32)
    got, want = shard(use, SHARE)(rows), [use(rows[:2]), use(rows[2:])]
    for x, *both in zip(got, *want, strict=True):
        np.testing.assert_array_equal(x, np.concatenate(both))
    assert np.all(got[0])
