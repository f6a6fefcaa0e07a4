"""What the config.json of a Llama-family model means."""

from pathlib import Path
from typing import Any

from paged_jax.models.errors import ModelLoadError, load_errors
from paged_jax.models.families import NULLABLE, Family, family_of
from paged_jax.models.hf_files import NUMBER, Kind, Settings, read_json
from paged_jax.models.hf_rope import read_rope
from paged_jax.models.llama_config import LlamaConfig

KINDS: dict[str, Kind] = {
    "hidden_act": str,
    "layer_types": list,
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), bool
    ),
}  # the other keys are int
SILU = ("silu", "swish")  # two names of one function
FULL, SLIDING = "full_attention", "sliding_attention"


class ConfigKeys:
    """The keys of a config.json that its family reads.

    Attributes:
        settings: the whole file.
        family: what `model_type` names.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.family: Family = family_of(settings.need("model_type", str), "hf", settings.origin)

    def get(self, key: str) -> Any:
        """Return a value, or the family's default where the key is absent.

        Of `{"sliding_window": null}` that is None, of `{}` with Mistral 4096, and None for a
        family that does not read the key. Raises ModelLoadError for a value of another type.
        """
        defaults, settings = self.family.defaults, self.settings
        if key not in defaults:
            return None
        if key not in settings.values:
            return defaults[key]
        read = settings.get if key in NULLABLE else settings.need
        return read(key, KINDS.get(key, int))


def read_config(directory: Path, dtype: str) -> LlamaConfig:
    """Read the decoder's config from config.json, all but the ids that end an answer.

    Raises ModelLoadError.
    """
    settings = read_json(directory / "config.json")
    keys = ConfigKeys(settings)
    family, get = keys.family, keys.get
    if settings.get("quantization_config", dict) is not None:
        raise ModelLoadError(
            f"{settings.origin}: quantised checkpoints are not supported "
            "(key 'quantization_config')"
        )
    if (act := get("hidden_act")) not in SILU:
        raise ModelLoadError(
            f"{settings.origin}: hidden_act {act!r} is unsupported, expected 'silu'"
        )
    num_heads, num_kv_heads = get("num_attention_heads"), get("num_key_value_heads")
    with load_errors(settings.origin):
        return LlamaConfig(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            intermediate_size=get("intermediate_size"),
            num_layers=get("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            max_model_len=get("max_position_embeddings"),
            head_dim=get("head_dim") or 0,
            rms_norm_eps=get("rms_norm_eps"),
            rope=read_rope(settings, get("rope_theta"), get("max_position_embeddings")),
            windows=_windows(keys),
            tie_embeddings=get("tie_word_embeddings"),
            qkv_bias=bool(get("attention_bias")) or family.qkv_bias,
            out_bias=bool(get("attention_bias")),
            mlp_bias=bool(get("mlp_bias")),
            qk_norm=family.qk_norm,
            dtype=dtype,
        )


def _windows(keys: ConfigKeys) -> tuple[int | None, ...]:
    """Read each layer's window; empty where all layers see the whole context.

    Three layers, `max_window_layers` 1, `sliding_window` 8: `(None, 8, 8)`.
    """
    window, num_layers = keys.get("sliding_window"), keys.get("num_hidden_layers")
    if window is None or keys.get("use_sliding_window") is False:
        return ()
    if window >= keys.get("max_position_embeddings"):
        return ()
    kinds = keys.get("layer_types")
    if kinds is None:
        num_full = min(max(keys.get("max_window_layers") or 0, 0), num_layers)
        kinds = [FULL] * num_full + [SLIDING] * (num_layers - num_full)
    if bad := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise ModelLoadError(
            f"{keys.settings.origin}: layer type {bad[0]!r} is unsupported, "
            f"expected {FULL} or {SLIDING}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)
