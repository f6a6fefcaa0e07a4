"""What a Hugging Face directory of a Llama-family model means: config and tensor names."""

import dataclasses
from pathlib import Path

from paged_jax.models.errors import ModelLoadError, load_errors
from paged_jax.models.families import Family, family_of
from paged_jax.models.hf_files import SafetensorsFiles, Settings, read_json
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.rope import RopeConfig
from paged_jax.models.weights import Part, TensorSource

TEMPLATES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "q_norm": "model.layers.{layer}.self_attn.q_norm",
    "k_norm": "model.layers.{layer}.self_attn.k_norm",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "out": "model.layers.{layer}.self_attn.o_proj",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
}
NUMBER = (float, int)
FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(directory: Path, dtype: str) -> LlamaConfig:
    """Read the decoder's config from config.json and generation_config.json.

    Raises ModelLoadError.
    """
    keys = read_json(directory / "config.json")
    architecture = keys.need("model_type", str)
    family = family_of(architecture, "hf", keys.origin)
    if keys.get("quantization_config", dict) is not None:
        raise ModelLoadError(
            f"{keys.origin}: quantised checkpoints are not supported (key 'quantization_config')"
        )
    if (act := keys.get("hidden_act", str, "silu")) != "silu":
        raise ModelLoadError(f"{keys.origin}: hidden_act {act!r} is unsupported, expected 'silu'")
    num_heads = keys.need("num_attention_heads", int)
    if family.kv_heads_default:
        num_kv_heads = keys.get("num_key_value_heads", int, num_heads)
    else:
        num_kv_heads = keys.need("num_key_value_heads", int)
    attention_bias = keys.get("attention_bias", bool, False)
    with load_errors(keys.origin):
        return LlamaConfig(
            vocab_size=keys.need("vocab_size", int),
            hidden_size=keys.need("hidden_size", int),
            intermediate_size=keys.need("intermediate_size", int),
            num_layers=keys.need("num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_model_len=keys.need("max_position_embeddings", int),
            head_dim=keys.get("head_dim", int, 0),
            rms_norm_eps=keys.get("rms_norm_eps", NUMBER, 1e-6),
            rope=_rope(keys),
            windows=_windows(keys, family),
            tie_embeddings=keys.get("tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or family.qkv_bias,
            out_bias=attention_bias and not family.qkv_bias,
            mlp_bias=keys.get("mlp_bias", bool, False),
            qk_norm=family.qk_norm,
            eos_token_ids=_eos_token_ids(directory, keys),
            dtype=dtype,
        )


def open_tensors(directory: Path, *, is_tied: bool) -> TensorSource:
    """Open the tensors that the model uses. Raises ModelLoadError.

    Left out are rotation frequencies, which older exports stored, and the head of a tied model,
    which duplicates the embedding.
    """
    files = SafetensorsFiles(directory)
    shapes = {
        name: shape
        for name, shape in files.shapes.items()
        if not name.endswith("rotary_emb.inv_freq") and not (is_tied and name == "lm_head.weight")
    }
    return TensorSource(str(directory), shapes, files.read, TEMPLATES)


def with_stored_dtype(config: LlamaConfig, source: TensorSource) -> LlamaConfig:
    """Return the config with the dtype that "auto" means.

    That is bfloat16 for a checkpoint of 16-bit floats, else float32.
    """
    name = source.name(Part("norm", "weight"))  # small, and in the dtype of the rest
    num_bytes = source.read(name).dtype.itemsize if name in source.shapes else 4
    return dataclasses.replace(config, dtype="bfloat16" if num_bytes == 2 else "float32")


def _rope(keys: Settings) -> RopeConfig:
    """Read base and scaling in both spellings.

    transformers 5 writes `rope_parameters`, 4 and before `rope_theta` beside `rope_scaling`.
    """
    nested = keys.get("rope_parameters", dict) or keys.get("rope_scaling", dict) or {}
    rope = Settings(nested, f"{keys.origin} (rope)")

    def either(key: str, default: float) -> float:
        return rope.get(key, NUMBER) or keys.get(key, NUMBER, default)

    theta, part = either("rope_theta", 10000.0), either("partial_rotary_factor", 1.0)
    if part != 1:
        raise ModelLoadError(
            f"{keys.origin}: partial_rotary_factor {part} is unsupported, expected 1"
        )
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", rope.need("factor", NUMBER))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=rope.need("factor", NUMBER),
                low_freq_factor=rope.need("low_freq_factor", NUMBER),
                high_freq_factor=rope.need("high_freq_factor", NUMBER),
                original_max_len=rope.need("original_max_position_embeddings", int),
            )
    raise ModelLoadError(
        f"{keys.origin}: rope type {kind!r} is unsupported, expected default, linear or llama3"
    )


def _windows(keys: Settings, family: Family) -> tuple[int | None, ...]:
    """Read each layer's window; empty where all layers see the whole context.

    Three layers, `max_window_layers` 1, `sliding_window` 8: `(None, 8, 8)`.
    """
    is_opt_in = family.windows == "opt-in"
    num_layers = keys.need("num_hidden_layers", int)
    window = keys.get("sliding_window", int)
    if is_opt_in and not keys.get("use_sliding_window", bool, False):
        window = None
    if family.windows == "never" or window is None:
        return ()
    if window >= keys.need("max_position_embeddings", int):
        return ()
    kinds = keys.get("layer_types", list)
    if kinds is None:
        num_full = keys.get("max_window_layers", int, 0) if is_opt_in else 0
        kinds = [FULL] * min(num_full, num_layers) + [SLIDING] * max(num_layers - num_full, 0)
    if bad := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise ModelLoadError(
            f"{keys.origin}: layer type {bad[0]!r} is unsupported, expected {FULL} or {SLIDING}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _eos_token_ids(directory: Path, keys: Settings) -> tuple[int, ...]:
    """Read the ids that end an answer, without duplicates.

    generation_config.json has all of them, config.json often only the first.
    """
    path = directory / "generation_config.json"
    for settings in ([read_json(path)] if path.exists() else []) + [keys]:
        ids = settings.get("eos_token_id", (int, list))
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelLoadError(
                f"{settings.origin}: key 'eos_token_id' is {ids!r:.80}, expected ids"
            )
        return tuple(dict.fromkeys(ids))
    return ()
