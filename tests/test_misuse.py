"""Whatever is passed, the answer is a typed error that names the argument and what is accepted."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import (
    LLM,
    BeamSearchParams,
    CacheConfig,
    ConfigError,
    Engine,
    EngineConfig,
    FullAttention,
    InvalidRequestError,
    SamplingParams,
    SlidingWindow,
    allocate_slots,
    check_integrity,
    fork,
    free,
    generate,
    init_cache,
)
from paged_jax.engine.step import init_state
from test_jax_settings import settings
from toy_decoder import ToyDecoder

pytestmark = pytest.mark.usefixtures("no_annotation_checks")
TOY = ToyDecoder()
HUGE = 10**5000  # Python prints no int of so many digits
SIZES = dict(num_blocks=8, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=4)
PAGES = dict(num_blocks=8, num_rows=2, max_blocks_per_row=4, block_size=4)


def call(prompts=((1, 2, 3), (4, 5, 6)), lens=(3, 3), key=None, **options):
    key = jax.random.key(0) if key is None else key
    return generate(*nnx.split(TOY), prompts, lens, key, **(dict(max_new_tokens=2) | options))


@pytest.fixture(scope="module")
def engine():
    return Engine(*nnx.split(TOY), EngineConfig(**SIZES))


@pytest.fixture(scope="module")
def cache():
    return init_cache(CacheConfig(**PAGES))


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_seqs", "num_samples"])
def test_an_int_too_long_to_print_is_named_as_a_size(name):
    with pytest.raises(ValueError, match=f"{name}=<int of 16610 bits>: must be at most"):
        call(**{name: HUGE})


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "make",
    [
        *[lambda x, n=n: EngineConfig(**(SIZES | {n: x})) for n in SIZES],
        *[lambda x, n=n: CacheConfig(**(PAGES | {n: x})) for n in PAGES],
        lambda x: CacheConfig(**PAGES, groups=x),
        lambda x: CacheConfig(**PAGES, dtype=x),
        lambda x: EngineConfig(**SIZES, enable_prefix_caching=x),
        lambda x: SlidingWindow(x),
        lambda x: FullAttention(x),
        lambda x: Engine(*nnx.split(TOY), EngineConfig(**SIZES), widths=(x,)),
        lambda x: Engine(*nnx.split(TOY), EngineConfig(**SIZES), widths=x),
        lambda x: Engine(*nnx.split(TOY), EngineConfig(**SIZES), seed=x),
        lambda x: LLM(TOY, max_model_len=x),
        lambda x: LLM(TOY, dtype=x),
        lambda x: call(prompts=[[x, 1], [1, 1]]),
        lambda x: call(lens=[x, 1]),
        lambda x: check_integrity(x),
        lambda x: init_cache(x),
    ],
)
def test_a_config_of_it_is_refused(make, sign):
    with pytest.raises(ConfigError):
        make(HUGE * sign)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "make",
    [
        *[lambda x, f=f: SamplingParams(**{f.name: x}) for f in dataclasses.fields(SamplingParams)],
        lambda x: SamplingParams(stop_token_ids=[x]),
        *[
            lambda x, f=f: BeamSearchParams(**({"beam_width": 2} | {f.name: x}))
            for f in dataclasses.fields(BeamSearchParams)
        ],
        *[
            lambda x, n=n: call(**{n: x})
            for n in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "key")
        ],
        lambda x: call(max_new_tokens=[x, 1]),
        lambda x: call(temperature=[x, 1]),
        lambda x: call(stop_ids=[x]),
    ],
)
def test_a_parameter_of_it_is_refused(make, sign):
    with pytest.raises(InvalidRequestError):
        make(HUGE * sign)


def test_a_request_of_it_is_refused_and_so_are_rows_and_counts(engine, cache):
    for arguments in (
        dict(prompt=[HUGE]),
        dict(prompt=HUGE),
        dict(prompt=[1], sampling_params=HUGE),
        dict(prompt=[1], request_id=HUGE),
        dict(prompt=[1], cache_salt=HUGE),
    ):
        with pytest.raises(InvalidRequestError):
            engine.add_request(**arguments)
    with pytest.raises(InvalidRequestError):
        engine.run(-HUGE)
    with pytest.raises(InvalidRequestError):
        engine.take(HUGE)
    for number in (HUGE, -HUGE, [HUGE], None, "1", [[1], [1, 2]]):
        for use in (
            lambda: allocate_slots(cache, 0, number),  # noqa: B023
            lambda: allocate_slots(cache, number, 1),  # noqa: B023
            lambda: allocate_slots(cache, 0, 1, reserved_blocks=number),  # noqa: B023
            lambda: allocate_slots(cache, 0, 1, must_fit_tokens=number),  # noqa: B023
            lambda: fork(cache, 0, number),  # noqa: B023
            lambda: free(cache, number),  # noqa: B023
        ):
            with pytest.raises(ConfigError):
                use()
    assert not engine.has_unfinished()


@pytest.mark.parametrize("wrong", [None, 3, "cache", EngineConfig(**SIZES), CacheConfig])
def test_what_is_no_cache_or_config_is_named(wrong):
    for name, use in {
        "config": lambda: init_cache(wrong),
        "cache": lambda: allocate_slots(wrong, 0, 1),
        "cache ": lambda: fork(wrong, 0, 1),
        " cache": lambda: free(wrong, 0),
        "state": lambda: check_integrity(wrong),
    }.items():
        with pytest.raises(ConfigError, match=f"^{name.strip()}=.* is needed"):
            use()
    if wrong is not None:
        with pytest.raises(ConfigError, match=r"^cache=.*: a PagedCache"):
            call(cache=wrong)
    if not isinstance(wrong, EngineConfig):
        with pytest.raises(ConfigError, match=r"^config=.*: an EngineConfig is needed"):
            init_state(wrong, TOY)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(prompts=np.array(3)), "prompts: shape"),
        (dict(prompts=[[1, 2], [3]]), "prompts=.*rows of one length"),
        (dict(prompts=np.ones((1, 2, 3), int)), "prompts: shape"),
        (dict(prompts=None), "prompts=.*int token ids"),
        (dict(lens=[[1], [1, 2]]), "prompt_lens=.*rows of one length"),
        (dict(lens=[3.0, 3.0]), "prompt_lens: .*float"),
        (dict(max_new_tokens=[[1], [1, 2]]), "max_new_tokens=.*ints"),
        (dict(max_new_tokens=2.0), "max_new_tokens=2.0: an int"),
        (dict(num_samples=2.0), "num_samples=2.0: an int"),
        (dict(top_k=[[1], [1, 2]]), "top_k=.*numbers"),
        (dict(top_p=1e-46), "top_p=1e-46: must be in .* as a float32"),
        (dict(top_p=np.float64(1e-46)), "top_p=.*: must be in .* as a float32"),
        (dict(temperature=[1.0, 1e39]), "temperature=.*: must be from 0 to"),
        (dict(eos_ids=3), "eos_ids=3: a sequence"),
    ],
    ids=str,
)
def test_arguments_of_generate_are_named(options, says):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=f"^{says}"):
        warnings.simplefilter("error")
        call(**options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SamplingParams(top_p=1e-46), "top_p=1e-46: must be in .* as a float32"),
        (lambda: BeamSearchParams(2, length_penalty=1e39), "length_penalty=1e.39: .*float32"),
        (lambda: BeamSearchParams(2, length_penalty=-1e39), "length_penalty=-1e.39: .*float32"),
    ],
)
def test_numbers_must_be_right_in_float32_too(make, says):
    with warnings.catch_warnings(), pytest.raises(InvalidRequestError, match=says):
        warnings.simplefilter("error")
        make()


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.uint64])
def test_integers_of_numpy_are_taken_everywhere(kind):
    assert EngineConfig(**{k: kind(v) for k, v in SIZES.items()}) == EngineConfig(**SIZES)
    assert CacheConfig(**{k: kind(v) for k, v in PAGES.items()}) == CacheConfig(**PAGES)
    params = dict(top_k=3, seed=5, max_tokens=7, min_tokens=2, n=2)
    given = SamplingParams(**{k: kind(v) for k, v in params.items()}, stop_token_ids=[kind(4)])
    assert given == SamplingParams(**params, stop_token_ids=[4])
    assert BeamSearchParams(kind(2), kind(3)) == BeamSearchParams(2, 3)
    assert SlidingWindow(kind(5), kind(1)) == SlidingWindow(5, 1)


@pytest.mark.parametrize("dtype", ["f4,f4", ("f4", (2,)), "float64", np.longdouble, "int32", None])
def test_a_dtype_that_pages_can_not_have_is_refused(dtype):
    with pytest.raises(ConfigError, match=r"dtype=.*"):
        CacheConfig(**PAGES, dtype=dtype)


def test_float64_pages_are_there_where_x64_is_on():
    with settings(jax_enable_x64=True):
        assert init_cache(
            CacheConfig(**PAGES, dtype="float64", groups=(FullAttention(1),))
        ).kv.k_pages[0].dtype == jnp.dtype("float64")
