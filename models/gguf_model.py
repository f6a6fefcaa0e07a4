"""What a GGUF file of a Llama-family model means: config, tensor names, the order of query and key rows."""

from typing import Any

import numpy as np

from paged_jax.models.errors import ModelLoadError
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.rope import RopeConfig
from paged_jax.models.weights import TensorSource

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM files say llama

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


def read_config(file: GGUFFile, dtype: str) -> LlamaConfig:
    """The decoder's config from metadata and from which tensors there are. Raises ModelLoadError."""
    architecture = _get(file, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {architecture!r} is unknown, known are {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, kind: type, default: Any = None) -> Any:
        return _get(file, f"{architecture}.{key}", kind, default)

    if (experts := get("expert_count", int, 0)) > 0:
        raise ModelLoadError(f"{file.path}: {experts} experts are unsupported, expected a dense model")
    hidden, num_heads = get("embedding_length", int), get("attention.head_count", int)
    head_dim = get("attention.key_length", int, hidden // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (width := get(key, int, head_dim)) != head_dim:
            raise ModelLoadError(
                f"{file.path}: key '{architecture}.{key}' is {width}, expected the head width {head_dim}"
            )
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(
            f"{file.path}: tensor 'token_embd.weight' is missing, expected with shape (vocab_size, {hidden})"
        )
    num_layers, max_len = get("block_count", int), get("context_length", int)
    window = get("attention.sliding_window", int, 0)
    try:
        return LlamaConfig(
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=get("attention.head_count_kv", int, num_heads),
            max_model_len=max_len,
            head_dim=head_dim,
            rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
            rope=_rope(file, architecture),
            windows=(window,) * num_layers if 0 < window < max_len else (),
            tie_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            out_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            eos_token_ids=_eos_token_ids(file),
            dtype=dtype,
        )
    except ModelLoadError:
        raise
    except ValueError as error:
        raise ModelLoadError(f"{file.path}: {error}") from error


def tensor_source(file: GGUFFile, config: LlamaConfig) -> TensorSource:
    """The file's tensors in the row order of Hugging Face checkpoints."""
    shapes = {name: info.shape for name, info in file.tensors.items() if name != ROPE_FACTORS}
    interleaved = file.metadata["general.architecture"] == "llama"

    def read(name: str) -> np.ndarray:
        values = file.read(name)
        if interleaved and ".attn_q." in name:
            return _split_halves(values, config.num_heads)
        if interleaved and ".attn_k." in name:
            return _split_halves(values, config.num_kv_heads)
        return values

    return TensorSource(str(file.path), shapes, read, TEMPLATES)


def _split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama files hold each head's rotated pairs as neighbours; the decoder takes first halves, then second halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _rope(file: GGUFFile, architecture: str) -> RopeConfig:
    theta = _get(file, f"{architecture}.rope.freq_base", float, 10000.0)
    kind = _get(file, f"{architecture}.rope.scaling.type", str, "none")
    factor = _get(file, f"{architecture}.rope.scaling.factor", float, 0.0)
    legacy = _get(file, f"{architecture}.rope.scale_linear", float, 0.0)
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"{file.path}: rope type {kind!r} is unsupported, expected none or linear")
    if ROPE_FACTORS in file.tensors:
        return RopeConfig(theta, "factors", factors=tuple(file.read(ROPE_FACTORS).astype(float).ravel().tolist()))
    if kind == "linear" or legacy > 0:
        return RopeConfig(theta, "linear", factor or legacy or 1.0)
    return RopeConfig(theta)


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ends of text, of turn and of message all end an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(_get(file, key, int) for key in keys if key in file.metadata))


def _get(file: GGUFFile, key: str, kind: type, default: Any = None) -> Any:
    """A metadata value of the given kind; without a default an absent key raises ModelLoadError."""
    value = file.metadata.get(key, default)
    if value is None:
        raise ModelLoadError(f"{file.path}: key {key!r} is missing, expected {kind.__name__}")
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # one value a layer, all equal
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelLoadError(f"{file.path}: key {key!r} must be {kind.__name__}, got {value!r:.80}")
    return value
