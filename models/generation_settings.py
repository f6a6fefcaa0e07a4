"""How a model's authors would sample from it: what the checkpoint says, by transformers' names.

Nothing is checked here.
"""

from pathlib import Path
from typing import Any

from paged_jax.models.end_of_text import read_generation_config
from paged_jax.models.gguf_file import GGUFFile

GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def of_directory(directory: Path) -> dict[str, Any]:
    """Read generation_config.json; without one there are no settings. Raises ModelLoadError."""
    return dict(read_generation_config(directory).values)


def of_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return what the sampling keys say: `general.sampling.temp: 0.6 -> {"temperature": 0.6}`."""
    names = {GGUF_PREFIX + key: name for key, name in GGUF_NAMES.items()}
    return {name: file.metadata[key] for key, name in names.items() if key in file.metadata}
