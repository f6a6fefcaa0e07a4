"""What `LLM` is given: models, tokenizers, dtypes, and how a model's authors sample from it."""

import json
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from compilations import compilations
from paged_jax import (
    LLM,
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
)
from paged_jax.default_sizes import cache_bytes
from paged_jax.engine.step import init_state
from paged_jax.generation_defaults import sampling_params
from paged_jax.llm_parts import read_parts
from paged_jax.models import ModelLoadError, Tokenizer, load_model
from small_checkpoint import llama
from toy_decoder import ToyDecoder

MODEL = ToyDecoder(max_model_len=40)
GREEDY = SamplingParams(temperature=0)
SIZES = dict(block_size=4, num_blocks=30, max_num_seqs=4, max_num_batched_tokens=16)
OTHER_TOKENIZER = "lacks encode, apply_chat_template, shown, ids_to_bytes; a paged_jax.models.Token"


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("model", [None, 5, b"path", ["a"], LLM], ids=repr)
def test_what_is_no_model_is_refused_and_told_what_is_needed(model):
    with pytest.raises(
        ConfigError, match=r"model=.*: a path, a name, or .* vocab_size, max_model_"
    ):
        LLM(model)


@pytest.mark.usefixtures("no_annotation_checks")
def test_a_module_that_is_no_decoder_is_told_what_it_lacks():
    with pytest.raises(ConfigError, match=r"a Linear is no decoder, it lacks vocab_size, .*logits"):
        LLM(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("tokenizer", [5, "path", Backend(BPE())], ids=["5", "path", "backend"])
def test_what_is_no_tokenizer_is_refused_and_told_what_is_needed(tokenizer, tmp_path):
    for model in (MODEL, llama(tmp_path)):
        with pytest.raises(ConfigError, match=OTHER_TOKENIZER.replace("encode, ", ".*")):
            LLM(model, tokenizer=tokenizer)


def test_a_given_tokenizer_stands_for_one_that_cannot_be_read(tmp_path):
    (llama(tmp_path) / "tokenizer.json").write_text("{}")
    tokenizer = Tokenizer(Backend(BPE()))
    assert LLM(tmp_path, tokenizer=tokenizer, **SIZES).tokenizer is tokenizer


@pytest.mark.parametrize("dtype", ["float16", jnp.float16, np.dtype("float16"), "auto"], ids=repr)
def test_a_checkpoint_of_float16_stays_one_and_so_do_its_pages(dtype, tmp_path):
    llama(tmp_path, lambda arrays: {name: x.astype(np.float16) for name, x in arrays.items()})
    parts = read_parts(tmp_path, None, dtype)
    assert parts.decoder.dtype == "float16"
    assert {x.dtype for x in jax.tree.leaves(parts.load())} == {jnp.dtype("float16")}
    state = init_state(EngineConfig(30, 40, 4, 16), parts.decoder)
    assert {x.dtype for x in jax.tree.leaves(state.cache.kv)} == {jnp.dtype("float16")}


@pytest.mark.parametrize("template", ["{{ 1 + 'a' }}", "{{ x.y }}", "{% if %}", "{{ 1 // 0 }}"])
def test_whatever_a_template_raises_is_an_error_of_the_request(template):
    tokenizer = Tokenizer(Backend(BPE()), chat_template=template)
    llm = LLM(MODEL, tokenizer=tokenizer, **SIZES)
    with pytest.raises(InvalidRequestError, match="messages: the chat template failed"):
        llm.chat([{"role": "user", "content": "hi"}])


ADVISED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({}, {}),
        (ADVISED, ADVISED),
        ({"do_sample": True, **ADVISED}, ADVISED),
        ({"do_sample": False, **ADVISED}, {**ADVISED, "temperature": 0}),
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": None, "top_k": None, "temperature": None}, {}),
        ({"max_new_tokens": 100, "min_new_tokens": 50}, {"max_tokens": 100, "min_tokens": 50}),
        ({"top_k": 0, "top_p": 1}, {}),
        ({"repetition_penalty": 1.0, "num_beams": 1, "max_length": 20, "typical_p": 1.0}, {}),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5.0"}, {}),
    ],
)
def test_parameters_are_those_of_the_generation_config(settings, params, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampling_params(settings) == SamplingParams(**params)


@pytest.mark.parametrize(
    ("settings", "params", "message"),
    [
        (
            {"repetition_penalty": 1.1, "num_beams": 4, "top_k": 5},
            {"top_k": 5},
            r"left out: repetition_penalty=1\.1, num_beams=4",
        ),
        ({"top_p": 1.5, "top_k": 5}, {"top_k": 5}, r"top_p is left out: top_p=1\.5: must be"),
        ({"temperature": "hot"}, {}, "temperature is left out: temperature='hot'"),
        ({"max_new_tokens": 0}, {}, "max_new_tokens is left out: max_tokens=0"),
        ({"min_new_tokens": 99}, {}, "min_new_tokens is left out: min_tokens=99"),
        ({"stop_strings": ["end"]}, {}, "stop_strings"),
    ],
)
def test_what_is_not_served_is_left_out_with_a_warning(settings, params, message):
    with pytest.warns(UserWarning, match=message):
        assert sampling_params(settings) == SamplingParams(**params)


def test_a_model_has_its_default_parameters_and_a_module_ours(tmp_path):
    llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(ADVISED))
    assert LLM(tmp_path, **SIZES).default_sampling_params() == SamplingParams(**ADVISED)
    assert LLM(MODEL, **SIZES).default_sampling_params() == SamplingParams()


def test_params_are_loaded_while_the_program_is_compiled(tmp_path):
    parts = read_parts(llama(tmp_path), None, "auto")
    shapes = {type(x) for x in jax.tree.leaves(nnx.state(parts.decoder))}
    assert shapes == {jax.ShapeDtypeStruct}
    llm = LLM(tmp_path, **SIZES)
    whole = LLM(load_model(tmp_path)[0], **SIZES)
    with compilations() as during:
        expected = llm.generate([[1, 2, 3]], progress=False)
    assert not any("_run" in message for message in during), during
    with compilations() as during:
        outputs = whole.generate([[1, 2, 3]], progress=False)
    assert any("_run" in message for message in during)
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_what_was_compiled_ahead_serves_after_a_reset_and_not_once_beams_have_come(tmp_path):
    llm = LLM(llama(tmp_path), **SIZES)

    def serve(params=GREEDY):
        with compilations() as during:
            outputs = llm.generate([[1, 2, 3]], params, progress=False)
        return outputs[0].outputs[0].token_ids, any("_run" in message for message in during)

    ahead = llm.engine._runner.pick()
    expected = serve()
    llm.engine.reset()
    assert serve() == expected and not expected[1]
    assert llm.engine._runner.pick() is ahead is not None
    _, is_compiled = serve(BeamSearchParams(beam_width=2, max_tokens=2))
    assert is_compiled and llm.engine._runner.pick() is None
    llm.engine.reset()
    assert serve() == expected


def test_params_go_to_the_default_device_of_the_thread_that_asks(tmp_path):
    other = jax.devices()[1]
    with jax.default_device(other):
        llm = LLM(llama(tmp_path), **SIZES)
        outputs = llm.generate([[1, 2, 3]], progress=False)
    places = {tuple(x.devices()) for x in jax.tree.leaves((llm.engine.params, llm.engine.state))}
    assert places == {(other,)} and outputs[0].outputs[0].token_ids


def test_what_loading_raises_is_raised_and_leaves_no_thread(monkeypatch, tmp_path):
    def fail(self):
        raise ModelLoadError("tensor 'a': ends too early")

    monkeypatch.setattr("paged_jax.models.load.OpenModel.read_params", fail)
    before = threading.active_count()
    with pytest.raises(ModelLoadError, match="tensor 'a'"):
        LLM(llama(tmp_path), **SIZES)
    assert threading.active_count() == before


def test_the_cache_of_a_gpu_leaves_room_for_params_that_are_not_loaded_yet(tmp_path, monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 10**6, "bytes_in_use": 0}

    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("jax.devices", lambda: [Device()])
    opened = read_parts(llama(tmp_path), None, "auto").decoder
    loaded, _ = load_model(tmp_path)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded)))
    assert cache_bytes(loaded) == int(10**6 * 0.85)
    assert cache_bytes(opened) == int((10**6 - size) * 0.85)
