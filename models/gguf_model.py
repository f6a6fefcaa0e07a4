"""What a GGUF file of a Llama-family model means: config, tensor names, order of rows."""

from typing import Any

import numpy as np

from paged_jax.models.errors import ModelLoadError, load_errors
from paged_jax.models.families import family_of
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.rope import RopeConfig
from paged_jax.models.weights import TensorSource

TEMPLATES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{layer}.attn_norm",
    "mlp_norm": "blk.{layer}.ffn_norm",
    "q_norm": "blk.{layer}.attn_q_norm",
    "k_norm": "blk.{layer}.attn_k_norm",
    "q": "blk.{layer}.attn_q",
    "k": "blk.{layer}.attn_k",
    "v": "blk.{layer}.attn_v",
    "out": "blk.{layer}.attn_output",
    "gate": "blk.{layer}.ffn_gate",
    "up": "blk.{layer}.ffn_up",
    "down": "blk.{layer}.ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"


class _Keys:
    """Metadata of one architecture, each value checked for its type."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = self.read("general.architecture", str)
        self.family = family_of(self.architecture, "gguf", file.path)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `<architecture>.<key>`, as `read` does."""
        return self.read(f"{self.architecture}.{key}", kind, default)

    def read(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of type `kind`. A list of equal values, one a layer, counts as the value.

        Raises ModelLoadError for another type, and for an absent key without a default.
        """
        path = self.file.path
        value = self.file.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{path}: key {key!r} is missing, expected {kind.__name__}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelLoadError(f"{path}: key {key!r} must be {kind.__name__}, got {value!r:.80}")
        return value


def read_config(file: GGUFFile, dtype: str) -> LlamaConfig:
    """Read the decoder's config from the metadata and from which tensors the file has.

    All but the ids that end an answer.

    Raises ModelLoadError.
    """
    keys = _Keys(file)
    get, tensors = keys.get, file.tensors
    if (experts := get("expert_count", int, 0)) > 0:
        raise ModelLoadError(
            f"{file.path}: {experts} experts are unsupported, expected a dense model"
        )
    hidden, num_heads = get("embedding_length", int), get("attention.head_count", int)
    head_dim = _head_dim(keys, hidden // max(num_heads, 1))
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(
            f"{file.path}: tensor 'token_embd.weight' is missing, "
            f"expected with shape (vocab_size, {hidden})"
        )
    num_layers, max_len = get("block_count", int), get("context_length", int)
    window = get("attention.sliding_window", int, 0)
    with load_errors(file.path):
        return LlamaConfig(
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=get("attention.head_count_kv", int, num_heads),
            max_model_len=max_len,
            head_dim=head_dim,
            rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
            rope=_rope(keys),
            windows=(window,) * num_layers if 0 < window < max_len else (),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            out_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            dtype=dtype,
        )


def tensor_source(file: GGUFFile, config: LlamaConfig) -> TensorSource:
    """Return the file's tensors with their rows in the order of Hugging Face checkpoints."""
    shapes = {name: info.shape for name, info in file.tensors.items() if name != ROPE_FACTORS}
    is_interleaved = _Keys(file).family.interleaved_rope

    def read(name: str) -> np.ndarray:
        values = file.read(name)
        if is_interleaved and ".attn_q." in name:
            return _split_halves(values, config.num_heads)
        if is_interleaved and ".attn_k." in name:
            return _split_halves(values, config.num_kv_heads)
        return values

    return TensorSource(str(file.path), shapes, read, TEMPLATES)


def _split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder each head's rows from rotated pairs side by side to first halves, then second halves.

    Row i and row i + head_dim / 2 are then a pair, as `rope.rotate` takes them. One head of six
    rows, a pair being two equal letters: `[a a' b b' c c'] -> [a b c a' b' c']`.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _head_dim(keys: _Keys, default: int) -> int:
    """Read the head width, which keys, values and rotation must share. Raises ModelLoadError."""
    head_dim = keys.get("attention.key_length", int, default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (width := keys.get(key, int, head_dim)) != head_dim:
            raise ModelLoadError(
                f"{keys.file.path}: key '{keys.architecture}.{key}' is {width}, "
                f"expected the head width {head_dim}"
            )
    return head_dim


def _rope(keys: _Keys) -> RopeConfig:
    """Read base and scaling as llama.cpp does.

    A type that is absent is "linear", a factor of 0 is none, the factor has an older name, and a
    tensor of factors multiplies it. Factor 2 and a tensor `[1, 4]` are the factors `(2, 8)`.
    """
    theta = keys.get("rope.freq_base", float, 10000.0)
    kind = keys.get("rope.scaling.type", str, "linear")
    if kind not in ("none", "linear"):
        raise ModelLoadError(
            f"{keys.file.path}: rope type {kind!r} is unsupported, expected none or linear"
        )
    older = keys.get("rope.scale_linear", float, 0.0)
    factor = keys.get("rope.scaling.factor", float, older) or 1.0
    factor = factor if kind == "linear" else 1.0
    if ROPE_FACTORS in keys.file.tensors:
        factors = keys.file.read(ROPE_FACTORS).astype(float).ravel() * factor
        return RopeConfig(theta, "factors", factors=tuple(factors.tolist()))
    return RopeConfig(theta) if factor == 1 else RopeConfig(theta, "linear", factor)


def stated_ids(file: GGUFFile) -> tuple[int, ...]:
    """Read the ids that end an answer: end of text, of turn and of message."""
    keys = _Keys(file)
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [keys.read(name, int) for name in names if name in keys.file.metadata]
    return tuple(ids)
