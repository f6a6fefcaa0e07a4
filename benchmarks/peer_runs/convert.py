"""Write the peers' models from one GGUF file; run it with a Python of theirs.

Usage: python convert.py f32 GGUF OUT     a GGUF file of the same values in float32 (needs gguf)
       python convert.py hf GGUF OUT      a Hugging Face directory (needs torch, transformers, gguf)
"""

# pyright: reportMissingImports=false
# It runs in an environment of its own, which the type checker does not have.

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize


def write_f32(source: str, out: str) -> None:
    """Write a GGUF file in float32 with the same values and metadata."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
            continue
        kind = field.types[0]
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, part)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hf(source: str, out: str) -> None:
    """Write a Hugging Face directory with transformers' own reader of GGUF files."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    folder, file = str(Path(source).parent), Path(source).name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    given = read.config
    metadata = gguf.GGUFReader(source).fields
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=given.num_attention_heads,
        num_key_value_heads=given.num_key_value_heads,
        head_dim=given.hidden_size // given.num_attention_heads,
        max_position_embeddings=given.max_position_embeddings,
        rms_norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"].contents()),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(metadata["llama.rope.freq_base"].contents()),
        },
        tie_word_embeddings=True,
        dtype=torch.float32,
        **ends,
    )
    model = LlamaForCausalLM(config).float()
    values = {name: value.detach().float().clone() for name, value in read.state_dict().items()}
    model.load_state_dict(values, strict=True)
    model.tie_weights()
    worst = largest_difference(model, source)
    assert worst == 0, f"a value differs from gguf's own by {worst}"
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)


def largest_difference(model, source: str) -> float:
    """Compare a model's values with what the gguf package makes of the file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    values, config = model.state_dict(), model.config
    worst = 0.0

    def compare(name: str, tensor: str, heads: int = 0) -> None:
        nonlocal worst
        raw = dequantize(tensors[tensor].data, tensors[tensor].tensor_type)
        if heads:  # llama.cpp has the halves of a head's dimensions interleaved
            rows, columns = raw.shape
            raw = raw.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
        difference = values[name].numpy() - raw.reshape(values[name].shape)
        worst = max(worst, float(np.abs(difference).max()))

    compare("model.embed_tokens.weight", "token_embd.weight")
    compare("model.norm.weight", "output_norm.weight")
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        attention = f"{ours}.self_attn"
        compare(f"{attention}.q_proj.weight", f"{theirs}.attn_q.weight", config.num_attention_heads)
        compare(f"{attention}.k_proj.weight", f"{theirs}.attn_k.weight", config.num_key_value_heads)
        compare(f"{attention}.v_proj.weight", f"{theirs}.attn_v.weight")
        compare(f"{attention}.o_proj.weight", f"{theirs}.attn_output.weight")
        for part in ("gate", "up", "down"):
            compare(f"{ours}.mlp.{part}_proj.weight", f"{theirs}.ffn_{part}.weight")
        compare(f"{ours}.input_layernorm.weight", f"{theirs}.attn_norm.weight")
        compare(f"{ours}.post_attention_layernorm.weight", f"{theirs}.ffn_norm.weight")
    return worst


if __name__ == "__main__":
    {"f32": write_f32, "hf": write_hf}[sys.argv[1]](*sys.argv[2:4])
