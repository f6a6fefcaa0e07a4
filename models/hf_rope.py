"""The rotation that a config.json asks for, in both spellings.

transformers 5 writes one object `rope_parameters`; 4 and before wrote `rope_theta` beside
`rope_scaling`.
"""

from typing import Any

from paged_jax.models.errors import ModelLoadError
from paged_jax.models.hf_files import NUMBER, Settings
from paged_jax.models.rope import RopeConfig

ORIGINAL = "original_max_position_embeddings"


def read_rope(keys: Settings, theta: float, max_len: int) -> RopeConfig:
    """Read base and scaling.

    Args:
        keys: the config.
        theta: its `rope_theta`, or the default.
        max_len: its `max_position_embeddings`, or the default.

    Raises ModelLoadError for a kind that is unsupported and for two spellings that disagree.
    """
    found = [
        _read_spelling(keys, name, theta, max_len)
        for name in ("rope_scaling", "rope_parameters")
        if keys.get(name, dict)
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise ModelLoadError(
            f"{keys.origin}: 'rope_scaling' means {_shown(found[0])}, 'rope_parameters' means "
            f"{_shown(found[1])}, expected one meaning: remove the wrong one "
            "(transformers takes 'rope_scaling')"
        )
    return found[0] if found else _read_spelling(keys, "rope_parameters", theta, max_len)


def _read_spelling(keys: Settings, name: str, theta: float, max_len: int) -> RopeConfig:
    """Read the rotation from the object `name`, with what stands beside it."""
    rope = Settings(keys.get(name, dict) or {}, f"{keys.origin} (key {name!r})")
    part = rope.get("partial_rotary_factor", NUMBER)
    part = keys.get("partial_rotary_factor", NUMBER, 1.0) if part is None else part
    if part != 1:
        raise ModelLoadError(
            f"{keys.origin}: partial_rotary_factor {part} is unsupported, expected 1"
        )
    if nested := [key for key in ("full_attention", "sliding_attention") if key in rope.values]:
        raise ModelLoadError(
            f"{rope.origin}: a rotation for each layer type ({nested[0]!r}) is unsupported, "
            "expected one for all layers"
        )
    theta = rope.get("rope_theta", NUMBER, theta)
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", rope.need("factor", NUMBER))
        case "llama3":
            # The one beside the object wins, as in transformers.
            original = rope.get(ORIGINAL, int, max_len)
            return RopeConfig(
                theta,
                "llama3",
                factor=rope.need("factor", NUMBER),
                low_freq_factor=rope.need("low_freq_factor", NUMBER),
                high_freq_factor=rope.need("high_freq_factor", NUMBER),
                original_max_len=keys.get(ORIGINAL, int, original),
            )
    raise ModelLoadError(
        f"{keys.origin}: rope type {kind!r} is unsupported, expected default, linear or llama3"
    )


def _shown(rope: RopeConfig) -> str:
    """Return a rotation in words: `default, rope_theta 500000.0`."""
    parts: list[tuple[str, Any]] = [("rope_theta", rope.theta)]
    if rope.kind != "default":
        parts.append(("factor", rope.factor))
    if rope.kind == "llama3":
        parts += [
            ("low_freq_factor", rope.low_freq_factor),
            ("high_freq_factor", rope.high_freq_factor),
            (ORIGINAL, rope.original_max_len),
        ]
    return ", ".join([rope.kind, *(f"{name} {value}" for name, value in parts)])
