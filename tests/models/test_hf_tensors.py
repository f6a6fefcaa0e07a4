"""Which tensors of a directory are used: tied and untied heads, names, what is left over."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models import ModelLoadError, load_model
from small_checkpoint import llama, numbers

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def head_of(directory, message=None):
    """The matrix whose products are the logits, and the warning that names it."""
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, _ = load_model(directory)
    else:
        with pytest.warns(UserWarning, match=message):
            model, _ = load_model(directory)
    return np.asarray(model.logits(jnp.eye(16))).T


def without(name):
    return lambda arrays: {n: x for n, x in arrays.items() if n != name}


def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_config_says(tmp_path):
    directory = llama(tmp_path, tie_word_embeddings=True)
    np.testing.assert_allclose(
        head_of(directory, "'lm_head.weight' is used, .*differs"),
        numbers(HEAD, (64, 16)),
        rtol=1e-6,
    )


def test_a_head_that_equals_the_embedding_is_not_kept_twice(tmp_path):
    directory = llama(tmp_path, lambda t: t | {HEAD: t[EMBED].copy()}, tie_word_embeddings=True)
    np.testing.assert_allclose(head_of(directory), numbers(EMBED, (64, 16)), rtol=1e-6)
    assert load_model(directory)[0].config.tie_embeddings


def test_a_model_without_a_head_is_tied(tmp_path):
    directory = llama(tmp_path / "untied", without(HEAD))
    np.testing.assert_allclose(
        head_of(directory, "has no 'lm_head.weight'.*the embedding is used"),
        numbers(EMBED, (64, 16)),
        rtol=1e-6,
    )
    head_of(llama(tmp_path / "tied", without(HEAD), tie_word_embeddings=True))


def test_a_tied_head_alone_is_the_embedding_too(tmp_path):
    directory = llama(tmp_path / "tied", without(EMBED), tie_word_embeddings=True)
    np.testing.assert_allclose(head_of(directory), numbers(HEAD, (64, 16)), rtol=1e-6)
    with pytest.raises(ModelLoadError, match=r"'model.embed_tokens.weight' is missing"):
        load_model(llama(tmp_path / "untied", without(EMBED)))


PREFIXES = {
    "a body saved alone": lambda t: {n.removeprefix("model."): x for n, x in t.items()},
    "a part of another model": lambda t: {f"model.{n}": x for n, x in t.items()},
}


@pytest.mark.parametrize("kind", PREFIXES)
@pytest.mark.parametrize("tied", [False, True])
def test_one_prefix_too_few_or_too_many_is_overlooked(kind, tied, tmp_path):
    edit = without(HEAD) if tied else lambda t: t
    plain = llama(tmp_path / "plain", edit, tie_word_embeddings=tied)
    renamed = llama(
        tmp_path / "renamed", lambda t: PREFIXES[kind](edit(t)), tie_word_embeddings=tied
    )
    np.testing.assert_array_equal(head_of(renamed), head_of(plain))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "module."])
def test_other_prefixes_are_refused_as_missing(prefix, tmp_path):
    """transformers leaves such a model random, with a warning."""
    directory = llama(tmp_path, lambda t: {prefix + n: x for n, x in t.items()})
    with pytest.raises(ModelLoadError, match=r"'model.embed_tokens.weight' is missing"):
        load_model(directory)


IN_LAYER = "model.layers.1.self_attn."


def test_what_is_not_of_the_decoder_is_ignored_with_one_warning(tmp_path):
    extra = [
        f"{IN_LAYER}masked_bias",
        f"{IN_LAYER}bias",
        f"{IN_LAYER}rotary_emb.inv_freq",
        f"{IN_LAYER}rotary_emb.cos_cached",
        "v_head.summary.weight",
        "score.weight",
    ]
    directory = llama(tmp_path, lambda t: t | {name: np.ones(3, np.float32) for name in extra})
    with pytest.warns(UserWarning, match="ignored") as caught:
        load_model(directory)
    (warning,) = caught
    assert "v_head" in str(warning.message) or "and 2 more" in str(warning.message)
    assert warning.filename == __file__ or "_decorator" in warning.filename


def test_rotation_frequencies_are_ignored_without_a_word(tmp_path):
    name = f"{IN_LAYER}rotary_emb.inv_freq"
    head_of(llama(tmp_path, lambda t: t | {name: np.ones(4, np.float32)}))


@pytest.mark.parametrize(
    "name",
    [
        f"{IN_LAYER}q_proj.bias",
        f"{IN_LAYER}q_norm.weight",
        f"{IN_LAYER}q_proj.weight_scale",
        "model.layers.1.post_feedforward_layernorm.weight",
        "model.layers.2.input_layernorm.weight",
        "model.embed_positions.weight",
        "lm_head.bias",
        "layers.1.self_attn.o_proj.bias",
    ],
)
def test_what_would_change_the_decoder_is_refused(name, tmp_path):
    directory = llama(tmp_path, lambda t: t | {name: np.ones(16, np.float32)})
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}' with shape \(16,\) is unexpected"):
        load_model(directory)


def test_a_missing_or_misshapen_tensor_is_refused(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is missing"):
        load_model(llama(tmp_path / "missing", without(name)))
    odd = np.ones((24, 15), np.float32)
    with pytest.raises(ModelLoadError, match=r"has shape \(24, 15\), expected \(24, 16\)"):
        load_model(llama(tmp_path / "odd", lambda t: t | {name: odd}))
