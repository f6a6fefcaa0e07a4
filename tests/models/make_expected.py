"""Make what the tests of loaders compare with, by transformers.

It needs transformers 5 and torch, which are no dependencies of this project. In an environment of
its own, from the root of the repository:

    pip install transformers torch safetensors numpy ml_dtypes
    python tests/models/make_expected.py

It writes `tests/data/variants`: the classes' defaults, logits of every variant, and what tokenizers
and templates make of the cases in `text_cases`.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

import variants  # noqa: E402
from text_cases import (  # noqa: E402
    BROKEN,
    CHAT,
    DIRECTORIES,
    TEMPLATES,
    TEXTS,
    VARIABLES,
    id_lists,
    write_directory,
)

TARGET = ROOT / "data" / "variants"
KEYS = (
    "attention_bias hidden_act hidden_size intermediate_size layer_types max_position_embeddings "
    "max_window_layers mlp_bias num_attention_heads num_hidden_layers num_key_value_heads "
    "rms_norm_eps sliding_window tie_word_embeddings use_sliding_window vocab_size"
).split()


def class_defaults():
    """Return each family's defaults. Keys of all classes are there, null where derived later."""
    found = {}
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        config_class = transformers.CONFIG_MAPPING[family]
        fields = {field.name: field.default for field in dataclasses.fields(config_class)}
        found[family] = {key: fields[key] for key in KEYS if key in fields}
        # Read by all models of these families, whether the class declares them or not.
        found[family]["head_dim"] = fields.get("head_dim")
        found[family]["rope_theta"] = config_class().rope_parameters["rope_theta"]
    # Not declared, but each layer of a Mistral has the window that its type says.
    found["mistral"]["layer_types"] = None
    return found


def tokenizer_results(name):
    """Return what transformers makes of a directory's texts and ids."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        write_directory(name, directory)
        kind = DIRECTORIES[name].get("tokenizer_config.json", {}).get("tokenizer_class")
        made_by = getattr(transformers, (kind or "TokenizersBackend").removesuffix("Fast"))
        tokenizer = made_by.from_pretrained(directory)
    size = len(tokenizer)
    encoded = [tokenizer(text, padding=False, truncation=False)["input_ids"] for text in TEXTS]
    bare = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    decoded = [
        [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
        for ids in [*id_lists(size), *encoded]
    ]
    return {
        "size": size,
        "encoded": encoded,
        "bare": bare,
        "decoded": decoded,
        "roles": tokenizer.special_tokens_map,
        "ids": [tokenizer.bos_token_id, tokenizer.eos_token_id],
    }


def template_results():
    """Return the prompt of each template; the broken ones must raise."""
    rendered = {}
    for name, template in TEMPLATES.items():
        prompts, _ = render_jinja_template([CHAT], chat_template=template, **VARIABLES)
        rendered[name] = prompts[0]
    for name, template in BROKEN.items():
        try:
            render_jinja_template([CHAT], chat_template=template, **VARIABLES)
        except Exception:
            continue
        raise AssertionError(f"{name} was to raise")
    return rendered


def write(name, values):
    """Write a JSON object, each of its keys on a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(values[key], sort_keys=True)}" for key in values]
    (TARGET / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def logits(name, defaults):
    """Return a variant's logits [POSITIONS, COLUMNS] in float32."""
    with tempfile.TemporaryDirectory() as made:
        variants.write(name, made, defaults)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            made, dtype=torch.float32, output_loading_info=True
        )
    assert not info["missing_keys"] and not info["mismatched_keys"], (name, info)
    with torch.no_grad():
        found = model.eval()(torch.tensor(variants.TOKENS.astype(np.int64))[None]).logits[0]
    return found[list(variants.POSITIONS), : variants.COLUMNS].numpy()


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    defaults = class_defaults()
    write("class-defaults.json", defaults)
    write("tokenizers.json", {name: tokenizer_results(name) for name in DIRECTORIES})
    write("templates.json", template_results())
    expected = {name: logits(name, defaults) for name in variants.VARIANTS}
    np.savez_compressed(TARGET / "logits.npz", **expected)
