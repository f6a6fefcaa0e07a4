"""An unknown keyword is answered with the options there are, and with what replaces it."""

import inspect

import pytest

from paged_jax import (
    LLM,
    BeamSearchParams,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    UnknownOptionError,
    generate,
)
from paged_jax.unknown_options import REPLACEMENTS

WITH_OPTIONS = {
    SamplingParams: dict(max_new_tokens="max_tokens", presence_penalty="there is none"),
    BeamSearchParams: dict(num_beams="beam_width", temperature="SamplingParams"),
    EngineConfig: dict(max_model_length="max_model_len", swap_space="there is none"),
    CacheConfig: dict(blok_size="perhaps block_size"),
    LLM: dict(gpu_memory_utilization="num_blocks", tensor_parallel_size="mesh"),
    generate: dict(max_tokens="max_new_tokens", n="num_samples", stop="stop_ids"),
    LLM.generate: dict(max_tokens="max_tokens of SamplingParams", use_tqdm="progress"),
    LLM.chat: dict(add_generation_prompt="there is none"),
    LLM.stream: dict(temperature="a field of SamplingParams"),
}


@pytest.mark.parametrize("target", WITH_OPTIONS, ids=lambda target: target.__qualname__)
def test_an_unknown_option_is_answered_with_those_that_exist(target):
    accepted = [name for name in inspect.signature(target).parameters if name != "self"]
    for name, advice in WITH_OPTIONS[target].items():
        with pytest.raises(UnknownOptionError, match=f"^{name}: {target.__qualname__} ") as error:
            target(**{name: 1})
        message = str(error.value)
        assert advice in message and message.endswith("accepted are " + ", ".join(accepted))
    with pytest.raises(TypeError, match=r"^qqq: .* has no such option; accepted are"):
        target(qqq=1)
    assert "kwargs" not in accepted and target.__doc__


def test_what_there_is_none_of_is_no_option_of_any():
    for name, advice in REPLACEMENTS.items():
        if advice.startswith("there is none"):
            for target in WITH_OPTIONS:
                assert name not in inspect.signature(target).parameters
