"""What a config.json means: keys that are absent or null, windows, both spellings of rope."""

import json

import pytest

from paged_jax.models import ModelLoadError, RopeConfig
from paged_jax.models.families import FAMILIES, NULLABLE
from paged_jax.models.hf_model import read_config
from run_model import DATA
from small_checkpoint import SIZES

CLASS_DEFAULTS = json.loads((DATA / "variants" / "class-defaults.json").read_text())
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(directory, **keys):
    values = {"model_type": "llama", **SIZES, **keys}
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_defaults_of_the_config_class(family):
    """The file holds what transformers gives to each key of a config that has none."""
    assert FAMILIES[family].defaults == CLASS_DEFAULTS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_nothing_but_its_type_has_the_sizes_of_the_class(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config, defaults = read_config(tmp_path, "float32"), CLASS_DEFAULTS[family]
    assert config.vocab_size == defaults["vocab_size"] and config.hidden_size == 4096
    assert config.max_model_len == defaults["max_position_embeddings"]
    assert config.num_kv_heads == (defaults["num_key_value_heads"] or 32)
    assert config.head_dim == 128 and config.rope == RopeConfig(10000.0)
    # Mistral's default window is its own, and less than its context; Qwen's is off.
    assert config.windows == ((4096,) * 32 if family == "mistral" else ())


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_another_value_than_absent_or_is_refused(family, tmp_path):
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    for key in FAMILIES[family].defaults:
        if key not in NULLABLE:
            with pytest.raises(ModelLoadError, match=f"key '{key}' is null, expected"):
                config_of(tmp_path, model_type=family, **{**windowed, key: None})
    config = config_of(tmp_path, model_type=family, num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 4)
    config = config_of(
        tmp_path, model_type=family, sliding_window=None, max_position_embeddings=99999
    )
    assert config.windows == ()


def test_a_key_that_the_family_does_not_read_counts_for_nothing(tmp_path):
    mistral = config_of(tmp_path, model_type="mistral", attention_bias=True, mlp_bias=True)
    assert not (mistral.qkv_bias or mistral.out_bias or mistral.mlp_bias)
    qwen2 = config_of(tmp_path, model_type="qwen2", attention_bias=True)
    assert qwen2.qkv_bias and not qwen2.out_bias
    llama = config_of(tmp_path, sliding_window=8, layer_types=["sliding_attention"] * 2)
    assert llama.windows == ()


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, ()),  # 28 full layers come first
        ({"max_window_layers": 1}, (None, 8, 8)),
        ({"max_window_layers": 0}, (8, 8, 8)),
        ({"max_window_layers": -1}, (8, 8, 8)),
        ({"max_window_layers": 0, "use_sliding_window": False}, ()),
        ({"max_window_layers": 0, "sliding_window": None}, ()),
        ({"max_window_layers": 0, "sliding_window": 512}, ()),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, None),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen_are_where_the_config_says(family, keys, windows, tmp_path):
    base = dict(model_type=family, num_hidden_layers=3, sliding_window=8, use_sliding_window=True)
    if windows is None:
        with pytest.raises(ModelLoadError, match="windows names 4 layers, the model has 3"):
            config_of(tmp_path, **{**base, **keys})
    else:
        assert config_of(tmp_path, **{**base, **keys}).windows == windows


def test_windows_of_mistral_are_in_all_layers_but_those_of_another_type(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    assert config_of(tmp_path, model_type="mistral", sliding_window=8).windows == (8, 8)
    mixed = config_of(tmp_path, model_type="mistral", sliding_window=8, layer_types=kinds)
    assert mixed.windows == (None, 8)
    with pytest.raises(ModelLoadError, match="layer type 'chunked_attention' is unsupported"):
        config_of(
            tmp_path, model_type="mistral", sliding_window=8, layer_types=["chunked_attention"] * 2
        )


LINEAR = RopeConfig(10000.0, "linear", 4.0)
SCALED = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 16)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {}, "rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": None, "rope_scaling": None}, RopeConfig()),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 9.0}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_scaling": {"type": "x", "rope_type": "linear", "factor": 4}}, LINEAR),
        ({"rope_scaling": {"factor": 4.0}}, RopeConfig()),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 10000.0},
            },
            LINEAR,
        ),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}, SCALED),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}, SCALED),
        (
            {
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 16,
            },
            SCALED,
        ),
        ({"rope_scaling": LLAMA3, "max_position_embeddings": 16}, SCALED),
    ],
)
def test_every_spelling_of_rope_is_read(keys, rope, tmp_path):
    assert config_of(tmp_path, **keys).rope == rope


def test_two_spellings_of_rope_that_disagree_are_refused(tmp_path):
    with pytest.raises(ModelLoadError) as error:
        config_of(
            tmp_path,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
    assert (
        "'rope_scaling' means linear, rope_theta 10000.0, factor 4.0, "
        "'rope_parameters' means default, rope_theta 500000.0" in str(error.value)
    )
    assert "transformers takes 'rope_scaling'" in str(error.value)
    with pytest.raises(ModelLoadError, match="a rotation for each layer type"):
        config_of(tmp_path, rope_parameters={"full_attention": {"rope_type": "default"}})


def test_two_names_of_one_activation(tmp_path):
    assert config_of(tmp_path, hidden_act="swish") == config_of(tmp_path, hidden_act="silu")
