"""The tokenizer of a Hugging Face directory."""

from pathlib import Path

from paged_jax.models.errors import ModelLoadError, require
from paged_jax.models.hf_files import Settings, read_json
from paged_jax.models.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read the tokenizer beside the model.

    Returns None where there is no tokenizer.json. Raises ModelLoadError where it is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizers = require("tokenizers", f"reading {path.name}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(f"{path}: cannot be read as a tokenizer: {error}") from error
    settings_path = directory / "tokenizer_config.json"
    template_path = directory / "chat_template.jinja"
    settings = Settings({}, str(settings_path))
    if settings_path.exists():
        settings = read_json(settings_path)
    if template_path.exists():
        template = template_path.read_text(encoding="utf-8")
    else:
        template = _chat_template(settings)
    special = {}
    for role in SPECIAL_TOKENS:
        token = settings.get(role, (str, dict))
        if token is not None:
            special[role] = token["content"] if isinstance(token, dict) else token
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def _chat_template(settings: Settings) -> str | None:
    """Return the config's chat template; of several with names, the one called "default"."""
    template = settings.get("chat_template", (str, list))
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template
