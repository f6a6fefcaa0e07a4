"""`generate`: a whole batch in one program, inside someone else's, on meshes, with every way to
misuse it answered.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from compilations import compilations
from paged_jax import (
    CacheConfig,
    ConfigError,
    InvalidRequestError,
    allocate_slots,
    check_integrity,
    generate,
    init_cache,
)
from paged_jax.generate import _generate
from paged_jax.generate_arguments import _per_prompt
from paged_jax.kv_group import FullAttention
from paged_jax.models import Llama, LlamaConfig
from paged_jax.sampling.parameters import PARAMETERS
from paged_jax.scheduling.sequences import INVALID, LENGTH, NOT_FINISHED, STOP
from toy_decoder import ToyDecoder, random_prompts

TOY = ToyDecoder()
KEY = jax.random.key(0)
LLAMA = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    max_model_len=128,
    head_dim=16,
)


def pad(prompts, width=9):
    """Prompts as rows of one width, and their lengths: few shapes to compile."""
    lens = np.array([len(p) for p in prompts])
    out = np.zeros((len(prompts), width), np.int32)
    for i, prompt in enumerate(prompts):
        out[i, : len(prompt)] = prompt
    return out, lens


# Six prompts of up to nine tokens, and up to ten new ones of each: what differs only in values is
# compiled once.
GREEDY = dict(max_new_tokens=10, temperature=0.0, block_size=4, max_num_batched_tokens=6)


def call(prompts, lens, **options):
    return generate(*nnx.split(TOY), prompts, lens, KEY, **(GREEDY | options))


def test_more_prompts_than_run_at_once_in_a_small_pool_with_a_limit_each():
    prompts = random_prompts(0, [3, 7, 5, 1, 9, 2])
    limits = [5, 6, 7, 8, 9, 10]
    out = call(*pad(prompts), max_new_tokens=limits, max_num_seqs=3, num_blocks=7)
    assert out.tokens.shape == (6, 1, 10)
    for i, prompt in enumerate(prompts):
        want = TOY.continuation(prompt, limits[i])
        assert out.tokens[i, 0].tolist() == want + [0] * (10 - limits[i])
        assert out.logprobs[i, 0, limits[i] :].tolist() == [0] * (10 - limits[i])
    assert out.lengths[:, 0].tolist() == limits
    assert out.finish_reason[:, 0].tolist() == [LENGTH] * 6
    assert int(out.stats.peak_running) == 3 and int(out.stats.preemptions) > 0
    assert out.cache is None
    roomy = call(*pad(prompts), max_new_tokens=limits)
    np.testing.assert_array_equal(roomy.tokens, out.tokens)
    assert int(roomy.stats.peak_running) > 3 and int(roomy.stats.preemptions) == 0


def test_bad_rows_end_alone():
    prompts, lens = pad(random_prompts(2, [3, 4, 5, 6, 7, 8]))
    lens[0], lens[2] = 0, 10
    prompts = prompts.astype(np.int64)
    prompts[3, 2] = 97
    prompts[1, 0], lens[1] = 2**32 + 5, 4  # would be 5 in 32 bits
    prompts[4, 8] = 97  # behind the prompt's end: padding may be anything
    out = call(prompts, lens)
    assert out.finish_reason[:, 0].tolist() == [INVALID] * 4 + [LENGTH] * 2
    assert out.lengths[:, 0].tolist() == [0, 0, 0, 0, 10, 10]
    for row in (4, 5):
        want = TOY.continuation(prompts[row, : lens[row]].tolist(), 10)
        assert out.tokens[row, 0].tolist() == want


def test_stop_ids_end_a_sample_and_stay_in_it():
    prompts = random_prompts(3, [5] * 6)
    whole = TOY.continuation(prompts[0], 10)
    at = whole.index(whole[3])
    for ids in ({"stop_ids": (whole[3],)}, {"eos_ids": (whole[3],)}):
        out = call(*pad(prompts), **ids)
        assert out.tokens[0, 0, : at + 1].tolist() == whole[: at + 1]
        assert int(out.lengths[0, 0]) == at + 1 and int(out.finish_reason[0, 0]) == STOP


def test_a_cache_is_handed_from_call_to_call_and_keeps_the_callers_rows():
    prompts = pad(random_prompts(4, [3, 7, 5, 4, 9, 1]))
    want = call(*prompts).tokens
    cache = init_cache(CacheConfig.for_decoder(TOY, num_blocks=32, block_size=4, num_rows=2))
    cache, _ = allocate_slots(cache, 1, 4)
    for _ in range(2):
        out = call(*prompts, cache=cache)
        np.testing.assert_array_equal(out.tokens, want)
        cache = out.cache
        assert int(cache.pool.num_free) == 30 and check_integrity(cache) == []
    # A cache in which too little is free: nothing is lost, the rows say that they did not finish.
    taken = cache.replace(pool=cache.pool.replace(num_free=jnp.int32(0), span=jnp.int32(0)))
    out = call(*prompts, cache=taken)
    assert out.finish_reason[:, 0].tolist() == [NOT_FINISHED] * 6


def test_it_sits_inside_a_users_jit_and_traces_once_whatever_the_prompts():
    graphdef, params = nnx.split(TOY)
    traces = []

    @jax.jit
    def program(params, prompts, lens, temperature, key):
        traces.append(1)
        options = GREEDY | {"temperature": temperature}
        out = generate(graphdef, params, prompts, lens, key, **options)
        return out.tokens.sum(), out.tokens

    for seed in range(3):
        prompts, lens = pad(random_prompts(seed, [3, 4 + seed, 5, 1, 2, 9]))
        _, tokens = program(params, prompts, lens, 0.0, jax.random.key(seed))
        assert tokens[1, 0].tolist() == TOY.continuation(prompts[1, : lens[1]].tolist(), 10)
    assert len(traces) == 1
    call(*pad([[1]] * 6))
    before = _generate._cache_size()
    for seed in range(3):
        call(*pad(random_prompts(seed, [3, 4 + seed, 5, 1, 2, 9])), top_k=seed)
    assert _generate._cache_size() == before


def llama(num_kv_heads=4):
    return nnx.split(
        Llama(LlamaConfig(**{**vars(LLAMA), "num_kv_heads": num_kv_heads}), rngs=nnx.Rngs(0))
    )


@pytest.fixture(scope="module")
def sampled():
    prompts = pad(random_prompts(6, [3, 9, 1, 5, 7], vocab_size=128))
    options = dict(max_new_tokens=8, num_samples=2, block_size=4, temperature=0.8, top_k=20)
    options |= dict(max_num_seqs=10, max_num_batched_tokens=10)
    return prompts, options, generate(*llama(), *prompts, KEY, **options)


def test_samples_differ_from_each_other_and_repeat_with_their_key(sampled):
    prompts, options, out = sampled
    assert out.tokens.shape == (5, 2, 8)
    assert np.any(out.tokens[:, 0] != out.tokens[:, 1])
    again = generate(*llama(), *prompts, KEY, **options)
    np.testing.assert_array_equal(again.tokens, out.tokens)
    other = generate(*llama(), *prompts, jax.random.key(1), **options)
    assert np.any(other.tokens != out.tokens)


def test_sampled_tokens_do_not_depend_on_who_runs_beside_them(sampled):
    prompts, options, out = sampled
    options = options | dict(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=8)
    crowded = generate(*llama(), *prompts, KEY, **options)
    np.testing.assert_array_equal(crowded.tokens, out.tokens)


def test_no_gradient_flows_into_the_params(sampled):
    prompts, options, _ = sampled
    graphdef, params = llama()
    loss = lambda params: generate(graphdef, params, *prompts, KEY, **options).logprobs.sum()  # noqa: E731
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(jax.grad(loss)(params)))


@pytest.mark.parametrize(
    ("axis_type", "num_kv_heads"),
    [
        (AxisType.Auto, 4),
        (AxisType.Explicit, 4),
        (AxisType.Explicit, 2),
    ],  # 2 heads do not divide: they are replicated
)
def test_sharded_params_give_the_same_tokens(sampled, axis_type, num_kv_heads):
    assert jax.device_count() >= 4, "the tests' conftest asks for 4 virtual CPU devices"
    graphdef, params = llama(num_kv_heads)
    prompts, options, want = sampled
    if num_kv_heads == 2:
        want = generate(graphdef, params, *prompts, KEY, **options)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(axis_type,), devices=jax.devices()[:4])

    def place(path, x):
        name = jax.tree_util.keystr(path)
        if "qkv" in name:
            spec = PartitionSpec("tp" if num_kv_heads == 4 else None)
        elif "'out'" in name or "gate_up" in name or "down" in name:
            spec = PartitionSpec(None, "tp")
        elif "embed" in name or "head" in name:
            spec = PartitionSpec("tp")
        else:
            spec = PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    sharded = jax.tree_util.tree_map_with_path(place, params)
    out = generate(graphdef, sharded, *prompts, KEY, **options)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_allclose(out.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.usefixtures("no_annotation_checks")
def test_misuse_is_answered_by_name():
    graphdef, params = nnx.split(TOY)
    prompts, lens = pad(random_prompts(8, [3, 4]), width=4)

    def refuses(error, says, *, module=None, prompts=prompts, lens=lens, **options):
        options = {"max_new_tokens": 4, "block_size": 4, **options}
        with pytest.raises(error, match=says):
            generate(module or graphdef, params, prompts, lens, KEY, **options)

    refuses(ConfigError, "nnx.split", module=TOY)
    refuses(ConfigError, r"prompts: shape \(4,\)", prompts=prompts[0])
    refuses(ConfigError, "prompts: .* float32", prompts=prompts.astype(np.float32))
    refuses(ConfigError, r"prompt_lens: shape \(1,\)", lens=lens[:1])
    refuses(
        ConfigError, "num_blocks=2: a row of 8 tokens .* needs up to 2 blocks of 4", num_blocks=2
    )
    refuses(
        ConfigError,
        "max_num_batched_tokens=1: must be at least max_num_seqs=2",
        max_num_batched_tokens=1,
    )
    refuses(ConfigError, "max_num_seqs=0", max_num_seqs=0)
    refuses(InvalidRequestError, "max_new_tokens=0", max_new_tokens=0)
    refuses(InvalidRequestError, "max_new_tokens=.*one for each of 2", max_new_tokens=[1, 2, 3])
    refuses(ConfigError, "prompts=.*rows of one length", prompts=[[1, 2], [3]])
    refuses(ConfigError, "prompts=.*int token ids", prompts=["hi", "you"])
    refuses(
        ConfigError,
        "max_num_batched_tokens=1099511627776: must be at most",
        max_num_batched_tokens=2**40,
    )
    refuses(ConfigError, "cache=3: a PagedCache", cache=3)
    for key in (0, None, jax.random.split(KEY), np.zeros(3, np.uint32)):
        with pytest.raises(InvalidRequestError, match="key="):
            generate(graphdef, params, prompts, lens, key, max_new_tokens=4)
    for swapped in ((params, graphdef), (graphdef, TOY)):
        with pytest.raises(ConfigError, match="graphdef, params: a "):
            generate(*swapped, prompts, lens, KEY, max_new_tokens=4)
    for most in (2**33, [4, 2**32 + 1]):
        refuses(InvalidRequestError, "max_new_tokens=.*: must be from 1 to", max_new_tokens=most)
    for hot in (-1.0, 1e39, float("inf"), float("nan")):
        refuses(InvalidRequestError, "temperature=.*: must be from 0 to 1e", temperature=hot)
    for wrong in ("a", None, 1j, True):
        refuses(InvalidRequestError, "temperature", temperature=wrong)
    for wrong in (1.5, True, "a", [-2, 1]):
        refuses(InvalidRequestError, "top_k", top_k=wrong)
    for name in ("eos_ids", "stop_ids"):
        for wrong in (5, np.array(5)):
            refuses(InvalidRequestError, f"{name}=.*5.*: a sequence of token ids", **{name: wrong})
    refuses(InvalidRequestError, r"top_p=\[0.5, 0\]: must be in \(0, 1\]", top_p=[0.5, 0])
    refuses(InvalidRequestError, r"min_p: shape \(3,\)", min_p=[0.1] * 3)
    refuses(InvalidRequestError, "97 is outside the vocabulary of 97", stop_ids=(97,))
    refuses(InvalidRequestError, "num_samples=0", num_samples=0)
    refuses(
        ConfigError,
        "max_new_tokens: with prompts 65 tokens; the model was made for 64",
        max_new_tokens=61,
    )
    bad = init_cache(CacheConfig(9, 1, 1, groups=(FullAttention(2),), num_kv_heads=3))
    refuses(ConfigError, r"cache: pages \[.*, .*\], .* the model needs \[", cache=bad)
    refuses(ConfigError, r"cache: pages \[\]", cache=init_cache(CacheConfig(9, 1, 1)))
    own = init_cache(CacheConfig.for_decoder(TOY, num_blocks=9, block_size=4))
    half = own.replace(kv=jax.tree.map(lambda pages: pages.astype(jnp.bfloat16), own.kv))
    refuses(ConfigError, r"cache: pages \[.*bfloat16.*the model needs", cache=half)
    refuses(ConfigError, r"cache: pages \[\]", cache=own.books)
    with pytest.raises(ConfigError, match="max_new_tokens: is traced"):
        jax.jit(lambda n: generate(graphdef, params, prompts, lens, KEY, max_new_tokens=n))(4)


def test_a_count_past_32_bits_is_the_largest_and_does_not_wrap():
    (top_k,) = (p for p in PARAMETERS if p.name == "top_k")
    for value in (2**40, np.int64(2**32 + 1), np.array([2**32 + 1] * 2), [2**31 + 5, 2**40]):
        assert _per_prompt(top_k, value, 2).tolist() == [2**31 - 1] * 2


def test_a_bucket_computes_the_same_and_a_sweep_compiles_its_loop_once():
    graphdef, params = nnx.split(TOY)
    found = []
    with compilations() as messages:
        for batch, length, new in ((5, 6, 7), (7, 8, 5), (8, 5, 8)):
            prompts, lens = np.full((batch, length), 3), np.arange(batch) % length + 1
            key = jax.random.key(batch)
            sizes = dict(max_new_tokens=np.arange(batch) % new + 1, num_samples=2, top_k=9)
            call = partial(generate, graphdef, params, prompts, lens, key, **sizes)
            found.append((call(bucket=True), call))
        loops = [message for message in messages if "jit(_generate)" in message]
        assert len(loops) == 1, loops
    out, call = found[0]
    plain = call()
    assert out.tokens.shape == plain.tokens.shape == (5, 2, 5)
    for name in ("tokens", "lengths", "finish_reason"):
        assert np.array_equal(getattr(out, name), getattr(plain, name)), name
    assert np.allclose(out.logprobs, plain.logprobs, atol=1e-5)


def test_a_bucket_stays_within_the_model():
    graphdef, params = nnx.split(TOY)
    longest = TOY.max_model_len
    prompts = np.ones((1, longest - 3), int)
    out = generate(graphdef, params, prompts, [2], jax.random.key(0), max_new_tokens=3, bucket=True)
    assert out.tokens.shape == (1, 1, 3) and int(out.lengths[0, 0]) == 3
