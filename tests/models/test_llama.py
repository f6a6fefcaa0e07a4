"""The decoder: against reference logits, under split and merge, and its config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.kv_group import FullAttention, SlidingWindow
from paged_jax.models import Llama, LlamaConfig, RopeConfig, load_model
from run_model import TINY, Sequence, compiled, greedy, logits_of, random_model

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=64,
    eos_token_ids=(2, 7),
)
# Together these have every option that the tiny checkpoints lack; compiling is what they cost.
VARIANTS = {
    "all biases, tied, one layer windowed": {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "windows": (None, 5, None),
    },
    "head width, qk-norm, two windows": {
        "head_dim": 16,
        "qk_norm": True,
        "windows": (5, 9, 5),
    },
}


def make(**changes):
    return random_model(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir()))
def test_logits_and_greedy_tokens_are_those_of_the_reference(name):
    model, tokenizer = load_model(TINY / name)
    assert tokenizer is None
    assert model.eos_token_ids == (2,)
    expected = np.load(TINY / name / "expected.npz")
    for tokens, logits in zip(expected["input_ids"], expected["logits"], strict=True):
        np.testing.assert_allclose(logits_of(model, tokens), logits, atol=2e-4)
    chunked = logits_of(model, expected["input_ids"][0], chunks=[7, 1, 13, 13, 3, 3])
    np.testing.assert_allclose(chunked, expected["logits"][0], atol=2e-4)
    # The tool that recorded the greedy tokens took id 0 for padding, which it left out.
    prompt = expected["input_ids"][0]
    assert greedy(model, prompt[prompt != 0], 16) == expected["greedy"].tolist()


def plain_forward(model, tokens):
    """The decoder again in numpy, float64, whole sequence at once: no pages, no fused products."""
    config = model.config
    get = lambda param: np.asarray(param[...], np.float64)  # noqa: E731
    d, group = config.head_dim, config.num_heads // config.num_kv_heads

    def norm(x, module):
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * get(module.scale)
        )

    def turn(x):
        angles = np.arange(len(tokens))[:, None] * config.rope.theta ** (-np.arange(0, d, 2) / d)
        pairs = x[..., : d // 2] + 1j * x[..., d // 2 :]
        pairs = pairs * np.exp(1j * angles)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = get(model.embed)[tokens]
    for layer, window in zip(model.layers, config.layer_windows, strict=True):
        h = norm(x, layer.attention_norm)
        qkv = np.einsum("td,kgjd->tkgj", h, get(layer.attention.qkv))
        if config.qkv_bias:
            qkv = qkv + get(layer.attention.qkv_bias)
        q, k, v = (
            qkv[:, :, :group].reshape(len(tokens), -1, d),
            qkv[:, :, group],
            qkv[:, :, group + 1],
        )
        if config.qk_norm:
            q, k = norm(q, layer.attention.q_norm), norm(k, layer.attention.k_norm)
        q, k, v = turn(q), np.repeat(turn(k), group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d)
        distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
        scores = np.where((distance >= 0) & (distance < (window or np.inf)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = (
            np.einsum("hts,shd->thd", weights, v).reshape(len(tokens), -1)
            @ get(layer.attention.out).T
        )
        x = x + out + (get(layer.attention.out_bias) if config.out_bias else 0)
        gate, up = np.einsum("td,cfd->ctf", norm(x, layer.mlp_norm), get(layer.mlp.gate_up))
        if config.mlp_bias:
            gate, up = gate + get(layer.mlp.gate_up_bias)[0], up + get(layer.mlp.gate_up_bias)[1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ get(layer.mlp.down).T
        x = x + (get(layer.mlp.down_bias) if config.mlp_bias else 0)
    return norm(x, model.norm) @ get(model.embed if config.tie_embeddings else model.head).T


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_plain_forward(variant):
    model = make(**VARIANTS[variant])
    tokens = np.random.default_rng(2).integers(0, 64, 30)
    expected = plain_forward(model, tokens)
    actual = logits_of(model, tokens, chunks=[11, 1, 16, 2])
    np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=2e-4)


def test_layers_of_one_window_form_a_group():
    config = dataclasses.replace(CONFIG, num_layers=5, windows=(8, None, 8, 8, None))
    assert config.kv_groups == (SlidingWindow(8, 3), FullAttention(2))
    assert config.kv_places == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1))


def test_split_and_merge_keep_what_the_engine_reads():
    windowed = dataclasses.replace(CONFIG, windows=(None, 4, None))
    model = random_model(windowed)
    graphdef, params = nnx.split(model)
    abstract, _ = nnx.split(nnx.eval_shape(lambda: Llama(windowed, rngs=nnx.Rngs(0))))
    assert graphdef == abstract and hash(graphdef) == hash(abstract)
    assert graphdef != nnx.split(make())[0]
    seen = []

    @jax.jit
    def trace(params):
        seen.append(nnx.merge(abstract, params))
        return seen[0].logits(jnp.ones((2, 32)))

    assert trace(params).shape == (2, 64)
    names = ("vocab_size", "max_model_len", "num_kv_heads", "head_dim", "eos_token_ids")
    for name in (*names, "kv_groups"):
        assert getattr(seen[0], name) == getattr(model, name) == getattr(model.config, name)


def test_new_parameters_are_random_in_the_dtype_of_the_config():
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        max_model_len=8,
        dtype="bfloat16",
    )
    leaves = jax.tree.leaves(nnx.split(Llama(config, rngs=nnx.Rngs(0)))[1])
    assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
    assert len({float(x.ravel()[0]) for x in leaves if x.ndim > 1}) > 1


def test_a_step_compiles_once_and_bfloat16_parameters_give_float32_logits_near_the_float32_ones():
    model, tokens = make(num_layers=1), np.arange(1, 20)
    graphdef, params = nnx.split(model)
    exact = logits_of(model, tokens, chunks=[1, 2, 16])
    assert compiled(graphdef)._cache_size() == 1
    low = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    logits = logits_of(low, tokens, dtype="bfloat16")
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, atol=0.15)


def test_float16_does_not_overflow_where_values_fit_but_their_squares_do_not():
    """Squares beyond 65504 occur in norms, sums of products in scores and logits."""
    model, tokens = make(num_layers=2, qk_norm=True), np.arange(1, 20)
    graphdef, params = nnx.split(model)
    params["embed"][...] = params["embed"][...] * 2000
    exact = logits_of(nnx.merge(graphdef, params), tokens)
    low = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.float16), params))
    assert low.dtype == "float16" and float(jnp.abs(low.embed[...]).max()) > 300
    logits = logits_of(low, tokens, dtype="float16")
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    np.testing.assert_allclose(logits, exact, atol=0.05)


def test_wrong_number_of_page_arrays_is_refused():
    sequence = Sequence(make())
    sequence.k_pages = sequence.k_pages[:2]
    with pytest.raises(ValueError, match="3 page arrays, got 2 for K and 3 for V"):
        sequence.push([1])


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be at least 1"),
        ({"num_layers": 2.0}, "num_layers=2.0: an int is needed, got float"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        (
            {"hidden_size": 30, "head_dim": 0},
            "hidden_size 30 is not a multiple of num_heads 4: give head_dim",
        ),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"windows": (4,)}, "windows names 1 layers, the model has 3"),
        ({"windows": (0, 4, 4)}, "a window must be at least one token, got 0"),
        ({"eos_token_ids": (64,)}, "eos_token_ids names 64, the vocabulary has 64"),
        (
            {"rope": RopeConfig(kind="factors", factors=(1.0,))},
            "rope has 1 factors, head_dim 8 asks for 4",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        dataclasses.replace(CONFIG, **changes)
