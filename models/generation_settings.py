"""How a model's authors would sample from it: what the checkpoint says, by transformers' names."""

import os
from typing import Any

from paged_jax.models.end_of_text import read_generation_config
from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.load import find

GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_generation_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read generation_config.json of a directory, or the sampling keys of a GGUF file.

    `general.sampling.temp: 0.6 -> {"temperature": 0.6}`. Nothing is checked. Raises ModelLoadError.
    """
    file = find(path)
    if file.is_dir():
        return dict(read_generation_config(file).values)
    metadata = open_gguf(file).metadata
    names = {GGUF_PREFIX + key: name for key, name in GGUF_NAMES.items()}
    return {name: metadata[key] for key, name in names.items() if key in metadata}
