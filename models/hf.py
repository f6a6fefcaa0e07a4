"""A Hugging Face model directory: config.json, safetensors, tokenizer files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.models.errors import ModelLoadError, require
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.rope import RopeConfig
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.models.weights import Part, TensorSource

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

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


class Settings:
    """A JSON object whose missing or mistyped keys are ModelLoadErrors that name file and key."""

    def __init__(self, values: dict[str, Any], origin: str):
        self.values, self.origin = values, origin

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise ModelLoadError(f"{self.origin}: key {key!r} must be {names}, got {value!r}")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value; absent or null raises."""
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.origin}: key {key!r} is missing, expected {getattr(kind, '__name__', kind)}")
        return value


def read_json(path: Path) -> Settings:
    """A JSON object from a file. Raises ModelLoadError when it cannot be read as one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return Settings(values, str(path))


def read_config(directory: Path, dtype: str) -> LlamaConfig:
    """The decoder's config from config.json and generation_config.json. Raises ModelLoadError."""
    keys = read_json(directory / "config.json")
    architecture = keys.need("model_type", str)
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{keys.origin}: architecture {architecture!r} is unknown, known are {', '.join(ARCHITECTURES)}"
        )
    if keys.get("quantization_config", dict) is not None:
        raise ModelLoadError(f"{keys.origin}: quantised checkpoints are not supported (key 'quantization_config')")
    if (act := keys.get("hidden_act", str, "silu")) != "silu":
        raise ModelLoadError(f"{keys.origin}: hidden_act {act!r} is unsupported, expected 'silu'")
    num_heads = keys.need("num_attention_heads", int)
    # Only Llama's default is "as many as query heads"; the others' defaults are numbers of one released model.
    kv_heads = (
        keys.get("num_key_value_heads", int, num_heads)
        if architecture == "llama"
        else keys.need("num_key_value_heads", int)
    )
    attention_bias = keys.get("attention_bias", bool, False)
    try:
        return LlamaConfig(
            vocab_size=keys.need("vocab_size", int),
            hidden_size=keys.need("hidden_size", int),
            intermediate_size=keys.need("intermediate_size", int),
            num_layers=keys.need("num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            max_model_len=keys.need("max_position_embeddings", int),
            head_dim=keys.get("head_dim", int, 0),
            rms_norm_eps=keys.get("rms_norm_eps", (float, int), 1e-6),
            rope=_rope(keys),
            windows=_windows(keys, architecture),
            tie_embeddings=keys.get("tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or architecture == "qwen2",
            out_bias=attention_bias and architecture != "qwen2",
            mlp_bias=keys.get("mlp_bias", bool, False),
            qk_norm=architecture == "qwen3",
            eos_token_ids=_eos_token_ids(directory, keys),
            dtype=dtype,
        )
    except ModelLoadError:
        raise
    except ValueError as error:
        raise ModelLoadError(f"{keys.origin}: {error}") from error


def _rope(keys: Settings) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` with `rope_scaling` (4 and before)."""
    nested = keys.get("rope_parameters", dict) or keys.get("rope_scaling", dict) or {}
    rope = Settings(nested, f"{keys.origin} (rope)")
    theta = rope.get("rope_theta", (float, int)) or keys.get("rope_theta", (float, int), 10000.0)
    if (
        part := rope.get("partial_rotary_factor", (float, int)) or keys.get("partial_rotary_factor", (float, int), 1)
    ) != 1:
        raise ModelLoadError(f"{keys.origin}: partial_rotary_factor {part} is unsupported, expected 1")
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", rope.need("factor", (float, int)))
        case "llama3":
            number = (float, int)
            return RopeConfig(
                theta,
                "llama3",
                factor=rope.need("factor", number),
                low_freq_factor=rope.need("low_freq_factor", number),
                high_freq_factor=rope.need("high_freq_factor", number),
                original_max_len=rope.need("original_max_position_embeddings", int),
            )
    raise ModelLoadError(f"{keys.origin}: rope type {kind!r} is unsupported, expected default, linear or llama3")


def _windows(keys: Settings, architecture: str) -> tuple[int | None, ...]:
    num_layers = keys.need("num_hidden_layers", int)
    window = keys.get("sliding_window", int)
    if architecture.startswith("qwen") and not keys.get("use_sliding_window", bool, False):
        window = None
    # A window of the whole context is full attention.
    if architecture == "llama" or window is None or window >= keys.need("max_position_embeddings", int):
        return ()
    kinds = keys.get("layer_types", list)
    if kinds is None:
        first = keys.get("max_window_layers", int, 0) if architecture.startswith("qwen") else 0
        kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * max(num_layers - first, 0)
    if bad := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise ModelLoadError(
            f"{keys.origin}: layer type {bad[0]!r} is unsupported, expected full_attention or sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(directory: Path, keys: Settings) -> tuple[int, ...]:
    """generation_config.json names every id that ends an answer, config.json often only the first."""
    path = directory / "generation_config.json"
    for settings in ([read_json(path)] if path.exists() else []) + [keys]:
        ids = settings.get("eos_token_id", (int, list))
        if ids is not None:
            if isinstance(ids, list) and any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise ModelLoadError(f"{settings.origin}: key 'eos_token_id' is {ids!r:.80}, expected ids")
            return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
    return ()


def open_tensors(directory: Path, *, tied: bool) -> TensorSource:
    """The tensors of model.safetensors, or of the files model.safetensors.index.json names. Raises ModelLoadError."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        keys = read_json(index)
        files = keys.need("weight_map", dict)
        if bad := [f for f in files.values() if not isinstance(f, str) or Path(f).name != f]:
            raise ModelLoadError(f"{index}: 'weight_map' must name files beside it, got {bad[0]!r}")
        for file in sorted(set(files.values())):
            if not (directory / file).is_file():
                raise ModelLoadError(f"{index}: names {file!r}, which is absent from {directory}")
    elif single.exists():
        files = dict.fromkeys(_open(single).keys(), single.name)
    else:
        raise ModelLoadError(f"{directory}: has neither model.safetensors nor model.safetensors.index.json")
    handles = {file: _open(directory / file) for file in sorted(set(files.values()))}
    held = {file: set(handle.keys()) for file, handle in handles.items()}
    if lost := [(name, file) for name, file in files.items() if name not in held[file]]:
        raise ModelLoadError(
            f"{directory}: tensor {lost[0][0]!r} is missing from {lost[0][1]}, where the index puts it"
        )
    # Derived values that older exports kept, and the head of a tied model, which is the embedding again.
    unused = [n for n in files if n.endswith("rotary_emb.inv_freq") or (tied and n == "lm_head.weight")]
    shapes = {n: tuple(handles[f].get_slice(n).get_shape()) for n, f in files.items() if n not in unused}

    def read(name: str) -> np.ndarray:
        values = handles[files[name]].get_tensor(name)
        if values.dtype.name not in ("float32", "float16", "bfloat16", "float64"):
            raise ModelLoadError(
                f"{directory}: tensor {name!r} has dtype {values.dtype}, expected a float of 16 bits or more"
            )
        return values

    return TensorSource(str(directory), shapes, read, TEMPLATES)


def with_stored_dtype(config: LlamaConfig, source: TensorSource) -> LlamaConfig:
    """The config with the dtype that "auto" stands for: bfloat16 for a checkpoint of 16-bit floats, else float32."""
    name = source.name(Part("norm", "weight"))  # small, and in the dtype of the rest
    stored = source.read(name).dtype.itemsize if name in source.shapes else 4
    return dataclasses.replace(config, dtype="bfloat16" if stored == 2 else "float32")


def _open(path: Path) -> Any:
    safetensors = require("safetensors", f"reading {path.name}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelLoadError(f"{path}: cannot be read as safetensors, it may be cut off: {error}") from error


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer beside the model, or None where there is no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizers = require("tokenizers", f"reading {path.name}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(f"{path}: cannot be read as a tokenizer: {error}") from error
    settings_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings = read_json(settings_path) if settings_path.exists() else Settings({}, str(settings_path))
    template = template_path.read_text(encoding="utf-8") if template_path.exists() else _template(settings)
    special = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(role, (str, dict))
        if token is not None:
            special[role] = token["content"] if isinstance(token, dict) else token
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def _template(settings: Settings) -> str | None:
    template = settings.get("chat_template", (str, list))
    if isinstance(template, list):  # several named ones
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template
