"""The decoder: against reference logits, under split and merge, and its config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models import KVGroup, Llama, LlamaConfig, RopeConfig, load_model
from run_model import TINY, Sequence, compiled, greedy, logits_of

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
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qk-norm": {"qk_norm": True, "head_dim": 16},
    "one layer windowed": {"windows": (None, 5, None)},
    "two windows": {"windows": (5, 9, 5)},
}


def make(**changes):
    return Llama(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


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
    # The tool that recorded the greedy tokens took id 0 for padding: it neither saw nor counted those.
    prompt = expected["input_ids"][0]
    assert greedy(model, prompt[prompt != 0], 16)[0] == expected["greedy"].tolist()


def plain_forward(model, tokens):
    """The decoder again in numpy, float64, whole sequence at once: no pages, no fused products."""
    config = model.config
    get = lambda param: np.asarray(param[...], np.float64)  # noqa: E731
    d, group = config.head_dim, config.num_heads // config.num_kv_heads

    def norm(x, module):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * get(module.scale)

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
        q, k, v = qkv[:, :, :group].reshape(len(tokens), -1, d), qkv[:, :, group], qkv[:, :, group + 1]
        if config.qk_norm:
            q, k = norm(q, layer.attention.q_norm), norm(k, layer.attention.k_norm)
        q, k, v = turn(q), np.repeat(turn(k), group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d)
        distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
        scores = np.where((distance >= 0) & (distance < (window or np.inf)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, v).reshape(len(tokens), -1) @ get(layer.attention.out).T
        x = x + out + (get(layer.attention.out_bias) if config.out_bias else 0)
        gate, up = np.einsum("td,cfd->ctf", norm(x, layer.mlp_norm), get(layer.mlp.gate_up))
        if config.mlp_bias:
            gate, up = gate + get(layer.mlp.gate_up_bias)[0], up + get(layer.mlp.gate_up_bias)[1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ get(layer.mlp.down).T
        x = x + (get(layer.mlp.down_bias) if config.mlp_bias else 0)
    return norm(x, model.norm) @ get(model.embed if config.tie_embeddings else model.head).T


# The checkpoints above have QKV bias, QK-norm and tied embeddings too: of the variants the others are always tried.
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v in ("biases", "two windows") else pytest.mark.slow) for v in VARIANTS],
)
def test_every_variant_is_the_plain_forward(variant):
    model = make(**VARIANTS[variant])
    graphdef, params = nnx.split(model)
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    # Scales and biases start as ones and zeros: shake them so that they count.
    shaken = [x + 0.3 * jax.random.normal(key, x.shape) for x, key in zip(jax.tree.leaves(params), keys, strict=True)]
    model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(params), shaken))
    tokens = np.random.default_rng(2).integers(0, 64, 30)
    expected = plain_forward(model, tokens)
    np.testing.assert_allclose(logits_of(model, tokens, chunks=[11, 1, 16, 2]), expected, atol=2e-4, rtol=2e-4)


def test_layers_of_one_window_form_a_group():
    config = dataclasses.replace(CONFIG, num_layers=5, windows=(8, None, 8, 8, None))
    assert config.kv_groups == (KVGroup(8, 3), KVGroup(None, 2))
    assert config.kv_places == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1))


def test_split_and_merge_keep_what_the_engine_reads():
    model = make(windows=(None, 4, None))
    graphdef, params = nnx.split(model)
    abstract, _ = nnx.split(nnx.eval_shape(lambda: make(windows=(None, 4, None))))
    assert graphdef == abstract and hash(graphdef) == hash(abstract)
    assert graphdef != nnx.split(make())[0]
    seen = []

    @jax.jit
    def trace(params):
        seen.append(nnx.merge(abstract, params))
        return seen[0].logits(jnp.ones((2, 32)))

    assert trace(params).shape == (2, 64)
    for name in ("vocab_size", "max_model_len", "num_kv_heads", "head_dim", "eos_token_ids", "kv_groups"):
        assert getattr(seen[0], name) == getattr(model, name) == getattr(model.config, name)


def test_a_step_compiles_once():
    sequence = Sequence(make(), max_len=32)
    before = compiled(sequence.graphdef)._cache_size()
    for _ in range(3):
        sequence.push([1, 2], size=4)
    assert compiled(sequence.graphdef)._cache_size() <= before + 1


def test_bfloat16_parameters_give_float32_logits_near_the_float32_ones():
    graphdef, params = nnx.split(make(num_layers=1))
    low = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    tokens = np.arange(1, 20)
    logits = logits_of(low, tokens, dtype=jnp.bfloat16)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, logits_of(make(num_layers=1), tokens), atol=0.15)


def test_bfloat16_config_makes_bfloat16_parameters():
    assert {x.dtype for x in jax.tree.leaves(nnx.split(make(dtype="bfloat16"))[1])} == {jnp.dtype("bfloat16")}


def test_wrong_number_of_page_arrays_is_refused():
    sequence = Sequence(make(), max_len=8)
    sequence.k_pages = sequence.k_pages[:2]
    with pytest.raises(ValueError, match="3 page arrays, got 2 for K and 3 for V"):
        sequence.push([1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_layers": 2.0}, "num_layers must be a positive integer, got 2.0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 30, "head_dim": 0}, "hidden_size 30 is not a multiple of num_heads 4: give head_dim"),
        ({"head_dim": 7}, "head_dim must be a positive even integer, got 7"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, got 'float16'"),
        ({"windows": (4,)}, "windows names 1 layers, the model has 3"),
        ({"windows": (0, 4, 4)}, "a window must be at least one token, got 0"),
        ({"eos_token_ids": (64,)}, "eos_token_ids names 64, the vocabulary has 64"),
        ({"rope": RopeConfig(kind="factors", factors=(1.0,))}, "rope has 1 factors, head_dim 8 asks for 4"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        dataclasses.replace(CONFIG, **changes)
