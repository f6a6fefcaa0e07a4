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
}


@pytest.mark.parametrize("target", WITH_OPTIONS, ids=lambda target: target.__name__)
def test_an_unknown_option_is_answered_with_those_that_exist(target):
    accepted = [name for name in inspect.signature(target).parameters]
    for name, advice in WITH_OPTIONS[target].items():
        with pytest.raises(UnknownOptionError, match=f"^{name}: {target.__name__} ") as error:
            target(**{name: 1})
        message = str(error.value)
        assert advice in message and message.endswith("accepted are " + ", ".join(accepted))
    with pytest.raises(TypeError, match=r"^qqq: .* has no such option; accepted are"):
        target(qqq=1)
    assert "kwargs" not in accepted and target.__doc__


def test_no_replacement_is_of_a_name_that_every_target_has():
    for name in REPLACEMENTS:
        assert any(name not in inspect.signature(target).parameters for target in WITH_OPTIONS)
